"""From a stream of tokens to rows of one length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack_rows(tokens: Sequence[int] | Tensor, length: int, *, stride: int | None = None) -> Tensor:
    """Rows (n, length) that begin every `stride` tokens (default: `length`, so that none overlap).

    A tail that does not fill a row is left out. The rows depend on the tokens alone, not on workers or batches.
    """
    stream = torch.as_tensor(tokens, dtype=torch.int64)
    stride = length if stride is None else stride
    if length < 1 or stride < 1:
        raise ValueError(f"length and stride must be at least 1, got {length} and {stride}")
    if stream.dim() != 1 or stream.numel() < length:
        raise ValueError(f"one row takes {length} tokens in one stream, got a shape of {tuple(stream.shape)}")
    return stream.unfold(0, length, stride).contiguous()
