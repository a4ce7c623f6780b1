"""Rows do not depend on the workers, are those of `adlm prepare`, and are described with what was lost."""

import hashlib
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from adlm.data.batches import TensorRows
from adlm.data.prepare import prepare
from adlm.data.shards import open_data
from adlm.evaluate.data import EvalDataset, hash_rows, load_eval_data
from tests.data.test_sources import FIXTURES
from tests.text.models import PROSE, tokenizer

WORDS = PROSE.split()


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(count)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), "utf-8")
    return path


def read_rows(data: EvalDataset) -> tuple[list[list[int]], list[int]]:
    tokens, lengths = data.rows.fetch(torch.arange(len(data.rows)))
    widths = [tokens.shape[1]] * len(tokens) if lengths is None else lengths.tolist()
    return [row[:width] for row, width in zip(tokens.tolist(), widths, strict=True)], widths


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_the_number_of_workers_changes_nothing(tmp_path: Path, rows: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", sentences(5000))  # more than one chunk
    one, four = (
        load_eval_data(path, tokenizer("bytes"), 32, rows=rows, workers=workers)
        for workers in (1, 4)
    )
    assert (
        one.rows_hash == four.rows_hash
        and one.settings == four.settings
        and one.bytes == four.bytes
    )
    assert torch.equal(one.documents, four.documents)
    assert read_rows(one) == read_rows(four)


@pytest.mark.parametrize(("count", "is_enough"), [(1, False), (9, False), (10, True)])
def test_a_few_documents_are_no_units_of_a_standard_error(
    tmp_path: Path, count: int, is_enough: bool
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [PROSE[:300]] * count)
    units = load_eval_data(path, tokenizer("bytes"), 32).document_units()
    assert (units is not None) == is_enough


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
@pytest.mark.parametrize("words", ["gpt2", "bert-base-uncased"])
def test_rows_are_those_of_prepare(tmp_path: Path, rows: Any, words: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*sentences(200), "", "naïve – 漢字 " * 40])
    prepare(
        path, tmp_path / "data", tokenizer=words, length=24, rows=rows, valid_share=0, workers=1
    )
    fresh = load_eval_data(path, tokenizer(words), 24, rows=rows)
    stored = load_eval_data(tmp_path / "data", tokenizer(words), 24, split="train")
    assert stored.rows_hash == fresh.rows_hash and read_rows(stored) == read_rows(fresh)
    assert torch.equal(stored.documents, fresh.documents)
    assert (
        stored.settings["rows"] == rows
        and stored.settings["identity"] == fresh.settings["identity"]
    )
    manifest = open_data(tmp_path / "data").manifest.splits["train"]
    assert stored.bytes == manifest.bytes and manifest.rows == len(fresh.rows)
    assert abs(fresh.bytes - stored.bytes) < 200  # prepare estimates what of a cut document is kept


def test_wrapped_rows_are_the_stream_between_bos_and_eos(tmp_path: Path) -> None:
    documents = [*sentences(60), "", "", "x" * 70]
    data = load_eval_data(write_jsonl(tmp_path / "a.jsonl", documents), tokenizer("bytes"), 20)
    stream = [
        (token, i) for i, text in enumerate(documents) for token in [*text.encode(), 256]
    ]  # and its document
    count = len(stream) // 18
    rows, _ = read_rows(data)
    assert rows == [
        [256, *(token for token, _ in stream[18 * i : 18 * i + 18]), 256] for i in range(count)
    ]
    assert data.documents.tolist() == [stream[18 * i][1] for i in range(count)]
    assert data.settings["tokens_dropped"] == len(stream) - 18 * count
    assert data.settings["documents"] + data.settings["documents_dropped"] == len(documents)
    assert data.settings["split"] == "valid" and data.settings["row_count"] == count


@pytest.mark.parametrize("limit", [None, 1, 7, 30])
@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_bytes_are_those_of_the_text_in_the_rows(
    tmp_path: Path, rows: Any, limit: int | None
) -> None:
    documents = [*sentences(300), "one word and then " * 20]
    data = load_eval_data(
        write_jsonl(tmp_path / "a.jsonl", documents), tokenizer("bytes"), 40, rows=rows, limit=limit
    )
    found, _ = read_rows(data)
    assert (
        data.bytes
        == sum(token < 256 for row in found for token in row)
        == data.settings["text_bytes"]
    )
    words = tokenizer("gpt2")
    data = load_eval_data(tmp_path / "a.jsonl", words, 40, rows=rows, limit=limit)
    kept = [[token for token in row if token != words.eos_id] for row in read_rows(data)[0]]
    assert data.bytes == len("".join(words.decode(row) for row in kept if row))


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_a_limit_takes_the_first_rows(tmp_path: Path, rows: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", sentences(1000))
    every = load_eval_data(path, tokenizer("bytes"), 32, rows=rows)
    few = load_eval_data(path, tokenizer("bytes"), 32, rows=rows, limit=10)
    assert read_rows(few)[0] == read_rows(every)[0][:10] and few.rows_hash != every.rows_hash
    assert torch.equal(few.documents, every.documents[:10]) and few.settings["limit"] == 10
    assert few.settings["documents_dropped"] is None  # what was not read is not known
    prepare(
        path, tmp_path / "data", tokenizer="bytes", length=32, rows=rows, valid_share=0, workers=1
    )
    stored = load_eval_data(tmp_path / "data", tokenizer("bytes"), 32, split="train", limit=10)
    assert stored.rows_hash == few.rows_hash and stored.bytes == pytest.approx(few.bytes, rel=0.05)
    assert "in proportion" in stored.settings["bytes_source"]


def test_long_documents_are_cut_and_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a" * 50, "b" * 8, "", "c" * 9])
    data = load_eval_data(path, tokenizer("bytes"), 10, rows="documents")
    rows, widths = read_rows(data)
    assert widths == [10, 10, 2, 10] and rows[1] == [256, *b"b" * 8, 256]
    settings = data.settings
    assert (settings["documents_cut"], settings["tokens_dropped"], settings["documents"]) == (
        2,
        42 + 1,
        4,
    )
    assert data.documents.tolist() == [0, 1, 2, 3] and data.bytes == 24


def test_the_hash_is_of_the_documented_bytes() -> None:
    tokens, lengths = torch.tensor([[9, 8, 7], [6, 5, 0]]), torch.tensor([3, 2])
    expected = hashlib.sha256(struct.pack("<2Q5I2I", 2, 3, 9, 8, 7, 6, 5, 3, 2)).hexdigest()
    assert hash_rows(TensorRows(tokens, lengths)) == expected
    tokens[1, 2] = 4  # padding
    assert hash_rows(TensorRows(tokens, lengths)) == expected
    unpadded = hashlib.sha256(struct.pack("<2Q8I", 2, 3, 9, 8, 7, 6, 5, 4, 3, 3)).hexdigest()
    assert hash_rows(TensorRows(tokens)) == unpadded


def test_what_the_text_is_stands_in_the_settings(tmp_path: Path) -> None:
    wiki = load_eval_data(
        f"wikitext103:{FIXTURES / 'wiki.valid.tokens'}", tokenizer("gpt2"), 64
    ).settings
    assert (
        wiki["detokenizer"] == "wikitext" and wiki["stand_in"] is None and wiki["rows"] == "wrapped"
    )
    assert wiki["tokenizer"] == "gpt2" and wiki["tokenizer_sha256"] == tokenizer("gpt2").sha256
    assert wiki["unk_marks"] == 0
    assert wiki["identity"]["files"][0]["name"] == "wiki.valid.tokens"
    news = tmp_path / "news.en.heldout-00000-of-00050"
    news.write_text("It is so .\n" * 9)
    assert (
        load_eval_data(f"lm1b:{news}", tokenizer("gpt2"), 16).settings["rows"] == "documents"
    )  # as that set has them


@pytest.mark.parametrize(
    ("length", "rows", "limit", "count"),
    [
        (90, "documents", 1, 2),
        (90, "documents", 2, 2),
        (90, "documents", 3, 11),
        (32, "wrapped", 1, 2),
    ],
)
def test_unk_marks_are_counted_where_rows_hold_them(
    tmp_path: Path, length: int, rows: Any, limit: int, count: int
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a <unk> b <unk>", "c " * 30, "<unk>" * 9])
    assert (
        load_eval_data(path, tokenizer("bytes"), length, rows=rows, limit=limit).settings[
            "unk_marks"
        ]
        == count
    )


def test_half_a_surrogate_pair_is_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab\\ud800cdefghijkl"}\n')
    data = load_eval_data(path, tokenizer("bytes"), 8, rows="documents")
    assert read_rows(data)[0] == [[256, *b"ab?cde", 256]] and data.bytes == 6


@pytest.mark.parametrize(
    ("content", "options", "error"),
    [
        ("text", {"name": "nowhere.txt"}, r"no file or folder.*nowhere\.txt"),
        ("", {}, "is empty: give a file or a folder with text in it"),
        (" \n\n", {}, "holds no document"),
        (
            "a few words",
            {},
            r"fills no row of 64 tokens: it has 11 tokens in 1 docu.*; use a smaller",
        ),
        ("a few\n<|endoftext|>\nwords", {}, r"10 tokens in 2 documents.*rows=documents"),
        ("text", {"rows": "lines"}, "unknown rows 'lines': expected one of wrapped, documents"),
        ("text", {"limit": 0}, "limit must be a whole number from 1 on, got 0"),
        ("text", {"workers": 0}, "workers must be a whole number from 1 on, got 0"),
        ("text", {"words": "bare"}, "'bare' has no BOS or no EOS token"),
        (None, {}, r"cannot be read twice.*save it to a file"),
    ],
)
def test_errors(tmp_path: Path, content: str | None, options: dict[str, Any], error: str) -> None:
    source = tmp_path / options.pop("name", "a.txt")
    if content is None:
        os.mkfifo(tmp_path / "a.txt")
    else:
        (tmp_path / "a.txt").write_text(content, "utf-8")
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        load_eval_data(source, tokenizer(options.pop("words", "bytes")), 64, **options)


def test_a_prepared_folder_must_fit(tmp_path: Path) -> None:
    path, folder = write_jsonl(tmp_path / "a.jsonl", sentences(100)), tmp_path / "data"
    prepare(path, folder, tokenizer="bytes", length=32, workers=1)
    assert len(load_eval_data(folder, tokenizer("bytes"), 32).rows) == len(
        open_data(folder).rows("valid")
    )
    for words, length, options, error in (
        ("gpt2", 32, {}, r"prepared with the tokenizer 'bytes'.*model's is 'gpt2'.*prepare it again"),
        ("bytes", 16, {}, r"have 32 tokens, which is more than 16.*--length 16"),
        ("bytes", 32, {"rows": "documents"}, "are wrapped, not documents"),
        ("bytes", 32, {"split": "test"}, "has no split 'test': it has train, valid"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            load_eval_data(folder, tokenizer(words), length, **options)  # type: ignore[arg-type]
    (folder / "manifest.json").rename(folder / "progress.json")
    with pytest.raises(ValueError, match="is not finished"):
        load_eval_data(folder, tokenizer("bytes"), 32)
