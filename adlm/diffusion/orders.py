"""Ordered unmasking: after each evaluation the best hidden positions are revealed for good."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.diffusion.plans import check_steps


@dataclass(frozen=True)
class Order:
    """An unmasking order: positions by score, highest first; how many at a time follows from `steps` or the bound."""

    name: str
    score: Callable[[Tensor], Tensor] | None  # logits (N, V) -> (N,); None: at random
    steps: int | Tensor | None = (
        None  # evaluations per row, or (B, 1) for each; None: one position each
    )
    entropy_bound: float | Tensor | None = None  # or (B, 1)


def first_hitting() -> Order:
    """First-hitting sampler: one uniform position at a time, the limit of ancestral sampling with many steps."""
    return Order("first_hitting", None)


def confidence(steps: int) -> Order:
    """Positions by the probability of their likeliest token."""
    return Order("confidence", lambda logits: logits.softmax(-1).amax(-1), check_steps(steps))


def margin(steps: int) -> Order:
    """Positions by the margin between their two likeliest tokens."""

    def score(logits: Tensor) -> Tensor:
        best = logits.softmax(-1).topk(2, -1).values
        return best[:, 0] - best[:, 1]

    return Order("margin", score, check_steps(steps))


def entropy_bounded(bound: float = 0.1) -> Order:
    """Positions by entropy, lowest first, while the sum of their entropies less the largest, a bound of what
    independent draws can cost, is below `bound` nats."""
    if not bound >= 0:
        raise ValueError(
            f"bound {bound} must not be negative: give a number of nats, for example 0.1"
        )
    return Order("entropy_bounded", lambda logits: -entropy(logits), entropy_bound=bound)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of each row of logits."""
    return torch.special.entr(logits.softmax(-1)).sum(
        -1
    )  # 0 log 0 is 0: ruled-out tokens have logit -inf


def next_positions(order: Order, scores: Tensor, is_hidden: Tensor, step: int | Tensor) -> Tensor:
    """Choose the hidden positions (B, L) to reveal in this step by every position's score."""
    ranked, by_rank = scores.masked_fill(~is_hidden, -torch.inf).sort(
        dim=-1, descending=True, stable=True
    )
    rank = by_rank.argsort(-1)
    hidden = is_hidden.sum(-1, keepdim=True)
    if order.entropy_bound is not None:
        entropies = torch.where(ranked.isfinite(), -ranked, 0.0)
        fits = (entropies.cumsum(-1) - entropies <= order.entropy_bound) & ranked.isfinite()
        count = fits.long().cumprod(-1).sum(-1, keepdim=True).clamp(min=1)
    elif order.steps is not None:
        left = torch.as_tensor(order.steps - step).clamp(min=1)
        count = (hidden + left - 1) // left
    else:
        count = torch.ones_like(hidden)
    return (rank < count) & is_hidden
