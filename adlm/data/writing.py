"""Rows into shards, and what a preparation that was stopped needs to go on: both survive a kill at any moment."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from adlm.data.packing import Packed
from adlm.data.shards import (
    MANIFEST,
    PROGRESS,
    Rows,
    disk_type,
    lengths_file,
    parsed,
    sha256_of,
    sync,
    write_safely,
)

OURS = re.compile(
    r"((train|valid)-\d{5,}\.(bin|len|ends)|counts\.npy|tokenizer(_config)?\.json|(progress|manifest)\.json)(\.part)?"
)


class ShardWriter:
    """Rows of one split, a file for every `shard_rows` of them; a file has its name only when it is complete."""

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        dtype: str,
        shard_rows: int,
        first: int = 0,
        keep_ends: bool = False,
        on_shard: Callable[[dict[str, Any], list[int]], None],
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_rows = folder, split, disk_type(dtype), shard_rows
        self.number, self.keep_ends, self.on_shard = first, keep_ends, on_shard
        self.file: IO[bytes] | None = None
        self.rows = 0
        self.digest = hashlib.sha256()
        self.lengths: list[NDArray[Any]] = []
        self.ends: list[NDArray[np.int64]] = []

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}.bin"

    def add(self, packed: Packed) -> None:
        """Rows are handed on to the disk as they come; a shard that is full is closed and told of."""
        start = 0
        while start < len(packed.rows):
            stop = min(len(packed.rows), start + self.shard_rows - self.rows)
            content = np.ascontiguousarray(packed.rows[start:stop], dtype=self.dtype).data.cast("B")
            if self.file is None:
                self.file = (self.folder / f"{self.name}.part").open("wb")
            self.file.write(content)
            self.digest.update(content)
            if packed.lengths is not None:
                self.lengths.append(packed.lengths[start:stop])
            self.ends.append(packed.ends[start:stop])
            self.rows += stop - start
            start = stop
            if self.rows == self.shard_rows:
                self.close()

    def close(self) -> None:
        """Finish the shard that is being written, if there is one."""
        if self.file is None:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        size = self.file.tell()
        self.file.close()
        record: dict[str, Any] = {"file": self.name, "rows": self.rows, "bytes": size}
        record["sha256"] = self.digest.hexdigest()
        if self.lengths:
            content = np.concatenate(self.lengths).astype(disk_type("uint32")).tobytes()
            write_safely(self.folder / lengths_file(self.name), content)
            record["lengths_sha256"] = hashlib.sha256(content).hexdigest()
            record["tokens"] = int(sum(int(each.sum()) for each in self.lengths))
        ends = np.concatenate(self.ends)
        if self.keep_ends:
            write_safely(self.folder / ends_file(self.name), ends.astype(disk_type("int64")).tobytes())
        (self.folder / f"{self.name}.part").replace(self.folder / self.name)
        sync(self.folder)
        self.on_shard(record, ends[-1].tolist())
        self.file, self.rows, self.digest, self.lengths, self.ends = None, 0, hashlib.sha256(), [], []
        self.number += 1


def ends_file(file: str) -> str:
    """Where the rows of a shard end in the source; kept until the valid split is cut off the stream."""
    return file.removesuffix(".bin") + ".ends"


def ends_of(folder: Path, shards: list[dict[str, Any]], rows: int) -> list[int]:
    """Where in the source the first `rows` rows end."""
    for shard in shards:
        if rows <= shard["rows"]:
            ends = np.fromfile(folder / ends_file(shard["file"]), dtype=disk_type("int64")).reshape(-1, 3)
            return [int(number) for number in ends[rows - 1]]
        rows -= shard["rows"]
    raise AssertionError("there are not so many rows")


def copied(rows: Rows, first: int, at_once: int = 4096) -> Iterator[Packed]:
    """The stored rows from `first` on, as a writer takes them."""
    for start in range(first, len(rows), at_once):
        tokens, lengths = rows.fetch(torch.arange(start, min(start + at_once, len(rows))))
        nowhere = np.zeros((len(tokens), 3), dtype=np.int64)
        yield Packed(tokens.numpy(), None if lengths is None else lengths.numpy(), nowhere)


def ours(folder: Path) -> list[Path]:
    """The files of a preparation, by their names; the two that say what the others are come last."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_file() and OURS.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.name.startswith((PROGRESS, MANIFEST)), path.name))


def clear(folder: Path) -> None:
    """Remove what a preparation wrote, and nothing else; a folder without its marks is not a preparation's."""
    if (folder / PROGRESS).is_file() or (folder / MANIFEST).is_file():
        for path in ours(folder):
            path.unlink()


def tidy(folder: Path) -> None:
    """Remove what only a preparation under way needs."""
    remove_parts(folder)
    for path in ours(folder):
        if path.suffix == ".ends" or path.name == PROGRESS:
            path.unlink()


def remove_parts(folder: Path) -> None:
    """Remove files that were never finished."""
    for path in ours(folder):
        if path.suffix == ".part":
            path.unlink()


def save_counts(path: Path, counts: NDArray[np.int64]) -> None:
    content = io.BytesIO()
    np.save(content, counts.astype(disk_type("int64")), allow_pickle=False)
    write_safely(path, content.getvalue())


def read_progress(folder: Path) -> dict[str, Any] | None:
    path = folder / PROGRESS
    return parsed(path) if path.is_file() else None


def write_progress(folder: Path, progress: dict[str, Any]) -> None:
    write_safely(folder / PROGRESS, json.dumps(progress, indent=1).encode("utf-8"))


def differences(old: dict[str, Any], new: dict[str, Any], under: str = "") -> list[str]:
    """A line for every setting that is not the same."""
    lines = []
    for key in sorted({*old, *new}):
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            lines += differences(before, now, f"{under}{key}.")
        elif before != now:
            lines.append(f"  {under}{key}: {before!r} there, {now!r} now")
    return lines


def shorten(folder: Path, shards: list[dict[str, Any]], rows: int, row_bytes: int) -> list[dict[str, Any]]:
    """Keep the first `rows` rows of the shards on disk; done twice it changes nothing more."""
    kept = []
    for shard in shards:
        here = min(rows, shard["rows"])
        rows -= here
        path, lengths = folder / shard["file"], folder / lengths_file(shard["file"])
        if here == shard["rows"]:
            kept.append(shard)
        elif here == 0:
            path.unlink(missing_ok=True)
            lengths.unlink(missing_ok=True)
        else:
            os.truncate(path, here * row_bytes)
            record = {"file": shard["file"], "rows": here, "bytes": here * row_bytes, "sha256": sha256_of(path)}
            if "lengths_sha256" in shard:
                os.truncate(lengths, here * 4)
                record["lengths_sha256"] = sha256_of(lengths)
                record["tokens"] = int(np.fromfile(lengths, dtype=disk_type("uint32")).sum())
            kept.append(record)
    return kept
