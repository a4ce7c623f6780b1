"""The folder of prepared text: rows in shards that are mapped into memory, and a manifest that says what they are.

The format is written down in docs/prepare.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.data.tokenizers import Tokenizer

FORMAT = 1
MANIFEST, PROGRESS, COUNTS = "manifest.json", "progress.json", "counts.npy"
KEYS = ("tokenizer", "vocab_size", "mask_id", "length", "dtype", "rows", "counts_sha256")  # of a finished manifest
PIECE = 2**24  # bytes read at a time where a whole file is gone through
AGAIN = "prepare it again with `adlm prepare … --overwrite`"


def dtype_for(vocab_size: int) -> str:
    """Two bytes a token where every id fits."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def disk_type(dtype: str) -> np.dtype[Any]:
    """Little-endian, whatever the machine."""
    return np.dtype(dtype).newbyteorder("<")


@dataclass(frozen=True)
class Rows:
    """The rows of one split, read from disk as they are asked for; a copy sent to another process maps them anew."""

    folder: Path
    length: int
    dtype: str
    is_padded: bool
    shards: tuple[tuple[str, int], ...]  # file, rows
    _maps: dict[int, tuple[NDArray[Any], NDArray[Any] | None]] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.folder, self.length, self.dtype, self.is_padded, self.shards)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(rows for _, rows in self.shards)], dtype=np.int64)

    def _map(self, shard: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        if shard not in self._maps:
            file, rows = self.shards[shard]
            tokens = np.memmap(self.folder / file, disk_type(self.dtype), "r", shape=(rows, self.length))
            lengths = self.folder / lengths_file(file)
            self._maps[shard] = (
                tokens,
                np.memmap(lengths, disk_type("uint32"), "r", shape=(rows,)) if self.is_padded else None,
            )
        return self._maps[shard]

    def fetch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows of these numbers, tokens (n, length), and where rows are padded their lengths (n,)."""
        index = torch.as_tensor(indices, dtype=torch.int64).numpy()
        if len(index) and not (index.min() >= 0 and index.max() < len(self)):
            wrong = index[(index < 0) | (index >= len(self))][0]
            raise IndexError(f"row {wrong} of {len(self)} rows")
        tokens = np.empty((len(index), self.length), dtype=np.int64)
        lengths = np.empty(len(index), dtype=np.int64) if self.is_padded else None
        shard_of = np.searchsorted(self._starts, index, side="right") - 1
        for shard in np.unique(shard_of):
            here = shard_of == shard
            stored, stored_lengths = self._map(int(shard))
            local = index[here] - self._starts[shard]
            tokens[here] = stored[local]
            if lengths is not None and stored_lengths is not None:
                lengths[here] = stored_lengths[local]
        return torch.from_numpy(tokens), None if lengths is None else torch.from_numpy(lengths)

    def count_tokens(self, vocab_size: int) -> NDArray[np.int64]:
        """How often every token occurs, padding left out."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        step = max(1, PIECE // (8 * self.length))
        for shard, (_, rows) in enumerate(self.shards):
            stored, lengths = self._map(shard)
            for first in range(0, rows, step):
                piece = stored[first : first + step]
                if lengths is not None:
                    piece = piece[np.arange(self.length) < lengths[first : first + step, None]]
                found = np.bincount(piece.ravel(), minlength=vocab_size)
                if len(found) > vocab_size:
                    what = f"token {len(found) - 1}, where the vocabulary has {vocab_size}"
                    raise ValueError(f"{self.folder / self.shards[shard][0]} holds {what}: {AGAIN}")
                counts += found
        return counts


@dataclass(frozen=True)
class PreparedData:
    """A folder that `adlm prepare` finished."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    @property
    def mask_id(self) -> int:
        return int(self.manifest["mask_id"])

    @property
    def length(self) -> int:
        return int(self.manifest["length"])

    @property
    def is_padded(self) -> bool:
        return bool(self.manifest["rows"] == "documents")

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest["splits"])

    def rows(self, split: str) -> Rows:
        if split not in self.splits:
            raise ValueError(f"{self.folder} has no split {split!r}: it has {', '.join(self.splits)}")
        shards = tuple((shard["file"], shard["rows"]) for shard in self.manifest["splits"][split]["shards"])
        return Rows(self.folder, self.length, self.manifest["dtype"], self.is_padded, shards)

    def counts(self) -> Tensor:
        """How often every token occurs in the train split, (vocab_size,)."""
        return torch.from_numpy(np.load(self.folder / COUNTS, allow_pickle=False))


def open_data(
    path: Path | str, *, verify: bool = False, on_verified: Callable[[int, int], None] | None = None
) -> PreparedData:
    """The folder, its files there and of the right size; `verify` reads them all and compares their checksums.

    `on_verified` is called with the bytes compared so far and in all.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    files = [(split, shard) for split, found in manifest["splits"].items() for shard in found["shards"]]
    for _, shard in files:
        check_size(folder / shard["file"], shard["bytes"])
        if "lengths_sha256" in shard:
            check_size(folder / lengths_file(shard["file"]), 4 * shard["rows"])
    counts = folder / COUNTS
    if not counts.is_file():
        raise ValueError(f"{counts} is missing: {AGAIN}")
    check_sum(folder / "tokenizer.json", manifest["tokenizer"]["sha256"])
    if verify:
        done, total = 0, sum(shard["bytes"] for _, shard in files)
        for _, shard in files:
            check_sum(folder / shard["file"], shard["sha256"])
            if "lengths_sha256" in shard:
                check_sum(folder / lengths_file(shard["file"]), shard["lengths_sha256"])
            done += shard["bytes"]
            if on_verified:
                on_verified(done, total)
        check_sum(counts, manifest["counts_sha256"])
    return PreparedData(folder, manifest, tokenizer_of(folder, manifest["tokenizer"]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder."""
    if not (folder / MANIFEST).is_file():
        if (folder / PROGRESS).is_file():
            raise ValueError(
                f"{folder} is not finished: run the same `adlm prepare` again, it goes on where it stopped"
            )
        raise ValueError(f"no {MANIFEST} in {folder}: make it with `adlm prepare SOURCE --out {folder}`")
    manifest: dict[str, Any] = parsed(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{folder / MANIFEST} has format {manifest.get('format')!r}, this version reads {FORMAT}: "
            "use the version of adlm that made it, or prepare the text again"
        )
    if missing := [key for key in KEYS if key not in manifest]:
        raise ValueError(f"{folder / MANIFEST} does not say {', '.join(missing)}: {AGAIN}")
    return manifest


def parsed(path: Path) -> dict[str, Any]:
    """The object in a JSON file of ours."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not the JSON that it was written as ({error}): {AGAIN}") from error
    if not isinstance(content, dict) or "splits" not in content or "settings_sha256" not in content:
        raise ValueError(f"{path} does not say what is in its folder: {AGAIN}")
    return content


def tokenizer_of(folder: Path, said: Mapping[str, Any]) -> Tokenizer:
    """The folder's tokenizer, which must have the ids that the manifest says."""
    tokenizer = Tokenizer.load(folder)
    found = tokenizer_facts(tokenizer)
    if wrong := [key for key in found if key != "name" and found[key] != said[key]]:
        listed = ", ".join(f"{key} {found[key]} instead of {said[key]}" for key in wrong)
        raise ValueError(f"the tokenizer in {folder} is not the one of its manifest ({listed}): {AGAIN}")
    return tokenizer


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """What the manifest says of a tokenizer."""
    return {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "mask_id": tokenizer.mask_id,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
    }


def lengths_file(file: str) -> str:
    return file.removesuffix(".bin") + ".len"


def check_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing ({expected:,} bytes expected): {AGAIN}")
    if (found := path.stat().st_size) != expected:
        raise ValueError(f"{path} has {found:,} bytes, {expected:,} expected: copy it again or {AGAIN}")


def check_sum(path: Path, expected: str) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing: {AGAIN}")
    if (found := sha256_of(path)) != expected:
        raise ValueError(f"{path} has the checksum {found[:12]}…, {expected[:12]}… expected: copy it again or {AGAIN}")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_safely(path: Path, content: bytes) -> None:
    """The whole file or, if the machine stops, the one that was there before."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the disk hold a file, or a folder's names: a renamed file survives a power cut only then."""
    if os.name == "nt" and path.is_dir():
        return  # a folder cannot be opened there, nor need it be
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
