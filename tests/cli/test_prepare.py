"""`adlm prepare`: its output, its errors, its JSON."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from adlm.data.shards import open_data
from adlm.data.sources import load_excerpt
from tests.cli.terminal import invoke


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt.gz"
    path.write_bytes(
        gzip.compress(
            "\n<|endoftext|>\n".join(load_excerpt()[:60_000].split("\n\nCHAPTER")).encode()
        )
    )
    return path


def run(*arguments: object) -> Any:
    return invoke("prepare", *arguments)


def test_prepare_check_and_overwrite(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    command = (text, "--out", out, "--tokenizer", "gpt2", "--length", "64", "--workers", "1")
    result = run(*command)
    assert result.exit_code == 0, result.output
    data = open_data(out, verify=True)
    assert (data.vocab_size, data.mask_id, data.length) == (50_258, 50_257, 64)
    for split in data.splits:
        assert f"{data.manifest.splits[split].tokens:,}" in result.output
    assert "vocabulary 50,258, mask id 50,257" in result.output
    assert f"next: adlm train recipes/cpu-nano.yaml data.path={out} folder=RUN" in result.output
    assert "\x1b" not in result.output  # no control sequences in a pipe

    again = run(*command)
    assert again.exit_code == 0 and "already prepared, nothing to do" in again.output
    check = run("--out", out, "--check")
    assert check.exit_code == 0 and "all checksums are correct" in check.output

    other = run(*command[:-4], "--length", "32")
    assert (
        other.exit_code == 2
        and "length: 64 there, 32 now" in other.output
        and "Traceback" not in other.output
    )
    shard = out / "train-00000.bin"
    shard.write_bytes(bytes(100) + shard.read_bytes()[100:])
    check = run("--out", out, "--check")
    assert check.exit_code == 2 and "train-00000.bin has the checksum" in check.output
    assert run(*command, "--overwrite", "--check").exit_code == 0


def test_a_tokenizer_is_trained_and_its_size_reported(text: Path, tmp_path: Path) -> None:
    result = run(
        text,
        "--out",
        tmp_path / "data",
        "--train-tokenizer",
        512,
        "--length",
        32,
        "--rows",
        "documents",
    )
    assert result.exit_code == 0 and "vocabulary 512, mask id 511" in result.output
    (tmp_path / "small.txt").write_text("ab " * 400)
    result = run(
        tmp_path / "small.txt",
        "--out",
        tmp_path / "small",
        "--train-tokenizer",
        9000,
        "--length",
        16,
    )
    assert (
        result.exit_code == 0 and "(of 9,000 requested" in result.output
    )  # the text has too few pairs
    manifest = open_data(tmp_path / "small").manifest
    assert manifest.settings.tokenizer["trained"] == 9000 and manifest.tokenizer.vocab_size < 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("book.txt.gz",), "--out is required: a folder"),
        (("--out", "data"), "SOURCE is required: a file"),
        (("--out", "data", "--check"), "make it with `adlm prepare"),
        (("missing.txt", "--out", "data"), "missing.txt"),
        (
            ("book.txt.gz", "--out", "data", "--tokenizer", "nowhere/tokenizer.json"),
            "gpt2, bert-base-uncased, bytes",
        ),
        (("book.txt.gz", "--out", "data", "--length", "1000000"), "fills no row"),
        (("book.txt.gz", "--out", "data", "--rows", "lines"), "expected wrapped or documents"),
        (("book.txt.gz", "--out", "data", "--documents", "pages"), "unknown documents 'pages'"),
    ],
)
def test_errors_are_one_line(
    text: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*options)
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output


def test_skipped_files_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("Some words, and some more of them. " * 200, "utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "notes.md").write_text("Words of markup, and some more of them. " * 200, "utf-8")
    (folder / "NOTICE").write_text("left out", "utf-8")
    result = run(folder, "--out", tmp_path / "data", "--length", "32")
    assert result.exit_code == 0, result.output
    assert "skipped 3 files (--glob selects others): NOTICE, notes.md, picture.png" in result.output
    result = run(
        folder, "--out", tmp_path / "both", "--length", "32", "--glob", "*.md", "--glob", "NOT*"
    )
    assert (
        result.exit_code == 0
        and "skipped 2 files (--glob selects others): a.txt, picture.png" in result.output
    )
    names = [file["name"] for file in open_data(tmp_path / "both").manifest.source["files"]]
    assert names == ["NOTICE", "notes.md"]


def test_a_tokenizer_is_trained_on_broken_surrogates(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a word and half \\ud800 a pair"}\n' * 200)
    result = run(
        tmp_path / "a.jsonl", "--out", tmp_path / "data", "--train-tokenizer", 300, "--length", 16
    )
    assert result.exit_code == 0, result.output
    data = open_data(tmp_path / "data")
    row = data.rows("train").fetch([0])[0][0].tolist()
    assert "half ? a pair" in data.tokenizer.decode(row, skip_special=True)


def test_json_is_all_of_stdout(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    result = run(
        text, "--out", out, "--tokenizer", "bytes", "--length", 32, "--workers", 1, "--json"
    )
    assert result.exit_code == 0, result.output
    answer, manifest = json.loads(result.stdout), open_data(out).manifest
    assert answer["folder"] == str(out) and answer["splits"].keys() == manifest.splits.keys()
    for name, split in answer["splits"].items():
        assert split == {
            key: getattr(manifest.splits[name], key)
            for key in ("rows", "tokens", "documents", "bytes")
        }
    assert "next: adlm train" in result.stderr
    wrong = run(text, "--json")
    assert wrong.exit_code == 2 and wrong.stdout == "" and wrong.stderr.startswith("error: ")
