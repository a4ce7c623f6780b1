"""Scores: exact for a causal model; for a masked one a bound, summed up exactly for short texts, else estimated."""

import itertools
import math
import statistics

import pytest
import torch

from adlm import LM, estimate_nll
from adlm.diffusion.masking import MIN_TIME, ForwardProcess, corrupt
from adlm.diffusion.objectives import training_loss
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear, loss_weight
from tests.text.models import lm, rigged, wrap
from tests.world import random_model

TEXTS = ["the cat", "sat", "on the mat and the dog sat", "é 😀", "  x"]


def exact_nelbo(model: LM, text: str, eps: float = 0.0) -> float:
    """Nats of a text of few tokens: all sets of hidden tokens, and the integral over times from eps by midpoints."""
    layout = model.row_format.build_layout((text,))
    (span,) = layout.spans
    ids, mask = torch.tensor(layout.ids), model.tokenizer.mask_id
    t = eps + (1 - eps) * (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    hidden, weight = 1 - LogLinear(eps).alpha(t), loss_weight(LogLinear(eps), t)
    total = 0.0
    for is_hidden in itertools.product([False, True], repeat=span.end - span.start):
        places = [span.start + i for i, each in enumerate(is_hidden) if each]
        if not places:
            continue
        xt = ids.clone()
        xt[places] = mask
        with torch.no_grad():
            log_probs = model.model.log_probs(xt[None])[1][0].double()
        chance = hidden ** len(places) * (1 - hidden) ** (len(is_hidden) - len(places))
        total -= float((chance * weight).mean()) * sum(
            float(log_probs[place, ids[place]]) for place in places
        )
    return total


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_a_causal_score_is_the_log_likelihood(method: str) -> None:
    """Of all tokens after the one that begins a text."""
    model = lm(method, "bytes")
    for text, score in zip(TEXTS, model.score(TEXTS), strict=True):
        row = torch.tensor([[model.tokenizer.bos_id, *model.tokenizer.encode(text)]])
        with torch.no_grad():
            log_probs = model.model.log_probs(row[:, :-1])[1][0].double()
        nats = -float(log_probs.gather(-1, row[0, 1:, None]).sum())
        tokens = row.shape[1] - 1
        size = len(text.encode())
        assert score.is_exact and score.stderr == 0 and score.tokens == tokens
        assert score.nll == pytest.approx(nats / tokens, rel=1e-5)
        assert score.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
@pytest.mark.parametrize("method", ["mdlm", "adlm"])
def test_the_bound_of_a_short_text_has_no_noise(method: str, rows: str) -> None:
    """What begins and ends the text is given. With one token the bound is the likelihood."""
    model = lm(method, "bytes", rows, scale=1.0)
    for text in ("c", "ca", "cat!", "a cat?"):
        (score,), (other,) = (model.score(text, draws=draws, seed=draws) for draws in (2, 64))
        assert score == other and score.stderr == 0 and score.tokens == len(text)
        assert score.is_exact == (len(text) == 1)
        assert score.nll * len(text) == pytest.approx(exact_nelbo(model, text), rel=1e-5)
        assert score.ppl == pytest.approx(math.exp(score.nll))
        assert score.bits_per_byte == pytest.approx(score.nll / math.log(2))
        from_min_time = exact_nelbo(
            model, text, MIN_TIME
        )  # what validation and `eval ppl` estimate
        assert from_min_time < score.nll * len(text) <= from_min_time * 1.0011


@pytest.mark.parametrize("method", ["mdlm", "adlm"])
def test_the_bound_of_a_longer_text_is_within_its_error(method: str) -> None:
    model, text = lm(method, scale=1.0), "the cats"
    exact, errors = exact_nelbo(model, text) / len(text), {}
    for draws, seeds in ((64, 30), (256, 8)):
        scores = [model.score(text, draws=draws, seed=seed, batch=256)[0] for seed in range(seeds)]
        assert not any(score.is_exact for score in scores)
        assert sum(abs(score.nll - exact) < 1.96 * score.stderr for score in scores) >= 0.85 * seeds
        errors[draws] = statistics.median(score.stderr for score in scores)
        assert abs(statistics.mean(score.nll for score in scores) - exact) < errors[draws] / 2
    assert errors[64] / errors[256] == pytest.approx(2, rel=0.2)


def test_time_conditioning_keeps_draws_at_times() -> None:
    """Its nats depend on the time, so the sets of hidden tokens are not enough; nor is one token's bound exact."""
    model, draws = lm("adlm", time_conditioning=True), 8
    for text in ("x", "the cat"):
        (score,), layout = (
            model.score(text, draws=draws, seed=3),
            model.row_format.build_layout((text,)),
        )
        x0 = torch.tensor([layout.ids]).expand(draws, -1)
        process, rng = ForwardProcess(model.tokenizer.mask_id), CounterRng.from_seed(3, draws)
        (span,) = layout.spans
        is_fixed = (torch.arange(len(layout)) < span.start) | (
            torch.arange(len(layout)) >= span.end
        )
        noisy = corrupt(x0, process, rng, 0, is_fixed=is_fixed.expand(draws, -1))
        with torch.no_grad():
            nats = training_loss(model.model, noisy).row_nll.double()
        assert score.nll * score.tokens == pytest.approx(float(nats.mean()), rel=1e-5)
        assert score.stderr * score.tokens == pytest.approx(
            float(nats.std()) / math.sqrt(draws), rel=1e-4
        )
        assert not score.is_exact


@pytest.mark.parametrize("method", ["mdlm", "adlm", "sedd"])
def test_a_score_is_the_held_out_bound_of_its_row(method: str) -> None:
    """Of a vocabulary without marks, where both ask for the same tokens."""
    model = lm(method, "bare")
    text = "the cat sat"
    ids = torch.tensor([model.tokenizer.encode(text)])
    bound = estimate_nll(
        model.model,
        ids.expand(2000, -1),
        model.objective,
        batch=500,
        draws=2,
        seed=9,
    )
    (score,) = model.score(text, draws=4000, batch=500)
    assert score.tokens == ids.shape[1]
    assert (
        abs(score.nll - bound.nll) < 4 * math.hypot(score.stderr, bound.stderr) + 0.001 * score.nll
    )
    assert not score.is_exact
    assert score.bits_per_byte == pytest.approx(score.nll * score.tokens / math.log(2) / len(text))


@pytest.mark.parametrize("method", ["adlm", "ar", "sedd"])
def test_a_score_does_not_depend_on_other_texts_batch_or_padding(method: str) -> None:
    model = lm(method, "bytes", "documents")
    whole = model.score(TEXTS, draws=16)
    assert len(whole) == len(TEXTS)
    for batch in (1, 7, 1000):
        for one, other in zip(whole, model.score(TEXTS, draws=16, batch=batch), strict=True):
            assert other.nll == pytest.approx(one.nll, rel=1e-5) and other.stderr == pytest.approx(
                one.stderr, rel=1e-4
            )
    for text, one in zip(TEXTS, whole, strict=True):
        (alone,) = model.score(text, draws=16)
        assert alone.nll == pytest.approx(one.nll, rel=1e-5)
        assert alone.tokens == one.tokens == len(text.encode())
    if method != "ar":
        one, other = (model.score(TEXTS[0], draws=16, seed=seed)[0].nll for seed in (0, 1))
        assert one != pytest.approx(other, rel=1e-5)


def test_a_score_is_without_dropout() -> None:
    model = random_model(
        "mdlm", vocab_size=258, mask_id=257, dim=16, length=64, dropout=0.5
    ).train()
    noisy = wrap(model, method="mdlm")
    assert noisy.score("the cat", draws=8) == noisy.score("the cat", draws=8)


def test_a_likelier_text_scores_better() -> None:
    likely, unlikely = rigged("mdlm", {ord("a"): 9.0}, scale=0.2).score(["aaaa", "abab"])
    assert likely.nll < 0.5 < 3 < unlikely.nll
