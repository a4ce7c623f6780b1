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


def _estimate(
    rows: Tensor | RowDataset,
    compute_nats: Callable[[RowBatch, int, int], Tensor],
    *,
    draws: int,
    is_exact: bool,
    batch: int = 32,
    given_tokens: Sequence[int] = (),
    documents: Tensor | None = None,
    ranks: Ranks | None = None,
    on_rows: Callable[[int, int], None] | None = None,
    max_rows: int | None = None,
    skip_first: bool = False,
    times_seed: int | None = None,
) -> NllEstimate:
    """Sum the nats (n,) that `compute_nats` returns for every batch, draw and the number of all rows."""
    if draws < 1 or batch < 1:
        raise ValueError(f"draws and batch must be at least 1, got {draws} and {batch}")
    dataset = TensorRows(rows) if isinstance(rows, Tensor) else rows
    count = len(dataset) if max_rows is None else min(max_rows, len(dataset))
    documents = None if documents is None else documents[:count]
    group_rows(count, documents)  # raises before anything is computed
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    row_draws, row_tokens = (
        torch.zeros(count, draws, dtype=torch.float64),
        torch.zeros(count, dtype=torch.float64),
    )
    batches = torch.arange(count).split(batch)
    for turn in range(-(-len(batches) // world_size)):
        mine = turn * world_size + rank
        row = batches[
            min(mine, len(batches) - 1)
        ]  # ranks without a batch still take part in the collectives
        x0, lengths = dataset.fetch(row)
        valid = None if lengths is None else is_valid(lengths, x0.shape[1])
        is_given = torch.isin(x0, torch.tensor(list(given_tokens))) if given_tokens else None
        is_counted = torch.ones_like(x0, dtype=torch.bool) if valid is None else valid.clone()
        if is_given is not None:
            is_counted &= ~is_given
        is_counted[:, :1] &= not skip_first
        part = RowBatch(row, x0, valid, is_given, is_counted)
        nats = torch.stack([compute_nats(part, draw, count) for draw in range(draws)], dim=1)
        if mine < len(batches):
            row_draws[row], row_tokens[row] = nats, is_counted.sum(1).double()
        if on_rows is not None:
            on_rows(min((turn + 1) * world_size * batch, count), count)
    if ranks is not None:
        row_draws, row_tokens = ranks.all_reduce_sum(row_draws), ranks.all_reduce_sum(row_tokens)
    estimate = summarize_rows(row_draws.mean(1), row_tokens, documents)
    noise_stderr = 0.0 if is_exact else None
    if draws > 1:
        times = None
        if times_seed is not None:
            places = [
                draw_position(torch.arange(count), count, draw, draws, times_seed)
                for draw in range(draws)
            ]
            times = torch.stack(places, dim=1) / count % 1
        noise_stderr = float(
            noise_variance(row_draws, row_tokens, times).sum().sqrt() / row_tokens.sum()
        )
    return replace(estimate, noise_stderr=noise_stderr, draws=draws)


def draw_position(row: Tensor, count: int, draw: int, draws: int, seed: int) -> Tensor:
    """The place of a draw of rows among the `count` strata of the unit interval, modulo `count`; the seed shifts all
    rows, so that a mean over seeds is unbiased. A single draw has the lineage's place."""
    # `draws` is a step number that no draw has.
    shift = (
        float(CounterRng.from_seed(seed, 1).uniform(draws, 1, Purpose.TIME)) if draws > 1 else 0.0
    )
    return row.double() + count * (draw / draws + shift)


@torch.no_grad()
def estimate_nll(
    model: FeatureModel,
    rows: Tensor | RowDataset,
    objective: Objective | None = None,
    *,
    batch: int = 32,
    draws: int = 1,
    seed: int = 0,
    given_tokens: Sequence[int] = (),
    documents: Tensor | None = None,
    max_rows: int | None = None,
    evaluate: Evaluate | None = None,
    ranks: Ranks | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> NllEstimate:
    """Estimate the bound of an objective on rows (n, L), with `draws` noises each; exact if it is causal.

    The objective is by default the paper's: the NELBO of continuous time (Eq. 4 without an anchor term), or next
    tokens. `given_tokens` are visible wherever they occur and not counted. The standard error is over the documents
    (n,) in which rows begin, else over rows. `ranks` share the rows; a sharded model is called through `evaluate`,
    equally often by each. A row's noise follows from (seed, its number, the draw), its times from `draw_position`.
    """
    objective = objective or default_objective(model)
    draws = 1 if objective.is_causal else draws

    def compute_nats(each: RowBatch, draw: int, count: int) -> Tensor:
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
        return compute_row_nats(model, scored, objective, seed, evaluate) * has_counted

    with eval_mode(model):
        estimate = _estimate(
            rows,
            compute_nats,
            draws=draws,
            is_exact=objective.is_causal,
            batch=batch,
            given_tokens=given_tokens,
            documents=documents,
            ranks=ranks,
            on_rows=on_rows,
            max_rows=max_rows,
            skip_first=objective.is_causal,
            times_seed=seed,
        )
    return replace(estimate, missing=objective.missing, note=objective.note)


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


class TokenNats(NamedTuple):
    """Nats of the scored tokens of each row; the other tokens are given."""

    nats: Tensor  # (n,), float64
    stderr: Tensor  # (n,), from the noise; 0 where all sets of hidden tokens were evaluated, NaN of a single draw
    is_exact: Tensor  # (n,): the likelihood itself, not an upper bound


def choose_hidden_sets(tokens: int, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Choose the sets of hidden tokens from which the NELBO of a model without time conditioning is computed.

    Returned are is_hidden (s, tokens) and the weight (s,) of each set's nats. The NELBO is the sum over k = 1 … tokens
    of 1/k · (mean over the sets of k hidden tokens of their nats). Up to `MAX_ENUMERATED` tokens the sets are all there
    are. Above, every draw has its own stratum of k and hides k random tokens.
    """
    sizes = torch.arange(1, tokens + 1)
    if tokens <= MAX_ENUMERATED:
        is_hidden = (torch.arange(1, 2**tokens)[:, None] >> (sizes - 1)) & 1 == 1
        share = torch.tensor(
            [1 / (k * math.comb(tokens, k)) for k in sizes.tolist()], dtype=torch.float64
        )
        return is_hidden, share[is_hidden.sum(1) - 1]
    # About the spread of a set's share of the sum; if uniform, few draws with small k would make up most of the error.
    rng, density = CounterRng.from_seed(seed, draws), sizes.double() ** -0.5
    density /= density.sum()
    places = (torch.arange(draws) + rng.uniform(0, 1, Purpose.TIME)[:, 0]) / draws
    size = 1 + torch.searchsorted(density.cumsum(0), places, right=True).clamp(max=tokens - 1)
    is_hidden = rng.uniform(0, tokens, Purpose.MASK).argsort(1).argsort(1) < size[:, None]
    return is_hidden, 1 / (draws * size * density[size - 1])


def stratified_stderr(values: Tensor) -> float:
    """The standard error of a sum of draws (n,), one from each stratum in order, from the differences of neighbors."""
    n = len(values)
    # The differences include the trend over the strata: with few draws the error is on the safe side.
    return math.sqrt(float(values.diff().square().sum()) / 2 * n / (n - 1)) if n > 1 else math.nan


@torch.no_grad()
def estimate_token_nats(
    model: FeatureModel,
    rows: Sequence[Sequence[int]],
    is_scored: Sequence[Sequence[bool]],
    objective: Objective,
    *,
    draws: int,
    seed: int,
    batch: int,
) -> TokenNats:
    """Nats of the scored tokens of each row, the others given: exact of a causal model, of a masked one a bound."""
    is_causal = objective.is_causal
    # A network that reads the time has no sets: their nats would depend on it.
    has_sets = objective.takes_hidden_sets and not reads_time(model)
    places = [torch.tensor(each).nonzero()[:, 0] for each in is_scored]
    token_counts = torch.tensor([len(each) for each in places], dtype=torch.int64)
    sets = dict[
        int, tuple[Tensor, Tensor]
    ]()  # by the number of scored tokens: hidden tokens, and weights
    if has_sets:
        sets = {n: choose_hidden_sets(n, draws, seed) for n in set(token_counts.tolist()) - {0}}
    one = 1 if is_causal else draws
    counts = token_counts.new_tensor(
        [len(sets[n][1]) if n in sets else one * (n > 0) for n in token_counts.tolist()]
    )
    row = torch.repeat_interleave(torch.arange(len(rows)), counts)
    state = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    values = torch.zeros(len(row), dtype=torch.float64)
    for part in torch.arange(len(row)).split(batch) if len(row) else ():
        mine, now = row[part].tolist(), state[part]
        x0, scored = (
            pad_sequence([torch.tensor(each[i]) for i in mine], batch_first=True)
            for each in (rows, is_scored)
        )
        valid = is_valid(torch.tensor([len(rows[i]) for i in mine]), x0.shape[1])
        is_hidden = torch.zeros_like(scored) if has_sets else None
        if is_hidden is not None:
            for each, i, number in zip(is_hidden, mine, now.tolist(), strict=True):
                each[places[i]] = sets[len(places[i])][0][number]
        part_rows = ScoredRows(
            x0,
            now,
            now,
            total=one,
            valid=valid,
            is_given=~scored,
            is_hidden=is_hidden,
            is_padded_batch=True,
        )
        values[part] = compute_row_nats(model, part_rows, objective, seed)
    nats, errors = torch.zeros(2, len(rows), dtype=torch.float64)
    for number, (each, n) in enumerate(
        zip(values.split(counts.tolist()), token_counts.tolist(), strict=True)
    ):
        if n in sets:
            weighted = each * sets[n][1]
            nats[number] = weighted.sum()
            errors[number] = 0.0 if n <= MAX_ENUMERATED else stratified_stderr(weighted)
        elif n > 0:
            nats[number] = each.mean()
            errors[number] = 0.0 if is_causal else each.std() / math.sqrt(draws)
    is_one = (token_counts <= 1) & (has_sets and objective.is_exact_of_one)
    return TokenNats(nats, errors, is_one | is_causal)


def unigram_nll(counts: Tensor, tokens: Tensor, valid: Tensor | None = None) -> float:
    """Nats per token of the unigram model with these token counts (V,), one added to each: the baseline to beat."""
    nll = -((counts.double() + 1) / (counts.sum() + len(counts))).log()[tokens]
    return float(nll.mean() if valid is None else nll[valid].mean())


@torch.no_grad()
def estimate_order_nll(
    model: FeatureModel,
    rows: Tensor | RowDataset,
    order: str,
    *,
    draws: int = 1,
    seed: int = 0,
    **options: Any,
) -> NllEstimate:
    """Nats per token of rows (n, L) that are revealed a token a step in an order: exact, a bound for a random order.

    The order is a name of `ORDERS`. Scores are computed in float64, and of equal ones (to 1e-6) the left one comes
    first, so that rounding and batch size change nothing. A random order takes `draws` permutations for each row. The
    options are `batch`, `given_tokens`, `documents`, `ranks` and `on_rows` of `estimate_nll`.
    """
    if model.config.is_causal or model.config.mask_id is None:
        raise ValueError(
            "a causal model has one order, from left to right, in which its nll is exact already"
        )
    check_known("order", order, ORDERS)
    score, is_random = SCORES.get(order), order == RANDOM
    if score is not None and find_device(model).type == "mps":
        raise ValueError(
            f"order {order!r} is scored in float64, which mps does not have: use device=cpu"
        )
    folded = fold_network(model)
    if score is not None:
        folded = folded.to(torch.float64)
    draws = draws if is_random else 1

    def compute_nats(each: RowBatch, draw: int, _: int) -> Tensor:
        length = each.x0.shape[1]
        scores = -torch.arange(length, dtype=torch.float64).repeat(len(each.x0), 1)
        if is_random:
            scores = CounterRng.from_seed(seed, each.row).uniform(draw, length, Purpose.ORDER)
        return _nats_in_order(folded, each, scores, score)

    return _estimate(rows, compute_nats, draws=draws, is_exact=not is_random, **options)


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
