"""One resumable, content-addressed store for everything that an evaluation computes piece by piece.

An entry is known by the hash of all settings it follows from. `FOLDER/cache.jsonl` holds the merged entries, one JSON
object a line; while several ranks work, each appends to `cache.RANK.jsonl`, and rank 0 merges them afterwards. A last
line that a kill cut short is dropped. Arrays are stored as base64 of their little-endian bytes.
"""

import base64
import hashlib
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from adlm.distributed import DistributedContext
from adlm.files import append_durably, file_lock, remove_file, write_atomically

P = ParamSpec("P")
Result = TypeVar("Result")

MERGED, PER_RANK, LOCK = "cache.jsonl", "cache.{rank}.jsonl", ".lock"
FLUSH_SECONDS = 1.0  # at most this much work is lost in a kill
ProgressCallback = Callable[
    [str, int, int], None
]  # what is being done, how much is done, of how much (0: unknown)
LOCKED_FOLDERS: dict[
    Path, int
] = {}  # by which thread: `report` calls other evaluations in its folder


def ignore_progress(stage: str, done: int, total: int) -> None:
    """The progress callback that shows nothing."""


class Cache:
    """Results by key, in memory and, with a folder, on disk; `open_cache` makes one that ranks share."""

    def __init__(
        self, folder: Path | None = None, context: DistributedContext | None = None
    ) -> None:
        self.folder, self.context = folder, context or DistributedContext(torch.device("cpu"))
        self.rank, self.world_size = self.context.rank, self.context.world_size
        self.on_progress: ProgressCallback = ignore_progress  # of `fill`
        self.entries: dict[str, Any] = {}
        self._unwritten: dict[str, Any] = {}
        self._flushed = time.monotonic()

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def get(self, key: str) -> Any:
        """The entry of a key, or None."""
        return self.entries.get(key)

    def put(self, key: str, value: Any, *, is_flushed: bool = False) -> None:
        """Keep a result; it reaches the disk within a second of work, at once if `is_flushed`, or with `flush`."""
        self.entries[key] = value
        if self.folder is not None:
            self._unwritten[key] = value
            if is_flushed or time.monotonic() - self._flushed >= FLUSH_SECONDS:
                self.flush()

    def fill(
        self, keys: Sequence[str], parts: Iterable[Mapping[str, Any]], stage: str
    ) -> list[Any]:
        """The entries of all keys; `parts` computes the missing ones of this rank, some at a time."""
        done = sum(key in self for key in keys)
        self.on_progress(stage, done, len(keys))
        try:
            for part in parts:
                for key, value in part.items():
                    self.put(key, value)
                done += self.world_size * len(part)  # the other ranks are assumed to be as fast
                self.on_progress(stage, min(done, len(keys)), len(keys))
        finally:
            self.flush()
        self.sync()
        return [self.get(key) for key in keys]

    def flush(self) -> None:
        """Write what is not on disk yet, and wait for the disk."""
        if self.folder is not None and self._unwritten:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = [encode_line(key, value) for key, value in self._unwritten.items()]
            append_durably(self.folder / PER_RANK.format(rank=self.rank), b"".join(lines))
            self._unwritten = {}
        self._flushed = time.monotonic()

    def merge(self) -> None:
        """Merge the files of all ranks into one and read it; only rank 0, while no process writes."""
        if self.folder is None:
            return
        parts = sorted(self.folder.glob(PER_RANK.format(rank="*")))
        for path in (self.folder / MERGED, *parts):
            self.entries |= read_entries(path)
        if parts:
            write_atomically(
                self.folder / MERGED,
                b"".join(encode_line(*entry) for entry in self.entries.items()),
            )
        for path in parts:
            remove_file(path)

    def sync(self) -> None:
        """Give all ranks the entries of all that share the folder; every rank calls it."""
        self.flush()
        self.context.any(False)  # waits for all ranks
        self.context.run_on_rank0(self.merge)
        self.entries = self.context.all_gather(self.entries if self.context.is_main else {})[0]


def open_cache(
    folder: str | Path | None, context: DistributedContext | None = None, *, is_shared: bool = False
) -> Cache:
    """Open a cache on all ranks with the entries of earlier runs; rank 0 writes, with `is_shared` every rank."""
    if is_shared and folder is None and context is not None and context.world_size > 1:
        raise ValueError(
            f"{context.world_size} processes exchange results in a folder that all of them see: give out"
        )
    is_reader = context is not None and not context.is_main and not is_shared
    cache = Cache(None if folder is None or is_reader else Path(folder), context)
    cache.sync()
    return cache


def lock_output(function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate an evaluation: while it runs, no other process or thread can evaluate into its folder `out`."""
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        out: Any = kwargs.get("out", parameters["out"].default)
        context: Any = kwargs.get("context")
        with ExitStack() as stack:
            thread = threading.get_ident()
            if out is not None and LOCKED_FOLDERS.get(folder := Path(out).resolve()) != thread:

                def lock() -> None:
                    folder.mkdir(parents=True, exist_ok=True)
                    message = f"another process evaluates into {out}: wait for it, or choose another folder"
                    stack.enter_context(file_lock(folder / LOCK, message))

                lock() if context is None else context.run_on_rank0(lock)
                LOCKED_FOLDERS[folder] = thread
                stack.callback(LOCKED_FOLDERS.pop, folder)
            return function(*args, **kwargs)

    return run


def hash_settings(settings: Any) -> str:
    """The key of settings: equal settings have equal keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def encode_array(array: Any) -> dict[str, Any]:
    """An array as JSON can hold it."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"a cache holds JSON and numpy arrays, not {type(array).__name__}")
    array = array.astype(array.dtype.newbyteorder("<"))
    return {
        "dtype": array.dtype.str,
        "shape": array.shape,
        "base64": base64.b64encode(array.tobytes()).decode(),
    }


def decode_array(value: dict[str, Any]) -> Any:
    """The array that `encode_array` encoded; another value as it is."""
    if value.keys() == {"dtype", "shape", "base64"}:
        return np.frombuffer(base64.b64decode(value["base64"]), value["dtype"]).reshape(
            value["shape"]
        )
    return value


def encode_line(key: str, value: Any) -> bytes:
    """One entry as a line of JSON."""
    return json.dumps({"key": key, "value": value}, default=encode_array).encode() + b"\n"


def read_entries(path: Path) -> dict[str, Any]:
    """The entries of one file; a last line without a line end was being written at a kill and is dropped."""
    if not path.exists():
        return {}
    content, entries = path.read_bytes(), {}
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            entry: Mapping[str, Any] = json.loads(line, object_hook=decode_array)
            entries[entry["key"]] = entry["value"]
        except (ValueError, KeyError, TypeError) as error:
            problem = f"line {number} of {path} is not a cache entry ({error})"
            raise ValueError(f"{problem}: delete the line, or choose another folder") from error
    return entries
