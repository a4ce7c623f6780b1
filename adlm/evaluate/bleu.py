"""Self-BLEU (Zhu et al., 2018, Texygen): how much texts of a set say what others of it say. The lower, the more varied.

BLEU of every text against all the others, up to 4-grams of equal weight, with the brevity penalty of the other text
nearest in length. An order of n-grams without a match counts as a tenth of one (Chen and Cherry's first method, which
Texygen uses); a text that has no token in common with another one has 0, as there. It rises with the number of texts
and with their length: compare equal amounts only.

All others are references, none is drawn: of the counts of an n-gram among the others only two can matter, the largest
of all and, for the text that has it, the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.evaluate.diversity import Figure, Row, entropies, pairs_of

ORDERS, NOTHING = 4, 0.1  # n-grams of up to so many tokens; what no match at all counts as
GROUPS = 10  # of texts, each left out once for the standard error


@dataclass(frozen=True)
class Counts:
    """How often texts have n-grams of one length: equal n-grams together, the most frequent in a text first."""

    ngram: NDArray[np.int64]
    owner: NDArray[np.int64]
    count: NDArray[np.int64]

    def matched(self, is_in: NDArray[np.bool_]) -> NDArray[np.float64]:
        """For each text, how many of its n-grams occur in another one of those that are in, as often there as here."""
        kept = is_in[self.owner]
        ngram, owner, count = self.ngram[kept], self.owner[kept], self.count[kept]
        is_first = np.r_[True, ngram[1:] != ngram[:-1]]
        first = np.flatnonzero(is_first)[is_first.cumsum() - 1]  # of each pair, where its n-gram's begin
        follows = np.minimum(first + 1, len(ngram) - 1)
        second = np.where((follows > first) & (ngram[follows] == ngram), count[follows], 0)
        others = np.where(owner == owner[first], second, count[first])
        return np.bincount(owner, weights=np.minimum(count, others), minlength=len(is_in)).astype(np.float64)


def counts_of(rows: Sequence[Row]) -> list[Counts]:
    """The n-grams of every order."""
    if len(rows) < 2:
        raise ValueError(f"self-BLEU compares texts with each other, and got {len(rows)}: give at least 2")
    entropies(rows)  # what is no row of tokens, or has none, is told there
    if short := [number for number, row in enumerate(rows) if len(row) < ORDERS]:
        raise ValueError(
            f"{len(short)} of {len(rows)} texts are shorter than {ORDERS} tokens (text {short[0]} has "
            f"{len(rows[short[0]])}), which BLEU takes: leave them out and say so"
        )
    found = []
    for n in range(1, ORDERS + 1):
        pairs, _, _ = pairs_of(rows, n)
        order = np.lexsort((-pairs.counts, pairs.ngram))
        found.append(Counts(pairs.ngram[order], pairs.owner[order], pairs.counts[order]))
    return found


def bleus(counts: Sequence[Counts], lengths: NDArray[Any], is_in: NDArray[np.bool_]) -> NDArray[np.float64]:
    """BLEU of each of the texts that are in against all others of them."""
    own = lengths[is_in]
    logs = np.zeros(len(own))
    shares_none = np.zeros(len(own), dtype=bool)
    for n, each in enumerate(counts, 1):
        matched = each.matched(is_in)[is_in]
        if n == 1:
            shares_none = matched == 0
        logs += np.log(np.where(matched > 0, matched, NOTHING) / (own - n + 1)) / ORDERS
    return np.where(shares_none, 0.0, np.exp(logs + np.minimum(0, 1 - _nearest(own) / own)))


def self_bleus(rows: Sequence[Row]) -> NDArray[np.float64]:
    """BLEU of each text against all others, from 0 to 1."""
    counts = counts_of(rows)
    return bleus(counts, np.array([len(row) for row in rows]), np.ones(len(rows), dtype=bool))


def self_bleu(rows: Sequence[Row], *, groups: int = GROUPS) -> Figure:
    """The mean of `self_bleus`; its standard error is the jackknife's, a group of texts left out at a time.

    Texts are each other's references, so their BLEUs are not independent and their spread is no error of the mean.
    """
    counts, lengths = counts_of(rows), np.array([len(row) for row in rows])
    groups, number = min(groups, len(rows) // 2), np.arange(len(rows))
    whole = float(bleus(counts, lengths, number >= 0).mean())
    without = [float(bleus(counts, lengths, number % groups != group).mean()) for group in range(groups) if groups > 1]
    stderr = math.sqrt((groups - 1) * np.var(without)) if without else math.nan
    return Figure(whole, stderr, len(rows), int(lengths.sum()))


def _nearest(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each text the length of another one that is nearest to its own; of two as near, the shorter."""
    order = np.argsort(lengths, kind="stable")
    ranked = lengths[order]
    below, above = np.r_[ranked[1], ranked[:-1]], np.r_[ranked[1:], ranked[-2]]  # the ends have one neighbour only
    found = np.empty_like(lengths)
    found[order] = np.where(np.abs(ranked - below) <= np.abs(above - ranked), below, above)
    return found
