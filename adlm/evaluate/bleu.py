"""Self-BLEU (Zhu et al., 2018, Texygen): how much texts of a set say what others of it say. The lower, the more varied.

BLEU of every text against all the others, up to 4-grams of equal weight, with the brevity penalty of the other text
nearest in length. An order of n-grams without a match counts as a tenth of one (Chen and Cherry's first method, which
Texygen uses). It rises with the number of texts and with their length: compare equal amounts only.

All others are references, none is drawn: of the largest count of an n-gram among the others only two can matter, the
largest of all and, for the text that has it, the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adlm.evaluate.diversity import Figure, Row, entropies

ORDERS, NOTHING = 4, 0.1  # n-grams of up to so many tokens; what no match at all counts as
GROUPS = 10  # of texts, each left out once for the standard error


@dataclass(frozen=True)
class _Best:
    """How often an n-gram occurs in the text that has it most often, which that is, and in the next."""

    count: int
    owner: int
    second: int


def self_bleus(rows: Sequence[Row]) -> NDArray[np.float64]:
    """BLEU of each text against all others, from 0 to 1."""
    if len(rows) < 2:
        raise ValueError(f"self-BLEU compares texts with each other, and got {len(rows)}: give at least 2")
    entropies(rows)  # what is no row of tokens, or has none, is told there
    if short := [number for number, row in enumerate(rows) if len(row) < ORDERS]:
        raise ValueError(
            f"{len(short)} of {len(rows)} texts are shorter than {ORDERS} tokens (text {short[0]} has "
            f"{len(rows[short[0]])}), which BLEU takes: leave them out and say so"
        )
    plain = [row.tolist() if isinstance(row, np.ndarray) else list(row) for row in rows]
    lengths = np.array([len(row) for row in plain])
    logs = np.zeros(len(rows))
    for n in range(1, ORDERS + 1):
        counts = [Counter(zip(*(row[k:] for k in range(n)))) for row in plain]
        best = _largest(counts)
        for number, own in enumerate(counts):
            matched = 0
            for gram, count in own.items():
                top = best[gram]
                others = top.second if top.owner == number else top.count
                matched += min(count, others)
            logs[number] += math.log((matched or NOTHING) / (lengths[number] - n + 1)) / ORDERS
    return np.exp(logs + np.minimum(0, 1 - _nearest(lengths) / lengths))


def self_bleu(rows: Sequence[Row], *, groups: int = GROUPS) -> Figure:
    """The mean of `self_bleus`; its standard error is the jackknife's, a group of texts left out at a time.

    Texts are each other's references, so their BLEUs are not independent and their spread is no error of the mean.
    """
    values = self_bleus(rows)
    groups = min(groups, len(rows) // 2)
    without = [
        float(self_bleus([row for number, row in enumerate(rows) if number % groups != group]).mean())
        for group in range(groups)
        if groups > 1
    ]
    stderr = math.sqrt((groups - 1) * np.var(without)) if without else math.nan
    return Figure(float(values.mean()), stderr, len(rows), sum(len(row) for row in rows))


def _largest(counts: Sequence[Counter[tuple[object, ...]]]) -> dict[tuple[object, ...], _Best]:
    """For every n-gram the largest count of a text, whose it is, and the next largest."""
    top: dict[tuple[object, ...], tuple[int, int, int]] = {}
    for number, own in enumerate(counts):
        for gram, count in own.items():
            largest, owner, second = top.get(gram, (0, -1, 0))
            if count > largest:
                top[gram] = count, number, largest
            elif count > second:
                top[gram] = largest, owner, count
    return {gram: _Best(*found) for gram, found in top.items()}


def _nearest(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each text the length of another one that is nearest to its own; of two as near, the shorter."""
    order = np.argsort(lengths, kind="stable")
    ranked = lengths[order]
    below, above = np.r_[ranked[0], ranked[:-1]], np.r_[ranked[1:], ranked[-1]]
    below[0], above[-1] = above[0], below[-1]
    found = np.empty_like(lengths)
    found[order] = np.where(ranked - below <= above - ranked, below, above)
    if len(lengths) > 1:  # the ends have one neighbour only
        found[order[0]], found[order[-1]] = ranked[1], ranked[-2]
    return found
