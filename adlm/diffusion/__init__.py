"""The mathematics of masked diffusion: schedules, forward process, losses and samplers as functions of tensors."""

from adlm.diffusion.anchors import AnchorRule, rare_in_sequence
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.denoising import Frame, denoise, reverse_step
from adlm.diffusion.features import FeatureModel, Features
from adlm.diffusion.masking import ForwardProcess, NoisyBatch, corrupt, shift_tokens
from adlm.diffusion.objectives import Loss, Objective, diffusion_loss, training_loss
from adlm.diffusion.orders import Order, confidence, entropy_bounded, first_hitting, margin

from adlm.diffusion.plans import (  # isort: skip
    Plan, Transition, ancestral, ddpm, dfm, forward_backward, remask_cap, remask_conf, remask_loop, remask_rescale,
)  # fmt: skip
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import (
    Cosine,
    CosineSquared,
    Geometric,
    Linear,
    LogLinear,
    NoiseSchedule,
)

__all__ = [
    "AnchorRule", "Cosine", "CosineSquared", "CounterRng", "FeatureModel", "Features", "ForwardProcess", "Frame",
    "Geometric", "Linear", "LogLinear", "Loss", "NoiseSchedule", "NoisyBatch", "Objective", "Order", "Plan",
    "SamplingParams", "Transition",
    "ancestral", "confidence", "corrupt", "ddpm", "denoise", "dfm", "diffusion_loss", "entropy_bounded",
    "first_hitting", "forward_backward", "margin", "rare_in_sequence", "remask_cap", "remask_conf", "remask_loop",
    "remask_rescale", "reverse_step", "shift_tokens", "training_loss",
]  # fmt: skip
