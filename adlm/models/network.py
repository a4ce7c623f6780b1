"""Networks by name, and the one place that reads what a network may have besides its forward pass.

Every room takes any `FeatureModel`: a torch module with `config`, `head` and `forward(tokens, noise_level, valid=...)`,
which returns `Features`. What is optional has a default here:

| attribute | default |
|---|---|
| `anchor_head` | None: one stage |
| `shift` | 0; 1 predicts token i + 1 at position i (`compute_features` reads it) |
| `fold()` | a copy in inference form; by default a plain copy |
| `layers()` | the modules that are compiled, sharded and checkpointed one by one; by default none |
| `new_cache(batch, length)` | the cache of a causal network, which `forward(..., cache=)` then takes |
| `costs()` | a `Costs`, for estimates of memory and of FLOPs |
| `config_dict()` | the settings in config.json, from which `config_class` makes the config again |
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TypeVar, cast

from torch import nn

from adlm.diffusion.features import FeatureModel

Model = TypeVar("Model", bound=FeatureModel)


@dataclass(frozen=True)
class NetworkConfig:
    """What every network's config has; derive the config of your own from it."""

    vocab_size: int  # with the mask
    mask_id: int | None
    length: int  # the most tokens of a row
    is_causal: bool = False
    time_conditioning: bool = False  # it reads the noise level


def fold_network(model: Model) -> Model:
    """Return a copy in inference form, equal up to rounding; without `fold` a plain copy."""
    assert isinstance(model, nn.Module)
    fold: Callable[[], Model] | None = getattr(model, "fold", None)
    if fold is not None:
        return fold()
    folded = copy.deepcopy(model)
    folded.requires_grad_(False).eval()
    return cast(Model, folded)


def list_layers(model: FeatureModel) -> Sequence[nn.Module]:
    """Return the modules that are compiled, sharded and checkpointed one by one."""
    layers: Callable[[], Sequence[nn.Module]] | None = getattr(model, "layers", None)
    return [] if layers is None else list(layers())


def read_config(model: FeatureModel) -> dict[str, Any]:
    """Return a network's settings as config.json has them."""
    config_dict: Callable[[], Mapping[str, Any]] | None = getattr(model, "config_dict", None)
    if config_dict is not None:
        return dict(config_dict())
    config = model.config
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    settings: dict[str, Any] = config.model_dump()
    return settings
