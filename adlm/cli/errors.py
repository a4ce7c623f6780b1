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


@contextmanager
def report_errors() -> Iterator[None]:
    """Context manager: turn user errors into one message and an exit code; ADLM_TRACEBACK=1 shows the traceback."""
    try:
        yield
    except (BrokenPipeError, typer.Exit):
        raise  # a broken pipe: the reader of our output has closed it, and typer ends quietly
    except Exception as error:
        code = 2
        if not isinstance(error, USER_ERRORS):
            from adlm.training.guard import Diverged

            code = 1 if isinstance(error, Diverged) else 0
        if code == 0 or os.environ.get("ADLM_TRACEBACK"):
            raise
        line = " ".join(part.strip() for part in f"error: {error}".splitlines())
        SafeConsole(stderr=True).print(line, markup=False, soft_wrap=True)
        raise typer.Exit(code) from error


class Commands(TyperGroup):
    """A group of commands whose errors, a wrong option among them, are one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with report_errors():
            try:
                return super().invoke(ctx)
            except UsageError as error:
                context = getattr(error, "ctx", None) or ctx
                message = error.format_message() if hasattr(error, "format_message") else str(error)
                raise ValueError(f"{message.removesuffix('.')} (see {context.command_path} --help)") from error
