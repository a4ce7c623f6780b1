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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, compress, pairwise
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adlm.diffusion.categorical import DrawnTokens, SamplingParams, draw
from adlm.diffusion.plans import Plan, mean_noise_level
from adlm.diffusion.rng import (
    MAX_NUMBERS,
    CounterRng,
    Purpose,
    check_row,
    check_seed,
    make_numbers,
    uniform_pair,
)
from adlm.settings import BuiltSampler

MAX_BLOCK_STEPS = 1 << 20  # the clocks of two blocks are this far apart
MAX_IDLE_STEPS = 10_000  # in which a sampler changes nothing, one after the other
NO_BLOCK = MAX_BLOCK_STEPS  # the block of a row in which nothing may change
FIXED = -1  # the block of positions that never change

Positions = NDArray[np.int64]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.float64]
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
    hide: Tensor | None = None  # (n, L)
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
    is_fixed: Tensor | None = None  # (L,): never changes; None: what is not the mask
    seed: int = 0
    number: int = 0  # its random numbers are those of (seed, number)
    block: int | None = None  # positions of a block; None: one block
    sampling: SamplingParams = USUAL_SAMPLING
    last_sampling: SamplingParams | None = None  # of what a sampler leaves hidden; None: as it says
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
    step: list[int]  # frames of the row so far, with those that were passed over
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


@dataclass
class Change:
    """What changes in a row in one step of a block."""

    step: int
    reveal: Positions
    hide: Positions
    u: Numbers | None = None  # which the revealed tokens are drawn with; None: still to be made
    noise_level: float = 0.0
    is_last: bool | None = None  # ends the block; None: it ends when nothing is hidden
    columns: dict[str, Numbers] | None = None  # new values of the sampler's own


def number_blocks(length: int, block: int | None, is_fixed: Flags) -> Positions:
    """Return the block (L,) of each position that may change."""
    longest = max(length, 1)
    size = longest if block is None else min(block, longest)
    return np.where(is_fixed, FIXED, np.arange(length) // size)


def count_hiding_steps(sampler: Plan | Sampler) -> int:
    """Return after how many steps of a block nothing is hidden again."""
    if isinstance(sampler, Sampler):
        return sampler.hides_until
    return 1 + max(sampler.remask_prob.nonzero()[:, 0].tolist(), default=-1)


def choose_sampling(
    sampler: Plan | Sampler, sampling: SamplingParams
) -> tuple[SamplingParams, SamplingParams]:
    """Return how a sampler's tokens are drawn, and those that it has left hidden at its end."""
    plan = getattr(sampler, "plan", sampler)
    if not isinstance(plan, Plan):
        return sampling, sampling
    if not plan.nucleus:
        sampling = sampling.keep_all()
    if not plan.fill_argmax:
        return sampling, sampling
    sampling = replace(sampling, nucleus="lineage")  # compat
    return sampling, replace(sampling, temperature=0.0)


def list_changes(
    plan: Plan, free: Positions, is_hidden: Flags, *, seed: int, number: int, block: int = 0
) -> Iterator[Change]:
    """List what a plan changes in a block of a row (Algorithm 1), but for the fill of what it leaves hidden.

    The block's positions are `free` (F,), of which some are hidden (F,) at first. Steps in which nothing changes are
    left out, except for the last.
    """
    levels = plan.noise_level.tolist()
    last_step = len(levels) - 1
    hides_until = count_hiding_steps(plan)
    hides_from = int((plan.remask_prob > 0).long().argmax()) if hides_until else 0
    hidden = is_hidden.copy()
    step = 0
    is_last = False
    while step <= last_step:
        if step >= hides_until:  # what is visible stays
            free = free[hidden]
            hidden = hidden[hidden]
        end = min(last_step + 1, step + max(1, MAX_NUMBERS // max(1, len(free))))
        steps = torch.arange(step, end)
        clock = (block * MAX_BLOCK_STEPS + steps)[:, None]
        key = torch.tensor(seed), torch.tensor(number)
        u, u_token = uniform_pair(*key, clock, torch.from_numpy(free), Purpose.SAMPLE)
        transition = plan[steps[:, None]]
        may_reveal = (u < transition.reveal_prob).numpy()
        may_hide = (u < transition.remask_prob).numpy()
        numbers = u_token.numpy()

        first, last = (min(max(x, step), end) - step for x in (hides_from, hides_until))
        found = chain(
            find_reveals(may_reveal[:first], hidden, 0),
            find_changes(may_reveal[:last], may_hide[:last], hidden, first),
            find_reveals(may_reveal[last:], hidden, last),
        )
        for k, reveal, hide in found:
            now = step + k
            is_last = now == last_step
            yield Change(now, free[reveal], free[hide], numbers[k, reveal], levels[now], is_last)
        step = end
    if not is_last:
        yield Change(last_step, NOTHING, NOTHING, None, levels[-1], is_last=True)


def find_changes(
    may_reveal: Flags, may_hide: Flags, hidden: Flags, start: int
) -> Iterator[tuple[int, Positions, Positions]]:
    """Yield each step (K, F) from `start` that changes something, what it reveals and hides; update `hidden`."""
    for k in range(start, len(may_reveal)):
        is_changed: Flags = np.where(hidden, may_reveal[k], may_hide[k])
        changed = is_changed.nonzero()[0]
        if len(changed):
            was_hidden = hidden[changed]
            hidden[changed] = ~was_hidden
            yield k, changed[was_hidden], changed[~was_hidden]


def find_reveals(
    may_reveal: Flags, hidden: Flags, start: int
) -> Iterator[tuple[int, Positions, Positions]]:
    """Yield each step (K, F), the first being `start`, that reveals something and hides nothing; update `hidden`."""
    is_revealed: Flags = may_reveal.any(0) & hidden
    revealed = is_revealed.nonzero()[0]
    if not len(revealed):
        return
    hidden[revealed] = False
    first = may_reveal[:, revealed].argmax(0)  # the step of each
    order = first.argsort(kind="stable")
    steps, starts = np.unique(first[order], return_index=True)
    revealed = revealed[order]
    ends = [*starts.tolist(), len(revealed)]
    for k, (begin, end) in zip(steps.tolist(), pairwise(ends), strict=True):
        yield start + k, revealed[begin:end], NOTHING


class Slot:
    """A row in the batch, and where it stands."""

    def __init__(
        self, row: Row, mask_id: int | None, params: dict[SamplingParams, SamplingParams]
    ) -> None:
        self.row = row
        self.tokens = row.tokens.to("cpu", torch.int64).contiguous()
        length = len(self.tokens)
        if mask_id is None:
            if row.is_fixed is None:
                raise ValueError(
                    "is_fixed is None: a causal model has no mask token, so say which tokens are given"
                )
            is_hidden = ~row.is_fixed.cpu()
            if length and bool(is_hidden[0]):
                raise ValueError(
                    "position 0 of every row must be fixed for a causal model: a BOS token, for example"
                )
        else:
            is_hidden = self.tokens == mask_id
        is_fixed = ~is_hidden if row.is_fixed is None else row.is_fixed.cpu()
        if bool((is_hidden & is_fixed).any()):
            position = int((is_hidden & is_fixed).nonzero()[0])
            raise ValueError(
                f"row {row.number}, position {position} is fixed but holds the mask token: fixed tokens must be text"
            )
        self.is_hidden: Flags = is_hidden.numpy().copy()  # (L,)
        self.is_free: Flags = np.zeros(length, bool)  # (L,): positions of the block
        self.last_prob: Numbers = np.zeros(length)
        sampling, last_sampling = choose_sampling(row.sampler, row.sampling)
        last_sampling = row.last_sampling or last_sampling
        self.first_sampling = params.setdefault(sampling, sampling)
        self.last_sampling = params.setdefault(last_sampling, last_sampling)
        self.hides_until = count_hiding_steps(row.sampler)
        self.block_at = number_blocks(length, row.block, is_fixed.numpy())
        may_hide = isinstance(row.sampler, Plan) or self.hides_until > 0
        may_change = self.block_at > FIXED if may_hide else self.is_hidden
        self.blocks: list[int] = np.unique(self.block_at[may_change]).tolist()  # to be filled
        self.frames = 0
        self.nfe = 0
        self.columns: dict[str, Numbers] = {}  # the sampler's own, (1,) or (L,)
        self.enter_block()

    @property
    def clock(self) -> int:
        """The step of its random numbers."""
        return self.block * MAX_BLOCK_STEPS + self.step

    @property
    def hidden(self) -> Positions:
        """The hidden positions of the block."""
        return (self.is_hidden & self.is_free).nonzero()[0]

    def enter_block(self) -> None:
        """Begin the next block; a row without one has a single frame."""
        row = self.row
        self.block = self.blocks.pop(0) if self.blocks else NO_BLOCK
        self.is_free[:] = self.block_at == self.block
        free = self.is_free.nonzero()[0]
        later = (self.block_at > self.block).nonzero()[0]
        length = len(self.is_free)
        self.block_end = length
        if self.hides_until and len(later):
            self.block_end = int(later[0])
        self.first_open = length  # the first position that may be hidden again
        if self.hides_until and len(free):
            self.first_open = int(free[0])
        self.sampling = self.first_sampling
        self.step = 0
        self.idle = 0  # steps since the last change
        self.first_hidden = len(self.hidden)
        self.listed: Iterator[Change] = iter(())
        self.next: Change | None = None  # the next listed change; None: the sampler is called
        if self.block == NO_BLOCK:
            self.next = Change(0, NOTHING, NOTHING, is_last=True)
        elif isinstance(row.sampler, Plan):
            key = {"seed": row.seed, "number": row.number, "block": self.block}
            self.listed = list_changes(row.sampler, free, self.is_hidden[free], **key)
            self.next = next(self.listed)
        else:
            for name, column in row.sampler.columns.items():
                size = len(self.is_free) if column.per_position else 1
                self.columns[name] = np.full(size, column.initial)

    def take(self, change: Change) -> None:
        """Take the next listed change, and pass over the steps before it."""
        self.frames += change.step - self.step
        self.step = change.step
        self.next = next(self.listed, None)

    def check_idle(self) -> None:
        """Raise if the sampler does not come to an end."""
        sampler = self.row.sampler
        allowed = max(MAX_IDLE_STEPS, len(sampler) if isinstance(sampler, Sized) else 0)
        if self.idle >= allowed:
            raise ValueError(
                f"the sampler {sampler!r} has changed nothing in {allowed} steps: reveal a position, or end the block "
                "with is_last"
            )

    def fill(self) -> None:
        """Reveal in the next step what the sampler has left hidden, at noise level 0."""
        self.sampling = self.last_sampling
        self.next = Change(self.step, self.hidden, NOTHING, is_last=True)

    def finish(self, tokens: Tensor) -> None:
        """Store the outcome in the row."""
        self.row.filled = tokens[: len(self.is_hidden)]
        self.row.nfe = self.nfe
        self.row.steps = self.frames


# The running batch.

Changes = dict[int, Change]  # by row


@dataclass
class Group:
    """The rows of equal samplers that have a score, before the network has run."""

    sampler: Sampler
    members: list[int]
    view: View


@dataclass
class Targets:
    """Positions of the batch, N in all, as arrays (N,)."""

    row: Positions
    position: Positions

    @classmethod
    def collect(cls, positions: Mapping[int, Positions]) -> Self:
        """Collect positions by row."""
        counts = [len(x) for x in positions.values()]
        row = np.repeat(np.array(list(positions), np.int64), counts)
        return cls(row, np.concatenate(list(positions.values())))


@dataclass
class Drawn:
    """Tokens that were drawn for some positions."""

    targets: Targets
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
    ) -> None:
        self.evaluator = evaluator.open()
        self.device = evaluator.device
        self.banned = None if banned is None else check_banned(banned).to(self.device)
        self.slots: list[Slot] = []
        self.params: dict[SamplingParams, SamplingParams] = {}  # one object for equal ones
        self.rows: list[R] = []
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=self.device)  # (B, L)
        self.kinds = self.tokens  # (B, L)
        self.is_hidden: Flags = np.zeros((0, 0), bool)  # (B, L), as the two that follow
        self.is_free: Flags = self.is_hidden
        self.last_prob: Numbers = np.zeros((0, 0))
        self.evaluated: list[int] = []  # the rows of this step's evaluation
        self.join(rows)

    def join(self, rows: Iterable[R]) -> None:
        """Add rows, which take their first step with the next one of the batch."""
        added = list(rows)
        if not added:
            return
        limit = self.evaluator.max_length
        for row in added:
            if len(row.tokens) > limit:
                raise ValueError(
                    f"a row has {len(row.tokens)} tokens, this model's rows at most {limit}: shorten it"
                )
        slots = [Slot(row, self.evaluator.mask_id, self.params) for row in added]
        kinds = [torch.zeros_like(x.tokens) if x.row.kinds is None else x.row.kinds for x in slots]
        width = max(self.tokens.shape[1], max(len(slot.tokens) for slot in slots))
        tokens = append(self.tokens, stack([slot.tokens for slot in slots], width))
        self.kinds = append(self.kinds, stack(kinds, width))
        self.tokens = tokens
        self.rows = [*self.rows, *added]
        self.slots = [*self.slots, *slots]
        self._bind()

    def leave(self, rows: Iterable[R]) -> None:
        """Remove rows."""
        gone = set(rows)
        kept = [i for i, row in enumerate(self.rows) if row not in gone]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in kept]
        self.slots = [self.slots[i] for i in kept]
        width = max((len(slot.tokens) for slot in self.slots), default=0)
        index = self._send(np.array(kept, np.int64))
        self.tokens = self.tokens[index, :width]
        self.kinds = self.kinds[index, :width]
        self._bind()

    def _bind(self) -> None:
        """Give the slots' arrays (L,) a place in arrays (B, L)."""
        shape = len(self.slots), self.tokens.shape[1]
        self.is_hidden = np.zeros(shape, bool)
        self.is_free = np.zeros(shape, bool)
        self.last_prob = np.zeros(shape)
        self.lengths = np.array([len(slot.tokens) for slot in self.slots], np.int64)
        self.hides = any(slot.hides_until for slot in self.slots)
        self.place = np.zeros(len(self.slots), np.int64)  # among the rows of the last evaluation
        samplers = [row.sampler for row in self.rows]
        self.reads_last_prob: Flags = np.array(
            [isinstance(x, Sampler) and x.reads_last_prob for x in samplers], bool
        )
        for i, slot in enumerate(self.slots):
            length = len(slot.tokens)
            for name, whole in (
                ("is_hidden", self.is_hidden),
                ("is_free", self.is_free),
                ("last_prob", self.last_prob),
            ):
                own = whole[i, :length]
                own[:] = getattr(slot, name)
                setattr(slot, name, own)

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
            for group in waiting:
                changes |= self.choose(group, features)
            drawn = self.draw(changes, features)
        except RowsError:
            self._forget_evaluation()
            raise
        return self.write(changes, drawn)

    def _forget_evaluation(self) -> None:
        """Make the next evaluation the first of this step."""
        if self.evaluated:
            self.evaluator = self.evaluator.open()  # a causal model has read its next tokens
        for i in self.evaluated:
            self.slots[i].nfe -= 1

    # Move.

    def move(self) -> tuple[Changes, list[Group]]:
        """Return the changes that are known now, and the samplers that wait for the network."""
        changes: Changes = {}
        called: dict[Sampler, list[int]] = {}
        for i, slot in enumerate(self.slots):
            if slot.next is None:
                assert isinstance(slot.row.sampler, Sampler)
                if slot.idle >= MAX_IDLE_STEPS:
                    with blame([slot.row]):
                        slot.check_idle()
                called.setdefault(slot.row.sampler, []).append(i)
            elif slot.next.step == slot.step or not slot.row.every_step:
                changes[i] = slot.next  # taken when it is written
        waiting = []
        for sampler, members in called.items():
            with blame([self.rows[i] for i in members]):
                group = Group(sampler, members, self._view(sampler, members))
            if sampler.score is None:
                with blame([self.rows[i] for i in members]):
                    changes |= self._call(group)
            else:
                waiting.append(group)
        return changes, waiting

    def _view(self, sampler: Sampler, members: list[int]) -> View:
        slots = [self.slots[i] for i in members]
        numbers = [(x.step, x.first_hidden, x.row.seed, x.row.number, x.clock) for x in slots]
        step, first_hidden, seed, number, clock = torch.from_numpy(np.array(numbers).T.copy())
        is_free = self.is_free[members]
        return View(
            step=step,
            is_hidden=torch.from_numpy(self.is_hidden[members] & is_free),
            is_free=torch.from_numpy(is_free),
            first_hidden=first_hidden,
            rng=CounterRng(seed, number, clock),
            columns=stack_columns(sampler, slots, self.tokens.shape[1]),
            last_prob=torch.from_numpy(self.last_prob[members])
            if sampler.reads_last_prob
            else None,
        )

    def _call(self, group: Group) -> Changes:
        """Call a sampler and return the changes of its rows."""
        sampler, view = group.sampler, group.view
        move = sampler.move(view)
        if move.hide is not None and not sampler.hides_until:
            raise ValueError(
                f"the sampler {sampler!r} hides positions but has hides_until = 0: set hides_until to the number of "
                "a block's first steps that may hide"
            )
        if bool((move.reveal & ~view.is_hidden).any()):
            raise ValueError(
                f"the sampler {sampler!r} reveals positions that are not hidden: combine with view.is_hidden"
            )
        level = view.noise_level if move.noise_level is None else move.noise_level
        levels = level.tolist()
        is_last = [None] * len(levels) if move.is_last is None else move.is_last.tolist()
        reveals = list_positions(move.reveal)
        hides = [NOTHING] * len(levels) if move.hide is None else list_positions(move.hide)
        u = view.numbers[1].numpy() if "numbers" in vars(view) else None
        changes: Changes = {}
        for k, i in enumerate(group.members):
            slot = self.slots[i]
            columns = {
                name: values[k].double().reshape(-1).numpy()[: len(slot.tokens)]
                for name, values in move.columns.items()
            }
            own = None if u is None else u[k, reveals[k]]
            changes[i] = Change(
                slot.step, reveals[k], hides[k], own, levels[k], is_last[k], columns
            )
        return changes

    # Evaluate and choose.

    def evaluate(self, changes: Changes, waiting: Sequence[Group]) -> Tensor | None:
        """Return features (n, L, dim) of the rows in which a token is drawn now, or may be."""
        levels = {i: change.noise_level for i, change in changes.items() if len(change.reveal)}
        for group in waiting:
            levels.update(zip(group.members, group.view.noise_level.tolist(), strict=True))
        if not levels:
            return None
        members = list(levels)
        self.place[members] = np.arange(len(members))
        self.evaluated = members
        for i in members:
            self.slots[i].nfe += 1
        is_whole = members == list(range(len(self.slots)))
        tokens = self.tokens if is_whole else self.tokens[self._send(np.array(members, np.int64))]
        width = tokens.shape[1]
        lengths = self.lengths[members]
        valid = None
        if (lengths < width).any():
            valid = torch.from_numpy(np.arange(width) < lengths[:, None])
        level = torch.tensor(list(levels.values()), dtype=torch.float32)
        rows = [self.rows[i] for i in members]
        next_position = self.is_hidden[members].argmax(1)
        return self.evaluator.features(tokens, level, valid, rows, next_position)

    def choose(self, group: Group, features: Tensor | None) -> Changes:
        """Call a sampler with the scores of its rows' hidden positions."""
        sampler, view = group.sampler, group.view
        assert sampler.score is not None
        member, position = view.is_hidden.numpy().nonzero()
        targets = Targets(np.array(group.members, np.int64)[member], position)
        rows = [self.rows[i] for i in group.members]
        parts = []
        for _, logits in self.iter_logits(features, targets):
            with blame(rows):
                parts.append(sampler.score(logits.float()))
        with blame(rows):
            view.scores = torch.zeros(view.is_hidden.shape)
            if parts:
                view.scores[view.is_hidden] = torch.cat(parts).cpu()
            return self._call(group)

    def iter_logits(
        self, features: Tensor | None, targets: Targets
    ) -> Iterator[tuple[slice, Tensor]]:
        """Map features to logits (n, V) of positions, some at a time; ban tokens."""
        if features is None:
            assert not len(targets.row)
            return
        index = self._send(np.stack([self.place[targets.row], targets.position, targets.row]))
        size = self.evaluator.max_logit_rows
        for start in range(0, len(targets.row), size):
            part = slice(start, start + size)
            place_part, position, row = index[:, part]
            logits = self.evaluator.logits_at(features[place_part, position])
            if self.banned is not None:
                banned = self._pad_banned(logits.shape[1])[self.kinds[row, position]]
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
        together: dict[tuple[Any, ...], list[int]] = {}
        for i in revealing:
            row = self.rows[i]
            alone = row if row.draw is not None else None
            key = (id(self.slots[i].sampling), row.top_logprobs is not None, alone)
            together.setdefault(key, []).append(i)
        drawn = []
        for (_, has_logprobs, row), members in together.items():
            sampling = self.slots[members[0]].sampling
            targets = Targets.collect({i: changes[i].reveal for i in members})
            u = np.concatenate([changes[i].u for i in members])
            if row is not None:
                parts = [self._draw_jointly(members[0], targets, u, features)]
            else:
                parts = []
                numbers = self._send(u)
                for part, logits in self.iter_logits(features, targets):
                    parts.append(draw(logits, numbers[part], sampling))
                    if has_logprobs:
                        self._record_logprobs(logits, parts[-1].tokens, targets, part)
            tokens = torch.cat([part.tokens for part in parts])
            drawn.append(Drawn(targets, tokens, torch.cat([part.probs for part in parts])))
        return drawn

    def _make_numbers(self, changes: Changes) -> None:
        """Make the random numbers of changes that have none yet."""
        missing = {i: change for i, change in changes.items() if change.u is None}
        if not missing:
            return
        slots = [self.slots[i] for i in missing]
        counts = [len(change.reveal) for change in missing.values()]
        keys = np.array([(slot.row.seed, slot.row.number, slot.clock) for slot in slots])
        seed, number, clock = np.repeat(keys, counts, axis=0).view(np.uint64).T
        position = np.concatenate([x.reveal for x in missing.values()]).view(np.uint64)
        _, u = make_numbers([seed, number, clock, position], Purpose.SAMPLE)
        end = 0
        for change, count in zip(missing.values(), counts, strict=True):
            change.u = u[end : end + count]
            end += count

    def _draw_jointly(
        self, i: int, targets: Targets, u: Numbers, features: Tensor | None
    ) -> DrawnTokens:
        row, slot = self.rows[i], self.slots[i]
        assert row.draw is not None
        hidden = slot.is_hidden.nonzero()[0]
        parts = self.iter_logits(features, Targets.collect({i: hidden}))
        logits = torch.cat([part for _, part in parts])
        with blame([row]):
            return row.draw(
                tokens=self.tokens[i, : len(slot.tokens)],
                hidden=self._send(hidden),
                logits=logits,
                reveal=self._send(targets.position),
                u=self._send(u),
                sampling=slot.sampling,
            )

    def _record_logprobs(
        self, logits: Tensor, tokens: Tensor, targets: Targets, part: slice
    ) -> None:
        """Record the log-probabilities of drawn tokens (n,) in their rows."""
        rows = targets.row[part].tolist()
        width = max(self.rows[i].top_logprobs or 0 for i in rows)
        logprobs = logits.float().log_softmax(-1)
        own = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        top = logprobs.topk(width, -1)
        for i, position, logprob, values, ids in zip(
            rows, targets.position[part].tolist(), own, top.values.tolist(), top.indices.tolist()
        ):
            row = self.rows[i]
            best = dict(zip(ids[: row.top_logprobs], values, strict=False))
            possible = {token: value for token, value in best.items() if value > -np.inf}
            row.logprobs[position] = TokenLogprob(logprob, possible)

    def write(self, changes: Changes, drawn: list[Drawn]) -> Frame[R]:
        """Write what changes, return the frame, and move on the rows whose block is over."""
        for i, change in changes.items():
            slot = self.slots[i]
            if slot.next is change:
                slot.take(change)
            if change.columns:
                slot.columns |= change.columns
            slot.idle = 0 if len(change.reveal) or len(change.hide) else slot.idle + 1
        before = self.is_hidden.copy()
        self.write_tokens(changes, drawn)
        for slot in self.slots:
            slot.step += 1
            slot.frames += 1
            if slot.step >= slot.hides_until:
                slot.first_open = slot.block_end
        is_hidden = self.is_hidden.copy()
        frame = Frame(
            rows=self.rows,
            tokens=self.tokens,
            is_hidden=torch.from_numpy(is_hidden),
            changed=torch.from_numpy(is_hidden ^ before),
            step=[slot.frames for slot in self.slots],
            nfe=[slot.nfe for slot in self.slots],
            settled=self.count_settled(),
            is_done=self._end_blocks(changes),
        )
        if any(frame.is_done):
            self.leave(compress(frame.rows, frame.is_done))
        return frame

    def write_tokens(self, changes: Changes, drawn: list[Drawn]) -> None:
        """Write drawn tokens, and the mask where a token is hidden again, into a copy: frames keep theirs."""
        width = self.tokens.shape[1]
        shown = [each.targets.row * width + each.targets.position for each in drawn]
        masked = [i * width + x.hide for i, x in changes.items() if len(x.hide)]
        values = [each.tokens for each in drawn]
        flat_hidden = self.is_hidden.reshape(-1)
        for where in shown:
            flat_hidden[where] = False
        if masked:
            assert self.evaluator.mask_id is not None
            where = np.concatenate(masked)
            flat_hidden[where] = True
            values.append(self.tokens.new_full((len(where),), self.evaluator.mask_id))
        if values:
            index = self._send(np.concatenate([*shown, *masked]))
            flat = self.tokens.flatten().index_copy(0, index, torch.cat(values))
            self.tokens = flat.view(self.tokens.shape)
        for each in drawn if self.reads_last_prob.any() else ():
            is_read = self.reads_last_prob[each.targets.row]
            if is_read.any():
                row, position = each.targets.row[is_read], each.targets.position[is_read]
                self.last_prob[row, position] = each.probs.cpu().numpy()[is_read]

    def count_settled(self) -> list[int]:
        """Count the leading positions of each row that can no longer change."""
        first = np.where(self.is_hidden.any(1), self.is_hidden.argmax(1), self.lengths).tolist()
        if not self.hides:
            return first
        return [min(x, slot.first_open) for x, slot in zip(first, self.slots, strict=True)]

    def _end_blocks(self, changes: Changes) -> list[bool]:
        """Move on the rows whose block is over; return which rows are done."""
        is_done = [False] * len(self.slots)
        ending = [i for i, change in changes.items() if change.is_last is not False]
        left: Flags = np.any(self.is_hidden[ending] & self.is_free[ending], axis=1)
        for i, is_left in zip(ending, left, strict=True):
            slot = self.slots[i]
            if is_left:
                if changes[i].is_last:
                    slot.fill()
            elif slot.blocks:
                slot.enter_block()
            else:
                slot.finish(self.tokens[i])
                is_done[i] = True
        return is_done


def sample(
    evaluator: Evaluator, rows: Iterable[R], *, banned: Tensor | None = None
) -> Iterator[Frame[R]]:
    """Sample rows and yield a frame for each step; rows that are done are in no later frame, and have their outcome."""
    running = RunningBatch(evaluator, rows, banned=banned)
    while running.rows:
        yield take_step(running)


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


def sample_together(
    evaluator: Evaluator, rows: Iterable[R], *, banned: Tensor | None = None
) -> Iterator[Frame[R]]:
    """Sample rows and yield frames of all of them, those that are done too; the first is before the first step."""
    running = RunningBatch(evaluator, rows, banned=banned)
    count = len(running.rows)
    is_hidden = torch.from_numpy(running.is_hidden.copy())
    frame = Frame(
        rows=running.rows,
        tokens=running.tokens,
        is_hidden=is_hidden,
        changed=torch.zeros_like(is_hidden),
        step=[0] * count,
        nfe=[0] * count,
        settled=running.count_settled(),
        is_done=[False] * count,
    )
    yield frame
    while running.rows:
        frame = update_frame(frame, take_step(running))
        yield frame


def update_frame(old: Frame[R], new: Frame[R]) -> Frame[R]:
    """Return the frame of all rows of an old one, some of which are in the new frame while the others are done."""
    place_of = {row: i for i, row in enumerate(old.rows)}
    places = [place_of[row] for row in new.rows]
    index = torch.tensor(places)
    width = new.tokens.shape[1]
    frame = replace(
        old,
        tokens=old.tokens.clone(),
        is_hidden=old.is_hidden.clone(),
        changed=torch.zeros_like(old.changed),
        step=list(old.step),
        nfe=list(old.nfe),
        settled=list(old.settled),
        is_done=list(old.is_done),
    )
    frame.tokens[index.to(old.tokens.device), :width] = new.tokens
    frame.is_hidden[index, :width] = new.is_hidden
    frame.changed[index, :width] = new.changed
    for k, i in enumerate(places):
        frame.step[i] = new.step[k]
        frame.nfe[i] = new.nfe[k]
        frame.settled[i] = new.settled[k]
        frame.is_done[i] = new.is_done[k]
    return frame


def check_banned(banned: Tensor) -> Tensor:
    """Return banned tokens (kinds, V), of which no kind may ban all."""
    if bool(banned.all(-1).any()):
        kind = int(banned.all(-1).nonzero()[0])
        raise ValueError(f"kind {kind} bans all tokens: allow at least one")
    return banned


def list_positions(flags: Tensor) -> list[Positions]:
    """Return the positions of each row (n, L) where a flag is set."""
    array = flags.numpy()
    ends = array.sum(1).cumsum().tolist()
    positions = array.nonzero()[1]
    return [positions[start:end] for start, end in pairwise([0, *ends])]


def stack(rows: Sequence[Tensor], width: int | None = None) -> Tensor:
    """Stack tensors (L,) to one (n, width), padded with zeros."""
    width = max(len(row) for row in rows) if width is None else width
    return torch.stack([F.pad(row, (0, width - len(row))) for row in rows])


def append(old: Tensor, new: Tensor) -> Tensor:
    """Append rows to a tensor (n, L), which is padded with zeros to their width."""
    return torch.cat([F.pad(old, (0, new.shape[1] - old.shape[1])), new.to(old.device)])


def stack_columns(sampler: Sampler, slots: Sequence[Slot], width: int) -> dict[str, Tensor]:
    """Stack the columns of a sampler's rows to tensors (n,) or (n, L)."""
    columns = {}
    for name, column in sampler.columns.items():
        values = [torch.from_numpy(slot.columns[name]) for slot in slots]
        columns[name] = stack(values, width) if column.per_position else torch.cat(values)
    return columns
