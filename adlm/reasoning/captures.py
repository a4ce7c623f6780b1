"""CUDA graphs of the training pass: for small models most of a step is the launching of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adlm.models.language_model import Features, LanguageModel
from adlm.reasoning.losses import run_with_feedback

LENGTHS = 16  # rows are padded to a multiple


class _Pass(nn.Module):
    """The features of a batch, as a module of the model's parameters that takes tensors alone."""

    def __init__(self, model: LanguageModel, slot_ends: Sequence[int] | None, *, has_padding: bool) -> None:
        super().__init__()
        self.model, self.slot_ends, self.has_padding = model, slot_ends, has_padding

    def forward(self, tokens: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        if self.has_padding:
            features = self.model(tokens, valid=other)
        else:
            slot = None if self.slot_ends is None else other
            features = run_with_feedback(self.model, tokens, slot, self.slot_ends or ())
        return tuple(stage for stage in features if stage is not None)


class CapturedFeatures:
    """The features of training batches by CUDA graphs, one for each shape and number of slots.

    For one process and a model without dropout, of which a graph would repeat one draw, and without a noise level.
    """

    def __init__(self) -> None:
        self.passes: dict[tuple[int, ...], Callable[..., Any]] = {}

    def __call__(
        self,
        model: LanguageModel,
        tokens: Tensor,
        slot: Tensor | None = None,
        slot_ends: Sequence[int] = (),
        valid: Tensor | None = None,
    ) -> Features:
        """Return the features of `run_with_feedback`; those of the next call with this shape overwrite them."""
        if not torch.is_grad_enabled():
            return run_with_feedback(model, tokens, slot, slot_ends) if valid is None else model(tokens, valid=valid)
        # The slots' passes are as long as a multiple of LENGTHS: one graph for many batches.
        prefix = min(-(-(max(slot_ends, default=0) + 1) // LENGTHS) * LENGTHS, tokens.shape[1])
        ends = None if slot is None else [prefix - 1] * len(slot_ends)
        key = (*tokens.shape, *(ends or ()), slot is not None, valid is not None)
        inputs = tokens, tokens if slot is valid is None else slot if valid is None else valid
        if key not in self.passes:
            device = tokens.device.type
            # The cast weights that autocast keeps would be those of the capture.
            with torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), False):
                network = _Pass(model, ends, has_padding=valid is not None)
                samples = tuple(each.clone() for each in inputs if each is not None)
                self.passes[key] = torch.cuda.make_graphed_callables(network, samples, allow_unused_input=True)
        stages = self.passes[key](*inputs)
        return Features(stages[0] if len(stages) > 1 else None, stages[-1])


class CapturedModel:
    """A masked model whose training pass is captured, as `training_loss` takes it."""

    def __init__(self, model: LanguageModel, features: Callable[..., Features]) -> None:
        self.model, self.features = model, features
        self.config, self.head, self.anchor_head = model.config, model.head, model.anchor_head

    def __call__(self, tokens: Tensor, noise_level: Tensor, *, valid: Tensor | None) -> Features:
        return self.features(self.model, tokens, valid=valid)
