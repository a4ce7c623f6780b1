"""The losses: NELBO, ANELBO, next-token cross-entropy and score entropy of features, heads and a batch."""

import math
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from adlm.diffusion.masking import NoisyBatch, Selection
from adlm.diffusion.selected import SelectedLoss, selected_loss


class FeatureModel(Protocol):
    """Any model that maps tokens to features (.anchor or None, .final) and has a linear head for each stage."""

    config: Any  # with is_causal and mask_id
    head: nn.Linear
    anchor_head: nn.Linear | None

    def __call__(self, tokens: Tensor, noise_level: Tensor, *, valid: Any) -> Any: ...


class Loss(NamedTuple):
    """The optimized total = nll + anchor_weight · anchor, apart from the reported nll (the NELBO), in nats per token;
    times that are not uniform reweigh the total."""

    total: Tensor
    nll: Tensor
    anchor: Tensor
    row_nll: Tensor  # (B,), detached: each row's share of nll, summed over its tokens
    row_anchor: Tensor  # (B,), likewise of the anchor term

    def check(self, rows: Tensor | None = None) -> Self:
        """Raise if the loss is not finite, naming the rows (their place in the batch, or their own numbers)."""
        if not bool(torch.isfinite(self.total)):
            bad = (~torch.isfinite(self.row_nll + self.row_anchor)).nonzero()[:, 0].cpu()
            names = (bad if rows is None else rows.cpu()[bad]).tolist()
            raise FloatingPointError(
                f"the loss is {self.total.item()} (nll {self.nll.item()}, anchor {self.anchor.item()}); "
                f"rows {names} are not finite. Look at those rows' tokens, then at the learning rate"
            )
        return self


def training_loss(
    model: FeatureModel,
    batch: NoisyBatch,
    *,
    anchor_weight: float | Tensor | None = None,
    score_entropy: bool = False,
    check: bool = True,
) -> Loss:
    """Compute a model's loss on a batch of `corrupt` (masked models) or `shift_tokens` (causal ones)."""
    mask_id = model.config.mask_id
    if batch.is_causal != model.config.is_causal:
        raise ValueError(
            "a masked model learns from batches of `corrupt`, a causal one from batches of `shift_tokens`"
        )
    if score_entropy and anchor_weight is not None:
        raise ValueError("score entropy has no anchor term: leave anchor_weight out")
    features = model(batch.xt, batch.noise_level, valid=batch.valid)
    if score_entropy:
        assert mask_id is not None
        return score_entropy_loss(features.final, model.head, batch, mask_id=mask_id, check=check)
    anchors = {
        "anchor": features.anchor,
        "anchor_head": model.anchor_head,
        "anchor_weight": anchor_weight,
    }
    return diffusion_loss(
        features.final, model.head, batch, mask_id=mask_id, check=check, **anchors
    )


def diffusion_loss(
    final: Tensor,
    head: nn.Linear,
    batch: NoisyBatch,
    *,
    mask_id: int | None,
    anchor: Tensor | None = None,
    anchor_head: nn.Linear | None = None,
    anchor_weight: float | Tensor | None = None,
    offset: float | None = None,
    check: bool = True,
) -> Loss:
    """Compute the NELBO or, with an `anchor_weight` (gamma), the ANELBO: the mean over tokens of

        w(t) [ 1{hidden} · -log p_denoiser(x) + gamma · 1{anchor} · -log softmax(anchor logits)[x] ],

    w(t) = -alpha'(t) / (1 - alpha(t)). gamma = 0 gives the NELBO. The heads are applied only at those positions; a
    batch of `shift_tokens` gives the losses of AR and A2R. `check` raises if the loss is not finite, which waits for
    the device.
    """
    total, nll, row_nll = _mean_loss(
        final, head, batch, batch.hidden, without=mask_id, offset=offset
    )
    mean_anchor, row_anchor = torch.zeros_like(nll), torch.zeros_like(row_nll)
    if anchor_weight is not None:
        if anchor is None or anchor_head is None or batch.anchors is None:
            raise ValueError(
                "anchor_weight needs a two-stage model (anchor features and head) and a batch made with an anchor_rule"
            )
        total_anchor, mean_anchor, row_anchor = _mean_loss(
            anchor, anchor_head, batch, batch.anchors
        )
        total = (
            total + anchor_weight * total_anchor
        )  # at weight 0 too: every parameter stays in the graph
    loss = Loss(total, nll, mean_anchor, row_nll, row_anchor)
    return loss.check() if check else loss


def score_entropy_loss(
    final: Tensor, head: nn.Linear, batch: NoisyBatch, *, mask_id: int, check: bool = True
) -> Loss:
    """Compute SEDD's absorbing score entropy, for a head whose exp(logit) / (V - 1) is the score · (e^noise_level - 1).

    Its weighted form collapses to w(t) [ exp(lse - c) - z_x + c - 1 ] with c = log(V - 1): the NELBO's
    cross-entropy plus a penalty that holds the logits' mass at V - 1, where the two are equal.
    """
    offset = math.log(head.weight.shape[0] - 1)
    return diffusion_loss(final, head, batch, mask_id=mask_id, offset=offset, check=check)


def token_nll(selected: SelectedLoss, selection: Selection, shape: torch.Size) -> Tensor:
    """Return each token's weighted loss (B, L), zero where nothing was selected."""
    weighted = torch.where(selection.weight > 0, selected.each * selection.weight, 0.0)
    flat = torch.zeros(shape.numel(), device=weighted.device, dtype=weighted.dtype)
    return flat.index_add_(0, selection.index, weighted).view(shape)


def _mean_loss(
    features: Tensor, head: nn.Linear, batch: NoisyBatch, where: Selection, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean over the batch's tokens of a head's loss at a selection, as it is optimized (weights not
    divided by the density of t) and as the NELBO has it, and the latter's sum over each row (detached)."""
    weight = where.weight
    if batch.density is not None:
        weight = weight * batch.density[where.index // batch.x0.shape[1]]
    share = Selection(where.index, weight / batch.tokens)
    loss = selected_loss(features, head, batch.x0, share, **options)
    rows = token_nll(loss, where, batch.x0.shape).sum(-1).detach()
    return loss.total, loss.total if weight is where.weight else rows.sum() / batch.tokens, rows
