"""The console of all commands: no text that it prints, such as the name of a folder, can control the terminal."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from rich.console import Console
from rich.text import Text

# Control characters become their pictures; those without one, direction marks and surrogates the replacement character.
CONTROLS = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys(
    [*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)], 0xFFFD
)
CONTROLS |= dict.fromkeys([0x061C, *range(0xD800, 0xE000)], 0xFFFD)
del CONTROLS[0x0A]


def escape_controls(text: str) -> str:
    """Replace characters that would control the terminal by visible ones; newlines stay."""
    return text.translate(CONTROLS)


@contextmanager
def hide_stderr() -> Iterator[None]:
    """Context manager: drop what libraries write to stderr, also from C: progress bars and advice."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as sink, redirect_stderr(io.StringIO()):
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


class SafeConsole(Console):
    """A console that escapes the control characters of every string; it adds no colors and no emoji of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, emoji=False, **settings)

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn a string into text: of `print`, of a table's cell or of its title."""
        return super().render_str(escape_controls(text), **options)
