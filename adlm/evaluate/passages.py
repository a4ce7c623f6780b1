"""Passages of real text to stand beside samples: from beginnings of paragraphs, about as long as the samples are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np

PARAGRAPH = re.compile(r"(?:\A|\n[ \t]*\n)\s*(?=\S)")  # behind a blank line
SHORTEST = 32  # characters; what is shorter is a heading or a mark, too short to count n-grams in
LINE = re.compile(r"^(?=\S)", re.MULTILINE)


def passages(
    documents: Iterable[str],
    count: int,
    characters: int,
    *,
    seed: int = 0,
    is_fit: Callable[[str], bool] = lambda passage: True,
) -> list[str]:
    """So many passages of at most so many characters, drawn from the documents without overlap; the seed's order.

    A passage begins where a paragraph does (behind a blank line; in a document without any, at a line) and goes on over
    the next ones; a document that is shorter is one passage, if it has SHORTEST characters or a quarter of what is
    asked for (`shortest`). A rest of a document that is shorter than a passage is left out, and so is what `is_fit`
    refuses.
    """
    if characters < 1 or count < 1:
        raise ValueError(f"{count} passages of {characters} characters: give numbers from 1 on")
    least = shortest(characters)
    found = [passage for each in documents for passage in cut_up(each, characters) if len(passage) >= least]
    order = np.random.default_rng(seed).permutation(len(found))
    chosen = list(islice((found[number] for number in order if is_fit(found[number])), count))
    if len(chosen) < count:
        raise ValueError(
            f"the reference has {len(chosen)} passages of {least} to {characters:,} characters, and {count} are "
            "needed, two for every text that is judged (one set to compare with, one to stand beside): give more "
            "reference text, or judge fewer or shorter texts"
        )
    return chosen


def shortest(characters: int) -> int:
    """How many characters a passage has at least, where so many are asked for."""
    return min(SHORTEST, characters // 4)


def cut_up(document: str, characters: int) -> Iterator[str]:
    """The passages of one document."""
    if not document.strip():
        return
    if len(document) <= characters:
        yield document.strip()
        return
    # Lines of a text that is broken at a width are no paragraphs: most of them begin inside a sentence.
    begins, at = PARAGRAPH if re.search(r"\n[ \t]*\n", document.strip()) else LINE, 0
    while (match := begins.search(document, at)) and match.end() + characters <= len(document):
        at = match.end() + characters
        yield document[match.end() : at].rstrip()
