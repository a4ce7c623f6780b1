"""Readers of text files and tables: bytes to documents, each with the bytes of its file read so far."""

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from adlm.errors import import_extra

Documents = Iterator[tuple[str, int]]
Parts = Iterator[
    tuple[str, int, bool]
]  # a long document in several parts: the flag is set on its last one

# A line that is exactly the separator; the lookbehind comes second, so that the search is for a literal.
SEPARATOR_LINE = r"<\|endoftext\|>(?<![^\n]<\|endoftext\|>)\r?"
BLANK_LINES = re.compile(r"(?:[ \t]*\n)*")
CHUNK_BYTES = 1 << 20
PART_CHARACTERS = 1 << 20  # a document of plain text that is longer comes in parts
MAX_WORD = 1 << 24  # characters without a place to cut
# Between words in any script, which no pre-tokenizer of `workers.can_cut_words` takes together.
WORD_END = re.compile(r"(?<=\S)(?=\n| \S)|(?<=[\u3041-\u30fa\u4e00-\u9fff])(?=[、。，！？])")
MAX_LINE_BYTES = 1 << 26  # of a table
MAX_WHOLE_BYTES = (
    1 << 28
)  # of a compressed Parquet file, or of a document that is not read in parts
TEXT_SUFFIXES = (".txt", ".tokens", ".raw")
SURROGATE = re.compile("[\ud800-\udfff]")
REMEDY = "leave such rows out, or choose another --column"
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
}  # first: UTF-16's is a part of the first
MARKS |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
MAX_HEADER_ROWS = 100  # rows of a table that are searched for column names: the first may lack some


def read_bytes(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the bytes of a file with the number of bytes read from the disk so far; .gz is decompressed."""
    with path.open("rb") as raw:
        file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        try:
            for chunk in chain(
                [file.read(4)], iter(lambda: file.read(CHUNK_BYTES), b"")
            ):  # a byte order mark first
                yield chunk, raw.tell()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path} is not a sound gzip file ({error}): make or fetch it again"
            ) from error


def read_chunks(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the text of a file, in UTF-8 or by its byte order mark, with the bytes read from the disk so far."""
    encoding, offset = "UTF-8", 0  # of the chunk in the (decompressed) file
    decoder = codecs.getincrementaldecoder(encoding)()
    for chunk, position in chain(read_bytes(path), [(b"", path.stat().st_size)]):
        if offset == 0:
            encoding = next(
                (name for mark, name in MARKS.items() if chunk.startswith(mark)), encoding
            )
            decoder = codecs.getincrementaldecoder(encoding)()
        start = offset - len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            problem = f"{path} begins as {encoding} and is not sound ({error.reason}): make or fetch it again"
            if encoding == "UTF-8":
                problem = f"{path}: byte {start + error.start} (0x{error.object[error.start]:02x}) is not UTF-8: "
                problem += "convert the file first, for example with iconv -f latin1 -t utf-8"
            raise ValueError(problem) from error
        if (place := text.find("\0")) >= 0:
            problem = (
                f"{path}: byte {start + len(text[:place].encode())} is NUL, which no UTF-8 text has"
            )
            remedy = "convert UTF-16 without byte order mark with iconv -f utf-16le -t utf-8"
            raise ValueError(
                f"{problem}: leave out what is not text; {remedy}; remove stray NULs with tr -d '\\0'"
            )
        if text := text if start else text.removeprefix("\ufeff"):
            yield text, position
        offset += len(chunk)


def read_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the lines of a file with their ends, and the bytes read so far; only a line feed ends a line."""
    parts: list[str] = []
    position = 0
    for chunk, position in read_chunks(path):
        *lines, rest = chunk.split("\n")
        for line in lines:
            yield "".join((*parts, line, "\n")), position
            parts = []
        parts.append(rest)
        check_size(
            sum(map(len, parts)),
            MAX_LINE_BYTES,
            f"a line of {path}",
            "divide the text, or make the file again",
        )
    if any(parts):
        yield "".join(parts), position


def read_whole(path: Path, limit: int, remedy: str) -> bytes:
    """Return the bytes of a file that cannot be read piece by piece, decompressed."""
    content = bytearray()
    for chunk, _ in read_bytes(path):
        content += chunk
        check_size(len(content), limit, str(path), remedy)
    return bytes(content)


def check_size(size: int, limit: int, name: str, remedy: str) -> None:
    """Raise an error if something that must fit into memory has too many bytes."""
    if size > limit:
        raise ValueError(
            f"{name} has more than {limit:,} bytes, which are read as a whole: {remedy}"
        )


def join_parts(parts: Parts, name: str) -> Documents:
    """Yield whole documents of the source with this name."""
    held: list[str] = []
    size = 0  # in characters, which are no more than the bytes
    for text, position, is_last in parts:
        held.append(text)
        size += len(text)
        check_size(
            size,
            MAX_WHOLE_BYTES,
            f"a document of {name}",
            "divide it with lines that are <|endoftext|>",
        )
        if is_last:
            yield "".join(held), position
            held, size = [], 0


# Plain text: a rule says where one document ends and the next begins.

FindCuts = Callable[[str, int, bool], Iterator[tuple[int, int]]]


def _find_pattern(inside: str, at_end: str | None = None) -> FindCuts:
    """Find a pattern, or another one where the data are the end of the file."""
    patterns = re.compile(inside), re.compile(at_end or inside)
    return lambda data, start, is_end: (
        match.span() for match in patterns[is_end].finditer(data, start)
    )


@dataclass(frozen=True)
class DocumentRule:
    """Where documents end in plain text, and what is kept of each."""

    find_cuts: FindCuts
    reach: int = (
        0  # a cut that begins further than this from the end of the data has been seen whole
    )
    clean_start: Callable[[str], str] = str
    clean_end: Callable[[str], str] = lambda text: text.removesuffix("\n")  # it closes the document
    keeps_blank: bool = False  # as the empty text; else blank documents are skipped


_lines = _find_pattern(r"\n")
RULES: dict[str, DocumentRule] = {
    "auto": DocumentRule(
        _find_pattern(SEPARATOR_LINE + r"\n", SEPARATOR_LINE + r"(?:\n|\Z)"), reach=15
    ),
    "file": DocumentRule(lambda data, start, is_end: iter(())),
    "line": DocumentRule(_lines, clean_start=str.lstrip, clean_end=str.rstrip),
    "blank": DocumentRule(
        _find_pattern(r"\n[ \t\r]*\n"),
        1 << 12,
        lambda text: BLANK_LINES.sub("", text, count=1),
        str.rstrip,
    ),
    "every-line": DocumentRule(_lines, clean_end=lambda text: f"{text}\n", keeps_blank=True),
}


def read_text(path: Path, rule: DocumentRule) -> Parts:
    """Yield the documents of a plain text file, long ones in parts that end with a word."""
    data, searched, position = "", 0, 0
    done = 0  # characters of `data` that were yielded: 0, or 1 inside a document, where a rule may look back at it

    def clean(text: str, *, is_last: bool) -> str:
        text = text.replace("\r\n", "\n") if "\r" in text else text
        text = text if done else rule.clean_start(text)
        return rule.clean_end(text) if is_last else text

    def finish(start: int, stop: int) -> str | None:
        text = data[start:stop]
        if not done and not text.strip():
            return "" if rule.keeps_blank else None
        return clean(text, is_last=True)

    for chunk, position in chain(read_chunks(path), [("", path.stat().st_size)]):
        data += chunk
        start = done
        for begin, end in rule.find_cuts(data, searched, not chunk):
            if (text := finish(start, begin)) is not None:
                yield text, position, True
            start, done = end, 0
        data = data[start - done :]
        # Without what may be the beginning of a cut.
        if place := WORD_END.search(data, done + PART_CHARACTERS, max(0, len(data) - rule.reach)):
            yield clean(data[done : place.start()], is_last=False), position, False
            data, done = data[place.start() - 1 :], 1
        check_size(len(data), MAX_WORD, f"a word of {path}", "divide it, or leave it out")
        searched = max(done, len(data) - rule.reach)
    if data and (text := finish(done, len(data))) is not None:
        yield text, position, True


# Tables: a row is a document, a column its text. A reader of rows takes the names of the columns to read, or None to
# learn them, and yields each row (by column), the bytes read so far and the row's place for messages.

Rows = Iterator[tuple[Any, int, str]]


def read_columns(path: Path) -> dict[str, bool]:
    """Return the columns in the first rows of a table, and whether each holds text."""
    columns: dict[str, bool] = {}
    for row, _, _ in islice(TABLES[get_suffix(path)](path, None), MAX_HEADER_ROWS):
        for name, value in (row if isinstance(row, dict) else {}).items():
            columns[name] = columns.get(name, False) or isinstance(value, str)
    return columns


def join_columns(row: Any, names: tuple[str, ...], place: str) -> str:
    """Join the named columns of a row with a space."""
    if not isinstance(row, dict):
        raise ValueError(
            f"{place} is {type(row).__name__}, where an object or a text was expected: {REMEDY}"
        )
    for name in names:
        if name not in row:
            known = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"{place} has no column {name!r}; there are: {known}: {REMEDY}")
        if not isinstance(row[name], str):
            raise ValueError(
                f"{place}: column {name!r} holds {row[name]!r:.60}, expected a text: {REMEDY}"
            )
    text = " ".join(row[name] for name in names)
    # Half of a surrogate pair, which JSON can write, is no character and has no UTF-8: it becomes a question mark.
    return text.encode("utf-8", "replace").decode("utf-8") if SURROGATE.search(text) else text


def _read_json_lines(path: Path, names: tuple[str, ...] | None) -> Rows:
    for number, (line, position) in enumerate(read_lines(path), 1):
        if not line.isspace():
            place = f"{path}, line {number}"
            try:
                if isinstance(row := json.loads(line), list):
                    raise ValueError("an array")
            except (ValueError, RecursionError) as error:  # RecursionError: too many brackets
                remedy = "write one object or text per line, the items of an array with jq -c '.[]'"
                raise ValueError(f"{place} is not JSON of this form ({error}): {remedy}") from error
            yield (
                {"": row} if isinstance(row, str) else row,
                position,
                place,
            )  # a text is its one nameless column


def _read_csv(path: Path, names: tuple[str, ...] | None, delimiter: str = ",") -> Rows:
    csv.field_size_limit(
        MAX_LINE_BYTES
    )  # the module's own limit, 128 KiB, is less than a long document
    position = 0

    def iterate_lines() -> Iterator[str]:
        nonlocal position
        for line, position in read_lines(path):  # noqa: B007
            yield line

    reader = csv.reader(iterate_lines(), delimiter=delimiter, strict=True)
    keys: list[str] = []
    try:
        for row in filter(None, reader):
            if not keys:
                is_header = set(names or ()) <= set(row)
                is_numbered = not is_header and all(name.isdecimal() for name in names or ())
                keys = [str(number) for number in range(len(row))] if is_numbered else row
                if names is not None and is_header:
                    continue
            yield dict(zip(keys, row)), position, f"{path}, line {reader.line_num}"
            if names is None:
                return
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: {error}; a quotation mark may be open or stray"
        ) from error


def open_parquet(path: Path) -> Any:
    """Open a Parquet file, compressed or not."""
    pyarrow = import_extra("pyarrow", f"{path} is Parquet, which needs pyarrow", "data")
    from pyarrow import parquet

    # Parquet is read from its end, so a compressed file is decompressed as a whole.
    file: Any = path
    if path.suffix == ".gz":
        file = pyarrow.py_buffer(read_whole(path, MAX_WHOLE_BYTES, "decompress it with gunzip"))
    try:
        return parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(
            f"{path} is not a sound Parquet file ({error}): make or fetch it again"
        ) from error


def _read_parquet(path: Path, names: tuple[str, ...] | None) -> Rows:
    file, size, n_seen = open_parquet(path), path.stat().st_size, 0
    columns = list(names) if names and set(names) <= set(file.schema_arrow.names) else None
    for batch in file.iter_batches(
        batch_size=MAX_HEADER_ROWS if names is None else 1024, columns=columns
    ):
        position = size * (n_seen + len(batch)) // file.metadata.num_rows
        for number, row in enumerate(batch.to_pylist(), n_seen):
            yield row, position, f"{path}, row {number}"
        n_seen += len(batch)


TABLES: dict[str, Callable[[Path, tuple[str, ...] | None], Rows]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
}
NUMBERED = (".csv", ".tsv")  # columns may be given by number, from 0, where there is no header


def get_suffix(path: Path) -> str:
    """Return the suffix that names the format: the one before .gz, if the file is compressed."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
