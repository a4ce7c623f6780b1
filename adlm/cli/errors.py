"""Errors of users become one line on stderr; errors of the package keep their traceback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from adlm.view.console import SafeConsole

USER_ERRORS = (ValueError, OSError, MemoryError, ImportError, FloatingPointError)  # the last: weights that are NaN
# Typer has its own copy of click or uses the installed one, by its version; this is the class either way.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def print_error(message: str) -> None:
    """Print an error as one line on stderr."""
    line = " ".join(part.strip() for part in f"error: {message}".splitlines())
    SafeConsole(stderr=True).print(line, markup=False, soft_wrap=True)


@contextmanager
def report_errors() -> Iterator[None]:
    """Context manager: turn user errors into one message and an exit code; ADLM_TRACEBACK=1 shows the traceback."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our output has closed it: typer ends quietly
    except Exception as error:
        from adlm.training.guard import Diverged

        if os.environ.get("ADLM_TRACEBACK") or not isinstance(error, (*USER_ERRORS, Diverged)):
            raise
        print_error(str(error))
        raise typer.Exit(1 if isinstance(error, Diverged) else 2) from error


class Commands(TyperGroup):
    """A group of commands that reports a wrong option in one line, too."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            context = getattr(error, "ctx", None) or ctx
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            print_error(f"{message.removesuffix('.')} (see {context.command_path} --help)")
            raise typer.Exit(2) from error
