"""Networks as a user would write them: two stages, causal, shifted, with any head, tied, with buffers."""

from typing import Any

import torch
from torch import Tensor, nn

from adlm.config import ParallelSettings
from adlm.data.batches import ShuffledBatches, TensorRows
from adlm.diffusion.features import FeatureModel, find_device
from adlm.diffusion.objectives import Objective
from adlm.distributed import DistributedContext
from adlm.models import Features, NetworkConfig
from adlm.training.distributed import LossModule, parallelize
from adlm.training.logging import StepMetrics
from adlm.training.optim import build_optimizers
from adlm.training.train import train_steps


class SmallConfig(NetworkConfig):
    """A network of some width."""

    dim: int = 16


class Mix(nn.Module):
    """One layer: a learned sum over positions, which may be causal, then a map of each position."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        weight = torch.randn(config.length, config.length) / config.length**0.5
        self.weight = nn.Parameter(weight)
        self.is_causal = config.is_causal
        self.map = nn.Sequential(
            nn.Linear(config.dim, 2 * config.dim), nn.GELU(), nn.Linear(2 * config.dim, config.dim)
        )

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        if valid is not None:
            x = x * valid[..., None]
        length = x.shape[1]
        weight = self.weight[:length, :length]
        if self.is_causal:
            weight = weight.tril()
        x = x + weight @ x
        return x + self.map(x)


class OneStage(nn.Module):
    """Nothing but what is required."""

    config_class = SmallConfig

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.mix = Mix(config)
        self.head = nn.Linear(config.dim, config.vocab_size)

    def forward(
        self, tokens: Tensor, noise_level: Tensor | None = None, *, valid: Any = None
    ) -> Features:
        return Features(None, self.mix(self.embed(tokens), valid))


class TwoStages(OneStage):
    """An anchor network, whose features the denoiser reads, with layers."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__(config)
        self.denoiser = Mix(config)
        self.anchor_head = nn.Linear(config.dim, config.vocab_size)

    def layers(self) -> list[nn.Module]:
        return [self.mix, self.denoiser]

    def forward(
        self, tokens: Tensor, noise_level: Tensor | None = None, *, valid: Any = None
    ) -> Features:
        anchor = self.mix(self.embed(tokens), valid)
        return Features(anchor, self.denoiser(anchor, valid))


class Shifted(nn.Module):
    """Another network, whose features stand one position earlier."""

    shift = 1

    def __init__(self, inner: OneStage) -> None:
        super().__init__()
        self.inner, self.config, self.head = inner, inner.config, inner.head

    def forward(
        self, tokens: Tensor, noise_level: Tensor | None = None, *, valid: Any = None
    ) -> Features:
        final = self.inner(tokens, noise_level, valid=valid).final
        return Features(None, torch.cat([final[:, 1:], final[:, -1:]], 1))


class Odd(OneStage):
    """A head of several layers, whose last weight is the embedding, and buffers: one of them an integer."""

    steps: Tensor
    scale: Tensor

    def __init__(self, config: SmallConfig) -> None:
        super().__init__(config)
        last = nn.Linear(config.dim, config.vocab_size, bias=False)
        last.weight = self.embed.weight
        self.head = nn.Sequential(nn.Linear(config.dim, config.dim), nn.Tanh(), last)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.ones(config.dim))
        self.norm = nn.Module()
        self.norm.scale = nn.Parameter(torch.ones(config.dim))  # also the name of an int8 scale

    def forward(
        self, tokens: Tensor, noise_level: Tensor | None = None, *, valid: Any = None
    ) -> Features:
        if self.training:
            self.steps += 1
            self.scale.mul_(1.01)
        x = self.embed(tokens) * self.scale * self.norm.scale
        return Features(None, self.mix(x, valid))


def take_steps(
    model: FeatureModel, objective: Objective, rows: Tensor, **options: Any
) -> list[StepMetrics]:
    """Train a network for two steps of 8 rows, on its device."""
    context = DistributedContext(find_device(model))
    learner = LossModule(model, objective)
    parallel = parallelize(learner, context, ParallelSettings())
    batches = iter(ShuffledBatches(TensorRows(rows), 8))
    optimizers = build_optimizers(learner)
    training = train_steps(
        parallel, objective, batches, optimizers, steps=2, context=context, **options
    )
    return list(training)
