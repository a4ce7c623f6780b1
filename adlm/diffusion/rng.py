"""Counter-based randomness: a draw is a pure function of (seed, row, step, position, purpose).

A row's numbers do not depend on its neighbors, on the batch size, on what was skipped or on the device. The
generator is Philox4x32-10 (Salmon et al., 2011): the seed is its key, the four other words its counter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]
Numbers = NDArray[np.float64]
Keys = NDArray[np.int64]

ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)
ROW_HIGH = np.uint64(0xFFFFFF)  # the row's bits above the first 32
PURPOSE_BITS = np.uint64(8)
SHIFT_HIGH = np.uint64(21)  # 53 = 32 + 21 bits of two words
SHIFT_LOW = np.uint64(11)
MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
KEY_STEPS = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array(
    [0x9E3779B9, 0xBB67AE85], np.uint64
)
MAX_NUMBERS = 16384  # made in one call: more leave the processor's cache


class Purpose(IntEnum):
    """What a random number is used for; two purposes never share one."""

    SAMPLE = 0  # samplers: which positions change, and which token is drawn there
    ORDER = 1  # ordered unmasking: positions and times
    TIME = 2  # training: the row's time
    MASK = 3  # training: which positions are hidden
    ANCHOR = 4  # random anchors
    CURRICULUM = 5  # training to reason: the stage of a row
    LABEL = 6  # training to reason: the order of shuffled labels


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Run ten rounds of Philox4x32 on int64 tensors that hold 32-bit words."""
    words = run_rounds([x.numpy().view(np.uint64) for x in (*counter, *key)])
    return tuple(torch.from_numpy(x.view(np.int64)) for x in words)


def run_rounds(words: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Run ten rounds of Philox4x32 on four words of the counter and two of the key.

    NumPy has a third of torch's cost a call, which is what few numbers take. Both halves of a round are one array.
    """
    c0, c1, c2, c3, k0, k1 = words
    shape = np.broadcast(*words).shape
    factor = np.empty((2, *shape), np.uint64)  # the words that are multiplied
    other = np.empty_like(factor)
    product = np.empty_like(factor)
    factor[0], factor[1] = c0, c2
    other[0], other[1] = c1, c3
    key_shape = np.broadcast(k0, k1).shape
    key = np.empty((2, *[1] * (len(shape) - len(key_shape)), *key_shape), np.uint64)
    key[0], key[1] = k0, k1
    keys = (key + KEY_STEPS.reshape(ROUNDS, 2, *[1] * len(shape))) & LOW
    multiplier = MULTIPLIERS.reshape(2, *[1] * len(shape))
    for number in range(ROUNDS):
        # A round swaps the halves. Instead, every other round finds them swapped.
        step = 1 if number % 2 else -1
        np.multiply(factor, multiplier[::-step], out=product)
        np.right_shift(product, WORD_BITS, out=factor)
        np.bitwise_xor(factor, other[::-1], out=factor)
        np.bitwise_xor(factor, keys[number, ::step], out=factor)
        np.bitwise_and(product, LOW, out=other)
    return factor[0], other[0], factor[1], other[1]


def uniform_pair(
    seed: Tensor, row: Tensor, step: Tensor, position: Tensor, purpose: int
) -> tuple[Tensor, Tensor]:
    """Return two float64 in [0, 1), 53 random bits each, for every element of the broadcast arguments."""
    arguments = [x.numpy().view(np.uint64) for x in (seed, row, step, position)]
    first, second = make_numbers(arguments, purpose)
    return torch.from_numpy(first), torch.from_numpy(second)


def make_numbers(arguments: Sequence[Words], purpose: int) -> tuple[Numbers, Numbers]:
    """Make the numbers of seed, row, step and position, at most MAX_NUMBERS at a time."""
    shape = np.broadcast(*arguments).shape
    if math.prod(shape) > MAX_NUMBERS:
        axis = next(i for i, size in enumerate(shape) if size > 1)
        full = [np.broadcast_to(x, shape) if x.ndim < len(shape) else x for x in arguments]
        parts = [np.array_split(x, 2, axis) if x.shape[axis] > 1 else [x, x] for x in full]
        halves = [make_numbers(part, purpose) for part in zip(*parts, strict=True)]
        (a, b), (c, d) = halves
        return np.concatenate([a, c], axis), np.concatenate([b, d], axis)
    seed, row, step, position = arguments
    last = ((row >> WORD_BITS) & ROW_HIGH) << PURPOSE_BITS | np.uint64(purpose)
    counter = (position & LOW, step & LOW, row & LOW, last)
    w0, w1, w2, w3 = run_rounds((*counter, seed & LOW, seed >> WORD_BITS))
    first = ((w0 << SHIFT_HIGH) | (w1 >> SHIFT_LOW)) * 2.0**-53
    second = ((w2 << SHIFT_HIGH) | (w3 >> SHIFT_LOW)) * 2.0**-53
    return np.asarray(first), np.asarray(second)


def make_steps(
    seed: Keys, row: Keys, clock: Keys, steps: int, length: int, purpose: int
) -> tuple[Numbers, Numbers]:
    """Make the numbers (steps, B, length) of rows (B,) from their own clocks on, () or (B,)."""
    when = (np.arange(steps)[:, None] + clock)[..., None]
    arguments = (seed[..., None], row[:, None], when, np.arange(length))
    return make_numbers([x.view(np.uint64) for x in arguments], purpose)


@lru_cache(maxsize=16)
def make_ahead(keys: bytes, steps: int, length: int, purpose: int) -> tuple[Numbers, Numbers]:
    """Make the numbers of some steps, and keep them: a call for each step would take longer."""
    seed, row, clock = np.frombuffer(keys, np.int64).reshape(3, -1)
    return make_steps(seed, row, clock, steps, length, purpose)


def check_seed(seed: int) -> None:
    """Raise if a seed does not fit into the generator's key."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be between 0 and 2**63 - 1, got {seed}")


def check_row(number: int) -> None:
    """Raise if a row's number does not fit into the generator's counter."""
    if not 0 <= number < 2**56:
        raise ValueError(f"row numbers must be between 0 and 2**56 - 1, got {number}")


@dataclass(frozen=True)
class CounterRng:
    """The random numbers of a batch, made on the host; each row has its own number (and seed, where they differ)."""

    seed: Tensor  # () or (B,), int64
    rows: Tensor  # (B,), int64
    start: Tensor | int = 0  # or (B,): added to every step, for rows that have begun apart
    ahead: int = 1  # steps made at once and kept, where rows, with a seed and start each, are few

    @staticmethod
    def from_seed(seed: int | Tensor, rows: int | Tensor) -> "CounterRng":
        """Make the generator of `rows`: a count (rows 0, 1, …) or their own numbers, with one seed or one for each."""
        numbers = torch.arange(rows) if isinstance(rows, int) else rows.cpu()
        if isinstance(seed, int):
            check_seed(seed)
        if numbers.numel():
            check_row(int(numbers.min()))
            check_row(int(numbers.max()))
        return CounterRng(torch.as_tensor(seed), numbers)

    def uniform(self, step: int, length: int, purpose: Purpose) -> Tensor:
        """Return (B, length) numbers of one step."""
        return self.pairs(step, 1, length, purpose)[0][0]

    def pairs(self, step: int, steps: int, length: int, purpose: Purpose) -> tuple[Tensor, Tensor]:
        """Return two (steps, B, length) tensors of numbers, for `steps` steps from `step` on."""
        seed, row = self.seed.numpy(), self.rows.numpy()
        start = self.start.numpy() if isinstance(self.start, Tensor) else np.array(self.start)
        clock = start + step
        if steps == 1 and self.is_ahead(length):
            passed = clock % self.ahead
            k = passed[0]
            if (passed == k).all():  # all rows are as far in the steps that are kept
                keys = seed.tobytes() + row.tobytes() + (clock - k).tobytes()
                kept = make_ahead(keys, self.ahead, length, int(purpose))
                first, second = (x[k : k + 1].copy() for x in kept)
                return torch.from_numpy(first), torch.from_numpy(second)
        first, second = make_steps(seed, row, clock, steps, length, int(purpose))
        return torch.from_numpy(first), torch.from_numpy(second)

    def is_ahead(self, length: int) -> bool:
        """Return whether numbers of so many positions are made some steps ahead."""
        return self.ahead > 1 and self.ahead * self.rows.numel() * length <= MAX_NUMBERS
