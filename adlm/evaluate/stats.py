"""Statistics of all evaluations: ratios over independent units (rows, texts, documents) with standard errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.likelihood import estimate_ratio, influence_stderr

__all__ = ["calibration_error", "estimate_ratio", "estimate_ratio_difference"]


def estimate_ratio_difference(
    sums: NDArray[Any], counts: NDArray[Any], other_sums: NDArray[Any], other_counts: NDArray[Any]
) -> tuple[float, float]:
    """Σ sums / Σ counts − Σ other_sums / Σ other_counts over the same units (n,), and its paired standard error."""
    if counts.sum() == 0 or other_counts.sum() == 0:
        return math.nan, math.nan
    mean, other = sums.sum() / counts.sum(), other_sums.sum() / other_counts.sum()
    influence = (sums - mean * counts) / counts.sum() - (other_sums - other * other_counts) / other_counts.sum()
    return float(mean - other), influence_stderr(influence, (counts > 0) | (other_counts > 0))


def calibration_error(bins: NDArray[Any]) -> NDArray[np.float64]:
    """Expected calibration error from (…, bins, 3) sums of count, probability and hits; NaN where nothing counts."""
    count, probability, hits = np.moveaxis(bins, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.abs(probability - hits).sum(-1) / count.sum(-1), dtype=np.float64)
