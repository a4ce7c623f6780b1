"""Sampling from masked and causal diffusion language models: one loop over rows.

A row is a text to be filled. It goes through its blocks from left to right and through each block step by step. Its
sampler decides what changes in a step:

- A `Plan` is a table of probabilities (Algorithm 1). What it changes never depends on a token, so it is listed some
  steps ahead, and steps in which nothing changes are passed over.
- Any other `Sampler` is one function, `move`, which is called in each step for all rows that share it. If it has a
  score, the network runs first.

Either way a row has at most one `Change` in a step: the positions that are revealed, and those that are hidden again.
A step of the batch is therefore: move, evaluate, choose, draw, write. Random numbers are keyed by (seed, row, step of
the block, position), so a text does not depend on the rows that are sampled with it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adlm.diffusion.categorical import DrawnTokens, SamplingParams, draw
from adlm.diffusion.plans import Plan, mean_noise_level
from adlm.diffusion.rng import (
    MAX_NUMBERS,
    CounterRng,
    Purpose,
    check_row,
    check_seed,
    make_numbers,
)
from adlm.settings import BuiltSampler

MAX_BLOCK_STEPS = 1 << 20  # the clocks of two blocks are this far apart
STEPS_AHEAD = 16  # whose random numbers are made at once, where rows are few
MAX_IDLE_STEPS = 10_000  # in which a sampler changes nothing, one after the other
NO_BLOCK = MAX_BLOCK_STEPS  # the block of a row in which nothing may change
FIXED = -1  # the block of positions that never change

Positions = NDArray[np.int64]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.float64]
Array = TypeVar("Array", Flags, Positions, Numbers)
NOTHING: Positions = np.empty(0, np.int64)
USUAL_SAMPLING = SamplingParams()

ScoreFn = Callable[[Tensor], Tensor]  # logits (N, V) -> (N,)


# The protocol of samplers.


@dataclass(frozen=True)
class Column:
    """A sampler's own state: a float64 for each row or each position; it begins anew with each block."""

    initial: float = 0.0
    per_position: bool = False


@dataclass
class View:
    """What a sampler sees of its n rows before a step, on the host."""

    rows: list[int]  # their places in the batch
    step: Tensor  # (n,), of the block
    is_hidden: Tensor  # (n, L): hidden positions of the block
    is_free: Tensor  # (n, L): positions of the block that may change
    first_hidden: Tensor  # (n,): how many positions were hidden when the block began
    rng: CounterRng  # at the rows' clocks: its step 0 is now
    columns: Mapping[str, Tensor]  # the sampler's own, (n,) or (n, L)
    last_prob: Tensor | None = None  # (n, L): with which each token was drawn; 0 where it was given
    scores: Tensor | None = None  # (n, L): of the hidden positions

    @cached_property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """Two uniform numbers (n, L) of each position in this step; tokens are drawn with the second."""
        first, second = self.rng.pairs(0, 1, self.is_hidden.shape[1], Purpose.SAMPLE)
        return first[0], second[0]

    @property
    def u(self) -> Tensor:
        """A uniform number (n, L) of each position in this step."""
        return self.numbers[0]

    @cached_property
    def noise_level(self) -> Tensor:
        """The noise level (n,) at which as large a share of the block is hidden in training."""
        return mean_noise_level(self.is_hidden.sum(-1) / self.first_hidden.clamp(min=1))


@dataclass
class Move:
    """What a sampler changes in its n rows."""

    reveal: Tensor  # (n, L)
    hide: Tensor | None = None  # (n, L): free positions that are visible
    noise_level: Tensor | None = None  # (n,), for the network; None, or with a score: the view's
    is_last: Tensor | None = None  # (n,): ends the block; None: it ends when nothing is hidden
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # new values


class Sampler(BuiltSampler):
    """A sampler that is no plan. One call moves all rows whose samplers are equal (==).

    A setting that may differ between the rows of one call takes no part in the comparison and is a column: the column
    of each row begins with the value of the row's own sampler.

    A sampler must come to an end: it is an error to change nothing in more than 10,000 steps, one after the other, or
    in more than len(sampler), if it has a length and that is larger.
    """

    score: ScoreFn | None = None  # of hidden positions: the network runs before the move
    reads_last_prob: bool = False
    hides_until: int = 0  # first steps of a block that may hide again; 0: what is revealed stays
    nucleus: bool = True  # whether top-k, top-p and min-p apply, not the temperature alone
    fill_argmax: bool = False  # compat: what is left hidden by argmax, and the lineage's nucleus

    @property
    def columns(self) -> Mapping[str, Column]:
        """The sampler's own state by name."""
        return {}

    def move(self, view: View) -> Move:
        """Return what changes in this step."""
        raise NotImplementedError(f"{type(self).__name__} has no move(view)")


class JointDraw(Protocol):
    """Draws the tokens of a row jointly: it sees all hidden positions, and returns tokens for those to be revealed."""

    def __call__(
        self,
        *,
        tokens: Tensor,  # (L,), the mask where it is hidden
        hidden: Tensor,  # (h,) positions
        logits: Tensor,  # (h, V)
        reveal: Tensor,  # (N,) positions, among the hidden ones
        u: Tensor,  # (N,) uniform numbers
        sampling: SamplingParams,
    ) -> DrawnTokens: ...


class TokenLogprob(NamedTuple):
    """The log-probability of a token when it was last drawn, before temperature, top-k and top-p, and the likeliest."""

    logprob: float
    top: dict[int, float]  # by token, likeliest first


@dataclass(eq=False)
class Row:
    """A text to be sampled; the last four fields are its outcome."""

    tokens: Tensor  # (L,), the mask where it is hidden
    sampler: Plan | Sampler
    is_fixed: Tensor | None = None  # (L,) bool: never changes; None: what is not the mask
    seed: int = 0
    number: int = 0  # its random numbers are those of (seed, number)
    block: int | None = None  # positions of a block; None: one block
    sampling: SamplingParams = USUAL_SAMPLING
    kinds: Tensor | None = None  # (L,): the kind of each position, which says what is banned there
    draw: JointDraw | None = None  # None: each token by itself
    every_step: bool = False  # whether steps in which nothing changes have a frame too
    top_logprobs: int | None = None  # likeliest tokens recorded with each draw; None: no logprobs

    filled: Tensor | None = field(default=None, init=False)  # (L,), when it is done
    steps: int = field(default=0, init=False)  # frames, with those that were passed over
    nfe: int = field(default=0, init=False)  # network evaluations
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict, init=False)  # by position

    def __post_init__(self) -> None:
        if isinstance(self.sampler, str) or not isinstance(self.sampler, Plan | Sampler):
            raise ValueError(
                f"sampler is {self.sampler!r}: make one with adlm.build_sampler(NAME), or an object of a class that "
                "inherits from adlm.Sampler"
            )
        if isinstance(self.sampler, Sampler) and type(self.sampler).__hash__ is None:
            raise ValueError(
                f"the sampler {self.sampler!r} has no hash, by which rows are moved together: make its class a "
                "dataclass(frozen=True)"
            )
        if self.block is not None and self.block < 1:
            raise ValueError(f"block must be at least 1 position, got {self.block}")
        check_row_tensors(self)
        check_seed(self.seed)
        check_row(self.number)


R = TypeVar("R", bound=Row)


class RowsError(RuntimeError):
    """Rows of a batch cannot go on, by their own sampler or draw; without them the batch can take its step."""

    def __init__(self, rows: Sequence[Row], cause: Exception) -> None:
        super().__init__(str(cause))
        self.rows = list(rows)
        self.cause = cause


@contextmanager
def blame(rows: Sequence[Row]) -> Iterator[None]:
    """Context manager: raise an error as one of these rows."""
    try:
        yield
    except Exception as cause:
        raise RowsError(rows, cause) from cause


@dataclass
class Frame(Generic[R]):
    """The batch after a step; its lists have an entry for each row."""

    rows: list[R]
    tokens: Tensor  # (B, L), on the device; later steps leave it as it is
    is_hidden: Tensor  # (B, L)
    changed: Tensor  # (B, L): revealed where it is not hidden now, hidden again where it is
    steps: list[int]  # frames of the row so far, with those that were passed over
    nfe: list[int]  # evaluations of the row so far
    settled: list[int]  # leading positions that can no longer change
    is_done: list[bool]


class Evaluator(Protocol):
    """The network as the loop sees it."""

    device: torch.device
    mask_id: int | None  # None: a causal model
    max_length: int  # of a row
    max_logit_rows: int  # rows of logits that exist at a time

    def open(self) -> Self:
        """Return the evaluator of one running batch, with what it must remember."""
        ...

    def features(
        self,
        tokens: Tensor,
        noise_level: Tensor,
        valid: Tensor | None,
        rows: Sequence[Row],
        next_position: Positions,
    ) -> Tensor:
        """Return features (n, L or more, dim) of n rows of tokens (n, L); they hold until the next call.

        `noise_level` (n,), `valid` (n, L), False at padding, and `next_position` (n,), the first that is hidden, are on
        the host. A causal model predicts the next position, and its features stand at all positions.
        """
        ...

    def logits_at(self, features: Tensor) -> Tensor:
        """Return logits (N, V or more) of features (N, dim), -inf for what is no token of a text."""
        ...


# A row and what changes in it.


@dataclass(slots=True)
class Change:
    """What changes in a row in one step of a block."""

    step: int
    reveal: Positions
    hide: Positions
    u: Numbers | None = None  # which the revealed tokens are drawn with; None: still to be made
    noise_level: float = 0.0
    is_last: bool | None = None  # ends the block; None: it ends when nothing is hidden
    columns: dict[str, Numbers] = field(default_factory=dict)  # new values of the sampler's own


def list_changes(
    plan: Plan, keys: Positions, row: Positions, position: Positions, is_hidden: Flags
) -> Iterator[tuple[int, Change]]:
    """List what a plan changes in a block of n rows (Algorithm 1), but for the fill of what it leaves hidden.

    `keys` (n, 3) are each row's seed, number and clock when the block begins. The block has F positions, `position`
    (F,) of the rows `row` (F,), of which some are hidden (F,) at first. Yields rows and their changes, step by step;
    steps in which nothing changes are left out, except for the last.
    """
    levels = plan.noise_level.tolist()
    reveal_prob = plan.reveal_prob.numpy()
    remask_prob = plan.remask_prob.numpy()
    hidden = is_hidden.copy()
    step = 0
    while step < len(plan):
        if step >= plan.hides_until:  # what is visible stays
            row = row[hidden]
            position = position[hidden]
            hidden = hidden[hidden]
        ends = row.searchsorted(np.arange(len(keys)), "right")
        ahead = max(1, MAX_NUMBERS // max(1, len(row)))
        steps = np.arange(step, min(len(plan), step + ahead))[:, None]
        seed, number, clock = keys[row].T
        words = [x.view(np.uint64) for x in (seed, number, clock + steps, position)]
        u, u_token = make_numbers(words, Purpose.SAMPLE)
        may_reveal: Flags = u < reveal_prob[steps]
        may_hide: Flags = u < remask_prob[steps]
        is_busy: Flags = np.any(may_reveal | may_hide, axis=1)
        is_busy[len(plan) - 1 - step :] = True

        for k in is_busy.nonzero()[0].tolist():
            changed = np.where(hidden, may_reveal[k], may_hide[k]).nonzero()[0]
            was_hidden = hidden[changed]
            hidden[changed] = ~was_hidden
            reveal = changed[was_hidden]
            hide = changed[~was_hidden]
            now = step + k
            is_last = now == len(plan) - 1
            reveal_ends = reveal.searchsorted(ends).tolist()
            shown = split(position[reveal], reveal_ends)
            numbers = split(u_token[k, reveal], reveal_ends)
            masked = split(position[hide], hide.searchsorted(ends).tolist())
            for i, own in enumerate(zip(shown, masked, numbers, strict=True)):
                if len(own[0]) or len(own[1]) or is_last:
                    yield i, Change(now, *own, levels[now], is_last)
        step += len(steps)


def split(values: Array, ends: Sequence[int]) -> list[Array]:
    """Split an array (N,) into parts that end there."""
    return [values[start:end] for start, end in pairwise([0, *ends])]


def split_changes(changes: Iterator[tuple[int, Change]], count: int) -> list[Iterator[Change]]:
    """Return the changes of each of `count` rows; what one row takes first is kept for the others."""
    kept = [deque[Change]() for _ in range(count)]

    def iterate(own: deque[Change]) -> Iterator[Change]:
        while True:
            while not own:
                i, change = next(changes, (-1, None))
                if change is None:
                    return
                kept[i].append(change)
            yield own.popleft()

    return [iterate(own) for own in kept]


@lru_cache
def choose_sampling(
    sampling: SamplingParams, nucleus: bool, fill_argmax: bool
) -> tuple[SamplingParams, SamplingParams]:
    """Return how a sampler's tokens are drawn, and those that it has left hidden at its end."""
    if not nucleus:
        sampling = replace(sampling, top_k=None, top_p=1.0, min_p=0.0)
    if not fill_argmax:
        return sampling, sampling
    sampling = replace(sampling, nucleus="lineage")  # compat
    return sampling, replace(sampling, temperature=0.0)


@dataclass(eq=False)
class Slot:
    """A row in the batch, and where it stands."""

    row: Row
    block: int = FIXED
    step: int = 0  # of the block
    first_hidden: int = 0  # positions, when the block began
    frames: int = 0
    nfe: int = 0
    idle: int = 0  # steps since the last change
    is_done: bool = False
    sampling: SamplingParams = field(init=False)  # of the next draw
    columns: dict[str, Numbers] = field(default_factory=dict)  # the sampler's own, (1,) or (L,)
    listed: Iterator[Change] = field(init=False)  # what its plan changes next
    next: Change | None = None  # the next listed change; None: the sampler is called

    def __post_init__(self) -> None:
        sampler = self.row.sampler
        self.draws = choose_sampling(self.row.sampling, sampler.nucleus, sampler.fill_argmax)
        self.may_hide = isinstance(sampler, Plan) or sampler.hides_until > 0
        length = len(sampler) if isinstance(sampler, Sized) else 0
        self.max_idle = max(MAX_IDLE_STEPS, length)

    @property
    def clock(self) -> int:
        """The step of its random numbers."""
        return self.block * MAX_BLOCK_STEPS + self.step

    @property
    def first_open_block(self) -> int:
        """The first block in which something may be hidden again."""
        hides_until = self.row.sampler.hides_until
        return self.block + (self.step >= hides_until) if hides_until else NO_BLOCK

    def enter(self, block: int, hidden: int) -> None:
        """Begin a block; a row that has none from the beginning has a single frame."""
        self.block = block
        self.first_hidden = hidden
        self.step = 0
        self.idle = 0
        self.sampling = self.draws[0]
        self.listed = iter(())
        self.next = Change(0, NOTHING, NOTHING, is_last=True) if block == NO_BLOCK else None
        sampler = self.row.sampler
        if isinstance(sampler, Sampler):
            for name, column in sampler.columns.items():
                size = len(self.row.tokens) if column.per_position else 1
                self.columns[name] = np.full(size, column.initial)

    def take(self, change: Change) -> None:
        """Take a change, and pass over the steps before it."""
        self.frames += change.step - self.step
        self.step = change.step
        self.columns.update(change.columns)
        self.idle = 0 if len(change.reveal) or len(change.hide) else self.idle + 1
        self.next = next(self.listed, None)

    def fill(self, hidden: Positions) -> None:
        """Reveal in the next step what the sampler has left hidden, at noise level 0."""
        self.sampling = self.draws[1]
        self.next = Change(self.step, hidden, NOTHING, is_last=True)

    def finish(self, tokens: Tensor) -> None:
        """Store the outcome in the row."""
        self.is_done = True
        self.row.filled = tokens.clone()  # not a view, which would keep the whole batch
        self.row.nfe = self.nfe
        self.row.steps = self.frames


def enter_blocks(slots: Sequence[Slot], is_hidden: Flags, block_at: Positions) -> None:
    """Let rows (n, L) enter their next blocks, or none; plans list what they change."""
    current = np.array([slot.block for slot in slots])[:, None]
    may_hide = np.array([slot.may_hide for slot in slots])[:, None]
    is_later = (block_at > current) & (is_hidden | may_hide)
    block = np.where(is_later, block_at, NO_BLOCK).min(1, initial=NO_BLOCK)
    is_free = block_at == block[:, None]
    first_hidden = (is_hidden & is_free).sum(1).tolist()
    planned: dict[Plan, list[int]] = {}
    for k, slot in enumerate(slots):
        slot.enter(int(block[k]), first_hidden[k])
        if isinstance(slot.row.sampler, Plan) and slot.block != NO_BLOCK:
            planned.setdefault(slot.row.sampler, []).append(k)

    for plan, members in planned.items():
        row, position = is_free[members].nonzero()
        hidden = is_hidden[members][row, position]
        rows = [(slots[k].row.seed, slots[k].row.number, slots[k].clock) for k in members]
        changes = list_changes(plan, np.array(rows), row, position, hidden)
        for k, listed in zip(members, split_changes(changes, len(members)), strict=True):
            slots[k].listed = listed
            slots[k].next = next(listed)


# The running batch.

Changes = dict[int, Change]  # by row
Waiting = dict[Sampler, View]  # samplers whose scores are missing


@dataclass
class Drawn:
    """Tokens that were drawn for N positions of the batch."""

    row: Positions  # (N,)
    position: Positions  # (N,)
    tokens: Tensor  # (N,)
    probs: Tensor  # (N,)


class RunningBatch(Generic[R]):
    """Rows that are sampled together: they join and leave between two steps, and leave when they are done."""

    def __init__(
        self,
        evaluator: Evaluator,
        rows: Iterable[R] = (),
        *,
        banned: Tensor | None = None,  # (kinds, V): tokens that may not be where the kind is
        keeps_done: bool = False,  # rows that are done stay as they are
    ) -> None:
        self.evaluator = evaluator.open()
        self.device = evaluator.device
        self.banned = None if banned is None else check_banned(banned).to(self.device)
        self.keeps_done = keeps_done
        self.rows: list[R] = []
        self.slots: list[Slot] = []
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=self.device)  # (B, L)
        self.is_hidden: Flags = np.zeros((0, 0), bool)  # (B, L), as the three that follow
        self.kinds: Positions = np.zeros((0, 0), np.int64)
        self.block_at: Positions = np.zeros((0, 0), np.int64)  # FIXED where nothing changes
        self.last_prob: Numbers = np.zeros((0, 0))
        self.lengths: Positions = np.zeros(0, np.int64)  # (B,)
        self.place: Positions = self.lengths  # (B,): among the rows of this step's evaluation
        self.evaluated: list[int] = []  # the rows of this step's evaluation
        self.join(rows)

    def join(self, rows: Iterable[R]) -> None:
        """Add rows, which take their first step with the next one of the batch."""
        added = list(rows)
        if not added:
            return
        mask_id = self.evaluator.mask_id
        lengths = check_lengths(added, self.evaluator.max_length)
        if mask_id is None:
            refuse_plans(added)
        tokens = pad_sequence([row.tokens.to("cpu", torch.int64) for row in added], True)
        is_fixed = pad_sequence([find_fixed(row, mask_id) for row in added], True, True).numpy()
        is_text = np.arange(tokens.shape[1]) < lengths[:, None]
        is_hidden = ~is_fixed if mask_id is None else (tokens == mask_id).numpy() & is_text
        check_hidden(added, is_hidden, is_fixed)
        block_at = number_blocks(added, is_fixed)
        own_kinds = [torch.zeros_like(x.tokens) if x.kinds is None else x.kinds for x in added]
        kinds: Positions = pad_sequence([x.to("cpu", torch.int64) for x in own_kinds], True).numpy()
        slots = [Slot(row) for row in added]
        enter_blocks(slots, is_hidden, block_at)

        # Nothing is assigned before all of this has succeeded: a join that fails changes nothing.
        all_tokens = append(self.tokens, tokens)
        all_hidden = append_array(self.is_hidden, is_hidden)
        all_kinds = append_array(self.kinds, kinds)
        all_blocks = append_array(self.block_at, block_at, FIXED)
        all_probs = append_array(self.last_prob, np.zeros(is_hidden.shape))
        all_lengths = np.concatenate([self.lengths, lengths])

        self.rows = [*self.rows, *added]
        self.slots = [*self.slots, *slots]
        self.tokens = all_tokens
        self.is_hidden = all_hidden
        self.kinds = all_kinds
        self.block_at = all_blocks
        self.last_prob = all_probs
        self.lengths = all_lengths

    def leave(self, rows: Iterable[R]) -> None:
        """Remove rows."""
        gone = set(rows)
        kept = np.array([i for i, row in enumerate(self.rows) if row not in gone], np.int64)
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in kept]
        self.slots = [self.slots[i] for i in kept]
        self.lengths = self.lengths[kept]
        width = self.lengths.max(initial=0)
        index = self._send(kept)
        self.tokens = self.tokens[index, :width]
        self.is_hidden = self.is_hidden[kept, :width]
        self.kinds = self.kinds[kept, :width]
        self.block_at = self.block_at[kept, :width]
        self.last_prob = self.last_prob[kept, :width]

    def _send(self, x: NDArray[Any]) -> Tensor:
        """Copy to the device, to a GPU without waiting; float64 stays on the host where the device has none."""
        tensor = torch.from_numpy(x)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        if self.device.type == "mps" and tensor.dtype == torch.float64:
            return tensor
        return tensor.to(self.device)

    @torch.no_grad()
    def step(self) -> Frame[R]:
        """Take one step of every row; after a RowsError it can be taken again, without the rows of the error."""
        self.evaluated = []
        try:
            changes, waiting = self.move()
            features = self.evaluate(changes, waiting)
            for sampler, view in waiting.items():
                changes |= self.choose(sampler, view, features)
            drawn = self.draw(changes, features)
        except RowsError:
            if self.evaluated:
                self.evaluator = self.evaluator.open()  # a causal model has read its next tokens
            raise
        return self.write(changes, drawn)

    # Move.

    def move(self) -> tuple[Changes, Waiting]:
        """Return the changes that are known now, and the samplers that wait for the network."""
        changes: Changes = {}
        called: dict[Sampler, list[int]] = {}
        for i, slot in enumerate(self.slots):
            if slot.is_done:
                continue
            if slot.next is None:
                assert isinstance(slot.row.sampler, Sampler)
                if slot.idle >= slot.max_idle:
                    raise RowsError([slot.row], build_idle_error(slot))
                called.setdefault(slot.row.sampler, []).append(i)
            elif slot.next.step == slot.step or not slot.row.every_step:
                changes[i] = slot.next  # taken when it is written
        waiting: Waiting = {}
        for sampler, members in called.items():
            with blame([self.rows[i] for i in members]):
                view = self._view(sampler, members)
                if sampler.score is None:
                    changes |= self._call(sampler, view)
                else:
                    waiting[sampler] = view
        return changes, waiting

    def _view(self, sampler: Sampler, members: list[int]) -> View:
        slots = [self.slots[i] for i in members]
        numbers = [(x.step, x.first_hidden, x.row.seed, x.row.number, x.clock) for x in slots]
        step, first_hidden, seed, number, clock = torch.from_numpy(np.array(numbers)).unbind(1)
        is_free = self.block_at[members] == np.array([[x.block] for x in slots])
        last_prob = torch.from_numpy(self.last_prob[members]) if sampler.reads_last_prob else None
        return View(
            rows=members,
            step=step,
            is_hidden=torch.from_numpy(self.is_hidden[members] & is_free),
            is_free=torch.from_numpy(is_free),
            first_hidden=first_hidden,
            rng=CounterRng(seed, number, clock, ahead=STEPS_AHEAD),
            columns=stack_columns(sampler, slots, is_free.shape[1]),
            last_prob=last_prob,
        )

    def _call(self, sampler: Sampler, view: View) -> Changes:
        """Call a sampler and return the changes of its rows."""
        move = sampler.move(view)
        check_move(sampler, view, move)
        if self.evaluator.mask_id is None:
            check_causal_move(sampler, view, move)
        count = len(view.rows)
        level = view.noise_level if move.noise_level is None else move.noise_level
        levels = level.tolist()
        is_last = [None] * count if move.is_last is None else move.is_last.tolist()
        reveals = list_positions(move.reveal)
        hides = [NOTHING] * count if move.hide is None else list_positions(move.hide)
        columns = {name: x.double().numpy() for name, x in move.columns.items()}
        has_numbers = "numbers" in vars(view) or view.rng.is_ahead(view.is_hidden.shape[1])
        u = view.numbers[1].numpy() if has_numbers else None
        changes: Changes = {}
        for k, i in enumerate(view.rows):
            length = self.lengths[i]
            own = None if u is None else u[k, reveals[k]]
            values = {name: x[k].reshape(-1)[:length] for name, x in columns.items()}
            step = self.slots[i].step
            changes[i] = Change(step, reveals[k], hides[k], own, levels[k], is_last[k], values)
        return changes

    # Evaluate and choose.

    def evaluate(self, changes: Changes, waiting: Waiting) -> Tensor | None:
        """Return features (n, L, dim) of the rows in which a token is drawn now, or may be."""
        levels = {i: change.noise_level for i, change in changes.items() if len(change.reveal)}
        for view in waiting.values():
            levels.update(zip(view.rows, view.noise_level.tolist(), strict=True))
        if not levels:
            return None
        members = sorted(levels)
        self.evaluated = members
        self.place = np.zeros(len(self.slots), np.int64)
        self.place[members] = np.arange(len(members))
        is_whole = len(members) == len(self.slots)
        tokens = self.tokens if is_whole else self.tokens[self._send(np.array(members))]
        width = tokens.shape[1]
        lengths = self.lengths[members]
        valid = None
        if lengths.min() < width:
            valid = torch.from_numpy(np.arange(width) < lengths[:, None])
        level = torch.tensor([levels[i] for i in members], dtype=torch.float32)
        rows = [self.rows[i] for i in members]
        next_position = self.is_hidden[members].argmax(1)
        return self.evaluator.features(tokens, level, valid, rows, next_position)

    def choose(self, sampler: Sampler, view: View, features: Tensor | None) -> Changes:
        """Call a sampler with the scores of its rows' hidden positions."""
        assert sampler.score is not None
        is_hidden = view.is_hidden.numpy()
        member, position = is_hidden.nonzero()
        row = np.array(view.rows)[member]
        scores = np.zeros(is_hidden.shape, np.float32)
        view.scores = torch.from_numpy(scores)
        with blame([self.rows[i] for i in view.rows]):
            parts = self.iter_logits(features, row, position)
            own = [sampler.score(logits.float()) for _, logits in parts]
            if own:
                scores[is_hidden] = torch.cat(own).cpu().numpy()
            return self._call(sampler, view)

    def iter_logits(
        self, features: Tensor | None, row: Positions, position: Positions
    ) -> Iterator[tuple[slice, Tensor]]:
        """Map features to logits (n, V) of positions (N,) of rows (N,), some at a time; ban tokens."""
        if features is None:
            assert not len(row)
            return
        index = self._send(np.array([self.place[row], position, self.kinds[row, position]]))
        size = self.evaluator.max_logit_rows
        for start in range(0, len(row), size):
            part = slice(start, start + size)
            place, column, kind = index[:, part].unbind()
            logits = self.evaluator.logits_at(features[place, column])
            if self.banned is not None:
                banned = self._pad_banned(logits.shape[1]).index_select(0, kind)
                logits = logits.masked_fill(banned, -torch.inf)
            yield part, logits

    def _pad_banned(self, vocab: int) -> Tensor:
        """Return what is banned (kinds, V) for logits, which may be padded."""
        assert self.banned is not None
        if self.banned.shape[1] != vocab:  # or narrower, without the mask
            self.banned = F.pad(self.banned, (0, vocab - self.banned.shape[1]), value=True)
        return self.banned

    # Draw and write.

    def draw(self, changes: Changes, features: Tensor | None) -> list[Drawn]:
        """Draw the tokens to be revealed: rows of equal parameters together, or those of a row jointly."""
        revealing = {i: change for i, change in changes.items() if len(change.reveal)}
        self._make_numbers(revealing)
        together: dict[tuple[SamplingParams, bool, R | None], list[int]] = {}
        for i in revealing:
            text = self.rows[i]
            alone = None if text.draw is None else text
            key = (self.slots[i].sampling, text.top_logprobs is not None, alone)
            together.setdefault(key, []).append(i)
        drawn = []
        for (sampling, has_logprobs, alone), members in together.items():
            reveal = [changes[i].reveal for i in members]
            row = np.repeat(members, [len(x) for x in reveal])
            position = np.concatenate(reveal)
            u = self._send(np.concatenate([changes[i].u for i in members]))
            if alone is not None:
                parts = [self._draw_jointly(members[0], position, u, features)]
            else:
                parts = []
                for part, logits in self.iter_logits(features, row, position):
                    parts.append(draw(logits, u[part], sampling))
                    if has_logprobs:
                        self._record_logprobs(logits, parts[-1].tokens, row[part], position[part])
            tokens, probs = (torch.cat(x) for x in zip(*parts, strict=True))
            drawn.append(Drawn(row, position, tokens, probs))
        return drawn

    def _make_numbers(self, changes: Changes) -> None:
        """Make the random numbers of changes that have none yet."""
        missing = {i: change for i, change in changes.items() if change.u is None}
        if not missing:
            return
        slots = [self.slots[i] for i in missing]
        counts = [len(change.reveal) for change in missing.values()]
        keys = np.array([(slot.row.seed, slot.row.number, slot.clock) for slot in slots])
        position = np.concatenate([change.reveal for change in missing.values()])
        words = [*np.repeat(keys, counts, axis=0).T, position]
        _, u = make_numbers([x.view(np.uint64) for x in words], Purpose.SAMPLE)
        for change, own in zip(missing.values(), split(u, np.cumsum(counts).tolist()), strict=True):
            change.u = own

    def _draw_jointly(
        self, i: int, reveal: Positions, u: Tensor, features: Tensor | None
    ) -> DrawnTokens:
        row = self.rows[i]
        assert row.draw is not None
        hidden = self.is_hidden[i].nonzero()[0]
        parts = self.iter_logits(features, np.full(len(hidden), i), hidden)
        logits = torch.cat([part for _, part in parts])
        with blame([row]):
            drawn = row.draw(
                tokens=self.tokens[i, : len(row.tokens)],
                hidden=self._send(hidden),
                logits=logits,
                reveal=self._send(reveal),
                u=u,
                sampling=self.slots[i].sampling,
            )
            return check_drawn(drawn, len(reveal), self.tokens)

    def _record_logprobs(
        self, logits: Tensor, tokens: Tensor, row: Positions, position: Positions
    ) -> None:
        """Record the log-probabilities of drawn tokens (n,) in their rows."""
        rows = [self.rows[i] for i in row]
        width = max(each.top_logprobs or 0 for each in rows)
        logprobs = logits.float().log_softmax(-1)
        own = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        top = logprobs.topk(width, -1)
        for each, where, logprob, values, ids in zip(
            rows, position.tolist(), own, top.values.tolist(), top.indices.tolist()
        ):
            best = dict(zip(ids[: each.top_logprobs], values, strict=False))
            possible = {token: value for token, value in best.items() if value > -np.inf}
            each.logprobs[where] = TokenLogprob(logprob, possible)

    def write(self, changes: Changes, drawn: list[Drawn]) -> Frame[R]:
        """Write what changes, return the frame, and move on the rows whose block is over."""
        before = self.is_hidden
        self.write_tokens(changes, drawn)
        for i in self.evaluated:
            self.slots[i].nfe += 1
        for i, change in changes.items():
            self.slots[i].take(change)
        for slot in self.slots:
            if not slot.is_done:
                slot.step += 1
                slot.frames += 1
        settled = self.count_settled()
        self._end_blocks(changes)
        frame = self.show(before, settled)
        done = [row for row, is_done in zip(frame.rows, frame.is_done, strict=True) if is_done]
        if done and not self.keeps_done:
            self.leave(done)
        return frame

    def show(self, before: Flags, settled: list[int]) -> Frame[R]:
        """Return the frame of the batch, which was hidden as `before`."""
        return Frame(
            rows=self.rows,
            tokens=self.tokens,
            is_hidden=torch.from_numpy(self.is_hidden),
            changed=torch.from_numpy(self.is_hidden ^ before),
            steps=[slot.frames for slot in self.slots],
            nfe=[slot.nfe for slot in self.slots],
            settled=settled,
            is_done=[slot.is_done for slot in self.slots],
        )

    def write_tokens(self, changes: Changes, drawn: list[Drawn]) -> None:
        """Write drawn tokens, and the mask where a token is hidden again, into copies: frames keep theirs."""
        self.is_hidden = self.is_hidden.copy()
        width = self.tokens.shape[1]
        where = []
        values = []
        for each in drawn:
            self.is_hidden[each.row, each.position] = False
            where.append(each.row * width + each.position)
            values.append(each.tokens)
            if any(row.sampler.reads_last_prob for row in self.rows):
                self.last_prob[each.row, each.position] = each.probs.cpu().numpy()
        for i, change in changes.items():
            if len(change.hide):
                assert self.evaluator.mask_id is not None
                self.is_hidden[i, change.hide] = True
                where.append(i * width + change.hide)
                values.append(self.tokens.new_full((len(change.hide),), self.evaluator.mask_id))
        if values:
            index = self._send(np.concatenate(where))
            flat = self.tokens.flatten().index_copy(0, index, torch.cat(values))
            self.tokens = flat.view(self.tokens.shape)

    def count_settled(self) -> list[int]:
        """Count the leading positions of each row that can no longer change."""
        is_open = self.is_hidden
        if any(slot.row.sampler.hides_until for slot in self.slots):
            first = np.array([slot.first_open_block for slot in self.slots])
            is_open = is_open | (self.block_at >= first[:, None])
        return np.where(is_open.any(1), is_open.argmax(1), self.lengths).tolist()

    def _end_blocks(self, changes: Changes) -> None:
        """Fill what is left of blocks that are over, or move their rows on."""
        ending = [i for i, change in changes.items() if change.is_last is not False]
        if not ending:
            return
        blocks = np.array([[self.slots[i].block] for i in ending])
        left = self.is_hidden[ending] & (self.block_at[ending] == blocks)
        over = []
        for i, is_left, own in zip(ending, left.any(1).tolist(), left, strict=True):
            if not is_left:
                over.append(i)
            elif changes[i].is_last:
                self.slots[i].fill(own.nonzero()[0])
        if not over:
            return
        slots = [self.slots[i] for i in over]
        enter_blocks(slots, self.is_hidden[over], self.block_at[over])
        for i, slot in zip(over, slots, strict=True):
            if slot.block == NO_BLOCK:
                slot.finish(self.tokens[i, : self.lengths[i]])


def sample(
    evaluator: Evaluator, rows: Iterable[R], *, banned: Tensor | None = None
) -> Iterator[Frame[R]]:
    """Sample rows and yield a frame for each step; rows that are done are in no later frame, and have their outcome."""
    running = RunningBatch(evaluator, rows, banned=banned)
    while running.rows:
        yield take_step(running)


def sample_together(
    evaluator: Evaluator, rows: Iterable[R], *, banned: Tensor | None = None
) -> Iterator[Frame[R]]:
    """Sample rows and yield frames of all of them, those that are done too; the first is before the first step."""
    running = RunningBatch(evaluator, rows, banned=banned, keeps_done=True)
    frame = running.show(running.is_hidden, running.count_settled())
    yield frame
    while not all(frame.is_done):
        frame = take_step(running)
        yield frame


def take_step(running: RunningBatch[R]) -> Frame[R]:
    """Take a step of rows that end together: an error of some is raised as it was."""
    try:
        return running.step()
    except RowsError as error:
        raise error.cause from None


def fill_rows(
    evaluator: Evaluator, rows: Sequence[Row], *, banned: Tensor | None = None
) -> list[Tensor]:
    """Sample rows and return the tokens (L,) of each."""
    for _ in sample(evaluator, rows, banned=banned):
        pass
    filled = [row.filled for row in rows]
    assert all(tokens is not None for tokens in filled)
    return [tokens for tokens in filled if tokens is not None]


# What comes from outside.


def describe(value: object) -> str:
    """Describe a value that should be a tensor of another kind."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device.type}"
    return f"{value!r:.80}"


def check_row_tensors(row: Row) -> None:
    """Raise for tensors of a row that are not those of one text."""
    tokens = row.tokens
    if not isinstance(tokens, Tensor) or tokens.dim() != 1 or not len(tokens):
        raise ValueError(
            f"tokens of a row are {describe(tokens)}, expected a tensor (L,) of at least 1 token: "
            "make a row of each text that is not empty"
        )
    fixed = row.is_fixed
    if fixed is not None and not is_tensor(fixed, tokens.shape, is_flags=True):
        raise ValueError(
            f"is_fixed is {describe(fixed)}, expected torch.bool of shape {tuple(tokens.shape)}: "
            "give a flag for each token"
        )
    kinds = row.kinds
    if kinds is None:
        return
    if not is_tensor(kinds, tokens.shape, is_flags=False) or kinds.is_floating_point():
        raise ValueError(
            f"kinds are {describe(kinds)}, expected integers of shape {tuple(tokens.shape)}: "
            "give a kind for each token"
        )


def is_tensor(value: object, shape: Sequence[int], *, is_flags: bool) -> bool:
    """Return whether a value is a tensor of this shape, of flags or of real numbers."""
    if not isinstance(value, Tensor) or value.shape != shape:
        return False
    return value.dtype == torch.bool if is_flags else not value.is_complex()


def check_lengths(rows: Sequence[Row], limit: int) -> Positions:
    """Return the rows' numbers of tokens, at most `limit`."""
    lengths = np.array([len(row.tokens) for row in rows])
    if lengths.max() > limit:
        raise ValueError(
            f"a row has {lengths.max()} tokens, this model's rows at most {limit}: shorten it"
        )
    return lengths


def find_fixed(row: Row, mask_id: int | None) -> Tensor:
    """Return which positions (L,) of a row never change."""
    if mask_id is not None:
        return (row.tokens != mask_id if row.is_fixed is None else row.is_fixed).cpu()
    if row.is_fixed is None:
        raise ValueError(
            "is_fixed is None: a causal model has no mask token, so say which tokens are given"
        )
    if not bool(row.is_fixed[0]):
        raise ValueError(
            "position 0 of every row must be fixed for a causal model: a BOS token, for example"
        )
    return row.is_fixed.cpu()


def check_hidden(rows: Sequence[Row], is_hidden: Flags, is_fixed: Flags) -> None:
    """Raise for rows (n, L) with hidden positions that are fixed."""
    wrong, positions = (is_hidden & is_fixed).nonzero()
    if len(wrong):
        raise ValueError(
            f"row {rows[wrong[0]].number}, position {positions[0]} is fixed but holds the mask token: fixed tokens "
            "must be text"
        )


def refuse_plans(rows: Sequence[Row]) -> None:
    """Raise for rows of a causal model whose sampler is a plan."""
    for row in rows:
        if isinstance(row.sampler, Plan):
            raise ValueError(
                f"the sampler {row.sampler.name} reveals positions at random, and a causal model "
                "only the first that is hidden: use LeftToRight()"
            )


def check_move(sampler: Sampler, view: View, move: Move) -> None:
    """Raise for what a sampler may not change."""
    check_move_tensors(sampler, view, move)
    is_hidden = view.is_hidden.numpy()
    if (move.reveal.numpy() > is_hidden).any():
        raise ValueError(
            f"the sampler {sampler!r} reveals positions that are not hidden: combine with view.is_hidden"
        )
    if move.hide is None:
        return
    hide = move.hide.numpy()
    may_hide = view.is_free.numpy() > is_hidden
    if (hide > may_hide).any():
        position = (hide > may_hide).nonzero()[1][0]
        raise ValueError(
            f"the sampler {sampler!r} hides position {position}, which is hidden already or may not "
            "change: combine with view.is_free & ~view.is_hidden"
        )
    step = view.step.numpy()
    is_late = step >= sampler.hides_until
    if hide[is_late].any():
        raise ValueError(
            f"the sampler {sampler!r} hides positions in step {step[hide.any(1) & is_late][0]} of a block but has "
            f"hides_until = {sampler.hides_until}: set hides_until to the number of a block's first steps that may "
            "hide"
        )


def check_move_tensors(sampler: Sampler, view: View, move: Move) -> None:
    """Raise for a move whose tensors are not those of n rows of L positions."""
    if not isinstance(move, Move):
        raise ValueError(
            f"the sampler {sampler!r} returns {describe(move)}, expected a Move: return Move(reveal)"
        )
    per_position = view.is_hidden.shape
    per_row = per_position[:1]
    check_field(sampler, "reveal", move.reveal, per_position, is_flags=True)
    if move.hide is not None:
        check_field(sampler, "hide", move.hide, per_position, is_flags=True)
    if move.noise_level is not None:
        check_field(sampler, "noise_level", move.noise_level, per_row, is_flags=False)
    if move.is_last is not None:
        check_field(sampler, "is_last", move.is_last, per_row, is_flags=True)
    if not isinstance(move.columns, Mapping):
        raise ValueError(
            f"columns of the sampler {sampler!r} are {describe(move.columns)}, expected a mapping: "
            "give new values by name"
        )
    if not move.columns:
        return
    declared = sampler.columns
    for name, value in move.columns.items():
        if name not in declared:
            raise ValueError(
                f"the sampler {sampler!r} has no column {name!r}, only {list(declared)}: name it in the "
                "sampler's columns"
            )
        shape = per_position if declared[name].per_position else per_row
        check_field(sampler, f"column {name!r}", value, shape, is_flags=False)


def check_field(
    sampler: Sampler, name: str, value: Tensor, shape: Sequence[int], *, is_flags: bool
) -> None:
    """Raise for a tensor of a move that is not on the host, or of another shape or kind."""
    if is_tensor(value, shape, is_flags=is_flags) and value.device.type == "cpu":
        return
    expected = "torch.bool" if is_flags else "real numbers"
    raise ValueError(
        f"{name} of the sampler {sampler!r} is {describe(value)}, expected {expected} of shape "
        f"{tuple(shape)} on cpu: make it of the view's tensors, which have a value for each of its rows"
    )


def check_causal_move(sampler: Sampler, view: View, move: Move) -> None:
    """Raise for a move that does not go from left to right, a position a step."""
    is_hidden = view.is_hidden.numpy()
    reveal = move.reveal.numpy()
    row = np.arange(len(reveal))
    first = is_hidden.argmax(1)
    has_hidden = is_hidden[row, first]
    is_single = np.count_nonzero(reveal) == np.count_nonzero(has_hidden)
    hides = move.hide is not None and bool(move.hide.any())
    if hides or not is_single or (reveal[row, first] != has_hidden).any():
        raise ValueError(
            f"the sampler {sampler!r} does not reveal exactly the first hidden position of each "
            "row, the only one that a causal model predicts: use LeftToRight()"
        )
    if move.is_last is not None and (move.is_last.numpy() & (is_hidden.sum(1) > 1)).any():
        raise ValueError(
            f"the sampler {sampler!r} ends a block that has hidden positions, and a causal model "
            "cannot fill them at once: use LeftToRight()"
        )


def check_drawn(drawn: DrawnTokens, count: int, batch: Tensor) -> DrawnTokens:
    """Return what a joint draw has drawn for `count` positions of the batch's tokens."""
    if not isinstance(drawn, tuple) or len(drawn) != 2:
        raise ValueError(
            f"a joint draw returns {describe(drawn)}, expected tokens and their probabilities: "
            "return DrawnTokens(tokens, probs)"
        )
    tokens, probs = drawn
    if (
        not is_tensor(tokens, (count,), is_flags=False)
        or tokens.dtype != batch.dtype
        or tokens.device != batch.device
    ):
        raise ValueError(
            f"a joint draw returns tokens that are {describe(tokens)}, expected {batch.dtype} of "
            f"shape {(count,)} on {batch.device.type}: return a token for each position of reveal"
        )
    if not is_tensor(probs, (count,), is_flags=False):
        raise ValueError(
            f"a joint draw returns probs that are {describe(probs)}, expected real numbers of shape "
            f"{(count,)}: return a probability for each position of reveal"
        )
    return DrawnTokens(tokens, probs)


def build_idle_error(slot: Slot) -> ValueError:
    """Return the error of a sampler that does not come to an end."""
    return ValueError(
        f"the sampler {slot.row.sampler!r} has changed nothing in {slot.max_idle} steps: reveal a position, or end the "
        "block with is_last"
    )


def check_banned(banned: Tensor) -> Tensor:
    """Return banned tokens (kinds, V), of which no kind may ban all."""
    if bool(banned.all(-1).any()):
        kind = int(banned.all(-1).nonzero()[0])
        raise ValueError(f"kind {kind} bans all tokens: allow at least one")
    return banned


# Arrays.


def number_blocks(rows: Sequence[Row], is_fixed: Flags) -> Positions:
    """Return the block of each position (n, L) that may change; FIXED for the others."""
    width = max(1, is_fixed.shape[1])
    size = np.array([min(row.block or width, width) for row in rows])
    return np.where(is_fixed, FIXED, np.arange(is_fixed.shape[1]) // size[:, None])


def append(old: Tensor, new: Tensor, value: int = 0) -> Tensor:
    """Append rows to a tensor (n, L), both padded to the wider."""
    width = max(old.shape[1], new.shape[1])
    padded = [F.pad(x, (0, width - x.shape[1]), value=value) for x in (old, new.to(old.device))]
    return torch.cat(padded)


def append_array(old: Array, new: Array, value: int = 0) -> Array:
    """Append rows to an array (n, L), both padded to the wider."""
    return append(torch.from_numpy(old), torch.from_numpy(new), value).numpy()


def list_positions(flags: Tensor) -> list[Positions]:
    """Return the positions of each row (n, L) where a flag is set."""
    return [row.nonzero()[0] for row in flags.numpy()]


def stack_columns(sampler: Sampler, slots: Sequence[Slot], width: int) -> dict[str, Tensor]:
    """Stack the columns of a sampler's rows to tensors (n,) or (n, L)."""
    columns = {}
    for name, column in sampler.columns.items():
        values = np.zeros((len(slots), width if column.per_position else 1))
        for own, slot in zip(values, slots, strict=True):
            own[: len(slot.columns[name])] = slot.columns[name]
        columns[name] = torch.from_numpy(values if column.per_position else values[:, 0])
    return columns
