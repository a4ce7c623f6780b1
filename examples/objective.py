"""An objective of one's own: in training every hidden token weighs the same, as in MaskGIT."""

from dataclasses import replace

from adlm.diffusion import MaskedDiffusion, NoisyBatch
from adlm.diffusion.objectives import TrainingRows


class Flat(MaskedDiffusion):
    """The cross-entropy of hidden tokens; text is scored by the NELBO, as before (`row_nats`)."""

    def corrupt(self, batch: TrainingRows, seed: int, step: int) -> NoisyBatch:
        noisy = super().corrupt(batch, seed, step)
        is_hidden = noisy.hidden.weight > 0  # 0: what rounds their number up
        return replace(noisy, hidden=replace(noisy.hidden, weight=is_hidden.float()))
