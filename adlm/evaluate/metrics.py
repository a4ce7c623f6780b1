"""From the nats of tokens and rows to the figures that are reported: the one place that adds up and that has errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from adlm.evaluate.tallies import ratio

IN_A_BIN, MOST_BINS = 8, 64  # draws whose mean is what is usual at a time, and how finely times are told apart


class Bound(NamedTuple):
    """Nats per token, with a standard error. For a masked model an upper bound, for a causal one exact."""

    nll: float
    stderr: float  # over documents (or rows); it contains the noise
    tokens: int
    noise_stderr: float | None = None  # from the noise alone; None: one draw does not tell
    draws: int = 1

    @property
    def ppl(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf  # of a model that diverged

    def bits_per_byte(self, size: int) -> float:
        """All nats that were counted, as bits, over so many bytes of text."""
        if size < 1:
            raise ValueError(f"bits per byte need a text of at least 1 byte, got {size}")
        return self.nll * self.tokens / math.log(2) / size


@dataclass
class Likelihood:
    """Nats and tokens of rows, collected in float64: nats per token, bits per token, perplexity, errors."""

    nats: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))  # (n,)
    counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))  # (n,): tokens of each row

    def add(self, nll: Tensor, mask: Tensor | None = None) -> None:
        """Token losses (B, L) and which of them count. A loss that is not finite raises: it must not vanish."""
        counted = torch.ones_like(nll) if mask is None else mask
        wrong = (~torch.isfinite(nll)) & (counted > 0)
        if bool(wrong.any()):
            row, position = wrong.nonzero()[0].tolist()
            raise FloatingPointError(
                f"the loss of row {row}, position {position} is {float(nll[row, position])} "
                f"({int(wrong.sum())} such tokens in this batch)"
            )
        self.add_rows((torch.where(counted > 0, nll, 0).double() * counted).sum(-1), counted.double().sum(-1))

    def add_rows(self, nats: Tensor, counts: Tensor) -> None:
        """Rows by their nats (n,) and tokens (n,)."""
        wrong = (~torch.isfinite(nats)).nonzero()[:, 0].tolist()
        if wrong:
            first = len(self.nats) + wrong[0]
            raise FloatingPointError(f"the loss of {len(wrong)} held-out rows is not finite, row {first} among them")
        self.nats = torch.cat([self.nats, nats.double().cpu()])
        self.counts = torch.cat([self.counts, counts.double().cpu()])

    @property
    def total(self) -> float:
        return float(self.nats.sum())

    @property
    def tokens(self) -> float:
        return float(self.counts.sum())

    @property
    def nll(self) -> float:
        if self.tokens == 0:
            raise ValueError("no tokens were counted: the data is empty or every token is masked out")
        return self.total / self.tokens

    @property
    def bpt(self) -> float:
        return self.nll / math.log(2)

    @property
    def ppl(self) -> float:
        return math.exp(self.nll)

    def stderr(self, documents: Tensor | None = None) -> float:
        """Of a ratio, because rows differ in length; rows of one document (n,) are one unit, or each row is its own."""
        unit, units = units_of(len(self.nats), documents)
        sums = torch.zeros(2, units, dtype=torch.float64).index_add_(1, unit, torch.stack([self.nats, self.counts]))
        _, error = ratio(*sums.numpy())
        if math.isnan(error):
            raise ValueError(f"a standard error needs tokens that count in at least 2 of {units} units: give more text")
        return error

    def bound(self, documents: Tensor | None = None, *, variance: Tensor | None = None, draws: int = 1) -> Bound:
        """The figure; `variance` (n,) is that of each row's nats by its noise, where it is known."""
        noise = None if variance is None else float(variance.sum().sqrt() / self.counts.sum())
        return Bound(self.nll, self.stderr(documents), int(self.tokens), noise, draws)


def noise_variance(nats: Tensor, counts: Tensor, times: Tensor | None = None) -> Tensor:
    """How far the mean of each row's draws (n, K) varies by its noise alone, as a variance (n,).

    Draws at different `times` (n, K), in [0, 1), differ by more than noise: little hidden costs less than much. What
    tokens of all rows cost at a time, a mean by bins of it, is taken off first; what is a row's own in that is left in.
    """
    spread = 1.0
    if times is not None:
        bins = min(max(nats.numel() // IN_A_BIN, 1), len(nats), MOST_BINS)
        which, tokens = (times * bins).long().clamp(max=bins - 1), counts[:, None].expand_as(nats)
        parts = torch.stack([nats.flatten(), tokens.flatten()])
        sums = torch.zeros(2, bins, dtype=torch.float64).index_add_(1, which.flatten(), parts)
        nats = nats - tokens * (sums[0] / sums[1].clamp(min=1))[which]
        spread = nats.numel() / (nats.numel() - bins + 1)
    return nats.var(1) / nats.shape[1] * spread


def units_of(rows: int, documents: Tensor | None = None) -> tuple[Tensor, int]:
    """What a standard error is taken over: each row's unit (rows,), and how many there are, at least two."""
    if documents is None:
        if rows < 2:
            raise ValueError(f"a standard error needs at least 2 rows, got {rows}: give more text or shorter rows")
        return torch.arange(rows), rows
    if documents.shape != (rows,):
        raise ValueError(f"{rows} rows need as many document numbers, got a shape of {tuple(documents.shape)}")
    found, unit = documents.cpu().unique(return_inverse=True)
    if len(found) < 2:
        raise ValueError(
            f"a standard error over documents needs rows that begin in at least 2 of them, got {len(found)}: give more "
            "text, or leave `documents` out for an error over rows"
        )
    return unit, len(found)
