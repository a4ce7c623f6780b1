"""Optimizers (AdamW, or Muon for the layers' matrices) and the learning rate schedule."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from adlm.diffusion.features import FeatureModel
from adlm.models.transformer import Layer
from adlm.settings import Settings
from adlm.training.ema import EMA


class OptimizerSettings(Settings):
    """The optimizer and the learning rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """The optimizer; Muon is for the layers' matrices, with AdamW for the rest."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate of AdamW."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    """Decays of AdamW's two moving averages."""
    eps: NonNegativeFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Weight decay; with muon, of its matrices alone."""
    muon_lr: PositiveFloat = 0.02
    """Muon: peak learning rate of the layers' matrices."""
    muon_momentum: float = 0.95
    """Muon: momentum."""
    split_qkv: bool = False
    """Muon: take queries, keys and values as three matrices."""
    muon_beta2: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Muon: divide rows by the root of their mean square, averaged with this decay."""
    clip: PositiveFloat = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    warmup: NonNegativeInt = 2500
    """Steps of linear warm-up."""
    decay: Literal["constant", "cosine", "wsd"] = "constant"
    """How the rate falls: not, along a cosine, or to 0 at the end (warm-up, stable, decay)."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """wsd: last part of the steps, in which the rate falls to 0."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """cosine: where the rate ends, as a share of its peak."""


PAPER = OptimizerSettings()


def get_lr_multiplier(step: int, steps: int, settings: OptimizerSettings = PAPER) -> float:
    """Return the learning rate at a step (from 1), as a multiple of its peak.

    It rises linearly for `warmup` steps and then is constant (the paper), falls along a cosine to `floor`, or is
    constant and falls linearly to 0 in the last `decay_share` of the steps (wsd: warm-up, stable, decay).
    """
    warm = min(1.0, step / max(settings.warmup, 1))
    if settings.decay == "wsd":
        decay_steps = max(1, round(settings.decay_share * steps))
        return min(warm, max(0, steps - step + 1) / decay_steps)
    if settings.decay == "constant" or step < settings.warmup:
        return warm
    progress = min((step - settings.warmup) / max(steps - settings.warmup, 1), 1.0)
    return settings.floor + (1 - settings.floor) * 0.5 * (1 + math.cos(math.pi * progress))


class BatchedMuon(Muon):
    """torch's Muon with one batch of products for all matrices of a shape: the same update up to rounding.

    Groups may have `split_qkv` (a matrix of three squares is three matrices) and `beta2` (rows are divided by the root
    of their mean square, a moving average, at the same norm of the matrix).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p] = new_muon_state(p, group.get("beta2"))
                by_shape.setdefault(p.shape, []).append(p)
            for params in by_shape.values():
                self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update the matrices of one shape."""
        lr = group["lr"]
        rows, columns = params[0].shape
        if group.get("split_qkv") and rows == 3 * columns:
            rows = columns
        states = [self.state[p] for p in params]

        updates = self._average_gradients(params, states, group)
        matrices = orthogonalize(
            updates.view(-1, rows, columns),
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
        )
        updates = matrices.reshape(updates.shape).float()
        if group.get("beta2") is not None:
            updates = self._normalize_rows(updates, states, group)

        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        scale = lr * math.sqrt(max(1, rows / columns))
        torch._foreach_add_(params, list(updates.to(params[0].dtype)), alpha=-scale)

    @staticmethod
    def _average_gradients(
        params: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]
    ) -> Tensor:
        """Add the gradients to their moving averages (momentum), and return these as one batch."""
        grads = [cast(Tensor, p.grad) for p in params]
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        if not group["nesterov"]:
            return torch.stack(buffers)
        return torch.stack(torch._foreach_lerp(grads, buffers, group["momentum"]))

    @staticmethod
    def _normalize_rows(
        updates: Tensor, states: list[dict[str, Tensor]], group: dict[str, Any]
    ) -> Tensor:
        """Divide the rows by the roots of their mean squares, at the same norm of each matrix."""
        squares = [state["row_square"] for state in states]
        means = list(updates.square().mean(-1, keepdim=True))
        torch._foreach_lerp_(squares, means, 1 - group["beta2"])
        norm = updates.norm(dim=(1, 2), keepdim=True)
        updates = updates / (torch.stack(squares).sqrt() + group["eps"])
        updates *= norm / updates.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
        return updates


def new_muon_state(p: Tensor, beta2: float | None) -> dict[str, Tensor]:
    """Return the state of a matrix before its first step."""
    state = {"momentum_buffer": torch.zeros_like(p)}
    if beta2 is not None:
        state["row_square"] = torch.zeros_like(p[:, :1])
    return state


def orthogonalize(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Bring the singular values of a batch of matrices (n, rows, columns) near 1 by Newton–Schulz steps in bfloat16."""
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16().mT if is_tall else matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def build_optimizers(model: nn.Module, settings: OptimizerSettings = PAPER) -> list[Optimizer]:
    """Build AdamW for all parameters, or Muon for the layers' matrices (not the modulations), which alone decay then,
    and AdamW for the rest."""
    layers = (
        [module for module in model.modules() if isinstance(module, Layer)]
        if settings.name == "muon"
        else []
    )
    linears = (
        linear for layer in layers for linear in (layer.qkv, layer.out, layer.up, layer.down)
    )
    matrices = dict.fromkeys(
        linear.weight for linear in linears
    )  # in order, and looked up by identity
    rest = [p for p in model.parameters() if p not in matrices and p.requires_grad]
    decay = settings.weight_decay
    rest_decay = 0.0 if matrices else decay
    optimizers: list[Optimizer] = [
        AdamW(
            rest,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=rest_decay,
            fused=True,
        )
    ]
    if matrices:
        if any(isinstance(p, DTensor) for p in matrices):
            raise ValueError(
                "optimizer.name=muon needs whole matrices, and fsdp shards them: use parallel.kind=ddp or adamw"
            )
        muon = BatchedMuon(
            list(matrices), lr=settings.muon_lr, momentum=settings.muon_momentum, weight_decay=decay
        )
        muon.param_groups[0] |= {"split_qkv": settings.split_qkv, "beta2": settings.muon_beta2}
        optimizers.append(muon)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def set_lr(optimizers: Sequence[Optimizer], multiplier: float) -> None:
    """Set the learning rate of every group to a multiple of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * multiplier


def step_optimizers(
    model: FeatureModel,
    optimizers: Sequence[Optimizer],
    clip: float,
    ema: EMA | None,
    module: nn.Module | None = None,
) -> Tensor:
    """Clip the gradients of `module` (by default the model), update weights and the model's average, clear the
    gradients; return the norm before clipping, without waiting for the device."""
    norm = torch.nn.utils.clip_grad_norm_((module or model).parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if ema is not None:
        ema.update(model)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def get_training_tensors(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors that training changes, not copies, as `weights.NAME` and `optimizer.NAME.KEY`, by the names of
    the model also within a LossModule."""
    names = {
        parameter: name.removeprefix("model.") for name, parameter in module.named_parameters()
    }
    tensors = {f"weights.{name}": p.detach() for p, name in names.items()}
    stored = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in stored:
            tensors[f"weights.{name.removeprefix('model.')}"] = buffer
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state[p]
                if not state and isinstance(optimizer, Muon):  # before the first step
                    state.update(new_muon_state(p.detach(), group.get("beta2")))
                elif not state:
                    state["step"] = torch.zeros((), device=p.device)
                    state.update(
                        {key: torch.zeros_like(p.detach()) for key in ("exp_avg", "exp_avg_sq")}
                    )
                tensors |= {f"optimizer.{names[p]}.{key}": value for key, value in state.items()}
    return tensors
