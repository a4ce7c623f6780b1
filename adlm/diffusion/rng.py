"""Counter-based randomness: a draw is a pure function of (seed, row, step, position, purpose).

A row's numbers do not depend on its neighbours, on the batch size, on what was skipped or on the device. The
generator is Philox4x32-10 (Salmon et al., 2011): the seed is its key, the four other words its counter.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from collections.abc import Callable

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a number is for; two purposes never share one."""

    CHANGE = 0  # which positions a sampler reveals or hides
    TOKEN = 1  # which token is drawn
    ORDER = 2  # ordered unmasking: positions and times
    TIME = 3  # training: the row's time
    MASK = 4  # training: which positions are hidden


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on int64 tensors that hold 32-bit words."""
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


def uniform_bits(seed: Tensor, row: Tensor, step: Tensor, position: Tensor, purpose: int) -> Tensor:
    """A float64 in [0, 1) with 53 random bits for every element of the broadcast arguments."""
    counter = (position & LOW, step & LOW, row & LOW, ((row >> 32) & 0xFFFFFF) << 8 | purpose)
    high, low, _, _ = philox(counter, (seed & LOW, (seed >> 32) & LOW))
    return ((high << 21) | (low >> 11)).to(torch.float64) * 2.0**-53


@lru_cache(maxsize=1)
def _compiled_uniform() -> Callable[..., Tensor]:
    return torch.compile(uniform_bits, dynamic=True)  # on a GPU a hundred small kernels become one


@dataclass(frozen=True)
class CounterRng:
    """The random numbers of a batch of rows, each row known by its own number (and seed, where they differ)."""

    seed: Tensor  # () or (B,), int64
    rows: Tensor  # (B,), int64

    @staticmethod
    def of(seed: int, rows: int | Tensor, device: torch.device | str = "cpu") -> CounterRng:
        """`rows` is a count (rows 0, 1, …) or the rows' own numbers."""
        numbers = torch.arange(rows) if isinstance(rows, int) else rows
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, got {seed}")
        return CounterRng(torch.tensor(seed, device=device), numbers.to(device))

    def uniform(self, step: int, length: int, purpose: Purpose) -> Tensor:
        """(B, length) numbers of one step."""
        position = torch.arange(length, device=self.rows.device)
        seed = self.seed if self.seed.dim() == 0 else self.seed[:, None]
        return self._draw(seed, self.rows[:, None], step, position, purpose)

    def uniform_at(self, step: int, row: Tensor, position: Tensor, purpose: Purpose) -> Tensor:
        """(N,) numbers of one step at pairs of (index into the batch, position): those that `uniform` gives there."""
        seed = self.seed if self.seed.dim() == 0 else self.seed[row]
        return self._draw(seed, self.rows[row], step, position, purpose)

    def _draw(self, seed: Tensor, row: Tensor, step: int, position: Tensor, purpose: Purpose) -> Tensor:
        draw = _compiled_uniform() if row.is_cuda else uniform_bits
        return draw(seed, row, torch.tensor(step, device=row.device), position, int(purpose))
