"""Correlations of known points, their intervals, and what is subtracted from them."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adlm.evaluate import stats
from adlm.evaluate.stats import ALL_MODELS, AT_EQUAL_STEPS, WITHIN_RUNS


def correlate(*arguments: Any, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(**stats.correlate(*arguments, **options))


def test_correlations_of_known_points() -> None:
    up = correlate([1, 2, 3, 4, 5], [2, 4, 8, 16, 32])
    assert (up.rho, up.high) == (1, 1) and 0 < up.low < 0.9 and up.p_value == pytest.approx(2 / 120)
    down = correlate([1, 2, 3, 4, 5], [5, 4, 3, 2, 1])
    assert down.rho == -1 and down.high == pytest.approx(-up.low)
    three = correlate([1, 2, 3], [1, 3, 2])
    assert (three.rho, three.low, three.high) == (pytest.approx(0.5), -1, 1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=200)
    many = correlate(x, x + rng.normal(size=200))
    assert many.low < 0.69 < many.high and many.p_value < 0.01


def test_intervals_contain_the_truth_as_often_as_they_claim() -> None:
    rng = np.random.default_rng(3)
    truth, ranked = 0.6, 6 / math.pi * math.asin(0.3)  # of a normal pair, Spearman's
    inside = np.zeros(2)
    for _ in range(120):
        x = rng.normal(size=16)
        y = truth * x + math.sqrt(1 - truth**2) * rng.normal(size=16)
        found = correlate(x.tolist(), y.tolist())
        assert found.r == pytest.approx(np.corrcoef(x, y)[0, 1])
        inside += [found.r_low < truth < found.r_high, found.low < ranked < found.high]
    assert (inside > 0.88 * 120).all() and (inside < 120).all()


RUN, STEP = np.divmod(np.arange(24), 4)  # six runs, four checkpoints of each


def correlate_runs(x: Any, y: Any, among: str, run: Any = RUN, step: Any = STEP) -> SimpleNamespace:
    return correlate(x.tolist(), y.tolist(), among=among, runs=[str(each) for each in run], steps=step.tolist())


@pytest.mark.parametrize(
    ("among", "offset", "counts"), [(WITHIN_RUNS, RUN, (24, 6, 19)), (AT_EQUAL_STEPS, STEP, (24, 4, 6))]
)
def test_means_of_runs_or_steps_are_subtracted(among: str, offset: Any, counts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=24), rng.normal(size=24)
    plain, moved = correlate_runs(x, y, among), correlate_runs(x + 9 * offset, y - 5 * offset, among)
    assert (moved.r, moved.rho, moved.r_p_value) == pytest.approx((plain.r, plain.rho, plain.r_p_value))
    groups = np.eye(offset.max() + 1)[offset]
    left = [each - groups @ np.linalg.lstsq(groups, each, rcond=None)[0] for each in (x, y)]
    assert plain.r == pytest.approx(np.corrcoef(*left)[0, 1])
    assert (plain.points, plain.groups, plain.independent) == counts
    order = rng.permutation(24)
    mixed = correlate_runs(x[order], y[order], among, RUN[order], STEP[order])
    assert (mixed.r, mixed.rho) == pytest.approx((plain.r, plain.rho))


def test_few_checkpoints_are_enough() -> None:
    short = correlate([1, 2, 3, 4], [4, 3, 2, 9], WITHIN_RUNS, ["a", "a", "a", "b"])
    assert (short.points, short.rho) == (3, -1) and short.p_value == pytest.approx(2 / 6)
    rng, last = np.random.default_rng(1), STEP == 3
    x, y = rng.normal(size=24), rng.normal(size=24)
    one = correlate_runs(x[last], y[last], AT_EQUAL_STEPS, RUN[last], STEP[last])
    one.among = ALL_MODELS
    assert one == correlate(x[last].tolist(), y[last].tolist())
    fewer = correlate_runs(x[1:], y[1:], AT_EQUAL_STEPS, RUN[1:], STEP[1:])  # a step that one run lacks is left out
    assert (fewer.points, fewer.groups) == (18, 3)


@pytest.mark.parametrize(
    ("x", "y", "among", "message"),
    [
        ([1, 2], [1, 2], (), "at least 3 models"),
        ([1, 1, 1], [1, 2, 3], (), "accuracy is the same for all 3"),
        ([1, 2, 3], [1, math.nan, 3], (), "nll is not finite"),
        ([1, 2, 3, 4], [1, 2, 3, 4], (WITHIN_RUNS, "aabc"), "of 3 runs 1 have several checkpoints, 2 in all"),
        ([1, 2, 3], [1, 2, 3], (AT_EQUAL_STEPS, "abc", [1, 2, 3]), "no step is in all runs"),
        ([1, 2, 3, 4], [1, 2, 3, 5], (AT_EQUAL_STEPS, "aabb", [1, 2, 1, 2]), "there are 2 runs"),
    ],
)
def test_meaningless_correlations_are_refused(x: Any, y: Any, among: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correlate(x, y, *among, names=("accuracy", "nll"))


@pytest.mark.parametrize(("size", "r"), [(2, 0.9), (3, 0.97)])
def test_intervals_within_short_runs_contain_the_truth(size: int, r: float) -> None:
    """Where all runs agree rho is 1, which is frequent with few checkpoints: one exchange would change it much."""
    rng, run = np.random.default_rng(4), np.arange(12) // size
    found = []
    for _ in range(300):
        x = rng.normal(size=12)
        found.append(correlate_runs(x, r * x + math.sqrt(1 - r * r) * rng.normal(size=12), WITHIN_RUNS, run, run))
    truth = np.mean([each.rho for each in found])
    if size == 2:
        assert truth == pytest.approx(2 / math.pi * math.asin(r), abs=0.05)  # Kendall's tau
    assert np.mean([each.rho == 1 for each in found]) > 0.1
    assert np.mean([each.low <= truth <= each.high for each in found]) > 0.93


def test_checkpoints_of_one_run_are_one_piece_of_evidence() -> None:
    """Runs that differ at random: whole runs are permuted, so the p-value is uniform."""
    rng = np.random.default_rng(2)
    found = []
    for _ in range(200):
        x, y = (rng.normal(size=6)[RUN] + 0.1 * rng.normal(size=24) for _ in range(2))
        found.append(correlate_runs(x, y, AT_EQUAL_STEPS).r_p_value)
    assert np.mean(np.array(found) <= 0.05) < 0.1 and 0.4 < np.mean(found) < 0.6


def test_calibration_of_a_known_distribution() -> None:
    rng = np.random.default_rng(0)
    probability = rng.uniform(0, 1, 200_000)
    for truth, expected in ((probability, 0.0), (probability**2, 1 / 6)):  # E|p − p²| = 1/2 − 1/3
        each = np.stack([np.ones_like(probability), probability, rng.uniform(0, 1, 200_000) < truth], 1)
        bins = np.zeros((10, 3))
        np.add.at(bins, (probability * 10).astype(int), each)
        assert float(stats.calibration_error(bins)) == pytest.approx(expected, abs=0.005)


def test_ratios_and_their_errors() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 9, 400).astype(float)
    sums = counts * 0.3 + rng.normal(0, 1, 400)
    mean, error = stats.estimate_ratio(sums, counts)
    assert abs(mean - 0.3) < 4 * error and error == pytest.approx(20 / counts.sum(), rel=0.15)
    assert stats.estimate_ratio_difference(sums, counts, sums, counts) == (0, 0)
    assert math.isnan(stats.estimate_ratio(sums, 0 * counts)[0])
