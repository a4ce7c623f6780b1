"""Readings that are kept: a judge need not read a text again after a kill, and processes share the work by them.

A reading lies under the hash of all it follows from (`Request.keys`), so one of another judge, another text or another
window is never taken for it. A folder has `all.safetensors`, and `OWNER-NUMBER.safetensors` of each process that is at
work, written as they come and merged into the first file later. A file is there as a whole or not at all. Nats are a
judge's own float32; nothing is lost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from adlm.data.shards import write_safely
from adlm.evaluate.verdicts import BATCH, Reading, Request, Told, Verdict, readings, require_batch, verdict_of

ALL, SUFFIX = "all.safetensors", ".safetensors"
EVERY = 1.0  # seconds between two files of a process: what a kill may cost


class Archive:
    """Readings by key, in memory and, if it has a folder, on the disk; each process at work is an owner."""

    def __init__(self, folder: Path | None = None, *, owner: int = 0, every: float = EVERY) -> None:
        self.folder, self.owner, self.every = folder, owner, every
        self.known: dict[str, Reading] = {}
        self._new: dict[str, Reading] = {}
        self._files, self._written = 0, time.monotonic()

    def load(self) -> None:
        """Know what was merged."""
        if self.folder is not None and (self.folder / ALL).exists():
            self.known |= read(self.folder / ALL)

    def keep(self, found: Mapping[str, Reading]) -> None:
        """Know these too, and soon have them on the disk."""
        self.known |= found
        if self.folder is not None:
            self._new |= found
            if time.monotonic() - self._written >= self.every:
                self.flush()

    def flush(self) -> None:
        """Have all that is known on the disk."""
        if self.folder is not None and self._new:
            write(self.folder / f"{self.owner}-{self._files}{SUFFIX}", self._new)
            self._new, self._files = {}, self._files + 1
        self._written = time.monotonic()

    def merge(self) -> None:
        """Bring what all processes left into one file; nobody may be at work."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = sorted(path for path in self.folder.glob(f"*{SUFFIX}") if path.name != ALL)
        if parts:
            paths = [path for path in (self.folder / ALL, *parts) if path.exists()]
            every: dict[str, Reading] = {}
            for path in paths:
                every |= read(path)
            write(self.folder / ALL, every)
        for path in (*parts, *self.folder.glob(f"*{SUFFIX}.part")):  # the latter were being written at a kill
            path.unlink()

    def verdict(self, request: Request) -> Verdict:
        """What was found in the texts of a request, all of which must be known."""
        keys = request.keys
        if missing := [number for number, key in enumerate(keys) if key not in self.known]:
            raise ValueError(
                f"{len(missing)} of {len(keys)} texts are not judged yet, text {missing[0]} among them: judge all first"
            )
        return verdict_of(request, [self.known[key] for key in keys])


def fill(
    archive: Archive,
    requests: Sequence[Request],
    *,
    share: tuple[int, int] = (0, 1),
    batch: int = BATCH,
    on_texts: Told | None = None,
) -> None:
    """Judge what the archive does not know, or of `share` = (number, of) the part that falls to this process.

    All processes must know the same when they begin. Told are texts done and in all: of the others' work nothing is
    known before the end, they are taken to be as fast.
    """
    own, size = share
    require_batch(batch)
    for request in requests:
        request.check()
    keys = [request.keys for request in requests]
    times = Counter(key for each in keys for key in each)
    done, total = sum(count for key, count in times.items() if key in archive.known), sum(times.values())
    tell: Told = on_texts or (lambda done, total: None)
    tell(done, total)
    missing = [longest_first(request, each) for request, each in zip(requests, unknown(keys, archive.known))]
    try:
        for request, each, numbers in zip(requests, keys, missing, strict=True):
            # Every size-th from the longest on: equal shares, and texts of like length together in each.
            for found in readings(request, numbers[own::size], batch=batch):
                archive.keep({each[number]: reading for number, reading in found.items()})
                done = min(done + size * sum(times[each[number]] for number in found), total)
                tell(done, total)
    finally:
        archive.flush()


def unknown(keys: Sequence[Sequence[str]], known: Iterable[str]) -> list[list[int]]:
    """The numbers of the texts of each request that are to be judged; of equal ones the first."""
    seen, found = set(known), []
    for each in keys:
        numbers = {key: number for number, key in reversed(list(enumerate(each))) if key not in seen}
        seen.update(numbers)
        found.append(list(numbers.values()))
    return found


def longest_first(request: Request, numbers: Sequence[int]) -> list[int]:
    """Texts by their length."""
    return sorted(numbers, key=lambda number: (-len(request.pieces[number]), number))


def write(path: Path, found: Mapping[str, Reading]) -> None:
    """Readings into one file: their keys, how many nats and features each has, and all of these one after another."""
    each = list(found.values())
    tensors: dict[str, NDArray[Any]] = {
        "keys": np.frombuffer(bytes.fromhex("".join(found)), dtype=np.uint8).reshape(len(each), -1),
        "tokens": np.array([len(reading.nats) for reading in each], dtype=np.int64),
        "widths": np.array([len(reading.features) for reading in each], dtype=np.int64),
        "nats": np.concatenate([reading.nats for reading in each]).astype(np.float32),
        "features": np.concatenate([reading.features for reading in each]).astype(np.float32),
    }
    write_safely(path, save(tensors))


def read(path: Path) -> dict[str, Reading]:
    """The readings of one file."""
    try:
        found = load(path.read_bytes())
        keys, tokens, widths = (found[name] for name in ("keys", "tokens", "widths"))
        nats, features = split(found["nats"], tokens), split(found["features"], widths)
        kept = zip(keys, nats, features, strict=True)
        return {bytes(key).hex(): Reading(own.astype(np.float64), theirs) for key, own, theirs in kept}
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} holds no verdicts ({error}): delete it, and its texts are judged again") from error


def split(values: NDArray[np.float32], sizes: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    """Values that lie one after another, apart."""
    if sizes.sum() != len(values):
        raise ValueError(f"{len(values)} values where {sizes.sum()} should be")
    return np.split(values, np.cumsum(sizes)[:-1])
