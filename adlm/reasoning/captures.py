"""CUDA graphs of the training pass: for small models most of a step is the launching of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from adlm.diffusion.masking import NoisyBatch
from adlm.models.language_model import Features, LanguageModel
from adlm.reasoning.arms import ReasoningBatch
from adlm.reasoning.losses import compute_features

LENGTHS = 16  # rows are padded to a multiple


class _Pass(nn.Module):
    """The features of a batch whose fields with these names are given, as a module of the model's parameters."""

    def __init__(self, model: LanguageModel, batch: NoisyBatch, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.batch, self.names = model, batch, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        fields: dict[str, Any] = dict(zip(self.names, tensors, strict=True))
        features = compute_features(self.model, replace(self.batch, **fields))
        return tuple(stage for stage in features if stage is not None)


class CapturedFeatures:
    """`compute_features` of training batches by CUDA graphs, one for each shape and number of slots.

    For one process and a model without dropout, of which a graph would repeat one draw, and without a noise level. A
    graph writes to the same memory each time, so that the next call with a shape overwrites the features of the last:
    they are valid until then, which is after the backward pass.
    """

    def __init__(self) -> None:
        self.passes: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, model: LanguageModel, batch: NoisyBatch) -> Features:
        """Return the features of a batch; without gradients, not by a graph."""
        if not torch.is_grad_enabled():
            return compute_features(model, batch)
        names, ends = ["xt", *(["valid"] if batch.valid is not None else [])], tuple[int, ...]()
        if isinstance(batch, ReasoningBatch) and batch.slot is not None:
            # The slots' passes are as long as a multiple of LENGTHS: one graph for many batches.
            prefix = min(-(-(max(batch.slot_ends, default=0) + 1) // LENGTHS) * LENGTHS, batch.xt.shape[1])
            names, ends = [*names, "slot"], (prefix - 1,) * len(batch.slot_ends)
            batch = replace(batch, slot_ends=ends)
        key, tensors = (*batch.xt.shape, *ends, *names), tuple(getattr(batch, name) for name in names)
        if key not in self.passes:
            device = batch.xt.device.type
            # The cast weights that autocast keeps would be those of the capture.
            with torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), False):
                samples = tuple(tensor.clone() for tensor in tensors)
                network = _Pass(model, batch, names)
                self.passes[key] = torch.cuda.make_graphed_callables(network, samples, allow_unused_input=True)
        stages = self.passes[key](*tensors)
        return Features(stages[0] if len(stages) > 1 else None, stages[-1])
