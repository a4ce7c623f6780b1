"""The training objective of a model: how a batch is corrupted, and how much anchors weigh."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from adlm.data.batches import Batch
from adlm.diffusion.anchors import anchor_weight
from adlm.diffusion.masking import ForwardProcess, NoisyBatch, corrupt, shift_tokens
from adlm.diffusion.rng import CounterRng
from adlm.models.transformer import unpad


class TrainingObjective(Protocol):
    """How the batches of a run become the network's inputs and targets."""

    def corrupt(self, batch: Any, seed: int, step: int) -> NoisyBatch: ...
    def anchor_weight(self, step: int, steps: int) -> float | None: ...


@dataclass(frozen=True)
class Objective:
    """Hidden tokens or, for a causal model, the next one; with two stages, anchors too. Defaults as in the paper."""

    process: ForwardProcess
    is_causal: bool
    peak_anchor_weight: float = 3e-3
    anchor_ramp: bool = True
    is_unpadded: bool = False  # the model's layers leave padding out

    def corrupt(self, batch: Batch, seed: int, step: int) -> NoisyBatch:
        """Corrupt the batch of a step."""
        process, valid = self.process, batch.valid()
        if self.is_causal:
            noisy = shift_tokens(
                batch.tokens,
                anchor_rule=process.anchor_rule,
                valid=valid,
                multiple=process.multiple,
            )
            inputs = None if valid is None else valid[:, 1:]  # of the tokens that have a next one
        else:
            rng = CounterRng.from_seed(seed, batch.number)
            noisy = corrupt(
                batch.tokens, process, rng, step, index=batch.place, total=batch.total, valid=valid
            )
            inputs = noisy.valid
        return (
            replace(noisy, valid=unpad(inputs))
            if self.is_unpadded and inputs is not None
            else noisy
        )

    def anchor_weight(self, step: int, steps: int) -> float | None:
        """Gamma at a step; None where there are no anchors."""
        if self.process.anchor_rule is None:
            return None
        return (
            anchor_weight(step, steps, self.peak_anchor_weight)
            if self.anchor_ramp
            else self.peak_anchor_weight
        )
