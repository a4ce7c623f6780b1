"""Packs token streams into rows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.data.tokenizers import Tokenizer

Ids = NDArray[Any]  # any integer type; the functions keep it


def end_documents(ids: Ids, lengths: Ids, end_id: int) -> Ids:
    """Append `end_id` to each document; `ids` holds all documents, `lengths` the number of ids of each."""
    return np.insert(ids, np.cumsum(lengths), end_id)


def wrap_rows(stream: Ids, carry: Ids, length: int, *, bos_id: int, eos_id: int) -> tuple[Ids, Ids]:
    """Pack a stream into rows (n, length) of `length` − 2 tokens between BOS and EOS; return them and the rest.

    The stream continues the carry, so the rows do not depend on the pieces in which the stream arrives.
    """
    stream = np.concatenate([carry, stream]) if len(carry) else stream
    payload = length - 2
    count = len(stream) // payload
    rows = np.empty((count, length), dtype=stream.dtype)
    rows[:, 0], rows[:, -1] = bos_id, eos_id
    rows[:, 1:-1] = stream[: count * payload].reshape(count, payload)
    return rows, stream[count * payload :].copy()


def frame_rows(ids: Ids, lengths: Ids, length: int, *, bos_id: int, eos_id: int, pad_id: int) -> tuple[Ids, Ids]:
    """Put each document into a row (BOS, the tokens that fit, EOS, padding); return rows and their unpadded lengths."""
    kept = np.minimum(lengths, length - 2)
    rows = np.full((len(lengths), length), pad_id, dtype=ids.dtype)
    rows[:, 0] = bos_id
    place = np.arange(length - 2)
    is_text = place < kept[:, None]
    begins = np.cumsum(lengths) - lengths
    rows[:, 1:-1][is_text] = ids[(begins[:, None] + place)[is_text]]
    rows[np.arange(len(lengths)), kept + 1] = eos_id
    return rows, kept + 2


@dataclass(frozen=True)
class PackedRows:
    """Rows, their lengths where they are padded, and the position in the source where each ends."""

    rows: Ids  # (n, length)
    lengths: Ids | None  # (n,)
    ends: NDArray[np.int64]  # (n, 3): whole documents before the end, tokens of the next one, bytes of text

    def __getitem__(self, part: slice) -> PackedRows:
        return PackedRows(self.rows[part], None if self.lengths is None else self.lengths[part], self.ends[part])

    @classmethod
    def concatenate(cls, parts: Sequence[PackedRows]) -> PackedRows:
        lengths = [part.lengths for part in parts if part.lengths is not None]
        rows, ends = (np.concatenate([getattr(part, name) for part in parts]) for name in ("rows", "ends"))
        return cls(rows, np.concatenate(lengths) if lengths else None, ends)


@dataclass(frozen=True)
class Framing:
    """The length of a row and its special tokens."""

    length: int
    bos_id: int
    eos_id: int
    pad_id: int

    def __post_init__(self) -> None:
        if self.length < 3:
            raise ValueError(f"length is {self.length}: expected at least 3 (BOS, one token, EOS)")

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, length: int) -> Framing:
        """Frame rows with a tokenizer's special tokens; EOS pads where there is no padding token."""
        if tokenizer.bos_id is None or tokenizer.eos_id is None:
            raise ValueError(
                f"tokenizer {tokenizer.name!r} has no BOS or no EOS token: name bos_token and eos_token in a "
                "tokenizer_config.json next to its tokenizer.json"
            )
        pad_id = tokenizer.eos_id if tokenizer.pad_id is None else tokenizer.pad_id
        return cls(length, tokenizer.bos_id, tokenizer.eos_id, pad_id)


class Packer:
    """Packs documents into rows, any number at a time, keeping its position and the tokens of an unfinished row.

    The state after a row is that row's `ends`: a packer that starts there, and is fed from the document that `ends`
    names, continues with the same rows.
    """

    def __init__(self, framing: Framing, *, is_wrapped: bool, start: Sequence[int] = (0, 0, 0)) -> None:
        self.framing, self.is_wrapped = framing, is_wrapped
        self.documents, self.skip, self.bytes = start
        self.carry: Ids = np.empty(0, dtype=np.int64)
        self.inside = 0  # tokens (wrapped) or bytes (one document per row) of a document that has come in part

    def feed(self, ids: Ids, lengths: Ids, sizes: Ids, *, is_whole: bool = True) -> PackedRows:
        """Return the rows that these documents, at least one, complete; `sizes` are the documents' bytes.

        If not `is_whole`, the last is a part of a document, which the next call continues with its first.
        """
        lengths, sizes = lengths.astype(np.int64), sizes.astype(np.int64)
        return (self._wrap if self.is_wrapped else self._frame)(ids, lengths, sizes, is_whole)

    def _wrap(self, ids: Ids, lengths: Ids, sizes: Ids, is_whole: bool) -> PackedRows:
        form, payload = self.framing, self.framing.length - 2
        n_ended = len(lengths) - (not is_whole)
        spans = lengths + (np.arange(len(lengths)) < n_ended)  # with the EOS behind each
        inside, self.inside = self.inside, 0
        if not is_whole:
            self.inside = int(spans[-1]) + (0 if n_ended else inside)
        first = -len(self.carry)  # start of the unfinished row, relative to the first of these documents
        if self.skip >= spans[0] and not n_ended:
            self.skip -= int(spans[0])
            return PackedRows(np.empty((0, form.length), ids.dtype), None, np.empty((0, 3), np.int64))
        if self.skip:
            first, self.bytes = self.skip, self.bytes - int(sizes[0] * self.skip // spans[0])
        stream = end_documents(ids, lengths[:n_ended], form.eos_id)[max(first, 0) :]
        rows, self.carry = wrap_rows(
            stream, self.carry.astype(ids.dtype), form.length, bos_id=form.bos_id, eos_id=form.eos_id
        )

        # A row ends inside one document: the document's bytes are counted in proportion to its tokens.
        stops, bytes_before = np.cumsum(spans), self.bytes + np.cumsum(sizes) - sizes
        ends = first + payload * np.arange(1, len(rows) + 1)
        within = np.searchsorted(stops, ends)
        used = ends - (stops - spans)[within]
        is_end = (used == spans[within]) & (within < n_ended)
        text = bytes_before[within] + sizes[within] * used // spans[within]
        used += np.where(within == 0, inside, 0)
        marks = np.stack([self.documents + within + is_end, np.where(is_end, 0, used), text], axis=1)
        self.documents, self.skip, self.bytes = self.documents + n_ended, 0, self.bytes + int(sizes.sum())
        return PackedRows(rows, None, marks)

    def _frame(self, ids: Ids, lengths: Ids, sizes: Ids, is_whole: bool) -> PackedRows:
        form = self.framing
        if len(self.carry):  # the first continues a document
            if len(self.carry) >= form.length - 2:  # which has filled its row
                ids, lengths[0], sizes[0] = ids[lengths[0] :], 0, 0
            ids = np.concatenate([self.carry.astype(ids.dtype), ids])
            lengths[0], sizes[0], self.carry = lengths[0] + len(self.carry), sizes[0] + self.inside, self.carry[:0]
        if not is_whole:
            self.carry, self.inside = ids[len(ids) - lengths[-1] :].copy(), int(sizes[-1])
            ids, lengths, sizes = ids[: len(ids) - lengths[-1]], lengths[:-1], sizes[:-1]
        if not len(lengths):
            return PackedRows(np.empty((0, form.length), ids.dtype), lengths, np.empty((0, 3), np.int64))
        rows, kept = frame_rows(ids, lengths, form.length, bos_id=form.bos_id, eos_id=form.eos_id, pad_id=form.pad_id)
        text = self.bytes + np.cumsum(sizes * (kept - 2) // np.maximum(lengths, 1))
        count = np.arange(1, len(lengths) + 1) + self.documents
        self.documents, self.bytes = self.documents + len(lengths), int(text[-1])
        return PackedRows(rows, kept, np.stack([count, np.zeros_like(count), text], axis=1))
