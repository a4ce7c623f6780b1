"""Methods, samplers, schedules and anchor rules by name: the only file that maps names to functions."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from adlm.defaults import DEFAULT_STEPS
from adlm.diffusion import anchors, orders, plans, schedules
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.models.language_model import PRESETS, ModelConfig
from adlm.remedies import check_known

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Method:
    """One of the paper's 2×2 (causal or masked, one stage or two), or SEDD."""

    is_causal: bool
    two_stages: bool
    score_entropy: bool = False


METHODS = {
    "mdlm": Method(is_causal=False, two_stages=False),
    "adlm": Method(is_causal=False, two_stages=True),
    "ar": Method(is_causal=True, two_stages=False),
    "a2r": Method(is_causal=True, two_stages=True),
    "sedd": Method(is_causal=False, two_stages=False, score_entropy=True),
}

SCHEDULES: dict[str, Callable[..., schedules.NoiseSchedule]] = {
    "loglinear": schedules.LogLinear,
    "cosine": schedules.Cosine,
    "cosine_squared": schedules.CosineSquared,
    "linear": schedules.Linear,
    "geometric": schedules.Geometric,
}

ANCHOR_RULES: dict[str, Callable[..., anchors.AnchorRule]] = {
    "rare_in_sequence": anchors.rare_in_sequence,
    "frequent_in_sequence": anchors.frequent_in_sequence,
    "rare_in_corpus": anchors.rare_in_corpus,
    "tf_idf": anchors.tf_idf,
    "listed": anchors.listed_tokens,
    "random": anchors.random_positions,
    "every": anchors.every_token,
}

SAMPLERS: dict[str, Callable[..., Plan | Order]] = {
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
}

OTHER_NAMES = {  # of samplers in MDLM, ReMDM, LLaDA and Dream
    "mdlm": "ancestral",
    "remdm-cap": "remask_cap",
    "remdm-rescale": "remask_rescale",
    "remdm-conf": "remask_conf",
    "remdm-loop": "remask_loop",
    "low_confidence": "confidence",
    "topk_margin": "margin",
    "entropy": "entropy_bounded",
}


def look_up(table: Mapping[str, Entry], name: str, kind: str) -> Entry:
    """Return the entry of a name, also of a sampler's name elsewhere; the error for an unknown one lists the names."""
    if name not in table and OTHER_NAMES.get(name) in table:
        name = OTHER_NAMES[name]
    check_known(kind, name, table)
    return table[name]


def takes_steps(sampler: str) -> bool:
    """Return whether a sampler has a number of steps."""
    return "steps" in inspect.signature(look_up(SAMPLERS, sampler, "sampler")).parameters


def choose_steps(sampler: str, steps: int | None, hidden: int) -> int:
    """Return a sampler's steps: by default DEFAULT_STEPS; confidence and margin reveal one hidden token a step."""
    is_order = look_up(SAMPLERS, sampler, "sampler") in (orders.confidence, orders.margin)
    return steps if steps is not None else hidden if is_order else DEFAULT_STEPS


def build_sampler(name: str, **options: Any) -> Plan | Order:
    """Build a plan or an order by name, with its own options (steps, eta, …)."""
    return _build(SAMPLERS, name, "sampler", options)


def build_schedule(name: str, **options: Any) -> schedules.NoiseSchedule:
    """Build a noise schedule by name."""
    return _build(SCHEDULES, name, "schedule", options)


def build_anchor_rule(name: str, **options: Any) -> anchors.AnchorRule:
    """Build an anchor rule by name, with its own options (max_count, ids, …)."""
    return _build(ANCHOR_RULES, name, "anchor rule", options)


def _build(
    table: Mapping[str, Callable[..., Entry]], name: str, kind: str, options: dict[str, Any]
) -> Entry:
    factory = look_up(table, name, kind)
    known = inspect.signature(factory).parameters
    for option in options:
        check_known(f"{name} option", option, known or ["none"])
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"{kind} {name!r} needs {', '.join(missing)}: give {missing[0]}=VALUE")
    return factory(**options)


def build_config(
    method: str, preset: str, *, vocab_size: int, mask_id: int | None, **changes: Any
) -> ModelConfig:
    """Build the config of a method in a preset's size; one stage has the anchor network's depth, as in the paper."""
    shape, size = look_up(METHODS, method, "method"), look_up(PRESETS, preset, "preset")
    if not shape.two_stages:
        size = size | {"denoiser_layers": size["anchor_layers"], "anchor_layers": 0}
    if shape.is_causal:
        size = size | {"cond_dim": None}  # the lineage's causal layers have no modulation
    for change in changes:
        check_known("model setting", change, [field.name for field in fields(ModelConfig)])
    settings = (
        size
        | {"is_causal": shape.is_causal, "vocab_size": vocab_size, "mask_id": mask_id}
        | changes
    )
    return ModelConfig(**settings)
