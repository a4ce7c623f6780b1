"""An exponential moving average of the weights, with the lineage's warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from adlm.training.distributed import local, spread_like


class EMA:
    """name -> averaged tensor. Decay min(decay, (1 + n) / (10 + n)) with n counted from 1.

    With sharded weights the average is sharded as they are; an update touches this process's part alone.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = dict(model.named_parameters())
        averages = [local(average) for average in self.shadow.values()]
        torch._foreach_lerp_(averages, [local(current[name].detach()) for name in self.shadow], 1 - decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Put the averaged weights into a model; parameters that were frozen have none and stay."""
        parameters = dict(model.named_parameters())
        for name, average in self.shadow.items():
            local(parameters[name].detach()).copy_(local(average))

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, for a while."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        for name, average in self.shadow.items():
            mine, theirs = local(average), local(parameters[name].detach())
            kept = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(kept)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Go on from whole averaged weights, however this average is sharded."""
        self.updates = updates
        for name, average in self.shadow.items():
            local(average).copy_(local(spread_like(weights[name], average)))

    def state_dict(self) -> dict[str, Tensor | int | float]:
        return {
            "decay": self.decay,
            "updates": self.updates,
            **{f"shadow.{k}": v.clone() for k, v in self.shadow.items()},
        }

    def load_state_dict(self, state: dict[str, Tensor | int | float]) -> None:
        self.decay = float(state["decay"])
        weights = {name: value for name in self.shadow if isinstance(value := state[f"shadow.{name}"], Tensor)}
        self.load(weights, int(state["updates"]))
