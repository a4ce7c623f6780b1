"""Storage of weights as int8 with a scale per row; models compute in float."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ".scale"
INT8_MAX = 127


def quantize(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Store matrices as int8 and `<name>.scale` (a float32 per row), vectors as float32."""
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
    """Return the weights that `quantize` stored, in float32; others stay as they are."""
    weights: dict[str, Tensor] = {}
    for name, weight in stored.items():
        if name.endswith(SCALE):
            continue
        if weight.dtype != torch.int8:
            weights[name] = weight
            continue
        if name + SCALE not in stored:
            raise ValueError(f"{name} is int8 but has no {name + SCALE}: the file is incomplete; export it again")
        weights[name] = weight.float() * stored[name + SCALE][:, None]
    return weights
