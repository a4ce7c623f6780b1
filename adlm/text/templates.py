"""Text with holes: what is given, where something is to be written, and the way from tokens back to text.

A template is a string in which `___` is a hole of a length to be found, `___{5}` one of five tokens and `___{2,8}` one
of two to eight; or a list of strings and `Hole`s, in which underscores are underscores.

Given text is cut into tokens piece by piece, and what comes back holds the given pieces themselves: they are the same
to the byte, whatever the tokenizer does to them, even where it has no token for them. Words of most vocabularies carry
the blank before them, so a blank just before a hole is no token of its own: the hole's first token must begin a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from adlm.data.tokenizers import Tokenizer

HOLE = re.compile(r"_{3,}(?:\{ *(\d+) *(?:, *(\d+) *)?\})?")
MAX_HOLE_TOKENS = 12  # tokens of a hole whose length is to be found
BLOCK = "░"
TEXT, WORD, ENDED = range(3)  # kinds of places: text; the first token of a word; text, or the end of it
CONTEXT = 4  # tokens before another that decide how it is spelled, with or without a blank
SPACED, CONTINUED = ("Ġ", "▁"), "##"  # how vocabularies write the blank before a word, and a word that goes on


@dataclass(frozen=True)
class Hole:
    """A hole of at least `min_tokens` and at most `max_tokens` tokens."""

    min_tokens: int = 1
    max_tokens: int = MAX_HOLE_TOKENS

    def __post_init__(self) -> None:
        low, high = self.min_tokens, self.max_tokens
        if not (isinstance(low, Integral) and isinstance(high, Integral)):
            raise ValueError(f"a hole's tokens are whole numbers, got {low!r} to {high!r}")
        if low < 1:
            raise ValueError(f"a hole has at least 1 token, got {self}: leave it out if nothing is to stand there")
        if high < low:
            raise ValueError(
                f"a hole's min_tokens must not be above its max_tokens, got {self}: write ___{{{high},{low}}} for "
                f"{high} to {low} tokens, and with min_tokens=… give Hole max_tokens=… too"
            )

    @classmethod
    def of_length(cls, length: int) -> Hole:
        """Make a hole of exactly so many tokens."""
        return cls(length, length)

    def __str__(self) -> str:
        low, high = self.min_tokens, self.max_tokens
        return f"___{{{low}}}" if low == high else f"___{{{low},{high}}}"


Pieces = tuple[str | Hole, ...]
Template = str | Sequence[str | Hole]


def parse_template(template: Template) -> Pieces:
    """The pieces of a template; neighbouring strings are one."""
    if not isinstance(template, Sequence):
        raise ValueError(f"a template is a string, or a list of strings and Holes; got {template!r}")
    joined: list[str | Hole] = []
    for piece in _split_template(template) if isinstance(template, str) else template:
        if not isinstance(piece, str | Hole):
            raise ValueError(f"a template is a string, or a list of strings and Holes; it holds {piece!r}")
        if isinstance(piece, Hole):
            joined.append(piece)
        elif joined and isinstance(last := joined[-1], str):
            joined[-1] = last + piece
        elif piece:
            joined.append(piece)
    return tuple(joined)


def _split_template(template: str) -> Iterator[str | Hole]:
    end = 0
    for match in HOLE.finditer(template):
        yield template[end : match.start()]
        least, most = match.groups()
        yield Hole() if least is None else Hole(int(least), int(most or least))
        end = match.end()
    yield template[end:]


def find_holes(pieces: Pieces) -> list[Hole]:
    """The holes, in order."""
    return [piece for piece in pieces if isinstance(piece, Hole)]


def set_hole_lengths(pieces: Pieces, lengths: Sequence[int]) -> Pieces:
    """The pieces with each hole of the length given for it."""
    left = iter(lengths)
    return tuple(Hole.of_length(next(left)) if isinstance(piece, Hole) else piece for piece in pieces)


class TokenClasses(NamedTuple):
    """What a vocabulary's tokens are, each (V,)."""

    special: Tensor  # no text: marks, the mask, ids without a token
    spaced: Tensor  # a word, or the beginning of one, and the blank before it
    continued: Tensor  # goes on with the word before it


@lru_cache(maxsize=8)
def classify_tokens(tokenizer: Tokenizer) -> TokenClasses:
    """The classes of a tokenizer's tokens."""
    size = tokenizer.vocab_size
    marks = {i for i, token in tokenizer.bpe.get_added_tokens_decoder().items() if token.special}
    marks |= {tokenizer.mask_id} | {i for i in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) if i is not None}
    names = [tokenizer.bpe.id_to_token(i) or "" for i in range(size)]
    spaced = [name.startswith(SPACED) and name[1:2] not in ("", *SPACED) for name in names]
    return TokenClasses(
        torch.tensor([name == "" or i in marks for i, name in enumerate(names)]),
        torch.tensor(spaced),
        # In a vocabulary that writes blanks, such a token is a run of hashes.
        torch.tensor([name.startswith(CONTINUED) and not any(spaced) for name in names]),
    )


@lru_cache(maxsize=8)
def banned_tokens(tokenizer: Tokenizer) -> Tensor:
    """The tokens (kinds, V) that may not stand in a place of each kind."""
    special, spaced, continued = classify_tokens(tokenizer)
    ended = special.clone()
    if tokenizer.eos_id is not None:
        ended[tokenizer.eos_id] = False
    word = special | ~spaced if bool(spaced.any()) else special | continued
    return torch.stack([special, word, ended])


@lru_cache(maxsize=8)
def has_continuation_marks(tokenizer: Tokenizer) -> bool:
    """Whether a mark says that a word goes on, and nothing that one begins."""
    return bool(classify_tokens(tokenizer).continued.any())


def joins_blanks(tokenizer: Tokenizer) -> bool:
    """Whether a word brings the blank before it: in its token, or because only a mark says that a word goes on."""
    return bool(classify_tokens(tokenizer).spaced.any()) or has_continuation_marks(tokenizer)


@dataclass(frozen=True)
class Span:
    """Where the tokens of a piece stand, and of a given piece what each of them adds to the text."""

    start: int
    end: int
    texts: tuple[str, ...] | None = None  # of a hole: None; of given text without tokens: the text

    @property
    def text(self) -> str:
        return "".join(self.texts or ())


@dataclass(frozen=True)
class Layout:
    """A row to be written."""

    tokenizer: Tokenizer
    spans: tuple[Span, ...]
    ids: tuple[int, ...]  # the mask in the holes
    is_fixed: tuple[bool, ...]
    kinds: tuple[int, ...]
    may_end: bool  # whether the text ends where its last hole holds an end token

    def __len__(self) -> int:
        return len(self.ids)

    def parts(self, ids: Sequence[int]) -> Iterator[tuple[int | None, str | None]]:
        """A row's text in order: each token's place and what it adds, None while it is hidden.

        A character that is spread over several tokens is its last one's. Given text for which the tokenizer has no
        token has no place. What begins, ends or pads a text adds nothing.
        """
        for span in self.spans:
            places: Iterable[int | None] = range(span.start, span.end) if span.end > span.start else (None,)
            yield from zip(places, self.written(span, ids) if span.texts is None else span.texts)

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """The text piece by piece, and whether each is given; hidden tokens add nothing."""
        return [
            (span.text, True) if span.texts is not None else ("".join(t or "" for t in self.written(span, ids)), False)
            for span in self.spans
        ]

    def written(self, span: Span, ids: Sequence[int]) -> list[str | None]:
        """What each token of a hole adds to the text; the blank before a word is in the given text already."""
        mask_id, eos_id, tokens = self.tokenizer.mask_id, self.tokenizer.eos_id, list(ids[span.start : span.end])
        found: list[str | None] = [None if token == mask_id else "" for token in tokens]
        stop = span.end
        if self.may_end and span is self.spans[-1] and eos_id in tokens:
            stop = span.start + tokens.index(eos_id)
        for start, end in _runs(ids, span.start, stop, mask_id):
            texts = decode_tokens(self.tokenizer, ids[:start], ids[start:end])
            if self.kinds[start] == WORD:
                first = next((i for i, text in enumerate(texts) if text), 0)
                texts[first] = texts[first].removeprefix(" ")
            found[start - span.start : end - span.start] = texts
        return found

    def text(self, ids: Sequence[int]) -> str:
        """The text of a row; hidden tokens as blocks."""
        return "".join(BLOCK if text is None else text for _, text in self.parts(ids))


def build_layout(
    pieces: Pieces, tokenizer: Tokenizer, *, begins: bool = True, ends: bool = True, may_end: bool = False
) -> Layout:
    """Pieces, each hole of one length, as a row between the tokens that begin and end a text (where it has them).

    With `may_end` the text may also end inside a hole that is its last piece.
    """
    ids: list[int] = []
    is_fixed: list[bool] = []
    kinds: list[int] = []
    spans: list[Span] = []

    def put(tokens: Sequence[int], fixed: bool, kind: int) -> None:
        ids.extend(tokens)
        is_fixed.extend([fixed] * len(tokens))
        kinds.extend([kind] * len(tokens))

    if begins and tokenizer.bos_id is not None:
        put([tokenizer.bos_id], True, TEXT)
    starts_word = False
    for number, piece in enumerate(pieces):
        start, is_last = len(ids), number == len(pieces) - 1
        if isinstance(piece, Hole):
            assert piece.min_tokens == piece.max_tokens, f"{piece} has no length yet"
            put([tokenizer.mask_id] * piece.min_tokens, False, ENDED if may_end and is_last else TEXT)
            if starts_word:
                kinds[start] = WORD
            starts_word = False
            spans.append(Span(start, len(ids)))
            continue
        starts_word = not is_last and piece.endswith(" ") and joins_blanks(tokenizer)
        tokens, texts = tokenize_piece(tokenizer, piece, len(piece) - starts_word)
        put(tokens, True, TEXT)
        spans.append(Span(start, len(ids), tuple(texts)))
    if ends and tokenizer.eos_id is not None:
        put([tokenizer.eos_id], True, TEXT)
    return Layout(tokenizer, tuple(spans), tuple(ids), tuple(is_fixed), tuple(kinds), may_end)


def tokenize_piece(tokenizer: Tokenizer, text: str, stop: int | None = None) -> tuple[list[int], list[str]]:
    """The tokens of a given text up to `stop`, and what each of them adds: together they are the whole text to the
    byte. Text without a token is one share."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of {text[:40]!r} is {text[error.start]!r}, half of a surrogate pair and no "
            "text: decode the text with errors='replace', or leave the character out"
        ) from error
    encoding = tokenizer.bpe.encode(text[:stop], add_special_tokens=False)
    marks = [0]
    for _, end in encoding.offsets[:-1]:
        marks.append(max(marks[-1], end))  # ends of one character's tokens repeat
    marks.append(len(text))
    return encoding.ids, [text[a:b] for a, b in pairwise(marks)] if text else []


def decode_tokens(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> list[str]:
    """What each of these tokens adds to the text, given the tokens before them."""
    hidden = next((i for i in range(len(before), 0, -1) if before[i - 1] == tokenizer.mask_id), 0)
    left = list(before[max(hidden, len(before) - CONTEXT) :])
    done, pending = _decode(tokenizer, left), []
    texts: list[str] = []
    for number, token in enumerate(ids, 1):
        pending.append(token)
        whole = _decode(tokenizer, [*left, *pending])
        if whole.endswith("\ufffd") and number < len(ids):  # bytes of a character that is not whole yet
            texts.append("")
            continue
        texts.append(whole[len(done) :] if whole.startswith(done) else _decode(tokenizer, pending))
        left, pending = [*left, *pending][-CONTEXT:], []
        done = _decode(tokenizer, left)
    return texts


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text that may begin inside a word: the mark that says so is none of it."""
    text = tokenizer.decode(ids, skip_special=True)
    return text.removeprefix(CONTINUED) if has_continuation_marks(tokenizer) else text


def _runs(ids: Sequence[int], start: int, stop: int, mask_id: int) -> Iterator[tuple[int, int]]:
    """Stretches of visible tokens."""
    begin = start
    for place in range(start, stop + 1):
        if place == stop or ids[place] == mask_id:
            if place > begin:
                yield begin, place
            begin = place + 1
