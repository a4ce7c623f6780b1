"""From a stream of tokens to rows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[Any]  # of some integer type, which the functions keep


def pack_rows(tokens: Sequence[int] | Tensor, length: int, *, stride: int | None = None) -> Tensor:
    """Rows (n, length) that begin every `stride` tokens (default: `length`, so that none overlap).

    A tail that does not fill a row is left out. The rows depend on the tokens alone, not on workers or batches.
    """
    stream = torch.as_tensor(tokens, dtype=torch.int64)
    stride = length if stride is None else stride
    if length < 1 or stride < 1:
        raise ValueError(f"length and stride must be at least 1, got {length} and {stride}")
    if stream.dim() != 1 or stream.numel() < length:
        raise ValueError(f"one row takes {length} tokens in one stream, got a shape of {tuple(stream.shape)}")
    return stream.unfold(0, length, stride).contiguous()


def end_documents(ids: Ids, lengths: Ids, end_id: int) -> Ids:
    """The documents' ids (all in one array, `lengths` says how many each has), each followed by `end_id`."""
    return np.insert(ids, np.cumsum(lengths), end_id)


def wrap_rows(stream: Ids, carry: Ids, length: int, *, bos_id: int, eos_id: int) -> tuple[Ids, Ids]:
    """Rows (n, length) of `length` − 2 tokens between BOS and EOS, and the carry: what did not fill a row.

    The stream continues the carry, so the rows of all pieces together do not depend on how the stream was cut.
    """
    stream = np.concatenate([carry, stream]) if len(carry) else stream
    payload = length - 2
    count = len(stream) // payload
    rows = np.empty((count, length), dtype=stream.dtype)
    rows[:, 0], rows[:, -1] = bos_id, eos_id
    rows[:, 1:-1] = stream[: count * payload].reshape(count, payload)
    return rows, stream[count * payload :].copy()


def frame_rows(ids: Ids, lengths: Ids, length: int, *, bos_id: int, eos_id: int, pad_id: int) -> tuple[Ids, Ids]:
    """One document a row: BOS, as many of its tokens as fit, EOS, padding; and the rows' lengths without padding."""
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
class Packed:
    """Rows, their lengths where they are padded, and where each ends in the source."""

    rows: Ids  # (n, length)
    lengths: Ids | None  # (n,)
    ends: NDArray[np.int64]  # (n, 3): whole documents before the end, tokens of the next one, bytes of text


@dataclass(frozen=True)
class Framing:
    """What a row looks like."""

    length: int
    bos_id: int
    eos_id: int
    pad_id: int

    def __post_init__(self) -> None:
        if self.length < 3:
            raise ValueError(
                f"length must be at least 3 (the tokens that begin and end a row, and one), got {self.length}"
            )


class Packer:
    """Documents to rows, any number at a time; what it remembers between them is where it stands and the carry.

    The state after a row is that row's `ends`: a packer that begins there, and is fed from the document that `ends`
    names, goes on with the same rows.
    """

    def __init__(self, framing: Framing, *, is_wrapped: bool, start: Sequence[int] = (0, 0, 0)) -> None:
        self.framing, self.is_wrapped = framing, is_wrapped
        self.documents, self.skip, self.bytes = start
        self.carry: Ids = np.empty(0, dtype=np.int64)

    def feed(self, ids: Ids, lengths: Ids, sizes: Ids) -> Packed:
        """The rows that these documents complete; `sizes` are the documents' bytes."""
        return self._wrapped(ids, lengths, sizes) if self.is_wrapped else self._framed(ids, lengths, sizes)

    def _wrapped(self, ids: Ids, lengths: Ids, sizes: Ids) -> Packed:
        if not len(lengths):
            ids, empty = ids[:0], np.empty((0, 3), dtype=np.int64)
            return Packed(ids.reshape(0, self.framing.length), None, empty)
        form, payload = self.framing, self.framing.length - 2
        spans = lengths.astype(np.int64) + 1  # with the EOS behind each
        sizes = sizes.astype(np.int64)
        first = -len(self.carry)  # where the unfinished row begins, seen from the first of these documents
        if self.skip:
            first, self.bytes = self.skip, self.bytes - int(sizes[0] * self.skip // spans[0])
        stream = end_documents(ids, lengths, form.eos_id)[max(first, 0) :]
        rows, self.carry = wrap_rows(
            stream, self.carry.astype(ids.dtype), form.length, bos_id=form.bos_id, eos_id=form.eos_id
        )

        # A row's end lies in one document: what of it is before the end counts by its share of the tokens.
        stops, bytes_before = np.cumsum(spans), self.bytes + np.cumsum(sizes) - sizes
        ends = first + payload * np.arange(1, len(rows) + 1)
        within = np.searchsorted(stops, ends)
        used = ends - (stops - spans)[within]
        is_whole = used == spans[within]
        text = bytes_before[within] + sizes[within] * used // spans[within]
        marks = np.stack([self.documents + within + is_whole, np.where(is_whole, 0, used), text], axis=1)
        self.documents, self.skip, self.bytes = self.documents + len(lengths), 0, self.bytes + int(sizes.sum())
        return Packed(rows, None, marks)

    def _framed(self, ids: Ids, lengths: Ids, sizes: Ids) -> Packed:
        form = self.framing
        rows, kept = frame_rows(ids, lengths, form.length, bos_id=form.bos_id, eos_id=form.eos_id, pad_id=form.pad_id)
        text = self.bytes + np.cumsum(sizes.astype(np.int64) * (kept - 2) // np.maximum(lengths, 1))
        count = np.arange(1, len(lengths) + 1) + self.documents
        self.documents, self.bytes = self.documents + len(lengths), int(text[-1]) if len(text) else self.bytes
        return Packed(rows, kept, np.stack([count, np.zeros_like(count), text], axis=1))
