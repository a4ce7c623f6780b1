"""How files are read: bytes to documents, a chunk at a time; every document with the bytes of its file read so far."""

from __future__ import annotations

import csv
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

Documents = Iterator[tuple[str, int]]

MARK = b"<|endoftext|>"
BLANK_LINES = re.compile(r"(?:[ \t]*\n)*")
CHUNK = 1 << 20
PACKED_CHUNK = 1 << 18  # of a compressed file: about a megabyte of text
TEXT_SUFFIXES = (".txt", ".tokens", ".raw")
MEND = "leave such rows out, or choose another --column"
PARQUET_TEXT = ("string", "large_string", "dictionary<values=string")
LONGEST_FIELD = 2**31 - 1  # of a csv; the module's own limit, 128 KiB, is less than a long document
LOOKED_AT = 100  # rows of JSON that say which columns there are: the first may lack some
EXTRA = "pip install 'adlm[data]'"


def chunks(path: Path) -> Iterator[tuple[bytes, int]]:
    """The bytes of a file, unpacked if its name ends in .gz, with the bytes read from the disk so far."""
    with path.open("rb") as file:
        if path.suffix != ".gz":
            while data := file.read(CHUNK):
                yield data, file.tell()
            return
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 16)
        while data := file.read(PACKED_CHUNK):
            while data:
                if inflate.eof:  # files that were joined: one packed stream after the other, zeros may fill the gap
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    inflate = zlib.decompressobj(zlib.MAX_WBITS | 16)
                try:
                    unpacked = inflate.decompress(data)
                except zlib.error as error:
                    raise ValueError(f"{path} is not a sound gzip file ({error}): make or fetch it again") from error
                data = inflate.unused_data
                if unpacked:
                    yield unpacked, file.tell()
        if not inflate.eof:
            raise ValueError(f"{path} ends in the middle of its gzip stream: make or fetch it again")


def decode(data: bytes | bytearray, path: Path, offset: int) -> str:
    """Text of bytes that begin at this offset of the (unpacked) file."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {offset + error.start} (0x{data[error.start]:02x}) is not UTF-8, which text must be: "
            "convert the file first, for example with iconv -f latin1 -t utf-8"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


# Plain text: a rule says where one document ends and the next begins.

Cuts = Callable[[bytearray, int, bool], Iterator[tuple[int, int]]]


def _marks(data: bytearray, start: int, is_end: bool) -> Iterator[tuple[int, int]]:
    """Lines that are exactly the mark. (The data begins at the beginning of a line.)"""
    while (at := data.find(MARK, start)) >= 0:
        start = at + len(MARK)
        if at == 0 or data[at - 1] == ord("\n"):
            after = bytes(data[start : start + 2])
            if after[:1] == b"\n" or after == b"\r\n":
                yield at, start + after.index(b"\n") + 1
            elif is_end and after in (b"", b"\r"):
                yield at, len(data)


def _matches(pattern: bytes) -> Cuts:
    compiled = re.compile(pattern)
    return lambda data, start, is_end: (match.span() for match in compiled.finditer(data, start))


def _nothing(data: bytearray, start: int, is_end: bool) -> Iterator[tuple[int, int]]:
    return iter(())


def _body(text: str) -> str | None:
    """A document without the line end that closes it; nothing if it is blank."""
    return text.removesuffix("\n") if text and not text.isspace() else None


def _paragraphs(text: str) -> str | None:
    """The text without blank lines before it and white space after it."""
    return text[_end(BLANK_LINES, text, 0) :].rstrip() if text and not text.isspace() else None


def _bare(text: str) -> str | None:
    return text.strip() or None


def _row(text: str) -> str:
    """A line as a row of the Hub's WikiText holds it: with its end, and blank ones as nothing."""
    return f"{text}\n" if text and not text.isspace() else ""


@dataclass(frozen=True)
class Rule:
    """Where documents end in plain text, and what is kept of each."""

    cuts: Cuts
    reach: int  # a cut that begins further than this from the end of the data has been seen whole
    keep: Callable[[str], str | None]
    needs_cut: bool = False


RULES: dict[str, Rule] = {
    "auto": Rule(_marks, len(MARK) + 2, _body),
    "file": Rule(_nothing, 0, _body),
    "line": Rule(_matches(rb"\n"), 0, _bare),
    "blank": Rule(_matches(rb"\n[ \t\r]*\n"), 1 << 12, _paragraphs),
    "separator": Rule(_marks, len(MARK) + 2, _body, needs_cut=True),
    "every-line": Rule(_matches(rb"\n"), 0, _row),
}


def read_text(path: Path, rule: Rule) -> Documents:
    """The documents of a plain text file."""
    data = bytearray()
    offset = searched = position = n_cuts = 0

    def text_of(raw: bytearray, begin: int) -> str | None:
        text = decode(raw, path, begin)
        return rule.keep(text.replace("\r\n", "\n") if "\r" in text else text)

    for chunk, position in chunks(path):
        data += chunk
        start = 0
        for begin, end in rule.cuts(data, searched, False):
            if (text := text_of(data[start:begin], offset + start)) is not None:
                yield text, position
            n_cuts += 1
            start = end
        del data[:start]
        offset += start
        searched = max(0, len(data) - rule.reach)
    start = 0
    for begin, end in rule.cuts(data, searched, True):
        if (text := text_of(data[start:begin], offset + start)) is not None:
            yield text, position
        n_cuts += 1
        start = end
    if rule.needs_cut and not n_cuts:
        raise ValueError(f"{path} has no line {MARK.decode()!r}: use documents='file', 'line' or 'blank'")
    if start < len(data) and (text := text_of(data[start:], offset + start)) is not None:
        yield text, position


# Tables: a row is a document, a column its text.


def lines(path: Path) -> Documents:
    """The lines of a file, their ends kept; only a line feed ends a line."""
    data = bytearray()
    offset = position = 0
    for chunk, position in chunks(path):
        data += chunk
        whole, searched = data.rfind(b"\n") + 1, 0
        while searched < whole:
            end = data.index(b"\n", searched) + 1
            yield decode(data[searched:end], path, offset + searched), position
            searched = end
        del data[:whole]
        offset += whole
    if data:
        yield decode(data, path, offset), position


def text_chunks(path: Path) -> Documents:
    """The text of a file in pieces of any size."""
    data, offset, position = b"", 0, 0
    for chunk, position in chunks(path):
        data += chunk
        whole = len(data)
        while whole and len(data) - whole < 4 and data[whole - 1] & 0xC0 == 0x80:
            whole -= 1
        if whole and data[whole - 1] >= 0xC0:  # a character that the next chunk may continue
            whole -= 1
        if whole:
            yield decode(data[:whole], path, offset), position
        data, offset = data[whole:], offset + whole
    if data:
        yield decode(data, path, offset), position


def _no_column(path: Path, where: str, name: str, columns: Mapping[str, Any] | list[str]) -> NoReturn:
    there = ", ".join(map(repr, columns)) or "none"
    raise ValueError(f"{path}{where} has no column {name!r}; there are: {there}. {MEND[0].upper()}{MEND[1:]}")


def _text_of(row: Any, names: tuple[str, ...], path: Path, where: str) -> str:
    """The columns of one JSON row, joined by a blank; a row that is itself text is its one nameless column."""
    if isinstance(row, str):
        row = {"": row}
    if not isinstance(row, dict):
        raise ValueError(f"{path}{where} is {type(row).__name__}, where an object or a text was expected")
    parts = []
    for name in names:
        if name not in row:
            _no_column(path, where, name, row)
        if not isinstance(row[name], str):
            raise ValueError(
                f"{path}{where}: column {name!r} holds {row[name]!r:.60}, where a text was expected: {MEND}"
            )
        parts.append(row[name])
    return " ".join(parts)


def _json_lines(path: Path) -> Iterator[tuple[Any, int, str]]:
    for number, (line, position) in enumerate(lines(path), 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error.msg} at column {error.colno}): {line.strip()!r:.60}"
            ) from error
        yield row, position, f", line {number}"


def _json_array(path: Path) -> Iterator[tuple[Any, int, str]]:
    """The items of one array, decoded as they come."""
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    text, number, wanted, is_closed = "", 0, 0, False
    for fresh, position in chain(text_chunks(path), [("", path.stat().st_size)]):
        is_end = not fresh
        text += fresh
        if len(text) < wanted and not is_end:
            continue
        at = 0 if number or wanted else text.find("[") + 1
        while (at := _end(between, text, at)) < len(text) and not is_closed:
            if text[at] == "]":
                is_closed = True
                break
            try:
                row, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                if is_end:
                    raise ValueError(f"{path}, item {number + 1} is not JSON ({error.msg})") from error
                break
            number += 1
            yield row, position, f", item {number}"
        text = text[at:]
        wanted = max(1, 2 * len(text))  # twice as much at each try, or a long item would be scanned at every chunk
    if not is_closed:
        raise ValueError(f"{path} ends before its array does: make or fetch it again")


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match
    return match.end()


def _json_rows(path: Path) -> Iterator[tuple[Any, int, str]]:
    """Rows of a .json file: an array, or one value to a line."""
    first = next((text.lstrip()[:1] for text, _ in text_chunks(path) if text.strip()), "")
    return _json_array(path) if first == "[" else _json_lines(path)


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[list[str], int, str]]:
    csv.field_size_limit(LONGEST_FIELD)
    position = 0

    def remember() -> Iterator[str]:
        nonlocal position
        for line, position in lines(path):  # noqa: B007
            yield line

    reader = csv.reader(remember(), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if row:
                yield row, position, f", line {reader.line_num}"
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}; a quotation mark may be open or stray") from error


@dataclass(frozen=True)
class Table:
    """A format of rows: its columns (name, and whether it holds text), and the documents of some of them."""

    columns: Callable[[Path], dict[str, bool]]
    read: Callable[[Path, tuple[str, ...]], Documents]
    is_numbered: bool = False  # columns may be given by number, from 0, where there is no header


def _json_table(rows: Callable[[Path], Iterator[tuple[Any, int, str]]]) -> Table:
    def columns(path: Path) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for row, _, _ in islice(rows(path), LOOKED_AT):
            for name, value in ({"": row} if isinstance(row, str) else row if isinstance(row, dict) else {}).items():
                found[name] = found.get(name, False) or isinstance(value, str)
        return found

    def read(path: Path, names: tuple[str, ...]) -> Documents:
        return ((_text_of(row, names, path, where), position) for row, position, where in rows(path))

    return Table(columns, read)


def _csv_table(delimiter: str) -> Table:
    def columns(path: Path) -> dict[str, bool]:
        header: list[str] = next((row for row, _, _ in _csv_rows(path, delimiter)), [])
        return dict.fromkeys(header, True)

    def read(path: Path, names: tuple[str, ...]) -> Documents:
        rows = _csv_rows(path, delimiter)
        header = list(columns(path))
        if set(names) <= set(header):
            next(rows)
            indices = [header.index(name) for name in names]
        elif all(name.isdecimal() for name in names):
            indices = [int(name) for name in names]
        else:
            _no_column(path, "", next(name for name in names if name not in header), header)
        for row, position, where in rows:
            if max(indices) >= len(row):
                raise ValueError(f"{path}{where} has {len(row)} fields, and column {max(indices)} is asked for")
            yield " ".join(row[index] for index in indices), position

    return Table(columns, read, is_numbered=True)


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path} is Parquet, which takes pyarrow: {EXTRA}") from error
    # Parquet is read from its end, so a packed one has to be unpacked whole.
    file = pyarrow.py_buffer(b"".join(data for data, _ in chunks(path))) if path.suffix == ".gz" else path
    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a sound Parquet file ({error}): make or fetch it again") from error


def _parquet_columns(path: Path) -> dict[str, bool]:
    kinds = {field.name: str(field.type) for field in _open_parquet(path).schema_arrow}
    return {name: kind.startswith(PARQUET_TEXT) for name, kind in kinds.items()}


def parquet_rows(path: Path) -> int:
    """How many rows a Parquet file says it has."""
    return int(_open_parquet(path).metadata.num_rows)


def _read_parquet(path: Path, names: tuple[str, ...]) -> Documents:
    file, size, n_seen = _open_parquet(path), path.stat().st_size, 0
    columns = file.schema_arrow.names
    for name in names:
        if name not in columns:
            _no_column(path, "", name, columns)
    for batch in file.iter_batches(batch_size=1024, columns=list(names)):
        values = [batch.column(name).to_pylist() for name in names]
        position = size * (n_seen + len(batch)) // max(1, file.metadata.num_rows)
        for i, parts in enumerate(zip(*values)):
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f"{path}, row {n_seen + i} holds {parts!r:.60}, where a text was expected: {MEND}")
            yield (parts[0] if len(parts) == 1 else " ".join(parts)), position
        n_seen += len(batch)


TABLES: dict[str, Table] = {
    ".jsonl": _json_table(_json_lines),
    ".json": _json_table(_json_rows),
    ".csv": _csv_table(","),
    ".tsv": _csv_table("\t"),
    ".parquet": Table(_parquet_columns, _read_parquet),
}


def suffix_of(path: Path) -> str:
    """The suffix that says the format: the one before .gz, if that is there."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()
