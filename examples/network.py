"""A network of one's own: tokens are embedded, mixed over positions, and mapped to logits."""

import torch
from torch import Tensor, nn

from adlm.models import Features, NetworkConfig


class MixerConfig(NetworkConfig):
    """What config.json keeps of a Mixer; a recipe sets it as `model.options`."""

    dim: int = 64


class Mixer(nn.Module):
    """Adds to every position a learned sum over all positions, then a map of its own."""

    config_class = MixerConfig

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.mix = nn.Parameter(torch.randn(config.length, config.length) / config.length)
        self.map = nn.Sequential(
            nn.Linear(config.dim, 2 * config.dim), nn.GELU(), nn.Linear(2 * config.dim, config.dim)
        )
        self.head = nn.Linear(config.dim, config.vocab_size)

    def forward(
        self, tokens: Tensor, noise_level: Tensor | None = None, *, valid: Tensor | None = None
    ) -> Features:
        x = self.embed(tokens)
        if valid is not None:
            x = x * valid[..., None]  # padding changes nothing
        length = tokens.shape[1]
        x = x + self.mix[:length, :length] @ x
        return Features(anchor=None, final=x + self.map(x))
