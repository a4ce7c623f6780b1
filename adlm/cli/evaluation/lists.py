"""Options that hold several values with commas between them, and bars for what takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adlm.cli.answers import notes

Value = TypeVar("Value", str, int, float)


def values_of(option: str, text: str, kind: type[Value]) -> list[Value]:
    """`16,32` as numbers, each once; an empty text is an empty list."""
    found = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        try:
            found.append(kind(part))
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ValueError(
                f"{option} {text!r}: {part!r} is not {what}; write them with commas, such as 1,2"
            ) from None
    return list(dict.fromkeys(found))


def check_folder(option: str, folder: Path | None) -> None:
    """Refuse a folder that could not be written, before anything is computed."""
    from adlm.cli.answers import check_files

    if folder is not None:
        if folder.is_file():
            raise ValueError(
                f"{option} {folder} is a file: give the name of a folder, which is made if it is not there"
            )
        check_files({option: folder / "x"})


def save_json(path: Path, answer: Any) -> Path:
    """A JSON file, whole or as it was before."""
    import json

    from adlm.cli.answers import plain
    from adlm.data.shards import write_safely

    path.parent.mkdir(parents=True, exist_ok=True)
    write_safely(path, (json.dumps(plain(answer), indent=1, ensure_ascii=False) + "\n").encode("utf-8"))
    return path


def progress(console: Console, *, is_shown: bool = True) -> Progress:
    """Bars on a terminal, gone when they are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal))


@contextmanager
def bar(first: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar on a terminal's stderr: called with what `Progress.update` takes."""
    with progress(notes()) as bars:
        task = bars.add_task(first, total=total)
        yield lambda **changes: bars.update(task, **changes)


@contextmanager
def bar_of_many(*, is_shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for one thing after another: called with what is done, how far it is, and the whole (0: not known)."""
    with progress(notes(), is_shown=is_shown) as bars:

        def on_rows(what: str, done: int, total: int) -> None:
            if not bars.tasks or bars.tasks[0].description != what:
                for task in bars.task_ids:
                    bars.remove_task(task)
                bars.add_task(what, total=None)
            bars.update(bars.task_ids[0], completed=done, total=total or None)

        yield on_rows
