"""Files give the same documents in every format, compressed or not, in chunks of any size."""

import csv
import gzip
import io
import json
import os
import random
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adlm.data import formats, sources
from adlm.data.sources import Source, describe_version, load_excerpt, open_source
from adlm.files import hash_file

FIXTURES = Path(__file__).parent / "fixtures"
TEXTS = ["One, two.\nThree", "A \"word\" with 'marks', a tab\tand ümläute", "x" * 200_000, "last"]
ROWS = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]


def need(module: str) -> Any:
    """Import a module of an extra; without it the test is skipped, or fails if ADLM_ALL is 1."""
    if os.environ.get("ADLM_ALL") == "1":
        return __import__(module)
    return pytest.importorskip(module, reason=f"{module} comes with the extra data")


def texts(source: Source) -> list[str]:
    return [text for text, _ in source.read()]


def make_csv(delimiter: str) -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue().encode()


def make_parquet(rows: list[dict[str, Any]] = ROWS) -> bytes:
    need("pyarrow.parquet")
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2)
    return file.getvalue()


FORMATS: dict[str, Callable[[], bytes]] = {
    "a.txt": lambda: "\n<|endoftext|>\n".join(TEXTS).encode(),
    "a.tokens": lambda: ("\n<|endoftext|>\n".join(TEXTS) + "\n<|endoftext|>\n").encode(),
    "a.unknown": lambda: "\r\n<|endoftext|>\r\n".join(
        text.replace("\n", "\r\n") for text in TEXTS
    ).encode(),
    "a.jsonl": lambda: "\n".join(map(json.dumps, ROWS)).encode(),
    "texts.jsonl": lambda: "\n".join(map(json.dumps, TEXTS)).encode(),
    "lines.json": lambda: "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode(),
    "a.csv": lambda: make_csv(","),
    "a.tsv": lambda: make_csv("\t"),
    "a.parquet": make_parquet,
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str, packed: bool) -> None:
    content = FORMATS[name]()
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(content) if packed else content)
    source = open_source(path)
    read = list(source.read())
    assert [text for text, _ in read] == TEXTS
    positions = [position for _, position in read]
    assert (
        positions == sorted(positions)
        and positions[-1] == source.total_bytes == path.stat().st_size
    )
    assert texts(source) == TEXTS
    assert json.loads(json.dumps(source.identity)) == source.identity == open_source(path).identity


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 100])
@pytest.mark.parametrize("name", [name for name in FORMATS if "parquet" not in name])
def test_chunks_do_not_matter(
    tmp_path: Path, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = FORMATS[name]().replace(b"x" * 200_000, b"x" * 99)
    (tmp_path / name).write_bytes(content)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(formats, "CHUNK_BYTES", size)
    monkeypatch.setattr(formats, "PART_CHARACTERS", 2 * size)
    expected = [text.replace("x" * 200_000, "x" * 99) for text in TEXTS]
    assert (
        texts(open_source(tmp_path / name))
        == texts(open_source(tmp_path / f"{name}.gz"))
        == expected
    )


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.txt", "lines.json", "a.csv"])
def test_other_encodings_are_known_by_their_byte_order_mark(
    tmp_path: Path, name: str, encoding: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = FORMATS[name]().replace(b"x" * 200_000, b"x").decode()
    (tmp_path / name).write_bytes(f"\ufeff{content}".encode(encoding))
    monkeypatch.setattr(formats, "CHUNK_BYTES", size)
    assert texts(open_source(tmp_path / name)) == [*TEXTS[:2], "x", TEXTS[3]]


@pytest.mark.parametrize("rule", formats.RULES)
def test_long_documents_come_in_parts(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(rule)
    pieces = [
        "\n<|endoftext|>\n",
        "<|endoftext|>",
        "\r\n",
        "\n\n",
        " \n",
        "é世\u3000",
        "word ",
        "x" * 500,
        "\ufeff",
    ]
    weights = [2, 5, 5, 1, 9, 50, 50, 50, 1]
    (tmp_path / "a.txt").write_bytes("".join(rng.choices(pieces, weights, k=3000)).encode())
    source = open_source(tmp_path / "a.txt", documents=rule)
    whole = list(source.parts())
    assert all(is_last for _, _, is_last in whole) and [text for text, _, _ in whole] == texts(
        source
    )
    monkeypatch.setattr(formats, "PART_CHARACTERS", 100)
    for size in (50, 777, 1 << 20):
        monkeypatch.setattr(formats, "CHUNK_BYTES", size)
        parts = list(source.parts())
        assert texts(source) == [text for text, _, _ in whole]
        assert size > 777 or len(parts) > len(whole)


def test_a_gzip_bomb_is_read_in_little_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(32):
            file.write(b"some words in one line " * 50_000)
    source = open_source(tmp_path / "a.txt.gz")
    tracemalloc.start()
    try:
        length = sum(len(text) for text, _, _ in source.parts())
        assert length == 32 * 50_000 * 23 and tracemalloc.get_traced_memory()[1] < 12e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "' + b"x" * 5000, "a line of .*a.jsonl has more than 1,000 bytes"),
        ("a.csv", b"text\n" + b"x" * 5000, "a line of .*a.csv has more than 1,000 bytes"),
        ("a.csv", b'text\n"' + b"x\n" * 5000, "field larger than field limit"),
        ("a.txt", b"x " * 2500, "a document of .*a.txt has more than 2,000 bytes, .*divide it"),
        ("a.txt", b"x" * 5000, "a word of .*a.txt has more than 1,600 bytes"),
        ("a.txt", b" " * 5000, "a word of .*a.txt has more than 1,600 bytes"),
    ],
)
def test_what_must_fit_into_memory_is_bounded(
    tmp_path: Path, name: str, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"MAX_LINE_BYTES": 1000, "MAX_WORD": 1600, "MAX_WHOLE_BYTES": 2000}
    limits |= {"CHUNK_BYTES": 100, "PART_CHARACTERS": 100}
    for constant, value in limits.items():
        monkeypatch.setattr(formats, constant, value)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(open_source(tmp_path / name).read())


CSV = b'1,"A title","Two\nlines, ""quoted"""\n2,B,C\n'
RULED = "<|endoftext|>\n a <|endoftext|>\nb\n \n\n<|endoftext|>\n<|endoftext|>\nc<|endoftext|>\n\td\n\n\ne \n"


@pytest.mark.parametrize("size", [1, 5, 14, 1 << 20])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("auto", [" a <|endoftext|>\nb\n \n", "c<|endoftext|>\n\td\n\n\ne "]),
        ("file", [RULED[:-1]]),
        (
            "line",
            [
                "<|endoftext|>",
                "a <|endoftext|>",
                "b",
                *["<|endoftext|>"] * 2,
                "c<|endoftext|>",
                "d",
                "e",
            ],
        ),
        (
            "blank",
            [
                "<|endoftext|>\n a <|endoftext|>\nb",
                "<|endoftext|>\n<|endoftext|>\nc<|endoftext|>\n\td",
                "e",
            ],
        ),
        ("every-line", [line if line.strip() else "" for line in RULED.splitlines(keepends=True)]),
    ],
)
def test_rules(
    tmp_path: Path, rule: str, expected: list[str], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(RULED)
    monkeypatch.setattr(formats, "CHUNK_BYTES", size)
    assert texts(open_source(tmp_path / "a.txt", documents=rule)) == expected


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        (
            "a.txt.gz",
            gzip.compress(b"one ", mtime=0) + gzip.compress(b"two", mtime=0) + b"\0" * 9,
            {},
            ["one two"],
        ),
        ("a.csv", b"\xef\xbb\xbftext,b\nx,y\n", {}, ["x"]),  # a byte order mark is no text
        ("a.csv", CSV, {"column": "1+2"}, ['A title Two\nlines, "quoted"', "B C"]),
        ("a.csv", CSV, {"column": "2"}, ['Two\nlines, "quoted"', "C"]),
        ("a.csv", CSV, {"column": "text|2"}, ['Two\nlines, "quoted"', "C"]),
        ("a.jsonl", b'{"q": "Why?", "n": 1, "a": "So."}\n', {"column": "q+a"}, ["Why? So."]),
        ("a.jsonl", b'{"n": 1, "body": "So."}\n', {}, ["So."]),  # the one column of text
        (
            "a.jsonl",
            b'{"title": "A"}\n{"title": "B", "text": "the text"}\n',
            {"column": "title"},
            ["A", "B"],
        ),
        (
            "a.jsonl",
            b'{"text": "half \\ud800 a pair, \\ud83d\\ude00"}\n',
            {},
            ["half ? a pair, \U0001f600"],
        ),
        ("a.txt", b"it is n't <unk>\n", {"detokenizer": "ptb"}, ["it isn't ?"]),
        (
            "a.txt",
            load_excerpt().encode(),
            {},
            [load_excerpt().removesuffix("\n")],
        ),  # no separator: one document
    ],
    ids=range(11),
)
def test_what_is_read(
    tmp_path: Path, name: str, content: bytes, options: Any, expected: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert texts(open_source(tmp_path / name, **options)) == expected


def test_folders_are_read_in_a_natural_order(tmp_path: Path) -> None:
    names = [
        "b/1.txt",
        "part-10.txt",
        "part-3.jsonl",
        "part-2.txt",
        "part-02.txt",
        "a.txt",
        "part-1.txt.gz",
        "Z.txt",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = (json.dumps({"text": name}) if name.endswith("jsonl") else name).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for ignored in (".hidden.txt", ".git/x.txt", "notes.md", "LICENSE"):
        (tmp_path / ignored).parent.mkdir(exist_ok=True)
        (tmp_path / ignored).write_text("not this")
    order = [
        "Z.txt",
        "a.txt",
        "b/1.txt",
        "part-1.txt.gz",
        "part-02.txt",
        "part-2.txt",
        "part-3.jsonl",
        "part-10.txt",
    ]
    source = open_source(tmp_path)
    read = list(source.read())
    assert (
        [text for text, _ in read] == [file["name"] for file in source.identity["files"]] == order
    )
    assert read[-1][1] == source.total_bytes


def test_the_files_of_a_split(tmp_path: Path) -> None:
    for name in ("train-0.txt", "train-1.txt", "my.valid.txt", "test/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(open_source(tmp_path)) == ["train-0.txt", "train-1.txt"]
    assert (
        texts(open_source(tmp_path, split="valid"))
        == texts(open_source(tmp_path, split="dev"))
        == ["my.valid.txt"]
    )
    assert texts(open_source(tmp_path, split="test")) == ["test/a.txt"]
    assert len(texts(open_source(tmp_path, split="all"))) == 4
    with pytest.raises(
        ValueError, match=r"no file of the split 'extra'; it has test, train, validation"
    ):
        open_source(tmp_path, split="extra")
    (tmp_path / "more.txt").write_text("?")
    with pytest.raises(ValueError, match=r"is named after a split, more.txt is not.*split='all'"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[1:3]", "bc"),
        ("train[:-1]", "abc"),
        ("train[-1:]", "d"),
        ("train[-3:-1]", "bc"),
        ("train[2:]", "cd"),
    ],
)
def test_slices_of_documents(tmp_path: Path, split: str, expected: str) -> None:
    (tmp_path / "a.txt").write_text("a\nb\n")
    (tmp_path / "b.txt").write_text("c\nd\n")
    source = open_source(tmp_path, split=split, documents="line")
    assert texts(source) == list(expected)
    assert source.identity != open_source(tmp_path, documents="line").identity
    with pytest.raises(ValueError, match=r"needs at least 5 documents, and there are 4"):
        open_source(tmp_path, split="train[-5:]", documents="line").read()
    with pytest.raises(ValueError, match=r"'train\[1\]' is invalid"):
        open_source(tmp_path, split="train[1]")


def test_the_identity_is_that_of_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "a.txt").write_text("some text")
    before = open_source(here).identity
    assert str(tmp_path) not in json.dumps(before)
    there = tmp_path / "there"
    shutil.copytree(here, there)
    os.utime(there / "a.txt", (1, 1))
    monkeypatch.chdir(tmp_path)
    assert (
        before
        == open_source(there).identity
        == open_source("there").identity
        == open_source("./there/").identity
    )
    assert (
        before
        != open_source(here, documents="line").identity
        != open_source(here, detokenizer="ptb").identity
    )
    (here / "a.txt").write_text("some tex7")
    assert before != open_source(here).identity


def test_the_limit_of_a_document_is_not_one_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_WHOLE_BYTES", 9)
    (tmp_path / "a.txt").write_text("eight...\n" * 5)
    assert texts(open_source(tmp_path / "a.txt", documents="line")) == ["eight..."] * 5


def test_a_hash_is_reused_for_an_unchanged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MIN_KNOWN_BYTES", 8)
    path = tmp_path / "a.txt"

    def identify(text: str, seconds: float) -> str:
        path.write_text(text)
        os.utime(path, (seconds, seconds))
        return open_source(path).identity["files"][0]["sha256"]

    first = identify("abcd......efgh", 1000)
    monkeypatch.setattr(sources, "hash_file", lambda path: pytest.fail(f"{path} is hashed again"))
    assert open_source(path).identity["files"][0]["sha256"] == first
    monkeypatch.setattr(sources, "hash_file", hash_file)
    time.sleep(0.02)  # a tick of the file system's clock
    assert first != identify("abcd!!!!!!efgh", 1000)  # with another change time only
    assert describe_version(path).split()[3:] == [
        str(path.stat().st_dev),
        str(path.stat().st_ctime_ns),
    ]
    assert len({first, identify("abcd!!!!!!efgh", 2000), identify("abcd......efgh.", 1000)}) == 3
    assert (
        len({identify(text, time.time()) for text in ("now......", "now!!!!!!")}) == 2
    )  # too recent to be reused
    known = open_source(path).hashes
    os.utime(path, (3000, 3000))
    assert known == {} and list(open_source(path).hashes.values()) == [
        open_source(path).identity["files"][0]["sha256"]
    ]


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    documents = open_source(tmp_path, documents="line").read()
    assert next(documents)[0] == "one"
    (tmp_path / "a.txt").chmod(0o600)  # the content is the same
    assert [text for text, _ in documents] == ["two"]
    documents = open_source(tmp_path, documents="line").read()
    assert next(documents)[0] == "one"
    (tmp_path / "a.txt").write_text("one\nten\nmore\n")
    with pytest.raises(ValueError, match=r"a.txt changed while it was read"):
        list(documents)


def test_many_files_are_identified_by_one_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_LISTED_FILES", 2)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    before = open_source(tmp_path).identity
    assert before["files"].keys() == {"count", "bytes", "sha256"} and before["files"]["count"] == 3
    (tmp_path / "b.txt").write_text("x")
    assert before != open_source(tmp_path).identity


GOOD = "some text, long enough for a packed stream to be cut\n" * 50
PATHS = (
    "no/such/place",
    "./here",
    "gone.txt",
    "gone.jsonl.gz",
    "~/no-such-folder",
    "a/",
    "lm1b:no/such/place",
)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *((path, r"no file or folder .*check the path") for path in PATHS),
        ("lm1b:", "no path after the colon"),
        ("openwebtxt", r"'openwebtxt' is no file.*lm1b, openwebtext-split.*owner/name"),
    ],
)
def test_missing_sources(spec: str, message: str) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        open_source(spec)


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": oops}\n', {}, r"a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', {}, r"no text column 'text'; choose one.*'a', 'b'"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', {"column": "c"}, r"no text column 'c'.*'a', 'b'"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"txt": "y"}\n',
            {},
            r"line 2 has no column 'text'; there are: 'txt'",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', {}, r"line 2: column 'text' holds None"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', {}, r"line 2 is not JSON .*an array"),
        (
            "a.jsonl",
            b'{"a": "A"}\n{"text": "x"}\n',
            {},
            r"line 1 has no column 'text'; there are: 'a'.*--column",
        ),
        ("a.jsonl", b'{"text": 1}\n', {}, r"has no text column 'text'"),
        ("a.json", b'[{"text": "x"}, {"text": }]', {}, r"line 1 is not JSON .*\(Expecting value"),
        ("a.json", b'[{"text": "x"}, ', {}, r"line 1 is not JSON"),
        (
            "a.csv",
            b"a,b\nx,y\n",
            {},
            r"no text column 'text'.*'a', 'b'; where there is no header, give numbers",
        ),
        ("a.csv", b"x,y\nz\n", {"column": "1"}, r"line 2 has no column '1'; there are: '0'"),
        ("a.csv", b'text\n"open\n', {}, r"line 2: unexpected end of data"),
        ("a.txt", b"caf\xe9 au lait", {}, r"byte 3 \(0xe9\) is not UTF-8.*iconv"),
        ("a.txt", b"good\n<|endoftext|>\ncaf\xe9", {}, r"byte 22 \(0xe9\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', {}, r"byte 24 \(0xff\)"),
        ("a.csv", b"text\nfine\n\xff\n", {}, r"byte 10 \(0xff\)"),
        ("a.txt", "some text".encode("utf-16-le"), {}, r"byte 1 is NUL, .*iconv -f utf-16le"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\0"}', {}, r"byte 24 is NUL"),
        ("a.txt", b"\xff\xfea", {}, r"begins as UTF-16 and is not sound \(truncated data\)"),
        ("a.json", b"[" * 100_000, {}, r"line 1 is not JSON"),
        (
            "a.txt.gz",
            gzip.compress(GOOD.encode(), mtime=0)[:-12],
            {},
            r"not a sound gzip file.*ended before",
        ),
        ("a.txt.gz", b"not packed at all", {}, r"not a sound gzip file"),
        ("a.txt", b"", {}, r"is empty"),
        ("a.txt", b" \n\n", {}, r"holds no document"),
        ("a.jsonl", b"\n", {}, r"is empty"),
        ("a.csv", b"text\n", {}, r"holds no document"),
        ("a.txt", b"x", {"column": "text"}, r"column 'text' is for tables"),
        ("a.jsonl", b'{"text": "x"}', {"documents": "line"}, r"a row is a document"),
        (
            "a.txt",
            b"x",
            {"documents": "page"},
            r"unknown documents 'page': expected one of auto, file, line",
        ),
        (
            "a.txt",
            b"x",
            {"detokenizer": "moses"},
            r"unknown detokenizer 'moses': expected one of wikitext",
        ),
    ],
)
def test_files_with_errors(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(open_source(tmp_path / name, **options).read())


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ((), ["a.md", "b.py", "d.rst", "deep/c.html"]),  # there is no other text
        ("*.md", ["a.md"]),
        (["LICENSE", "deep/*"], ["LICENSE", "deep/c.html"]),
        ("[A-Z]*", ["LICENSE"]),
    ],
)
def test_folders_of_markup_and_patterns(tmp_path: Path, glob: Any, expected: list[str]) -> None:
    for name in ("a.md", "b.py", "deep/c.html", "d.rst", "LICENSE", "e.png", ".hidden.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(open_source(tmp_path, glob=glob)) == expected
    _, skipped = sources.select_files(tmp_path, glob=(glob,) if isinstance(glob, str) else glob)
    assert skipped == sorted(
        {"a.md", "b.py", "deep/c.html", "d.rst", "LICENSE", "e.png"} - set(expected)
    )
    with pytest.raises(ValueError, match=r"no name of the pattern \*\.txt; found: LICENSE, a.md"):
        open_source(tmp_path, glob="*.txt")
    with pytest.raises(
        ValueError, match=r"glob '\*' selects files of a folder, and .*a.md is a file"
    ):
        open_source(tmp_path / "a.md", glob="*")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "found: nothing"),
        (["picture.png", ".hidden.txt"], r"\.jsonl.*found: picture.png$"),
        (["a.txt", "a.txt.gz"], "a.txt and a.txt.gz, which may be the same text"),
    ],
)
def test_folders_with_errors(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize(("module", "spec"), [("pyarrow", "a.parquet"), ("datasets", "owner/name")])
def test_a_missing_extra_is_named(
    tmp_path: Path, module: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportError, match=rf"needs {module} \(.*\): .*pip install .*\[data\]"):
        open_source(spec)
