"""Reasoning problems as token ids: what every task makes and every arm reads."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

Word = TypeVar("Word", str, int)
# The markers of REASONING's layouts, the first ids of a whole-word vocabulary: question, reasoning, answer, end,
# begin and end of the slots, a slot.
MARKERS = ("<q>", "<r>", "<a>", "<e>", "<b>", "<x>", "<p>")


class Item(NamedTuple):
    """A problem with its reasoning, in token ids.

    On the edges 3→5, 0→3, 5→7, 4→6, "from 0: 6 or 7?": question `<q> 3 5 | 0 3 | 5 7 | 4 6 ? 0 6 7`, steps
    `0 3 ;`, `3 5 ;`, `5 7 ;`, anchors `3 5 7`, answer `7`, off_path `4 6`.
    """

    question: list[int]  # with <q> where the vocabulary has it, without any other marker
    steps: list[list[int]]  # in order, each with its separator
    anchors: list[int]  # the important tokens of the steps, in order: the labels of the slots
    answer: list[int]
    off_path: list[
        int
    ]  # tokens of the question like the anchors but not on the path, for the control


class Markers(NamedTuple):
    """The ids of the markers in a vocabulary."""

    question: int | None  # None: the question starts without a marker
    reasoning: int
    answer: int
    end: int
    begin_slots: int
    end_slots: int
    slot: int


WORD_MARKERS = Markers(*range(len(MARKERS)))


def index_words(words: Sequence[str]) -> dict[str, int]:
    """Return the ids of a whole-word vocabulary: the markers, then the task's words."""
    return {word: index for index, word in enumerate((*MARKERS, *words))}


def pad_rows(rows: Sequence[Sequence[int]], multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return rows (B, L) of one length, a multiple of a number, and which tokens are no padding."""
    sizes = np.array([len(row) for row in rows])[:, None]
    length = int(sizes.max())
    is_token = np.arange(length + -length % multiple) < sizes
    tokens = np.zeros(is_token.shape, np.int64)
    tokens[is_token] = np.fromiter(chain.from_iterable(rows), np.int64, int(sizes.sum()))
    return tokens, is_token


def draw_hops(
    rng: np.random.Generator, count: int, min_hops: int, max_hops: int, limit: int
) -> np.ndarray:
    """Draw the number of hops of every item, uniform in min_hops..max_hops."""
    if not 1 <= min_hops <= max_hops <= limit:
        raise ValueError(
            f"hops {min_hops} to {max_hops} are out of range: give 1 <= min <= max <= {limit}"
        )
    return rng.integers(min_hops, max_hops, count, endpoint=True)


def draw_symbols(
    rng: np.random.Generator, words: Iterable[Word], symbols: Sequence[str]
) -> dict[Word, str]:
    """Give every different word a symbol of its own, at random."""
    unique = list(dict.fromkeys(words))
    if len(unique) > len(symbols):
        raise ValueError(
            f"{len(unique)} different words such as {unique[0]!r}: expected at most {len(symbols)}"
        )
    return dict(zip(unique, rng.permutation(np.array(symbols)).tolist()))
