"""Samplers by name, also by their names in other code, and what is asked about one by its name."""

import inspect
from collections.abc import Callable
from typing import Any

from adlm.defaults import DEFAULT_STEPS
from adlm.diffusion import orders, plans
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.registry import Registry, build

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
