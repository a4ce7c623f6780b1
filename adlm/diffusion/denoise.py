"""The sampling loop: a generator of frames that runs a plan or an order, whole or block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adlm.diffusion.categorical import Draw, Drawn, draw
from adlm.diffusion.orders import Order, next_positions
from adlm.diffusion.plans import EPS, Plan, spread
from adlm.diffusion.rng import CounterRng, Purpose

# (tokens (n, L), noise_level (n,), valid (n, L) or None) -> features (n, L, dim)
Predict = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# features (N, dim) -> logits (N, V) with the mask token ruled out
LogitsAt = Callable[[Tensor], Tensor]

POSITIONS_AT_ONCE = {"cuda": 4096, "cpu": 256}  # how many rows of logits exist at a time


@dataclass(frozen=True)
class Frame:
    """The state after one step."""

    step: int
    tokens: Tensor  # (B, L)
    is_masked: Tensor  # (B, L)
    changed: Tensor  # (B, L): revealed where not masked now, hidden again where masked
    nfe: Tensor  # (B,): network evaluations that each row has had


@dataclass
class State:
    """A batch on its way: tokens, and the features of rows that have not changed since they were evaluated."""

    xt: Tensor
    is_free: Tensor  # (B, L): positions that may change
    predict: Predict
    logits_at: LogitsAt
    mask_id: int
    rng: CounterRng
    how: Draw
    time_conditioning: bool = False
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        rows = self.xt.shape[0]
        self.features: Tensor | None = None
        self.is_stale = torch.ones(rows, dtype=torch.bool, device=self.xt.device)
        self.nfe = torch.zeros(rows, dtype=torch.int64, device=self.xt.device)
        self.step = 0

    @property
    def is_hidden(self) -> Tensor:
        return (self.xt == self.mask_id) & self.is_free

    def evaluate(self, is_needed: Tensor, noise_level: Tensor) -> None:
        """Run the network on the rows that need a prediction and have changed (or whose time has) since their last."""
        if not self.time_conditioning:
            is_needed = is_needed & self.is_stale
        rows = is_needed.nonzero()[:, 0]
        if rows.numel() == 0:
            return
        is_all = rows.numel() == self.xt.shape[0]
        tokens = self.xt if is_all else self.xt[rows]
        valid = self.valid if self.valid is None or is_all else self.valid[rows]
        level = noise_level.float().expand(self.xt.shape[0])
        fresh = self.predict(tokens, level if is_all else level[rows], valid)
        if self.features is None:
            self.features = fresh.new_zeros(*self.xt.shape, fresh.shape[-1])
        self.features[rows] = fresh
        self.is_stale[rows] = False
        self.nfe[rows] += 1

    def logits_of(self, index: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The head at flat positions `index`, some at a time."""
        assert self.features is not None
        flat, size = self.features.flatten(0, 1), POSITIONS_AT_ONCE[self.xt.device.type]
        for start in range(0, index.numel(), size):
            part = slice(start, start + size)
            yield part, self.logits_at(flat[index[part]])

    def draw(self, index: Tensor, how: Draw) -> Drawn:
        """Tokens for flat positions `index`."""
        length = self.xt.shape[1]
        u = self.rng.uniform_at(self.step, index // length, index % length, Purpose.TOKEN)
        parts = [draw(logits, u[part], how) for part, logits in self.logits_of(index)]
        return Drawn(torch.cat([p.tokens for p in parts]), torch.cat([p.probs for p in parts]))

    def reveal(self, is_revealed: Tensor, noise_level: Tensor, how: Draw) -> tuple[Tensor, Drawn] | None:
        """Draw tokens at these positions and put them in place; None where there are no positions."""
        index = is_revealed.flatten().nonzero()[:, 0]
        if index.numel() == 0:
            return None
        self.evaluate(is_revealed.any(-1), noise_level)
        drawn = self.draw(index, how)
        self.xt.view(-1)[index] = drawn.tokens
        return index, drawn

    def frame(self, changed: Tensor) -> Frame:
        """Close a step."""
        self.is_stale |= changed.any(-1)
        self.step += 1
        return Frame(self.step, self.xt.clone(), self.xt == self.mask_id, changed, self.nfe.clone())


def denoise(
    xt: Tensor,
    sampler: Plan | Order,
    predict: Predict,
    logits_at: LogitsAt,
    *,
    mask_id: int,
    rng: CounterRng,
    how: Draw | None = None,
    is_fixed: Tensor | None = None,
    valid: Tensor | None = None,
    block: int | None = None,
    time_conditioning: bool = False,
) -> Iterator[Frame]:
    """Fill the mask tokens of xt (B, L) and yield a frame per step.

    Tokens that are visible in xt may be hidden again by a remasking plan unless `is_fixed`, which by default is
    everything that is visible at the start. `block` fills windows of that many positions from left to right.
    """
    if is_fixed is None:
        is_fixed = xt != mask_id
    if bool((is_fixed & (xt == mask_id)).any()):
        row, position = (is_fixed & (xt == mask_id)).nonzero()[0].tolist()
        raise ValueError(f"row {row}, position {position} is fixed but holds the mask token: fixed tokens must be text")
    is_free = ~is_fixed if valid is None else ~is_fixed & valid
    state = State(xt.clone(), is_free, predict, logits_at, mask_id, rng, how or Draw(), time_conditioning, valid)
    if isinstance(sampler, Plan):
        sampler = sampler.to(xt.device)
    for window in _windows(state.is_free, block):
        state.is_free = window
        yield from _run_plan(state, sampler) if isinstance(sampler, Plan) else _run_order(state, sampler)


def _windows(is_free: Tensor, block: int | None) -> Iterator[Tensor]:
    if block is None:
        yield is_free
        return
    if block < 1:
        raise ValueError(f"block must be at least 1 position, got {block}")
    position = torch.arange(is_free.shape[1], device=is_free.device)
    for start in range(0, is_free.shape[1], block):
        window = is_free & (position >= start) & (position < start + block)
        if bool(window.any()):
            yield window


def _run_plan(state: State, plan: Plan) -> Iterator[Frame]:
    """Positions first: which of them change depends on the table and the random numbers alone, so the network runs
    only for rows that reveal something, and its head only where."""
    how = state.how if plan.nucleus else replace(state.how, top_p=1.0, top_k=None)
    confidence = torch.zeros(state.xt.shape, dtype=torch.float64, device=state.xt.device)
    length = state.xt.shape[1]
    for transition in plan:
        is_hidden = state.xt == state.mask_id
        remask = transition.remask_prob
        if plan.by_confidence:
            remask = spread(remask, confidence, is_hidden | ~state.is_free)
            transition = replace(transition, remask_prob=torch.where(is_hidden, 0.0, remask))
        u = state.rng.uniform(state.step, length, Purpose.CHANGE)
        changed = (u < torch.where(is_hidden, transition.reveal_prob, remask)) & state.is_free
        revealed = state.reveal(changed & is_hidden, transition.noise_level, how)
        if revealed is not None:
            index, drawn = revealed
            confidence.view(-1)[index] = drawn.probs
        state.xt.masked_fill_(changed & ~is_hidden, state.mask_id)
        yield state.frame(changed)
    left = state.is_hidden
    if bool(left.any()):
        final = replace(how, temperature=0.0) if plan.fill_argmax else how
        # The network is told that (almost) nothing is hidden: the time at which the grid ends.
        state.reveal(left, torch.tensor(0.0, device=state.xt.device), final)
        yield state.frame(left)


def _run_order(state: State, order: Order) -> Iterator[Frame]:
    """Reveal the best positions until none is hidden."""
    length = state.xt.shape[1]
    time = torch.ones(state.xt.shape[0], dtype=torch.float64, device=state.xt.device)
    start, first = state.step, state.is_hidden.sum(-1)
    while bool((is_hidden := state.is_hidden).any()):
        hidden = is_hidden.sum(-1)
        if order.score is None:
            u = state.rng.uniform(state.step, length + 1, Purpose.ORDER)
            # The next reveal of n hidden positions comes at t u^(1/n).
            scores, time = u[:, :-1], time * u[:, -1] ** (1 / hidden.clamp(min=1))
        else:
            time = hidden / first.clamp(min=1)
        level = -torch.log(EPS + (1 - EPS) * (1 - time))
        if order.score is not None:
            state.evaluate(hidden > 0, level)
            index = is_hidden.flatten().nonzero()[:, 0]
            at_index = torch.cat([order.score(logits) for _, logits in state.logits_of(index)])
            scores = at_index.new_zeros(state.xt.numel()).index_copy(0, index, at_index).view_as(state.xt)
        chosen = next_positions(order, scores, is_hidden, state.step - start)
        state.reveal(chosen, level, state.how)
        yield state.frame(chosen)
