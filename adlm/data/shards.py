"""The folder of prepared text (docs/prepare.md): rows in memory-mapped shards, and a manifest that describes them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.data.packing import PackedRows
from adlm.data.tokenizers import MAX_VOCAB_SIZE, Tokenizer
from adlm.files import hash_file, read_object, write_atomically

FORMAT = 1
MANIFEST, PROGRESS, COUNTS = "manifest.json", "progress.json", "counts.npy"
COUNT, SHA256 = range(2**62), re.compile("[0-9a-f]{64}")
# Forms of the values (`matches_form`) in a shard's record, in a progress file and in a manifest.
SHARD_FORM = {
    "file": re.compile(r"[\w-]+-\d{5,}\.bin"),
    "rows": COUNT[1:],
    "bytes": COUNT[1:],
    "sha256": SHA256,
}
SHARD_FORM["lengths_sha256"] = (None, SHA256)
STATE_FORM = {
    "settings": {"tokenizer": dict},
    "settings_sha256": SHA256,
    "splits": {"*": {"shards": [SHARD_FORM]}},
}
SPLIT_FORM = dict.fromkeys(("rows", "tokens", "documents", "bytes"), COUNT) | {
    "shards": [SHARD_FORM]
}
MANIFEST_FORM = {
    "format": FORMAT,
    **STATE_FORM,
    "tokenizer": {"sha256": SHA256},
    "vocab_size": range(1, MAX_VOCAB_SIZE + 1),
    "length": range(1, 2**31),
    "rows": ("wrapped", "documents"),
    "splits": {"*": SPLIT_FORM},
    "counts_sha256": SHA256,
    "source": dict,
}
LENGTH_DTYPE, END_DTYPE = "<u4", "<i8"  # of the .len and .ends files
COUNT_BYTES = 2**24  # memory of a chunk of rows while tokens are counted
PREPARE_AGAIN = "prepare it again with `adlm prepare … --overwrite`"


def choose_dtype(vocab_size: int) -> str:
    """Return the smallest type that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


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
    manifest: dict[str, Any]
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.vocab_size, self.mask_id = self.manifest["vocab_size"], self.manifest["mask_id"]
        self.length, self.is_padded = self.manifest["length"], self.manifest["rows"] == "documents"
        self.splits = tuple(self.manifest["splits"])

    def rows(self, split: str) -> ShardedRows:
        if split not in self.splits:
            raise ValueError(
                f"{self.folder} has no split {split!r}: it has {', '.join(self.splits)}"
            )
        shards = tuple(
            (shard["file"], shard["rows"]) for shard in self.manifest["splits"][split]["shards"]
        )
        return ShardedRows(self.folder, self.length, self.manifest["dtype"], self.is_padded, shards)

    def counts(self) -> Tensor:
        """Return the occurrences of every token in the train split, (vocab_size,)."""
        return torch.from_numpy(np.load(self.folder / COUNTS, allow_pickle=False))


def open_data(path: Path | str, *, verify: bool = False) -> PreparedData:
    """Open a prepared folder and check the sizes of its files; `verify` compares their checksums, too."""
    folder = Path(path)
    manifest = read_manifest(folder)
    for shard in [shard for split in manifest["splits"].values() for shard in split["shards"]]:
        file = folder / shard["file"]
        check_file(file, shard["bytes"], shard["sha256"] if verify else None)
        if "lengths_sha256" in shard:
            check_file(
                file.with_suffix(".len"),
                4 * shard["rows"],
                shard["lengths_sha256"] if verify else None,
            )
    check_file(folder / COUNTS, None, manifest["counts_sha256"])
    check_file(folder / "tokenizer.json", None, manifest["tokenizer"]["sha256"])
    return PreparedData(folder, manifest, load_checked_tokenizer(folder, manifest["tokenizer"]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a finished folder."""
    if not (folder / MANIFEST).is_file():
        if (folder / PROGRESS).is_file():
            raise ValueError(
                f"{folder} is not finished: run the same `adlm prepare` again to resume it"
            )
        raise ValueError(
            f"{folder} has no {MANIFEST}: make it with `adlm prepare SOURCE --out {folder}`"
        )
    manifest = read_object(folder / MANIFEST, MANIFEST_FORM, PREPARE_AGAIN)
    vocab_size, length, is_padded = (
        manifest["vocab_size"],
        manifest["length"],
        manifest["rows"] == "documents",
    )
    dtype, problem = choose_dtype(vocab_size), ""
    if any(
        manifest["tokenizer"].get(key) != manifest.get(key) for key in ("vocab_size", "mask_id")
    ):
        problem = "the tokenizer has other ids"
    for split in manifest["splits"].values():
        rows = [shard["rows"] for shard in split["shards"]]
        sizes = [length * np.dtype(dtype).itemsize * count for count in rows]
        is_sized = manifest.get("dtype") == dtype and sizes == [
            shard["bytes"] for shard in split["shards"]
        ]
        has_lengths = all(("lengths_sha256" in shard) == is_padded for shard in split["shards"])
        if not (is_sized and has_lengths and split["rows"] == sum(rows)):
            problem = "its shards do not fit dtype, length and rows"
    if problem:
        raise ValueError(f"{folder / MANIFEST}: {problem}: {PREPARE_AGAIN}")
    return manifest


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
