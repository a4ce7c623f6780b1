"""An objective of your own: every hidden token weighs the same in training, as in MaskGIT.

adlm train cpu-nano objective.name=own_objective:FlatObjective data.path=DATA folder=RUN
adlm eval ppl RUN --objective own_objective:FlatObjective --data held-out.txt
"""

from dataclasses import replace

from adlm.diffusion import MaskedDiffusion, NoisyBatch


class FlatObjective(MaskedDiffusion):
    """The cross-entropy of hidden tokens; text is scored by the NELBO, as before (`row_nats`)."""

    def corrupt(self, batch, seed: int, step: int) -> NoisyBatch:
        noisy = super().corrupt(batch, seed, step)
        is_hidden = noisy.hidden.weight > 0
        return replace(noisy, hidden=replace(noisy.hidden, weight=is_hidden.float()))
