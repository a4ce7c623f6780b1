"""`adlm doctor`: versions, devices and bundled models, as a bug report needs them."""

import importlib
import os
import platform
import re
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec

import typer

from adlm import __version__
from adlm.bundled import MODELS
from adlm.cli import options
from adlm.cli.output import json_stdout, print_json, status_console
from adlm.remedies import install_command, list_requirements
from adlm.view.console import SafeConsole

MODULES = {"pillow": "PIL", "mauve-text": "mauve", "pytest-xdist": "xdist"}  # where the name is another
BROKEN, MISSING = "broken: ", "missing, extra "
Section = dict[str, str]  # name -> version or state; of what is broken it begins with BROKEN


def doctor(is_json: options.Json = False) -> None:
    """Print versions, devices and the state of the bundled models for a bug report.

    Exit codes: 0 everything required works; 1 something required is broken.
    """
    with json_stdout(is_json), status_console().status("checking …"):
        reinstall = "install adlm again from its wheel or, in a checkout, git checkout adlm/weights"
        models = {name: attempt(reinstall, check_model, name) for name in MODELS}
        devices = {"cpu": f"{os.cpu_count()} cores"}
        for name, describe in {"cuda": describe_gpus, "mps": describe_mps}.items():
            if text := attempt("reinstall torch and the GPU's driver", describe):
                devices[name] = text
        packages = check_packages()
        extras = sorted({text.removeprefix(MISSING) for text in packages.values() if text.startswith(MISSING)})
        sections: dict[str, Section] = {"packages": packages, "devices": devices, "models": models}
        sections["install"] = {extra: install_command(extra) for extra in extras}
    problems = [name for section in sections.values() for name, text in section.items() if text.startswith(BROKEN)]
    if is_json:
        print_json({"ok": not problems, "problems": problems} | sections)
    else:
        console = SafeConsole(soft_wrap=True)
        for title, section in sections.items():
            if section:
                console.print(title, style="bold")
            for name, text in section.items():
                style = "red" if name in problems else "dim" if text.startswith("missing") else None
                console.print(f"  {name:<{max(map(len, section))}}  {text}", style=style, markup=False)
        console.print(f"{BROKEN}{', '.join(problems)}" if problems else "everything required works", markup=False)
    raise typer.Exit(1 if problems else 0)


def attempt(remedy: str, check: Callable[..., str], *arguments: str) -> str:
    """Return what a check returns or, if it raises anything, the error and the remedy."""
    try:
        return check(*arguments)
    except Exception as error:
        return f"{BROKEN}{type(error).__name__}: {error}".splitlines()[0] + f" → {remedy}"


def check_packages() -> Section:
    """Check Python, adlm, its required packages, which must import, and those of its extras."""

    def import_required(name: str, module: str) -> str:
        imported = importlib.import_module(module)
        build = f", CUDA {imported.version.cuda}" if name == "torch" and imported.version.cuda else ""
        return metadata.version(name) + build

    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    section = {"adlm": __version__, "python": python}
    for extra, line in [(extra, line) for extra, lines in list_requirements().items() for line in lines]:
        name = re.split(r"[^\w.-]", line)[0].lower().replace("_", "-")
        module = MODULES.get(name, name.replace("-", "_"))
        if extra:  # not imported: some are slow
            section[name] = metadata.version(name) if find_spec(module) else MISSING + extra
        else:
            section[name] = attempt(f"pip install --force-reinstall {name}", import_required, name, module)
    return section


def describe_gpus() -> str:
    """List the CUDA devices; commands use the first by default."""
    import torch

    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = [f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices]
    return ", ".join(names) or "missing: no device, no driver, or torch is built without CUDA"


def describe_mps() -> str:
    """Describe Apple's GPU; empty where there is none."""
    import torch

    return "Apple GPU, for sampling and scoring" if torch.backends.mps.is_available() else ""


def check_model(name: str) -> str:
    """Load a bundled model and generate a few tokens."""
    from adlm.text.lm import load

    load(name).generate(length=8, steps=8)
    return "loads and generates"
