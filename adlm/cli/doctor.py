"""`adlm doctor`: versions, devices, bundled models and tools, as a bug report needs them."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
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
                sections[title] = {title: report_problem(error, "fix the problems above first")}
            if not is_json:
                console.print(title, style="bold")
                width = max(map(len, sections[title]))
                for name, finding in sections[title].items():
                    mark = Text(*MARKS[finding.is_ok])
                    remedy = f" → {finding.remedy}" if not finding.is_ok and finding.remedy else ""
                    console.print("  ", mark, Text(f" {name:<{width}}  {finding.text}"), Text(remedy, "cyan"), sep="")
    problems = {name: each for found in sections.values() for name, each in found.items() if each.is_ok is False}
    if is_json:
        listed = {title: {name: asdict(each) for name, each in found.items()} for title, found in sections.items()}
        print_json({"ok": not problems, "problems": list(problems)} | listed)
    else:
        console.print(f"broken: {', '.join(problems)}" if problems else "everything required works", markup=False)
    raise typer.Exit(1 if problems else 0)


def report_problem(error: Exception, remedy: str) -> Finding:
    """Report what is broken; a broken package or a damaged model may raise anything."""
    return Finding(f"{type(error).__name__}: {error}".splitlines()[0], False, remedy)


def check_packages() -> dict[str, Finding]:
    """Check Python, adlm, its required packages, which must import, and those of its extras."""
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    findings = {"adlm": Finding(__version__), "python": Finding(python)}
    for line in metadata.requires("adlm") or []:
        name = re.split(r"[^\w.-]", line)[0].lower().replace("_", "-")
        module = MODULES.get(name, name.replace("-", "_"))
        if extra := re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line):
            is_installed = find_spec(module) is not None  # not imported: some are slow
            text = metadata.version(name) if is_installed else "missing"
            findings[name] = Finding(text, True if is_installed else None, f"pip install 'adlm[{extra[1]}]'")
            continue
        try:
            imported = importlib.import_module(module)
            build = f", CUDA {imported.version.cuda}" if name == "torch" and imported.version.cuda else ""
            findings[name] = Finding(metadata.version(name) + build)
        except Exception as error:
            findings[name] = report_problem(error, f"pip install --force-reinstall {name}")
    return findings


def check_devices() -> dict[str, Finding]:
    """List the devices; commands use the first CUDA device by default."""
    import torch

    findings = {"cpu": Finding(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads")}
    if not torch.cuda.is_available():
        findings["cuda"] = Finding("no device, or no driver, or torch is built without CUDA", None)
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
        except Exception as error:
            findings[name] = report_problem(error, "pip install --force-reinstall --no-deps adlm")
    return findings


def check_tools() -> dict[str, Finding]:
    """Find optional programs."""
    findings = {}
    for tool, (use, names) in TOOLS.items():
        path = next((path for name in names if (path := shutil.which(name))), None)
        findings[tool] = Finding(path or f"not found; {use} needs it", True if path else None, "install it")
    return findings


SECTIONS = {"packages": check_packages, "devices": check_devices, "models": check_models, "tools": check_tools}
