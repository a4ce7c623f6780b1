"""Networks by name, and the one place that reads what a network may have besides its forward pass.

Every room takes any `FeatureModel`: a torch module with `config`, `head` and `forward(tokens, noise_level, valid=...)`,
which returns `Features`. What is optional has a default here:

| attribute | default |
|---|---|
| `config_class` of the class | `NetworkConfig`: makes the config of what config.json says |
| `build(config, seed)` of the class | `cls(config)` under torch's seed; without a seed, shapes without memory |
| `anchor_head` | None: one stage |
| `shift` | 0; 1 predicts token i + 1 at position i (`compute_features` reads it) |
| `fold()` | a copy in inference form; by default a plain copy |
| `layers()` | the modules that are compiled, sharded and checkpointed one by one; by default none |
| `new_slot_cache(slots, length)` | caches of a causal network for `forward(..., cache=)`; by default none |
| `costs()` | a `Costs`, for the log of a run |
| `config_dict()` | the settings in config.json: by default those of `config` |

A model folder names its network. `NETWORKS` has those that are built in; another one comes from the caller, because a
model folder never causes an import.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from adlm.diffusion.features import FeatureModel
from adlm.models.language_model import INDUCTOR_OPTIONS, LanguageModel
from adlm.registry import Registry
from adlm.settings import Settings

Model = TypeVar("Model", bound=FeatureModel)
TRANSFORMER = "transformer"  # the network of folders that name none


class NetworkConfig(Settings):
    """What every network's config has; derive the config of your own from it."""

    vocab_size: int
    """Tokens of the vocabulary, with the mask."""
    mask_id: int | None
    """The mask token; a causal network needs none."""
    length: int
    """The most tokens of a row."""
    is_causal: bool = False
    """Position i sees no position after it, and predicts token i + 1."""
    time_conditioning: bool = False
    """The network reads the noise level."""


class NetworkClass(Protocol):
    """A class of networks, or any function that makes one of its config."""

    def __call__(self, config: Any) -> FeatureModel: ...


GivenNetwork = NetworkClass | nn.Module | str  # a class, a network, or `module:object` of one
NETWORKS: Registry[NetworkClass] = Registry("network", {TRANSFORMER: LanguageModel})


def choose_network(name: str, given: GivenNetwork | None = None) -> NetworkClass | nn.Module:
    """Return the network that a model folder names: built in, or from the caller."""
    if name in NETWORKS:
        if given is not None and given not in (name, NETWORKS[name]):
            raise ValueError(
                f"network={given!r:.80} was given, and this model has the built-in network "
                f"{name!r}: leave network= out, or --network on the command line"
            )
        return NETWORKS[name]
    if given is None:
        known = ", ".join(NETWORKS)
        raise ValueError(
            f"the network {name!r:.80} is not built in (expected {known}), and a model folder "
            "imports nothing: if you trust its code, give network=MODULE:OBJECT, "
            "or --network MODULE:OBJECT on the command line"
        )
    return NETWORKS.resolve(given, allow_import=True) if isinstance(given, str) else given


def read_network_config(network: NetworkClass | nn.Module, settings: Mapping[str, Any]) -> Any:
    """Make a network's config of the settings in config.json."""
    kind: Any = getattr(network, "config_class", NetworkConfig)
    if isinstance(kind, type) and issubclass(kind, Settings):
        return kind.parse("json", **settings)
    return kind(**settings)


def build_network(network: NetworkClass | nn.Module, config: Any, seed: int | None) -> FeatureModel:
    """Build a network with weights that follow from the seed; without one they are to be loaded."""
    if isinstance(network, nn.Module):
        return cast(FeatureModel, network)
    build: Callable[[Any, int | None], FeatureModel] | None = getattr(network, "build", None)
    if build is not None:
        return build(config, seed)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed or 0)
        return network(config)


def fold_network(model: Model) -> Model:
    """Return a copy in inference form, equal up to rounding; without `fold` a plain copy."""
    fold: Callable[[], Model] | None = getattr(model, "fold", None)
    if fold is not None:
        return fold()
    folded = copy.deepcopy(model).eval()
    for parameter in folded.parameters():
        parameter.requires_grad_(False)
    return folded


def list_layers(model: FeatureModel) -> Sequence[nn.Module]:
    """Return the modules that are compiled, sharded and checkpointed one by one."""
    layers: Callable[[], Sequence[nn.Module]] | None = getattr(model, "layers", None)
    return [] if layers is None else list(layers())


def compile_network(model: FeatureModel) -> None:
    """Compile each layer in place (they share one graph), or a network without layers as a whole."""
    modules = list_layers(model) or [cast(nn.Module, model)]
    for module in modules:
        module.compile(dynamic=False, options=INDUCTOR_OPTIONS)


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


def find_tied(model: FeatureModel) -> dict[str, str]:
    """Return the names of parameters that are others under a second name, which are stored once."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            tied[name] = kept
    return tied


def allocate_parameters(model: FeatureModel) -> None:
    """Give a network without memory its parameters, not initialized; tied ones stay tied."""
    assert isinstance(model, nn.Module)
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    tied = find_tied(model)
    model.to_empty(device="cpu")
    for name, kept in tied.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, model.get_parameter(kept))
