"""What a user did wrong is told in a line, without a traceback; what we did wrong keeps its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

USER = (ValueError, OSError, MemoryError, ImportError, FloatingPointError)  # the last: weights that are no numbers
# Typer brings its own copy of click or uses the installed one, by its version; this is the class either way.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def say(message: str) -> None:
    """One line on stderr, however long."""
    line = " ".join(part.strip() for part in f"error: {message}".splitlines())
    Console(stderr=True, highlight=False).print(line, markup=False, soft_wrap=True)


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn errors that name a remedy into one message and an exit code; ADLM_TRACEBACK=1 shows where they come from."""
    try:
        yield
    except BrokenPipeError:
        raise  # who read our output has seen enough: typer ends quietly
    except Exception as error:
        from adlm.training.guard import Diverged

        if os.environ.get("ADLM_TRACEBACK") or not isinstance(error, (*USER, Diverged)):
            raise
        say(str(error))
        raise typer.Exit(1 if isinstance(error, Diverged) else 2) from error


class Commands(TyperGroup):
    """The commands; an option that is wrong is told in one line too."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the words name."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            at = getattr(error, "ctx", None) or ctx
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            say(f"{message.removesuffix('.')} (see {at.command_path} --help)")
            raise typer.Exit(2) from error
