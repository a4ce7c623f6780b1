"""The sampling loop: a generator of frames that runs a plan or an order, whole or block by block.

Which positions change is decided on the host, which tokens stand there on the device: the positions of most plans do
not depend on the prediction, so nothing waits for the device to know where to look next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from adlm.diffusion.categorical import Limits, SamplingParams, draw
from adlm.diffusion.orders import Order, next_positions
from adlm.diffusion.plans import EPS, Plan, Transition, confidence_remask_prob
from adlm.diffusion.rng import CounterRng, Purpose

# (tokens (n, L), noise_level (n,) on the host, valid (n, L) or None) -> features (n, L, dim)
Predict = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# features (N, dim) -> logits (N, V) with the mask token ruled out
LogitsAt = Callable[[Tensor], Tensor]
# numbers (n,) on the host, in the batch, of the rows that `predict` is asked for next
OnRows = Callable[[Tensor], None]

POSITIONS_AT_ONCE = {"cuda": 4096, "cpu": 256}  # rows of logits that exist at a time
NUMBERS_AT_ONCE = 65536  # random numbers made in one go
STEPS_OF_A_BLOCK = 1 << 20  # how far apart the clocks of two blocks stand


@dataclass(frozen=True)
class Frame:
    """The state after one step."""

    step: int
    tokens: Tensor  # (B, L), on the device
    is_masked: Tensor  # (B, L)
    changed: Tensor  # (B, L): revealed where not masked now, hidden again where masked
    nfe: Tensor  # (B,): network evaluations that each row has had


@dataclass
class State:
    """A batch on its way.

    The network runs for rows in which a token is about to be drawn, and a draw changes its row: so no row is ever
    evaluated twice in the same state, and none for a step that reveals nothing in it.
    """

    xt: Tensor  # (B, L), on the device; the rest on the host
    is_hidden: Tensor  # (B, L): where xt holds the mask
    is_free: Tensor  # (B, L): positions that may change
    predict: Predict
    logits_at: LogitsAt
    mask_id: int
    rng: CounterRng
    how: SamplingParams
    valid: Tensor | None = None
    limits: Limits | None = None
    on_rows: OnRows | None = None
    step: int = 0  # frames so far
    clock: int = 0  # which random numbers are next: not the frames', because how many a block takes depends on all rows
    nfe: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.nfe = torch.zeros(self.xt.shape[0], dtype=torch.int64)
        self._numbers: tuple[int, Tensor, Tensor] | None = None

    def numbers(self) -> tuple[Tensor, Tensor]:
        """This step's random numbers (B, L) for positions and for tokens."""
        if self._numbers is None or not 0 <= self.clock - self._numbers[0] < len(self._numbers[1]):
            steps = max(1, NUMBERS_AT_ONCE // max(1, self.xt.numel()))
            self._numbers = (self.clock, *self.rng.pairs(self.clock, steps, self.xt.shape[1], Purpose.SAMPLE))
        start, where, what = self._numbers
        return where[self.clock - start], what[self.clock - start]

    def features_at(self, is_asked: Tensor, noise_level: Tensor) -> Tensor:
        """The network's features (N, dim) at the positions asked for, in the order of the flattened batch."""
        rows = is_asked.any(-1).nonzero()[:, 0]
        if rows.numel() == 0:
            return torch.empty(0, 0)
        self.nfe[rows] += 1
        if self.on_rows is not None:
            self.on_rows(rows)
        level = noise_level.float().reshape(-1).expand(self.xt.shape[0])
        if rows.numel() == self.xt.shape[0]:
            features = self.predict(self.xt, level, self.valid)
        else:
            valid = None if self.valid is None else self.valid[rows]
            features = self.predict(self.xt[self.send(rows)], level[rows], valid)
        return features.flatten(0, 1)[self.send(is_asked[rows].flatten().nonzero()[:, 0])]

    def logits_of(self, features: Tensor, index: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The head at features (N, dim) of places (N,) in the flattened batch, some at a time."""
        size = POSITIONS_AT_ONCE[self.xt.device.type]
        for start in range(0, features.shape[0], size):
            part = slice(start, start + size)
            logits = self.logits_at(features[part])
            yield part, logits if self.limits is None else self.limits.applied(logits, index[part])

    def put(
        self, is_revealed: Tensor, features: Tensor, how: SamplingParams, is_remasked: Tensor | None = None
    ) -> Tensor:
        """Draw tokens where revealed and put them in place, masks where remasked; the probability of each token."""
        index = is_revealed.flatten().nonzero()[:, 0]
        u = self.send(self.numbers()[1].flatten()[index])
        parts = [draw(logits, u[part], how) for part, logits in self.logits_of(features, index)]
        tokens, probs = [part.tokens for part in parts], [part.probs for part in parts]
        self.is_hidden = self.is_hidden & ~is_revealed
        if is_remasked is not None and bool(is_remasked.any()):
            self.is_hidden = self.is_hidden | is_remasked
            back = is_remasked.flatten().nonzero()[:, 0]
            index = torch.cat([index, back])
            tokens.append(torch.full_like(back, self.mask_id, device=self.xt.device))
        if tokens:
            self.xt.view(-1)[self.send(index)] = torch.cat(tokens)
        return torch.cat(probs) if probs else u

    def frame(self, changed: Tensor) -> Frame:
        """Close a step."""
        self.step, self.clock = self.step + 1, self.clock + 1
        return Frame(self.step, self.xt.clone(), self.is_hidden, changed, self.nfe.clone())

    def send(self, x: Tensor) -> Tensor:
        """To the device without waiting for it."""
        return x.pin_memory().to(self.xt.device, non_blocking=True) if self.xt.is_cuda else x


def denoise(
    xt: Tensor,
    sampler: Plan | Order,
    predict: Predict,
    logits_at: LogitsAt,
    *,
    mask_id: int,
    rng: CounterRng,
    how: SamplingParams | None = None,
    is_fixed: Tensor | None = None,
    valid: Tensor | None = None,
    limits: Limits | None = None,
    block: int | None = None,
    on_rows: OnRows | None = None,
) -> Iterator[Frame]:
    """Fill the mask tokens of xt (B, L) and yield a frame per step; `limits` say which tokens may not stand where.

    Tokens that are visible in xt may be hidden again by a remasking plan unless `is_fixed`, which by default is
    everything that is visible at the start. `block` fills windows of that many positions from left to right, each with
    all of the sampler's steps. At least one frame comes, even where nothing is hidden. `on_rows` hears, before every
    evaluation, which rows it is for.
    """
    xt = xt.to(torch.int64).clone(memory_format=torch.contiguous_format)
    for name, mask in (("is_fixed", is_fixed), ("valid", valid)):
        if mask is not None and mask.shape != xt.shape:
            raise ValueError(
                f"{name} has shape {tuple(mask.shape)}, the tokens {tuple(xt.shape)}: they must be the same"
            )
    is_hidden = (xt == mask_id).cpu()
    fixed = ~is_hidden if is_fixed is None else is_fixed.cpu()
    if bool((fixed & is_hidden).any()):
        row, position = (fixed & is_hidden).nonzero()[0].tolist()
        raise ValueError(f"row {row}, position {position} is fixed but holds the mask token: fixed tokens must be text")
    is_free = ~fixed if valid is None else ~fixed & valid.cpu()
    state = State(
        xt, is_hidden, is_free, predict, logits_at, mask_id, rng, how or SamplingParams(), valid, limits, on_rows
    )
    for number, window in _windows(is_free, block):
        state.is_free, state.clock = window, number * STEPS_OF_A_BLOCK
        yield from _run_plan(state, sampler) if isinstance(sampler, Plan) else _run_order(state, sampler)
    if state.step == 0:
        yield state.frame(torch.zeros_like(is_hidden))


def _windows(is_free: Tensor, block: int | None) -> Iterator[tuple[int, Tensor]]:
    if block is None:
        yield 0, is_free
        return
    if block < 1:
        raise ValueError(f"block must be at least 1 position, got {block}")
    position = torch.arange(is_free.shape[1])
    for start in range(0, is_free.shape[1], block):
        window = is_free & (position >= start) & (position < start + block)
        if bool(window.any()):
            yield start // block, window


def _run_plan(state: State, plan: Plan) -> Iterator[Frame]:
    """Follow the table; what is hidden after its last row is filled at once."""
    how = state.how if plan.nucleus else replace(state.how, top_p=1.0, top_k=None)
    confidence = torch.zeros(state.xt.shape, dtype=torch.float64) if plan.by_confidence else None
    for transition in plan:
        if confidence is not None:
            remask = confidence_remask_prob(transition.remask_prob, confidence, state.is_hidden | ~state.is_free)
            transition = replace(transition, remask_prob=remask)
        yield step_plan(state, transition, how, confidence)
    left = state.is_hidden & state.is_free
    if bool(left.any()):
        final = replace(how, temperature=0.0) if plan.fill_argmax else how
        # The network is told that nothing is hidden: the time at which the grid ends.
        state.put(left, state.features_at(left, torch.zeros(())), final)
        yield state.frame(left)


def step_plan(state: State, transition: Transition, how: SamplingParams, confidence: Tensor | None = None) -> Frame:
    """One reverse step. Positions first: the network runs only for rows that reveal something, its head only where.

    `confidence` (B, L), where it is wanted, takes the probability of every token that is drawn.
    """
    chance = torch.where(state.is_hidden, transition.reveal_prob, transition.remask_prob)
    changed = (state.numbers()[0] < chance) & state.is_free
    revealed = changed & state.is_hidden
    probs = state.put(revealed, state.features_at(revealed, transition.noise_level), how, changed & ~state.is_hidden)
    if confidence is not None:
        confidence[revealed] = probs.cpu()
    return state.frame(changed)


def _run_order(state: State, order: Order) -> Iterator[Frame]:
    """Reveal the best positions until none is hidden."""
    length = state.xt.shape[1]
    time = torch.ones(state.xt.shape[0], dtype=torch.float64)
    start, first = state.step, (state.is_hidden & state.is_free).sum(-1)
    while bool((is_hidden := state.is_hidden & state.is_free).any()):
        hidden = is_hidden.sum(-1)
        if order.score is None:  # at random: the positions are known before the network runs
            (scores,), (other,) = state.rng.pairs(state.clock, 1, length, Purpose.ORDER)
            # The next reveal of n hidden positions comes at t u^(1/n).
            time = time * other[:, 0] ** (1 / hidden.clamp(min=1))
            chosen = next_positions(order, scores, is_hidden, state.step - start)
            features = state.features_at(chosen, _level(time))
        else:
            features = state.features_at(is_hidden, _level(hidden / first.clamp(min=1)))
            index = is_hidden.flatten().nonzero()[:, 0]
            parts = [order.score(logits.float()) for _, logits in state.logits_of(features, index)]
            at_hidden = torch.cat(parts).cpu()
            scores = at_hidden.new_zeros(state.xt.shape).masked_scatter_(is_hidden, at_hidden)
            chosen = next_positions(order, scores, is_hidden, state.step - start)
            features = features[state.send(chosen[is_hidden].nonzero()[:, 0])]
        state.put(chosen, features, state.how)
        yield state.frame(chosen)


def _level(time: Tensor) -> Tensor:
    """The noise level at which a share `time` of the tokens is hidden."""
    return -torch.log(1 - (1 - EPS) * time)
