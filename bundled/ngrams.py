"""Unigram and bigram baselines: counted from training rows, scored on held-out rows.

Interpolated Kneser–Ney with discounts estimated from the counts of counts: nothing is tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adlm.data.batches import RowDataset, is_valid
from adlm.likelihood import NllEstimate, summarize_rows

Ids = NDArray[np.int64]
RowProgress = Callable[[int, int], None]  # rows done, rows in all
TOKENS_PER_CHUNK = 2**22


@dataclass(frozen=True, eq=False)
class Bigram:
    """How often tokens and pairs of neighbors in a row were counted, as a model of the next token.

    P(w | v) = max(c(v, w) − D, 0) / c(v) + (what was discounted) · P₁(w). D depends on c(v, w) being 1, 2 or more (Chen
    and Goodman's modified Kneser–Ney); P₁(w) is proportional to one more than the number of different tokens that were
    seen before w. The first token of a row has no predecessor: it is scored by the unigram model.
    """

    vocab_size: int
    tokens: Ids  # (vocab_size,): how often each was counted
    pairs: Ids  # v · vocab_size + w of every pair that was counted, in order
    counts: Ids  # how often each pair was

    @cached_property
    def unigram(self) -> NDArray[np.float64]:
        """The probabilities of the unigram model, one added to each count."""
        return (self.tokens + 1) / (self.tokens.sum() + self.vocab_size)

    @cached_property
    def continuation(self) -> NDArray[np.float64]:
        """P₁: the probability of a token behind one that it was not seen behind."""
        before = np.bincount(self.pairs % self.vocab_size, minlength=self.vocab_size)
        return (before + 1) / (before.sum() + self.vocab_size)

    @cached_property
    def discounts(self) -> NDArray[np.float64]:
        """What is taken from a pair that was counted 0, 1, 2, or 3 times and more."""
        n = np.bincount(np.minimum(self.counts, 5), minlength=5)[:5].astype(float)
        if not n[
            1:
        ].all():  # too little was counted to estimate from: a half, the middle of what is possible
            return np.array([0, 0.5, 0.5, 0.5])
        y = n[1] / (n[1] + 2 * n[2])
        # Kept inside: a discount of 0 would leave nothing to tokens that were never seen there.
        return np.array(
            [0, *(min(max(k - (k + 1) * y * n[k + 1] / n[k], 0.05), k - 0.05) for k in (1, 2, 3))]
        )

    @cached_property
    def _contexts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """By v: how often it was followed, and the sum of what is discounted behind it."""
        before = self.pairs // self.vocab_size
        taken = self.discounts[np.minimum(self.counts, 3)]
        followed = np.bincount(before, weights=self.counts, minlength=self.vocab_size)
        discounted = np.bincount(before, weights=taken, minlength=self.vocab_size)
        return followed.astype(np.float64), discounted.astype(np.float64)

    def probability(self, before: Ids, after: Ids) -> NDArray[np.float64]:
        """P(after | before), each of any one shape."""
        code = before * self.vocab_size + after
        place = np.minimum(np.searchsorted(self.pairs, code), max(len(self.pairs) - 1, 0))
        count = np.where(self.pairs[place] == code, self.counts[place], 0)
        followed, discounted = (each[before] for each in self._contexts)
        is_known = followed > 0
        followed, discounted = np.where(is_known, followed, 1), np.where(is_known, discounted, 1)
        own = count - self.discounts[np.minimum(count, 3)]
        return (own + discounted * self.continuation[after]) / followed

    def nll(self, rows: Ids) -> NDArray[np.float64]:
        """Nats of every token of rows (n, L)."""
        nats = self.unigram_nll(rows)
        nats[:, 1:] = -np.log(self.probability(rows[:, :-1], rows[:, 1:]))
        return nats

    def unigram_nll(self, rows: Ids) -> NDArray[np.float64]:
        """Nats of every token of rows (n, L) by the unigram model."""
        return -np.log(self.unigram[rows])


def count_bigrams(
    rows: RowDataset, vocab_size: int, *, on_rows: RowProgress | None = None
) -> Bigram:
    """Count tokens and pairs of neighbors in rows, padding left out; `on_rows` reports the progress."""
    tokens, pairs, counts = (np.zeros(size, dtype=np.int64) for size in (vocab_size, 0, 0))
    for row, valid in _read_chunks(rows, on_rows):
        tokens += np.bincount(row[valid], minlength=vocab_size)
        found, times = np.unique(
            (row[:, :-1] * vocab_size + row[:, 1:])[valid[:, 1:]], return_counts=True
        )
        pairs, place = np.unique(np.concatenate([pairs, found]), return_inverse=True)
        # Sums of whole numbers in float64 are exact up to 2⁵³.
        counts = np.bincount(place, weights=np.concatenate([counts, times])).astype(np.int64)
    return Bigram(vocab_size, tokens, pairs, counts)


def estimate_heldout_nll(
    nll: Callable[[Ids], NDArray[Any]], rows: RowDataset, *, ends_free: bool = False
) -> NllEstimate:
    """Nats per token over the tokens that a masked model's bound counts: all but padding, the first of a row too.

    `nll` gives the nats of every token of rows (n, L): `Bigram.nll` or `Bigram.unigram_nll`. With `ends_free` the first
    and the last token of a row still count, but cost nothing: a masked model sees where a row begins and ends, and
    where those tokens are always the same it has them for free.
    """
    nats, tokens = [], []
    for row, valid in _read_chunks(rows):
        each, lengths = np.where(valid, nll(row), 0), valid.sum(1)
        if ends_free:
            each[:, 0] = 0
            each[np.arange(len(row)), lengths - 1] = 0
        nats.append(each.sum(1))
        tokens.append(lengths)
    return summarize_rows(
        torch.from_numpy(np.concatenate(nats)), torch.from_numpy(np.concatenate(tokens))
    )


def _read_chunks(
    rows: RowDataset, on_rows: RowProgress | None = None
) -> Iterator[tuple[Ids, NDArray[np.bool_]]]:
    """The rows (n, L), a few at a time, and which of their tokens are no padding."""
    length, done = rows.fetch([0])[0].shape[1], 0
    for index in torch.arange(len(rows)).split(max(1, TOKENS_PER_CHUNK // length)):
        tokens, lengths = rows.fetch(index)
        valid = (
            torch.ones_like(tokens, dtype=torch.bool)
            if lengths is None
            else is_valid(lengths, length)
        )
        yield tokens.numpy(), valid.numpy()
        done += len(index)
        if on_rows:
            on_rows(done, len(rows))
