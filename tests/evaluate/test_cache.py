"""The cache: entries survive kills, ranks share them, equal settings have equal keys."""

import math
from pathlib import Path

import numpy as np
import pytest

from adlm.evaluate import cache as caches
from adlm.evaluate.cache import MERGED, Cache, hash_settings


def reopen(folder: Path) -> Cache:
    cache = Cache(folder)
    cache.merge()
    cache.load()
    return cache


def test_entries_are_read_back_as_they_were(tmp_path: Path) -> None:
    values = {"plain": {"text": "a\u2028b\n", "nfe": 3, "none": None, "pi": math.pi}}
    values["arrays"] = {"nats": np.array([1.5, np.nan], np.float32), "ids": np.arange(6).reshape(2, 3)}
    cache = Cache(tmp_path)
    for key, value in values.items():
        cache.put(key, value)
    cache.flush()
    found = reopen(tmp_path)
    assert "plain" in found and "other" not in found and found.get("other") is None
    assert found.get("plain") == values["plain"]
    for name, array in values["arrays"].items():
        again = found.get("arrays")[name]
        assert again.dtype == array.dtype and again.shape == array.shape
        assert np.array_equal(again, array, equal_nan=array.dtype.kind == "f")
    assert [path.name for path in tmp_path.iterdir()] == [MERGED]


def test_without_a_folder_entries_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = Cache()
    cache.put("a", 1)
    cache.flush()
    cache.merge()
    cache.load()
    assert cache.get("a") == 1 and not list(tmp_path.iterdir())


def test_entries_reach_the_disk_without_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses at most FLUSH_SECONDS of work."""
    monkeypatch.setattr(caches, "FLUSH_SECONDS", 0.0)
    Cache(tmp_path).put("a", 1)
    assert reopen(tmp_path).get("a") == 1


@pytest.mark.parametrize("torn", [b"", b'{"key": "b", "va', b'{"key": "b", "value": 2}'])
@pytest.mark.parametrize("name", ["cache.0.jsonl", "cache.1.jsonl", MERGED])
def test_a_torn_last_line_is_dropped(tmp_path: Path, name: str, torn: bytes) -> None:
    (tmp_path / name).write_bytes(b'{"key": "a", "value": 1}\n' + torn)
    cache = reopen(tmp_path)
    assert cache.entries == {"a": 1}
    cache.put("b", 3)
    cache.flush()
    assert reopen(tmp_path).entries == {"a": 1, "b": 3}


def test_ranks_have_files_of_their_own_and_are_merged(tmp_path: Path) -> None:
    for rank in range(3):
        cache = Cache(tmp_path, rank=rank)
        cache.put(f"of {rank}", rank)
        cache.flush()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"cache.{rank}.jsonl" for rank in range(3)]
    assert reopen(tmp_path).entries == {"of 0": 0, "of 1": 1, "of 2": 2}
    assert [path.name for path in tmp_path.iterdir()] == [MERGED]


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"value": 1}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / MERGED).write_bytes(b'{"key": "a", "value": 1}\n' + line + b"\n")
    with pytest.raises(
        ValueError, match=r"line 2 of .*cache\.jsonl is not a cache entry .*: delete the line, or choose"
    ):
        reopen(tmp_path)


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("a", {1, 2})
    with pytest.raises(TypeError, match="JSON and numpy arrays, not set"):
        cache.flush()


def test_equal_settings_have_equal_keys() -> None:
    assert hash_settings({"a": 1, "b": [2, 3]}) == hash_settings({"b": (2, 3), "a": 1})
    different = [{"a": 1}, {"a": 1.5}, {"a": "1"}, {"b": 1}, {"a": None}, [{"a": 1}]]
    assert len({hash_settings(each) for each in different}) == len(different)
