"""What a user did wrong is told in a line, without a traceback; what we did wrong keeps its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from adlm.train.guard import Diverged

USER = (ValueError, OSError, MemoryError, ImportError)


@contextmanager
def told() -> Iterator[None]:
    """Turn errors that name a remedy into one message and an exit code; ADLM_TRACEBACK=1 shows where they come from."""
    try:
        yield
    except (*USER, Diverged) as error:
        if os.environ.get("ADLM_TRACEBACK"):
            raise
        message = f"error: {error}"
        Console(stderr=True, highlight=False).print(message, markup=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, Diverged) else 2) from error
