"""Running batches: rows join and leave between two steps, each with its own sampler, time, seed and length.

All rows of a masked model take a step together: one evaluation of the network for plans and orders alike, then one
draw for each set of sampling parameters. Rows of a causal model run in groups that joined together, because the
positions of a key-value cache are those of all its rows. A row's text is the one that it has alone: its random numbers
are those of its own seed, number and clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion import denoising
from adlm.diffusion.categorical import SamplingParams, TokenLimits
from adlm.diffusion.denoising import SamplerState
from adlm.diffusion.orders import Order, next_positions
from adlm.diffusion.plans import Plan, Transition, confidence_remask_prob, mean_noise_level
from adlm.diffusion.rng import CounterRng
from adlm.generate import Predictor
from adlm.text.generation import GenerationRequest
from adlm.text.lm import Guesses, denoise_rows, stack_layouts
from adlm.text.templates import Layout, classify_tokens

NUMBERS_AHEAD = 4  # steps whose random numbers are made at once
NO_BLOCK = 1 << 40
PLAN_COLUMNS = tuple(each.name for each in fields(Transition))


class TokenLogprob(NamedTuple):
    """The log-probability of a token when it was last drawn, before temperature, top-k and top-p, and the likeliest."""

    logprob: float
    top: dict[int, float]  # by token, likeliest first


@dataclass(eq=False)
class Row:
    """A text while it is sampled: its layout, its request, and its number among the n of its prompt."""

    layout: Layout
    request: GenerationRequest
    number: int
    index: int = 0  # among the rows of the request
    owner: Any = None
    top_logprobs: int | None = (
        None  # likeliest tokens recorded for every token that is drawn; None: no logprobs
    )
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by position
    nfe: int = 0
    delivered: int = 0  # leading positions that can no longer change and were delivered
    guesses: Guesses | None = None  # at its last change, where they are wanted


class StepResult(NamedTuple):
    """The rows after a step: tensors with one entry for each row."""

    tokens: Tensor  # (B, L), on the device
    is_hidden: Tensor  # (B, L)
    changed: Tensor  # (B, L)
    settled: Tensor  # (B,): leading positions that can no longer change
    is_done: Tensor  # (B,)
    step: Tensor  # (B,): frames so far
    nfe: Tensor  # (B,)


class MaskedBatch:
    """Rows of a masked model. Their columns are tensors (B, L) or (B,); `xt` is on the device, the rest on the host."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.rows, self.columns = predictor, list[Row](), dict[str, Tensor]()

    def join(self, rows: Sequence[Row]) -> None:
        """Add rows, which take their first step with the next one of the batch."""
        columns = build_columns(rows, self.predictor)
        if self.rows:
            columns = {
                name: concat_rows([self.columns[name], value]) for name, value in columns.items()
            }
        self.rows, self.columns = [*self.rows, *rows], columns
        self._enter_windows(columns["window"] < 0)

    def keep(self, is_kept: Tensor) -> None:
        """Remove the rows that are not kept."""
        rows = is_kept.nonzero()[:, 0]
        self.rows = [self.rows[i] for i in rows.tolist()]
        self.columns = {name: value[rows.to(value.device)] for name, value in self.columns.items()}
        if self.rows:
            width = int(self.columns["length"].max())
            self.columns = {
                name: x[:, :width] if x.dim() == 2 else x for name, x in self.columns.items()
            }
            self._recompose()

    def _recompose(self) -> None:
        """Build the state of the sampler and the table of all plans anew, after rows or windows have changed."""
        columns, mask_id = self.columns, self.predictor.config.mask_id
        banned = classify_tokens(self.rows[0].layout.tokenizer).banned
        assert mask_id is not None
        requests = [row.request for row in self.rows]
        samplers = [request.sampler for request in requests]
        samplings = [
            denoising.choose_sampling(request.sampler, request.sampling) for request in requests
        ]
        self.is_plan = torch.tensor([isinstance(each, Plan) for each in samplers])
        self.orders = group_orders(samplers)
        self.samplings = list(dict.fromkeys(each for pair in samplings for each in pair))
        self.sampling = torch.tensor(
            [[self.samplings.index(each) for each in pair] for pair in samplings]
        )
        self.table, self.offset = stack_plans(samplers)
        valid = torch.arange(columns["xt"].shape[1]) < columns["length"][:, None]
        clock = columns["window"] * denoising.MAX_BLOCK_STEPS + columns["step"]
        self.state = SamplerState(
            columns["xt"].contiguous(),
            columns["is_hidden"],
            columns["may_change"] & (columns["block_at"] == columns["window"][:, None]),
            self.predictor.predict,
            self.predictor.logits_at,
            mask_id,
            CounterRng(columns["seed"], columns["number"], clock),
            SamplingParams(),
            None if bool(valid.all()) else valid.to(self.predictor.device),
            self.predictor.pad_limits(TokenLimits(columns["kinds"], banned)),
            max_numbers=NUMBERS_AHEAD * columns["xt"].numel(),
        )
        self.state.nfe, columns["xt"] = columns["nfe"], self.state.xt

    @torch.no_grad()
    def step(self) -> StepResult:
        """Take one step of every row: one of its plan (`denoising.reverse_step`), or the next reveal of its order."""
        columns, state = self.columns, self.state
        was_hidden, left = state.is_hidden, state.is_hidden & state.is_free
        is_last = self.is_plan & (columns["step"] >= columns["steps"])
        changed, level = self._change_by_plan(is_last)
        needed = changed & was_hidden  # where the network's prediction is
        for order, rows in self.orders:
            if order.score is None:
                rng = CounterRng(
                    *(
                        x[rows]
                        for x in (state.rng.seed, state.rng.rows, torch.as_tensor(state.rng.start))
                    )
                )
                drawn = denoising.choose_at_random(
                    order, rng, state.clock, left[rows], columns["time"][rows]
                )
                needed[rows], columns["time"][rows] = drawn
                changed[rows], level[rows] = (
                    needed[rows],
                    mean_noise_level(columns["time"][rows]).float(),
                )
            else:
                needed[rows] = left[rows]
                level[rows] = mean_noise_level(
                    left[rows].sum(-1) / columns["first"][rows].clamp(min=1)
                )
        features = state.features_at(needed, level)
        for order, rows in self.orders:
            if order.score is not None:
                changed[rows] = self._choose_by_score(order, rows, features, needed)
        if features.numel():
            sampling = self.sampling[:, 1].where(is_last, self.sampling[:, 0])
            self._reveal(changed & was_hidden, features, needed, sampling)
        state.hide(changed & ~was_hidden)
        state.clock += 1
        columns["is_hidden"] = state.is_hidden
        columns["step"], columns["frame"] = columns["step"] + 1, columns["frame"] + 1
        return self._end_step(changed)

    def _change_by_plan(self, is_last: Tensor) -> tuple[Tensor, Tensor]:
        """Return what changes (B, L) in the rows with a plan, and their noise levels (B,); the last step fills all."""
        columns, state = self.columns, self.state
        at = (
            self.offset
            + torch.minimum(columns["step"], columns["steps"] - 1).clamp(min=0) * self.is_plan
        )
        transition = Transition(*self.table[at][..., None].unbind(1))
        if bool(columns["by_confidence"].any()):
            is_counted = state.is_hidden | ~state.is_free
            split = confidence_remask_prob(
                transition.remask_prob, columns["confidence"], is_counted
            )
            remask = torch.where(columns["by_confidence"][:, None], split, transition.remask_prob)
            transition = replace(transition, remask_prob=remask)
        changed = state.find_changes(state.random_numbers()[0][0], transition)
        changed = (
            torch.where(is_last[:, None], state.is_hidden & state.is_free, changed)
            & self.is_plan[:, None]
        )
        return changed, transition.noise_level[:, 0].float().masked_fill(is_last, 0.0)

    def _choose_by_score(
        self, order: Order, rows: Tensor, features: Tensor, needed: Tensor
    ) -> Tensor:
        """Return the best positions (n, L) of rows by an order's score, with features at the `needed` positions."""
        columns, state = self.columns, self.state
        mine = torch.zeros_like(needed).index_copy_(0, rows, needed[rows])
        scores = state.score_positions(
            order, mine, features[state.send(mine[needed].nonzero()[:, 0])]
        )[rows]
        steps, bound = columns["steps"][rows, None], columns["bound"][rows, None].float()
        own = (
            replace(order, entropy_bound=bound)
            if order.steps is None
            else replace(order, steps=steps)
        )
        return next_positions(own, scores, needed[rows], columns["step"][rows, None])

    def _reveal(self, revealed: Tensor, features: Tensor, needed: Tensor, sampling: Tensor) -> None:
        """Draw the tokens at the revealed positions, the rows of one set of sampling parameters at a time."""
        state = self.state
        for number, params in enumerate(self.samplings):
            mine = revealed & (sampling == number)[:, None]
            if bool(mine.any()):
                probs = state.reveal(
                    mine, features[state.send(mine[needed].nonzero()[:, 0])], params
                )
                if bool(self.columns["by_confidence"].any()):
                    self.columns["confidence"][mine] = probs.cpu()
        recorded = (
            revealed & torch.tensor([row.top_logprobs is not None for row in self.rows])[:, None]
        )
        own, index = (
            features[state.send(recorded[needed].nonzero()[:, 0])],
            recorded.flatten().nonzero()[:, 0],
        )
        for part, logits in state.iter_logits(own, index):
            record_logprobs(self.rows, state.xt, logits, index[part])

    def _end_step(self, changed: Tensor) -> StepResult:
        """Return the rows after a step; those whose block is filled stand at the start of their next one."""
        columns, state = self.columns, self.state
        left = (state.is_hidden & state.is_free).any(-1)
        is_over = ~left & (~self.is_plan | (columns["step"] >= columns["steps"]))
        is_remasking = columns["step"] < columns["remask_end"]
        may_change = columns["may_change"] & (
            state.is_hidden | (is_remasking[:, None] & state.is_free)
        )
        settled = torch.minimum((~may_change).long().cumprod(-1).sum(-1), columns["length"])
        nfe, is_done = state.nfe.clone(), self._enter_windows(is_over)
        return StepResult(
            state.xt, state.is_hidden, changed, settled, is_done, columns["frame"], nfe
        )

    def _enter_windows(self, is_over: Tensor) -> Tensor:
        """Move rows that are over with a block to the start of their next one; return which of them have none."""
        columns = self.columns
        is_ahead = columns["may_change"] & (columns["block_at"] > columns["window"][:, None])
        window = columns["block_at"].masked_fill(~is_ahead, NO_BLOCK).amin(-1)
        is_new = is_over & (window < NO_BLOCK)
        if bool(is_new.any()):
            hidden = (
                columns["is_hidden"]
                & columns["may_change"]
                & (columns["block_at"] == window[:, None])
            )
            fresh = {
                "window": window,
                "step": 0 * window,
                "first": hidden.sum(-1),
                "time": torch.ones(()),
            }
            for name, value in fresh.items():
                columns[name] = torch.where(is_new, value.to(columns[name].dtype), columns[name])
            columns["confidence"][is_new] = 0.0
            self._recompose()
        return is_over & ~is_new


def concat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors (B,), or (B, L) padded with zeros to one width."""
    width = max(x.shape[-1] for x in parts)
    return torch.cat([F.pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in parts])


def record_logprobs(rows: Sequence[Row], tokens: Tensor, logits: Tensor, index: Tensor) -> None:
    """Record the log-probabilities of tokens (B, L) that were drawn from logits (N, V) at flat positions (N,)."""
    logprobs, width = logits.float().log_softmax(-1), tokens.shape[1]
    drawn = logprobs.gather(-1, tokens.flatten()[index.to(tokens.device)][:, None])[:, 0].tolist()
    top = logprobs.topk(max(row.top_logprobs or 0 for row in rows), -1)
    for at, logprob, values, ids in zip(
        index.tolist(), drawn, top.values.tolist(), top.indices.tolist(), strict=True
    ):
        row = rows[at // width]
        best = dict(zip(ids[: row.top_logprobs], values[: row.top_logprobs], strict=True))
        possible = {token: value for token, value in best.items() if value > -math.inf}
        row.logprobs[at % width] = TokenLogprob(logprob, possible)


def build_columns(rows: Sequence[Row], predictor: Predictor) -> dict[str, Tensor]:
    """Return the columns of rows that have not begun: they stand before their first window."""
    ids, is_fixed, kinds = stack_layouts([row.layout for row in rows], predictor.device)
    block = torch.tensor([row.request.settings.block or NO_BLOCK for row in rows])
    zero = torch.zeros(len(rows), dtype=torch.int64)
    columns = {
        "xt": ids,
        "is_hidden": ~is_fixed,
        "may_change": ~is_fixed,
        "kinds": kinds,
        "block_at": torch.arange(ids.shape[1]) // block[:, None],
        "confidence": torch.zeros(ids.shape, dtype=torch.float64),
        "time": torch.ones(len(rows), dtype=torch.float64),
        "window": zero - 1,
    }
    values = [describe_row(row) for row in rows]
    columns |= {name: torch.tensor([each[name] for each in values]) for name in values[0]}
    return columns | {name: zero.clone() for name in ("frame", "nfe", "step", "first")}


def describe_row(row: Row) -> dict[str, Any]:
    """Return the settings of a row as numbers; `remask_end` is the step after the last that may remask."""
    sampler = row.request.sampler
    numbers: dict[str, Any] = {
        "length": len(row.layout),
        "seed": row.request.seed,
        "number": row.number,
    }
    numbers |= {"steps": 0, "remask_end": 0, "by_confidence": False, "bound": 0.0}
    if isinstance(sampler, Plan):
        remask_end = 1 + max(sampler.remask_prob.nonzero()[:, 0].tolist(), default=-1)
        return numbers | {
            "steps": len(sampler),
            "remask_end": remask_end,
            "by_confidence": sampler.by_confidence,
        }
    assert sampler is not None
    return numbers | {"steps": sampler.steps or 0, "bound": sampler.entropy_bound or 0.0}


def group_orders(samplers: Sequence[Plan | Order | None]) -> list[tuple[Order, Tensor]]:
    """Return one order of each name, and the rows (n,) that have it."""
    groups: dict[str, tuple[Order, list[int]]] = {}
    for row, each in enumerate(samplers):
        if isinstance(each, Order):
            groups.setdefault(each.name, (each, []))[1].append(row)
    return [(order, torch.tensor(rows)) for order, rows in groups.values()]


def stack_plans(samplers: Sequence[Plan | Order | None]) -> tuple[Tensor, Tensor]:
    """Return the tables of all plans one below the other (steps, columns), and where each sampler's begins (B,)."""
    offsets, tables, total = dict[int, int](), [], 0
    for each in samplers:
        if id(each) not in offsets:
            offsets[id(each)] = total
            if isinstance(each, Plan):
                tables.append(torch.stack([getattr(each, column) for column in PLAN_COLUMNS], -1))
                total += len(each)
    table = torch.cat([*tables, torch.zeros(1, len(PLAN_COLUMNS), dtype=torch.float64)])
    return table, torch.tensor([offsets[id(each)] for each in samplers])


class CausalBatch:
    """Rows of a causal model, in groups that joined together and have the same sampling parameters."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.groups = predictor, list[_CausalGroup]()

    @property
    def rows(self) -> list[Row]:
        """The rows that are not done, in the order of `StepResult`."""
        return [row for group in self.groups for row in group.rows]

    def join(self, rows: Sequence[Row]) -> None:
        """Add rows, which take their first step with the next one of the batch."""
        for sampling in dict.fromkeys(row.request.sampling for row in rows):
            self.groups.append(
                _CausalGroup(
                    self.predictor, [row for row in rows if row.request.sampling == sampling]
                )
            )

    def keep(self, is_kept: Tensor) -> None:
        """Remove the rows that are not kept; a group is evaluated as long as one of its rows is."""
        for group, kept in zip(
            self.groups, is_kept.split([len(group.rows) for group in self.groups]), strict=True
        ):
            group.live = group.live[kept]
        self.groups = [group for group in self.groups if len(group.live)]

    def step(self) -> StepResult:
        """Draw the next token of every group."""
        return StepResult(
            *map(concat_rows, zip(*(group.step() for group in self.groups), strict=True))
        )


class _CausalGroup:
    """Rows whose next token is drawn at one position."""

    def __init__(self, predictor: Predictor, rows: Sequence[Row]) -> None:
        self.all_rows, self.live = list(rows), torch.arange(len(rows))
        self.length = torch.tensor([len(row.layout) for row in rows])
        seeds = torch.tensor([row.request.seed for row in rows])
        self.frames = denoise_rows(
            predictor, rows[0].request, [(row.layout, row.number) for row in rows], seeds=seeds
        )

    @property
    def rows(self) -> list[Row]:
        """The rows that are neither done nor cancelled."""
        return [self.all_rows[i] for i in self.live.tolist()]

    def step(self) -> StepResult:
        """Draw the next token of every row."""
        frame = next(self.frames)
        has_logprobs = torch.tensor([row.top_logprobs is not None for row in self.all_rows])
        index = (frame.changed & has_logprobs[:, None]).flatten().nonzero()[:, 0]
        if index.numel() and frame.logits is not None:
            logits = frame.logits[(index // frame.tokens.shape[1]).to(frame.logits.device)]
            record_logprobs(self.all_rows, frame.tokens, logits, index)
        settled = torch.minimum((~frame.is_masked).long().cumprod(-1).sum(-1), self.length)
        is_done = ~frame.is_masked.any(-1)
        columns = (
            frame.tokens,
            frame.is_masked,
            frame.changed,
            settled,
            is_done,
            frame.nfe,
            frame.nfe,
        )
        return StepResult(*(x[self.live.to(x.device)] for x in columns))
