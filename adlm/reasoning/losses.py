"""The forward pass with fed-back hidden states, and the loss of every arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion.objectives import Loss, diffusion_loss
from adlm.models.language_model import Features, LanguageModel
from adlm.reasoning.arms import ReasoningBatch


def run_with_feedback(
    model: LanguageModel, tokens: Tensor, slot: Tensor | None = None, slot_ends: Sequence[int] = ()
) -> Features:
    """Run a causal model whose slots have the hidden state of the position before them as input (Coconut).

    `slot` (B, L) numbers the slots of a row from 1; those of a number lie within its `slot_ends` + 1 positions. The
    hidden states are those after the final norm. A slot needs the slots before it: one pass for each, and one more.
    """
    if slot is None:
        return model(tokens)
    inputs = model.embed(tokens)
    for number, end in enumerate(slot_ends, 1):
        before = model(inputs[:, :end]).final.to(inputs.dtype)
        shifted = F.pad(before, (0, 0, 1, inputs.shape[1] - end - 1))
        inputs = torch.where((slot == number)[..., None], shifted, inputs)
    return model(inputs)


def reasoning_loss(
    model: LanguageModel,
    batch: ReasoningBatch,
    *,
    anchor_weight: float | Tensor | None = None,
    check: bool = True,
    compute_features: Callable[..., Features] = run_with_feedback,
) -> Loss:
    """Compute the mean cross-entropy over tokens and labelled slots; with an `anchor_weight`, A2R's anchor term too."""
    features = compute_features(model, batch.xt, batch.slot, batch.slot_ends)
    anchors: dict[str, Any] = {}
    if anchor_weight is not None:
        anchors = {"anchor": features.anchor, "anchor_head": model.anchor_head, "anchor_weight": anchor_weight}
    return diffusion_loss(features.final, model.head, batch, mask_id=model.config.mask_id, check=check, **anchors)
