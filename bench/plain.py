"""The baseline of the benchmarks: the paper's formulas with every logit of every position.

Same layers, weights, dtype, threads and compile setting; both heads at all positions; Linear(V -> dim) on the logits;
log_softmax and gather; full sort for the nucleus; a float64 draw over (B, L, V).
"""

from __future__ import annotations

import torch
from torch import Tensor

from adlm.diffusion.masking import NoisyBatch
from adlm.diffusion.plans import Transition
from adlm.models.language_model import LanguageModel


def plain_logits(model: LanguageModel, xt: Tensor) -> tuple[Tensor | None, Tensor]:
    """Compute anchor logits and final logits, (B, L, V) each."""
    cos, sin = model.rotary(xt.device)
    rotary = cos[: xt.shape[1]], sin[: xt.shape[1]]
    x, anchor_logits = model.embed(xt), None
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if model.anchor is not None and model.anchor_head is not None and model.bridge is not None:
        features = model.anchor(x, None, rotary)
        anchor_logits = model.anchor_head(features)
        x = model.bridge(features if model.config.bridge == "direct" else anchor_logits)
    return anchor_logits, model.head(model.denoiser(x, None, rotary))


def subs(logits: Tensor, xt: Tensor, mask_id: int) -> Tensor:
    """Compute log-probabilities (SUBS): no mask, and visible tokens with probability 1."""
    logits = logits.float().index_fill(-1, torch.tensor(mask_id, device=xt.device), -torch.inf)
    itself = torch.full_like(logits, -torch.inf).scatter_(-1, xt[..., None], 0.0)
    return torch.where((xt == mask_id)[..., None], logits.log_softmax(-1), itself)


def plain_loss(
    model: LanguageModel,
    batch: NoisyBatch,
    weight: Tensor,
    is_anchor: Tensor,
    anchor_weight: float | Tensor,
) -> Tensor:
    """Compute the ANELBO, with every logit."""
    mask_id = model.config.mask_id
    assert mask_id is not None
    anchor_logits, logits = plain_logits(model, batch.xt)
    log_probs = subs(logits, batch.xt, mask_id).gather(-1, batch.x0[..., None])[..., 0]
    token = -log_probs * weight[:, None]
    if anchor_logits is not None:
        anchor = anchor_logits.float().log_softmax(-1).gather(-1, batch.x0[..., None])[..., 0]
        token = token - anchor_weight * is_anchor * anchor * weight[:, None]
    return token.mean()


def plain_law(model: LanguageModel, xt: Tensor, transition: Transition, top_p: float) -> Tensor:
    """Compute the distribution (B, L, V) after one sampling step, with the usual nucleus by a full sort."""
    mask_id = model.config.mask_id
    assert mask_id is not None
    _, logits = plain_logits(model, xt)
    probs = subs(logits, xt, mask_id).exp()
    ordered, ids = probs.sort(-1, descending=True)
    ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0)
    probs = torch.zeros_like(probs).scatter_(-1, ids, ordered / ordered.sum(-1, keepdim=True))
    del ordered, ids
    is_hidden = (xt == mask_id)[..., None]
    reveal, remask = float(transition.reveal_prob), float(transition.remask_prob)
    law = probs * torch.where(is_hidden, reveal, 1 - remask)
    mask = torch.where(is_hidden, 1 - reveal, remask)
    law[..., mask_id] = mask[..., 0]
    return law


def plain_step(model: LanguageModel, xt: Tensor, transition: Transition, top_p: float) -> Tensor:
    """Take one sampling step: exponential noise in float64 for every logit."""
    law = plain_law(model, xt, transition, top_p).double()
    return (law / torch.empty_like(law).exponential_()).argmax(-1)
