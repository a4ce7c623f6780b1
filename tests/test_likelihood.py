"""The nll of rows: exact where it can be, the same for any batch and number of ranks, without the anchor term."""

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.data.batches import TensorRows, is_valid
from adlm.diffusion.features import FeatureModel
from adlm.diffusion.masking import ForwardProcess, NoisyBatch, collect_batch, stratify_times
from adlm.diffusion.objectives import (
    Loss,
    MaskedDiffusion,
    ScoreEntropy,
    token_nll,
    training_loss,
)
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.samplers import first_hitting
from adlm.diffusion.schedules import SCHEDULES, LogLinear, loss_weight, missing_share, noise_level
from adlm.diffusion.selected import selected_loss
from adlm.likelihood import (
    MAX_ENUMERATED,
    NllEstimate,
    choose_hidden_sets,
    draw_position,
    estimate_nll,
    noise_variance,
    stratified_stderr,
    summarize_rows,
    unigram_nll,
)
from adlm.models.language_model import LanguageModel
from adlm.models.methods import METHODS, build_config
from tests.goldens import MASK, arrays
from tests.goldens import model as golden_model
from tests.world import TinyWorld, exact_law, random_model

VOCAB = 50
GIVEN = (0, 1)
ROWS = torch.randint(VOCAB - 1, (40, 16), generator=torch.Generator().manual_seed(0))


def assert_close(estimate: NllEstimate, expected: NllEstimate, rel: float = 1e-5) -> None:
    for name in ("nll", "stderr", "tokens", "noise_stderr", "draws"):
        assert getattr(estimate, name) == pytest.approx(getattr(expected, name), rel=rel)


def tiny(method: str, scale: float = 0.3) -> LanguageModel:
    """A model that predicts something; with a scale of 0 an untrained one."""
    layers = (
        {"anchor_layers": 1, "denoiser_layers": 1}
        if METHODS[method].two_stages
        else {"denoiser_layers": 1}
    )
    config = build_config(
        method, "nano", vocab_size=VOCAB, mask_id=VOCAB - 1, dim=16, heads=2, length=16, **layers
    )
    model, rng = LanguageModel(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=rng))
    return model


def padded(filler: int = 0) -> TensorRows:
    """Rows of 2 to 16 tokens, with fillers behind them."""
    lengths = torch.arange(40) % 15 + 2
    return TensorRows(torch.where(is_valid(lengths, 16), ROWS, filler), lengths)


@pytest.mark.parametrize("method", ["ar", "a2r", "mdlm", "adlm"])
def test_an_untrained_model_is_uniform(method: str) -> None:
    bound, is_causal = estimate_nll(tiny(method, 0), ROWS, draws=64), METHODS[method].is_causal
    assert bound.tokens == 40 * (16 - is_causal) and bound.ppl == pytest.approx(math.exp(bound.nll))
    assert bound.stderr < (1e-6 if is_causal else 0.2)
    assert abs(bound.nll - math.log(VOCAB - 1)) < 4 * bound.stderr + 1e-5


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("method", ["mdlm", "sedd"])
def test_a_schedules_bound_says_what_it_lacks(name: str, method: str) -> None:
    """Of a uniform prediction it is (alpha(0) - alpha(1)) log(V - 1), whatever the schedule."""
    kind = MaskedDiffusion if method == "mdlm" else ScoreEntropy
    objective = kind(ForwardProcess(VOCAB - 1, schedule=SCHEDULES[name]()))
    rows = ROWS.repeat(8, 1)
    bound = estimate_nll(tiny(method, 0), rows, objective, draws=64, batch=320)
    expected = (1 - bound.missing) * math.log(VOCAB - 1)
    assert abs(bound.nll - expected) < 4 * (bound.noise_stderr or 0) < 0.04 * expected
    assert 0 < bound.missing < 0.01
    lacks_much = missing_share(objective.process.schedule) > 0.01
    assert lacks_much == (name == "geometric") == ("log-linearly" in bound.note)


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = tiny("adlm").train()
    assert estimate_nll(model, ROWS, max_rows=10) == estimate_nll(model, ROWS[:10])
    assert estimate_nll(model, ROWS, max_rows=1000) == estimate_nll(model, ROWS)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert estimate_nll(model, ROWS, seed=1).nll != pytest.approx(
        estimate_nll(model, ROWS).nll, rel=1e-5
    )


@pytest.mark.parametrize(
    ("method", "rows", "options", "message"),
    [
        ("mdlm", ROWS[:1], {}, "more than 1 rows"),
        ("ar", ROWS, {"documents": torch.zeros(40, dtype=torch.int64)}, "more than 1 documents"),
        ("mdlm", ROWS, {"draws": 0}, "draws and batch must be at least 1, got 0 and 32"),
        (
            "mdlm",
            torch.zeros(4, 5, dtype=torch.int64),
            {"given_tokens": (0,)},
            "counted tokens in 2 of 4 units, got 0",
        ),
    ],
)
def test_mistakes(method: str, rows: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_nll(tiny(method), rows, **options)


def test_bits_per_byte_and_the_unigram_baseline() -> None:
    assert NllEstimate(2.0, 0.1, 30).bits_per_byte(100) == pytest.approx(60 / math.log(2) / 100)
    counts, tokens = torch.tensor([2, 1, 0]), torch.tensor([[0, 1], [2, 2]])
    nats = [-math.log(3 / 6), -math.log(2 / 6), -math.log(1 / 6)]  # one is added to each count
    assert unigram_nll(counts, tokens) == pytest.approx((sum(nats) + nats[2]) / 4)
    assert unigram_nll(
        counts, tokens, torch.tensor([[True, True], [True, False]])
    ) == pytest.approx(sum(nats) / 3)


@pytest.mark.parametrize("method", ["mdlm", "adlm", "ar", "a2r"])
def test_padding_is_neither_read_nor_counted(method: str) -> None:
    model = tiny(method)
    bound = estimate_nll(model, padded(), draws=2)
    assert bound == estimate_nll(model, padded(filler=7), draws=2)
    is_causal = METHODS[method].is_causal
    assert bound.tokens == sum(n % 15 + 2 - is_causal for n in range(40))
    assert_close(estimate_nll(model, padded(), draws=2, batch=7), bound)
    if method == "a2r":  # exact, so every row can be measured by itself, without padding
        rows = zip(ROWS, range(40))
        alone = [
            estimate_nll(model, row[: n % 15 + 2].expand(2, -1)).row_nats[0] for row, n in rows
        ]
        assert bound.nll == pytest.approx(float(sum(alone)) / bound.tokens, rel=1e-5)


@pytest.mark.parametrize("method", ["adlm", "ar"])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_number_of_processes_changes_nothing(method: str, size: int) -> None:
    """Each calls the network as often as the others, even where no batch is left for it."""
    model, calls, everyone = tiny(method).eval(), [0] * size, Barrier(size)
    sent: dict[int, Tensor] = {}

    def shared(rank_of_this: int) -> NllEstimate:
        def evaluate(run: Callable[[FeatureModel], Tensor]) -> Tensor:
            calls[rank_of_this] += 1
            return run(model)

        class Ranks:
            rank, world_size = rank_of_this, size

            def all_reduce_sum(self, values: Tensor) -> Tensor:
                sent[self.rank] = values.clone()
                everyone.wait()
                added = torch.stack([sent[other] for other in range(size)]).sum(0)
                everyone.wait()
                return added

        return estimate_nll(
            model, padded(), batch=9, draws=2, ranks=Ranks(), evaluate=evaluate, given_tokens=GIVEN
        )

    whole = estimate_nll(model, padded(), batch=9, draws=2, given_tokens=GIVEN)  # five pieces
    with ThreadPoolExecutor(size) as pool:
        for bound in pool.map(shared, range(size)):
            assert_close(bound, whole, rel=1e-6)
    assert len(set(calls)) == 1


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_one_draw_is_that_of_earlier_versions(method: str) -> None:
    """The numbers are of the version before draws were spread."""
    bound = estimate_nll(tiny(method), ROWS)
    expected = {
        "adlm": (29.459060406684877, 3.162097461106151, 640),
        "ar": (4.676235535939535, 0.054104946070015, 600),
    }
    assert (bound.nll, bound.stderr, bound.tokens) == pytest.approx(expected[method], rel=1e-6)
    assert bound.draws == 1 and bound.noise_stderr == (
        None if method == "adlm" else 0
    )  # unknown, and none


UNUSED = tiny("mdlm", 0)


@dataclass(frozen=True)
class CostObjective(MaskedDiffusion):
    """Rows cost what a function says, whatever the network does."""

    compute_cost: Callable[[NoisyBatch], Tensor] = lambda noisy: noisy.t

    def bound(self, model: FeatureModel, batch: NoisyBatch) -> Loss:
        cost, zero = self.compute_cost(batch), torch.zeros(())
        return Loss(zero, zero, zero, cost, torch.zeros(len(cost)))


def estimate_cost(rows: Tensor, cost: Callable[[NoisyBatch], Tensor], **options: int) -> float:
    objective = CostObjective(ForwardProcess(VOCAB - 1), cost)
    return estimate_nll(UNUSED, rows, objective, **options).nll


def times(draws: int, count: int = 40, batch: int = 40, seed: int = 0) -> Tensor:
    found: list[Tensor] = []

    def draw_cost(noisy: NoisyBatch) -> Tensor:
        found.append(noisy.t.double())
        return torch.rand(len(noisy.t))

    estimate_cost(ROWS[:count], draw_cost, batch=batch, draws=draws, seed=seed)
    return torch.cat([torch.stack(found[at : at + draws], 1) for at in range(0, len(found), draws)])


@pytest.mark.parametrize("draws", [2, 5, 8])
def test_times_are_even_over_draws_and_over_rows(draws: int) -> None:
    whole = times(draws)
    torch.testing.assert_close(times(draws, batch=7), whole)
    gaps = whole.sort(1).values.diff(dim=1)
    assert gaps.min() > 1 / draws - 1 / 40 - 1e-3 and gaps.max() < 1 / draws + 1 / 40 + 1e-3
    # No part of the unit interval has more than its share, but for a time or two at its ends.
    counts = torch.histc(whole.flatten(), bins=10, min=0, max=1)
    assert (counts - 4 * draws).abs().max() <= draws


def test_one_draw_has_the_lineages_time() -> None:
    first = stratify_times(CounterRng.from_seed(0, 40).uniform(0, 1, Purpose.TIME)[:, 0])
    torch.testing.assert_close(times(1)[:, 0], first.float().double())
    many = torch.tensor([2**24, 2**24 + 1])  # beyond float32
    assert float(draw_position(many, 2**25, 1, 4, 0).diff()) == 1


@pytest.mark.parametrize("is_early", [True, False])
def test_rows_that_cost_differently_do_not_bias_the_bound(is_early: bool) -> None:
    """Half of the rows cost their masked share, half cost nothing: a quarter, whichever rows they are.

    A row that were at the same times for every seed would bias the mean over seeds.
    """

    def half(noisy: NoisyBatch) -> Tensor:
        return noisy.t * (noisy.x0[:, 0] == 1) * noisy.x0.shape[1]

    rows = (torch.arange(8) % 2 == (0 if is_early else 1)).long()[:, None].expand(8, 4)  # in turn
    seeds = 150
    nlls = torch.tensor([estimate_cost(rows, half, draws=2, seed=i) for i in range(seeds)])
    assert abs(float(nlls.mean()) - 0.25) < 4 * float(nlls.std()) / math.sqrt(seeds) + 1e-3 < 0.03


@pytest.mark.parametrize("draws", [4, 8])
def test_the_error_from_noise_is_the_spread_over_seeds(draws: int) -> None:
    model = tiny("adlm")
    bounds = [
        estimate_nll(model, ROWS[:20], batch=20, draws=draws, seed=seed) for seed in range(40)
    ]
    spread = float(torch.tensor([bound.nll for bound in bounds]).std())
    squares = torch.tensor([bound.noise_stderr or 0.0 for bound in bounds]).square()
    assert 0.7 * spread < float(squares.mean().sqrt()) < 1.4 * spread


def test_rows_of_one_document_are_one_unit() -> None:
    """Two copies of every row say nothing new: the error over documents knows, the error over rows does not."""
    model = tiny("ar")
    once, twice = estimate_nll(model, ROWS), ROWS.repeat_interleave(2, 0)
    number = torch.arange(40).repeat_interleave(2)
    by_document = estimate_nll(model, twice, documents=number)
    assert by_document.nll == pytest.approx(once.nll, rel=1e-6)
    assert by_document.stderr == pytest.approx(once.stderr, rel=1e-5)
    assert estimate_nll(model, twice).stderr < 0.75 * once.stderr
    shuffled = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    again = estimate_nll(model, twice[shuffled], documents=number[shuffled] * 7 + 3)
    assert again.stderr == pytest.approx(once.stderr, rel=1e-5)
    assert estimate_nll(model, ROWS, documents=torch.arange(40)) == once


def framed() -> TensorRows:
    """Rows that begin with 0 and end with 1, one of them with a 1 inside, two with nothing between."""
    tokens, lengths = torch.where(ROWS < 2, 2, ROWS), torch.arange(40) % 15 + 2
    tokens[:, 0] = 0
    tokens[torch.arange(40), lengths - 1] = 1
    tokens[13, 5] = 1
    return TensorRows(tokens, lengths)


@pytest.mark.parametrize("method", ["mdlm", "adlm", "ar", "a2r"])
def test_marks_are_given_and_not_counted(method: str) -> None:
    """What is counted is the text's own tokens; the marks are seen, by a masked model at every time."""
    model = tiny(method)

    class MarksAreSeen(MaskedDiffusion):
        def bound(self, model: FeatureModel, batch: NoisyBatch) -> Loss:
            assert (batch.xt[batch.x0 < 2] == batch.x0[batch.x0 < 2]).all()
            return super().bound(model, batch)

    is_causal = model.config.is_causal
    objective = None if is_causal else MarksAreSeen(ForwardProcess(VOCAB - 1))
    bound = estimate_nll(model, framed(), objective, draws=2, given_tokens=GIVEN)
    lengths = framed().lengths
    assert lengths is not None and bound.tokens == int((lengths - 2).sum()) - 1
    lineage = estimate_nll(model, framed(), draws=2)
    assert lineage.tokens == int((lengths - int(model.config.is_causal)).sum())
    if model.config.is_causal:  # the nats of marks are what differs
        assert lineage.nll * lineage.tokens > bound.nll * bound.tokens
        assert (
            estimate_nll(model, framed(), given_tokens=(1,)) == bound
        )  # the first token of a row is never scored
    for batch in (1, 7, 40):  # a batch may hold nothing that counts
        assert_close(estimate_nll(model, framed(), draws=2, given_tokens=GIVEN, batch=batch), bound)


def enumerated(world: TinyWorld, rows: Tensor) -> float:
    """The NELBO's nats of rows, by all patterns of hidden tokens and 20,000 times."""
    t = 1e-3 + (1 - 1e-3) * (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    weight = loss_weight(LogLinear(), t)
    hides = 1 - LogLinear().alpha(t)
    log_probs, nats = world.log_probs()[1], 0.0
    for pattern in itertools.product([False, True], repeat=world.length):
        is_hidden = torch.tensor(pattern)
        n = int(is_hidden.sum())
        share = float((weight * hides**n * (1 - hides) ** (world.length - n)).mean())
        scores = log_probs[world.number(torch.where(is_hidden, world.mask, rows))]
        nats -= share * float((scores.gather(2, rows[..., None])[..., 0] * is_hidden).sum())
    return nats


@pytest.mark.parametrize(("draws", "is_sorted"), [(1, False), (4, False), (4, True), (16, True)])
def test_the_bound_is_the_enumerated_nelbo_and_above_the_likelihood(
    draws: int, is_sorted: bool
) -> None:
    """Texts of a tiny world by its own law: both sides are counted, the bound is estimated.

    Also of rows in order of their text, though a row's place decides its first time: further draws make up for it.
    """
    world = TinyWorld(random_model(seed=113, positions="learned"))
    law = exact_law(world, first_hitting())[world.texts]
    picks = torch.multinomial(
        law, 3000, replacement=True, generator=torch.Generator().manual_seed(1)
    )
    picks = picks.sort().values if is_sorted else picks
    rows = world.states[world.texts][picks]
    exact = -float(law[picks].log().sum()) / rows.numel()
    expected = enumerated(world, rows) / rows.numel()
    bound = estimate_nll(world.model, rows, batch=1000, draws=draws)
    assert expected > exact + 1e-3 and bound.nll > exact
    assert abs(bound.nll - expected) < 3 * (bound.noise_stderr or bound.stderr) < 0.15 * expected


# From the nats of rows to the estimate.


def sum_rows(nll: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return (torch.where(mask > 0, nll, 0).double() * mask).sum(1), mask.double().sum(1)


def test_the_estimate_is_the_authors() -> None:
    golden = arrays("metrics")
    parts = [sum_rows(golden[f"nlls{i}"], golden[f"mask{i}"]) for i in (0, 1)]
    found = summarize_rows(*(torch.cat(each) for each in zip(*parts, strict=True)))
    assert found.nll == pytest.approx(float(golden["out_nll"]), rel=1e-6)
    assert found.nll / math.log(2) == pytest.approx(float(golden["out_bpd"]), rel=1e-6)
    assert found.ppl == pytest.approx(float(golden["out_ppl"]), rel=1e-5) and found.stderr > 0


def test_a_nan_is_raised_where_theirs_is_dropped() -> None:
    golden = arrays("metrics")
    assert torch.isnan(golden["nan_nlls"]).any() and math.isfinite(
        float(golden["out_nll_nan_dropped"])
    )
    row = int(torch.isnan(golden["nan_nlls"]).any(1).nonzero()[0])
    with pytest.raises(FloatingPointError, match=f"not finite, first in row {row}"):
        summarize_rows(*sum_rows(golden["nan_nlls"], torch.ones_like(golden["nan_nlls"])))


def test_long_sums_stay_exact() -> None:
    """Ten million tokens of 0.1 nats: a float32 sum would be off in the third digit."""
    nats, tokens = sum_rows(torch.full((1000, 1000), 0.1), torch.ones(1000, 1000))
    assert summarize_rows(nats.repeat(10), tokens.repeat(10)).nll == pytest.approx(
        float(torch.tensor(0.1)), rel=1e-12
    )


def test_the_error_is_that_of_a_ratio() -> None:
    """By hand: three units of nats and tokens."""
    nats, tokens = torch.tensor([1.0, 2.0, 6.0, 3.0]), torch.tensor([1.0, 1.0, 2.0, 2.0])
    apart = [1 - 2 * 1 + 2 - 2 * 1, 6 - 2 * 2, 3 - 2 * 2]  # from the mean, 12 / 6
    expected = math.sqrt(3 / 2 * sum(x * x for x in apart)) / 6
    found = summarize_rows(nats, tokens, torch.tensor([5, 5, 7, 9]))
    assert found.stderr == pytest.approx(expected, rel=1e-12)
    assert torch.equal(found.row_nats, nats.double()) and torch.equal(
        found.row_tokens, tokens.double()
    )


def test_what_has_no_token_is_no_unit() -> None:
    """A row of given tokens alone must not make the error look like one of more units."""
    nats, tokens, none = (
        torch.tensor([1.0, 2.0, 6.0]),
        torch.tensor([1.0, 1.0, 2.0]),
        torch.zeros(40),
    )
    more = summarize_rows(torch.cat([nats, none]), torch.cat([tokens, none]))
    assert more.stderr == summarize_rows(nats, tokens).stderr
    with pytest.raises(ValueError, match="counted tokens in 2 of 2 units, got 1"):
        summarize_rows(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))


def test_the_cost_of_a_time_is_no_noise() -> None:
    """Rows cost more, the more of them is masked; the error from noise is that of the rest."""
    rng, rows, draws = torch.Generator().manual_seed(0), 200, 4
    counts = torch.randint(20, 200, (rows,), generator=rng).double()
    times = (torch.arange(rows)[:, None] / rows + torch.arange(draws) / draws).double() % 1
    noise = 0.5 * torch.randn(rows, draws, generator=rng, dtype=torch.float64)
    nats, expected = (
        counts[:, None] * (2 + 5 * times + noise),
        float((counts.square() * 0.25 / draws).sum()),
    )
    assert 0.7 * expected < float(noise_variance(nats, counts, times).sum()) < 1.4 * expected
    assert float(noise_variance(nats, counts).sum()) > 5 * expected


@pytest.mark.parametrize(
    ("tokens", "draws"), [(1, 2), (6, 2), (7, 64), (16, 65), (40, 64), (200, 16)]
)
def test_the_bound_from_hidden_sets_is_unbiased_and_its_error_covers_it(
    tokens: int, draws: int
) -> None:
    """Tokens cost less where the one before is visible, which has a closed form."""
    costs = (
        12
        * torch.rand(tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    )
    sizes = torch.arange(1, tokens + 1)
    truth = sum(
        float(costs.sum()) / tokens * (0.3 + 0.7 * (k - 1) / max(tokens - 1, 1))
        for k in sizes.tolist()
    )
    estimates, errors = torch.zeros(2, 300, dtype=torch.float64)
    for seed in range(300):
        is_hidden, weight = choose_hidden_sets(tokens, draws, seed)
        nats = weight * (costs * is_hidden * (0.3 + 0.7 * is_hidden.roll(1, dims=1))).sum(1)
        if tokens == 1:
            nats *= 0.3  # the token before it is itself
        estimates[seed], errors[seed] = (
            nats.sum(),
            0.0 if tokens <= MAX_ENUMERATED else stratified_stderr(nats),
        )
    if tokens <= 6:
        assert errors.max() == 0 and estimates.tolist() == pytest.approx([truth] * 300, rel=1e-6)
        return
    assert abs(float(estimates.mean()) - truth) < 3 * float(estimates.std()) / math.sqrt(300)
    ratio = float(errors.square().mean().sqrt() / estimates.std())
    assert (
        0.9 < ratio < (1.1 if draws >= 64 else 2)
    )  # the trend over few strata adds to the differences of neighbors
    assert (
        draws < 64
        or 0.92 < float(((estimates - truth).abs() < 1.96 * errors).double().mean()) < 0.98
    )


@pytest.mark.parametrize("multiple", [1, 32])
def test_a_validation_pass_is_the_authors(multiple: int) -> None:
    """Two batches of their validation loop through the golden model, padding read as they read it."""
    golden, ours, parts = arrays("validation_pass"), golden_model("adlm"), []
    schedule, mask = LogLinear(), golden["attention_mask"]
    x0, total, tokens = golden["x0"], 0.0, 0.0
    for i in (0, 1):
        t = golden[f"t{i}"]
        weight, level = loss_weight(schedule, t), noise_level(schedule, t)
        process = ForwardProcess(MASK, attend_padding=True, multiple=multiple)
        batch = collect_batch(x0, golden[f"xt{i}"], t, weight, level, process, valid=mask.bool())
        with torch.no_grad():
            final = ours(batch.xt, batch.noise_level, valid=batch.valid).final
            each = selected_loss(final, ours.head, x0, batch.hidden, without=MASK)
            loss = training_loss(ours, batch)
        parts.append(sum_rows(token_nll(each, batch.hidden, x0.shape), mask))
        total, tokens = total + float(loss.nll * batch.tokens), tokens + float(batch.tokens)
    found = summarize_rows(*(torch.cat(each) for each in zip(*parts, strict=True)))
    assert found.nll == pytest.approx(float(golden["out_nll"]), rel=1e-5)
    assert found.nll / math.log(2) == pytest.approx(float(golden["out_bpd"]), rel=1e-5)
    assert found.ppl == pytest.approx(float(golden["out_ppl"]), rel=1e-4)
    assert total / tokens == pytest.approx(float(golden["out_nll"]), rel=1e-5)
