"""`adlm models`, `adlm recipes` and `adlm doctor`: what ships with the package, what each needs, and what works."""

import importlib
import os
import platform
import re
import shlex
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from adlm import __version__
from adlm.bundled import MODELS
from adlm.cli import options
from adlm.cli.output import json_stdout, print_json, print_table, status_console
from adlm.errors import install_command, list_requirements
from adlm.view.console import SafeConsole

MODULES = {
    "pillow": "PIL",
    "mauve-text": "mauve",
    "pytest-xdist": "xdist",
    "pyyaml": "yaml",
}  # where the name is another
BROKEN = "broken: "
REINSTALL = "install adlm again from its wheel or, in a checkout, git checkout adlm/weights"
Section = dict[str, str]  # name -> version or state; of what is broken it begins with BROKEN
MAX_CARD = 10_000  # characters of a model card that are searched for its first sentence
SHOWN_HELP = "Bundled model, or folder of a run, a checkpoint or a model, to show. [default: the bundled models]"
RecipeArgument = Annotated[
    str | None, typer.Argument(metavar="[RECIPE]", help="Recipe to show. [default: all]")
]
ShownModel = Annotated[str | None, typer.Argument(metavar="[MODEL]", help=SHOWN_HELP)]


def doctor(is_json: options.Json = False) -> None:
    """Print versions, devices and the state of the bundled models for a bug report.

    Exit codes: 0 everything required works; 1 something required is broken.
    """
    with json_stdout(is_json), status_console().status("checking …"):
        models = {name: attempt(REINSTALL, check_model, name) for name in MODELS}
        gpus = attempt("reinstall torch and the GPU's driver", describe_gpus)
        devices = {"cpu": f"{os.cpu_count()} cores", "gpu": gpus}
        sections: dict[str, Section] = {
            "packages": check_packages(),
            "devices": devices,
            "models": models,
        }
    problems = [
        name
        for section in sections.values()
        for name, text in section.items()
        if text.startswith(BROKEN)
    ]
    if is_json:
        print_json({"ok": not problems, "problems": problems} | sections)
    else:
        console = SafeConsole(soft_wrap=True)
        for title, section in sections.items():
            console.print(title, style="bold")
            for name, text in section.items():
                console.print(
                    f"  {name:<22}  {text}", style="red" if name in problems else None, markup=False
                )
        console.print(
            f"{BROKEN}{', '.join(problems)}" if problems else "everything required works",
            markup=False,
        )
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
    for extra, line in [
        (extra, line) for extra, lines in list_requirements().items() for line in lines
    ]:
        name = re.split(r"[^\w.-]", line)[0].lower().replace("_", "-")
        module = MODULES.get(name, name.replace("-", "_"))
        if not extra:
            section[name] = attempt(
                f"pip install --force-reinstall {name}", import_package, name, module
            )
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
    """List the devices besides the CPU."""
    from adlm import devices  # here: torch may be broken

    return devices.describe_gpus()


def check_model(name: str) -> str:
    """Load a bundled model and generate a few tokens."""
    from adlm.text.lm import load

    load(name).generate(length=8, steps=8)
    return "loads and generates"


def models(name: ShownModel = None, is_json: options.Json = False) -> None:
    """List the bundled models, or show one model: method, size, what it was trained on."""
    with json_stdout(is_json):
        described = [describe_model(each) for each in ((name,) if name else MODELS)]
    print_entries("models", described, name, is_json)
    if name and not is_json:
        print_lines("", f"adlm sample {shlex.quote(name)}")


def describe_model(name: str) -> dict[str, Any]:
    """Return method, sizes and model card of a model, without loading its weights."""
    from adlm.convert import is_lineage
    from adlm.models.folder import count_stored_parameters, read_config_json
    from adlm.text.lm import find_model

    folder = find_model(name)
    if is_lineage(folder):
        raise ValueError(
            f"{name} is a checkpoint of other code: `adlm convert {shlex.quote(name)} --out DIR` shows it"
        )
    file = read_config_json(folder)
    parameters = count_stored_parameters(folder)
    card = folder / "README.md"
    text = card.read_text("utf-8", "replace")[:MAX_CARD] if card.is_file() else ""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    opening = next((part for part in text.split("\n\n") if not part.startswith("#")), "")
    return {
        "model": name,
        "method": file.method,
        "parameters": parameters,
        "length": file.model.get("length"),
        "vocabulary": file.model.get("vocab_size"),
        "memory": f"{4 * parameters / 1e6:,.0f} MB",  # float32
        "about": re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(opening.split())).partition(". ")[
            0
        ],
        "step": file.step,
        "rows": file.rows,
        "folder": str(folder),
    }


def recipes(name: RecipeArgument = None, is_json: options.Json = False) -> None:
    """List the recipes of `adlm train` and `adlm reason train`, or show one: its method, device, data and settings."""
    from adlm.config import list_recipes
    from adlm.errors import check_known

    known = list_recipes()
    if name:
        check_known("recipe", name, known)
    with json_stdout(is_json):
        described = [describe_recipe(known[each]) for each in ([name] if name else known)]
    if name and not is_json:
        print_lines(f"# {known[name]}", known[name].read_text("utf-8").rstrip("\n"))
    else:
        print_entries("recipes", described, None, is_json)


def describe_recipe(path: Path) -> dict[str, Any]:
    """Return what a recipe trains and needs, from its settings and the comments before them."""
    from adlm.config import read_yaml

    settings = read_yaml(path, "a recipe")
    comments = [
        line.removeprefix("# ")
        for line in path.read_text("utf-8").splitlines()
        if line.startswith("#")
    ]
    header = " ".join(comments)
    processes = re.search(r"--nproc-per-node (\d+)", header)
    device = f"{processes[1]} GPUs" if processes else "1 GPU" if "GPU" in header else "CPU"
    commands = [line.strip() for line in comments if line.startswith("  ")]
    data = re.search(r"adlm prepare (.*?) *--out data *(.*)", "\n".join(commands))
    reasoning = re.search(r"adlm reason train (\S+).*", "\n".join(commands))
    problems = (
        f"files of {reasoning[1]}"
        if reasoning and "reasoning.path" in reasoning[0]
        else "generated problems"
    )
    other_data = f"{problems}, for adlm reason train" if reasoning else "see bundled/README.md"
    about = " ".join(line for line in comments if not line.startswith("  "))
    return {
        "recipe": path.stem,
        "method": settings.get("method", "that of the arm" if reasoning else "that of init"),
        "device": device,
        "steps": int(settings["steps"]) if "steps" in settings else None,
        "data": " ".join(filter(None, data.groups())) if data else other_data,
        "about": re.split(r"[.:;] ", about)[0].removesuffix("."),
        "commands": commands,
        "path": str(path),
    }


def print_entries(
    kind: str, entries: list[dict[str, Any]], name: str | None, is_json: bool
) -> None:
    """Print entries as JSON or a table; the entry of a name, as lines."""
    if is_json:
        print_json({kind: entries})
    elif name:
        for key, value in entries[0].items():
            print_lines(
                f"{key:<10}  {value:,}" if isinstance(value, int) else f"{key:<10}  {value}"
            )
    else:
        from adlm.evaluate.results import Table, TableColumn

        shown = list(entries[0])[: list(entries[0]).index("about") + 1]
        columns = [
            TableColumn(key, is_text=isinstance(entries[0][key], str), is_optional=key == "data")
            for key in shown
        ]
        print_table(Table(columns, [[entry[key] for key in shown] for entry in entries]))
        print_lines(f"adlm {kind} NAME shows one")


def print_lines(*lines: str) -> None:
    """Print lines to stdout; control characters, which a model card may hold, are shown instead of obeyed."""
    SafeConsole(soft_wrap=True).print(*lines, sep="\n", markup=False)
