"""A noise schedule of one's own: alpha(t) = 1 - (1 - eps) t^power."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Polynomial:
    """Hides few tokens early and most of them late, if `power` is above 1."""

    power: float = 2.0
    eps: float = 1e-3

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - (1 - self.eps) * t**self.power

    def dalpha(self, t: Tensor) -> Tensor:
        return -(1 - self.eps) * self.power * t ** (self.power - 1)
