"""An exponential moving average of the weights, with the lineage's warm-up."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class EMA:
    """name -> averaged tensor. Decay min(decay, (1 + n) / (10 + n)) with n counted from 1."""

    def __init__(self, model: nn.Module, decay: float = 0.9999) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = dict(model.named_parameters())
        torch._foreach_lerp_(list(self.shadow.values()), [current[n].detach() for n in self.shadow], 1 - decay)

    def copy_to(self, model: nn.Module) -> None:
        """Put the averaged weights into a model; parameters that were frozen have none and stay."""
        with torch.no_grad():
            parameters = dict(model.named_parameters())
            for name, average in self.shadow.items():
                parameters[name].copy_(average)

    def state_dict(self) -> dict[str, Tensor | int | float]:
        return {
            "decay": self.decay,
            "updates": self.updates,
            **{f"shadow.{k}": v.clone() for k, v in self.shadow.items()},
        }

    def load_state_dict(self, state: dict[str, Tensor | int | float]) -> None:
        self.decay, self.updates = float(state["decay"]), int(state["updates"])
        with torch.no_grad():
            for name, tensor in self.shadow.items():
                value = state[f"shadow.{name}"]
                assert isinstance(value, Tensor)
                tensor.copy_(value)
