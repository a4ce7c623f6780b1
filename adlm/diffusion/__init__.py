"""The mathematics of masked diffusion: schedules, forward process, losses and samplers as functions of tensors."""

from adlm.diffusion.anchors import AnchorRule, rare_in_sequence
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.features import FeatureModel, Features
from adlm.diffusion.masking import ForwardProcess, NoisyBatch, corrupt, shift_tokens
from adlm.diffusion.objectives import (
    Loss,
    MaskedDiffusion,
    NextToken,
    Objective,
    ScoreEntropy,
    diffusion_loss,
    training_loss,
)

from adlm.diffusion.plans import (  # isort: skip
    Plan, Transition, ancestral, ddpm, dfm, forward_backward, remask_cap, remask_conf, remask_loop, remask_rescale,
)  # fmt: skip
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.sampling import Column, Frame, Move, Row, RunningBatch, Sampler, View, sample
from adlm.diffusion.schedules import (
    Cosine,
    CosineSquared,
    Geometric,
    Linear,
    LogLinear,
    NoiseSchedule,
)

__all__ = [
    "AnchorRule", "Column", "Cosine", "CosineSquared", "CounterRng", "FeatureModel", "Features", "ForwardProcess",
    "Frame", "Geometric", "Linear", "LogLinear", "Loss", "MaskedDiffusion", "Move", "NextToken", "NoiseSchedule",
    "NoisyBatch", "Objective", "Plan", "Row", "RunningBatch", "Sampler", "SamplingParams", "ScoreEntropy", "Transition",
    "View",
    "ancestral", "corrupt", "ddpm", "dfm", "diffusion_loss", "forward_backward", "rare_in_sequence", "remask_cap",
    "remask_conf", "remask_loop", "remask_rescale", "sample", "shift_tokens", "training_loss",
]  # fmt: skip
