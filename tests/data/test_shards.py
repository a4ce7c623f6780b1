"""A prepared folder returns the rows that were written, or an error names the damaged file and the remedy."""

import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from adlm.data.packing import PackedRows, iterate_blocks
from adlm.data.prepare import prepare
from adlm.data.shards import ShardedRows, choose_dtype, describe_shard, open_data, write_shard
from adlm.data.tokenizers import load_tokenizer
from adlm.files import file_lock
from tests.data.test_prepare import make_source

LENGTH, ROWS = 5, 23


def write_rows(
    folder: Path, *, dtype: str = "uint16", is_padded: bool = False
) -> tuple[ShardedRows, np.ndarray, np.ndarray]:
    """Write rows to shards of four, in uneven pieces."""
    rows = np.random.default_rng(0).integers(
        0, 2**16 if dtype == "uint16" else 2**31, (ROWS, LENGTH)
    )
    lengths = np.arange(ROWS) % LENGTH + 1
    parts = (
        PackedRows(
            rows[piece], lengths[piece] if is_padded else None, np.zeros((len(piece), 3), np.int64)
        )
        for piece in np.split(np.arange(ROWS), [1, 3, 12])
    )
    records = [
        write_shard(folder, "train", i, block, dtype)
        for i, block in enumerate(iterate_blocks(parts, 4))
    ]
    shards = tuple((record["file"], record["rows"]) for record in records)
    return ShardedRows(folder, LENGTH, dtype, is_padded, shards), rows, lengths


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_rows_are_fetched_in_any_order(tmp_path: Path, dtype: str, is_padded: bool) -> None:
    rows, tokens, lengths = write_rows(tmp_path, dtype=dtype, is_padded=is_padded)
    assert len(rows) == ROWS and len(rows.shards) == 6
    orders: list = [
        list(range(ROWS)),
        [22, 0, 7, 7, 3],
        [],
        torch.tensor([5, 4]),
        range(4, 9),
        np.array([1, 20]),
    ]
    for order in orders:
        fetched, fetched_lengths = rows.fetch(order)
        index = np.array(list(order), dtype=int)
        assert fetched.dtype == torch.int64 and np.array_equal(fetched.numpy(), tokens[index])
        assert (fetched_lengths is None) == (not is_padded)
        if fetched_lengths is not None:
            assert fetched_lengths.dtype == torch.int64 and np.array_equal(
                fetched_lengths.numpy(), lengths[index]
            )
    for index in (ROWS, -1):
        with pytest.raises(IndexError, match=f"row {index} of {ROWS}"):
            rows.fetch([0, index])
    sent = pickle.dumps(rows)
    assert len(sent) < 1000  # the path, not the rows
    assert np.array_equal(pickle.loads(sent).fetch([9])[0].numpy(), tokens[[9]])


def test_counts_leave_padding_out(tmp_path: Path) -> None:
    rows, tokens, lengths = write_rows(tmp_path, is_padded=True)
    inside = np.concatenate([row[:length] for row, length in zip(tokens, lengths)])
    assert np.array_equal(rows.count_tokens(2**16), np.bincount(inside, minlength=2**16))


@pytest.mark.parametrize("kept", [1, 3, 4])
def test_the_record_of_the_first_rows_is_that_of_a_shorter_shard(tmp_path: Path, kept: int) -> None:
    rows, tokens, lengths = write_rows(tmp_path, is_padded=True)
    packed = PackedRows(tokens[:kept], lengths[:kept], np.zeros((kept, 3), np.int64))
    short = write_shard(tmp_path, "short", 0, packed, "uint16")
    record = describe_shard(tmp_path / rows.shards[0][0], kept, LENGTH * 2, is_padded=True)
    assert record | {"file": ""} == short | {"file": ""} and record["bytes"] == kept * LENGTH * 2


def test_two_bytes_hold_at_most_65536_ids() -> None:
    assert choose_dtype(50_258) == choose_dtype(2**16) == "uint16"
    assert choose_dtype(2**16 + 1) == "uint32"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = [f"Document {i} says a few words." for i in range(60)]
    prepare(
        make_source(texts),
        folder,
        tokenizer="bytes",
        length=32,
        rows="documents",
        shard_tokens=32 * 20,
        workers=1,
    )
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data")


def test_a_prepared_folder(prepared: Path) -> None:
    data = open_data(prepared, verify=True)
    assert (data.vocab_size, data.mask_id, data.length, data.is_padded) == (258, 257, 32, True)
    assert data.splits == ("train", "valid") and (
        len(data.rows("train")),
        len(data.rows("valid")),
    ) == (54, 6)
    assert data.tokenizer.sha256 == data.manifest.tokenizer.sha256 == load_tokenizer("bytes").sha256
    tokens, lengths = data.rows("train").fetch([30])
    assert lengths is not None
    row = tokens[0, : int(lengths[0])].tolist()
    assert data.tokenizer.decode(row, skip_special=True) == "Document 30 says a few words."
    with pytest.raises(ValueError, match="no split 'test': it has train, valid"):
        data.rows("test")
    counts = data.counts()
    assert counts.shape == (258,) and int(counts.sum()) == data.manifest.splits["train"].tokens
    assert int(counts[256]) == 2 * 54 and int(counts[257]) == 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(bytes(content))


REMOVED = object()


def change(key: str, value: object) -> Callable[[Path], object]:

    def write(path: Path) -> None:
        content = json.loads(path.read_text()) | {key: value}
        path.write_text(
            json.dumps({name: each for name, each in content.items() if each is not REMOVED})
        )

    return write


def change_shard(key: str, value: object) -> Callable[[Path], object]:

    def write(path: Path) -> None:
        content = json.loads(path.read_text())
        content["splits"]["train"]["shards"][0][key] = value
        path.write_text(json.dumps(content))

    return write


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("manifest.json", Path.unlink, "make it with `adlm prepare SOURCE --out"),
    ("manifest.json", change("format", 2), "has format 2, expected 1: .*--overwrite"),
    (
        "manifest.json",
        lambda path: path.rename(path.with_name("progress.json")),
        "run the same `adlm prepare` again",
    ),
    (
        "manifest.json",
        lambda path: path.write_text("[]"),
        "has no format, expected 1: .*--overwrite",
    ),
    *(
        ("manifest.json", change(key, REMOVED), f"has no {key}")
        for key in ("rows", "length", "tokenizer")
    ),
    ("manifest.json", change("dtype", REMOVED), "shards do not fit"),
    (
        "manifest.json",
        change("vocab_size", 2**40),
        "has vocab_size 1099511627776, expected a whole number at least 1",
    ),
    ("manifest.json", change("length", -32), "has length -32,"),
    ("manifest.json", change("length", "32"), "has length '32',"),
    ("manifest.json", change("length", 10**9), "shards do not fit"),
    ("manifest.json", change("dtype", "object"), "shards do not fit"),
    ("manifest.json", change("mask_id", None), "the tokenizer has other ids"),
    ("manifest.json", change("tokenizer", "bytes"), "has tokenizer 'bytes',"),
    ("manifest.json", change("source", "text"), "has source 'text',"),
    ("manifest.json", change("settings", {"tokenizer": 3}), "has settings.tokenizer 3,"),
    ("manifest.json", change("splits", []), r"has splits \[\],"),
    (
        "manifest.json",
        change_shard("file", "../../outside-00000.bin"),
        "has splits.train.shards.0.file '../../outside-00000.bin', expected a text",
    ),
    ("manifest.json", change_shard("rows", 2**61), "shards do not fit"),
    (
        "manifest.json",
        change_shard("rows", "4"),
        "has splits.train.shards.0.rows '4', expected a whole number",
    ),
    ("manifest.json", lambda path: path.write_text("[" * 200_000), "is not JSON .*--overwrite"),
    ("train-00001.bin", Path.unlink, r"train-00001\.bin is missing.*--overwrite"),
    ("train-00001.bin", cut, r"train-00001\.bin has 1,279 bytes, 1,280 expected"),
    ("valid-00000.len", cut, r"valid-00000\.len has 23 bytes, 24 expected"),
    ("counts.npy", Path.unlink, r"counts\.npy is missing"),
    ("counts.npy", flip, r"counts\.npy has the checksum"),
    ("tokenizer.json", flip, r"tokenizer\.json has the checksum"),
    ("tokenizer.json", Path.unlink, r"tokenizer\.json is missing"),
    ("tokenizer_config.json", change("eos_token", None), "eos_id None instead of 256"),
]


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGE)
def test_a_damaged_folder_is_refused(
    folder: Path, file: str, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder / file)
    with pytest.raises(ValueError, match=message):
        open_data(folder)


@pytest.mark.parametrize("file", ["train-00001.bin", "train-00001.len"])
def test_checksums_show_a_flipped_bit(folder: Path, file: str) -> None:
    flip(folder / file)
    open_data(folder)  # the sizes are right
    with pytest.raises(ValueError, match=rf"{file} has the checksum \w+…, \w+… expected"):
        open_data(folder, verify=True)


def test_a_lock_ends_with_its_process_and_not_with_its_children(tmp_path: Path) -> None:
    path, (read_end, write_end) = tmp_path / ".lock", os.pipe()
    if (parent := os.fork()) == 0:
        with file_lock(path, "locked"):
            if (child := os.fork()) == 0:
                time.sleep(60)
            os.write(write_end, str(child).encode())
            time.sleep(60)
    child = int(os.read(read_end, 20))
    try:
        with pytest.raises(ValueError, match="wait for it"), file_lock(path, "wait for it"):
            pass
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        with file_lock(path, "locked"):
            os.kill(child, 0)  # it is alive
    finally:
        os.kill(child, signal.SIGKILL)
