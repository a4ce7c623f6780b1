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
BROKEN = "broken: "
REINSTALL = "install adlm again from its wheel or, in a checkout, git checkout adlm/weights"
Section = dict[str, str]  # name -> version or state; of what is broken it begins with BROKEN


def doctor(is_json: options.Json = False) -> None:
    """Print versions, devices and the state of the bundled models for a bug report.

    Exit codes: 0 everything required works; 1 something required is broken.
    """
    with json_stdout(is_json), status_console().status("checking …"):
        models = {name: attempt(REINSTALL, check_model, name) for name in MODELS}
        gpus = attempt("reinstall torch and the GPU's driver", describe_gpus)
        devices = {"cpu": f"{os.cpu_count()} cores", "gpu": gpus}
        sections: dict[str, Section] = {"packages": check_packages(), "devices": devices, "models": models}
    problems = [name for section in sections.values() for name, text in section.items() if text.startswith(BROKEN)]
    if is_json:
        print_json({"ok": not problems, "problems": problems} | sections)
    else:
        console = SafeConsole(soft_wrap=True)
        for title, section in sections.items():
            console.print(title, style="bold")
            for name, text in section.items():
                console.print(f"  {name:<22}  {text}", style="red" if name in problems else None, markup=False)
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
    system = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    section = {"adlm": __version__, "python": system}
    for extra, line in [(extra, line) for extra, lines in list_requirements().items() for line in lines]:
        name = re.split(r"[^\w.-]", line)[0].lower().replace("_", "-")
        module = MODULES.get(name, name.replace("-", "_"))
        if not extra:
            section[name] = attempt(f"pip install --force-reinstall {name}", import_package, name, module)
        elif find_spec(module):  # not imported: some are slow
            section[name] = metadata.version(name)
        else:
            section[name] = f"missing: {install_command(extra)}"
    return section


def import_package(name: str, module: str) -> str:
    """Import a package and return its version."""
    importlib.import_module(module)
    return metadata.version(name)


def describe_gpus() -> str:
    """List the devices that commands can use besides the CPU, with the version of CUDA."""
    import torch

    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = [f"{device.name} ({device.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}" for device in devices]
    names += ["mps (Apple GPU, for sampling and scoring)"] if torch.backends.mps.is_available() else []
    return ", ".join(names) or "none: no device, no driver, or torch is built without CUDA"


def check_model(name: str) -> str:
    """Load a bundled model and generate a few tokens."""
    from adlm.text.lm import load

    load(name).generate(length=8, steps=8)
    return "loads and generates"
