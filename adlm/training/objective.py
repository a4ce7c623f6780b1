"""What a batch asks of a model: the noise, the positions of the losses, and how much anchors weigh."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from adlm.data.batches import Batch
from adlm.diffusion.anchors import AnchorRule, anchor_weight, rare_in_sequence
from adlm.diffusion.masking import NoisyBatch, corrupt, shift_tokens
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear, NoiseSchedule
from adlm.models.language_model import ModelConfig


@dataclass(frozen=True)
class Objective:
    """Hidden tokens or, for a causal model, the next one; with two stages, anchors too. Defaults as in the paper."""

    is_causal: bool
    mask_id: int | None
    anchor_rule: AnchorRule | None  # None: one stage
    schedule: NoiseSchedule = field(default_factory=LogLinear)
    anchor_scope: str = "all"
    peak_anchor_weight: float = 3e-3
    anchor_ramp: bool = True
    attend_padding: bool = False
    discrete_steps: int | None = None
    multiple: int = 1  # what selections are rounded up to: a GPU's products like round sizes

    @staticmethod
    def of(config: ModelConfig, **changes: object) -> Objective:
        """The paper's task for a model."""
        rule = rare_in_sequence(max_count=5) if config.anchor_layers else None
        return replace(Objective(config.is_causal, config.mask_id, rule), **changes)  # type: ignore[arg-type]

    def corrupt(self, batch: Batch, seed: int, step: int, tokens: Tensor | None = None) -> NoisyBatch:
        """The batch of a step. `tokens` is what the mean is over, if that is not this batch's own number of tokens."""
        valid = batch.valid()
        if self.is_causal:
            made = shift_tokens(batch.tokens, anchor_rule=self.anchor_rule, valid=valid, multiple=self.multiple)
        else:
            assert self.mask_id is not None
            made = corrupt(
                batch.tokens,
                self.schedule,
                CounterRng.of(seed, batch.number),
                step,
                mask_id=self.mask_id,
                index=batch.place,
                total=batch.total,
                steps=self.discrete_steps,
                anchor_rule=self.anchor_rule,
                anchor_scope=self.anchor_scope,
                valid=valid,
                attend_padding=self.attend_padding,
                multiple=self.multiple,
            )
        return made if tokens is None else replace(made, tokens=tokens)

    def counted(self, batch: Batch) -> Tensor:
        """How many tokens of a batch are asked for."""
        rows, length = batch.tokens.shape
        if batch.lengths is None:
            return torch.tensor(float(rows * (length - self.is_causal)))
        return (batch.lengths - int(self.is_causal)).sum().float()

    def anchor_weight(self, step: int, steps: int) -> float | None:
        """Gamma at a step; None where there are no anchors."""
        if self.anchor_rule is None:
            return None
        return anchor_weight(step, steps, self.peak_anchor_weight) if self.anchor_ramp else self.peak_anchor_weight
