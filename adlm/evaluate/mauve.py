"""MAUVE (Pillutla et al., 2021) of two sets of texts from their features, with a 95% interval.

Quantization and curve are those of the package mauve-text, except that equal histograms have MAUVE 1 (0.75 there, as it
does not sort points with equal x). MAUVE depends on the feature model, the number and length of the texts and the
number of buckets: compare it only with the MAUVE of real text of the same amount.

The interval covers the draw of the texts and the seed of k-means: for every seed the texts are quantized once and both
histograms are resampled. Resampled histograms are noisier than the texts, so their MAUVE is biased downwards and its
quantiles are not an interval; its standard deviation, pooled over seeds, is the standard error.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.evaluate.results import Estimate

EXTRA = "pip install 'adlm[mauve]'"
SEEDS = (0, 1, 2, 3, 4)  # of k-means
SCALE, POINTS = 5.0, 25  # the constant c and the points of the divergence curve: the package's defaults
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
    about |= {"scale": SCALE, "curve_points": POINTS, "bootstrap_draws_a_seed": BOOTSTRAP_DRAWS}
    return about | {"interval": "95%, from the spread of a bootstrap over texts with fixed buckets, pooled over seeds"}


def measure_mauve(
    reference: NDArray[np.float32],
    features: NDArray[np.float32],
    *,
    seeds: Sequence[int] = SEEDS,
    buckets: int | None = None,
) -> MauveScore:
    """How close a set of texts is to a reference, from 0 to 1, from features (texts, width) of one model."""
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise ImportError(f"MAUVE needs mauve-text: {EXTRA}") from error
    p, q = np.asarray(reference, dtype=np.float32), np.asarray(features, dtype=np.float32)
    smaller = min(len(p), len(q))
    if p.ndim != 2 or q.ndim != 2 or p.shape[1:] != q.shape[1:]:
        raise ValueError(f"features of shapes {p.shape} and {q.shape}: give (texts, width) of one model for both")
    if smaller < 2:
        raise ValueError(f"MAUVE compares sets of texts, got {len(p)} and {len(q)}: give at least 2 of each")
    if not seeds:
        raise ValueError("MAUVE needs at least one seed for k-means, got none")
    count = max(2, smaller // TEXTS_PER_BUCKET) if buckets is None else buckets
    if not 2 <= count <= len(p) + len(q):
        raise ValueError(f"buckets={count}: give at least 2 and at most the number of texts, {len(p) + len(q)}")
    by_seed, resampled = [], []
    for seed in seeds:
        with hide_stderr():
            options = {"mauve_scaling_factor": SCALE, "divergence_curve_discretization_size": POINTS, **KMEANS}
            result = compute_mauve(p_features=p, q_features=q, num_buckets=count, seed=int(seed), **options)
        histograms = [np.asarray(each, dtype=np.float64) for each in (result.p_hist, result.q_hist)]
        by_seed.append(float(integrate_curve(*histograms)))
        rng = np.random.default_rng([int(seed), len(p), len(q)])
        draws = [
            rng.multinomial(n, h / h.sum(), size=BOOTSTRAP_DRAWS) / n for n, h in zip((len(p), len(q)), histograms)
        ]
        resampled.append(integrate_curve(*draws))
    value = float(np.mean(by_seed))
    if not math.isfinite(value):
        raise FloatingPointError(f"MAUVE is {value}: the features are not finite")
    stderr = float(np.concatenate(resampled).std(ddof=1))
    interval = (max(0.0, value - 1.96 * stderr), min(1.0, value + 1.96 * stderr))
    return MauveScore(Estimate(value, stderr, interval), tuple(by_seed), count, tuple(list_warnings(smaller, count)))


@contextmanager
def hide_stderr() -> Iterator[None]:
    """Context manager: drop what faiss writes to stderr from C, advice about few texts a bucket."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def list_warnings(texts: int, buckets: int) -> list[str]:
    """Warnings about a MAUVE from few texts."""
    warnings, size = [], f"{buckets} buckets for {texts} texts in a set"
    if texts < TEXTS_PER_BUCKET * buckets:
        most = max(2, texts // TEXTS_PER_BUCKET)
        warnings = [f"MAUVE is too low with {size}: use at most {most} buckets, or more texts"]
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
    return (integrate_trapezoids(x, y) + integrate_trapezoids(y, x)) / 2


def integrate_trapezoids(x: Histogram, y: Histogram) -> NDArray[np.float64]:
    """The area under y(x) along the first axis; points with equal x are sorted from the highest down."""
    order = np.lexsort((-y, x), axis=0)
    x, y = np.take_along_axis(x, order, 0), np.take_along_axis(y, order, 0)
    return ((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum(0)
