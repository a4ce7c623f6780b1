"""How varied texts are: entropy, distinct n-grams and repetition of token rows, each with a standard error over texts.

All three depend on how long the texts are, and distinct-n also on how many there are: the more is said, the more of it
has been said before. So samples and reference are comparable in equal amounts only: `cut_alike` makes them so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = Sequence[int] | Sequence[str] | NDArray[Any]  # the tokens of a text


@dataclass(frozen=True)
class Figure:
    """A figure of a set of texts, its standard error over texts, and the amount that it was computed from."""

    value: float
    stderr: float
    texts: int
    tokens: int


def entropies(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Each text's unigram entropy in nats, over its own tokens: the lineage's; of L tokens at most ln L."""
    pairs, _, sizes = pairs_of(rows, 1)
    share = pairs.counts / sizes[pairs.owner]
    return np.bincount(pairs.owner, weights=-share * np.log(share), minlength=len(sizes)).astype(np.float64)


def entropy(rows: Sequence[Row]) -> Figure:
    """The mean of the texts' `entropies`."""
    return _mean(entropies(rows), rows)


def repetitions(rows: Sequence[Row], n: int) -> NDArray[np.float64]:
    """Each text's share of n-grams that occurred in it before."""
    pairs, _, sizes = pairs_of(rows, n)
    return 1 - np.bincount(pairs.owner, minlength=len(sizes)) / sizes


def repetition(rows: Sequence[Row], n: int) -> Figure:
    """The mean of the texts' `repetitions`."""
    return _mean(repetitions(rows, n), rows)


def distinct(rows: Sequence[Row], n: int) -> Figure:
    """Distinct-n: how many different n-grams the set has, as a share of all its n-grams; none spans two texts.

    It falls as the set grows, so compare sets of equal amounts only. The standard error is the jackknife's, each text
    left out once. A bootstrap would be wrong here: it draws texts twice, which no set of samples does, and finds fewer
    distinct n-grams than there are.
    """
    pairs, all_different, sizes = pairs_of(rows, n)
    _needs_two(rows)
    is_only_here = np.bincount(pairs.ngram, minlength=all_different)[pairs.ngram] == 1
    lost = np.bincount(pairs.owner[is_only_here], minlength=len(sizes))  # with each text
    without = (all_different - lost) / (sizes.sum() - sizes)
    stderr = math.sqrt((len(sizes) - 1) * without.var())
    return Figure(float(all_different / sizes.sum()), stderr, len(rows), _tokens(rows))


def cut_alike(rows: Sequence[Row], reference: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Both sets cut to the same lengths: the longest text of one with the longest of the other, and so on down.

    The longer of each pair loses its end; the order of the texts stays.
    """
    if len(rows) != len(reference):
        raise ValueError(f"{len(rows)} texts and {len(reference)} to compare with: take equally many of both")
    cut: tuple[list[Row], list[Row]] = list(rows), list(reference)
    for one, other in zip(*(np.argsort([len(row) for row in each], kind="stable") for each in cut), strict=True):
        length = min(len(rows[one]), len(reference[other]))
        cut[0][one], cut[1][other] = rows[one][:length], reference[other][:length]
    return cut


@dataclass(frozen=True)
class Pairs:
    """Which n-gram occurs in which text, and how often there."""

    ngram: NDArray[np.int64]
    owner: NDArray[np.int64]
    counts: NDArray[np.int64]


def pairs_of(rows: Sequence[Row], n: int) -> tuple[Pairs, int, NDArray[np.int64]]:
    """The pairs of n-gram and text, how many different n-grams there are, and how many n-grams each text has."""
    _check(rows, n)
    lengths = np.array([len(row) for row in rows])
    owner = np.repeat(np.arange(len(rows)), lengths)
    _, tokens = np.unique(np.concatenate([np.asarray(row) for row in rows]), return_inverse=True)
    ngram, vocabulary = tokens, int(tokens.max()) + 1
    for k in range(1, n):  # numbered anew at every length, so that the codes stay small
        _, ngram = np.unique(ngram[:-1] * vocabulary + tokens[k:], return_inverse=True)
    is_inside = owner[: len(ngram)] == owner[n - 1 :]
    found, counts = np.unique(ngram[is_inside] * len(rows) + owner[: len(ngram)][is_inside], return_counts=True)
    _, number = np.unique(found // len(rows), return_inverse=True)
    return Pairs(number, found % len(rows), counts), int(number.max()) + 1, lengths - n + 1


def _check(rows: Sequence[Row], n: int) -> None:
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if len(rows) == 0:
        raise ValueError("there are no texts to measure: give at least two")
    if texts := [number for number, row in enumerate(rows) if isinstance(row, str | bytes)]:
        raise ValueError(f"text {texts[0]} is not tokenized: give its tokens, tokenizer.encode(text) or text.split()")
    if short := [number for number, row in enumerate(rows) if len(row) < n]:
        raise ValueError(
            f"{len(short)} of {len(rows)} texts are shorter than {n} tokens (text {short[0]} has "
            f"{len(rows[short[0]])}): leave them out and say so, or take a smaller n"
        )


def _needs_two(rows: Sequence[Row]) -> None:
    if len(rows) < 2:
        raise ValueError(f"a standard error needs at least 2 texts, got {len(rows)}")


def _mean(values: NDArray[np.float64], rows: Sequence[Row]) -> Figure:
    _needs_two(rows)
    stderr = values.std(ddof=1) / math.sqrt(len(values))
    return Figure(float(values.mean()), float(stderr), len(rows), _tokens(rows))


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(row) for row in rows)
