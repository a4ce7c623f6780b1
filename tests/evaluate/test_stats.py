"""Correlations of known points, their intervals, and ranks within groups."""

import math
from typing import Any

import numpy as np
import pytest

from adlm.evaluate import stats
from adlm.evaluate.stats import correlate


def correlate_all(x: Any, y: Any) -> tuple[float, float, float]:
    return correlate(x, y, [range(len(x))], len(x))


def test_correlations_of_known_points() -> None:
    rho, low, high = correlate_all([1, 2, 3, 4, 5], [2, 4, 8, 16, 32])
    assert (rho, high) == (1, 1) and 0 < low < 0.9
    assert correlate_all([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]) == pytest.approx((-1, -1, -low))
    assert correlate_all([1, 2, 3], [1, 3, 2]) == (pytest.approx(0.5), -1, 1)
    for same in ([1, 1, 1], [1, math.nan, 3]):
        assert math.isnan(correlate_all(same, [1, 2, 3])[0])


def test_intervals_contain_the_truth_as_often_as_they_claim() -> None:
    rng = np.random.default_rng(3)
    truth, inside = 6 / math.pi * math.asin(0.3), 0  # Spearman's, of a normal pair with r = 0.6
    for _ in range(120):
        x = rng.normal(size=16)
        _, low, high = correlate_all(x, 0.6 * x + 0.8 * rng.normal(size=16))
        inside += low < truth < high
    assert 0.88 * 120 < inside < 120


@pytest.mark.parametrize(("size", "r"), [(2, 0.9), (3, 0.97)])
def test_intervals_within_short_runs_contain_the_truth(size: int, r: float) -> None:
    """Where all runs agree rho is 1, which is frequent with few checkpoints: one exchange would change it much."""
    rng, groups = np.random.default_rng(4), np.arange(12).reshape(-1, size).tolist()
    found = []
    for _ in range(300):
        x = rng.normal(size=12)
        y = r * x + math.sqrt(1 - r * r) * rng.normal(size=12)
        moved = np.repeat(
            rng.normal(size=12 // size), size
        )  # what a run has more than others does not matter
        found.append(correlate(x, y, groups, 12 - len(groups) + 1))
        assert correlate(x + moved, y - moved, groups, 12 - len(groups) + 1) == found[-1]
    truth = np.mean([rho for rho, _, _ in found])
    if size == 2:
        assert truth == pytest.approx(2 / math.pi * math.asin(r), abs=0.05)  # Kendall's tau
    assert np.mean([rho == 1 for rho, _, _ in found]) > 0.1
    assert np.mean([low <= truth <= high for _, low, high in found]) > 0.93


def test_ratios_and_their_errors() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 9, 400).astype(float)
    sums = counts * 0.3 + rng.normal(0, 1, 400)
    mean, error = stats.estimate_ratio(sums, counts)
    assert abs(mean - 0.3) < 4 * error and error == pytest.approx(20 / counts.sum(), rel=0.15)
    assert stats.estimate_ratio_difference(sums, counts, sums, counts) == (0, 0)
    assert math.isnan(stats.estimate_ratio(sums, 0 * counts)[0])
