"""Terminal output of all commands: results go to stdout, status, progress and errors to stderr.

Also checks of paths.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer.core import TyperGroup

from adlm.cli.commands import COMMANDS, load_command
from adlm.errors import get_exit_code
from adlm.view.console import SafeConsole, escape_controls

if TYPE_CHECKING:
    from adlm.evaluate.cache import ProgressCallback
    from adlm.evaluate.results import EvalResult, Table, TableColumn

SEPARATOR = "\n<|endoftext|>\n"  # between texts: `adlm prepare` reads it as the end of a document
BARS = "▁▂▃▄▅▆▇█"
MIN_TEXT_WIDTHS = (
    10,
    5,
)  # columns of text fold down to the first or, where errors are below values, to the second
UNLIMITED_WIDTH = 10_000
LOG_SECONDS = 10.0  # between lines of progress where there is no terminal
# Typer has its own copy of click or uses the installed one; this is the class either way.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

Value = TypeVar("Value", str, int, float)


class Commands(TyperGroup):
    """A group of commands that turns user errors into one line and an exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name, and import it."""
        words = " ".join([*_list_groups(ctx), args[0]])
        if words in COMMANDS:
            self.commands[args[0]] = load_command(words)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name; ADLM_TRACEBACK=1 shows an error's traceback."""
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, typer.Exit):
            raise  # a broken pipe: the reader of our output has closed it, and typer ends quietly
        except Exception as error:
            is_usage = isinstance(error, UsageError)
            message = explain_usage_error(error, ctx) if is_usage else str(error)
            code = 2 if is_usage else get_exit_code(error)
            if code is None or os.environ.get("ADLM_TRACEBACK"):
                raise
            line = " ".join(part.strip() for part in f"error: {message}".splitlines())
            status_console().print(line, markup=False)
            raise typer.Exit(code) from error


def explain_usage_error(error: Any, ctx: Any) -> str:
    """Return the message of a wrong command line, with the command whose help to read."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None) or ctx
    return f"{message.removesuffix('.')} (see {context.command_path} --help)"


def _list_groups(ctx: Any) -> list[str]:
    """List the groups that lead to a command, without `adlm` itself."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name)
        ctx = ctx.parent
    return names


def status_console() -> SafeConsole:
    """The console on stderr for status messages."""
    return SafeConsole(stderr=True, soft_wrap=True)


def json_stdout(is_json: bool) -> AbstractContextManager[object]:
    """Context manager: with JSON requested, everything else that is printed goes to stderr."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object in UTF-8; numbers that are not finite become null."""
    from adlm.evaluate.results import to_json

    line = json.dumps(to_json(value), ensure_ascii=False) + "\n"
    line = re.sub(
        r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", line
    )  # controls that JSON allows
    # A path may hold half a surrogate pair; JSON spells it \udcxx.
    print_bytes(line.encode("utf-8", "backslashreplace"))


def print_bytes(content: bytes) -> None:
    """Write bytes to stdout unchanged: no encoding, no colors, no wrapping."""
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def print_table(table: Table, console: SafeConsole | None = None) -> None:
    """Print a table, in a narrow terminal with fewer columns or a line per cell; no number is cut."""
    from rich.markup import escape
    from rich.table import Table as RichTable

    from adlm.evaluate.results import TableColumn

    console = console or SafeConsole()
    if not console.is_terminal:
        console = SafeConsole(width=UNLIMITED_WIDTH, file=console.file)
    columns, lines = (
        table.columns,
        [[column.name for column in table.columns], *table.format_rows()],
    )
    widths = fit_columns(columns, lines, MIN_TEXT_WIDTHS[0], console.width)
    if sum(widths.values()) >= console.width:
        for i in (i for i, column in enumerate(columns) if not column.is_text):
            for line in lines:
                line[i] = re.sub(r" (?=[±(])|(?<=/)", "\n", line[i])
        widths = fit_columns(columns, lines, MIN_TEXT_WIDTHS[1], console.width)
    if sum(widths.values()) >= console.width and len(columns) > 2:
        rows = [
            [(column.name, cell) for column, cell in zip(columns, row)]
            for row in table.format_rows()
        ]
        pairs = [pair for row in rows for pair in (*row, ("", ""))][:-1]
        return print_table(
            replace(table, columns=[TableColumn("", is_text=True)] * 2, rows=pairs), console
        )
    grid = RichTable(title=escape(table.title) or None, title_justify="left")
    for i, width in widths.items():
        is_text = columns[i].is_text
        grid.add_column(
            escape(lines[0][i]),
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            min_width=width - 3,
            overflow="fold",
        )
    for line in lines[1:]:
        grid.add_row(*(escape(line[i]) for i in widths))
    console.print(grid, width=max(console.width, sum(widths.values()) + 1), crop=False)
    for note in table.notes:
        console.print(note, style="dim", markup=False, soft_wrap=True)


def fit_columns(
    columns: Sequence[TableColumn], lines: Sequence[list[str]], min_text: int, room: int
) -> dict[int, int]:
    """The columns that fit, with their least widths; optional ones are left out from the right."""
    widths = {}
    for i, cells in enumerate(zip(*lines)):
        width = max(map(len, "\n".join(cells).split("\n")))
        widths[i] = 3 + (min(width, min_text) if columns[i].is_text else width)
    for i in reversed(list(widths)):
        if columns[i].is_optional and sum(widths.values()) >= room:
            del widths[i]
    return widths


def print_result(result: EvalResult, *, is_json: bool, out: Path | None = None) -> None:
    """Print an evaluation as JSON or as tables, then write `OUT/TASK.json` and figures."""
    from adlm.evaluate.plots import draw_figures
    from adlm.evaluate.results import save_json

    if is_json:
        print_json(result.as_dict())
    else:
        for table in result.tables:
            print_table(table)
    for warning in result.warnings:
        status_console().print(f"warning: {warning}", style="yellow", markup=False)
    if out is not None:
        paths = [save_json(out / f"{result.task}.json", result.as_dict())]
        paths += [
            *(out / name for name in result.metrics.get("files", ())),
            *draw_figures(result, out),
        ]
        for path in paths:
            status_console().print(f"wrote {path}", style="dim", markup=False)


@contextmanager
def progress_bar(is_shown: bool = True) -> Iterator[ProgressCallback]:
    """Context manager: a progress bar on a terminal, elsewhere a line every few seconds.

    The yielded callback moves it.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console, last = status_console(), time.monotonic()
    with Progress(
        *columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)
    ) as bars:
        task = bars.add_task("", total=None)

        def update(stage: str, done: int, total: int) -> None:
            nonlocal last
            if bars.tasks[task].description != (stage := escape_controls(stage)):
                bars.reset(task, description=stage)
            bars.update(task, completed=done, total=total or None)
            if is_shown and not console.is_terminal and time.monotonic() - last >= LOG_SECONDS:
                last = time.monotonic()
                console.print(
                    f"{stage} {done:,} of {total:,}" if total else f"{stage} {done:,}", markup=False
                )

        yield update


def draw_curve(losses: Sequence[float], *, width: int = 40) -> str:
    """Draw losses as a line of bars, means of equal parts, with the first and the last mean."""
    width = min(width, len(losses))
    parts = [
        losses[i * len(losses) // width : (i + 1) * len(losses) // width] for i in range(width)
    ]
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means), (max(means) - min(means)) or 1.0
    bars = "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)
    return f"loss {means[0]:.2f} {bars} {means[-1]:.2f} nats, {len(losses)} steps"


def check_output_files(files: Mapping[str, Path | None]) -> None:
    """Refuse output files, by their options, that cannot be written, before anything is computed."""
    options: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        target = Path(os.path.realpath(path))  # a link may lead elsewhere
        if target.is_dir():
            raise ValueError(f"{option} {path} is a folder: give the name of a file in it")
        existing = next(each for each in (target, *target.parents) if each.exists())
        if existing != target and not existing.is_dir():
            raise ValueError(
                f"{option} {path}: {existing} is a file, not a folder: give another name"
            )
        try:  # permissions do not tell everything: /proc has them all
            if existing.is_dir():
                TemporaryFile(dir=existing).close()
            elif existing.is_file():
                existing.open("ab").close()
        except OSError as error:
            problem = f"{option} {path} cannot be written ({existing}: {error.strerror})"
            raise ValueError(f"{problem}: give another name") from error
        if target in options:
            raise ValueError(
                f"{option} and {options[target]} are the same file, {path}: give two names"
            )
        options[target] = option


def make_folder(folder: Path) -> None:
    """Create the folder of an output file, as `mkdir -p` does, and report it if it is new."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        status_console().print(f"created folder {folder}", style="dim", markup=False)


def check_output_folder(option: str, folder: Path | None) -> None:
    """Refuse an output folder that cannot be written, before anything is computed."""
    if folder is not None:
        if folder.is_file():
            raise ValueError(
                f"{option} {folder} is a file: give the name of a folder (it is created if missing)"
            )
        check_output_files({option: folder / "x"})


def parse_list(option: str, text: str, kind: type[Value]) -> list[Value]:
    """Parse `16,32` into values, duplicates dropped; an empty text is an empty list."""
    values = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        try:
            values.append(kind(part))
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise ValueError(
                f"{option} {text!r}: {part!r} is not {expected}; separate them by commas: 1,2"
            ) from None
    return list(dict.fromkeys(values))


def read_text_file(name: str) -> str:
    """Read a UTF-8 file, or stdin for `-`, without the line end at its end."""
    try:
        text = (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode("utf-8")
    except OSError as error:
        raise ValueError(
            f"{name} cannot be read ({error.strerror}): give a file of text, or - for stdin"
        ) from error
    except UnicodeDecodeError as error:
        source = "stdin" if name == "-" else name
        raise ValueError(
            f"{source} is not UTF-8 at byte {error.start}: convert it first"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")
