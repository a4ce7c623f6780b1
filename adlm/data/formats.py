"""Readers of text files and tables: bytes to documents, each with the bytes of its file read so far."""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

Documents = Iterator[tuple[str, int]]
from adlm.remedies import install_command


# A line that is exactly the separator; the lookbehind comes second, so that the search is for a literal.
SEPARATOR_LINE = rb"<\|endoftext\|>(?<![^\n]<\|endoftext\|>)\r?"
BLANK_LINES = re.compile(r"(?:[ \t]*\n)*")
CHUNK_BYTES = 1 << 20
TEXT_SUFFIXES = (".txt", ".tokens", ".raw")
REMEDY = "leave such rows out, or choose another --column"
MAX_CSV_FIELD = 2**31 - 1  # the module's own limit, 128 KiB, is less than a long document
MAX_HEADER_ROWS = 100  # rows of a table that are searched for column names: the first may lack some


def read_chunks(path: Path, *, by_line: bool = False) -> Iterator[tuple[bytes, int]]:
    """Yield the bytes of a file, decompressed if its name ends in .gz, with the bytes read from the disk so far.

    With `by_line` a chunk is a line with its end; only a line feed ends a line.
    """
    is_packed = path.suffix == ".gz"
    with path.open("rb") as raw:
        file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_packed else raw
        position = 0
        try:
            for chunk in file if by_line else iter(lambda: file.read(CHUNK_BYTES), b""):
                position = raw.tell() if is_packed else position + len(chunk)
                yield chunk, position
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is not a sound gzip file ({error}): make or fetch it again") from error


def decode_bytes(data: bytes | bytearray, path: Path, offset: int) -> str:
    """Decode bytes that begin at this offset of the (decompressed) file."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {offset + error.start} (0x{data[error.start]:02x}) is not UTF-8: convert the file first, "
            "for example with iconv -f latin1 -t utf-8"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


# Plain text: a rule says where one document ends and the next begins.

FindCuts = Callable[[bytearray, int, bool], Iterator[tuple[int, int]]]


def _find_pattern(inside: bytes, at_end: bytes | None = None) -> FindCuts:
    """Find a pattern, or another one where the data are the end of the file."""
    patterns = re.compile(inside), re.compile(at_end or inside)
    return lambda data, start, is_end: (match.span() for match in patterns[is_end].finditer(data, start))


@dataclass(frozen=True)
class DocumentRule:
    """Where documents end in plain text, and what is kept of each."""

    find_cuts: FindCuts
    reach: int = 0  # a cut that begins further than this from the end of the data has been seen whole
    clean: Callable[[str], str] = lambda text: text.removesuffix("\n")  # it closes the document
    needs_cut: bool = False
    keeps_blank: bool = False  # as the empty text; else blank documents are skipped


_separators = DocumentRule(_find_pattern(SEPARATOR_LINE + rb"\n", SEPARATOR_LINE + rb"(?:\n|\Z)"), reach=15)
_lines = _find_pattern(rb"\n")
RULES: dict[str, DocumentRule] = {
    "auto": _separators,
    "file": DocumentRule(lambda data, start, is_end: iter(())),
    "line": DocumentRule(_lines, clean=str.strip),
    "blank": DocumentRule(
        _find_pattern(rb"\n[ \t\r]*\n"), 1 << 12, lambda text: BLANK_LINES.sub("", text, count=1).rstrip()
    ),
    "separator": replace(_separators, needs_cut=True),
    "every-line": DocumentRule(_lines, clean=lambda text: f"{text}\n", keeps_blank=True),
}


def read_text(path: Path, rule: DocumentRule) -> Documents:
    """Yield the documents of a plain text file."""
    data = bytearray()
    offset = searched = position = n_cuts = 0

    def decode_document(raw: bytearray, begin: int) -> str | None:
        text = decode_bytes(raw, path, begin)
        if not text.strip():
            return "" if rule.keeps_blank else None
        return rule.clean(text.replace("\r\n", "\n") if "\r" in text else text)

    for chunk, position in chain(read_chunks(path), [(b"", path.stat().st_size)]):
        data += chunk
        start = 0
        for begin, end in rule.find_cuts(data, searched, not chunk):
            if (text := decode_document(data[start:begin], offset + start)) is not None:
                yield text, position
            n_cuts += 1
            start = end
        del data[:start]
        offset += start
        searched = max(0, len(data) - rule.reach)
    if rule.needs_cut and not n_cuts:
        raise ValueError(f"{path} has no line '<|endoftext|>': use documents='file', 'line' or 'blank'")
    if data and (text := decode_document(data, offset)) is not None:
        yield text, position


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
        raise ValueError(f"{place} is {type(row).__name__}, where an object or a text was expected: {REMEDY}")
    for name in names:
        if name not in row:
            known = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"{place} has no column {name!r}; there are: {known}: {REMEDY}")
        if not isinstance(row[name], str):
            raise ValueError(f"{place}: column {name!r} holds {row[name]!r:.60}, expected a text: {REMEDY}")
    return " ".join(row[name] for name in names)


def _read_json(path: Path, names: tuple[str, ...] | None) -> Rows:
    """Read an array, or one value per line."""
    starts = (chunk.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] for chunk, _ in read_chunks(path))  # without a byte order mark
    if next(filter(None, starts), b"") != b"[":
        yield from _read_json_lines(path, names)
        return
    content = b"".join(chunk for chunk, _ in read_chunks(path))
    rows = _parse_json(decode_bytes(content, path, 0), f"{path} is not a JSON array")
    for number, row in enumerate(rows, 1):
        yield _name_text(row), path.stat().st_size, f"{path}, item {number}"


def _read_json_lines(path: Path, names: tuple[str, ...] | None) -> Rows:
    offset = 0
    for number, (line, position) in enumerate(read_chunks(path, by_line=True), 1):
        text = decode_bytes(line, path, offset)
        offset += len(line)
        if not text.isspace():
            place = f"{path}, line {number}"
            yield _name_text(_parse_json(text, f"{place} is not JSON")), position, place


def _parse_json(text: str, problem: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{problem} ({error}): make or fetch it again") from error


def _name_text(row: Any) -> Any:
    """A row that is itself a text is its one nameless column."""
    return {"": row} if isinstance(row, str) else row


def _read_csv(path: Path, names: tuple[str, ...] | None, delimiter: str = ",") -> Rows:
    csv.field_size_limit(MAX_CSV_FIELD)
    offset = position = 0

    def read_lines() -> Iterator[str]:
        nonlocal offset, position
        for line, position in read_chunks(path, by_line=True):  # noqa: B007
            yield decode_bytes(line, path, offset)
            offset += len(line)

    reader = csv.reader(read_lines(), delimiter=delimiter, strict=True)
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
        raise ValueError(f"{path}, line {reader.line_num}: {error}; a quotation mark may be open or stray") from error


def open_parquet(path: Path) -> Any:
    """Open a Parquet file, compressed or not."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path} is Parquet, which needs pyarrow: {install_command('data')}") from error
    # Parquet is read from its end, so a compressed file is decompressed as a whole.
    file = pyarrow.py_buffer(b"".join(data for data, _ in read_chunks(path))) if path.suffix == ".gz" else path
    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a sound Parquet file ({error}): make or fetch it again") from error


def _read_parquet(path: Path, names: tuple[str, ...] | None) -> Rows:
    file, size, n_seen = open_parquet(path), path.stat().st_size, 0
    columns = list(names) if names and set(names) <= set(file.schema_arrow.names) else None
    for batch in file.iter_batches(batch_size=MAX_HEADER_ROWS if names is None else 1024, columns=columns):
        position = size * (n_seen + len(batch)) // file.metadata.num_rows
        for number, row in enumerate(batch.to_pylist(), n_seen):
            yield row, position, f"{path}, row {number}"
        n_seen += len(batch)


TABLES: dict[str, Callable[[Path, tuple[str, ...] | None], Rows]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
}
NUMBERED = (".csv", ".tsv")  # columns may be given by number, from 0, where there is no header


def get_suffix(path: Path) -> str:
    """Return the suffix that names the format: the one before .gz, if the file is compressed."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
