"""Any text as the rows that `adlm prepare` would make, for an evaluation, identified by a hash."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.data.batches import RowDataset, TensorRows
from adlm.data.corpora import find_corpus
from adlm.data.packing import PackedRows, Packer
from adlm.data.prepare import ROW_LAYOUTS
from adlm.data.shards import MANIFEST, PROGRESS, choose_dtype, open_data
from adlm.data.sources import open_source
from adlm.data.tokenizers import Tokenizer
from adlm.data.workers import TokenizedChunk, chunk_documents, tokenize_chunks
from adlm.errors import check_known
from adlm.text.generation import check_whole_numbers

ROWS_PER_READ = 1024
UNKNOWN = "<unk>"  # stands for rare words in the tokenized form of some sets
RowLayout = Literal["wrapped", "documents"]

MIN_DOCUMENTS = 10  # fewer give a standard error that is often far too small


@dataclass(frozen=True)
class EvalDataset:
    """Rows of text with their documents, size and origin.

    `rows_hash` is the sha256 of: the number of rows and their width (two little-endian uint64), the tokens of every row
    without its padding (uint32), the rows' lengths (uint32; the width for rows without padding).
    """

    rows: RowDataset
    documents: Tensor  # (n,): the number of the document in which each row begins
    bytes: int  # UTF-8, of the text that the rows hold
    rows_hash: str
    settings: dict[str, Any]

    def document_units(self) -> Tensor | None:
        """The documents for a standard error over documents; None if they are few, so that rows are the units."""
        return self.documents if len(self.documents.unique()) >= MIN_DOCUMENTS else None


def load_eval_data(
    source: str | Path,
    tokenizer: Tokenizer,
    length: int,
    *,
    rows: RowLayout | None = None,
    split: str | None = None,
    workers: int = 1,
    limit: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvalDataset:
    """Load the rows of a file, a folder, a named dataset (also NAME:PATH), a Hub dataset or prepared data.

    By default the split is the held-out one, and rows are those of the named dataset, else wrapped. `limit` takes only
    the first rows. Prepared data keeps its own rows, which may be shorter than `length`. `on_progress` is called with
    the bytes read and all bytes (0: unknown).
    """
    corpus = find_corpus(source)
    layout = rows or (corpus.rows if corpus else "wrapped")
    check_known("rows", layout, ROW_LAYOUTS)
    check_whole_numbers(1, workers=workers, limit=limit)
    packer = Packer(tokenizer, length, is_wrapped=layout == "wrapped")
    path = Path(source).expanduser()
    if str(source) == "-" or (path.exists() and not (path.is_file() or path.is_dir())):
        raise ValueError(
            f"{source} is a stream, which cannot be read twice (once for its checksum): save it to a file"
        )
    split = split or "valid"
    if path.is_dir() and any((path / name).is_file() for name in (MANIFEST, PROGRESS)):
        return _load_prepared(path, tokenizer, length, rows=rows, split=split, limit=limit)
    opened = open_source(source, split=split)
    packing = EvalPacker(packer, tokenizer, limit)
    parts = ((text, consumed, True) for text, consumed in opened.read())
    chunks = ((texts, (texts, consumed)) for texts, (consumed, _) in chunk_documents(parts))
    dtype = choose_dtype(tokenizer.vocab_size)
    for chunk, (texts, consumed) in tokenize_chunks(tokenizer.json, dtype, chunks, workers):
        packing.feed(chunk, texts)
        on_progress(consumed, opened.total_bytes or 0)
        if packing.is_full:
            break
    if not packing.parts:
        documents = len(packing.unknown)
        remedy = "use rows=documents (one document a row, padded), " if documents > 1 else "use "
        size = f"{packing.tokens:,} tokens in {documents:,} documents"
        problem = f"{opened.name} fills no row of {length} tokens: it has {size}"
        raise ValueError(f"{problem}; {remedy}a smaller length, or more text")
    settings = {
        "source": opened.name,
        "identity": opened.identity,
        "split": split,
        "rows": layout,
        "length": length,
    }
    bytes_source = "detokenized text" if opened.identity.get("detokenizer") else "text"
    settings |= {"limit": limit, "bytes_source": bytes_source} | packing.count_losses()
    packed = PackedRows.concatenate(packing.parts)
    lengths = None if packed.lengths is None else torch.from_numpy(packed.lengths).long()
    in_memory = TensorRows(torch.from_numpy(packed.rows.astype(np.int32)), lengths)  # compact
    return _describe_rows(in_memory, tokenizer, packing.bytes, settings)


@dataclass
class EvalPacker:
    """Packs documents into at most `limit` rows, and counts the text that they hold and what is lost."""

    packer: Packer
    tokenizer: Tokenizer
    limit: int | None
    parts: list[PackedRows] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)  # marks <unk> in each document fed so far
    row_count: int = 0
    tokens: int = 0  # fed so far
    bytes_fed: int = 0
    bytes: int = 0  # of the text that the rows hold
    documents_cut: int = 0
    tokens_cut: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self.limit is not None and self.row_count >= self.limit

    def feed(self, chunk: TokenizedChunk, texts: list[str]) -> None:
        """Add a chunk of documents."""
        packed, first = self.packer.feed(*chunk), len(self.unknown)
        if self.limit is not None:
            packed = packed[: self.limit - self.row_count]
        self.tokens += len(chunk.ids)
        self.unknown += [text.count(UNKNOWN) for text in texts]
        if len(packed.rows):
            self.parts.append(packed)
            self.row_count += len(packed.rows)
            if packed.lengths is None:
                whole, inside, _ = packed.ends[-1].tolist()
                self.bytes = self.bytes_fed + int(chunk.sizes[: whole - first].sum())
                if inside:
                    self.bytes += self._count_prefix_bytes(texts[whole - first], inside)
            else:
                kept = packed.lengths - 2
                lengths, is_cut = chunk.lengths[: len(kept)], chunk.lengths[: len(kept)] > kept
                self.documents_cut += int(is_cut.sum())
                self.tokens_cut += int((lengths - kept).sum())
                self.bytes += int(chunk.sizes[: len(kept)][~is_cut].sum())
                self.bytes += sum(
                    self._count_prefix_bytes(texts[i], int(kept[i])) for i in np.flatnonzero(is_cut)
                )
        self.bytes_fed += int(chunk.sizes.sum())

    def _count_prefix_bytes(self, text: str, tokens: int) -> int:
        """Bytes of the text that its first tokens stand for."""
        text = text.encode("utf-8", "replace").decode("utf-8")  # as it was tokenized
        offsets = self.tokenizer.bpe.encode(text, add_special_tokens=False).offsets[:tokens]
        return len(text[: offsets[-1][1]].encode("utf-8")) if offsets else 0

    def count_losses(self) -> dict[str, Any]:
        """Documents and tokens used and dropped; None where a limit ended the reading and they are not known."""
        whole, inside, _ = self.parts[-1].ends[-1].tolist()
        used, is_wrapped = whole + (inside > 0), self.packer.is_wrapped
        dropped = (
            (len(self.unknown) - used, len(self.packer.carry))
            if is_wrapped
            else (0, self.tokens_cut)
        )
        losses = {
            "documents": used,
            "documents_cut": int(inside > 0) if is_wrapped else self.documents_cut,
        }
        losses |= {
            "documents_dropped": None if self.is_full else dropped[0],
            "unk_marks": sum(self.unknown[:used]),
        }
        return losses | {"tokens_dropped": None if self.is_full and is_wrapped else dropped[1]}


def _load_prepared(
    folder: Path,
    tokenizer: Tokenizer,
    length: int,
    *,
    rows: str | None,
    split: str,
    limit: int | None,
) -> EvalDataset:
    data, remedy = open_data(folder), "give the text itself, or prepare it again"
    if data.tokenizer.sha256 != tokenizer.sha256:
        own, expected = (
            f"{each.name!r} ({each.sha256[:12]}…)" for each in (data.tokenizer, tokenizer)
        )
        problem = f"{folder} was prepared with the tokenizer {own}, and the model's is {expected}"
        raise ValueError(f"{problem}: {remedy} with --tokenizer and the model's folder")
    if data.length > length:
        problem = f"the rows of {folder} have {data.length} tokens, which is more than {length}"
        raise ValueError(f"{problem}: {remedy} with --length {length}")
    layout = data.manifest.rows
    if rows is not None and rows != layout:
        raise ValueError(f"the rows of {folder} are {layout}, not {rows}: give the text itself")
    every, manifest = data.rows(split), data.manifest.splits[split]
    if not len(every):
        raise ValueError(
            f"{folder} has no rows in {split}: prepare it again with a --valid-share above 0"
        )
    kept: RowDataset = every
    text_bytes, bytes_source = manifest.bytes, "manifest"
    if limit is not None and limit < len(every):
        kept, bytes_source = (
            TensorRows(*every.fetch(torch.arange(limit))),
            "manifest, in proportion to the tokens",
        )
        parts = (
            (_find_text(*part, tokenizer).sum() for part in iterate_rows(each))
            for each in (kept, every)
        )
        tokens, all_tokens = (int(sum(part)) for part in parts)
        text_bytes = round(text_bytes * (tokens / max(1, all_tokens)))
    settings: dict[str, Any] = {
        "source": str(folder),
        "identity": data.manifest.source,
        "split": split,
        "rows": layout,
    }
    settings |= {
        "prepared": data.manifest.settings_sha256,
        "length": data.length,
        "limit": limit,
    }
    settings["bytes_source"] = bytes_source
    return _describe_rows(kept, tokenizer, text_bytes, settings)


def fetch_rows(rows: RowDataset, number: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (n, L) and lengths (n,) of rows, the width where there is no padding."""
    tokens, lengths = rows.fetch(number)
    return tokens, torch.full((len(tokens),), tokens.shape[1]) if lengths is None else lengths


def iterate_rows(rows: RowDataset) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Tokens and lengths of all rows in order, some at a time."""
    for index in torch.arange(len(rows)).split(ROWS_PER_READ):
        tokens, lengths = fetch_rows(rows, index)
        yield tokens.numpy(), lengths.numpy()


def _find_text(
    tokens: NDArray[Any], lengths: NDArray[Any], tokenizer: Tokenizer
) -> NDArray[np.bool_]:
    """Which tokens (n, L) are neither BOS, EOS nor padding."""
    is_text: NDArray[np.bool_] = (tokens != tokenizer.bos_id) & (tokens != tokenizer.eos_id)
    return is_text & (np.arange(tokens.shape[1]) < lengths[:, None])


def count_row_bytes(data: EvalDataset, tokenizer: Tokenizer) -> NDArray[np.float64]:
    """Bytes of the text of each row (n,), by decoding its tokens, scaled to add up to the bytes of the dataset."""
    sizes: list[int] = []
    for tokens, lengths in iterate_rows(data.rows):
        texts = (
            row[kept]
            for row, kept in zip(tokens, _find_text(tokens, lengths, tokenizer), strict=True)
        )
        sizes += [len(tokenizer.decode(text.tolist()).encode()) for text in texts]
    return np.array(sizes) * (data.bytes / max(1, sum(sizes)))


def hash_rows(rows: RowDataset) -> str:
    """The sha256 that identifies rows; `EvalDataset` describes the bytes."""
    digest = hashlib.sha256()
    every: list[NDArray[Any]] = []
    for tokens, lengths in iterate_rows(rows):
        if not every:
            digest.update(np.array([len(rows), tokens.shape[1]], dtype="<u8").tobytes())
        digest.update(tokens[np.arange(tokens.shape[1]) < lengths[:, None]].astype("<u4").tobytes())
        every.append(lengths.astype("<u4"))
    digest.update(b"".join(each.tobytes() for each in every))
    return digest.hexdigest()


def _describe_rows(
    rows: RowDataset, tokenizer: Tokenizer, text_bytes: int, settings: dict[str, Any]
) -> EvalDataset:
    """The dataset of rows, with their hash and documents computed."""
    if text_bytes < 1:
        raise ValueError(
            f"{settings['source']} has {len(rows)} rows without any text: give another text"
        )
    documents = torch.arange(len(rows))
    if settings["rows"] == "wrapped":  # an EOS ends each document
        ends = np.concatenate(
            [(tokens[:, 1:-1] == tokenizer.eos_id).sum(1) for tokens, _ in iterate_rows(rows)]
        )
        documents = torch.from_numpy(np.cumsum(ends) - ends)
    settings |= {name: settings["identity"].get(name) for name in ("detokenizer", "stand_in")}
    settings |= {"tokenizer": tokenizer.name, "tokenizer_sha256": tokenizer.sha256}
    settings |= {"row_count": len(rows), "text_bytes": text_bytes}
    return EvalDataset(rows, documents, text_bytes, hash_rows(rows), settings)
