"""What a network is to the mathematics: it maps tokens to features, from which heads make logits."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn


class Features(NamedTuple):
    """The features of the stages, each (B, L, dim), before their heads."""

    anchor: Tensor | None  # of the anchor network; None: one stage
    final: Tensor


class NetworkShape(Protocol):
    """What the rooms read of a network's config."""

    @property
    def vocab_size(self) -> int: ...  # with the mask
    @property
    def mask_id(self) -> int | None: ...
    @property
    def length(self) -> int: ...  # the most tokens of a row
    @property
    def is_causal(self) -> bool: ...


class FeatureModel(Protocol):
    """Any torch module like this one; `adlm.models.network` lists what it may have besides."""

    training: bool

    @property
    def config(self) -> Any: ...  # a NetworkShape, and the network's own settings
    @property
    def head(self) -> Callable[[Tensor], Tensor]: ...  # features (N, dim) -> logits (N, V)
    def __call__(
        self, tokens: Tensor, noise_level: Tensor | None = None, *, valid: Any = None
    ) -> Features: ...
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]: ...
    def get_parameter(self, target: str) -> nn.Parameter: ...
    def train(self, mode: bool = True) -> Self: ...
    def eval(self) -> Self: ...
    def to(self, *args: Any, **kwargs: Any) -> Self: ...


def find_anchor_head(model: FeatureModel) -> Callable[[Tensor], Tensor] | None:
    """Return the head of the anchor features; None: the network has one stage."""
    head: Callable[[Tensor], Tensor] | None = getattr(model, "anchor_head", None)
    return head


def compute_features(
    model: FeatureModel, tokens: Tensor, noise_level: Tensor | None = None, *, valid: Any = None
) -> Features:
    """Run a network on tokens (B, L); the features at a position are those that predict its token.

    A masked network with `shift` 1 predicts token i + 1 at position i, as one that was trained from left to right. A
    causal network does so too, but its batches are shifted instead (`shift_tokens`).
    """
    features = model(tokens, noise_level, valid=valid)
    shift = getattr(model, "shift", 0)
    if shift not in (0, 1):
        raise ValueError(f"the network's shift is {shift!r}: expected 0 or 1")
    if shift == 0 or model.config.is_causal:
        return features
    anchor = None if features.anchor is None else _shift_right(features.anchor)
    return Features(anchor, _shift_right(features.final))


def reads_time(model: FeatureModel) -> bool:
    """Return whether a network's features depend on the noise level."""
    return bool(getattr(model.config, "time_conditioning", False))


def find_device(model: FeatureModel) -> torch.device:
    """Return the device of a network's parameters."""
    return next(model.parameters()).device


def _shift_right(features: Tensor) -> Tensor:
    """Move features (B, L, dim) one position to the right; nothing predicts the first token but its own."""
    return torch.cat([features[:, :1], features[:, :-1]], dim=1)


def compute_anchor_features(
    model: FeatureModel, tokens: Tensor, noise_level: Tensor | None = None, *, valid: Any = None
) -> Tensor:
    """Run the anchor network of a model with two stages, alone where the model can (`anchor_features`)."""
    run: Callable[..., Tensor] | None = getattr(model, "anchor_features", None)
    if run is not None:
        return run(tokens, noise_level, valid=valid)
    anchor = compute_features(model, tokens, noise_level, valid=valid).anchor
    assert anchor is not None, "a network with an anchor_head has anchor features"
    return anchor


def compute_logits(model: FeatureModel, features: Tensor) -> Tensor:
    """Return logits (…, V) in which the mask, which is no token of a text, is impossible."""
    logits = model.head(features)
    if model.config.mask_id is not None:
        logits[..., model.config.mask_id] = -torch.inf
    return logits
