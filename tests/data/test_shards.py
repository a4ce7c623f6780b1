"""What is in the folder is what was written, or an error says which file is not, and what to do."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from adlm.data.packing import PackedRows
from adlm.data.prepare import prepare
from adlm.data.shards import PreparedData, ShardedRows, ShardWriter, choose_dtype, open_data, shorten_shards
from adlm.data.tokenizers import load_tokenizer
from tests.data.test_prepare import make_source

LENGTH, ROWS = 5, 23


def stored(
    folder: Path, *, dtype: str, is_padded: bool, shard_rows: int = 4
) -> tuple[ShardedRows, np.ndarray, np.ndarray]:
    """Rows of known numbers in several shards, written in uneven pieces."""
    most = 2**16 if dtype == "uint16" else 2**31
    rows = np.random.default_rng(0).integers(0, most, (ROWS, LENGTH))
    lengths = np.arange(ROWS) % LENGTH + 1
    records: list[dict] = []
    writer = ShardWriter(
        folder, "train", dtype=dtype, shard_rows=shard_rows, on_shard=lambda record, _: records.append(record)
    )
    for piece in np.split(np.arange(ROWS), [1, 3, 12]):
        writer.add(PackedRows(rows[piece], lengths[piece] if is_padded else None, np.zeros((len(piece), 3), np.int64)))
    writer.close()
    shards = tuple((record["file"], record["rows"]) for record in records)
    return ShardedRows(folder, LENGTH, dtype, is_padded, shards), rows, lengths


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_rows_come_back_in_the_order_asked_for(tmp_path: Path, dtype: str, is_padded: bool) -> None:
    rows, tokens, lengths = stored(tmp_path, dtype=dtype, is_padded=is_padded)
    assert len(rows) == ROWS and len(rows.shards) == 6
    orders: list = [list(range(ROWS)), [22, 0, 7, 7, 3], [], torch.tensor([5, 4]), range(4, 9), np.array([1, 20])]
    for order in orders:
        found, found_lengths = rows.fetch(order)
        index = np.array(list(order), dtype=int)
        assert found.dtype == torch.int64 and np.array_equal(found.numpy(), tokens[index])
        if is_padded:
            assert found_lengths is not None and found_lengths.dtype == torch.int64
            assert np.array_equal(found_lengths.numpy(), lengths[index])
        else:
            assert found_lengths is None


@pytest.mark.parametrize("index", [ROWS, -1])
def test_a_row_that_is_not_there_is_an_error(tmp_path: Path, index: int) -> None:
    rows, _, _ = stored(tmp_path, dtype="uint16", is_padded=False)
    with pytest.raises(IndexError, match=f"row {index} of {ROWS}"):
        rows.fetch([0, index])


def test_rows_can_be_sent_to_another_process(tmp_path: Path) -> None:
    rows, tokens, _ = stored(tmp_path, dtype="uint16", is_padded=False)
    rows.fetch([0, 9])  # its maps are open
    sent = pickle.dumps(rows)
    assert len(sent) < 1000  # the place, not the rows
    assert np.array_equal(pickle.loads(sent).fetch([9])[0].numpy(), tokens[[9]])


def test_counts_leave_padding_out(tmp_path: Path) -> None:
    rows, tokens, lengths = stored(tmp_path, dtype="uint16", is_padded=True)
    inside = np.concatenate([row[:length] for row, length in zip(tokens, lengths)])
    assert np.array_equal(rows.count_tokens(2**16), np.bincount(inside, minlength=2**16))


@pytest.mark.parametrize("kept", [1, 3, 4, 9, 22, 23])
def test_shortening_keeps_the_first_rows_and_can_be_repeated(tmp_path: Path, kept: int) -> None:
    rows, tokens, lengths = stored(tmp_path, dtype="uint16", is_padded=True)
    records = [{"file": file, "rows": n, "lengths_sha256": "", "tokens": 0} for file, n in rows.shards]
    once = shorten_shards(tmp_path, records, kept, LENGTH * 2)
    again = shorten_shards(tmp_path, records, kept, LENGTH * 2)
    assert once == again and sum(record["rows"] for record in once) == kept
    short = ShardedRows(tmp_path, LENGTH, "uint16", True, tuple((record["file"], record["rows"]) for record in once))
    found, found_lengths = short.fetch(range(kept))
    assert np.array_equal(found.numpy(), tokens[:kept])
    assert found_lengths is not None and np.array_equal(found_lengths.numpy(), lengths[:kept])
    assert len(list(tmp_path.glob("*.bin"))) == len(list(tmp_path.glob("*.len"))) == len(once)


def test_two_bytes_hold_the_vocabulary_of_gpt2_and_no_more_than_they_can() -> None:
    assert choose_dtype(50_258) == choose_dtype(2**16) == "uint16"
    assert choose_dtype(2**16 + 1) == "uint32"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = [f"Document {i} says a few words." for i in range(60)]
    prepare(make_source(texts), folder, tokenizer="bytes", length=32, rows="documents", shard_tokens=32 * 20, workers=1)
    return folder


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may harm."""
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_a_folder_says_what_it_holds(data: Path) -> None:
    found = open_data(data, verify=True)
    assert (found.vocab_size, found.mask_id, found.length, found.is_padded) == (258, 257, 32, True)
    assert found.splits == ("train", "valid") and isinstance(found, PreparedData)
    assert (len(found.rows("train")), len(found.rows("valid"))) == (54, 6)
    assert found.tokenizer.sha256 == found.manifest["tokenizer"]["sha256"] == load_tokenizer("bytes").sha256
    tokens, lengths = found.rows("train").fetch([30])
    assert lengths is not None
    row = tokens[0, : int(lengths[0])].tolist()
    assert found.tokenizer.decode(row, skip_special=True) == "Document 30 says a few words."
    with pytest.raises(ValueError, match="no split 'test': it has train, valid"):
        found.rows("test")
    counts = found.counts()
    assert counts.shape == (258,) and int(counts.sum()) == found.manifest["splits"]["train"]["tokens"]
    assert int(counts[256]) == 2 * 54 and int(counts[257]) == 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(bytes(content))


REMOVED = object()


def change(key: str, value: object) -> Callable[[Path], object]:
    """Set or remove a key of a JSON file."""

    def write(path: Path) -> None:
        content = json.loads(path.read_text()) | {key: value}
        path.write_text(json.dumps({name: each for name, each in content.items() if each is not REMOVED}))

    return write


HARM: list[tuple[str, Callable[[Path], object], str]] = [
    ("manifest.json", Path.unlink, "make it with `adlm prepare SOURCE --out"),
    ("manifest.json", change("format", 2), "format 2, this version reads 1"),
    ("manifest.json", lambda path: path.rename(path.with_name("progress.json")), "run the same `adlm prepare` again"),
    *(
        ("manifest.json", change(key, REMOVED), f"has no {key}")
        for key in ("vocab_size", "length", "tokenizer", "dtype")
    ),
    ("train-00001.bin", Path.unlink, r"train-00001\.bin is missing.*--overwrite"),
    ("train-00001.bin", cut, r"train-00001\.bin has 1,279 bytes, 1,280 expected"),
    ("valid-00000.len", cut, r"valid-00000\.len has 23 bytes, 24 expected"),
    ("counts.npy", Path.unlink, r"counts\.npy is missing"),
    ("tokenizer.json", flip, r"tokenizer\.json has the checksum"),
    ("tokenizer.json", Path.unlink, r"tokenizer\.json is missing"),
    ("tokenizer_config.json", change("eos_token", None), "eos_id None instead of 256"),
]


@pytest.mark.parametrize(("file", "harm", "message"), HARM)
def test_a_damaged_folder_is_refused(data: Path, file: str, harm: Callable[[Path], object], message: str) -> None:
    harm(data / file)
    with pytest.raises(ValueError, match=message):
        open_data(data)


@pytest.mark.parametrize("file", ["train-00001.bin", "train-00001.len", "counts.npy"])
def test_checksums_show_a_flipped_bit(data: Path, file: str) -> None:
    flip(data / file)
    open_data(data)  # sizes are right: only reading everything shows it
    with pytest.raises(ValueError, match=rf"{file} has the checksum \w+…, \w+… expected"):
        open_data(data, verify=True)
