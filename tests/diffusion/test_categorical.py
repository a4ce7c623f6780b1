"""Draws: exact in float64, the same with and without a full sort, nuclei worked by hand."""

import math

import pytest
import torch

from adlm.diffusion import categorical
from adlm.diffusion.categorical import SamplingParams, draw
from adlm.models.language_model import NEG_INF
from tests.world import compute_probs, filter_probs


def random_logits(rows, vocab, spread, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def numbers(rows, seed=1):
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}]
)
@pytest.mark.parametrize("nucleus", ["usual", "lineage"])
def test_no_choice_is_argmax(settings, nucleus):
    logits = random_logits(500, 30, 2.0)
    drawn = draw(logits, numbers(500), SamplingParams(**settings, nucleus=nucleus))
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    assert torch.equal(drawn.probs, torch.ones(500, dtype=torch.float64))


@pytest.mark.parametrize(
    ("top_p", "nucleus", "kept"),
    [
        (0.75, "usual", [5 / 8, 3 / 8, 0, 0]),  # the token that crosses p is in
        (0.75, "lineage", [1, 0, 0, 0]),  # and here it is out
        (0.85, "usual", [50 / 95, 30 / 95, 15 / 95, 0]),
        (0.85, "lineage", [5 / 8, 3 / 8, 0, 0]),
        (0.3, "usual", [1, 0, 0, 0]),
        (0.3, "lineage", [1, 0, 0, 0]),  # the first is always in
        (0.999, "usual", [0.5, 0.3, 0.15, 0.05]),
        (1.0, "lineage", [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_nuclei_by_hand(top_p, nucleus, kept):
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    order = torch.tensor([2, 0, 3, 1])  # the law does not depend on where the tokens stand
    found = compute_probs(probs.log()[:, order], SamplingParams(top_p=top_p, nucleus=nucleus))
    expected = torch.tensor([kept], dtype=torch.float64)[:, order]
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(min_p=0.2), [50 / 95, 30 / 95, 15 / 95, 0]),
        (SamplingParams(min_p=0.5), [5 / 8, 3 / 8, 0, 0]),
        (SamplingParams(min_p=1.0), [1, 0, 0, 0]),
        (SamplingParams(min_p=0.01), [0.5, 0.3, 0.15, 0.05]),
        (SamplingParams(min_p=0.2, temperature=0.5), [25 / 34, 9 / 34, 0, 0]),  # after it
        (SamplingParams(min_p=0.2, top_p=0.7), [5 / 8, 3 / 8, 0, 0]),
        (SamplingParams(min_p=0.5, top_p=0.6), [1, 0, 0, 0]),  # a share of what is left
        (SamplingParams(min_p=0.5, top_k=3), [5 / 8, 3 / 8, 0, 0]),
    ],
)
def test_least_probabilities_by_hand(sampling, kept):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).log()[[2, 0, 4, 3, 1]]
    expected = torch.tensor([*kept, 0.0], dtype=torch.float64)[[2, 0, 4, 3, 1]]
    for shift in (0.0, 40.0):
        found = compute_probs((logits + shift)[None], sampling)[0]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    both = compute_probs(torch.tensor([[1.0, 1.0, 0.0]]), SamplingParams(min_p=1.0))
    assert both.tolist() == [[0.5, 0.5, 0.0]]


def test_equally_likely_tokens_share_their_fate():
    probs = compute_probs(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), SamplingParams(top_p=0.3))
    torch.testing.assert_close(probs, torch.tensor([[1, 1, 1, 0]]).double() / 3)


SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=5),
]
SETTINGS += [SamplingParams(top_p=0.5, nucleus="lineage"), SamplingParams(top_k=5, top_p=0.8)]
SETTINGS += [SamplingParams(min_p=0.1), SamplingParams(top_k=5, top_p=0.8, min_p=0.3)]
SETTINGS += [SamplingParams(top_p=0.9, min_p=0.05)]
SETTINGS += [SamplingParams(1.7, 17, 0.95, nucleus="lineage"), SamplingParams(top_k=100, top_p=0.8)]


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_partial_selection_is_the_full_sort(sampling, spread, monkeypatch):
    """Nuclei wider than the first and the second selection fall back to more: the same tokens, the same chances."""
    logits, u = random_logits(300, 40, spread), numbers(300)
    monkeypatch.setattr(categorical, "CANDIDATE_SIZES", (40,))
    whole = draw(logits, u, sampling)
    monkeypatch.setattr(categorical, "CANDIDATE_SIZES", (2, 4))
    sizes, candidates = [], categorical.find_candidates

    def spy(logits, sampling, size):
        sizes.append(size)
        return candidates(logits, sampling, size)

    monkeypatch.setattr(categorical, "find_candidates", spy)
    part = draw(logits, u, sampling)
    assert torch.equal(part.tokens, whole.tokens)
    torch.testing.assert_close(part.probs, whole.probs, atol=1e-12, rtol=1e-9)
    if sampling.top_k is None and sampling.top_p < 1 and spread < 1:
        assert sizes == [2, 4, 40]


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_law_is_the_one_written_down(sampling, spread):
    logits = random_logits(40, 12, spread, seed=2)
    logits[:, 11] = -torch.inf
    found = compute_probs(logits, sampling)
    for row, probs in zip(found, logits.double().softmax(-1), strict=True):
        torch.testing.assert_close(row, filter_probs(probs, sampling), atol=1e-6, rtol=1e-5)
    assert (found[:, 11] == 0).all()


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_draw_inverts_its_distribution(sampling):
    """Equally spaced numbers u give every token its share to within one number, and each its own probability."""
    logits, n = random_logits(1, 12, 1.5, seed=3), 20_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    drawn = draw(logits.expand(n, -1), u, sampling)
    law = compute_probs(logits, sampling)[0]
    share = torch.bincount(drawn.tokens, minlength=12).double() / n
    torch.testing.assert_close(share, law, atol=1.5 / n, rtol=0)
    torch.testing.assert_close(drawn.probs, law[drawn.tokens], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1 + 1e-9}, {"top_k": 3}, {"top_k": 3, "nucleus": "lineage"}]
)
@pytest.mark.parametrize("shift", [0.0, 30.0, 300.0])
def test_rare_tokens_are_reachable(settings, shift):
    """Draws are float64: a token of probability 1e-9 has its share of the numbers, however large the logits are."""
    logits = torch.tensor([[math.log(0.5), math.log(0.5), math.log(1e-9), -torch.inf]]) + shift
    u = torch.tensor([1 - 2**-53, 1 - 4e-10, 1 - 3e-9], dtype=torch.float64)
    tokens = draw(logits.expand(3, -1), u, SamplingParams(**settings)).tokens
    assert tokens[:2].tolist() == [2, 2]
    assert tokens[2] != 2


def test_impossible_tokens_are_never_drawn():
    """At both ends of the unit interval, with -inf and with the finite stand-in."""
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for never in (-torch.inf, NEG_INF):
        logits = torch.tensor([[never, 0.3, -0.2, never]]).expand(2, -1)
        for sampling in SETTINGS:
            tokens = draw(logits, u, sampling).tokens.tolist()
            assert set(tokens) <= {1, 2}, sampling


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature=.*: expected a number at least 0"),
        ({"temperature": float("nan")}, "temperature=.*: expected a number at least 0"),
        ({"top_p": 0.0}, "top_p=.*: expected a number above 0 and at most 1; .*1.0"),
        ({"top_p": 1.1}, "top_p=.*: expected a number above 0 and at most 1; .*1.0"),
        ({"min_p": -0.1}, "min_p=.*: expected a number at least 0 and at most 1"),
        ({"min_p": 1.1}, "min_p=.*: expected a number at least 0 and at most 1"),
        ({"top_k": 0}, "top_k=0: expected a whole number above 0"),
        ({"nucleus": "top"}, "nucleus='top': expected one of usual, lineage"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)
