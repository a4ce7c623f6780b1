"""Exponential moving average of the weights, with the warm-up of the lineage's code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from adlm.diffusion.features import FeatureModel


class EMA:
    """The moving average of a model's parameters by name, with decay min(decay, (1 + n) / (10 + n)), n from 1; it is
    sharded as they are."""

    def __init__(self, model: FeatureModel, decay: float = 0.9999) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {
            name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }

    @torch.no_grad()
    def update(self, model: FeatureModel) -> None:
        """Move the average towards the current weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        weights = dict(model.named_parameters())
        torch._foreach_lerp_(
            list(self.shadow.values()), [weights[name] for name in self.shadow], 1 - decay
        )

    @contextmanager
    def swap_in(self, model: FeatureModel) -> Iterator[None]:
        """A context in which the model has the averaged weights; frozen parameters do not change."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: FeatureModel) -> None:
        for name, average in self.shadow.items():
            weight = model.get_parameter(name)
            current = weight.clone()
            weight.copy_(average)
            average.copy_(current)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Resume from unsharded averaged weights, whether this average is sharded or not."""
        self.updates = updates
        for name, average in self.shadow.items():
            full = weights[name].to(average.device)
            if isinstance(average, DTensor):
                full = distribute_tensor(
                    full, average.device_mesh, average.placements, src_data_rank=None
                )
            average.copy_(full)
