"""Ordered unmasking: after each evaluation the best hidden positions are revealed, and stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """Which hidden positions come next: the highest scores first, how many a time by `steps` or an entropy bound."""

    name: str
    score: Callable[[Tensor], Tensor] | None  # logits (N, V) -> (N,); None: at random
    steps: int | None = None  # evaluations a row takes; None: one position each
    entropy_bound: float | None = None


def first_hitting() -> Order:
    """One position at a time, uniformly: ancestral sampling in the limit of many steps, in at most L evaluations."""
    return Order("first_hitting", None)


def confidence(steps: int) -> Order:
    """The positions whose likeliest token is likeliest."""
    return Order("confidence", lambda logits: logits.softmax(-1).amax(-1), _positive(steps))


def margin(steps: int) -> Order:
    """The positions whose likeliest token leads the second by most."""

    def score(logits: Tensor) -> Tensor:
        best = logits.softmax(-1).topk(2, -1).values
        return best[:, 0] - best[:, 1]

    return Order("margin", score, _positive(steps))


def entropy_bounded(bound: float = 0.1) -> Order:
    """As many of the most certain positions as keep their joint dependence below `bound` nats.

    The sum of their entropies less the largest bounds what drawing them independently can cost.
    """
    if not bound >= 0:
        raise ValueError(f"the entropy bound must not be negative, got {bound}")
    return Order("entropy_bounded", lambda logits: -entropy(logits), entropy_bound=bound)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of each row's distribution."""
    return torch.special.entr(logits.softmax(-1)).sum(-1)  # 0 log 0 is 0: ruled-out tokens have logit -inf


def next_positions(order: Order, scores: Tensor, is_hidden: Tensor, step: int) -> Tensor:
    """Which hidden positions (B, L) to reveal in this step, given every position's score."""
    ranked, by_rank = scores.masked_fill(~is_hidden, -torch.inf).sort(dim=-1, descending=True, stable=True)
    rank = by_rank.argsort(-1)
    hidden = is_hidden.sum(-1, keepdim=True)
    if order.entropy_bound is not None:
        entropies = torch.where(ranked.isfinite(), -ranked, 0.0)
        fits = (entropies.cumsum(-1) - entropies <= order.entropy_bound) & ranked.isfinite()
        count = fits.long().cumprod(-1).sum(-1, keepdim=True).clamp(min=1)
    elif order.steps is not None:
        left = max(order.steps - step, 1)
        count = (hidden + left - 1) // left
    else:
        count = torch.ones_like(hidden)
    return (rank < count) & is_hidden


def _positive(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return steps
