"""Sums over rows or texts to means with standard errors: tokens of one row are not independent, rows are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Sums = NDArray[np.float64]  # (n,): one number a row


def ratio(sums: Sums, counts: Sums) -> tuple[float, float]:
    """Σ sums / Σ counts over rows and its standard error; NaN where nothing was counted."""
    total = counts.sum()
    if total == 0:
        return math.nan, math.nan
    mean = sums.sum() / total
    return float(mean), _error((sums - mean * counts) / total, counts > 0)


def ratio_gap(sums: Sums, counts: Sums, other_sums: Sums, other_counts: Sums) -> tuple[float, float]:
    """The difference of two such means over the same rows, and its standard error."""
    if counts.sum() == 0 or other_counts.sum() == 0:
        return math.nan, math.nan
    mean, other = sums.sum() / counts.sum(), other_sums.sum() / other_counts.sum()
    pulls = (sums - mean * counts) / counts.sum() - (other_sums - other * other_counts) / other_counts.sum()
    return float(mean - other), _error(pulls, (counts > 0) | (other_counts > 0))


def calibration_error(bins: NDArray[Any]) -> NDArray[np.float64]:
    """Expected calibration error from (…, bins, 3) sums of count, probability and hits; NaN where nothing counts."""
    count, probability, hits = np.moveaxis(bins, -1, 0)
    total = count.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.abs(probability - hits).sum(-1) / total
    return np.asarray(found, dtype=np.float64)


def _error(pulls: Sums, has_part: NDArray[np.bool_]) -> float:
    """Over the rows that have a part in it, at least two."""
    n = int(has_part.sum())
    return math.sqrt(n / (n - 1) * float(np.square(pulls).sum())) if n > 1 else math.nan
