"""Weights in a byte each, for storing: every row of a matrix as int8 with its own scale; models compute in float."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ".scale"
INT8_MAX = 127


def quantize(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 and `<name>.scale` (a float32 a row); vectors, which are few, as float32."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2:
            stored[name] = weight.float().contiguous()
            continue
        scale = weight.float().abs().amax(1) / INT8_MAX
        scale = torch.where(scale == 0, 1.0, scale)  # a row of zeros
        stored[name] = (weight.float() / scale[:, None]).round().to(torch.int8).contiguous()
        stored[name + SCALE] = scale
    return stored


def dequantize(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that `quantize` stored, in float32; what is not int8 passes as it is."""
    weights: dict[str, Tensor] = {}
    for name, weight in stored.items():
        if name.endswith(SCALE):
            continue
        if weight.dtype != torch.int8:
            weights[name] = weight
            continue
        if name + SCALE not in stored:
            raise ValueError(f"{name} is int8 but has no {name + SCALE}: the file is not whole")
        weights[name] = weight.float() * stored[name + SCALE][:, None]
    return weights
