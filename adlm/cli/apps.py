"""The commands of apps: imported when one of them is used, so that the core knows apps by these strings alone."""

from dataclasses import dataclass
from typing import Any

import typer
from typer.main import get_command

from adlm.registry import load_object


@dataclass(frozen=True)
class AppCommand:
    """Where the Typer app of a command is defined, and its line in `--help`."""

    target: str
    help: str


APPS = {
    "experiment": AppCommand(
        "adlm.apps.experiments.cli:app",
        "Train arms × corpora × seeds in parallel and compare them in pairs.",
    ),
    "reason": AppCommand(
        "adlm.apps.reasoning.cli:app", "Train models to reason, and compare ways to do it."
    ),
    "eval anchors": AppCommand(
        "adlm.apps.anchor_study.cli:app",
        "Measure an anchor network: its predictions, the loss with perturbed anchor features, "
        "the unmasking order.",
    ),
    "eval code": AppCommand(
        "adlm.apps.code_eval.cli:app",
        "Measure Python code: the share of generated and filled-in functions that parse, "
        "or pass@k of problems.",
    ),
}


def add_app_commands(app: typer.Typer, group: str = "") -> None:
    """List the apps' commands of a group ("" is `adlm` itself) in its `--help`."""
    for words, command in APPS.items():
        own_group, _, name = words.rpartition(" ")
        if own_group == group:
            app.command(name, help=command.help)(_not_loaded)


def load_app_command(words: str) -> Any:
    """Import the app of a command and return the command."""
    return get_command(load_object(APPS[words].target))


def _not_loaded() -> None:
    """Stand for a command in `--help` alone."""
    raise AssertionError("an app's command was run before it was loaded")
