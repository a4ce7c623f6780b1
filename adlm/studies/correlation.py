"""How two figures of several models go together: the rank correlation, its interval, and what chance would give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST = 3  # points below which nothing is said
EXACT = 7  # points up to which every order is tried
ORDERS = 9999  # tried at random above that
NORMAL = 1.959963984540054  # of a 95% interval


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of y with x over models."""

    x: str
    y: str
    points: int
    rho: float
    low: float  # 95%
    high: float
    p_value: float  # two-sided: the share of orders of y at least as far from 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def correlate(
    x: Sequence[float], y: Sequence[float], names: tuple[str, str] = ("x", "y"), seed: int = 0
) -> Correlation:
    """Spearman's rho with the interval of Bonett and Wright and a permutation test; at least three points.

    Where all ranks agree rho is ±1 and the interval would be a point: it is computed half a swap of neighbours short of
    it. Three points leave it at [−1, 1].
    """
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values of {names[0]} and {len(y)} of {names[1]}: give one of each for every model")
    if len(x) < LEAST:
        raise ValueError(
            f"a correlation over {len(x)} points says nothing: give at least {LEAST} models, such as the checkpoints "
            "of a run (checkpoint.keep says how many it keeps) or runs of different recipes"
        )
    if bad := [name for name, values in zip(names, (x, y), strict=True) if not np.isfinite(values).all()]:
        raise ValueError(f"{bad[0]} is not finite for every model: a correlation needs it of each")
    mine, theirs = (midranks(np.asarray(values, dtype=np.float64)) for values in (x, y))
    if min(mine.std(), theirs.std()) == 0:
        constant = names[0] if mine.std() == 0 else names[1]
        raise ValueError(f"{constant} is the same for all {len(x)} models: it goes together with nothing")
    rho = _pearson(mine, theirs)
    n = len(x)
    if n == LEAST:
        low, high = -1.0, 1.0
    else:
        most = 1 - 6 / (n * (n * n - 1))
        middle, reach = np.clip(rho, -most, most), NORMAL * math.sqrt((1 + rho * rho / 2) / (n - 3))
        low, high = (float(np.tanh(np.arctanh(middle) + side)) for side in (-reach, reach))
        low, high = min(low, rho), max(high, rho)
    return Correlation(*names, n, rho, low, high, _p_value(mine, theirs, rho, seed))


def midranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1 on; equal values share the middle of theirs."""
    ordered = np.sort(values)
    both = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    return np.asarray((both + 1) / 2, dtype=np.float64)


def _pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum()))


def _p_value(x: NDArray[np.float64], y: NDArray[np.float64], rho: float, seed: int) -> float:
    far = abs(rho) - 1e-12
    if len(x) <= EXACT:
        orders = itertools.permutations(range(len(x)))
        return float(np.mean([abs(_pearson(x, y[list(order)])) >= far for order in orders]))
    rng = np.random.default_rng(seed)
    hits = sum(abs(_pearson(x, rng.permutation(y))) >= far for _ in range(ORDERS))
    return (hits + 1) / (ORDERS + 1)
