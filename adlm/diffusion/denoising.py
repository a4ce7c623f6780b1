"""Sampling (Algorithm 1): an iterator of frames that runs a plan or an order, whole or block by block.

Which positions change is decided on the host, which tokens stand there on the device: the positions of most plans do
not depend on the prediction, so nothing waits for the device to know where to look next.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from adlm.diffusion.categorical import SamplingParams, TokenLimits, draw
from adlm.diffusion.orders import Order, next_positions
from adlm.diffusion.plans import Plan, Transition, confidence_remask_prob, mean_noise_level
from adlm.diffusion.rng import CounterRng, Purpose

# (tokens (n, L), noise_level (n,) on the host, valid (n, L) or None, places (n,) in the batch) -> features (n, L, dim)
Predict = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
# features (N, dim) -> logits (N, V) with the mask token ruled out
LogitsAt = Callable[[Tensor], Tensor]
# tokens (B, n) that follow those read so far -> features of the last of them (B, dim)
PredictNext = Callable[[Tensor], Tensor]

MAX_LOGIT_ROWS = {"cuda": 4096, "cpu": 256, "mps": 256}  # rows of logits that exist at a time
MAX_RANDOM_NUMBERS = 65536  # made in one go
MAX_BLOCK_STEPS = 1 << 20  # the clocks of two blocks are this far apart
IDLE_STEPS = 8  # compared with their noise at once after a step that changed nothing, then twice as many, and so on


@dataclass(frozen=True)
class Frame:
    """The state after one step."""

    step: int
    tokens: Tensor  # (B, L), on the device
    is_masked: Tensor  # (B, L)
    changed: Tensor  # (B, L): revealed where not masked now, hidden again where masked
    nfe: Tensor  # (B,): network evaluations that each row has had
    logits: Tensor | None = (
        None  # (B, V): of a causal model, those that the next token was drawn from
    )


@dataclass
class SamplerState:
    """A batch while it is sampled.

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
    sampling: SamplingParams
    valid: Tensor | None = None
    limits: TokenLimits | None = None
    max_numbers: int = MAX_RANDOM_NUMBERS
    step: int = 0  # frames so far
    clock: int = 0  # which random numbers are next: not `step`, because how many a block takes depends on all rows
    nfe: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.nfe = torch.zeros(self.xt.shape[0], dtype=torch.int64)
        self._numbers: tuple[int, Tensor, Tensor] | None = None

    def random_numbers(self, steps: int = 1) -> tuple[Tensor, Tensor]:
        """Return uniform numbers (k, B, L) of at most `steps` steps: one for each position, one for its token."""
        if self._numbers is None or not 0 <= self.clock - self._numbers[0] < len(self._numbers[1]):
            made = max(1, self.max_numbers // max(1, self.xt.numel()))
            self._numbers = (
                self.clock,
                *self.rng.pairs(self.clock, made, self.xt.shape[1], Purpose.SAMPLE),
            )
        first = self.clock - self._numbers[0]
        return self._numbers[1][first : first + steps], self._numbers[2][first : first + steps]

    def features_at(self, is_selected: Tensor, noise_level: Tensor) -> Tensor:
        """Evaluate the network and return its features (N, dim) at the selected positions of the flattened batch."""
        rows = is_selected.any(-1).nonzero()[:, 0]
        if rows.numel() == 0:
            return torch.empty(0, 0)
        self.nfe[rows] += 1
        level = noise_level.float().reshape(-1).expand(self.xt.shape[0])
        tokens, valid = self.xt, self.valid
        if rows.numel() < self.xt.shape[0]:
            tokens, level = self.xt[self.send(rows)], level[rows]
            valid = None if self.valid is None else self.valid[rows]
        with torch.no_grad():
            features = self.predict(tokens, level, valid, rows)
        return features.flatten(0, 1)[self.send(is_selected[rows].flatten().nonzero()[:, 0])]

    def iter_logits(self, features: Tensor, index: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Apply the head to features (N, dim) of positions (N,) in the flattened batch, some at a time."""
        size = MAX_LOGIT_ROWS[self.xt.device.type]
        for start in range(0, features.shape[0], size):
            part = slice(start, start + size)
            logits = self.logits_at(features[part])
            yield part, logits if self.limits is None else self.limits.apply(logits, index[part])

    def reveal(self, is_revealed: Tensor, features: Tensor, sampling: SamplingParams) -> Tensor:
        """Draw a token for every revealed position and write it; return the probability (N,) of each token."""
        index = is_revealed.flatten().nonzero()[:, 0]
        u = self.send(self.random_numbers()[1][0].flatten()[index])
        parts = [
            draw(logits, u[part], sampling) for part, logits in self.iter_logits(features, index)
        ]
        if not parts:
            return u
        self.xt.view(-1)[self.send(index)] = torch.cat([part.tokens for part in parts])
        self.is_hidden = self.is_hidden & ~is_revealed
        return torch.cat([part.probs for part in parts])

    def hide(self, is_remasked: Tensor) -> None:
        """Write the mask at every remasked position."""
        index = is_remasked.flatten().nonzero()[:, 0]
        if index.numel():
            self.xt.view(-1).index_fill_(0, self.send(index), self.mask_id)
            self.is_hidden = self.is_hidden | is_remasked

    def end_step(self, changed: Tensor) -> Frame:
        """Advance the clock and return the step's frame."""
        self.step, self.clock = self.step + 1, self.clock + 1
        return Frame(self.step, self.xt.clone(), self.is_hidden, changed, self.nfe.clone())

    def find_changes(self, numbers: Tensor, transition: Transition) -> Tensor:
        """Return the positions (…, B, L) that change, by their random numbers."""
        change_prob = torch.where(self.is_hidden, transition.reveal_prob, transition.remask_prob)
        return (numbers < change_prob) & self.is_free

    def score_positions(self, order: Order, is_hidden: Tensor, features: Tensor) -> Tensor:
        """Return an order's score of every hidden position (B, L), from their features (N, dim); 0 elsewhere."""
        assert order.score is not None
        index = is_hidden.flatten().nonzero()[:, 0]
        scores = torch.cat(
            [order.score(logits.float()) for _, logits in self.iter_logits(features, index)]
        ).cpu()
        return scores.new_zeros(self.xt.shape).masked_scatter_(is_hidden, scores)

    def send(self, x: Tensor) -> Tensor:
        """Copy to the device, a GPU without waiting for it; float64 stays on the host where the device has none."""
        if self.xt.is_cuda:
            return x.pin_memory().to(self.xt.device, non_blocking=True)
        return x if x.dtype == torch.float64 else x.to(self.xt.device)


def reverse_step(
    state: SamplerState,
    transition: Transition,
    sampling: SamplingParams,
    confidence: Tensor | None = None,
) -> Frame:
    """Go from time t to s (one iteration of Algorithm 1), with remask_prob as the paper's sigma_t:

    - a hidden position is revealed with probability (alpha_s - (1 - remask_prob) alpha_t) / (1 - alpha_t), and its
      token is drawn from the denoiser's distribution;
    - a visible position is hidden again with probability remask_prob.

    Positions are drawn first: the network runs only for rows that reveal something, its head only where. `confidence`
    (B, L), if given, is updated with the probability of every token that is drawn.
    """
    changed = state.find_changes(state.random_numbers()[0][0], transition)
    revealed, remasked = changed & state.is_hidden, changed & ~state.is_hidden
    features = state.features_at(revealed, transition.noise_level)
    probs = state.reveal(revealed, features, sampling)
    state.hide(remasked)
    if confidence is not None:
        confidence[revealed] = probs.cpu()
    return state.end_step(changed)


def denoise(
    xt: Tensor,
    sampler: Plan | Order,
    predict: Predict,
    logits_at: LogitsAt,
    *,
    mask_id: int,
    rng: CounterRng,
    sampling: SamplingParams | None = None,
    is_fixed: Tensor | None = None,
    valid: Tensor | None = None,
    limits: TokenLimits | None = None,
    block: int | None = None,
) -> Iterator[Frame]:
    """Fill the mask tokens of xt (B, L) and yield a frame per step; `limits` say which tokens are banned where.

    A remasking plan may hide visible tokens again, except where `is_fixed`: by default everything that is visible at
    the start. `block` fills windows of that many positions from left to right, each with all of the sampler's steps.
    There is at least one frame, even where nothing is hidden.
    """
    xt = xt.to(torch.int64).clone(memory_format=torch.contiguous_format)
    if block is not None and block < 1:
        raise ValueError(f"block must be at least 1 position, got {block}")
    is_hidden = (xt == mask_id).cpu()
    fixed = ~is_hidden if is_fixed is None else is_fixed.cpu()
    if bool((fixed & is_hidden).any()):
        row, position = (fixed & is_hidden).nonzero()[0].tolist()
        raise ValueError(
            f"row {row}, position {position} is fixed but holds the mask token: fixed tokens must be text"
        )
    is_free = ~fixed if valid is None else ~fixed & valid.cpu()
    state = SamplerState(
        xt,
        is_hidden,
        is_free,
        predict,
        logits_at,
        mask_id,
        rng,
        sampling or SamplingParams(),
        valid,
        limits,
    )
    windows = [(0, is_free)]
    if block is not None:  # the number and the free positions of each block that has any
        number_at = torch.arange(xt.shape[1]) // block
        blocks = (
            (number, is_free & (number_at == number)) for number in number_at.unique().tolist()
        )
        windows = [(number, window) for number, window in blocks if bool(window.any())]
    if isinstance(sampler, Plan):
        runs: Iterator[Iterator[Frame]] = (_run_plan(state, sampler, *window) for window in windows)
    else:
        windows = [
            (number, window) for number, window in windows if bool((window & is_hidden).any())
        ]
        runs = (_run_order(state, sampler, *window) for window in windows)
    if not windows:
        return iter([state.end_step(torch.zeros_like(is_hidden))])
    return chain.from_iterable(runs)


def _run_plan(state: SamplerState, plan: Plan, number: int, window: Tensor) -> Iterator[Frame]:
    """Follow the table of a plan within a window; what is hidden after its last row is filled at once."""
    state.is_free, state.clock = window, number * MAX_BLOCK_STEPS
    sampling, last_sampling = choose_sampling(plan, state.sampling)
    confidence = torch.zeros(state.xt.shape, dtype=torch.float64) if plan.by_confidence else None

    def get_transition(step: int | slice) -> Transition:
        transition = plan[step]
        if confidence is None:
            return transition
        remask = confidence_remask_prob(
            transition.remask_prob, confidence, state.is_hidden | ~state.is_free
        )
        return replace(transition, remask_prob=remask)

    # After a step that changes nothing, `ahead` steps at a time are searched for the next change.
    step, ahead = 0, 0
    while step < len(plan):
        if ahead == 0:
            yield (frame := reverse_step(state, get_transition(step), sampling, confidence))
            step, ahead = step + 1, 0 if bool(frame.changed.any()) else IDLE_STEPS
            continue
        numbers = state.random_numbers(min(ahead, len(plan) - step))[0]
        changed = (
            state.find_changes(numbers, get_transition(slice(step, step + len(numbers))))
            .flatten(1)
            .any(-1)
        )
        idle = int((~changed).long().cumprod(0).sum())
        for _ in range(idle):
            state.step, state.clock = state.step + 1, state.clock + 1
            yield replace(frame, step=state.step)
        step, ahead = step + idle, 2 * ahead if idle == len(numbers) else 0
    left = state.is_hidden & state.is_free
    if bool(left.any()):
        # The network is given the noise level at which nothing is hidden: that of the grid's end.
        state.reveal(left, state.features_at(left, torch.zeros(())), last_sampling)
        yield state.end_step(left)


def choose_sampling(
    sampler: Plan | Order | None, sampling: SamplingParams
) -> tuple[SamplingParams, SamplingParams]:
    """Return how a sampler's tokens are drawn, and those that a plan has left hidden at its end."""
    if not isinstance(sampler, Plan):
        return sampling, sampling
    sampling = sampling if sampler.nucleus else sampling.keep_all()
    if not sampler.fill_argmax:
        return sampling, sampling
    sampling = replace(sampling, nucleus="lineage")  # compat
    return sampling, replace(sampling, temperature=0.0)


def _run_order(state: SamplerState, order: Order, number: int, window: Tensor) -> Iterator[Frame]:
    """Reveal the best positions of a window until none is hidden."""
    state.is_free, state.clock = window, number * MAX_BLOCK_STEPS
    time = torch.ones(state.xt.shape[0], dtype=torch.float64)
    start, first = state.step, (state.is_hidden & state.is_free).sum(-1)
    while bool((is_hidden := state.is_hidden & state.is_free).any()):
        if order.score is None:  # the positions are known before the network runs
            chosen, time = choose_at_random(order, state.rng, state.clock, is_hidden, time)
            features = state.features_at(chosen, mean_noise_level(time))
        else:
            features = state.features_at(
                is_hidden, mean_noise_level(is_hidden.sum(-1) / first.clamp(min=1))
            )
            scores = state.score_positions(order, is_hidden, features)
            chosen = next_positions(order, scores, is_hidden, state.step - start)
            features = features[state.send(chosen[is_hidden].nonzero()[:, 0])]
        state.reveal(chosen, features, state.sampling)
        yield state.end_step(chosen)


def choose_at_random(
    order: Order, rng: CounterRng, clock: int, is_hidden: Tensor, time: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose the next positions (B, L) at random, and the times (B,) of their reveals: of n hidden, t u^(1/n)."""
    (scores,), (other,) = rng.pairs(clock, 1, is_hidden.shape[1], Purpose.ORDER)
    return next_positions(order, scores, is_hidden, 0), time * other[:, 0] ** (
        1 / is_hidden.sum(-1).clamp(min=1)
    )


def continue_tokens(
    xt: Tensor,
    predict_next: PredictNext,
    logits_at: LogitsAt,
    *,
    is_fixed: Tensor,
    rng: CounterRng,
    sampling: SamplingParams | None = None,
    limits: TokenLimits | None = None,
) -> Iterator[Frame]:
    """Fill what is not fixed in xt (B, L) from left to right, reading what is, and yield a frame a token."""
    if not bool(is_fixed[:, 0].all()):
        raise ValueError(
            "position 0 of every row must be fixed for a causal model: a BOS token, for example"
        )
    xt, sampling = xt.to(torch.int64).clone(), sampling or SamplingParams()
    batch, length = xt.shape
    is_fixed = is_fixed.cpu()
    is_masked = ~is_fixed
    nfe = torch.zeros(batch, dtype=torch.int64)
    given = int(
        is_fixed.long().cumprod(-1).sum(-1).min()
    )  # the prefix that all rows have is read at once
    read = 0
    for position in range(given, length):
        with torch.no_grad():
            features = predict_next(xt[:, read:position])
        read = position
        u = rng.pairs(position, 1, 1, Purpose.SAMPLE)[1][0, :, 0]
        logits = logits_at(features)
        if limits is not None:
            logits = limits.apply(logits, torch.arange(batch) * length + position)
        drawn = draw(logits, u, sampling).tokens
        is_new = ~is_fixed[:, position]
        nfe += is_new  # as if the row were alone: its neighbors' prompts may be shorter
        xt[:, position] = torch.where(is_new.to(xt.device), drawn, xt[:, position])
        is_masked[:, position] = False
        changed = torch.zeros_like(is_fixed)
        changed[:, position] = is_new
        yield Frame(
            position - given + 1, xt.clone(), is_masked.clone(), changed, nfe.clone(), logits
        )
    if given == length:
        yield Frame(1, xt, is_masked, torch.zeros_like(is_fixed), nfe)
