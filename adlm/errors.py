"""Parts of error messages: the closest known name, and the command that installs an extra."""

import difflib
import re
import shlex
import sys
from collections.abc import Collection, Iterable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent


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
    """Import a module of an extra; if it is not installed, the error has what needs it and how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{need} ({error}): {install_command(extra)}") from error


def install_command(extra: str, root: Path = CHECKOUT) -> str:
    """Return the command that installs an extra: from the checkout or, installed from a wheel, its packages."""
    python = shlex.quote(sys.executable)
    pip = f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"
    if (root / "constraints.txt").is_file() and (root / "pyproject.toml").is_file():
        return f"{pip} -c {shlex.quote(str(root / 'constraints.txt'))} -e {shlex.quote(f'{root}[{extra}]')}"
    return f"{pip} {' '.join(shlex.quote(each) for each in list_requirements()[extra])}"


def list_requirements() -> dict[str, list[str]]:
    """Return the requirements of the installed package by extra; those without an extra have the key ""."""
    requirements: dict[str, list[str]] = {}
    for line in metadata.requires("adlm") or []:
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        requirements.setdefault(extra[1] if extra else "", []).append(
            line.partition(";")[0].strip()
        )
    return requirements
