"""Samplers that are no plans, each one function of a view; all samplers by name, also by their names
in other code."""

import inspect
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from adlm.diffusion import plans
from adlm.diffusion.plans import Plan, check_steps, confidence_remask_prob, mean_noise_level
from adlm.diffusion.rng import Purpose
from adlm.diffusion.sampling import (
    Column,
    Move,
    Sampler,
    ScoreFn,
    View,
)
from adlm.registry import Registry, build, load_object
from adlm.settings import (
    DEFAULT_SAMPLER,
    DEFAULT_STEPS,
    SamplingSettings,
    SettingsError,
    TypedText,
    Vocabulary,
    derive_settings,
    name_sampler,
)


def rank_positions(scores: Tensor, is_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden positions' scores (n, L), highest first, and the rank of each position."""
    masked = scores.masked_fill(~is_hidden, -torch.inf)
    ranked, by_rank = masked.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1]).expand_as(by_rank)
    return ranked, torch.empty_like(by_rank).scatter_(-1, by_rank, rank)


@dataclass(frozen=True)
class FirstHitting(Sampler):
    """One position at random after the other, the limit of ancestral sampling with many steps.

    Of n hidden positions the next is revealed at time t u^(1/n).
    """

    name: ClassVar[str] = "first_hitting"
    columns: ClassVar[Mapping[str, Column]] = {"time": Column(1.0)}

    def move(self, view: View) -> Move:
        is_hidden = view.is_hidden
        (scores,), (other,) = view.rng.pairs(0, 1, is_hidden.shape[1], Purpose.ORDER)
        hidden = is_hidden.sum(-1).clamp(min=1)
        time = view.columns["time"] * other[:, 0] ** (1 / hidden)
        best = scores.masked_fill(~is_hidden, -torch.inf).argmax(-1, keepdim=True)
        reveal = torch.zeros_like(is_hidden).scatter_(-1, best, True)
        return Move(
            reveal=reveal & is_hidden,
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


SCORE_NAMES: Mapping[ScoreFn, str] = {top_prob: "confidence", prob_margin: "margin"}


@dataclass(frozen=True)
class ByScore(Sampler):
    """The positions of highest score first, as many at a time as `steps` evaluations of a block allow."""

    steps: int = field(compare=False)
    score: ScoreFn = top_prob

    def __post_init__(self) -> None:
        check_steps(self.steps)

    @property
    def name(self) -> str:
        """The name of the score."""
        return SCORE_NAMES.get(self.score, self.score.__name__)

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

    name: ClassVar[str] = "entropy_bounded"
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
        self.name = plan.name
        self.hides_until = plan.hides_until
        self.nucleus = plan.nucleus
        self.fill_argmax = plan.fill_argmax

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemaskByConfidence) and other.plan == self.plan

    def __hash__(self) -> int:
        return hash(self.plan)

    def __len__(self) -> int:
        return len(self.plan)

    def __str__(self) -> str:
        return str(self.plan)

    def __repr__(self) -> str:
        return f"RemaskByConfidence({self.plan.name}, {len(self)} steps)"

    def copy(self) -> Self:
        """Return an equal sampler whose plan is its own."""
        return type(self)(self.plan.copy())

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

    name: ClassVar[str] = "left_to_right"

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


SAMPLERS: Registry[Callable[..., Plan | Sampler]] = Registry(
    "sampler",
    {
        "ancestral": plans.ancestral,
        "forward_backward": plans.forward_backward,
        "remask_cap": plans.remask_cap,
        "remask_rescale": plans.remask_rescale,
        "remask_conf": remask_conf,
        "remask_loop": plans.remask_loop,
        "ddpm": plans.ddpm,
        "dfm": plans.dfm,
        "first_hitting": first_hitting,
        "confidence": confidence,
        "margin": margin,
        "entropy_bounded": entropy_bounded,
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


BUILT_IN = tuple(SAMPLERS.values())  # samplers of a user may change what they build
MAX_KEPT = 32  # samplers, for requests of equal options


def register_sampler(target: str) -> None:
    """Import the sampler `module:object`, which requests may name from then on.

    They never import one themselves.
    """
    sampler = load_object(target)
    is_function = inspect.isroutine(sampler)
    is_class = inspect.isclass(sampler) and issubclass(sampler, Sampler)
    if not (is_function or is_class or isinstance(sampler, Plan | Sampler)):
        expected = "expected a sampler, a class of samplers, or a function that returns one"
        raise ValueError(f"{target!r} is {sampler!r:.80}: {expected}")
    SAMPLERS.register(target, sampler)


def takes_steps(sampler: str, *, allow_import: bool = False) -> bool:
    """Return whether a sampler takes a number of steps; one that is built already takes none."""
    factory = SAMPLERS.resolve(sampler, allow_import=allow_import)
    return callable(factory) and "steps" in derive_settings(factory).model_fields


def choose_sampler(
    settings: SamplingSettings,
    *,
    hidden: int,
    default: str = DEFAULT_SAMPLER,
    allow_import: bool = False,
) -> tuple[Plan | Sampler, dict[str, Any]]:
    """Build the sampler for rows of at most `hidden` hidden tokens, and describe it."""
    name = default if settings.sampler is None else settings.sampler
    if not isinstance(name, str):
        return use_built(name, settings)
    factory = SAMPLERS.resolve(name, allow_import=allow_import)
    if not callable(factory):
        return use_built(factory, settings)

    options = read_options(name, factory, settings)
    if "steps" in derive_settings(factory).model_fields:
        steps = settings.steps
        if steps is None:
            steps = hidden if factory is confidence or factory is margin else DEFAULT_STEPS
        options = {"steps": steps, **options}
    elif settings.steps is not None:
        raise SettingsError({"steps": settings.steps}, f"{name} chooses its own; leave it out")
    build_own = partial(build_once, factory) if is_built_in(factory) else factory
    return build_own(**options), {"sampler": name, **options}


def is_built_in(factory: Callable[..., Plan | Sampler]) -> bool:
    """Return whether a sampler's function is one of this package; a user's may have no hash."""
    return any(factory is known for known in BUILT_IN)


def use_built(sampler: object, settings: SamplingSettings) -> tuple[Plan | Sampler, dict[str, Any]]:
    """Describe a sampler that is built already, which must stand alone."""
    if not isinstance(sampler, Plan | Sampler):
        expected = "expected a name, or a plan or a sampler as adlm.build_sampler returns it"
        raise SettingsError({"sampler": sampler}, f"{expected}; leave it out for the default")
    refuse(settings, "the sampler is built already, with its own; leave it out", "steps", "options")
    steps = {"steps": len(sampler)} if isinstance(sampler, Sized) else {}
    return sampler, {"sampler": name_sampler(sampler), **steps}


def read_options(
    name: str, factory: Callable[..., Any], settings: SamplingSettings
) -> dict[str, Any]:
    """Check a sampler's own options by the parameters of its function, and return them."""
    options = dict(settings.options or {})
    if "steps" in options:
        raise SettingsError({"options": options}, "steps is a setting; give it outside of options")
    is_typed = any(isinstance(value, TypedText) for value in options.values())
    vocabulary: Vocabulary = "recipe" if is_typed else "python"
    try:
        checked = derive_settings(factory, "steps").parse(vocabulary, None, **options)
    except SettingsError as error:
        raise SettingsError({"options": options}, f"of {name}, {error}") from None
    return {option: getattr(checked, option) for option in options}


def build_once(factory: Callable[..., Plan | Sampler], **options: Any) -> Plan | Sampler:
    """Build a sampler, or copy the one that was built of equal options: tensors can be changed."""
    kept = build_kept(factory, **options)
    return kept.copy() if isinstance(kept, Plan | RemaskByConfidence) else kept


@lru_cache(maxsize=MAX_KEPT, typed=True)
def build_kept(factory: Callable[..., Plan | Sampler], **options: Any) -> Plan | Sampler:
    """Build a sampler that nobody else holds."""
    return factory(**options)


def refuse_samplers(settings: SamplingSettings) -> None:
    """Raise for settings that a causal model does not have."""
    names = ["steps", "options", "block"]
    if settings.sampler != LeftToRight.name:
        names.insert(0, "sampler")
    problem = "a causal model generates from left to right, a token a step; leave it out"
    refuse(settings, problem, *names)


def refuse(settings: SamplingSettings, problem: str, *names: str) -> None:
    """Raise for settings of these names that are given."""
    values = {name: getattr(settings, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    if given:
        raise SettingsError(given, problem)


def build_sampler(name: str, **options: Any) -> Plan | Sampler:
    """Build a sampler by name, with its own options (steps, eta, …)."""
    return build(SAMPLERS, name, options)
