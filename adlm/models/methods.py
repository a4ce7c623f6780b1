"""The paper's methods and sizes by name, and the config of a method in a size."""

from dataclasses import dataclass, fields
from typing import Any

from adlm.errors import check_known
from adlm.models.language_model import ModelConfig
from adlm.registry import Registry


@dataclass(frozen=True)
class Method:
    """One of the paper's 2×2 (causal or masked, one stage or two), or SEDD."""

    is_causal: bool
    two_stages: bool
    objective: str = "masked"  # of OBJECTIVES


METHODS = Registry(
    "method",
    {
        "mdlm": Method(is_causal=False, two_stages=False),
        "adlm": Method(is_causal=False, two_stages=True),
        "ar": Method(is_causal=True, two_stages=False, objective="causal"),
        "a2r": Method(is_causal=True, two_stages=True, objective="causal"),
        "sedd": Method(is_causal=False, two_stages=False, objective="score_entropy"),
    },
)

# Sizes by name, as settings of ModelConfig; a one-stage model has the anchor network's depth.
PRESETS: Registry[dict[str, Any]] = Registry(
    "preset",
    {
        "nano": {
            "dim": 192,
            "heads": 6,
            "anchor_layers": 4,
            "denoiser_layers": 2,
            "cond_dim": 64,
            "bridge": "direct",
        },
        "small": {"dim": 768, "heads": 12, "anchor_layers": 12, "denoiser_layers": 6},
        "medium": {"dim": 1024, "heads": 16, "anchor_layers": 24, "denoiser_layers": 12},
        "large": {"dim": 1280, "heads": 20, "anchor_layers": 36, "denoiser_layers": 18},
    },
)


def build_config(
    method: str, preset: str, *, vocab_size: int, mask_id: int | None, **changes: Any
) -> ModelConfig:
    """Build the config of a method in a preset's size; one stage has the anchor network's depth, as in the paper."""
    shape = METHODS.resolve(method)
    size = PRESETS.resolve(preset)
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
