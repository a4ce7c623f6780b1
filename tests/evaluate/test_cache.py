"""The cache: what is stored is there after a kill, for any number of processes, and known by its settings."""

import errno
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from adlm.distributed import DistributedContext
from adlm.evaluate.cache import (
    LOCKED_FOLDERS,
    Cache,
    hash_settings,
    lock_output,
    open_cache,
    read_entries,
)
from adlm.files import file_lock


@contextmanager
def max_file_size(size: int) -> Iterator[None]:
    """Context manager: the kernel refuses to write files of more bytes, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def reopen(folder: Path) -> Cache:
    return open_cache(folder, DistributedContext("cpu"))  # type: ignore[arg-type]


def test_entries_of_all_ranks_are_merged(tmp_path: Path) -> None:
    arrays = [np.arange(6, dtype=dtype).reshape(2, 3) for dtype in ("<f8", ">f4", "<i8", "<u2")]
    for rank in range(3):
        cache = Cache(tmp_path, DistributedContext(torch.device("cpu"), rank, 3))
        cache.put(f"of {rank}", {"array": arrays[rank], "number": 0.1 + rank, "text": "naïve"})
        assert f"of {rank}" in cache and cache.get("other") is None
        cache.flush()
    cache = reopen(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cache.jsonl"] and len(cache.entries) == 3
    for rank in range(3):
        stored = cache.get(f"of {rank}")
        assert np.array_equal(stored["array"], arrays[rank]) and stored["number"] == 0.1 + rank
    cache.put("of 0", 7)  # the newest entry counts
    cache.flush()
    assert reopen(tmp_path).get("of 0") == 7 and len(reopen(tmp_path).entries) == 3


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for key in ("a", "b"):
        cache.put(key, [1, 2])
    cache.flush()
    path = tmp_path / "cache.0.jsonl"
    path.write_bytes(path.read_bytes()[:-4])
    assert set(reopen(tmp_path).entries) == {"a"}
    (tmp_path / "cache.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is not a cache entry"):
        read_entries(tmp_path / "cache.jsonl")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("a", 1)
    cache.flush()
    path = tmp_path / "cache.0.jsonl"
    before = path.read_bytes()
    cache.put("b", "x" * 5000)
    with max_file_size(1000):
        for _ in range(2):
            with pytest.raises(OSError, match=r"cache\.0\.jsonl") as caught:
                cache.flush()
            assert caught.value.errno == errno.EFBIG and path.read_bytes() == before
    cache.flush()
    assert reopen(tmp_path).entries == {"a": 1, "b": "x" * 5000}
    cache = reopen(tmp_path)
    cache.put("c", 3)
    cache.flush()
    with max_file_size(1000), pytest.raises(OSError, match="File too large"):
        reopen(tmp_path)  # there is no space for the merged file
    assert reopen(tmp_path).entries == {"a": 1, "b": "x" * 5000, "c": 3}


def test_two_processes_do_not_evaluate_into_one_folder(tmp_path: Path) -> None:
    @lock_output
    def inner(*, out: Path | None = None) -> int:
        return 1

    @lock_output
    def outer(*, out: Path | None = tmp_path / "out") -> int:
        return inner(out=out)  # as in a report

    assert inner() == outer() == outer(out=tmp_path) == inner(out=tmp_path) == 1
    with (
        file_lock(tmp_path / ".lock", "free"),
        pytest.raises(ValueError, match=r"another process evaluates into .*: wait"),
    ):
        outer(out=tmp_path)
    assert outer(out=tmp_path) == 1 and not LOCKED_FOLDERS


def test_two_threads_do_not_evaluate_into_one_folder(tmp_path: Path) -> None:
    @lock_output
    def inner(*, out: Path) -> int:
        return 1

    @lock_output
    def outer(*, out: Path) -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(inner, out=out).result()

    with pytest.raises(ValueError, match=r"another process evaluates into .*: wait"):
        outer(out=tmp_path)
    assert not LOCKED_FOLDERS and inner(out=tmp_path) == 1


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = Cache()
    cache.put("a", 1)
    cache.flush()
    cache.merge()
    assert cache.get("a") == 1 and not list(tmp_path.iterdir())
    other = Cache(tmp_path)
    other.put("a", {1})
    with pytest.raises(TypeError, match="JSON and numpy arrays, not set"):
        other.flush()


def test_equal_settings_have_equal_keys() -> None:
    assert (
        hash_settings({"a": 1, "b": [2]})
        == hash_settings({"b": [2], "a": 1})
        != hash_settings({"a": 1, "b": [3]})
    )
