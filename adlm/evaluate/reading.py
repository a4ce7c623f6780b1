"""Any text as rows to be measured on: the same rows whatever the number of workers, with a hash that names them.

Nothing is tokenized or packed here that `adlm prepare` would do in another way: sources, workers and packing are its.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.data.batches import RowDataset
from adlm.data.packing import Framing, Packed, Packer
from adlm.data.prepare import MANNERS, Progress, named_corpus
from adlm.data.shards import MANIFEST, PROGRESS, dtype_for, open_data
from adlm.data.sources import Source, open_source
from adlm.data.tokenizers import Tokenizer
from adlm.data.workers import Tokenized, TokenizerPool, chunked

PIECE = 1024  # rows at a time where all are gone through
UNKNOWN = "<unk>"  # what the tokenized form of some sets has in place of rare words
SAME_SHARE = "a share of the folder's, by tokens"


@dataclass(frozen=True)
class Reading:
    """Rows, and what they are.

    `rows_hash` is the sha256 of: the number of rows and their width (two little-endian uint64), the tokens of every row
    without its padding (uint32), the rows' lengths (uint32; of rows without padding the width).
    """

    rows: RowDataset
    documents: Tensor  # (n,): the number of the document in which each row begins
    bytes: int  # UTF-8, of the text that the rows hold
    rows_hash: str
    settings: dict[str, Any]


def read(
    source: str | Path,
    tokenizer: Tokenizer,
    length: int,
    *,
    rows: Literal["wrapped", "documents"] | None = None,
    split: str | None = None,
    workers: int = 1,
    limit: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Reading:
    """The rows of a file, a folder, a named data set (also NAME:PATH), the Hub's, or a folder of `adlm prepare`.

    Unless told, the split is the held-out one and rows are as the named data set has them, else wrapped. `limit` takes
    only the first rows. A prepared folder has its own rows, which may be shorter than `length`.
    """
    if rows is not None and rows not in MANNERS:
        raise ValueError(f"rows must be one of {', '.join(MANNERS)}, got {rows!r}")
    for name, value in (("workers", workers), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    framing = framing_of(tokenizer, length)
    place = Path(source).expanduser()
    if str(source) == "-" or (place.exists() and not (place.is_file() or place.is_dir())):
        raise ValueError(f"{source} is no file that can be read twice, once for its checksum: write it to a file first")
    if is_prepared(source):
        return _prepared(Path(source), tokenizer, length, rows=rows, split=split, limit=limit)
    corpus = named_corpus(source)
    manner = rows or (corpus.rows if corpus else "wrapped")
    split = split or "valid"
    opened = open_source(source, split=split)
    packing = Packing(Packer(framing, is_wrapped=manner == "wrapped"), tokenizer, limit)
    _tokenize(opened, tokenizer, packing, split, workers, on_progress or (lambda _: None))
    if not packing.count:
        raise ValueError(no_row(opened.name, packing, length))
    stored = packing.rows()
    settings = {
        "source": opened.name,
        "identity": opened.identity,
        "split": split,
        "detokenizer": opened.identity.get("detokenizer"),
        "stand_in": opened.identity.get("stand_in"),
        "rows": manner,
        "length": length,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "limit": limit,
        "bytes_are": "of the text, detokenized" if opened.identity.get("detokenizer") else "of the text",
        **packing.counts(),
    }
    return reading_of(stored, tokenizer, packing.bytes, settings)


def framing_of(tokenizer: Tokenizer, length: int) -> Framing:
    """What a row of this tokenizer looks like."""
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise ValueError(
            f"tokenizer {tokenizer.name!r} does not say which tokens begin and end a text, and rows lie between them: "
            "name them as bos_token and eos_token in a tokenizer_config.json beside its tokenizer.json"
        )
    pad_id = tokenizer.eos_id if tokenizer.pad_id is None else tokenizer.pad_id
    return Framing(length, tokenizer.bos_id, tokenizer.eos_id, pad_id)


def is_prepared(source: str | Path) -> bool:
    """Whether this is a folder of `adlm prepare`, be it finished or not."""
    folder = Path(source).expanduser()
    return folder.is_dir() and any((folder / name).is_file() for name in (MANIFEST, PROGRESS))


def no_row(name: str, packing: Packing, length: int) -> str:
    """What to do about text that fills no row."""
    found = f"it has {packing.tokens:,} tokens in {packing.documents:,} documents"
    remedy = "give --rows documents (a document to a row, padded), " if packing.documents > 1 else "give "
    return (
        f"{name} fills no row of {length} tokens: {found}, and wrapped rows take {length - 2:,} each; "
        f"{remedy}a smaller --length, or more text"
    )


@dataclass(frozen=True)
class StoredRows:
    """Rows in memory, in as few bytes as their ids take."""

    tokens: NDArray[Any]  # (n, L)
    lengths: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.tokens)

    def fetch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor | None]:
        index = torch.as_tensor(indices, dtype=torch.int64).numpy()
        lengths = None if self.lengths is None else torch.from_numpy(self.lengths[index])
        return torch.from_numpy(self.tokens[index].astype(np.int64)), lengths


@dataclass
class Packing:
    """Documents on their way to rows, and what is counted on the way."""

    packer: Packer
    tokenizer: Tokenizer
    limit: int | None
    parts: list[Packed] = field(default_factory=list)
    count: int = 0  # rows so far
    documents: int = 0  # fed so far
    tokens: int = 0  # of the text so far
    bytes: int = 0  # of the text that the rows hold
    cut_documents: int = 0
    cut_tokens: int = 0
    unknown: int = 0  # marks <unk> in the documents that the rows hold something of
    waiting: list[int] = field(default_factory=list)  # marks <unk> in documents since the last row's end
    before: int = 0  # bytes of the documents fed so far

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.count >= self.limit

    def feed(self, found: Tokenized, texts: list[str]) -> None:
        """Take up a chunk of documents."""
        packed = self.packer.feed(*found)
        if self.limit is not None and self.count + len(packed.rows) > self.limit:
            keep = self.limit - self.count
            lengths = None if packed.lengths is None else packed.lengths[:keep]
            packed = Packed(packed.rows[:keep], lengths, packed.ends[:keep])
        first, self.documents = self.documents, self.documents + len(texts)
        self.tokens += len(found.ids)
        self.waiting += [text.count(UNKNOWN) for text in texts]
        if len(packed.rows):
            self.parts.append(packed)
            self.count += len(packed.rows)
            whole, inside, _ = packed.ends[-1].tolist()
            seen = whole + (inside > 0) - (self.documents - len(self.waiting))
            self.unknown += sum(self.waiting[:seen])
            self.waiting = self.waiting[seen:]
            if packed.lengths is None:
                self.bytes = self.before + int(found.sizes[: whole - first].sum())
                if inside:
                    self.bytes += self._beginning(texts[whole - first], inside)
            else:
                self._add_framed(found, texts, packed.lengths - 2)
        self.before += int(found.sizes.sum())

    def _add_framed(self, found: Tokenized, texts: list[str], kept: NDArray[np.int64]) -> None:
        lengths = found.lengths[: len(kept)]
        is_cut = lengths > kept
        self.cut_documents += int(is_cut.sum())
        self.cut_tokens += int((lengths - kept).sum())
        self.bytes += int(found.sizes[: len(kept)][~is_cut].sum())
        self.bytes += sum(self._beginning(texts[i], int(kept[i])) for i in np.flatnonzero(is_cut))

    def _beginning(self, text: str, tokens: int) -> int:
        """Bytes of the text that its first tokens stand for."""
        text = text.encode("utf-8", "replace").decode("utf-8")  # as it was tokenized
        offsets = self.tokenizer.bpe.encode(text, add_special_tokens=False).offsets[:tokens]
        return len(text[: offsets[-1][1]].encode("utf-8")) if offsets else 0

    def rows(self) -> StoredRows:
        """All rows."""
        lengths = [part.lengths for part in self.parts if part.lengths is not None]
        return StoredRows(
            np.concatenate([part.rows for part in self.parts]),
            np.concatenate(lengths).astype(np.int64) if lengths else None,
        )

    def counts(self) -> dict[str, Any]:
        """What became of the documents; of rows that a limit ends, nothing is known of what was not read."""
        whole, inside, _ = self.parts[-1].ends[-1].tolist()
        used = whole + (inside > 0)
        found: dict[str, Any] = {"documents": used, "documents_cut": self.cut_documents}
        if self.packer.is_wrapped:
            found["documents_cut"] = int(inside > 0)
            found["documents_dropped"] = None if self.is_full else self.documents - used
            found["tokens_dropped"] = None if self.is_full else len(self.packer.carry)
        else:
            found["documents_dropped"] = None if self.is_full else 0
            found["tokens_dropped"] = self.cut_tokens
        found["unk_marks"] = self.unknown
        return found


def _tokenize(
    source: Source,
    tokenizer: Tokenizer,
    packing: Packing,
    split: str,
    workers: int,
    on_progress: Callable[[Progress], None],
) -> None:
    """Feed the packing until the source ends or it is full."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        with TokenizerPool(Path(folder) / "tokenizer.json", dtype_for(tokenizer.vocab_size), workers) as pool:
            chunks = ((texts, (texts, consumed)) for texts, consumed in chunked(source.read()))
            for found, (texts, consumed) in pool.tokenize(chunks):
                packing.feed(found, texts)
                seconds = time.perf_counter() - began
                done = (packing.before, packing.tokens, packing.count, packing.documents)
                on_progress(Progress(split, consumed, source.total_bytes, *done, seconds))
                if packing.is_full:
                    break


def _prepared(
    folder: Path, tokenizer: Tokenizer, length: int, *, rows: str | None, split: str | None, limit: int | None
) -> Reading:
    """The rows of a folder that `adlm prepare` made."""
    data = open_data(folder.expanduser())
    if data.tokenizer.sha256 != tokenizer.sha256:
        raise ValueError(
            f"{folder} was prepared with the tokenizer {data.tokenizer.name!r} ({data.tokenizer.sha256[:12]}…), and "
            f"the model's is {tokenizer.name!r} ({tokenizer.sha256[:12]}…): give the text itself, or prepare it again "
            "with --tokenizer and the model's folder"
        )
    if data.length > length:
        raise ValueError(
            f"the rows of {folder} have {data.length} tokens, and {length} are asked for: give the text itself, or "
            f"prepare it again with --length {length}"
        )
    manner = data.manifest["rows"]
    if rows is not None and rows != manner:
        raise ValueError(f"the rows of {folder} are {manner}, and {rows} are asked for: give the text itself")
    split = split or "valid"
    every, said = data.rows(split), data.manifest["splits"][split]
    if not len(every):
        raise ValueError(f"{folder} has no rows in {split}: prepare it again with a --valid-share above 0")
    stored: RowDataset = every if limit is None or limit >= len(every) else First(every, limit)
    text, exact = said["bytes"], len(stored) == len(every)
    if not exact:
        share = text_tokens(stored, tokenizer) / max(1, text_tokens(every, tokenizer))
        text = round(text * share)
    settings = {
        "source": str(folder),
        "identity": data.manifest["source"],
        "prepared": data.manifest["settings_sha256"],
        "split": split,
        "detokenizer": data.manifest["source"].get("detokenizer"),
        "stand_in": data.manifest["source"].get("stand_in"),
        "rows": manner,
        "length": data.length,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "limit": limit,
        "bytes_are": "the folder's" if exact else SAME_SHARE,
    }
    return reading_of(stored, tokenizer, text, settings)


@dataclass(frozen=True)
class First:
    """The first so many of some rows."""

    every: RowDataset
    count: int

    def __len__(self) -> int:
        return self.count

    def fetch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor | None]:
        return self.every.fetch(indices)


def pieces(rows: RowDataset) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """All rows in their order, some at a time: tokens (n, L) and lengths (n,), the width where there is no padding."""
    for index in torch.arange(len(rows)).split(PIECE):
        tokens, lengths = rows.fetch(index)
        yield tokens.numpy(), np.full(len(index), tokens.shape[1]) if lengths is None else lengths.numpy()


def text_tokens(rows: RowDataset, tokenizer: Tokenizer) -> int:
    """The tokens of rows that stand for text."""
    found = 0
    for tokens, lengths in pieces(rows):
        is_text = (tokens != tokenizer.bos_id) & (tokens != tokenizer.eos_id)
        found += int((is_text & (np.arange(tokens.shape[1]) < lengths[:, None])).sum())
    return found


def hash_of(rows: RowDataset) -> str:
    """The rows' name; see `Reading` for the bytes that it is made of."""
    digest = hashlib.sha256()
    every: list[NDArray[Any]] = []
    for tokens, lengths in pieces(rows):
        if not every:
            digest.update(np.array([len(rows), tokens.shape[1]], dtype="<u8").tobytes())
        digest.update(tokens[np.arange(tokens.shape[1]) < lengths[:, None]].astype("<u4").tobytes())
        every.append(lengths.astype("<u4"))
    digest.update(b"".join(each.tobytes() for each in every))
    return digest.hexdigest()


def documents_of(rows: RowDataset, tokenizer: Tokenizer, *, is_wrapped: bool) -> Tensor:
    """The number of the document in which each row begins, (n,); in a stream an EOS ends each, and no text is one."""
    if not is_wrapped:
        return torch.arange(len(rows))
    ended = np.concatenate([(tokens[:, 1:-1] == tokenizer.eos_id).sum(1) for tokens, _ in pieces(rows)])
    return torch.from_numpy(np.cumsum(ended) - ended)


def reading_of(rows: RowDataset, tokenizer: Tokenizer, text_bytes: int, settings: dict[str, Any]) -> Reading:
    """The reading of rows, their hash and documents found."""
    documents = documents_of(rows, tokenizer, is_wrapped=settings["rows"] == "wrapped")
    settings = {**settings, "row_count": len(rows), "text_bytes": text_bytes}
    return Reading(rows, documents, text_bytes, hash_of(rows), settings)
