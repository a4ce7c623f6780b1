"""Draws are exact in float64, nuclei are those worked by hand, random numbers are the published."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.laws import adapter
from tests.laws.adapter import Draw
from tests.laws.world import filter_probs

FULL = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


def random_logits(rows: int, vocab: int, spread: float, seed: int = 0) -> Tensor:
    """Return logits (N, V)."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_random_words_are_the_published_ones(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert adapter.random_words(counter, key) == list(answer)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}]
)
@pytest.mark.parametrize("nucleus", ["usual", "lineage"])
def test_without_choice_the_likeliest_is_drawn(settings: dict[str, Any], nucleus: str) -> None:
    logits = random_logits(300, 30, 2.0)
    u = torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, probs = adapter.draw_tokens(logits, u, Draw(**settings, nucleus=nucleus))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(probs, torch.ones(300, dtype=torch.float64))


@pytest.mark.parametrize(
    ("draw", "kept"),
    [
        # The token that crosses p is in; in the lineage's nucleus it is out, but for the first.
        (Draw(top_p=0.75), [5 / 8, 3 / 8, 0, 0]),
        (Draw(top_p=0.75, nucleus="lineage"), [1, 0, 0, 0]),
        (Draw(top_p=0.85), [50 / 95, 30 / 95, 15 / 95, 0]),
        (Draw(top_p=0.85, nucleus="lineage"), [5 / 8, 3 / 8, 0, 0]),
        (Draw(top_p=0.3), [1, 0, 0, 0]),
        (Draw(top_p=0.3, nucleus="lineage"), [1, 0, 0, 0]),
        (Draw(top_p=0.999), [0.5, 0.3, 0.15, 0.05]),
        (Draw(top_p=1.0, nucleus="lineage"), [0.5, 0.3, 0.15, 0.05]),
        (Draw(top_k=1), [1, 0, 0, 0]),
        (Draw(top_k=2), [5 / 8, 3 / 8, 0, 0]),
        (Draw(top_k=3), [50 / 95, 30 / 95, 15 / 95, 0]),
        (Draw(top_k=3, top_p=0.8), [5 / 8, 3 / 8, 0, 0]),
        (Draw(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
)
def test_laws_by_hand(draw: Draw, kept: list[float]) -> None:
    """Equally spaced numbers give every token its share to within one number, in any order."""
    n = 20_000
    order = torch.tensor([2, 0, 3, 1])
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[order]
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, probs = adapter.draw_tokens(logits.expand(n, -1), u, draw)
    share = torch.bincount(tokens, minlength=4).double() / n
    expected = torch.tensor(kept, dtype=torch.float64)[order]
    torch.testing.assert_close(share, expected, atol=1.5 / n, rtol=0)
    torch.testing.assert_close(probs, expected[tokens], atol=1e-6, rtol=1e-5)


DRAWS = [
    Draw(),
    Draw(temperature=0.7),
    Draw(top_p=0.9),
    Draw(top_k=5),
    Draw(top_p=0.5, nucleus="lineage"),
    Draw(top_k=5, top_p=0.8),
    Draw(1.7, 17, 0.95, "lineage"),
    Draw(top_k=100, top_p=0.8),
]


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_inverts_its_distribution(draw: Draw, spread: float) -> None:
    logits, n = random_logits(1, 12, spread, seed=3), 20_000
    logits[:, 11] = -torch.inf
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, probs = adapter.draw_tokens(logits.expand(n, -1), u, draw)
    expected = filter_probs(logits[0].double().softmax(-1), draw)
    share = torch.bincount(tokens, minlength=12).double() / n
    torch.testing.assert_close(share, expected, atol=1.5 / n, rtol=0)
    torch.testing.assert_close(probs, expected[tokens], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("draw", [Draw(top_p=0.9), Draw(top_p=0.999), Draw(top_p=0.9, top_k=3000)])
def test_a_nucleus_wider_than_thousands_of_tokens_is_whole(draw: Draw) -> None:
    """In a flat vocabulary of 20,000 the nucleus holds most tokens, and each has its chance."""
    logits = random_logits(1, 20_000, 0.05)
    u = torch.rand(80, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, probs = adapter.draw_tokens(logits.expand(80, -1), u, draw)
    law = filter_probs(logits[0].double().softmax(-1), draw)
    torch.testing.assert_close(probs, law[tokens], atol=0, rtol=1e-5)


def test_equally_likely_tokens_share_their_fate() -> None:
    logits, n = torch.tensor([1.0, 1.0, 1.0, 0.0]), 3000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, _ = adapter.draw_tokens(logits.expand(n, -1), u, Draw(top_p=0.3))
    assert torch.bincount(tokens, minlength=4).tolist() == [1000, 1000, 1000, 0]


@pytest.mark.parametrize("draw", [Draw(), Draw(temperature=1 + 1e-9), Draw(top_k=3)])
@pytest.mark.parametrize("shift", [0.0, 30.0, 300.0])
def test_rare_tokens_are_reachable(draw: Draw, shift: float) -> None:
    """A token of probability 1e-9 has its share of the numbers, however large the logits are."""
    logits = torch.tensor([[math.log(0.5), math.log(0.5), math.log(1e-9), -torch.inf]]) + shift
    u = torch.tensor([1 - 2**-53, 1 - 4e-10, 1 - 3e-9], dtype=torch.float64)
    tokens, _ = adapter.draw_tokens(logits.expand(3, -1), u, draw)
    assert tokens[:2].tolist() == [2, 2]
    assert tokens[2] != 2


def test_impossible_tokens_are_never_drawn() -> None:
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    logits = torch.tensor([[-torch.inf, 0.3, -0.2, -torch.inf]]).expand(2, -1)
    for draw in DRAWS:
        assert set(adapter.draw_tokens(logits, u, draw)[0].tolist()) <= {1, 2}


def test_rounding_hardly_ever_changes_a_draw() -> None:
    """Noise like that of another batch size changes in proportion to it."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 3000, generator=rng)
    u = torch.rand(1000, generator=rng, dtype=torch.float64)
    nudged = logits + 1e-5 * torch.randn(logits.shape, generator=rng)
    for draw in (Draw(top_p=0.9), Draw(top_k=2000), Draw()):
        one, other = (adapter.draw_tokens(each, u, draw)[0] for each in (logits, nudged))
        assert int((one != other).sum()) <= 5
