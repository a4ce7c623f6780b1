"""Likelihood under an unmasking order, on a world that can be counted and against the sampler that decodes so."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.data.batches import TensorRows, is_valid
from adlm.diffusion.samplers import confidence, entropy_bounded, first_hitting, margin
from adlm.diffusion.sampling import Sampler
from adlm.likelihood import ORDERS, SCORES, estimate_nll
from adlm.models.language_model import LanguageModel
from tests.world import TinyWorld, exact_law, random_model

WORLDS = {
    2: TinyWorld(random_model(seed=39, length=2)),
    3: TinyWorld(random_model(seed=113, positions="learned")),
}
DETERMINISTIC = [name for name in ORDERS if name != "random"]


def texts(world: TinyWorld) -> Tensor:
    return world.states[world.texts]


def nats(model: LanguageModel, rows: Tensor | TensorRows, order: str, **options: Any) -> Tensor:
    return estimate_nll(model, rows, order=order, **options).row_nats


@pytest.mark.parametrize("length", WORLDS)
def test_every_deterministic_order_is_a_distribution_over_texts(length: int) -> None:
    world = WORLDS[length]
    found = [nats(world.model, texts(world), order) for order in DETERMINISTIC]
    for each in found:
        assert float((-each).exp().sum()) == pytest.approx(1, abs=1e-5)
    if length == 3:  # and they are different ones
        assert max(float((a - b).abs().max()) for a, b in itertools.combinations(found, 2)) > 0.1


SAMPLERS: list[tuple[Sampler, int | None, str]] = [  # sampler, block, order
    *((make(3), None, make(1).name) for make in (confidence, margin)),
    (entropy_bounded(0.0), None, "entropy"),
    (confidence(1), 1, "left_to_right"),
]


@pytest.mark.parametrize(("sampler", "block", "order"), SAMPLERS)
def test_it_is_the_law_of_the_sampler(sampler: Sampler, block: int | None, order: str) -> None:
    world = WORLDS[3]
    law = exact_law(world, sampler, block=block)[world.texts]
    torch.testing.assert_close(
        (-nats(world.model, texts(world), order)).exp(), law, atol=1e-6, rtol=1e-5
    )


def nats_of_permutations(world: TinyWorld) -> Tensor:
    """−log p of every text under every permutation, as the product of its conditionals."""
    log_probs, (count, length) = world.log_probs()[1], texts(world).shape
    found = torch.zeros(math.factorial(length), count)
    for each, order in zip(found, itertools.permutations(range(length)), strict=True):
        for number, x0 in enumerate(texts(world)):
            xt = world.start()
            for position in order:
                each[number] -= log_probs[world.number(xt), position, x0[position]]
                xt[position] = x0[position]
    return found


@pytest.mark.parametrize("length", WORLDS)
def test_a_random_order_is_a_bound_from_above(length: int) -> None:
    """Its expectation is the mean over permutations, above −log of the mixture, the law of first-hitting."""
    world = WORLDS[length]
    model, rows = world.model, texts(world)
    each = nats_of_permutations(world)
    torch.testing.assert_close(
        nats(model, rows, "left_to_right"), each[0].double(), rtol=1e-5, atol=0
    )
    expected, mixture = each.mean(0), -exact_law(world, first_hitting())[world.texts].log()
    assert (expected >= mixture - 1e-5).all() and float((expected - mixture).max()) > 1e-3
    bound = estimate_nll(model, rows, order="random", draws=100, batch=1000)
    assert bound.noise_stderr is not None and 0 < bound.noise_stderr < 0.05 and bound.draws == 100
    assert abs(bound.nll - float(expected.mean()) / length) < 4 * bound.noise_stderr
    assert bound.nll > float(mixture.mean()) / length
    assert (
        estimate_nll(model, rows, order="random", seed=1).nll
        != estimate_nll(model, rows, order="random").nll
    )


def test_the_error_from_noise_is_the_spread_over_permutations() -> None:
    world = WORLDS[3]
    bounds = [
        estimate_nll(world.model, texts(world), order="random", draws=8, seed=seed)
        for seed in range(40)
    ]
    spread = float(torch.tensor([bound.nll for bound in bounds]).std())
    assert sum(bound.noise_stderr or 0 for bound in bounds) / 40 == pytest.approx(spread, rel=0.3)
    assert estimate_nll(world.model, texts(world), order="random").noise_stderr is None
    exact = estimate_nll(world.model, texts(world), order="confidence", draws=5)
    assert exact.noise_stderr == 0 and exact.draws == 1


MODEL = random_model("adlm", vocab_size=20, mask_id=19, dim=16, length=12, scale=0.7)
LENGTHS = torch.arange(9) % 6 + 3
ROWS = torch.randint(2, 19, (9, 12), generator=torch.Generator().manual_seed(0))
ROWS[:, 0] = 0
ROWS[torch.arange(9), LENGTHS - 1] = 1


def padded(filler: int = 0) -> TensorRows:
    return TensorRows(torch.where(is_valid(LENGTHS, 12), ROWS, filler), LENGTHS)


@pytest.mark.parametrize("order", ORDERS)
def test_batch_padding_and_neighbours_change_nothing(order: str) -> None:
    """A row of fewer tokens takes fewer steps, and the same ones as alone."""
    whole = nats(MODEL, padded(), order)
    for batch in (1, 7, 32):
        found = nats(MODEL, padded(7), order, batch=batch)
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=0)
    if order != "random":
        for row, length, expected in zip(ROWS, LENGTHS.tolist(), whole.tolist(), strict=True):
            alone = nats(MODEL, row[:length].expand(2, -1), order)[0]
            assert float(alone) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_marks_are_given_and_not_counted(order: str) -> None:
    bound, everything = (
        estimate_nll(MODEL, padded(), order=order, given_tokens=given) for given in ((0, 1), ())
    )
    assert bound.tokens == int((LENGTHS - 2).sum()) and everything.tokens == int(LENGTHS.sum())
    assert bound.nll * bound.tokens < everything.nll * everything.tokens


def test_rows_of_marks_alone_cost_nothing() -> None:
    rows = torch.tensor([[0, 5, 1], [0, 1, 1], [0, 1, 1], [0, 6, 1]])
    for order in ORDERS:
        one, four = (nats(MODEL, rows, order, batch=batch, given_tokens=(0, 1)) for batch in (1, 4))
        assert (one > 0).tolist() == [True, False, False, True]
        torch.testing.assert_close(one, four)


def test_the_first_score_wins_and_ties_go_to_the_left() -> None:
    """A model that is equally sure everywhere decodes from left to right."""
    model = LanguageModel(MODEL.config)  # its head is zero
    with torch.no_grad():
        model.head.bias.copy_(torch.linspace(0, 1, 20))
    for order in SCORES:
        assert torch.equal(nats(model, padded(), order), nats(model, padded(), order, batch=2))
        torch.testing.assert_close(
            nats(model, padded(), order), nats(model, padded(), "left_to_right")
        )


def test_time_is_the_masked_share() -> None:
    world = TinyWorld(random_model("mdlm", seed=5, time_conditioning=True))
    for order in DETERMINISTIC:
        assert float((-nats(world.model, texts(world), order)).exp().sum()) == pytest.approx(
            1, abs=1e-5
        )


def test_a_random_order_is_the_nelbo_in_expectation() -> None:
    """Of a model without time conditioning, with less noise."""
    rows = ROWS[:, :6].repeat(40, 1)
    random = estimate_nll(MODEL, rows, order="random", draws=4, batch=2000)
    bound = estimate_nll(MODEL, rows, batch=1000, draws=24)  # as many evaluations
    assert random.noise_stderr is not None and bound.noise_stderr is not None
    assert abs(random.nll - bound.nll) < 4 * math.hypot(random.noise_stderr, bound.noise_stderr)
    assert random.noise_stderr < bound.noise_stderr


def test_mistakes() -> None:
    with pytest.raises(
        ValueError, match="unknown order 'sideways': expected one of left_to_right, confidence"
    ):
        estimate_nll(MODEL, ROWS, order="sideways")
    with pytest.raises(ValueError, match="exact already"):
        estimate_nll(random_model("ar"), ROWS, order="confidence")
