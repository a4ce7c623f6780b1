"""A linear head and its loss at selected positions, without ever storing the logits of more than one chunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.diffusion.masking import Selection

CHUNK = {"cuda": 4096, "cpu": 256}
ALIGN = 64  # rows of a GPU's half-precision product start on a boundary, or it runs at half speed


class Selected(NamedTuple):
    """Σ weight · loss (differentiable) and each position's own unweighted loss (not)."""

    total: Tensor  # ()
    each: Tensor  # (N,)


def loss_and_slope(logits: Tensor, target: Tensor, weight: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each row's loss and weight · d loss / d logits.

    Cross-entropy: lse - z_target. With an `offset` c the score entropy: exp(lse - c) - z_target + c - 1, which is
    the cross-entropy where lse = c and above it elsewhere.
    """
    z = logits.float()
    lse = z.logsumexp(-1)
    picked = z.gather(1, target[:, None])[:, 0]
    if offset is None:
        loss, mass = lse - picked, weight
    else:
        ratio = (lse - offset).exp()
        loss, mass = ratio - picked + offset - 1, weight * ratio
    is_target = torch.arange(z.shape[1], device=z.device) == target[:, None]
    slope = (z - lse[:, None]).exp() * mass[:, None] - is_target * weight[:, None]
    return loss, slope.to(logits.dtype)


def loss_and_slope_in_place(
    logits: Tensor, target: Tensor, weight: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same where nothing fuses: three passes over one buffer, which it overwrites."""
    highest = logits.amax(-1, keepdim=True)
    picked = logits.gather(1, target[:, None])[:, 0]
    mass = logits.sub_(highest).exp_().sum(-1)
    lse = mass.log() + highest[:, 0]
    if offset is None:
        loss, scale = lse - picked, weight / mass
    else:
        ratio = (lse - offset).exp()
        loss, scale = ratio - picked + offset - 1, weight * ratio / mass
    logits.mul_(scale[:, None])
    logits[torch.arange(len(target), device=target.device), target] -= weight
    return loss, logits


@lru_cache(maxsize=1)
def _fused() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(loss_and_slope, dynamic=False)


class _SelectedLoss(torch.autograd.Function):
    """Gradients are made in the forward, chunk by chunk, because the logits are there only then."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_matrix: Tensor,
        bias: Tensor,
        target: Tensor,
        weight: Tensor,
        offset: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        vocab, dim = weight_matrix.shape
        pad = -vocab % ALIGN if x.is_cuda else 0
        matrix = F.pad(weight_matrix.to(x.dtype), (0, 0, 0, pad)) if pad else weight_matrix.to(x.dtype)
        shift = F.pad(bias.to(x.dtype), (0, pad), value=-torch.inf) if pad else bias.to(x.dtype)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32  # of sums over chunks
        step = _fused() if x.is_cuda else loss_and_slope_in_place if x.dtype == wide else loss_and_slope

        wants_x, wants_matrix, wants_bias = ctx.needs_input_grad[:3]
        grad_x = torch.empty_like(x) if wants_x else None
        grad_matrix = matrix.new_zeros(matrix.shape, dtype=wide) if wants_matrix else None
        grad_bias = shift.new_zeros(shift.shape, dtype=wide) if wants_bias else None
        each = x.new_empty(x.shape[0], dtype=wide)
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = torch.addmm(shift, x[part], matrix.t())
            each[part], slope = step(logits, target[part], weight[part], offset)
            if grad_x is not None:
                torch.mm(slope, matrix, out=grad_x[part])
            if grad_matrix is not None:
                if x.dtype == wide:
                    grad_matrix.addmm_(slope.t(), x[part])
                else:  # half-precision products, summed over the chunks in full
                    grad_matrix += slope.t() @ x[part]
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=wide)
        ctx.save_for_backward(
            grad_x,
            None if grad_matrix is None else grad_matrix[:vocab],
            None if grad_bias is None else grad_bias[:vocab],
        )
        ctx.dtypes = (x.dtype, weight_matrix.dtype, bias.dtype)
        ctx.mark_non_differentiable(each)
        used = torch.where(weight > 0, each, 0)  # padding's own loss may be anything, infinity included
        return (used * weight).sum(), each

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grads = (
            None if grad is None else (grad * outer[0]).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*grads, None, None, None, None)


def selected_loss(
    features: Tensor,
    head: nn.Linear,
    targets: Tensor,
    selection: Selection,
    *,
    without: int | None = None,
    offset: float | None = None,
    chunk: int | None = None,
) -> Selected:
    """Σ weight · loss of `head` at the selection, for features (B, L, dim) and targets (B, L).

    `without` is a token that the head may not name (the mask, for a denoiser).
    """
    x = features.reshape(-1, features.shape[-1])[selection.index]
    bias = head.bias if head.bias is not None else x.new_zeros(head.weight.shape[0], dtype=head.weight.dtype)
    if without is not None:
        bias = bias.index_fill(0, torch.tensor(without, device=bias.device), -torch.inf)
    shift = None if offset is None else torch.tensor(offset, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        total, each = _SelectedLoss.apply(
            x,
            head.weight,
            bias,
            targets.reshape(-1)[selection.index],
            selection.weight,
            shift,
            chunk or CHUNK[x.device.type],
        )
    return Selected(total, each)
