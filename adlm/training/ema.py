"""Exponential moving average of the weights, with the warm-up of the lineage's code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class EMA:
    """The moving average of a model's parameters by name, with decay min(decay, (1 + n) / (10 + n)), n from 1.

    The average of sharded parameters is sharded like them; an update touches only this rank's shards.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the current weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages, weights = zip(*self._pairs(model), strict=True)
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def swap_in(self, model: nn.Module) -> Iterator[None]:
        """A context in which the model has the averaged weights; frozen parameters do not change."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        for average, weight in self._pairs(model):
            current = weight.clone()
            weight.copy_(average)
            average.copy_(current)

    def _pairs(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of every averaged parameter: the average and the current weight."""
        parameters = dict(model.named_parameters())
        return [(_local(average), _local(parameters[name].detach())) for name, average in self.shadow.items()]

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Resume from unsharded averaged weights, whether this average is sharded or not."""
        self.updates = updates
        for name, average in self.shadow.items():
            full = weights[name]
            if isinstance(average, DTensor):
                mesh, placements = average.device_mesh, average.placements
                full = distribute_tensor(full.to(average.device), mesh, placements, src_data_rank=None)
            _local(average).copy_(_local(full))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
