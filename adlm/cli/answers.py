"""Where words go: the answer to stdout, exactly; everything said on the way to stderr; files that can be written."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

SEPARATOR = "\n<|endoftext|>\n"  # between texts: `adlm prepare` reads it as the end of a document


def notes() -> Console:
    """Where a command says what it does."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def answering(is_json: bool) -> Iterator[None]:
    """With JSON asked for, stdout is the answer's alone: whatever prints on the way prints to stderr."""
    if not is_json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def print_json(found: Mapping[str, Any]) -> None:
    """One JSON object, in UTF-8 wherever it goes; a number that JSON does not have is null."""
    # Half a surrogate pair, which a path may hold, becomes \udcxx: what JSON calls it.
    print_bytes((json.dumps(plain(found), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


def plain(value: Any) -> Any:
    """The value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def as_file(texts: Sequence[str]) -> bytes:
    """Texts as a file has them, and a pipe."""
    return (SEPARATOR.join(texts) + "\n").encode("utf-8")


def print_bytes(content: bytes) -> None:
    """To stdout as they are: no encoding, no colors, no wrapping."""
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def check_files(files: Mapping[str, Path | None]) -> None:
    """Refuse what could not be written, by the option that names it, before anything is computed."""
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{option} {path} is a folder: give the name of a file in it")
        place = path if path.exists() else path.absolute().parent
        while not place.exists():
            place = place.parent
        if place != path and not place.is_dir():
            raise ValueError(f"{option} {path}: {place} is a file and no folder: give another name")
        if not os.access(place, os.W_OK):
            raise ValueError(f"{option} {path} cannot be written: {place} is not ours to change; give another name")
        if path.absolute() in seen:
            raise ValueError(f"{option} and {seen[path.absolute()]} name the same file, {path}: give each its own")
        seen[path.absolute()] = option


def read_text(name: str) -> str:
    """A file's text, `-` for stdin's, without the line end at its end."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({error.strerror}): give a file of text, or - for stdin") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        source = "what came in by stdin" if name == "-" else name
        raise ValueError(f"{source} is not UTF-8 at byte {error.start}: convert it first") from error
    return text.removesuffix("\n").removesuffix("\r")
