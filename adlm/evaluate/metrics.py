"""From token losses to the figures that are reported."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Likelihood:
    """Negative log-likelihood summed over batches in float64: nats per token, bits per token, perplexity."""

    total: float = 0.0
    tokens: float = 0.0

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
        self.total += float((torch.where(counted > 0, nll, 0).double() * counted).sum())
        self.tokens += float(counted.double().sum())

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
