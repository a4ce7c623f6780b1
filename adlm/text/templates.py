"""Templates: given text and holes, their tokens, and the way back from tokens to text.

Given text is tokenized piece by piece and returned as it is, byte for byte, even where the tokenizer has no token for
it. In most vocabularies a word's token includes the blank before it, so a blank just before a hole is no token of its
own: the hole's first token must begin a word.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from adlm.data.tokenizers import Tokenizer

HOLE = re.compile(r"_{3,}(?:\{ *(\d+) *(?:, *(\d+) *)?\}|(\{[^{}\n]*\}?))?")
MAX_HOLE_TOKENS = 12  # of a hole whose length the model chooses
BLOCK = "░"
TEXT, WORD, ENDED = range(3)  # kinds of positions: text; the first token of a word; text or its end
CONTEXT = 4  # tokens before another that decide whether its text has a blank
SPACED = ("Ġ", "▁")  # marks of vocabularies for a blank before a word
CONTINUED = "##"  # for the continuation of a word


@dataclass(frozen=True)
class Hole:
    """A hole of at least `min_tokens` and at most `max_tokens` tokens."""

    min_tokens: int = 1
    max_tokens: int = MAX_HOLE_TOKENS

    def __post_init__(self) -> None:
        low, high = self.min_tokens, self.max_tokens
        if low < 1:
            raise ValueError(
                f"a hole has at least 1 token, got {self}: remove the hole if it should be empty"
            )
        if high < low:
            raise ValueError(
                f"a hole's min_tokens is above its max_tokens in {self}: write {Hole(high, low)}"
            )

    @classmethod
    def of_length(cls, length: int) -> Self:
        """Make a hole of exactly so many tokens."""
        return cls(length, length)

    def __str__(self) -> str:
        low, high = self.min_tokens, self.max_tokens
        return f"___{{{low}}}" if low == high else f"___{{{low},{high}}}"


Pieces = tuple[str | Hole, ...]
Template = str | Sequence[str | Hole]


def parse_template(template: Template) -> Pieces:
    """Split a template into pieces, neighboring strings joined."""
    joined: list[str | Hole] = []
    for piece in _split_template(template) if isinstance(template, str) else template:
        if not isinstance(piece, str | Hole):
            raise ValueError(
                f"a template is a string, or a list of strings and Holes; it holds {piece!r}"
            )
        if isinstance(piece, Hole):
            joined.append(piece)
            continue
        last = joined[-1] if joined else None
        if isinstance(last, str):
            joined[-1] = last + piece
        elif piece:
            joined.append(piece)
    return tuple(joined)


def _split_template(template: str) -> Iterator[str | Hole]:
    end = 0
    for match in HOLE.finditer(template):
        yield template[end : match.start()]
        least, most, wrong = match.groups()
        if wrong is not None:
            forms = "___ for any length, ___{5} for five tokens or ___{2,8} for two to eight"
            remedy = "for a brace just after a hole, give a list of strings and adlm.Hole(…)"
            raise ValueError(f"{match[0][:40]!r} is not a hole: write {forms}; {remedy}")
        yield Hole() if least is None else Hole(int(least), int(most or least))
        end = match.end()
    yield template[end:]


def set_hole_lengths(pieces: Pieces, lengths: Sequence[int]) -> Pieces:
    """Replace each hole by one of the given length."""
    left = iter(lengths)
    return tuple(
        Hole.of_length(next(left)) if isinstance(piece, Hole) else piece for piece in pieces
    )


class TokenClasses(NamedTuple):
    """Classes of a vocabulary's tokens."""

    special: Tensor  # (V,): no text: marks, the mask, ids without a token
    banned: Tensor  # (kinds, V): what may not be at a position of each kind
    joins_blanks: (
        bool  # whether a word includes the blank before it, or continuations are marked instead
    )
    is_continued: bool  # whether continuations of a word are marked


@lru_cache(maxsize=8)
def classify_tokens(tokenizer: Tokenizer) -> TokenClasses:
    """Classify a tokenizer's tokens."""
    marks = {i for i, token in tokenizer.bpe.get_added_tokens_decoder().items() if token.special}
    marks |= {tokenizer.mask_id} | {
        i for i in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) if i is not None
    }
    names = [tokenizer.bpe.id_to_token(i) or "" for i in range(tokenizer.vocab_size)]
    special = torch.tensor([name == "" or i in marks for i, name in enumerate(names)])
    spaced = torch.tensor(
        [name.startswith(SPACED) and name[1:2] not in ("", *SPACED) for name in names]
    )
    # In a vocabulary that marks blanks, such a token is a run of hashes.
    continued = torch.tensor([name.startswith(CONTINUED) for name in names]) & ~spaced.any()
    ended = special.clone()
    if tokenizer.eos_id is not None:
        ended[tokenizer.eos_id] = False
    word = special | (~spaced if bool(spaced.any()) else continued)
    joins_blanks = bool((spaced | continued).any())
    return TokenClasses(
        special, torch.stack([special, word, ended]), joins_blanks, bool(continued.any())
    )


@dataclass(frozen=True)
class Span:
    """The positions of a piece's tokens and, of a given piece, what each token adds to the text."""

    start: int
    end: int
    texts: tuple[str, ...] | None = None  # of a hole: None; of given text without tokens: the text

    @property
    def text(self) -> str:
        return "".join(self.texts or ())


@dataclass(frozen=True)
class Layout:
    """A row to be filled."""

    tokenizer: Tokenizer
    spans: tuple[Span, ...]
    ids: tuple[int, ...]  # the mask in the holes
    is_fixed: tuple[bool, ...]
    kinds: tuple[int, ...]
    may_end: bool  # whether the text ends where its last hole holds an end token

    def __len__(self) -> int:
        return len(self.ids)

    def parts(self, ids: Sequence[int]) -> Iterator[tuple[int | None, str | None]]:
        """Yield each token's position and what it adds to the text, None while it is hidden.

        A character of several tokens belongs to the last one. Given text without a token has the position None. BOS,
        EOS and padding add nothing.
        """
        for span in self.spans:
            positions: Iterable[int | None] = (
                range(span.start, span.end) if span.end > span.start else (None,)
            )
            yield from zip(
                positions, self.decode_hole(span, ids) if span.texts is None else span.texts
            )

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Return the text by piece, and whether each is given; hidden tokens add nothing."""
        return [
            (
                "".join(text or "" for text in span.texts or self.decode_hole(span, ids)),
                span.texts is not None,
            )
            for span in self.spans
        ]

    def decode_hole(self, span: Span, ids: Sequence[int]) -> list[str | None]:
        """Return what each token of a hole adds to the text; a blank that is given before it is not repeated."""
        mask_id = self.tokenizer.mask_id
        eos_id = self.tokenizer.eos_id
        tokens = list(ids[span.start : span.end])
        texts: list[str | None] = [None if token == mask_id else "" for token in tokens]
        if self.may_end and span is self.spans[-1] and eos_id in tokens:
            tokens = tokens[: tokens.index(eos_id)]
        start = span.start
        for is_hidden, run in groupby(token == mask_id for token in tokens):
            end = start + len(list(run))
            if not is_hidden:
                visible = decode_tokens(self.tokenizer, ids[:start], ids[start:end])
                if self.kinds[start] == WORD:
                    first = next((i for i, text in enumerate(visible) if text), 0)
                    visible[first] = visible[first].removeprefix(" ")
                texts[start - span.start : end - span.start] = visible
            start = end
        return texts

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a row, hidden tokens as blocks."""
        return "".join(BLOCK if text is None else text for _, text in self.parts(ids))


def build_layout(
    pieces: Pieces, tokenizer: Tokenizer, *, ends: bool = True, may_end: bool = False
) -> Layout:
    """Lay pieces, each hole of one length, out as a row; with `may_end` it may end inside a hole that is its last."""
    spans: list[Span] = []
    row: list[tuple[int, bool, int]] = []  # each position's token, whether it is fixed, its kind
    if tokenizer.bos_id is not None:
        row.append((tokenizer.bos_id, True, TEXT))
    starts_word = False
    for number, piece in enumerate(pieces):
        start = len(row)
        is_last = number == len(pieces) - 1
        if isinstance(piece, Hole):
            assert piece.min_tokens == piece.max_tokens, f"{piece} has no length yet"
            kind = ENDED if may_end and is_last else TEXT
            row += [(tokenizer.mask_id, False, kind)] * piece.min_tokens
            if starts_word:
                row[start] = (tokenizer.mask_id, False, WORD)
            starts_word = False
            spans.append(Span(start, len(row)))
            continue
        is_spaced = not is_last and piece.endswith(" ")
        starts_word = is_spaced and classify_tokens(tokenizer).joins_blanks
        tokens, texts = tokenize_piece(tokenizer, piece, len(piece) - starts_word)
        row += [(token, True, TEXT) for token in tokens]
        spans.append(Span(start, len(row), tuple(texts)))
    if ends and tokenizer.eos_id is not None:
        row.append((tokenizer.eos_id, True, TEXT))
    ids, is_fixed, kinds = zip(*row) if row else ((), (), ())
    return Layout(tokenizer, tuple(spans), ids, is_fixed, kinds, may_end)


def tokenize_piece(
    tokenizer: Tokenizer, text: str, stop: int | None = None
) -> tuple[list[int], list[str]]:
    """Return the tokens of a text up to `stop`, and what each adds: joined they are the whole text, byte for byte."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"character {error.start} of {text[:40]!r} is {text[error.start]!r}, half of a surrogate pair"
        raise ValueError(
            f"{problem}: decode the text with errors='replace', or leave it out"
        ) from error
    encoding = tokenizer.bpe.encode(text[:stop], add_special_tokens=False)
    ends = accumulate(
        (end for _, end in encoding.offsets[:-1]), max
    )  # ends of one character's tokens repeat
    return encoding.ids, [text[a:b] for a, b in pairwise([0, *ends, len(text)])] if text else []


def decode_tokens(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> list[str]:
    """Return what each of these tokens adds to the text, given the tokens before them."""
    hidden = next((i for i in range(len(before), 0, -1) if before[i - 1] == tokenizer.mask_id), 0)
    left = list(before[max(hidden, len(before) - CONTEXT) :])
    done = _decode(tokenizer, left)
    pending: list[int] = []
    texts: list[str] = []
    for number, token in enumerate(ids, 1):
        pending.append(token)
        whole = _decode(tokenizer, [*left, *pending])
        if whole.endswith("\ufffd") and number < len(ids):  # bytes of an incomplete character
            texts.append("")
            continue
        texts.append(whole[len(done) :] if whole.startswith(done) else _decode(tokenizer, pending))
        left = [*left, *pending][-CONTEXT:]
        pending = []
        done = _decode(tokenizer, left)
    return texts


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode tokens that may begin inside a word, without its continuation mark."""
    text = tokenizer.decode(ids, skip_special=True)
    is_marked = text.startswith(CONTINUED) and classify_tokens(tokenizer).is_continued
    return text.removeprefix(CONTINUED) if is_marked else text
