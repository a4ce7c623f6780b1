"""Token draws from logits in float64: temperature, top-k and top-p without sorting a vocabulary."""

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from adlm.settings import MinP, SamplingSettings, Temperature, TopK, TopP, derive_settings

CANDIDATE_SIZES = (
    1024,
    8192,
)  # the nucleus is sought among the likeliest 1024 tokens, then 8192, then all


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn: temperature 0 is greedy; nucleus `lineage` keeps one token fewer than the usual top-p."""

    temperature: Temperature = 1.0
    top_k: TopK = None
    top_p: TopP = 1.0
    nucleus: Literal["usual", "lineage"] = "usual"
    min_p: MinP = 0.0  # before the others

    def __post_init__(self) -> None:
        derive_settings(SamplingParams).parse("python", None, **vars(self))

    @classmethod
    def from_settings(cls, settings: SamplingSettings) -> Self:
        """Return the part of settings that a draw takes."""
        names = [field.name for field in fields(cls) if field.name in SamplingSettings.model_fields]
        return cls(**{name: getattr(settings, name) for name in names})


class DrawnTokens(NamedTuple):
    """Tokens (N,) and the probability (N,) that each had when it was drawn."""

    tokens: Tensor
    probs: Tensor


def draw(logits: Tensor, u: Tensor, params: SamplingParams) -> DrawnTokens:
    """Draw a token from each row of logits (N, V) by inverting its distribution function at u (N,) in float64."""
    if logits.device.type == "mps":  # has no float64: tokens are drawn on the host
        drawn = draw(logits.cpu(), u, params)
        return DrawnTokens(drawn.tokens.to(logits.device), drawn.probs)
    u = u.to(logits.device)
    if params.temperature == 0:
        tokens = logits.argmax(-1)
        return DrawnTokens(tokens, torch.ones_like(tokens, dtype=torch.float64))
    logits = drop_unlikely(apply_temperature(logits, params.temperature), params.min_p)
    vocab = logits.shape[-1]
    if params.top_p == 1 and (params.top_k is None or params.top_k >= vocab):
        return _invert(logits.double().softmax(-1), u)
    if logits.is_cuda and params.top_k is None and params.nucleus == "usual":
        from adlm.diffusion.kernels import draw_nucleus

        return DrawnTokens(*draw_nucleus(logits, u, params.top_p))
    sizes = sorted({min(max(size, params.top_k or 0), vocab) for size in (*CANDIDATE_SIZES, vocab)})
    probs, ids, is_whole = find_candidates(logits, params, sizes[0])
    tokens, chance = _pick(probs, ids, u)
    for size in sizes[1:]:
        if bool(is_whole.all()):
            break
        rest = (~is_whole).nonzero()[:, 0]  # rows whose nucleus is wider than the candidates
        probs, ids, is_whole[rest] = find_candidates(logits[rest], params, size)
        tokens[rest], chance[rest] = _pick(probs, ids, u[rest])
    return DrawnTokens(tokens, chance)


def find_candidates(
    logits: Tensor, params: SamplingParams, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the probabilities and ids of the `size` likeliest tokens of each row after top-k and top-p, and whether
    the nucleus ends among them (else a larger size is needed)."""
    values, ids = logits.topk(size, -1)
    if params.top_k is not None and params.top_k < size:
        values, ids = values[:, : params.top_k], ids[:, : params.top_k]
    whole = values if params.top_k is not None else logits
    highest = values[:, :1]  # taken off first, or float32 would lose the tail of large logits
    mass = (whole.float() - highest).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    probs = (values.double() - highest).exp() / mass
    keep = torch.ones_like(values, dtype=torch.bool)
    if params.top_p < 1:
        total = probs.cumsum(-1)
        keep = total - probs < params.top_p if params.nucleus == "usual" else total <= params.top_p
        keep[:, 0] = True
        if (
            params.nucleus == "usual"
        ):  # equally likely tokens share their fate, whatever order a sort puts them in
            keep = values >= torch.where(keep, values, torch.inf).amin(-1, keepdim=True)
    is_whole = ~keep[:, -1] if values.shape[1] < whole.shape[1] else torch.ones_like(keep[:, 0])
    probs = torch.where(keep, probs, 0)
    return probs / probs.sum(-1, keepdim=True), ids, is_whole


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by a temperature, minus their maximum, so that nothing overflows."""
    if temperature == 1:
        return logits
    logits = logits.double() if temperature < 1e-30 else logits.float()
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def drop_unlikely(logits: Tensor, min_p: float) -> Tensor:
    """Rule out the tokens whose probability is less than min_p times that of the likeliest."""
    if min_p == 0:
        return logits
    below_peak = logits.float() - logits.amax(-1, keepdim=True).float()
    return logits.masked_fill(below_peak < math.log(min_p), -torch.inf)


def _invert(probs: Tensor, u: Tensor) -> DrawnTokens:
    total = probs.cumsum(-1)
    # The last sum stands in for 1, so that rounding can never ask for more than there is.
    index = torch.searchsorted(total, (u.double() * total[:, -1])[:, None], right=True)[:, 0]
    index = index.clamp_(max=probs.shape[-1] - 1)
    return DrawnTokens(index, probs.gather(-1, index[:, None])[:, 0])


def _pick(probs: Tensor, ids: Tensor, u: Tensor) -> DrawnTokens:
    """Draw among candidates in the order of the vocabulary: in that of their probabilities, rounding would swap two
    that are about as likely, and a row's text would depend on its batch."""
    width = max(1, int((probs > 0).sum(-1).max()))  # kept candidates come first
    ids, order = ids[:, :width].sort(-1)
    place, chance = _invert(probs.gather(-1, order), u)
    return DrawnTokens(ids.gather(-1, place[:, None])[:, 0], chance)
