"""The lineage's clean-ups: text that was split into words for a benchmark, put together again as people write it.

They keep the lineage's quirks (` N N N ` becomes ` 1 N 1 ` in WikiText, a passage of LAMBADA begins with a line end):
figures on these sets are only comparable on the same characters. Each is a list of steps, applied in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Detokenizer = Callable[[str], str]
# What is looked for, as it stands or a pattern; what takes its place; and of a pattern, what no match is without:
# looking for that first is many times as fast, and most sentences have no brackets.
Step = tuple[str, str] | tuple[re.Pattern[str], str, str]

INNERMOST = 10  # how often ` N ` is looked for: neighbours share their blank, so one pass sees every second one


def _tighten(marks: str) -> list[Step]:
    """No blank before these marks where one follows them."""
    return [(f" {mark} ", f"{mark} ") for mark in marks]


def _enclose(opening: str, closing: str) -> Step:
    """No white space inside a pair, whatever stands between, up to the nearest closing mark."""
    first, last = re.escape(opening), re.escape(closing)
    return re.compile(rf"{first}\s*([^{last}]*?)\s*{last}"), rf"{opening}\1{closing}", closing


def _enclose_words(opening: str, closing: str) -> Step:
    """No blank inside a pair that has exactly one on each side and no such mark within."""
    first, last = re.escape(opening), re.escape(closing)
    return re.compile(rf"{first} ([^{first}{last}]+) {last}"), rf"{opening}\1{closing}", f" {closing}"


WIKITEXT: list[Step] = [
    ("s '", "s'"),
    *((f" @{mark}@ ", mark) for mark in "-,."),
    *_tighten(":;.!?,"),
    *(_enclose(*pair) for pair in ("()", "[]", "{}", '""', "''")),
    *((" ".join("=" * n), "=" * n) for n in (4, 3, 2)),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]

PENN_TREEBANK: list[Step] = [
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    *[(" N ", " 1 ")] * INNERMOST,
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
]

BILLION_WORDS: list[Step] = [
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1", " '"),
    (re.compile(r" (\w+) \. "), r" \1. ", " . "),
    (re.compile(r" (\w+) \.$"), r" \1.", " ."),
    (" ? ", "? "),
    (re.compile(r" \?$"), "?", " ?"),
    (" ! ", "! "),
    (re.compile(r" !$"), "!", " !"),
    *_tighten(",:;"),
    (" / ", "/"),
    *(_enclose_words(*pair) for pair in ('""', "''", "()", "[]")),
    ("$ ", "$"),
    ("£ ", "£"),
]


def _apply(text: str, steps: list[Step]) -> str:
    for step in steps:
        if len(step) == 2:
            text = text.replace(*step)
        elif step[2] in text:
            text = step[0].sub(step[1], text)
    return text


def wikitext(text: str) -> str:
    """WikiText: ` @-@ `, blanks before marks, headings, line ends."""
    return _apply(text, WIKITEXT)


def ptb(text: str) -> str:
    """Mikolov's Penn Treebank: contractions, `N` for a number, `<unk>`."""
    return _apply(text, PENN_TREEBANK)


def lm1b(text: str) -> str:
    """The One Billion Word benchmark: blanks around marks, within quotation marks and brackets."""
    return _apply(text, BILLION_WORDS)


def lambada(text: str) -> str:
    """LAMBADA: straight quotation marks, and one line end before the passage."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


def scientific_papers(text: str) -> str:
    """arXiv and PubMed articles: WikiText's steps, then those of the One Billion Word benchmark."""
    return lm1b(wikitext(text))


DETOKENIZERS: dict[str, Detokenizer] = {
    "wikitext": wikitext,
    "ptb": ptb,
    "lm1b": lm1b,
    "lambada": lambada,
    "scientific_papers": scientific_papers,
}


def find_detokenizer(name: str) -> Detokenizer:
    """The clean-up of this name."""
    if name not in DETOKENIZERS:
        raise ValueError(f"no detokenizer is called {name!r}; there are {', '.join(DETOKENIZERS)}")
    return DETOKENIZERS[name]
