"""The folder of prepared text (docs/prepare.md): rows in memory-mapped shards, and a manifest that describes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from adlm.data.packing import PackedRows
from adlm.data.tokenizers import MAX_VOCAB_SIZE, Tokenizer
from adlm.files import hash_file, read_stored, write_atomically
from adlm.settings import Stored

FORMAT = 1
MANIFEST, PROGRESS, COUNTS = "manifest.json", "progress.json", "counts.npy"
LENGTH_DTYPE, END_DTYPE = "<u4", "<i8"  # of the .len and .ends files
COUNT_BYTES = 2**24  # memory of a chunk of rows while tokens are counted
PREPARE_AGAIN = "prepare it again with `adlm prepare … --overwrite`"


def choose_dtype(vocab_size: int) -> str:
    """Return the smallest type that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Positive = Annotated[int, Field(ge=1, lt=2**62)]


class ShardRecord(Stored):
    """A file of rows."""

    file: Annotated[str, Field(pattern=r"^[\w-]+-\d{5,}\.bin$")]
    """The file in the folder."""
    rows: Positive
    """Its rows."""
    bytes: Positive
    """Its size."""
    sha256: Sha256
    """Its checksum."""
    lengths_sha256: Sha256 | None = None
    """The checksum of the file of the rows' lengths; null: rows are full."""


class SplitRecord(Stored):
    """A split: what it holds, and its shards."""

    rows: Count
    """Its rows."""
    tokens: Count
    """Their tokens, without padding."""
    documents: Count
    """Its documents."""
    bytes: Count
    """The bytes of its text."""
    shards: list[ShardRecord]
    """Its files."""


class PreparationSettings(Stored):
    """The settings of a preparation."""

    tokenizer: dict[str, Any]
    """How the tokenizer was chosen."""


class TokenizerRecord(Stored):
    """A tokenizer in a manifest."""

    name: str = ""
    """Its name."""
    sha256: Sha256
    """The checksum of its tokenizer.json."""
    vocab_size: int | None = None
    """Its tokens, with the mask."""
    mask_id: int | None = None
    """Its mask."""


class Manifest(Stored):
    """The description of a finished folder, manifest.json."""

    format: Literal[1]
    """The format of the folder."""
    settings: PreparationSettings
    """The settings of `adlm prepare`."""
    settings_sha256: Sha256
    """Their hash, which identifies the data."""
    tokenizer: TokenizerRecord
    """The tokenizer."""
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    """Tokens of the vocabulary, with the mask."""
    mask_id: int | None = None
    """The mask."""
    length: Annotated[int, Field(ge=1, lt=2**31)]
    """Tokens of a row."""
    dtype: str = ""
    """The type of an id in the shards."""
    rows: Literal["wrapped", "documents"]
    """One stream cut into rows, or a document per row."""
    splits: dict[str, SplitRecord]
    """The splits by name."""
    valid_from: str = ""
    """Where the valid split comes from."""
    source: dict[str, Any]
    """What the text was read from."""
    counts_sha256: Sha256
    """The checksum of the counts of tokens."""


@dataclass(frozen=True)
class ShardedRows:
    """The memory-mapped rows of one split; a pickled copy maps them again."""

    folder: Path
    length: int
    dtype: str
    is_padded: bool
    shards: tuple[tuple[str, int], ...]  # file, rows

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedRows, (self.folder, self.length, self.dtype, self.is_padded, self.shards)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(rows for _, rows in self.shards)], dtype=np.int64)

    @cached_property
    def _tokens(self) -> list[NDArray[Any]]:
        dtype = np.dtype(self.dtype).newbyteorder("<")
        return [
            np.memmap(self.folder / file, dtype, "r", shape=(rows, self.length))
            for file, rows in self.shards
        ]

    @cached_property
    def _lengths(self) -> list[NDArray[Any]]:
        files = [(self.folder / file).with_suffix(".len") for file, _ in self.shards]
        return [np.memmap(file, LENGTH_DTYPE, "r") for file in files]

    def fetch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows with these numbers, tokens (n, length), and where rows are padded their lengths (n,)."""
        index = torch.as_tensor(indices, dtype=torch.int64).numpy()
        if len(wrong := index[(index < 0) | (index >= len(self))]):
            raise IndexError(f"row {wrong[0]} of {len(self)} rows")
        tokens = np.empty((len(index), self.length), dtype=np.int64)
        lengths = np.empty(len(index), dtype=np.int64) if self.is_padded else None
        shard_numbers = np.searchsorted(self._starts, index, side="right") - 1
        for shard in np.unique(shard_numbers):
            here = shard_numbers == shard
            local = index[here] - self._starts[shard]
            tokens[here] = self._tokens[shard][local]
            if lengths is not None:
                lengths[here] = self._lengths[shard][local]
        return torch.from_numpy(tokens), None if lengths is None else torch.from_numpy(lengths)

    def count_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        """Count the occurrences of every token, without padding."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for index in torch.arange(len(self)).split(max(1, COUNT_BYTES // (8 * self.length))):
            tokens, lengths = self.fetch(index)
            chunk = (
                tokens if lengths is None else tokens[torch.arange(self.length) < lengths[:, None]]
            )
            if int(chunk.max()) >= vocab_size:
                raise ValueError(
                    f"{self.folder} holds token {chunk.max()} of {vocab_size} tokens: {PREPARE_AGAIN}"
                )
            counts += np.bincount(chunk.flatten().numpy(), minlength=vocab_size)
        return counts


@dataclass
class PreparedData:
    """A folder that `adlm prepare` finished."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.vocab_size = self.manifest.vocab_size
        self.mask_id = self.manifest.mask_id
        self.length = self.manifest.length
        self.is_padded = self.manifest.rows == "documents"
        self.splits = tuple(self.manifest.splits)

    def rows(self, split: str) -> ShardedRows:
        if split not in self.splits:
            raise ValueError(
                f"{self.folder} has no split {split!r}: it has {', '.join(self.splits)}"
            )
        shards = tuple((shard.file, shard.rows) for shard in self.manifest.splits[split].shards)
        return ShardedRows(self.folder, self.length, self.manifest.dtype, self.is_padded, shards)

    def counts(self) -> Tensor:
        """Return the occurrences of every token in the train split, (vocab_size,)."""
        return torch.from_numpy(np.load(self.folder / COUNTS, allow_pickle=False))


def open_data(path: Path | str, *, verify: bool = False) -> PreparedData:
    """Open a prepared folder and check the sizes of its files; `verify` compares their checksums, too."""
    folder = Path(path)
    manifest = read_manifest(folder)
    for shard in [shard for split in manifest.splits.values() for shard in split.shards]:
        file = folder / shard.file
        check_file(file, shard.bytes, shard.sha256 if verify else None)
        if shard.lengths_sha256 is not None:
            sha256 = shard.lengths_sha256 if verify else None
            check_file(file.with_suffix(".len"), 4 * shard.rows, sha256)
    check_file(folder / COUNTS, None, manifest.counts_sha256)
    check_file(folder / "tokenizer.json", None, manifest.tokenizer.sha256)
    expected = manifest.tokenizer.model_dump()
    return PreparedData(folder, manifest, load_checked_tokenizer(folder, expected))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a finished folder."""
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / PROGRESS).is_file():
            raise ValueError(
                f"{folder} is not finished: run the same `adlm prepare` again to resume it"
            )
        raise ValueError(
            f"{folder} has no {MANIFEST}: make it with `adlm prepare SOURCE --out {folder}`"
        )
    manifest = read_stored(path, Manifest, PREPARE_AGAIN)
    tokenizer = manifest.tokenizer
    if (tokenizer.vocab_size, tokenizer.mask_id) != (manifest.vocab_size, manifest.mask_id):
        raise ValueError(f"{path}: the tokenizer has other ids: {PREPARE_AGAIN}")
    if not all(fits_shards(manifest, split) for split in manifest.splits.values()):
        problem = "its shards do not fit dtype, length and rows"
        raise ValueError(f"{path}: {problem}: {PREPARE_AGAIN}")
    return manifest


def fits_shards(manifest: Manifest, split: SplitRecord) -> bool:
    """Return whether the sizes of a split's shards are those of its rows."""
    dtype = choose_dtype(manifest.vocab_size)
    row_bytes = manifest.length * np.dtype(dtype).itemsize
    is_padded = manifest.rows == "documents"
    for shard in split.shards:
        has_lengths = shard.lengths_sha256 is not None
        if shard.bytes != row_bytes * shard.rows or has_lengths != is_padded:
            return False
    return manifest.dtype == dtype and split.rows == sum(shard.rows for shard in split.shards)


def load_checked_tokenizer(folder: Path, expected: Mapping[str, Any]) -> Tokenizer:
    """Load the folder's tokenizer, which must have the ids of the manifest."""
    tokenizer = Tokenizer.load(folder)
    actual = describe_tokenizer(tokenizer)
    if wrong := [key for key in actual if key != "name" and actual[key] != expected.get(key)]:
        listed = ", ".join(f"{key} {actual[key]} instead of {expected.get(key)}" for key in wrong)
        raise ValueError(
            f"the tokenizer in {folder} is not the one of its manifest ({listed}): {PREPARE_AGAIN}"
        )
    return tokenizer


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the manifest's entry of a tokenizer."""
    keys = ("name", "sha256", "vocab_size", "mask_id", "bos_id", "eos_id", "pad_id")
    return {key: getattr(tokenizer, key) for key in keys}


def write_shard(
    folder: Path, split: str, number: int, packed: PackedRows, dtype: str
) -> dict[str, Any]:
    """Write rows to a file, which gets its name when it is complete, and return its record."""
    path = folder / f"{split}-{number:05d}.bin"
    if packed.lengths is not None:
        write_atomically(path.with_suffix(".len"), packed.lengths.astype(LENGTH_DTYPE).tobytes())
    write_atomically(path.with_suffix(".ends"), packed.ends.astype(END_DTYPE).tobytes())
    content = np.ascontiguousarray(packed.rows, dtype=np.dtype(dtype).newbyteorder("<"))
    write_atomically(path, content.data.cast("B"))
    return describe_shard(
        path,
        len(content),
        content.itemsize * content.shape[1],
        is_padded=packed.lengths is not None,
    )


def describe_shard(path: Path, rows: int, row_bytes: int, *, is_padded: bool) -> dict[str, Any]:
    """Return the record of a shard's first rows."""
    record = {
        "file": path.name,
        "rows": rows,
        "bytes": rows * row_bytes,
        "sha256": hash_file(path, rows * row_bytes),
    }
    if is_padded:
        record["lengths_sha256"] = hash_file(path.with_suffix(".len"), 4 * rows)
    return record


def check_file(path: Path, size: int | None, sha256: str | None = None) -> None:
    """Raise an error if a file is missing or has another size or SHA-256; None is not checked."""
    if not path.is_file():
        problem = "is missing"
    elif size is not None and (actual := path.stat().st_size) != size:
        problem = f"has {actual:,} bytes, {size:,} expected"
    elif sha256 is not None and (digest := hash_file(path)) != sha256:
        problem = f"has the checksum {digest[:12]}…, {sha256[:12]}… expected"
    else:
        return
    raise ValueError(f"{path} {problem}: copy it again or {PREPARE_AGAIN}")
