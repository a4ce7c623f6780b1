"""What cannot be read is refused with the place, what was expected and what to do."""

import builtins
import gzip
from pathlib import Path
from typing import Any

import pytest

from adlm.data.sources import open_source

GOOD = "some text, long enough for a packed stream to be cut\n" * 50


@pytest.mark.parametrize("spec", ["no/such/place", "./here", "gone.txt", "gone.jsonl.gz", "~/no-such-folder", "a/"])
def test_a_path_that_is_not_there(spec: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*check the path"):
        open_source(spec)


def test_a_name_that_means_nothing() -> None:
    with pytest.raises(FileNotFoundError, match=r"'openwebtxt' is no file.*lm1b, openwebtext-split.*owner/name"):
        open_source("openwebtxt")
    with pytest.raises(FileNotFoundError, match="lm1b:no/such/place"):
        open_source("lm1b:no/such/place")
    with pytest.raises(ValueError, match="no path after the colon"):
        open_source("lm1b:")


@pytest.mark.parametrize(
    ("name", "content", "how", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": oops}\n', {}, r"a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', {}, r"no column 'text'; choose one of these.*'a', 'b'"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', {"column": "c"}, r"no column 'c'.*'a', 'b'"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', {}, r"line 2 has no column 'text'; there are: 'txt'"),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', {}, r"line 2: column 'text' holds None"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', {}, r"line 2 is list"),
        ("a.json", b'[{"text": "x"}, {"text": }]', {}, r"is not a JSON array \(Expecting value at line 1, column 26\)"),
        ("a.json", b'[{"text": "x"}, ', {}, r"is not a JSON array"),
        ("a.csv", b"a,b\nx,y\n", {}, r"no column 'text'.*'a', 'b'; where there is no header, give numbers"),
        ("a.csv", b"x,y\nz\n", {"column": "1"}, r"line 2 has 1 fields"),
        ("a.csv", b'text\n"open\n', {}, r"line 2: unexpected end of data"),
        ("a.txt", b"caf\xe9 au lait", {}, r"byte 3 \(0xe9\) is not UTF-8.*iconv"),
        ("a.txt", b"good\n<|endoftext|>\ncaf\xe9", {}, r"byte 22 \(0xe9\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', {}, r"byte 24 \(0xff\)"),
        ("a.csv", b"text\nfine\n\xff\n", {}, r"byte 10 \(0xff\)"),
        ("a.txt.gz", gzip.compress(GOOD.encode(), mtime=0)[:-12], {}, r"ends in the middle of its gzip stream"),
        ("a.txt.gz", b"not packed at all", {}, r"not a sound gzip file"),
        ("a.txt", b"", {}, r"is empty"),
        ("a.txt", b" \n\n", {}, r"holds no document"),
        ("a.jsonl", b"\n", {}, r"is empty"),
        ("a.csv", b"text\n", {}, r"holds no document"),
        ("a.txt", b"x", {"column": "text"}, r"column 'text' is for tables"),
        ("a.jsonl", b'{"text": "x"}', {"documents": "line"}, r"a row is a document"),
        ("a.txt", b"x", {"documents": "page"}, r"'page' is unknown: choose one of auto, file, line"),
        ("a.txt", b"x", {"documents": "separator"}, r"has no line '<\|endoftext\|>'"),
        ("a.txt", b"x", {"detokenizer": "moses"}, r"'moses' is unknown: choose one of wikitext"),
    ],
)
def test_what_is_wrong_with_it(tmp_path: Path, name: str, content: bytes, how: dict[str, Any], message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(open_source(tmp_path / name, **how).read())


def test_a_folder_with_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found: nothing"):
        open_source(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"\x89")
    (tmp_path / ".hidden.txt").write_text("x")
    with pytest.raises(ValueError, match=r"\.jsonl.*found: picture.png$"):
        open_source(tmp_path)


def test_a_file_and_its_packed_self(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(ValueError, match=r"a.txt and a.txt.gz, which may be the same text"):
        open_source(tmp_path)


@pytest.mark.parametrize(("module", "spec"), [("pyarrow", "a.parquet"), ("datasets", "owner/name")])
def test_an_extra_that_is_missing_is_named(
    tmp_path: Path, module: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == module:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportError, match=rf"{module}: pip install 'adlm\[data\]'"):
        open_source(spec)
