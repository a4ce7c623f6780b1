"""MAUVE (Pillutla et al., 2021) of two sets of texts by their features, with an interval.

The features are ours, the quantization is the package's, `mauve-text`, and so is the figure but in one case: of two
equal histograms it makes 0.75, because it sorts points of the curve that lie above each other as they come; here that
is 1. A figure depends on the judge
that gave the features, on how many texts there are and how long they are, and on the number of buckets: it says
something beside the figure of real text of the same amount, and nothing alone.

The interval covers which texts were drawn and the seed of k-means, not the choice of judge. For every seed the texts
are quantized once; then both histograms are drawn anew, which is a bootstrap over texts with the buckets held. Those
draws are noisier than the texts and their MAUVE is lower, so their quantiles are no interval; their spread, pooled over
seeds, is the standard error, and the interval is the figure with 1.96 of it on either side, cut to [0, 1].
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXTRA = "pip install 'adlm[mauve]'"
SCALE, POINTS = 5.0, 25  # the constant c, and points of the divergence curve: the package's own defaults
KMEANS = {"kmeans_explained_var": 0.9, "kmeans_num_redo": 5, "kmeans_max_iter": 500}
DRAWS, SPAN = 500, 1.96  # bootstraps a seed, and standard errors on either side: 95%
PER_BUCKET, LEAST_BUCKETS = 10, 10  # fewer of either is told

Histogram = NDArray[np.float64]


@dataclass(frozen=True)
class Mauve:
    """MAUVE as the mean over seeds, its standard error, and an interval over texts and seeds."""

    value: float
    stderr: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    buckets: int
    texts: tuple[int, int]  # of the reference, and of what stands beside it
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def settings_of(seeds: Sequence[int], buckets: int | None) -> dict[str, Any]:
    """Every choice that MAUVE depends on beside the features."""
    return {
        "buckets": buckets or f"texts of the smaller set / {PER_BUCKET}",
        "scale": SCALE,
        "curve_points": POINTS,
        **KMEANS,
        "seeds": list(seeds),
        "bootstrap_draws_a_seed": DRAWS,
        "interval": "95%, from the spread of a bootstrap over texts with the buckets held, pooled over seeds",
    }


def mauve_of(
    reference: NDArray[np.float32],
    features: NDArray[np.float32],
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    buckets: int | None = None,
) -> Mauve:
    """How close a set of texts is to a reference, from 0 to 1, by features (texts, width) of one judge."""
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise ImportError(f"MAUVE needs mauve-text: {EXTRA}") from error
    p, q = np.asarray(reference, dtype=np.float32), np.asarray(features, dtype=np.float32)
    least = min(len(p), len(q))
    if p.ndim != 2 or q.ndim != 2 or p.shape[1:] != q.shape[1:]:
        raise ValueError(f"features of shapes {p.shape} and {q.shape}: give (texts, width) of one judge for both")
    if least < 2:
        raise ValueError(f"MAUVE compares sets of texts, and got {len(p)} and {len(q)}: give at least 2 of each")
    if not seeds:
        raise ValueError("MAUVE needs a seed for k-means, and got none: give at least one")
    count = max(2, least // PER_BUCKET) if buckets is None else buckets
    if not 2 <= count <= len(p) + len(q):
        raise ValueError(f"buckets={count}: give at least 2, and at most the {len(p) + len(q)} texts that go into them")
    by_seed, drawn = [], []
    for seed in seeds:
        with without_advice():
            found = compute_mauve(
                p_features=p,
                q_features=q,
                num_buckets=count,
                mauve_scaling_factor=SCALE,
                divergence_curve_discretization_size=POINTS,
                seed=int(seed),
                verbose=False,
                **KMEANS,
            )
        by_seed.append(float(area(*hists(found))))
        rng = np.random.default_rng([int(seed), len(p), len(q)])
        again = [rng.multinomial(n, h / h.sum(), size=DRAWS) / n for n, h in zip((len(p), len(q)), hists(found))]
        drawn.append(area(*again))
    value, pooled = float(np.mean(by_seed)), np.concatenate(drawn)
    if not math.isfinite(value):
        raise FloatingPointError(f"MAUVE is {value}: the features are broken")
    stderr = float(pooled.std(ddof=1))
    return Mauve(
        value,
        stderr,
        max(0.0, value - SPAN * stderr),
        min(1.0, value + SPAN * stderr),
        tuple(by_seed),
        count,
        (len(p), len(q)),
        tuple(doubts(least, count)),
    )


@contextmanager
def without_advice() -> Iterator[None]:
    """Faiss, in C, asks for 39 texts a bucket at every seed: `doubts` says it once, all else on stderr is passed on."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            lines = said.read().decode("utf-8", "replace").splitlines()
            for line in lines:
                if not line.startswith("WARNING clustering"):
                    print(line, file=sys.stderr)


def hists(found: Any) -> tuple[Histogram, Histogram]:
    """The shares of both sets in the buckets, in float64."""
    return np.asarray(found.p_hist, dtype=np.float64), np.asarray(found.q_hist, dtype=np.float64)


def doubts(texts: int, buckets: int) -> list[str]:
    """What to say of a figure from few texts."""
    found = []
    if texts < PER_BUCKET * buckets:
        found.append(
            f"MAUVE has {buckets} buckets for {texts} texts a set: fewer than {PER_BUCKET} a bucket make it too low; "
            f"take at most {max(2, texts // PER_BUCKET)} buckets, or more texts"
        )
    if buckets < LEAST_BUCKETS:
        found.append(
            f"MAUVE has only {buckets} buckets ({texts} texts a set), too few to tell much apart: take at least "
            f"{PER_BUCKET * LEAST_BUCKETS} texts; its authors take 5,000"
        )
    return found


def area(p: Histogram, q: Histogram) -> NDArray[np.float64]:
    """MAUVE of histograms (…, buckets): the area under the curve of exp(−c·KL) of both to their mixtures."""
    share = np.linspace(1e-6, 1 - 1e-6, POINTS).reshape(-1, *[1] * p.ndim)
    mixed = share * p + (1 - share) * q
    x, y = (np.exp(-SCALE * kl(each, mixed)) for each in (q, p))  # (points, …)
    ends = np.zeros((1, *x.shape[1:]))
    # The curve runs from (0, 1) to (1, 0); either axis may be the one that is integrated over.
    x, y = np.concatenate([ends, x, ends + 1]), np.concatenate([ends + 1, y, ends])
    return (under(x, y) + under(y, x)) / 2


def kl(p: Histogram, q: Histogram) -> Histogram:
    """KL(p ‖ q) over the last axis."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * np.log(p / q), 0).sum(-1)


def under(x: Histogram, y: Histogram) -> NDArray[np.float64]:
    """The area under y(x), by trapezes along the first axis; points above each other from the highest down."""
    order = np.lexsort((-y, x), axis=0)
    x, y = np.take_along_axis(x, order, 0), np.take_along_axis(y, order, 0)
    return ((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum(0)
