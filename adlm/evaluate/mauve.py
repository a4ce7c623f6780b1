"""MAUVE (Pillutla et al., 2021) of two sets of texts from their features, with a 95% interval.

Quantization and curve are those of the package mauve-text, except that equal histograms have MAUVE 1 (0.75 there, as it
does not sort points with equal x). The interval covers the draw of the texts and the seed of k-means: for every seed
the texts are quantized once and both histograms are resampled. Resampled histograms are noisier than the texts, so
their MAUVE is biased downwards; only its standard deviation, pooled over seeds, is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.evaluate.results import Estimate
from adlm.evaluate.scorer import hide_stderr

SEEDS = (0, 1, 2, 3, 4)  # of k-means
SCALE, POINTS = 5.0, 25  # the constant c and the points of the divergence curve: the package's defaults
CURVE = {"mauve_scaling_factor": SCALE, "divergence_curve_discretization_size": POINTS}
KMEANS = {"kmeans_explained_var": 0.9, "kmeans_num_redo": 5, "kmeans_max_iter": 500}
BOOTSTRAP_DRAWS = 500  # for each seed
TEXTS_PER_BUCKET, MIN_BUCKETS = 10, 10  # fewer give a warning

Histogram = NDArray[np.float64]


@dataclass(frozen=True)
class MauveScore:
    """MAUVE as the mean over seeds."""

    estimate: Estimate
    by_seed: tuple[float, ...]
    buckets: int
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return self.estimate.as_dict() | {"by_seed": list(self.by_seed), "buckets": self.buckets}


def describe_mauve(seeds: Sequence[int], buckets: int | None) -> dict[str, Any]:
    """Everything that MAUVE depends on except the features."""
    about = {"buckets": buckets or f"texts of the smaller set / {TEXTS_PER_BUCKET}", "seeds": list(seeds), **KMEANS}
    return about | {"scale": SCALE, "curve_points": POINTS, "bootstrap_draws_a_seed": BOOTSTRAP_DRAWS}


def measure_mauve(
    reference: NDArray[np.float32],
    features: NDArray[np.float32],
    *,
    seeds: Sequence[int] = SEEDS,
    buckets: int | None = None,
) -> MauveScore:
    """How close a set of texts is to a reference, from 0 to 1, from features (texts, width) of one model."""
    from mauve import compute_mauve

    p, q = reference, features
    sizes, smaller = (len(p), len(q)), min(len(p), len(q))
    count = max(2, smaller // TEXTS_PER_BUCKET) if buckets is None else buckets
    if not 2 <= count <= sum(sizes):
        raise ValueError(f"buckets={count}: give at least 2 and at most the number of texts, {sum(sizes)}")
    by_seed, resampled = [], []
    for seed in seeds:
        with hide_stderr():
            result = compute_mauve(p_features=p, q_features=q, num_buckets=count, seed=int(seed), **CURVE, **KMEANS)
        histograms = [np.asarray(each, dtype=np.float64) for each in (result.p_hist, result.q_hist)]
        by_seed.append(float(integrate_curve(*histograms)))
        rng = np.random.default_rng([int(seed), *sizes])
        draws = [rng.multinomial(n, h / h.sum(), size=BOOTSTRAP_DRAWS) / n for n, h in zip(sizes, histograms)]
        resampled.append(integrate_curve(*draws))
    value, stderr = float(np.mean(by_seed)), float(np.concatenate(resampled).std(ddof=1))
    interval = (max(0.0, value - 1.96 * stderr), min(1.0, value + 1.96 * stderr))
    return MauveScore(Estimate(value, stderr, interval), tuple(by_seed), count, tuple(list_warnings(smaller, count)))


def list_warnings(texts: int, buckets: int) -> list[str]:
    """Warnings about a MAUVE from few texts."""
    warnings, size, max_buckets = [], f"{buckets} buckets for {texts} texts in a set", max(2, texts // TEXTS_PER_BUCKET)
    if texts < TEXTS_PER_BUCKET * buckets:
        warnings.append(f"MAUVE is too low with {size}: use at most {max_buckets} buckets, or more texts")
    if buckets < MIN_BUCKETS:
        few = f"MAUVE has only {size}, too few to tell models apart"
        warnings.append(f"{few}: use at least {TEXTS_PER_BUCKET * MIN_BUCKETS} texts; its authors use 5,000")
    return warnings


def integrate_curve(p: Histogram, q: Histogram) -> NDArray[np.float64]:
    """MAUVE of histograms (…, buckets): the area under the curve of exp(−c·KL) of both to their mixtures."""
    share = np.linspace(1e-6, 1 - 1e-6, POINTS).reshape(-1, *[1] * p.ndim)
    mixture = share * p + (1 - share) * q
    with np.errstate(divide="ignore", invalid="ignore"):
        divergences = [np.where(each > 0, each * np.log(each / mixture), 0).sum(-1) for each in (q, p)]
    x, y = (np.exp(-SCALE * each) for each in divergences)  # (points, …)
    zeros = np.zeros((1, *x.shape[1:]))
    # The curve runs from (0, 1) to (1, 0); the mean of the integrals over both axes.
    x, y = np.concatenate([zeros, x, zeros + 1]), np.concatenate([zeros + 1, y, zeros])
    areas = []
    for along, height in ((x, y), (y, x)):  # points with equal x are sorted from the highest down
        order = np.lexsort((-height, along), axis=0)
        along, height = np.take_along_axis(along, order, 0), np.take_along_axis(height, order, 0)
        areas.append(((along[1:] - along[:-1]) * (height[1:] + height[:-1]) / 2).sum(0))
    return (areas[0] + areas[1]) / 2
