"""How the weights move: AdamW, or Muon on the layers' matrices; the rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from adlm.config import OptimizerSettings as Settings
from adlm.models.transformer import Layer
from adlm.training.distributed import norm_of
from adlm.training.ema import EMA

DECAYS = ("constant", "cosine", "wsd")
PAPER = Settings()


def learning_rate(
    step: int,
    steps: int,
    *,
    peak: float,
    warmup: int,
    decay: str = "constant",
    decay_share: float = 0.2,
    floor: float = 0.1,
) -> float:
    """Linear up to `peak` at step `warmup`, then constant (the paper), down a cosine to `floor` · peak, or constant and
    in the last `decay_share` of the steps straight down to 0 (wsd: warm-up, stable, decay). Steps from 1."""
    if decay not in DECAYS:
        raise ValueError(f"decay {decay!r} is not one of {', '.join(DECAYS)}")
    if step < warmup:
        return peak * step / warmup
    if decay == "constant":
        return peak
    if decay == "wsd":
        falling = max(1, round(decay_share * steps))
        return peak * min(1.0, max(0, steps - step + 1) / falling)
    progress = (step - warmup) / max(steps - warmup, 1)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def rate_at(how: Settings, steps: int, step: int) -> float:
    """The share of the peak learning rates at a step of a run."""
    return learning_rate(
        step,
        steps,
        peak=1.0,
        warmup=how.warmup,
        decay=how.decay,
        decay_share=how.decay_share,
        floor=how.floor,
    )


def layer_matrices(model: nn.Module) -> dict[str, Tensor]:
    """What Muon is for: the matrices inside layers. Not embeddings, heads, bridge or modulations."""
    return {
        f"{place}.{name}.weight": linear.weight
        for place, layer in model.named_modules()
        if isinstance(layer, Layer)
        for name in ("qkv", "out", "up", "down")
        if isinstance(linear := getattr(layer, name), nn.Linear)
    }


def build_optimizers(model: nn.Module, how: Settings = PAPER) -> list[Optimizer]:
    """AdamW for everything, or for everything but the layers' matrices, which Muon moves."""
    matrices = layer_matrices(model) if how.name == "muon" else {}
    rest = [p for key, p in model.named_parameters() if key not in matrices and p.requires_grad]
    optimizers: list[Optimizer] = [
        AdamW(rest, lr=how.lr, betas=how.betas, eps=how.eps, weight_decay=how.weight_decay, fused=True)
    ]
    if matrices:
        if any(hasattr(p, "placements") for p in matrices.values()):
            raise ValueError(
                "optimizer.name=muon needs whole matrices, and fsdp shards them: use parallel.kind=ddp, or adamw"
            )
        whole = list(matrices.values())
        optimizers.append(Muon(whole, lr=how.muon_lr, momentum=how.muon_momentum, weight_decay=how.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def set_rate(optimizers: Sequence[Optimizer], share: float) -> None:
    """A share of each group's own peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share


def update(model: nn.Module, optimizers: Sequence[Optimizer], clip: float, ema: EMA | None) -> Tensor:
    """After the backward: clip, step, forget the gradients, average; the norm before clipping. Nothing here waits."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if ema is not None:
        ema.update(model)
    return norm_of(norm)


def optimizer_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state by parameter name, `NAME.KEY`; what has no state yet gets its start."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state[p]
                if not state:
                    state.update(fresh_state(optimizer, p))
                found |= {f"{names[p]}.{key}": value for key, value in state.items()}
    return found


def fresh_state(optimizer: Optimizer, p: Tensor) -> dict[str, Tensor]:
    """What the optimizer would begin with for a parameter."""
    data = p.detach()
    if isinstance(optimizer, Muon):
        return {"momentum_buffer": torch.zeros_like(data)}
    return {
        "step": torch.zeros((), device=data.device),
        "exp_avg": torch.zeros_like(data),
        "exp_avg_sq": torch.zeros_like(data),
    }
