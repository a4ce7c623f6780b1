"""Running batches: rows join and leave between two steps, each with its own sampler, time, seed and length.

All rows of a masked model take a step together: one evaluation of the network for plans and orders alike, then one
draw for each set of sampling parameters. Rows of a causal model run in groups that joined together, because the
positions of a key-value cache are those of all its rows. A row's text is the one that it has alone: its random numbers
are those of its own seed, number and clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.categorical import SamplingParams, TokenLimits
from adlm.diffusion.denoising import MAX_BLOCK_STEPS, Frame, SamplerState, continue_tokens
from adlm.diffusion.orders import Order, next_positions
from adlm.diffusion.plans import Plan, Transition, confidence_remask_prob, mean_noise_level
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.generate import Predictor
from adlm.text.generation import GenerationRequest
from adlm.text.lm import Guesses
from adlm.text.templates import Layout, classify_tokens

PLAN = 0  # the kind of rows that follow a plan; an order's kind is its place in `orders`, from 1 on
NUMBERS_AHEAD = 4  # steps whose random numbers are made at once
NO_BLOCK = 1 << 40
Columns = dict[str, Tensor]
COLUMNS = tuple(each.name for each in fields(Transition))


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
    top_logprobs: int | None = None  # likeliest tokens recorded for every token that is drawn; None: no logprobs
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
    """Rows of a masked model. `wide` has tensors (B, L), `narrow` (B,); `xt` is on the device, the rest on the host."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.rows = predictor, list[Row]()
        self.wide, self.narrow = dict[str, Tensor](), dict[str, Tensor]()

    def join(self, rows: Sequence[Row]) -> None:
        """Add rows, which take their first step with the next one of the batch."""
        wide, narrow = build_columns(rows, self.predictor)
        if self.rows:
            width = max(self.wide["xt"].shape[1], wide["xt"].shape[1])
            pads = {"xt": int(self.predictor.config.mask_id == 0)}
            for name, value in wide.items():
                both = (F.pad(x, (0, width - x.shape[1]), value=pads.get(name, 0)) for x in (self.wide[name], value))
                wide[name] = torch.cat(tuple(both))
            narrow = {name: torch.cat((self.narrow[name], value)) for name, value in narrow.items()}
        self.rows, self.wide, self.narrow = [*self.rows, *rows], wide, narrow
        self._recompose()

    def keep(self, is_kept: Tensor) -> None:
        """Remove the rows that are not kept."""
        rows = is_kept.nonzero()[:, 0]
        self.rows = [self.rows[i] for i in rows.tolist()]
        self.narrow = {name: value[rows] for name, value in self.narrow.items()}
        width = int(self.narrow["length"].max()) if self.rows else 0
        self.wide = {name: value[rows.to(value.device), :width] for name, value in self.wide.items()}
        if self.rows:
            self._recompose()

    def _recompose(self) -> None:
        """Build the state of the sampler and the table of all plans anew, after rows or windows have changed."""
        wide, narrow, config = self.wide, self.narrow, self.predictor.config
        samplers, samplings = [row.request.sampler for row in self.rows], [choose_sampling(row) for row in self.rows]
        self.orders = {each.name: each for each in samplers if isinstance(each, Order)}
        kinds = {name: kind for kind, name in enumerate(self.orders, PLAN + 1)}
        self.kind = torch.tensor([kinds[each.name] if isinstance(each, Order) else PLAN for each in samplers])
        self.samplings = list(dict.fromkeys(each for pair in samplings for each in pair))
        self.sampling = torch.tensor([[self.samplings.index(each) for each in pair] for pair in samplings])
        self.table, self.offset = stack_plans(samplers)
        valid = torch.arange(wide["xt"].shape[1]) < narrow["length"][:, None]
        assert config.mask_id is not None
        self.state = SamplerState(
            wide["xt"].contiguous(),
            wide["is_hidden"],
            wide["may_change"] & (wide["block_at"] == narrow["window"][:, None]),
            self.predictor.predict,
            self.predictor.logits_at,
            config.mask_id,
            CounterRng(narrow["seed"], narrow["number"], narrow["window"] * MAX_BLOCK_STEPS + narrow["step"]),
            SamplingParams(),
            None if bool(valid.all()) else valid.to(self.predictor.device),
            build_limits(wide["kinds"], self.predictor, self.rows[0].layout.tokenizer),
            max_numbers=NUMBERS_AHEAD * wide["xt"].numel(),
        )
        self.state.nfe, wide["xt"] = narrow["nfe"], self.state.xt

    @torch.no_grad()
    def step(self) -> StepResult:
        """Take one step of every row: one of its plan (`denoising.reverse_step`), or the next reveal of its order."""
        wide, narrow, state = self.wide, self.narrow, self.state
        was_hidden = state.is_hidden
        is_plan = self.kind == PLAN
        is_last = is_plan & (narrow["step"] >= narrow["steps"])
        changed, level = self._change_by_plan(is_plan, is_last)
        needed, scored = changed & was_hidden, list[tuple[Order, Tensor]]()
        for kind, order in enumerate(self.orders.values(), PLAN + 1):
            if (rows := (self.kind == kind).nonzero()[:, 0]).numel():
                if order.score is None:
                    needed[rows], level[rows] = choose_at_random(order, state, rows, narrow["time"])
                    changed[rows] = needed[rows]
                else:
                    needed[rows] = was_hidden[rows] & state.is_free[rows]
                    level[rows] = mean_noise_level(needed[rows].sum(-1) / narrow["first"][rows].clamp(min=1))
                    scored.append((order, rows))
        features = state.features_at(needed, level)
        index = needed.flatten().nonzero()[:, 0]
        for order, rows in scored:
            changed[rows] = self._choose_by_score(order, rows, features, index, needed)
        if index.numel():
            self._reveal(changed & was_hidden, features, index, self.sampling[:, 1].where(is_last, self.sampling[:, 0]))
        state.hide(changed & ~was_hidden)
        state.clock += 1
        wide["is_hidden"] = state.is_hidden
        narrow["step"], narrow["frame"] = narrow["step"] + 1, narrow["frame"] + 1
        return self._end_windows(is_plan, changed)

    def _change_by_plan(self, is_plan: Tensor, is_last: Tensor) -> tuple[Tensor, Tensor]:
        """Return what changes (B, L) in the rows with a plan, and their noise levels (B,).

        The last step of a plan's row fills what is still hidden, at the noise level at which nothing is.
        """
        narrow, state = self.narrow, self.state
        at = self.offset + torch.minimum(narrow["step"], narrow["steps"] - 1).clamp(min=0) * is_plan
        transition = Transition(*self.table[at][..., None].unbind(1))
        if bool(narrow["by_confidence"].any()):
            split = confidence_remask_prob(
                transition.remask_prob, self.wide["confidence"], state.is_hidden | ~state.is_free
            )
            remask = torch.where(narrow["by_confidence"][:, None], split, transition.remask_prob)
            transition = replace(transition, remask_prob=remask)
        changed = state.find_changes(state.random_numbers()[0][0], transition)
        changed = torch.where(is_last[:, None], state.is_hidden & state.is_free, changed) & is_plan[:, None]
        return changed, transition.noise_level[:, 0].float().masked_fill(is_last, 0.0)

    def _choose_by_score(self, order: Order, rows: Tensor, features: Tensor, index: Tensor, needed: Tensor) -> Tensor:
        """Return the best positions (n, L) of rows by an order's score, with features at the flat positions `index`."""
        narrow, state = self.narrow, self.state
        is_mine = torch.zeros(len(self.rows), dtype=torch.bool).index_fill_(0, rows, True)[index // needed.shape[1]]
        places = is_mine.nonzero()[:, 0]
        logits = state.iter_logits(features[state.send(places)], index[places])
        assert order.score is not None
        at_hidden = torch.cat([order.score(part.float()) for _, part in logits]).cpu()
        scores = at_hidden.new_zeros(len(rows), needed.shape[1]).masked_scatter_(needed[rows], at_hidden)
        steps, bound = narrow["steps"][rows, None], narrow["bound"][rows, None].float()
        mine = replace(order, entropy_bound=bound) if order.steps is None else replace(order, steps=steps)
        return next_positions(mine, scores, needed[rows], narrow["step"][rows, None])

    def _reveal(self, revealed: Tensor, features: Tensor, index: Tensor, sampling: Tensor) -> None:
        """Draw the tokens at the revealed positions, the rows of one set of sampling parameters at a time."""
        state, row, is_revealed = self.state, index // revealed.shape[1], revealed.flatten()[index]
        for number, params in enumerate(self.samplings):
            is_mine = sampling == number
            if bool(is_mine.any()):
                mine = revealed & is_mine[:, None]
                places = (is_revealed & is_mine[row]).nonzero()[:, 0]
                probs = state.reveal(mine, features[state.send(places)], params)
                if bool(self.narrow["by_confidence"].any()):
                    self.wide["confidence"][mine] = probs.cpu()
        has_logprobs = torch.tensor([each.top_logprobs is not None for each in self.rows])
        places = (is_revealed & has_logprobs[row]).nonzero()[:, 0]
        if places.numel():
            for part, logits in state.iter_logits(features[state.send(places)], index[places]):
                record_logprobs(self.rows, state.xt, logits, index[places][part])

    def _end_windows(self, is_plan: Tensor, changed: Tensor) -> StepResult:
        """Move rows whose block is filled to their next one; rows without another are done."""
        wide, narrow, state = self.wide, self.narrow, self.state
        left = (state.is_hidden & state.is_free).any(-1)
        is_over = ~left & (~is_plan | (narrow["step"] >= narrow["steps"]))
        has_next = (wide["may_change"] & (wide["block_at"] > narrow["window"][:, None])).any(-1)
        is_remasking = narrow["step"] < narrow["remask_end"]
        may_change = wide["may_change"] & (state.is_hidden | (is_remasking[:, None] & state.is_free))
        settled = torch.minimum((~may_change).long().cumprod(-1).sum(-1), narrow["length"])
        frame, nfe = narrow["frame"].clone(), narrow["nfe"].clone()
        result = StepResult(state.xt, state.is_hidden, changed, settled, is_over & ~has_next, frame, nfe)
        if bool((is_over & has_next).any()):
            self.narrow = enter_window(wide, narrow, is_over & has_next)
            self._recompose()
        return result


def build_limits(kinds: Tensor, predictor: Predictor, tokenizer: Tokenizer) -> TokenLimits:
    """Return the banned tokens of positions by their kinds (B, L); a head may be wider than the vocabulary."""
    banned = classify_tokens(tokenizer).banned
    extra = predictor.head[1].numel() - banned.shape[1]
    return TokenLimits(kinds, F.pad(banned, (0, extra), value=True).to(predictor.device))


def record_logprobs(rows: Sequence[Row], tokens: Tensor, logits: Tensor, index: Tensor) -> None:
    """Record the log-probabilities of tokens (B, L) that were drawn from logits (N, V) at flat positions (N,)."""
    logprobs, width = logits.float().log_softmax(-1), tokens.shape[1]
    drawn = logprobs.gather(-1, tokens.flatten()[index.to(tokens.device)][:, None])[:, 0].tolist()
    top = logprobs.topk(max(row.top_logprobs or 0 for row in rows), -1)
    for at, logprob, values, ids in zip(index.tolist(), drawn, top.values.tolist(), top.indices.tolist(), strict=True):
        row = rows[at // width]
        best = dict(zip(ids[: row.top_logprobs], values[: row.top_logprobs], strict=True))
        possible = {token: value for token, value in best.items() if value > -math.inf}
        row.logprobs[at % width] = TokenLogprob(logprob, possible)


def choose_at_random(order: Order, state: SamplerState, rows: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next positions (n, L) of first-hitting rows and their noise levels (n,), and advance their times."""
    is_hidden = (state.is_hidden & state.is_free)[rows]
    rng = CounterRng(*(x[rows] for x in (state.rng.seed, state.rng.rows, torch.as_tensor(state.rng.start))))
    (scores,), (other,) = rng.pairs(state.clock, 1, is_hidden.shape[1], Purpose.ORDER)
    time[rows] *= other[:, 0] ** (1 / is_hidden.sum(-1).clamp(min=1))
    return next_positions(order, scores, is_hidden, 0), mean_noise_level(time[rows]).float()


def build_columns(rows: Sequence[Row], predictor: Predictor) -> tuple[Columns, Columns]:
    """Return the wide and the narrow columns of rows that have not begun."""
    layouts, stack = [row.layout for row in rows], partial(pad_sequence, batch_first=True)
    pad_id = int(predictor.config.mask_id == 0)  # padding must not look hidden
    ids = stack([torch.tensor(layout.ids) for layout in layouts], padding_value=pad_id)
    block = torch.tensor([row.request.config.block or NO_BLOCK for row in rows])
    wide: Columns = {
        "xt": ids.to(predictor.device),
        "is_hidden": ids == torch.tensor(predictor.config.mask_id),
        "may_change": ~stack([torch.tensor(layout.is_fixed) for layout in layouts], padding_value=True),
        "kinds": stack([torch.tensor(layout.kinds) for layout in layouts]),
        "block_at": torch.arange(ids.shape[1]) // block[:, None],
        "confidence": torch.zeros(ids.shape, dtype=torch.float64),
    }
    values = [describe_row(row) for row in rows]
    narrow = {name: torch.tensor([each[name] for each in values]) for name in values[0]}
    zero = torch.zeros(len(rows), dtype=torch.int64)
    narrow |= {"frame": zero, "nfe": zero.clone(), "window": zero - 1, "step": zero, "first": zero}
    narrow["time"] = torch.ones(len(rows), dtype=torch.float64)
    return wide, enter_window(wide, narrow, torch.ones(len(rows), dtype=torch.bool))


def describe_row(row: Row) -> dict[str, Any]:
    """Return the settings of a row as numbers; `remask_end` is the step after the last that may remask."""
    sampler = row.request.sampler
    numbers: dict[str, Any] = {"length": len(row.layout), "seed": row.request.config.seed, "number": row.number}
    own: dict[str, Any] = {"steps": 0, "remask_end": 0, "by_confidence": False, "bound": 0.0}
    if isinstance(sampler, Plan):
        remask_end = 1 + max(sampler.remask_prob.nonzero()[:, 0].tolist(), default=-1)
        own |= {"steps": len(sampler), "remask_end": remask_end, "by_confidence": sampler.by_confidence}
    elif sampler is not None:
        own |= {"steps": sampler.steps or 0, "bound": sampler.entropy_bound or 0.0}
    return numbers | own


def choose_sampling(row: Row) -> tuple[SamplingParams, SamplingParams]:
    """Return how a row's tokens are drawn, and those that a plan has left hidden at its end."""
    sampler, sampling = row.request.sampler, row.request.sampling
    if not isinstance(sampler, Plan):
        return sampling, sampling
    sampling = sampling if sampler.nucleus else replace(sampling, top_p=1.0, top_k=None)
    return sampling, replace(sampling, temperature=0.0) if sampler.fill_argmax else sampling


def stack_plans(samplers: Sequence[Plan | Order | None]) -> tuple[Tensor, Tensor]:
    """Return the tables of all plans one below the other (steps, columns), and where each sampler's begins (B,)."""
    offsets, tables, total = dict[int, int](), [], 0
    for each in samplers:
        if id(each) not in offsets:
            offsets[id(each)] = total
            if isinstance(each, Plan):
                tables.append(torch.stack([getattr(each, column) for column in COLUMNS], -1))
                total += len(each)
    table = torch.cat([*tables, torch.zeros(1, len(COLUMNS), dtype=torch.float64)])
    return table, torch.tensor([offsets[id(each)] for each in samplers])


def enter_window(wide: Columns, narrow: Columns, is_over: Tensor) -> Columns:
    """Return narrow columns in which the rows that are over with a block stand at the start of their next one."""
    is_ahead = wide["may_change"] & (wide["block_at"] > narrow["window"][:, None])
    following = wide["block_at"].masked_fill(~is_ahead, NO_BLOCK).amin(-1)
    hidden = (wide["is_hidden"] & wide["may_change"] & (wide["block_at"] == following[:, None])).sum(-1)
    wide["confidence"][is_over] = 0.0
    time = narrow["time"].new_ones(())
    fresh = {"window": following, "step": torch.zeros_like(hidden), "first": hidden, "time": time}
    return narrow | {name: torch.where(is_over, value, narrow[name]) for name, value in fresh.items()}


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
            self.groups.append(_CausalGroup(self.predictor, [row for row in rows if row.request.sampling == sampling]))

    def keep(self, is_kept: Tensor) -> None:
        """Remove the rows that are not kept; a group is evaluated as long as one of its rows is."""
        for group, kept in zip(self.groups, is_kept.split([len(group.rows) for group in self.groups]), strict=True):
            group.live = group.live[kept]
        self.groups = [group for group in self.groups if len(group.live)]

    def step(self) -> StepResult:
        """Draw the next token of every group."""
        results = [group.step() for group in self.groups]
        width = max(result.tokens.shape[1] for result in results)
        columns = []
        for parts in zip(*results, strict=True):
            columns.append(torch.cat([F.pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in parts]))
        return StepResult(*columns)


class _CausalGroup:
    """Rows whose next token is drawn at one position."""

    def __init__(self, predictor: Predictor, rows: Sequence[Row]) -> None:
        self.all_rows, self.live = list(rows), torch.arange(len(rows))
        layouts, stack = [row.layout for row in rows], partial(pad_sequence, batch_first=True)
        self.length = torch.tensor([len(layout) for layout in layouts])
        xt = stack([torch.tensor(layout.ids) for layout in layouts]).to(predictor.device)
        self.is_fixed = stack([torch.tensor(layout.is_fixed) for layout in layouts], padding_value=True)
        kinds = stack([torch.tensor(layout.kinds) for layout in layouts])
        seeds, numbers = (
            torch.tensor(x) for x in zip(*((row.request.config.seed, row.number) for row in rows), strict=True)
        )
        cache, self.limits = predictor.model.new_cache(*xt.shape), build_limits(kinds, predictor, layouts[0].tokenizer)

        def predict_next(tokens: Tensor) -> Tensor:
            features: Tensor = predictor.model(tokens, cache=cache).final[:, -1]
            return features

        def logits_at(features: Tensor) -> Tensor:
            self.logits = predictor.logits_at(features)
            return self.logits

        self.frames: Iterator[Frame] = continue_tokens(
            xt,
            predict_next,
            logits_at,
            is_fixed=self.is_fixed,
            rng=CounterRng(seeds, numbers),
            sampling=rows[0].request.sampling,
            limits=self.limits,
        )

    @property
    def rows(self) -> list[Row]:
        """The rows that are neither done nor cancelled."""
        return [self.all_rows[i] for i in self.live.tolist()]

    def step(self) -> StepResult:
        """Draw the next token of every row."""
        frame = next(self.frames)
        has_logprobs = torch.tensor([row.top_logprobs is not None for row in self.all_rows])
        if (index := (frame.changed & has_logprobs[:, None]).flatten().nonzero()[:, 0]).numel():
            logits = self.logits[(index // frame.tokens.shape[1]).to(self.logits.device)]
            record_logprobs(self.all_rows, frame.tokens, self.limits.apply(logits, index), index)
        is_hidden = frame.is_masked & ~self.is_fixed
        settled = torch.minimum((~is_hidden).long().cumprod(-1).sum(-1), self.length)
        columns = (frame.tokens, is_hidden, frame.changed, settled, ~is_hidden.any(-1), frame.nfe, frame.nfe)
        return StepResult(*(x[self.live.to(x.device)] for x in columns))
