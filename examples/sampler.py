"""Two samplers of one's own: one that looks at positions alone, and one with a score and a memory."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from adlm import Column, Move, Sampler, View


@dataclass(frozen=True)
class OutsideIn(Sampler):
    """Reveals the hidden positions from both ends inwards, `count` at each end in a step."""

    count: int = 1

    def move(self, view: View) -> Move:
        from_left = view.is_hidden.cumsum(-1)
        from_right = view.is_hidden.flip(-1).cumsum(-1).flip(-1)
        is_outer = (from_left <= self.count) | (from_right <= self.count)
        return Move(reveal=view.is_hidden & is_outer)


@dataclass(frozen=True)
class Patient(Sampler):
    """Reveals a position once its likeliest token has had at least `prob` in `patience` steps."""

    prob: float = 0.5
    patience: int = 2
    columns: ClassVar = {"sure": Column(per_position=True)}  # steps in which it was sure

    @staticmethod
    def score(logits: Tensor) -> Tensor:
        return logits.softmax(-1).amax(-1)

    def move(self, view: View) -> Move:
        assert view.scores is not None
        sure = view.columns["sure"] + (view.scores >= self.prob)
        best = view.scores.masked_fill(~view.is_hidden, -1).amax(-1, keepdim=True)
        is_ripe = (sure >= self.patience) | (view.scores == best)  # at least one in a step
        return Move(reveal=view.is_hidden & is_ripe, columns={"sure": sure})
