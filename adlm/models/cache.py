"""Keys and values of the tokens that a causal model has processed."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """One layer's keys and values, allocated once for `length` positions and filled in place."""

    def __init__(
        self, batch: int, heads: int, length: int, head_dim: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.keys = torch.empty(batch, heads, length, head_dim, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.used = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions and return all so far."""
        end = self.used + k.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"{end} positions do not fit into a cache of {self.keys.shape[2]}: make a longer cache")
        self.keys[:, :, self.used : end] = k
        self.values[:, :, self.used : end] = v
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]
