"""The loss of a linear head at selected positions, with the logits of one chunk in memory at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from adlm.diffusion.masking import Selection

Head = Callable[[Tensor], Tensor]  # features (N, dim) -> logits (N, V)

MAX_LOGIT_ROWS = {"cuda": 24576, "cpu": 256, "mps": 256}  # rows of logits that exist at a time
ALIGN = 64  # rows of a GPU's half-precision product start on a boundary, or it runs at half speed


class SelectedLoss(NamedTuple):
    """The differentiable sum Σ weight · loss, and each position's unweighted loss (not differentiable)."""

    total: Tensor  # ()
    each: Tensor  # (N,)


def compute_loss_and_grad(
    logits: Tensor, target: Tensor, weight: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each row's loss and weight · d loss / d logits, which overwrites the logits.

    Cross-entropy: lse - z_target. With an `offset` c the score entropy: exp(lse - c) - z_target + c - 1, which is
    the cross-entropy where lse = c and above it elsewhere.
    """
    if logits.is_cuda:
        from adlm.diffusion import kernels

        return kernels.compute_loss_and_grad(logits, target, weight, offset)
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
    logits[torch.arange(len(target)), target] -= weight
    return loss, logits


def _compute_logits(x: Tensor, matrix: Tensor, shift: Tensor, buffer: Tensor) -> Tensor:
    """Compute x W' + b (n, V) in the buffer; on a CPU transposed, which is faster by half and includes the bias."""
    rows, vocab = x.shape[0], matrix.shape[0]
    if x.is_cuda:
        return torch.addmm(shift, x, matrix.t(), out=buffer[: rows * vocab].view(rows, vocab))
    return torch.addmm(
        shift[:, None], matrix, x.t(), out=buffer[: rows * vocab].view(vocab, rows)
    ).t()


def _add_product(so_far: Tensor | None, left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """Return so_far + left @ right; half-precision products are summed in float32."""
    if so_far is None:
        return left @ right
    if so_far.dtype == right.dtype == wide:
        return so_far.addmm_(left, right)
    return so_far.to(wide).add_(left @ right)


class _SelectedLossFunction(torch.autograd.Function):
    """Computes gradients in the forward, chunk by chunk, because the logits exist only then."""

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
        vocab = weight_matrix.shape[0]
        pad = -vocab % ALIGN if x.is_cuda else 0
        matrix = (
            F.pad(weight_matrix.to(x.dtype), (0, 0, 0, pad)) if pad else weight_matrix.to(x.dtype)
        )
        shift = F.pad(bias.to(x.dtype), (0, pad), value=-torch.inf) if pad else bias.to(x.dtype)
        wide = (
            torch.float64 if x.dtype == torch.float64 else torch.float32
        )  # of losses and of sums over chunks
        wants_x, wants_matrix, wants_bias = ctx.needs_input_grad[:3]
        grad_x = torch.empty_like(x) if wants_x else None
        grad_matrix = grad_bias = None
        each = x.new_empty(x.shape[0], dtype=wide)
        buffer = x.new_empty(min(chunk, x.shape[0]) * matrix.shape[0])  # one for all chunks
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _compute_logits(x[part], matrix, shift, buffer)
            if (
                not x.is_cuda
            ):  # half precision is for GPUs, whose kernel computes in float32 and stores in half
                logits = logits.to(wide)
            each[part], grad_logits = compute_loss_and_grad(
                logits, target[part], weight[part], offset
            )
            grad_logits = grad_logits.to(x.dtype)
            if grad_x is not None:
                torch.mm(grad_logits, matrix, out=grad_x[part])
            if wants_matrix:
                grad_matrix = _add_product(grad_matrix, grad_logits.t(), x[part], wide)
            if wants_bias:
                column = grad_logits.sum(0, dtype=wide)
                grad_bias = column if grad_bias is None else grad_bias.add_(column)
        if x.shape[0] == 0:  # nothing was selected: zeros, so that every parameter has its gradient
            grad_matrix = torch.zeros_like(matrix) if wants_matrix else None
            grad_bias = torch.zeros_like(shift) if wants_bias else None
        ctx.save_for_backward(
            grad_x, *(None if grad is None else grad[:vocab] for grad in (grad_matrix, grad_bias))
        )
        ctx.dtypes = (x.dtype, weight_matrix.dtype, bias.dtype)
        ctx.mark_non_differentiable(each)
        used = torch.where(
            weight > 0, each, 0
        )  # padding's own loss may be anything, infinity included
        return (used * weight).sum(), each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        # A mean that is itself the loss comes with 1, and a CPU may look: its gradients are done.
        is_done = not outer[0].is_cuda and outer[0].item() == 1
        grads = (
            None if grad is None else grad.to(dtype) if is_done else grad.to(dtype) * outer[0]
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*grads, None, None, None, None)


def _loss_of_any_head(
    x: Tensor, head: Head, target: Tensor, weight: Tensor, without: int | None, offset: float | None
) -> SelectedLoss:
    """Compute the loss of a head that is any function of features (N, dim); the backward computes logits again."""

    def compute_loss(x: Tensor, target: Tensor) -> Tensor:
        logits = head(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if without is not None:
            is_ruled_out = torch.arange(logits.shape[-1], device=logits.device) == without
            logits = logits.masked_fill(is_ruled_out, -torch.inf)
        lse = logits.logsumexp(-1)
        picked = logits.gather(1, target[:, None])[:, 0]
        if offset is None:
            return lse - picked
        return (lse - offset).exp() - picked + offset - 1

    size = MAX_LOGIT_ROWS[x.device.type]
    chunks = zip(x.split(size), target.split(size), strict=True)
    parts = [checkpoint(compute_loss, *chunk, use_reentrant=False) for chunk in chunks]
    each = torch.cat(parts)
    used = torch.where(weight > 0, each, 0.0)
    return SelectedLoss((used * weight).sum(), each.detach())


def selected_loss(
    features: Tensor,
    head: Head,
    targets: Tensor,
    selection: Selection,
    *,
    without: int | None = None,  # a token of probability zero (the mask, for a denoiser: SUBS)
    offset: float | None = None,
) -> SelectedLoss:
    """Compute Σ weight · loss of `head` at the selection, for features (B, L, dim) and targets (B, L)."""
    x = features.reshape(-1, features.shape[-1])[selection.index]
    target = targets.reshape(-1)[selection.index]
    # Of a plain linear map the loss and its gradients are computed in one pass.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return _loss_of_any_head(x, head, target, selection.weight, without, offset)
    # A parameter requires its gradient under no_grad too, a product as large as the logits'.
    matrix, bias = (
        each if each is None or torch.is_grad_enabled() else each.detach()
        for each in (head.weight, head.bias)
    )
    if bias is None:
        bias = torch.zeros_like(matrix[:, 0])
    if without is not None:
        # Not index_fill with a tensor of `without`, which a GPU would be waited for.
        bias = torch.where(torch.arange(len(bias), device=bias.device) == without, -torch.inf, bias)
    shift = None if offset is None else torch.full((), offset, device=x.device)
    chunk = MAX_LOGIT_ROWS[x.device.type]
    with torch.autocast(x.device.type, enabled=False):
        return SelectedLoss(
            *_SelectedLossFunction.apply(x, matrix, bias, target, selection.weight, shift, chunk)
        )
