"""Give an exported model its modulations back, to train it further: `python bundled/unfold.py MODEL FOLDER`.

After a long training some gains, hidden units and gates may be near zero, where gradients are near zero too. Here such
a channel of a layer's second norm gets a gain of 1 and weights near zero, such a unit new input weights and output
weights of zero, and all gates of a projection one value. The model computes the same up to rounding, so
`adlm train … init=FOLDER` starts where MODEL ended.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from adlm.models.folder import export_model, load_model
from adlm.models.language_model import LanguageModel
from adlm.models.transformer import Layer, Stack

DEAD_GAIN = 0.05  # a channel whose gain is smaller is dead
DEAD_ROW = (
    0.04  # so is a hidden unit whose input weights are smaller than this part of initial ones
)


@torch.no_grad()
def unfold(folded: LanguageModel, cond_dim: int, seed: int = 0) -> LanguageModel:
    """Return a model with modulations that computes what a folded one does."""
    if folded.config.cond_dim is not None:
        raise ValueError(
            f"cond_dim is {folded.config.cond_dim}: expected a folded model, as bundled/ship.py writes"
        )
    rng = torch.Generator().manual_seed(seed)
    model = LanguageModel(folded.config.replace(cond_dim=cond_dim, norm_bias=False), seed=seed)
    known = folded.state_dict()
    is_new = {name: ".modulation." in name or ".condition." in name for name in model.state_dict()}
    model.load_state_dict(
        {name: value if is_new[name] else known[name] for name, value in model.state_dict().items()}
    )
    for name, module in model.named_modules():
        if isinstance(module, Stack):
            set_modulations(module, known[f"{name}.norm.bias"], torch.zeros(folded.config.dim))
        elif isinstance(module, Layer):
            shift2 = revive_channels(module, known[f"{name}.norm2.bias"])
            revive_units(module, rng)
            gates = [move_scale_to_gate(linear) for linear in (module.out, module.down)]
            zero = torch.zeros_like(shift2)
            set_modulations(
                module, known[f"{name}.norm1.bias"], zero, gates[0], shift2, zero, gates[1]
            )
    return model


def set_modulations(module: Stack | Layer, *vectors: torch.Tensor) -> None:
    """Make a modulation constant."""
    assert module.modulation is not None
    module.modulation.weight.zero_()
    module.modulation.bias.copy_(torch.cat(vectors))


def revive_channels(layer: Layer, shift: torch.Tensor) -> torch.Tensor:
    """Move dead gains and their shifts into the matrix after the norm; return the shifts that are left."""
    norm, up = layer.norm2, layer.up
    dead = norm.weight.abs() < DEAD_GAIN
    up.bias.add_(up.weight[:, dead] @ shift[dead])
    up.weight[:, dead] *= norm.weight[dead]
    norm.weight[dead] = 1.0
    return shift.masked_fill(dead, 0.0)


def revive_units(layer: Layer, rng: torch.Generator) -> None:
    """Give dead hidden units, which are constant, new input weights; their constant becomes a part of the bias."""
    up, down = layer.up, layer.down
    bound = 1 / math.sqrt(up.weight.shape[1])
    dead = up.weight.square().mean(1).sqrt() < DEAD_ROW * bound / math.sqrt(3)
    down.bias.add_(down.weight[:, dead] @ F.gelu(up.bias[dead], approximate="tanh"))
    down.weight[:, dead] = 0.0
    up.weight[dead] = torch.empty_like(up.weight[dead]).uniform_(-bound, bound, generator=rng)
    up.bias[dead] = 0.0


def move_scale_to_gate(linear: torch.nn.Linear) -> torch.Tensor:
    """Divide a projection by one factor, to the root mean square of initial weights; return that factor as gates."""
    factor = linear.weight.square().mean().sqrt() * math.sqrt(3 * linear.weight.shape[1])
    for parameter in linear.parameters():
        parameter.div_(factor)
    return factor.expand(linear.weight.shape[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path, help="exported model folder")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument(
        "--cond-dim",
        type=int,
        default=128,
        help="width of the noise embedding [default: %(default)s]",
    )
    options = parser.parse_args()
    loaded = load_model(options.model)
    model = unfold(loaded.model, options.cond_dim)
    export_model(replace(loaded, model=model), options.folder, is_quantized=False)


if __name__ == "__main__":
    main()
