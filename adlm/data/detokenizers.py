"""Detokenizers of the MDLM lineage: they undo the word splitting of benchmark texts.

They keep the lineage's quirks (` N N N ` becomes ` 1 N 1 ` in WikiText, a passage of LAMBADA begins with a line end):
perplexities on these sets are only comparable on the same characters. Each is a list of steps, applied in order.
"""

import re
from collections.abc import Callable

Detokenizer = Callable[[str], str]
# A string or pattern and its replacement; for a pattern also a string that every match contains: searching for that
# first is many times as fast, and most sentences have no brackets.
Step = tuple[str, str] | tuple[re.Pattern[str], str, str]

NUMBER_PASSES = (
    10  # replacements of ` N `: neighbors share their space, so one pass sees every second one
)


def _tighten(marks: str) -> list[Step]:
    """Remove the space before these marks where one follows them."""
    return [(f" {mark} ", f"{mark} ") for mark in marks]


def _enclose(opening: str, closing: str) -> Step:
    """Remove white space inside a pair, up to the nearest closing mark."""
    first, last = re.escape(opening), re.escape(closing)
    return re.compile(rf"{first}\s*([^{last}]*?)\s*{last}"), rf"{opening}\1{closing}", closing


def _enclose_words(opening: str, closing: str) -> Step:
    """Remove the spaces inside a pair that has exactly one on each side and no such mark within."""
    first, last = re.escape(opening), re.escape(closing)
    return (
        re.compile(rf"{first} ([^{first}{last}]+) {last}"),
        rf"{opening}\1{closing}",
        f" {closing}",
    )


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
    *[(" N ", " 1 ")] * NUMBER_PASSES,
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


DETOKENIZERS: dict[str, Detokenizer] = {
    "wikitext": lambda text: _apply(text, WIKITEXT),
    "ptb": lambda text: _apply(text, PENN_TREEBANK),
    "lm1b": lambda text: _apply(text, BILLION_WORDS),
    "lambada": lambda text: "\n" + text.replace("“", '"').replace("”", '"').strip(),
    "scientific_papers": lambda text: _apply(_apply(text, WIKITEXT), BILLION_WORDS),
}
