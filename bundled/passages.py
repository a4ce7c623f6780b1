"""Cut books into passages of whole sentences, from one line to a full row; each becomes a row.

    python bundled/passages.py BOOKS.txt.gz … --out passages.jsonl

A model trained on them learns how a text of any length begins and ends. The cuts depend on the text alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

SEPARATOR = "<|endoftext|>"
MAX_CHARACTERS = 920  # about 240 tokens of the bundled tokenizer: nearly all passages fit into 254
MIN_CHARACTERS = 40
FULL_SHARE = 0.6  # of the passages are as long as fits, the others end earlier
ABBREVIATION = "".join(rf"(?<!\b{short}\.)" for short in ("Mr", "Mrs", "Dr", "St", "[A-Z]"))
SENTENCE = re.compile(rf"(?<=[.!?]){ABBREVIATION}([\"'”’)\]]*)\s+(?=[\"'“‘(\[]*[A-Z])")
CLAUSE = re.compile(r"(?<=[;:,])\s+")


def documents(path: Path) -> Iterator[str]:
    """Yield the books of a file, which are divided by separator lines."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        book: list[str] = []
        for line in lines:
            if line.strip() == SEPARATOR:
                yield "".join(book)
                book = []
            else:
                book.append(line)
        if book:
            yield "".join(book)


def sentences(paragraph: str, most: int = MAX_CHARACTERS) -> list[str]:
    """Split a paragraph into sentences with their closing quotes; one that is too long is cut at clauses."""
    marked = SENTENCE.sub(lambda match: match.group(1) + "\0", paragraph.strip())
    parts: list[str] = []
    for sentence in marked.split("\0"):
        if len(sentence) <= most:
            parts.append(sentence)
            continue
        part = ""
        for clause in CLAUSE.split(sentence):
            if len(clause) > most:  # without a pause: between words
                parts += [part] * bool(part) + textwrap.wrap(clause, most, break_on_hyphens=False)
                part = parts.pop()
                continue
            if part and len(part) + 1 + len(clause) > most:
                parts.append(part)
                part = ""
            part = f"{part} {clause}" if part else clause
        parts.append(part)
    return parts


def passages(book: str, rng: random.Random, most: int = MAX_CHARACTERS) -> Iterator[str]:
    """Yield the passages of a book in order: sentences are joined by a space, paragraphs by a line end."""

    def draw_budget() -> int:
        return most if rng.random() < FULL_SHARE else rng.randint(MIN_CHARACTERS, most)

    text, budget = "", draw_budget()
    for paragraph in re.split(r"\n\s*\n", book):
        if not is_prose(paragraph):
            if text:
                yield text
            text, budget = "", draw_budget()
            continue
        for number, sentence in enumerate(sentences(paragraph, most)):
            joint = "\n" if number == 0 else " "
            if text and len(text) + 1 + len(sentence) > budget:
                yield text
                text, budget = "", draw_budget()
            text = text + joint + sentence if text else sentence
    if text:
        yield text


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph reads as sentences: no title page, table, index or list of contents."""
    words = paragraph.split()
    if len(words) < 4 or paragraph.strip()[-1:] not in ".!?\"'”’)":
        return False
    letters = sum(character.isalpha() for character in paragraph)
    lower = sum(character.islower() for character in paragraph)
    return (
        letters > 0.7 * len("".join(words))
        and lower > 0.8 * letters
        and "\n" not in paragraph.strip()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("books", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--max-characters",
        type=int,
        default=MAX_CHARACTERS,
        help="characters of a passage [default: %(default)s]",
    )
    parser.add_argument(
        "--take", type=int, help="number of passages, taken evenly from all [default: all]"
    )
    options = parser.parse_args()
    all_passages = [
        passage
        for path in options.books
        for number, book in enumerate(documents(path))
        for passage in passages(
            book, random.Random(f"{path.name} {number}"), options.max_characters
        )
    ]
    taken = min(options.take or len(all_passages), len(all_passages))
    kept = [all_passages[number * len(all_passages) // taken] for number in range(taken)]
    lines = "".join(
        json.dumps({"text": passage}, ensure_ascii=False) + "\n" for passage in kept
    ).encode("utf-8")
    # mtime=0: equal passages give equal files.
    options.out.write_bytes(gzip.compress(lines, mtime=0) if options.out.suffix == ".gz" else lines)
    size = sum(map(len, kept))
    print(f"{len(kept):,} passages, {size:,} characters, {size / max(len(kept), 1):.0f} each")


if __name__ == "__main__":
    main()
