"""`adlm doctor`: versions, devices, bundled models and tools, as a bug report needs them."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec

import typer
from rich.console import Console
from rich.text import Text

from adlm import __version__
from adlm.bundled import MODELS
from adlm.cli import options
from adlm.cli.output import json_stdout, print_json, status_console

MARKS = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("–", "dim")}
MODULES = {"pillow": "PIL", "mauve-text": "mauve", "pytest-xdist": "xdist"}  # where the name is another
TOOLS = {
    "bwrap": ("adlm eval code", ("bwrap",)),
    "chromium": ("tests of the player", ("chromium", "chromium-browser", "google-chrome")),
    "c++": ("compile=true on a CPU", ("c++", "g++", "clang++")),
}


@dataclass(frozen=True)
class Finding:
    """The state of one thing; `is_ok` is None if it is missing and optional."""

    text: str
    is_ok: bool | None = True
    remedy: str = ""


def doctor(is_json: options.Json = False) -> None:
    """Print versions, devices, bundled models and tools for a bug report.

    Exit codes: 0 everything required works; 1 something required is broken.
    """
    console, sections = Console(highlight=False, soft_wrap=True), {}
    with json_stdout(is_json), status_console().status("checking …"):
        for title, check in SECTIONS.items():
            try:
                sections[title] = check()
            except Exception as error:  # with a broken torch, for example: the first section names it
                sections[title] = {title: Finding(describe_error(error), False, "fix the problems above first")}
            if not is_json:
                console.print(format_section(title, sections[title]))
    problems = {name: each for found in sections.values() for name, each in found.items() if each.is_ok is False}
    if is_json:
        listed = {title: {name: asdict(each) for name, each in found.items()} for title, found in sections.items()}
        print_json({"ok": not problems, "problems": list(problems)} | listed)
    else:
        console.print(f"broken: {', '.join(problems)}" if problems else "everything required works", markup=False)
    raise typer.Exit(1 if problems else 0)


def format_section(title: str, findings: dict[str, Finding]) -> Text:
    """Format a section: a mark, the name, the finding and the remedy on each line."""
    text, width = Text(f"{title}\n", style=""), max(map(len, findings))
    text.stylize("bold")
    for name, finding in findings.items():
        mark, style = MARKS[finding.is_ok]
        text.append("  ").append(mark, style).append(f" {name:<{width}}  {finding.text}", "not bold")
        if finding.is_ok is not True and finding.remedy:
            text.append(f" → {finding.remedy}", "cyan not bold")
        text.append("\n")
    return text


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def list_requirements() -> list[tuple[str, str | None]]:
    """List the package's requirements: the name and the extra that has it."""
    lines = metadata.requires("adlm") or []
    names = [re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in lines]
    extras = [re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line) for line in lines]
    return [(name, extra[1] if extra else None) for name, extra in zip(names, extras, strict=True)]


def check_packages() -> dict[str, Finding]:
    """Check Python, adlm and its required packages, which must import."""
    findings = {"adlm": Finding(__version__)}
    findings["python"] = Finding(f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    for name, extra in list_requirements():
        if extra is None:
            try:
                module = importlib.import_module(MODULES.get(name, name.replace("-", "_")))
                build = f", CUDA {module.version.cuda}" if name == "torch" and module.version.cuda else ""
                findings[name] = Finding(metadata.version(name) + build)
            except Exception as error:  # a broken package may raise anything
                findings[name] = Finding(describe_error(error), False, f"pip install --force-reinstall {name}")
    return findings


def check_extras() -> dict[str, Finding]:
    """Check which packages of the extras are installed, without importing them."""
    extras: dict[str, dict[str, str | None]] = {}
    for name, extra in list_requirements():
        if extra is not None:
            is_installed = find_spec(MODULES.get(name, name.replace("-", "_"))) is not None
            extras.setdefault(extra, {})[name] = metadata.version(name) if is_installed else None
    findings = {}
    for extra, versions in extras.items():
        missing = [name for name, version in versions.items() if version is None]
        listed = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
        findings[extra] = Finding(listed, None if missing else True, f"pip install 'adlm[{extra}]'")
    return findings


def check_devices() -> dict[str, Finding]:
    """List the devices; commands use the first CUDA device by default."""
    import torch

    findings = {"cpu": Finding(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads")}
    if not torch.cuda.is_available():
        findings["cuda"] = Finding("no device, or no driver, or torch is built without CUDA", None)
        return findings
    for number in range(torch.cuda.device_count()):
        device, (free, total) = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
        findings[f"cuda:{number}"] = Finding(f"{device.name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
    return findings


def check_models() -> dict[str, Finding]:
    """Load every bundled model and generate a few tokens."""
    from adlm.text.lm import load

    findings = {}
    for name in MODELS:
        try:
            load(name).generate(length=8, steps=8)
            findings[name] = Finding("loads and generates")
        except Exception as error:  # a damaged model may raise anything
            findings[name] = Finding(describe_error(error), False, "pip install --force-reinstall --no-deps adlm")
    return findings


def check_tools() -> dict[str, Finding]:
    """Find optional programs."""
    findings = {}
    for tool, (use, names) in TOOLS.items():
        path = next((path for name in names if (path := shutil.which(name))), None)
        findings[tool] = Finding(path or f"not found; {use} needs it", True if path else None, "install it")
    return findings


SECTIONS: dict[str, Callable[[], dict[str, Finding]]] = {
    "packages": check_packages,
    "extras": check_extras,
    "devices": check_devices,
    "models": check_models,
    "tools": check_tools,
}
