"""Noise schedules alpha(t): the share of tokens that are visible at time t, near 1 at t = 0 and near 0 at t = 1."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adlm.registry import Registry


class NoiseSchedule(Protocol):
    """A schedule alpha(t) and its derivative."""

    def alpha(self, t: Tensor) -> Tensor: ...

    def dalpha(self, t: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LogLinear:
    """The paper's schedule alpha = 1 - (1 - eps) t, whose loss weight is 1 / t."""

    eps: float = 1e-3

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - (1 - self.eps) * t

    def dalpha(self, t: Tensor) -> Tensor:
        return torch.full_like(t, -(1 - self.eps))


@dataclass(frozen=True)
class Cosine:
    """alpha = eps + (1 - eps) cos(pi t / 2)."""

    eps: float = 1e-3

    def alpha(self, t: Tensor) -> Tensor:
        return self.eps + (1 - self.eps) * torch.cos(t * math.pi / 2)

    def dalpha(self, t: Tensor) -> Tensor:
        return -(1 - self.eps) * torch.sin(t * math.pi / 2) * math.pi / 2


@dataclass(frozen=True)
class CosineSquared:
    """alpha = eps + (1 - eps) cos²(pi t / 2)."""

    eps: float = 1e-3

    def alpha(self, t: Tensor) -> Tensor:
        return self.eps + (1 - self.eps) * torch.cos(t * math.pi / 2) ** 2

    def dalpha(self, t: Tensor) -> Tensor:
        return -(1 - self.eps) * torch.sin(t * math.pi) * math.pi / 2


@dataclass(frozen=True)
class Linear:
    """The noise level rises linearly from `low` to `high`."""

    low: float = 1e-3
    high: float = 7.0

    def alpha(self, t: Tensor) -> Tensor:
        return torch.exp(-(self.low + t * (self.high - self.low)))

    def dalpha(self, t: Tensor) -> Tensor:
        return -(self.high - self.low) * self.alpha(t)


@dataclass(frozen=True)
class Geometric:
    """The noise level rises geometrically: low^(1-t) high^t."""

    low: float = 1e-3
    high: float = 1.0

    def alpha(self, t: Tensor) -> Tensor:
        return torch.exp(-(self.low ** (1 - t)) * self.high**t)

    def dalpha(self, t: Tensor) -> Tensor:
        level = self.low ** (1 - t) * self.high**t
        return -level * math.log(self.high / self.low) * self.alpha(t)


SCHEDULES: Registry[Callable[..., NoiseSchedule]] = Registry(
    "schedule",
    {
        "loglinear": LogLinear,
        "cosine": Cosine,
        "cosine_squared": CosineSquared,
        "linear": Linear,
        "geometric": Geometric,
    },
)


def missing_share(schedule: NoiseSchedule) -> float:
    """Return 1 - (alpha(0) - alpha(1)): what a bound in this schedule lacks, as a share of log(V - 1) for a network
    that predicts uniformly."""
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    start, end = schedule.alpha(ends).tolist()
    return 1 - (start - end)


# 1 - alpha cancels near t = 0, so the derived quantities are computed in float64 and rounded once.


def noise_level(schedule: NoiseSchedule, t: Tensor) -> Tensor:
    """Return -log alpha(t), the input of a time-conditioned network."""
    return -torch.log(schedule.alpha(t.double())).to(t.dtype)


def loss_weight(schedule: NoiseSchedule, t: Tensor) -> Tensor:
    """Return -alpha'(t) / (1 - alpha(t)), the weight of a hidden token in the continuous-time NELBO."""
    exact = t.double()
    return (-schedule.dalpha(exact) / (1 - schedule.alpha(exact))).to(t.dtype)


def discrete_time(t: Tensor, steps: int) -> Tensor:
    """Return the end of the step of width 1 / steps that t falls into."""
    return torch.clamp(torch.floor(t * steps) / steps + 1 / steps, max=1.0)


def discrete_loss_weight(schedule: NoiseSchedule, t: Tensor, steps: int) -> Tensor:
    """Return steps · (alpha(s) - alpha(t)) / (1 - alpha(t)), s = t - 1/steps: the weight in the discrete-time NELBO."""
    exact = t.double()
    alpha = schedule.alpha(exact)
    return (steps * (schedule.alpha(exact - 1 / steps) - alpha) / (1 - alpha)).to(t.dtype)
