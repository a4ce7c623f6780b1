"""The paper's methods and sizes by name, and the config of a method in a size."""

from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
from pydantic import Field

from adlm.models.language_model import ModelConfig
from adlm.registry import Registry
from adlm.settings import OptionValue, Settings, make_optional


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


# What the data and the method say, and no recipe.
FIXED = ("vocab_size", "mask_id", "length", "is_causal")
CHANGEABLE = [name for name in ModelConfig.model_fields if name not in FIXED]
ModelChanges: Any = pydantic.create_model(
    "ModelChanges",
    __base__=Settings,
    __module__=__name__,
    preset=(str | None, None),
    **make_optional(ModelConfig, dict(zip(CHANGEABLE, CHANGEABLE, strict=True))),
)


class ModelSettings(ModelChanges):
    """The model of a recipe: a preset and changes to it; null is the value of both or of `init`."""

    preset: str | None = None
    """Sizes: nano, small, medium or large; with init, by default its architecture."""
    cond_dim: Annotated[int, Field(ge=0, le=2**16)] | None = None
    """Width of the layers' modulation; 0: none."""
    network: str | None = None
    """A network of your own, module:object; by default the transformer of the method."""
    options: dict[str, OptionValue] | None = None
    """The settings of a network of your own."""

    def list_changes(self) -> dict[str, Any]:
        """Return the settings of the transformer that are given."""
        own = ("preset", "network", "options")
        return {name: value for name, value in self if name not in own and value is not None}


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
    given = {"is_causal": shape.is_causal, "vocab_size": vocab_size, "mask_id": mask_id}
    return ModelConfig.parse("python", **(size | given | changes))
