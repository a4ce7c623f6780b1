"""Errors: which ones are the user's, their exit codes, and parts of their messages (the closest known
name, the command that installs an extra)."""

import difflib
import re
import shlex
import sys
from collections.abc import Collection, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent


# Errors that a user can put right; their message says how.
# FloatingPointError: weights that are NaN.
USER_ERRORS = (ValueError, OSError, MemoryError, ImportError, FloatingPointError)


class Diverged(RuntimeError):
    """The loss is not finite or spiked; has the step and its batch."""

    exit_code = 1

    def __init__(self, message: str, step: int, batch: Any, *, is_spike: bool = False) -> None:
        super().__init__(message)
        self.step = step
        self.batch = batch
        self.is_spike = is_spike


class Preempted(RuntimeError):
    """A signal stopped the run; it is saved, and the same command resumes it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def get_exit_code(error: Exception) -> int | None:
    """Return the exit code of an error that is reported in one line; None for a fault of ours."""
    if isinstance(error, USER_ERRORS):
        return 2
    if isinstance(error, Diverged | Preempted):
        return error.exit_code
    return None


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the known names closest to an unknown one, or nothing."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.7)
    return f" (did you mean {' or '.join(by_lower[each] for each in close)}?)" if close else ""


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raise the error of an unknown name, which suggests the closest known ones and lists all."""
    if name not in known:
        hint = suggest_names(str(name), known)
        raise ValueError(f"unknown {kind} {name!r}{hint}: expected one of {', '.join(known)}")


def import_extra(module: str, need: str, extra: str) -> Any:
    """Import a module of an extra; the error has what needs it and how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{need} ({error}): {install_command(extra)}") from error


def install_command(extra: str, root: Path = CHECKOUT) -> str:
    """Return the command that installs an extra: of the checkout or, with a wheel, its packages."""
    python = shlex.quote(sys.executable)
    pip = f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"
    constraints = root / "constraints.txt"
    if constraints.is_file() and (root / "pyproject.toml").is_file():
        here = shlex.quote(f"{root}[{extra}]")
        return f"{pip} -c {shlex.quote(str(constraints))} -e {here}"
    return f"{pip} {' '.join(shlex.quote(each) for each in list_requirements()[extra])}"


def list_requirements() -> dict[str, list[str]]:
    """Return the requirements of the installed package by extra; "" are those without one."""
    from importlib import metadata  # here: it is slow to import, and only errors need it

    requirements: dict[str, list[str]] = {}
    for line in metadata.requires("adlm") or []:
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        requirements.setdefault(extra[1] if extra else "", []).append(
            line.partition(";")[0].strip()
        )
    return requirements
