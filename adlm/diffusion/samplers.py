"""Samplers that are no plans, each one function of a view; all samplers by name, also by their names in other code."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from adlm.defaults import DEFAULT_STEPS
from adlm.diffusion import orders, plans
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan, check_steps, confidence_remask_prob, mean_noise_level
from adlm.diffusion.rng import Purpose
from adlm.diffusion.sampling import (
    Column,
    Move,
    Sampler,
    ScoreFn,
    View,
    count_hiding_steps,
)
from adlm.registry import Registry, build


def rank_positions(scores: Tensor, is_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden positions' scores (n, L), highest first, and the rank of each position."""
    masked = scores.masked_fill(~is_hidden, -torch.inf)
    ranked, by_rank = masked.sort(dim=-1, descending=True, stable=True)
    return ranked, by_rank.argsort(-1)


@dataclass(frozen=True)
class FirstHitting(Sampler):
    """One position at random after the other, the limit of ancestral sampling with many steps.

    Of n hidden positions the next is revealed at time t u^(1/n).
    """

    columns: ClassVar[Mapping[str, Column]] = {"time": Column(1.0)}

    def move(self, view: View) -> Move:
        is_hidden = view.is_hidden
        (scores,), (other,) = view.rng.pairs(0, 1, is_hidden.shape[1], Purpose.ORDER)
        hidden = is_hidden.sum(-1).clamp(min=1)
        time = view.columns["time"] * other[:, 0] ** (1 / hidden)
        _, rank = rank_positions(scores, is_hidden)
        return Move(
            reveal=(rank < 1) & is_hidden,
            noise_level=mean_noise_level(time),
            columns={"time": time},
        )


def top_prob(logits: Tensor) -> Tensor:
    """Return the probability of the likeliest token of each row of logits (N, V)."""
    return logits.softmax(-1).amax(-1)


def prob_margin(logits: Tensor) -> Tensor:
    """Return the margin between the two likeliest tokens of each row of logits (N, V)."""
    best = logits.softmax(-1).topk(2, -1).values
    return best[:, 0] - best[:, 1]


def negative_entropy(logits: Tensor) -> Tensor:
    """Return minus the entropy in nats of each row of logits (N, V); 0 log 0 is 0."""
    return -torch.special.entr(logits.softmax(-1)).sum(-1)


@dataclass(frozen=True)
class ByScore(Sampler):
    """The positions of highest score first, as many at a time as `steps` evaluations of a block allow."""

    steps: int = field(compare=False)
    score: ScoreFn = top_prob

    def __post_init__(self) -> None:
        check_steps(self.steps)

    @property
    def columns(self) -> Mapping[str, Column]:
        """The number of steps, in which rows may differ."""
        return {"steps": Column(self.steps)}

    def move(self, view: View) -> Move:
        assert view.scores is not None
        left = (view.columns["steps"].long() - view.step).clamp(min=1)[:, None]
        hidden = view.is_hidden.sum(-1, keepdim=True)
        count = (hidden + left - 1) // left
        _, rank = rank_positions(view.scores, view.is_hidden)
        return Move((rank < count) & view.is_hidden)


@dataclass(frozen=True)
class EntropyBounded(Sampler):
    """The positions of lowest entropy first, while their entropies less the largest sum to at most `bound` nats.

    That sum is a bound of what independent draws can cost.
    """

    bound: float = field(compare=False)
    score: ScoreFn = negative_entropy

    def __post_init__(self) -> None:
        if not self.bound >= 0:
            raise ValueError(
                f"bound {self.bound} must not be negative: give a number of nats, for example 0.1"
            )

    @property
    def columns(self) -> Mapping[str, Column]:
        """The bound, in which rows may differ."""
        return {"bound": Column(self.bound)}

    def move(self, view: View) -> Move:
        assert view.scores is not None
        ranked, rank = rank_positions(view.scores, view.is_hidden)
        entropies = -ranked  # infinite where nothing is hidden: the difference is no number there
        fits = entropies.cumsum(-1) - entropies <= view.columns["bound"].float()[:, None]
        count = fits.long().cumprod(-1).sum(-1, keepdim=True).clamp(min=1)
        return Move((rank < count) & view.is_hidden)


class RemaskByConfidence(Sampler):
    """A plan whose remask_prob is split over a row's visible tokens, most of it for the least certain."""

    reads_last_prob = True

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.hides_until = count_hiding_steps(plan)

    def __len__(self) -> int:
        return len(self.plan)

    def __str__(self) -> str:
        return str(self.plan)

    def move(self, view: View) -> Move:
        assert view.last_prob is not None
        transition = self.plan[view.step[:, None]]
        is_visible = view.is_free & ~view.is_hidden
        remask_prob = confidence_remask_prob(transition.remask_prob, view.last_prob, ~is_visible)
        transition = replace(transition, remask_prob=remask_prob)
        return Move(
            reveal=(view.u < transition.reveal_prob) & view.is_hidden,
            hide=(view.u < remask_prob) & is_visible,
            noise_level=transition.noise_level[:, 0],
            is_last=view.step == len(self.plan) - 1,
        )


@dataclass(frozen=True)
class LeftToRight(Sampler):
    """One position after the other: for causal models, and for masked ones."""

    def move(self, view: View) -> Move:
        return Move(view.is_hidden & (view.is_hidden.cumsum(-1) == 1))


def first_hitting() -> FirstHitting:
    """First-hitting sampler: one uniform position at a time, the limit of ancestral sampling with many steps."""
    return FirstHitting()


def confidence(steps: int) -> ByScore:
    """Positions by the probability of their likeliest token."""
    return ByScore(steps, top_prob)


def margin(steps: int) -> ByScore:
    """Positions by the margin between their two likeliest tokens."""
    return ByScore(steps, prob_margin)


def entropy_bounded(bound: float = 0.1) -> EntropyBounded:
    """Positions by entropy, lowest first, while the sum of their entropies less the largest is below `bound` nats."""
    return EntropyBounded(bound)


def remask_conf(steps: int, *, compat: bool = False) -> RemaskByConfidence:
    """ReMDM conf: sigma = min(1, (1 - alpha_s) / alpha_t), split by `confidence_remask_prob`."""
    return RemaskByConfidence(plans.remask_conf(steps, compat=compat))


SAMPLERS: Registry[Callable[..., Plan | Order]] = Registry(
    "sampler",
    {
        "ancestral": plans.ancestral,
        "forward_backward": plans.forward_backward,
        "remask_cap": plans.remask_cap,
        "remask_rescale": plans.remask_rescale,
        "remask_conf": plans.remask_conf,
        "remask_loop": plans.remask_loop,
        "ddpm": plans.ddpm,
        "dfm": plans.dfm,
        "first_hitting": orders.first_hitting,
        "confidence": orders.confidence,
        "margin": orders.margin,
        "entropy_bounded": orders.entropy_bounded,
    },
    aliases={  # in MDLM, ReMDM, LLaDA and Dream
        "mdlm": "ancestral",
        "remdm-cap": "remask_cap",
        "remdm-rescale": "remask_rescale",
        "remdm-conf": "remask_conf",
        "remdm-loop": "remask_loop",
        "low_confidence": "confidence",
        "topk_margin": "margin",
        "entropy": "entropy_bounded",
    },
)


def takes_steps(sampler: str) -> bool:
    """Return whether a sampler has a number of steps."""
    return "steps" in inspect.signature(SAMPLERS.resolve(sampler)).parameters


def choose_steps(sampler: str, steps: int | None, hidden: int) -> int:
    """Return a sampler's steps: by default DEFAULT_STEPS; confidence and margin reveal one hidden token a step."""
    if steps is not None:
        return steps
    is_order = SAMPLERS.resolve(sampler) in (orders.confidence, orders.margin)
    return hidden if is_order else DEFAULT_STEPS


def build_sampler(name: str, **options: Any) -> Plan | Order:
    """Build a plan or an order by name, with its own options (steps, eta, …)."""
    return build(SAMPLERS, name, options)
