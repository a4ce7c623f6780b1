"""Old names, until the commands that import them have moved to adlm/cli/eval.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from adlm.cli.output import check_output_folder as check_folder
from adlm.cli.output import parse_list as values_of
from adlm.cli.output import progress_bar as bar_of_many
from adlm.cli.output import status_console
from adlm.evaluate.results import save_json

__all__ = ["bar", "bar_of_many", "check_folder", "save_json", "values_of"]


@contextmanager
def bar(first: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Old progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = status_console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(first, total=total)
        yield lambda **changes: bars.update(task, **changes)
