"""Negative log-likelihood of rows of tokens: the NELBO of masked models, exact for causal ones, or under an order.

A masked model that reveals tokens in an order which depends only on what is visible has a computable likelihood,
−log p(x) = Σ −log p(x_i | what is visible when i is revealed), that of the sampler which decodes in this order. In a
random order it is a bound, whose expectation without time conditioning is the NELBO of continuous time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adlm.data.batches import RowDataset, TensorRows, is_valid
from adlm.diffusion.features import (
    FeatureModel,
    compute_features,
    compute_logits,
    find_device,
    reads_time,
)
from adlm.diffusion.objectives import Objective, ScoredRows, default_objective
from adlm.diffusion.plans import EPS
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.samplers import negative_entropy, prob_margin, top_prob
from adlm.diffusion.sampling import ScoreFn
from adlm.diffusion.schedules import LogLinear, noise_level
from adlm.diffusion.selected import MAX_LOGIT_ROWS
from adlm.distributed import Ranks
from adlm.errors import check_known
from adlm.models.network import fold_network

MIN_DRAWS_PER_BIN, MAX_TIME_BINS = 8, 64  # of the mean loss by time that `noise_variance` subtracts
MAX_ENUMERATED = 6  # scored tokens of which all sets are hidden in turn: at most 63 evaluations
LEFT_TO_RIGHT, RANDOM = "left_to_right", "random"
SCORES: dict[str, ScoreFn] = {  # of logits; the highest is revealed next
    "confidence": top_prob,
    "margin": prob_margin,
    "entropy": negative_entropy,
}
ORDERS = (LEFT_TO_RIGHT, *SCORES, RANDOM)
MAX_TIE = 1e-6  # scores that are no further apart are equal

# Calls a function with the network, for example within the module that shards its weights.
Evaluate = Callable[[Callable[[FeatureModel], Tensor]], Tensor]


@dataclass(frozen=True)
class NllEstimate:
    """Nats per token with a standard error: an upper bound for a masked model, exact for a causal one."""

    nll: float
    stderr: float  # over documents (or rows); it contains the noise
    tokens: int
    noise_stderr: float | None = None  # from the noise alone; None: one draw does not show it
    draws: int = 1
    missing: float = 0.0  # the share of log(V - 1) that the bound lacks for a uniform prediction
    note: str = ""  # what a reader must know about the bound
    # Sums of each row: two models on the same rows and noise can be paired.
    row_nats: Tensor = field(default_factory=lambda: torch.zeros(0), compare=False, repr=False)
    row_tokens: Tensor = field(default_factory=lambda: torch.zeros(0), compare=False, repr=False)

    @property
    def ppl(self) -> float:
        """Perplexity; infinite for a model that diverged."""
        return math.exp(self.nll) if self.nll < 700 else math.inf

    def bits_per_byte(self, size: int) -> float:
        """All counted nats as bits, over `size` bytes of text."""
        return self.nll * self.tokens / math.log(2) / size


@dataclass(frozen=True)
class RowBatch:
    """Some rows, and which of their tokens count."""

    row: Tensor  # (n,): the number of each row, from which its noise follows
    x0: Tensor  # (n, L)
    valid: Tensor | None  # (n, L), False at padding; None if there is none
    is_given: (
        Tensor | None
    )  # (n, L): always visible and not counted; None if there are no such tokens
    is_counted: Tensor  # (n, L)


@dataclass(frozen=True)
class NatsSettings:
    """How nats are computed; the last four change nothing."""

    draws: int = 1  # of noise, for each row
    seed: int = 0
    order: str | None = None  # of ORDERS, in which rows are revealed a token a step
    given_tokens: Sequence[int] = ()  # visible wherever they occur, and not counted
    max_rows: int | None = None  # the first ones; None: all
    batch: int = 32  # rows at a time
    evaluate: Evaluate | None = None  # calls a sharded model, equally often on each rank
    ranks: Ranks | None = None  # the processes that share the rows
    on_rows: Callable[[int, int], None] | None = None  # is told how many are done, of how many

    def __post_init__(self) -> None:
        if self.draws < 1 or self.batch < 1:
            raise ValueError(
                f"draws and batch must be at least 1, got {self.draws} and {self.batch}"
            )

    def count_rows(self, dataset: RowDataset) -> int:
        """Return how many rows are evaluated."""
        return len(dataset) if self.max_rows is None else min(self.max_rows, len(dataset))

    def sum_rows(
        self,
        dataset: RowDataset,
        compute_nats: Callable[[RowBatch, int], Tensor],
        *,
        count: int,
        draws: int,
        skip_first: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute the nats of all rows under all draws, in batches that the ranks share."""
        return _sum_rows(
            dataset,
            compute_nats,
            count=count,
            draws=draws,
            batch=self.batch,
            given_tokens=self.given_tokens,
            skip_first=skip_first,
            ranks=self.ranks,
            on_rows=self.on_rows,
        )


@dataclass(frozen=True)
class Texts:
    """Rows of any lengths, and which of their tokens are scored; the others are given."""

    rows: Sequence[Sequence[int]]
    is_scored: Sequence[Sequence[bool]]


@dataclass(frozen=True)
class RowNats:
    """The nats of each row's counted tokens."""

    nats: Tensor  # (n,), float64: the mean over the draws of noise
    tokens: Tensor  # (n,), float64
    noise_variance: Tensor  # (n,), of the nats by their noise; NaN: a single draw does not show it
    is_exact: Tensor  # (n,): the likelihood itself, not an upper bound
    draws: int = 1
    missing: float = 0.0  # the share of log(V - 1) that the bound lacks for a uniform prediction
    note: str = ""  # what a reader must know about the bound

    @staticmethod
    def from_draws(
        row_draws: Tensor, row_tokens: Tensor, times: Tensor | None = None, *, is_exact: bool
    ) -> "RowNats":
        """Take the mean of each row's draws (n, K)."""
        count, draws = row_draws.shape
        variance = torch.full((count,), 0.0 if is_exact else math.nan, dtype=torch.float64)
        if draws > 1:
            variance = noise_variance(row_draws, row_tokens, times)
        exact = torch.full((count,), is_exact)
        return RowNats(row_draws.mean(1), row_tokens, variance, exact, draws)

    @property
    def noise_stderr(self) -> float | None:
        """The standard error of the nats per token by the noise alone; None: one draw does not show it."""
        error = float(self.noise_variance.sum().sqrt() / self.tokens.sum())
        return None if math.isnan(error) else error

    def summarize(self, documents: Tensor | None = None) -> NllEstimate:
        """The nats per token of all rows, with a standard error over documents or rows."""
        return replace(
            summarize_rows(self.nats, self.tokens, documents),
            noise_stderr=self.noise_stderr,
            draws=self.draws,
            missing=self.missing,
            note=self.note,
        )


def summarize_rows(
    row_nats: Tensor, row_tokens: Tensor, documents: Tensor | None = None
) -> NllEstimate:
    """The estimate from each row's nats and tokens (n,), with a standard error over documents or rows."""
    row_nats, row_tokens = row_nats.cpu().double(), row_tokens.cpu().double()
    infinite = (~torch.isfinite(row_nats)).nonzero()[:, 0].tolist()
    if infinite:
        problem = (
            f"the loss of {len(infinite)} held-out rows is not finite, first in row {infinite[0]}"
        )
        raise FloatingPointError(f"{problem}: check the weights, then the rows")
    unit, units = group_rows(len(row_nats), documents)
    sums = torch.zeros(2, units, dtype=torch.float64).index_add_(
        1, unit, torch.stack([row_nats, row_tokens])
    )
    tokens, (_, stderr) = float(row_tokens.sum()), estimate_ratio(*sums.numpy())
    if math.isnan(stderr):
        problem = f"a standard error needs counted tokens in 2 of {units} units, got {int(tokens)}"
        raise ValueError(f"{problem}: give more text")
    return NllEstimate(
        float(row_nats.sum()) / tokens,
        stderr,
        int(tokens),
        row_nats=row_nats,
        row_tokens=row_tokens,
    )


def estimate_ratio(sums: NDArray[Any], counts: NDArray[Any]) -> tuple[float, float]:
    """Σ sums / Σ counts over independent units (n,), and its standard error; NaN where nothing was counted."""
    total = counts.sum()
    if total == 0:
        return math.nan, math.nan
    mean = sums.sum() / total
    return float(mean), influence_stderr((sums - mean * counts) / total, counts > 0)


def influence_stderr(influence: NDArray[Any], is_used: NDArray[np.bool_]) -> float:
    """The standard error from each unit's influence on an estimate, over the units in use; NaN for fewer than 2."""
    n = int(is_used.sum())
    return math.sqrt(n / (n - 1) * float(np.square(influence).sum())) if n > 1 else math.nan


def group_rows(rows: int, documents: Tensor | None = None) -> tuple[Tensor, int]:
    """The unit of each row (rows,) for a standard error over documents or rows, and the number of units, at least 2."""
    unit = torch.arange(rows) if documents is None else documents.cpu()
    distinct, unit = unit.unique(return_inverse=True)
    if len(distinct) < 2:
        units = (
            "rows: give more text or shorter rows"
            if documents is None
            else "documents: give more, or none"
        )
        raise ValueError(f"a standard error needs more than {len(distinct)} {units}")
    return unit, len(distinct)


def noise_variance(nats: Tensor, tokens: Tensor, times: Tensor | None = None) -> Tensor:
    """The variance (n,) of the mean of each row's draws (n, K) by its noise alone: with `times` (n, K) in [0, 1),
    the mean cost of a token at a time, over all rows in bins of it, is subtracted first; a row's own part stays in."""
    correction = 1.0
    if times is not None:
        bins = min(max(nats.numel() // MIN_DRAWS_PER_BIN, 1), len(nats), MAX_TIME_BINS)
        which, tokens = (times * bins).long().clamp(max=bins - 1), tokens[:, None].expand_as(nats)
        parts = torch.stack([nats.flatten(), tokens.flatten()])
        sums = torch.zeros(2, bins, dtype=torch.float64).index_add_(1, which.flatten(), parts)
        nats = nats - tokens * (sums[0] / sums[1].clamp(min=1))[which]
        correction = nats.numel() / (nats.numel() - bins + 1)
    return nats.var(1) / nats.shape[1] * correction


def _sum_rows(
    dataset: RowDataset,
    compute_nats: Callable[[RowBatch, int], Tensor],
    *,
    count: int,
    draws: int,
    batch: int,
    given_tokens: Sequence[int],
    skip_first: bool,
    ranks: Ranks | None,
    on_rows: Callable[[int, int], None] | None,
) -> tuple[Tensor, Tensor]:
    """Return the nats (n, K) that `compute_nats` returns for every batch and draw, and the counted tokens (n,)."""
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    row_draws = torch.zeros(count, draws, dtype=torch.float64)
    row_tokens = torch.zeros(count, dtype=torch.float64)
    batches = torch.arange(count).split(batch)
    for turn in range(-(-len(batches) // world_size)):
        mine = turn * world_size + rank
        # Ranks without a batch still take part in the collectives.
        row = batches[min(mine, len(batches) - 1)]
        x0, lengths = dataset.fetch(row)
        valid = None if lengths is None else is_valid(lengths, x0.shape[1])
        is_given = torch.isin(x0, torch.tensor(list(given_tokens))) if given_tokens else None
        is_counted = torch.ones_like(x0, dtype=torch.bool) if valid is None else valid.clone()
        if is_given is not None:
            is_counted &= ~is_given
        is_counted[:, :1] &= not skip_first
        part = RowBatch(row, x0, valid, is_given, is_counted)
        nats = torch.stack([compute_nats(part, draw) for draw in range(draws)], dim=1)
        if mine < len(batches):
            row_draws[row] = nats
            row_tokens[row] = is_counted.sum(1).double()
        if on_rows is not None:
            on_rows(min((turn + 1) * world_size * batch, count), count)
    if ranks is not None:
        row_draws, row_tokens = ranks.all_reduce_sum(row_draws), ranks.all_reduce_sum(row_tokens)
    return row_draws, row_tokens


def draw_position(row: Tensor, count: int, draw: int, draws: int, seed: int) -> Tensor:
    """The place of a draw of rows among the `count` strata of the unit interval, modulo `count`; the seed shifts all
    rows, so that a mean over seeds is unbiased. A single draw has the lineage's place."""
    # `draws` is a step number that no draw has.
    shift = (
        float(CounterRng.from_seed(seed, 1).uniform(draws, 1, Purpose.TIME)) if draws > 1 else 0.0
    )
    return row.double() + count * (draw / draws + shift)


def estimate_nll(
    model: FeatureModel,
    rows: Tensor | RowDataset,
    objective: Objective | None = None,
    *,
    documents: Tensor | None = None,
    **options: Any,
) -> NllEstimate:
    """Estimate the nats per token of rows (n, L), with a standard error over the documents (n,) in which rows begin,
    else over rows; the options are those of `NatsSettings`."""
    settings = NatsSettings(**options)
    dataset = TensorRows(rows) if isinstance(rows, Tensor) else rows
    count = settings.count_rows(dataset)
    documents = None if documents is None else documents[:count]
    group_rows(count, documents)  # raises before anything is computed
    return row_nats(model, dataset, objective, settings).summarize(documents)


@torch.no_grad()
def row_nats(
    model: FeatureModel,
    rows: Tensor | RowDataset | Texts,
    objective: Objective | None = None,
    settings: NatsSettings | None = None,
) -> RowNats:
    """Compute each row's nats: the bound of an objective, exact if it is causal, or the likelihood under an order.

    The objective is by default the paper's: the NELBO of continuous time (Eq. 4 without an anchor term), or next
    tokens. `draws` noises are drawn for each row: they follow from (seed, its number, the draw), its times from
    `draw_position`. Texts, whose scored tokens are few, are instead scored under sets of hidden tokens
    (`choose_hidden_sets`), where the objective takes them.

    With an `order` rows are revealed a token a step: exact, a bound for a random order, of which `draws` are drawn.
    Scores are computed in float64, and of equal ones (to 1e-6) the left one comes first, so that rounding and batch
    size change nothing.
    """
    objective = objective or default_objective(model)
    settings = settings or NatsSettings()
    if isinstance(rows, Texts):
        return _text_nats(model, rows, objective, settings)
    dataset = TensorRows(rows) if isinstance(rows, Tensor) else rows
    count = settings.count_rows(dataset)
    if settings.order is not None:
        return _order_nats(model, dataset, count, settings)
    draws = 1 if objective.is_causal else settings.draws
    seed = settings.seed

    def compute_nats(each: RowBatch, draw: int) -> Tensor:
        # Where every token is given nothing counts, but all ranks must call a sharded model.
        has_counted = bool(each.is_counted.any())
        scored = ScoredRows(
            each.x0,
            each.row,
            draw_position(each.row, count, draw, draws, seed),
            total=count,
            draw=draw,
            valid=each.valid,
            is_given=each.is_given if has_counted else None,
        )
        nats = compute_row_nats(model, scored, objective, seed, settings.evaluate)
        return nats * has_counted

    with eval_mode(model):
        row_draws, row_tokens = settings.sum_rows(
            dataset, compute_nats, count=count, draws=draws, skip_first=objective.is_causal
        )
    times = None
    if draws > 1:
        numbers = torch.arange(count)
        places = [draw_position(numbers, count, draw, draws, seed) for draw in range(draws)]
        times = torch.stack(places, dim=1) / count % 1
    made = RowNats.from_draws(row_draws, row_tokens, times, is_exact=objective.is_causal)
    return replace(made, missing=objective.missing, note=objective.note)


def compute_row_nats(
    model: FeatureModel,
    rows: ScoredRows,
    objective: Objective,
    seed: int,
    evaluate: Evaluate | None = None,
) -> Tensor:
    """Return each row's nats (n,) under one draw of noise, in float64 on the host: every bound is computed here."""

    def run(model: FeatureModel) -> Tensor:
        return objective.row_nats(model, rows, seed)

    if evaluate is not None:
        return evaluate(run).cpu().double()  # checked in the end: ranks must not stop alone
    nats = run(model).cpu().double()
    if not bool(torch.isfinite(nats).all()):
        bad = rows.number[~torch.isfinite(nats)].tolist()
        raise FloatingPointError(
            f"the loss of rows {bad[:8]} is not finite: check the weights, then the rows"
        )
    return nats


@contextmanager
def eval_mode(model: FeatureModel) -> Iterator[None]:
    """A context in which the network has no dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class HiddenSets(NamedTuple):
    """Sets of hidden tokens, whose weighted nats add up to the NELBO."""

    is_hidden: Tensor  # (s, tokens)
    weight: Tensor  # (s,)


def choose_hidden_sets(tokens: int, draws: int, seed: int) -> HiddenSets:
    """Choose the sets of hidden tokens from which the NELBO of a model without time conditioning is computed.

    The NELBO is the sum over k = 1 … tokens of 1/k · (mean over the sets of k hidden tokens of their nats). Up to
    `MAX_ENUMERATED` tokens the sets are all there are. Above, every draw has its own stratum of k and hides k random
    tokens.
    """
    sizes = torch.arange(1, tokens + 1)
    if tokens <= MAX_ENUMERATED:
        is_hidden = (torch.arange(1, 2**tokens)[:, None] >> (sizes - 1)) & 1 == 1
        share = torch.tensor(
            [1 / (k * math.comb(tokens, k)) for k in sizes.tolist()], dtype=torch.float64
        )
        return HiddenSets(is_hidden, share[is_hidden.sum(1) - 1])
    # About the spread of a set's share of the sum; if uniform, few draws with small k would make up most of the error.
    rng, density = CounterRng.from_seed(seed, draws), sizes.double() ** -0.5
    density /= density.sum()
    places = (torch.arange(draws) + rng.uniform(0, 1, Purpose.TIME)[:, 0]) / draws
    size = 1 + torch.searchsorted(density.cumsum(0), places, right=True).clamp(max=tokens - 1)
    is_hidden = rng.uniform(0, tokens, Purpose.MASK).argsort(1).argsort(1) < size[:, None]
    return HiddenSets(is_hidden, 1 / (draws * size * density[size - 1]))


def stratified_stderr(values: Tensor) -> float:
    """The standard error of a sum of draws (n,), one from each stratum in order, from the differences of neighbors."""
    n = len(values)
    # The differences include the trend over the strata: with few draws the error is on the safe side.
    return math.sqrt(float(values.diff().square().sum()) / 2 * n / (n - 1)) if n > 1 else math.nan


def _text_nats(
    model: FeatureModel, texts: Texts, objective: Objective, settings: NatsSettings
) -> RowNats:
    """Nats of the scored tokens of texts, the others given: exact of a causal model, of a masked one a bound."""
    is_causal, draws = objective.is_causal, settings.draws
    # A network that reads the time has no sets: their nats would depend on it.
    has_sets = objective.takes_hidden_sets and not reads_time(model)
    places = [torch.tensor(each).nonzero()[:, 0] for each in texts.is_scored]
    tokens = torch.tensor([len(each) for each in places], dtype=torch.int64)
    sets: dict[int, HiddenSets] = {}  # by the number of scored tokens
    if has_sets:
        for n in set(tokens.tolist()) - {0}:
            sets[n] = choose_hidden_sets(n, draws, settings.seed)
    one = 1 if is_causal else draws
    counts = tokens.new_tensor(
        [len(sets[n].weight) if n in sets else one * (n > 0) for n in tokens.tolist()]
    )
    row = torch.repeat_interleave(torch.arange(len(tokens)), counts)
    state = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    values = torch.zeros(len(row), dtype=torch.float64)
    for part in torch.arange(len(row)).split(settings.batch) if len(row) else ():
        mine, now = row[part].tolist(), state[part]
        x0 = pad_sequence([torch.tensor(texts.rows[i]) for i in mine], batch_first=True)
        scored = pad_sequence([torch.tensor(texts.is_scored[i]) for i in mine], batch_first=True)
        is_hidden = torch.zeros_like(scored) if has_sets else None
        if is_hidden is not None:
            for each, i, number in zip(is_hidden, mine, now.tolist(), strict=True):
                each[places[i]] = sets[len(places[i])].is_hidden[number]
        hidden = ScoredRows(
            x0,
            now,
            now,
            total=one,
            valid=is_valid(torch.tensor([len(texts.rows[i]) for i in mine]), x0.shape[1]),
            is_given=~scored,
            is_hidden=is_hidden,
            is_padded_batch=True,
        )
        values[part] = compute_row_nats(model, hidden, objective, settings.seed)
    nats, errors = torch.zeros(2, len(tokens), dtype=torch.float64)
    for number, (each, n) in enumerate(
        zip(values.split(counts.tolist()), tokens.tolist(), strict=True)
    ):
        if n in sets:
            weighted = each * sets[n].weight
            nats[number] = weighted.sum()
            errors[number] = 0.0 if n <= MAX_ENUMERATED else stratified_stderr(weighted)
        elif n > 0:
            nats[number] = each.mean()
            errors[number] = 0.0 if is_causal else each.std() / math.sqrt(draws)
    is_one = (tokens <= 1) & (has_sets and objective.is_exact_of_one)
    return RowNats(nats, tokens.double(), errors.square(), is_one | is_causal, draws)


def unigram_nll(counts: Tensor, tokens: Tensor, valid: Tensor | None = None) -> float:
    """Nats per token of the unigram model with these token counts (V,), one added to each: the baseline to beat."""
    nll = -((counts.double() + 1) / (counts.sum() + len(counts))).log()[tokens]
    return float(nll.mean() if valid is None else nll[valid].mean())


def _order_nats(
    model: FeatureModel, dataset: RowDataset, count: int, settings: NatsSettings
) -> RowNats:
    """Nats of rows that are revealed a token a step in an order."""
    if model.config.is_causal or model.config.mask_id is None:
        raise ValueError(
            "a causal model has one order, from left to right, in which its nll is exact already"
        )
    assert settings.order is not None
    check_known("order", settings.order, ORDERS)
    score = SCORES.get(settings.order)
    is_random = settings.order == RANDOM
    if score is not None and find_device(model).type == "mps":
        raise ValueError(
            f"order {settings.order!r} is scored in float64, which mps does not have: use device=cpu"
        )
    folded = fold_network(model)
    if score is not None:
        folded = folded.to(torch.float64)

    def compute_nats(each: RowBatch, draw: int) -> Tensor:
        length = each.x0.shape[1]
        scores = -torch.arange(length, dtype=torch.float64).repeat(len(each.x0), 1)
        if is_random:
            rng = CounterRng.from_seed(settings.seed, each.row)
            scores = rng.uniform(draw, length, Purpose.ORDER)
        return _nats_in_order(folded, each, scores, score)

    draws = settings.draws if is_random else 1
    row_draws, row_tokens = settings.sum_rows(
        dataset, compute_nats, count=count, draws=draws, skip_first=False
    )
    return RowNats.from_draws(row_draws, row_tokens, is_exact=not is_random)


def _nats_in_order(
    model: FeatureModel, rows: RowBatch, scores: Tensor, score: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Nats of rows (n,) by revealing in each the hidden token with the highest of `scores` (n, L), one by one."""
    device, mask_id = find_device(model), model.config.mask_id
    assert mask_id is not None
    is_hidden, nats = rows.is_counted.clone(), torch.zeros(len(rows.x0), dtype=torch.float64)
    while bool(is_hidden.any()):
        active = is_hidden.any(1).nonzero()[:, 0]
        here, x0 = is_hidden[active], rows.x0[active]
        share = here.sum(1) / rows.is_counted[active].sum(1).clamp(min=1)
        level = noise_level(LogLinear(EPS), share.double())
        valid = None if rows.valid is None else rows.valid[active].to(device)
        xt = torch.where(here, mask_id, x0).to(device)
        features = compute_features(model, xt, level.to(device), valid=valid).final
        if score is not None:
            parts = features[here.to(device)].split(MAX_LOGIT_ROWS[device.type])
            scored = torch.cat([score(compute_logits(model, part)) for part in parts]).cpu()
            scores[active] = torch.zeros_like(scores[active]).masked_scatter_(here, scored)
        ranked = scores[active].masked_fill(~here, -torch.inf)
        chosen = (ranked >= ranked.amax(1, keepdim=True) - MAX_TIE).long().argmax(1)
        place = torch.arange(len(active)), chosen
        logits = compute_logits(model, features[tuple(each.to(device) for each in place)])
        nats[active] -= logits.log_softmax(-1).cpu().double()[place[0], x0[place]]
        is_hidden[active, chosen] = False
    return nats
