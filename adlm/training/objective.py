"""The training objective of a model: how a batch is corrupted, and how much anchors weigh."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adlm.data.batches import Batch
from adlm.diffusion.anchors import anchor_weight
from adlm.diffusion.masking import ForwardProcess, NoisyBatch, corrupt, shift_tokens
from adlm.diffusion.rng import CounterRng


@dataclass(frozen=True)
class Objective:
    """Hidden tokens or, for a causal model, the next one; with two stages, anchors too. Defaults as in the paper."""

    process: ForwardProcess
    is_causal: bool
    peak_anchor_weight: float = 3e-3
    anchor_ramp: bool = True

    def corrupt(self, batch: Batch, seed: int, step: int, tokens: Tensor | None = None) -> NoisyBatch:
        """Corrupt the batch of a step. `tokens` is what the mean is over, by default this batch's number of tokens."""
        process, valid = self.process, batch.valid()
        if self.is_causal:
            noisy = shift_tokens(batch.tokens, anchor_rule=process.anchor_rule, valid=valid, multiple=process.multiple)
        else:
            rng = CounterRng.from_seed(seed, batch.number)
            noisy = corrupt(batch.tokens, process, rng, step, index=batch.place, total=batch.total, valid=valid)
        return noisy if tokens is None else replace(noisy, tokens=tokens)

    def count_tokens(self, batch: Batch) -> Tensor:
        """Count the tokens of a batch that the loss is over."""
        rows, length = batch.tokens.shape
        if batch.lengths is None:
            return torch.tensor(float(rows * (length - self.is_causal)))
        return (batch.lengths - int(self.is_causal)).sum().float()

    def anchor_weight(self, step: int, steps: int) -> float | None:
        """Gamma at a step; None where there are no anchors."""
        if self.process.anchor_rule is None:
            return None
        return anchor_weight(step, steps, self.peak_anchor_weight) if self.anchor_ramp else self.peak_anchor_weight
