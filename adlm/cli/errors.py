"""Errors of users become one line on stderr; errors of the package keep their traceback."""

import os
from typing import Any

import typer
from typer.core import TyperGroup

from adlm.view.console import SafeConsole

USER_ERRORS = (ValueError, OSError, MemoryError, ImportError, FloatingPointError)  # the last: weights that are NaN
# Typer has its own copy of click or uses the installed one, by its version; this is the class either way.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Commands(TyperGroup):
    """A group of commands that turns user errors into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name; ADLM_TRACEBACK=1 shows the traceback of an error."""
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, typer.Exit):
            raise  # a broken pipe: the reader of our output has closed it, and typer ends quietly
        except Exception as error:
            message, code = str(error), 2
            if isinstance(error, UsageError):
                message = error.format_message() if hasattr(error, "format_message") else message
                context = getattr(error, "ctx", None) or ctx
                message = f"{message.removesuffix('.')} (see {context.command_path} --help)"
            elif not isinstance(error, USER_ERRORS):
                from adlm.training.guard import Diverged

                code = 1 if isinstance(error, Diverged) else 0
            if code == 0 or os.environ.get("ADLM_TRACEBACK"):
                raise
            line = " ".join(part.strip() for part in f"error: {message}".splitlines())
            SafeConsole(stderr=True).print(line, markup=False, soft_wrap=True)
            raise typer.Exit(code) from error
