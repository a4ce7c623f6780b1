"""Counter-based randomness: a draw is a pure function of (seed, row, step, position, purpose).

A row's numbers do not depend on its neighbors, on the batch size, on what was skipped or on the device. The
generator is Philox4x32-10 (Salmon et al., 2011): the seed is its key, the four other words its counter.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


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
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A 32 × 32 bit product fills 64 bits; int64 wraps, so the high word is read after a masked shift.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & LOW) ^ c1 ^ k0,
            p1 & LOW,
            ((p0 >> 32) & LOW) ^ c3 ^ k1,
            p0 & LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def uniform_pair(
    seed: Tensor, row: Tensor, step: Tensor, position: Tensor, purpose: int
) -> tuple[Tensor, Tensor]:
    """Return two float64 in [0, 1), 53 random bits each, for every element of the broadcast arguments."""
    counter = (position & LOW, step & LOW, row & LOW, ((row >> 32) & 0xFFFFFF) << 8 | purpose)
    words = philox(counter, (seed & LOW, (seed >> 32) & LOW))
    first, second = ((words[0] << 21) | (words[1] >> 11), (words[2] << 21) | (words[3] >> 11))
    return first.double() * 2.0**-53, second.double() * 2.0**-53


@dataclass(frozen=True)
class CounterRng:
    """The random numbers of a batch, made on the host; each row has its own number (and seed, where they differ)."""

    seed: Tensor  # () or (B,), int64
    rows: Tensor  # (B,), int64
    start: Tensor | int = (
        0  # or (B,): added to every step, for rows that have begun at different times
    )

    @staticmethod
    def from_seed(seed: int | Tensor, rows: int | Tensor) -> "CounterRng":
        """Make the generator of `rows`: a count (rows 0, 1, …) or their own numbers, with one seed or one for each."""
        numbers = torch.arange(rows) if isinstance(rows, int) else rows.cpu()
        if isinstance(seed, int) and not 0 <= seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, got {seed}")
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < 2**56:
            raise ValueError(
                f"row numbers must be between 0 and 2**56 - 1, got {numbers.min()} to {numbers.max()}"
            )
        return CounterRng(torch.as_tensor(seed), numbers)

    def uniform(self, step: int, length: int, purpose: Purpose) -> Tensor:
        """Return (B, length) numbers of one step."""
        return self.pairs(step, 1, length, purpose)[0][0]

    def pairs(self, step: int, steps: int, length: int, purpose: Purpose) -> tuple[Tensor, Tensor]:
        """Return two (steps, B, length) tensors of numbers, for `steps` steps from `step` on."""
        seed = self.seed if self.seed.dim() == 0 else self.seed[:, None]
        when = (torch.arange(step, step + steps)[:, None] + self.start)[..., None]
        return uniform_pair(seed, self.rows[:, None], when, torch.arange(length), int(purpose))
