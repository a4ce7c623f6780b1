"""Statistics of all evaluations: ratios over independent units (rows, texts, documents) with standard errors."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.errors import import_extra
from adlm.likelihood import estimate_ratio as estimate_ratio
from adlm.likelihood import influence_stderr

MIN_MODELS = 3  # of a correlation
NORMAL_975 = 1.959963984540054  # quantile of a 95% interval


def estimate_ratio_difference(
    sums: NDArray[Any], counts: NDArray[Any], other_sums: NDArray[Any], other_counts: NDArray[Any]
) -> tuple[float, float]:
    """Σ sums / Σ counts − Σ other_sums / Σ other_counts over the same units (n,), and its paired standard error."""
    if counts.sum() == 0 or other_counts.sum() == 0:
        return math.nan, math.nan
    mean, other = sums.sum() / counts.sum(), other_sums.sum() / other_counts.sum()
    influence = (sums - mean * counts) / counts.sum() - (
        other_sums - other * other_counts
    ) / other_counts.sum()
    return float(mean - other), influence_stderr(influence, (counts > 0) | (other_counts > 0))


def flatten_estimates(**estimates: tuple[float, float]) -> dict[str, float]:
    """Values and standard errors as `NAME` and `NAME_se`, as in JSON."""
    return {
        f"{name}{suffix}": pair[i]
        for name, pair in estimates.items()
        for i, suffix in enumerate(("", "_se"))
    }


def describe_seeds(values: Sequence[float]) -> dict[str, Any]:
    """The values of seeds with their mean and, for more than one finite value, Student's 95% interval."""
    count, mean, interval = len(values), float(np.mean(values)) if values else math.nan, None
    if count > 1 and math.isfinite(mean):
        # With t = √ν·tan θ the probability of |T| < t is the integral of cos^(ν-1) up to θ, divided by that up to π/2.
        angle = np.linspace(0, np.pi / 2, 100_001)
        share = np.cumsum(np.cos((angle[1:] + angle[:-1]) / 2) ** (count - 2))
        quantile = math.sqrt(count - 1) * math.tan(np.interp(0.95, share / share[-1], angle[1:]))
        half = quantile * float(np.std(values, ddof=1)) / math.sqrt(count)
        interval = [mean - half, mean + half]
    return {"by_seed": list(values), "mean": mean, "interval": interval}


def rank_values(values: NDArray[Any]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    scipy_stats = import_extra("scipy.stats", "ranks need scipy", "eval")
    return np.asarray(scipy_stats.rankdata(values), dtype=np.float64)


def correlate(
    x: Sequence[float], y: Sequence[float], groups: Sequence[Sequence[int]], independent: int
) -> tuple[float, float, float]:
    """Spearman's rho of two metrics by the ranks of models within groups, and its 95% interval for `independent` models
    (Bonett and Wright, 2000), computed half an exchange short of full agreement; NaN for a metric without spread."""
    a, b = (_center_ranks(np.asarray(values, dtype=np.float64), groups) for values in (x, y))
    size = math.sqrt(float((a @ a) * (b @ b)))
    if not size > 0:
        return math.nan, math.nan, math.nan
    rho = min(1.0, max(-1.0, float(a @ b) / size))
    if independent <= MIN_MODELS:
        return rho, -1.0, 1.0
    # Exchanging the ranks of two neighbors changes the sum of products by 1, at equal steps by 1 at each of them.
    margin = len(a) // independent / (2 * size)
    center = max(margin - 1, min(1 - margin, rho))
    reach = NORMAL_975 * math.sqrt((1 + rho * rho / 2) / (independent - 3))
    low, high = (math.tanh(math.atanh(center) + side) for side in (-reach, reach))
    return rho, min(low, rho), max(high, rho)


def _center_ranks(
    values: NDArray[np.float64], groups: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    """The ranks of values within their groups, minus the group's mean; NaN where a value is."""
    parts = [
        np.where(np.isnan(values[group]), np.nan, rank_values(values[group]))
        for group in map(list, groups)
    ]
    return np.concatenate([part - part.mean() for part in parts])
