"""Statistics of all evaluations: ratios over independent units (rows, texts, documents) with standard errors."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.likelihood import estimate_ratio as estimate_ratio
from adlm.likelihood import influence_stderr
from adlm.remedies import import_extra


def estimate_ratio_difference(
    sums: NDArray[Any], counts: NDArray[Any], other_sums: NDArray[Any], other_counts: NDArray[Any]
) -> tuple[float, float]:
    """Σ sums / Σ counts − Σ other_sums / Σ other_counts over the same units (n,), and its paired standard error."""
    if counts.sum() == 0 or other_counts.sum() == 0:
        return math.nan, math.nan
    mean, other = sums.sum() / counts.sum(), other_sums.sum() / other_counts.sum()
    influence = (sums - mean * counts) / counts.sum() - (other_sums - other * other_counts) / other_counts.sum()
    return float(mean - other), influence_stderr(influence, (counts > 0) | (other_counts > 0))


def flatten_estimates(**estimates: tuple[float, float]) -> dict[str, float]:
    """Values and standard errors as `NAME` and `NAME_se`, as in JSON."""
    return {f"{name}{suffix}": pair[i] for name, pair in estimates.items() for i, suffix in enumerate(("", "_se"))}


def calibration_error(bins: NDArray[Any]) -> NDArray[np.float64]:
    """Expected calibration error from (…, bins, 3) sums of count, probability and hits; NaN where nothing counts."""
    count, probability, hits = np.moveaxis(bins, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.abs(probability - hits).sum(-1) / count.sum(-1), dtype=np.float64)


def rank_values(values: NDArray[Any]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    scipy_stats = import_extra("scipy.stats", "ranks need scipy", "eval")
    return np.asarray(scipy_stats.rankdata(values), dtype=np.float64)


# Correlation of two metrics over models. Training improves nearly every metric, so any two correlate over the
# checkpoints of a run: correlations within runs, and between runs at equal steps, say more.

MIN_POINTS = 3
MAX_EXACT_ORDERS = 5040  # the permutation test tries all orders of up to seven points
RANDOM_ORDERS = 9999  # and this many of more
NORMAL_975 = 1.959963984540054  # quantile of a 95% interval
ALL_MODELS, WITHIN_RUNS, AT_EQUAL_STEPS = "all models", "within runs", "at equal steps"


def correlate(
    x: Sequence[float],
    y: Sequence[float],
    among: str = ALL_MODELS,
    runs: Sequence[str] = (),
    steps: Sequence[int] = (),
    *,
    names: tuple[str, str] = ("x", "y"),
    seed: int = 0,
) -> dict[str, Any]:
    """Spearman's rho and Pearson's r of two metrics of models, with 95% intervals and p-values of permutation tests.

    All models: they count as independent, which checkpoints of one run are not. Within runs: ranks and means are each
    run's own, and the test permutes within runs (of two checkpoints rho is Kendall's tau). At equal steps: ranks and
    means are those of each step that all runs have, the test permutes whole runs, and intervals count runs.

    Intervals are those of Bonett and Wright (2000) for rho and of Fisher for r. Where all ranks agree rho is ±1 and its
    interval would be a point: it is computed half an exchange of neighbors short of that. Three points have [−1, 1].
    """
    if len(x) < MIN_POINTS:
        raise ValueError(f"no correlation over {len(x)} models: give at least {MIN_POINTS} models, such as checkpoints")
    for metric, values in zip(names, (x, y), strict=True):
        if not np.isfinite(values).all():
            raise ValueError(f"{metric} is not finite for every model: leave those models out")
    groups, independent, repeats = [list(range(len(x)))], len(x), 1
    if among == WITHIN_RUNS:
        every = [[i for i, each in enumerate(runs) if each == run] for run in dict.fromkeys(runs)]
        groups = [group for group in every if len(group) > 1]
        points = sum(map(len, groups))
        independent = points - len(groups) + 1
        if independent < MIN_POINTS:
            raise ValueError(
                f"no correlation within runs: of {len(every)} runs {len(groups)} have several checkpoints, "
                f"{points} in all; keep more of them (checkpoint.keep)"
            )
    elif among == AT_EQUAL_STEPS:
        places = {key: place for place, key in enumerate(zip(runs, steps, strict=True))}
        shared, independent = find_shared_steps(runs, steps), len(set(runs))
        if independent < MIN_POINTS or not shared:
            reason = f"there are {independent} runs" if independent < MIN_POINTS else "no step is in all runs"
            raise ValueError(f"no correlation at equal steps: {reason}; give {MIN_POINTS} runs with steps in common")
        groups, repeats = [[places[run, step] for run in dict.fromkeys(runs)] for step in shared], len(shared)
    orders = _permute([independent] if among == AT_EQUAL_STEPS else list(map(len, groups)), seed)
    orders = np.concatenate([orders + number * independent for number in range(repeats)], axis=1)
    result: dict[str, Any] = {"x": names[0], "y": names[1], "among": among, "points": orders.shape[1]}
    result |= {"groups": len(groups), "independent": independent}  # groups' means are subtracted; intervals count these
    for name, prefix in (("rho", ""), ("r", "r_")):
        a, b = (_center(np.asarray(values, dtype=np.float64), groups, name == "rho") for values in (x, y))
        for metric, centered in zip(names, (a, b), strict=True):
            if not np.any(np.abs(centered) > 1e-12):
                where = "" if among == ALL_MODELS else f" {among}"
                raise ValueError(f"{metric} is the same for all {len(a)} models{where}: it correlates with nothing")
        size = math.sqrt(float((a @ a) * (b @ b)))
        value = min(1.0, max(-1.0, float(a @ b) / size))
        # Exchanging the ranks of two neighbors changes the sum of products by 1, at equal steps by 1 at each of them.
        margin = repeats / (2 * size) if name == "rho" else 1e-12
        low, high = _correlation_interval(value, independent, name == "rho", margin)
        p_value = float(np.mean(np.abs(b[orders] @ a / size) >= abs(value) - 1e-9))
        result |= {name: value, f"{prefix}low": low, f"{prefix}high": high, f"{prefix}p_value": p_value}
    return result


def find_shared_steps(runs: Sequence[str], steps: Sequence[int]) -> list[int]:
    """The steps that all runs have."""
    pairs = set(zip(runs, steps, strict=True))
    return [step for step in dict.fromkeys(steps) if all((run, step) in pairs for run in set(runs))]


def _permute(sizes: Sequence[int], seed: int) -> NDArray[np.int64]:
    """Orders (k, n) of consecutive groups, each permuted in itself: all of them, or the identity and random ones."""
    starts = np.cumsum([0, *sizes[:-1]])
    if math.prod(map(math.factorial, sizes)) <= MAX_EXACT_ORDERS:
        each = [itertools.permutations(range(start, start + n)) for start, n in zip(starts, sizes, strict=True)]
        return np.array([list(itertools.chain(*order)) for order in itertools.product(*each)])
    rng = np.random.default_rng(seed)
    drawn = [rng.permuted(np.tile(np.arange(n), (RANDOM_ORDERS, 1)), axis=1) for n in sizes]
    orders = np.concatenate([part + start for part, start in zip(drawn, starts, strict=True)], axis=1)
    return np.concatenate([np.arange(sum(sizes))[None], orders])


def _center(values: NDArray[np.float64], groups: list[list[int]], is_ranked: bool) -> NDArray[np.float64]:
    """Values, or ranks within their group, minus their group's mean."""
    parts = [rank_values(values[group]) if is_ranked else values[group] for group in groups]
    return np.concatenate([part - part.mean() for part in parts])


def _correlation_interval(value: float, n: int, is_ranked: bool, margin: float) -> tuple[float, float]:
    """The 95% interval over n independent points; its center stays `margin` away from ±1."""
    if n <= MIN_POINTS:
        return -1.0, 1.0
    center = max(margin - 1, min(1 - margin, value))
    reach = NORMAL_975 * math.sqrt((1 + value * value / 2 if is_ranked else 1.0) / (n - 3))
    low, high = (math.tanh(math.atanh(center) + side) for side in (-reach, reach))
    return min(low, value), max(high, value)
