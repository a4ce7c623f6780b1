"""Packs token streams into rows of one length."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from adlm.data.tokenizers import Tokenizer

Ids = NDArray[Any]  # any integer type; the functions keep it


@dataclass(frozen=True)
class PackedRows:
    """Rows, their lengths where they are padded, and the position in the source where each ends."""

    rows: Ids  # (n, length)
    lengths: Ids | None  # (n,)
    ends: NDArray[
        np.int64
    ]  # (n, 3): whole documents before the end, tokens of the next one, bytes of text

    def __getitem__(self, part: slice) -> "PackedRows":
        return PackedRows(
            self.rows[part], None if self.lengths is None else self.lengths[part], self.ends[part]
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        lengths = [part.lengths for part in parts if part.lengths is not None]
        rows, ends = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("rows", "ends")
        )
        return cls(rows, np.concatenate(lengths) if lengths else None, ends)


def iterate_blocks(parts: Iterable[PackedRows], size: int) -> Iterator[PackedRows]:
    """Yield rows in blocks of `size` rows, of which the last may be smaller."""
    waiting: list[PackedRows] = []
    for part in parts:
        waiting.append(part)
        while sum(len(each.rows) for each in waiting) >= size:
            block = PackedRows.concatenate(waiting)
            yield block[:size]
            waiting = [block[size:]]
    if waiting and len((rest := PackedRows.concatenate(waiting)).rows):
        yield rest


class Packer:
    """Packs documents into rows; a packer that starts at a row's `ends`, and is fed from the document that they name,
    continues with the same rows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        length: int,
        *,
        is_wrapped: bool,
        start: Sequence[int] = (0, 0, 0),
    ) -> None:
        if length < 3:
            raise ValueError(f"length is {length}: expected at least 3 (BOS, one token, EOS)")
        if tokenizer.bos_id is None or tokenizer.eos_id is None:
            problem = f"tokenizer {tokenizer.name!r} has no BOS or no EOS token"
            raise ValueError(
                f"{problem}: name bos_token and eos_token in its tokenizer_config.json"
            )
        self.length, self.is_wrapped = length, is_wrapped
        self.bos_id, self.eos_id = tokenizer.bos_id, tokenizer.eos_id
        self.pad_id = tokenizer.eos_id if tokenizer.pad_id is None else tokenizer.pad_id
        self.documents, self.skip, self.bytes = start
        self.carry: Ids = np.empty(0, dtype=np.int64)
        self.inside = 0  # tokens (wrapped) or bytes (one document per row) of a document that has come in part

    def feed(self, ids: Ids, lengths: Ids, sizes: Ids, *, is_whole: bool = True) -> PackedRows:
        """Return the rows that these documents complete; if not `is_whole`, the next call continues the last one."""
        lengths, sizes = lengths.astype(np.int64), sizes.astype(np.int64)
        return (self._wrap if self.is_wrapped else self._frame)(ids, lengths, sizes, is_whole)

    def _wrap(self, ids: Ids, lengths: Ids, sizes: Ids, is_whole: bool) -> PackedRows:
        """Cut the stream of documents, each with an EOS behind it, into rows between BOS and EOS."""
        payload, n_ended = self.length - 2, len(lengths) - (not is_whole)
        spans = lengths + (np.arange(len(lengths)) < n_ended)  # with the EOS behind each
        inside, self.inside = self.inside, 0
        if not is_whole:
            self.inside = int(spans[-1]) + (0 if n_ended else inside)
        first = -len(
            self.carry
        )  # start of the unfinished row, relative to the first of these documents
        if self.skip >= spans[0] and not n_ended:
            self.skip -= int(spans[0])
            return PackedRows(
                np.empty((0, self.length), ids.dtype), None, np.empty((0, 3), np.int64)
            )
        if self.skip:
            first, self.bytes = self.skip, self.bytes - int(sizes[0] * self.skip // spans[0])
        stream = np.insert(ids, np.cumsum(lengths[:n_ended]), self.eos_id)[max(first, 0) :]
        stream = np.concatenate([self.carry.astype(ids.dtype), stream])
        count = len(stream) // payload
        rows = np.empty((count, self.length), dtype=ids.dtype)
        rows[:, 0], rows[:, -1] = self.bos_id, self.eos_id
        rows[:, 1:-1] = stream[: count * payload].reshape(count, payload)
        self.carry = stream[count * payload :].copy()

        # A row ends inside one document: the document's bytes are counted in proportion to its tokens.
        stops, bytes_before = np.cumsum(spans), self.bytes + np.cumsum(sizes) - sizes
        ends = first + payload * np.arange(1, count + 1)
        within = np.searchsorted(stops, ends)
        used = ends - (stops - spans)[within]
        is_end = (used == spans[within]) & (within < n_ended)
        text = bytes_before[within] + sizes[within] * used // spans[within]
        used += np.where(within == 0, inside, 0)
        marks = np.stack(
            [self.documents + within + is_end, np.where(is_end, 0, used), text], axis=1
        )
        self.documents, self.skip, self.bytes = (
            self.documents + n_ended,
            0,
            self.bytes + int(sizes.sum()),
        )
        return PackedRows(rows, None, marks)

    def _frame(self, ids: Ids, lengths: Ids, sizes: Ids, is_whole: bool) -> PackedRows:
        """Put each document into a row: BOS, the tokens that fit, EOS, padding."""
        payload = self.length - 2
        if len(self.carry):  # the first continues a document
            if len(self.carry) >= payload:  # which has filled its row
                ids, lengths[0], sizes[0] = ids[lengths[0] :], 0, 0
            ids = np.concatenate([self.carry.astype(ids.dtype), ids])
            lengths[0], sizes[0], self.carry = (
                lengths[0] + len(self.carry),
                sizes[0] + self.inside,
                self.carry[:0],
            )
        if not is_whole:
            self.carry, self.inside = ids[len(ids) - lengths[-1] :].copy(), int(sizes[-1])
            ids, lengths, sizes = ids[: len(ids) - lengths[-1]], lengths[:-1], sizes[:-1]
        kept, starts, place = (
            np.minimum(lengths, payload),
            np.cumsum(lengths) - lengths,
            np.arange(payload),
        )
        is_text = place < kept[:, None]
        rows = np.full((len(lengths), self.length), self.pad_id, dtype=ids.dtype)
        rows[:, 0] = self.bos_id
        rows[:, 1:-1][is_text] = ids[(starts[:, None] + place)[is_text]]
        rows[np.arange(len(lengths)), kept + 1] = self.eos_id
        text = self.bytes + np.cumsum(sizes * kept // np.maximum(lengths, 1))
        count = np.arange(1, len(lengths) + 1) + self.documents
        self.documents, self.bytes = (
            self.documents + len(lengths),
            int(text[-1]) if len(text) else self.bytes,
        )
        return PackedRows(rows, kept + 2, np.stack([count, np.zeros_like(count), text], axis=1))
