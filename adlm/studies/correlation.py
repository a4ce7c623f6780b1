"""How two figures of several models go together, over all of them, within runs and at equal steps.

Training makes nearly every figure better, so over the checkpoints of a run any two of them go together. Runs at one
step are what says more. Spearman's rho takes ranks, Pearson's r the figures themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST = 3  # points below which nothing is said
EXACT = 5040  # orders that are all tried: those of seven points
ORDERS = 9999  # tried at random where there are more
NORMAL = 1.959963984540054  # of a 95% interval
ALL, WITHIN, EQUAL = "all models", "within runs", "at equal steps"
Values = NDArray[np.float64]
Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Correlation:
    """How y goes together with x over models. Intervals are of 95%; p values of orders at least as far from 0."""

    x: str
    y: str
    among: str  # all models; within runs, each run's mean taken out; at equal steps, each step's mean taken out
    points: int
    groups: int  # whose means are taken out
    independent: int  # points that the intervals count
    rho: float  # Spearman's
    low: float
    high: float
    p_value: float
    r: float  # Pearson's
    r_low: float
    r_high: float
    r_p_value: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def correlate(
    x: Sequence[float], y: Sequence[float], names: tuple[str, str] = ("x", "y"), seed: int = 0
) -> Correlation:
    """Over all models: Spearman's rho and Pearson's r, each with an interval and a permutation test; at least three.

    Intervals are those of Bonett and Wright (2000) and of Fisher. Both take models for independent, which checkpoints
    of one run are not. Where all ranks agree rho is ±1 and its interval would be a point: it is computed half an
    exchange of neighbours, as the test makes them, short of it. Three points leave intervals at [−1, 1].
    """
    _check(x, y, names)
    return _found(x, y, names, ALL, [range(len(x))], len(x), _orders([range(len(x))], seed))


def within_runs(
    x: Sequence[float], y: Sequence[float], runs: Sequence[str], names: tuple[str, str] = ("x", "y"), seed: int = 0
) -> Correlation:
    """As runs go on: every run's own mean is taken out; a test exchanges a run's checkpoints with each other.

    Ranks are those within a run: of few checkpoints they say less, and rho is nearer to 0 (of two, Kendall's tau). The
    interval takes checkpoints for independent but for the means; they are less.
    """
    _check(x, y, names)
    groups = [group for group in _by(runs) if len(group) > 1]
    points = sum(map(len, groups))
    if points - len(groups) + 1 < LEAST:
        raise ValueError(
            f"within runs nothing is said: of {len(set(runs))} runs {len(groups)} have several checkpoints, {points} "
            "in all (checkpoint.keep says how many a run keeps)"
        )
    return _found(x, y, names, WITHIN, groups, points - len(groups) + 1, _orders(groups, seed))


def at_equal_steps(
    x: Sequence[float],
    y: Sequence[float],
    runs: Sequence[str],
    steps: Sequence[int],
    names: tuple[str, str] = ("x", "y"),
    seed: int = 0,
) -> Correlation:
    """Between runs, training time held: the mean of each step that all runs have is taken out.

    Ranks are those at one step. The test exchanges whole runs, and the interval counts runs: the checkpoints of one are
    one point that was looked at several times.
    """
    _check(x, y, names)
    places = {(run, step): place for place, (run, step) in enumerate(zip(runs, steps, strict=True))}
    every, shared = list(dict.fromkeys(runs)), shared_steps(runs, steps)
    if len(every) < LEAST or not shared:
        why = f"there are {len(every)} runs" if len(every) < LEAST else "there is no step that all of them have kept"
        raise ValueError(
            f"at equal steps nothing is said: {why}; give at least {LEAST} runs with checkpoints at the same steps"
        )
    groups = [[places[run, step] for run in every] for step in shared]
    exchanged = _orders([range(len(every))], seed)
    orders = np.concatenate([exchanged + number * len(every) for number in range(len(shared))], axis=1)
    return _found(x, y, names, EQUAL, groups, len(every), orders)


def shared_steps(runs: Sequence[str], steps: Sequence[int]) -> list[int]:
    """The steps that all runs have."""
    known, every = set(zip(runs, steps, strict=True)), set(runs)
    return [step for step in dict.fromkeys(steps) if all((run, step) in known for run in every)]


def midranks(values: NDArray[Any]) -> Values:
    """Ranks from 1 on; equal values share the middle of theirs."""
    ordered = np.sort(values)
    both = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    return np.asarray((both + 1) / 2, dtype=np.float64)


def require_points(n: int) -> None:
    """Refuse to say something of too few models."""
    if n < LEAST:
        raise ValueError(
            f"a correlation over {n} points says nothing: give at least {LEAST} models, such as the checkpoints of a "
            "run (checkpoint.keep says how many it keeps) or runs of different recipes"
        )


def _check(x: Sequence[float], y: Sequence[float], names: tuple[str, str]) -> None:
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values of {names[0]} and {len(y)} of {names[1]}: give one of each for every model")
    require_points(len(x))
    if bad := [name for name, values in zip(names, (x, y), strict=True) if not np.isfinite(values).all()]:
        raise ValueError(f"{bad[0]} is not finite for every model: a correlation needs it of each")


def _by(labels: Sequence[str]) -> list[list[int]]:
    """The places of each label."""
    found: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        found.setdefault(label, []).append(place)
    return list(found.values())


def _orders(groups: Groups, seed: int) -> NDArray[np.int64]:
    """Orders (k, n) of the places of all groups one after the other, each group in itself: every one, or some."""
    sizes = [len(group) for group in groups]
    starts = np.cumsum([0, *sizes[:-1]])
    if math.prod(map(math.factorial, sizes)) <= EXACT:
        own = [itertools.permutations(range(start, start + n)) for start, n in zip(starts, sizes, strict=True)]
        return np.array([list(itertools.chain(*each)) for each in itertools.product(*own)])
    rng = np.random.default_rng(seed)
    drawn = [rng.permuted(np.tile(np.arange(n), (ORDERS, 1)), axis=1) for n in sizes]
    own_first = np.arange(sum(sizes))[None]  # the order that was found is one of those that could have been
    return np.concatenate(
        [own_first, np.concatenate([d + start for d, start in zip(drawn, starts, strict=True)], axis=1)]
    )


def _found(
    x: Sequence[float],
    y: Sequence[float],
    names: tuple[str, str],
    among: str,
    groups: Groups,
    independent: int,
    orders: NDArray[np.int64],
) -> Correlation:
    figures: list[float] = []
    for is_ranked in (True, False):
        mine, theirs = (_centred(np.asarray(values, dtype=np.float64), groups, is_ranked) for values in (x, y))
        if flat := [name for name, each in zip(names, (mine, theirs), strict=True) if not np.any(np.abs(each) > 1e-12)]:
            where = "" if among == ALL else f" {among}"
            raise ValueError(f"{flat[0]} is the same for all {len(mine)} models{where}: it goes together with nothing")
        size = math.sqrt(float((mine @ mine) * (theirs @ theirs)))
        value = min(1.0, max(-1.0, float(mine @ theirs) / size))
        by_chance = theirs[orders] @ mine / size
        p_value = float(np.mean(np.abs(by_chance) >= abs(value) - 1e-9))
        # Two neighbours' ranks that change places change the sum of products by 1, and at equal steps at each of them.
        short = (len(groups) if among == EQUAL else 1) / (2 * size) if is_ranked else 1e-12
        figures += [value, *_interval(value, independent, is_ranked, short), p_value]
    return Correlation(*names, among, sum(map(len, groups)), len(groups), independent, *figures)


def _centred(values: Values, groups: Groups, is_ranked: bool) -> Values:
    """Values, or ranks within their group, less their group's mean."""
    parts = [midranks(values[list(group)]) if is_ranked else values[list(group)] for group in groups]
    return np.concatenate([part - part.mean() for part in parts])


def _interval(value: float, n: int, is_ranked: bool, short: float) -> tuple[float, float]:
    """95%, of n independent points; its middle stays `short` of ±1."""
    if n <= LEAST:
        return -1.0, 1.0
    middle = max(short - 1, min(1 - short, value))
    reach = NORMAL * math.sqrt((1 + value * value / 2 if is_ranked else 1.0) / (n - 3))
    low, high = (math.tanh(math.atanh(middle) + side) for side in (-reach, reach))
    return min(low, value), max(high, value)
