"""All commands by name. A command is imported when it is used, so that `adlm --help` is fast, and
the core knows apps by these strings alone."""

from dataclasses import dataclass
from typing import Any

import typer
from typer.main import get_command

from adlm.registry import load_object


@dataclass(frozen=True)
class Command:
    """Where a command is defined, as a function or a Typer app, and its line in `--help`."""

    target: str
    help: str


COMMANDS = {
    "demo": Command(
        "adlm.cli.demo:demo",
        "Watch the bundled model infill and generate, train and fine-tune on a novel, and keep "
        "the runs. Uses the CPU.",
    ),
    "sample": Command(
        "adlm.cli.text:sample",
        "Generate texts. On a terminal, show the sampling of the first one; otherwise print only "
        "the texts.",
    ),
    "infill": Command(
        "adlm.cli.text:infill",
        'Fill the holes of a text, for example "The `___` sat on the `___{2}`." The rest stays '
        "the same, to the byte.",
    ),
    "score": Command(
        "adlm.cli.text:score",
        "Compute the likelihood of texts: nats per token with their standard error, perplexity "
        "and bits per byte.",
    ),
    "prepare": Command(
        "adlm.cli.train:prepare",
        "Tokenize text and pack it into rows. Running the same command again resumes a stopped "
        "run.",
    ),
    "train": Command(
        "adlm.cli.train:train",
        "Train a model on prepared data. Running the same command again resumes a stopped run.",
    ),
    "plot": Command(
        "adlm.cli.train:plot", "Plot runs: likelihood, learning rate and γ, throughput."
    ),
    "convert": Command(
        "adlm.cli.convert:convert",
        "Convert a checkpoint of ADLM, MDLM, ReMDM or AR to a model folder, or a model to a "
        "Lightning checkpoint.",
    ),
    "export": Command(
        "adlm.cli.convert:export",
        "Export a model to a folder that transformers, diffusers (masked models) and adlm load.",
    ),
    "models": Command(
        "adlm.cli.doctor:models",
        "List the bundled models, or show one model: method, size, what it was trained on.",
    ),
    "recipes": Command(
        "adlm.cli.doctor:recipes",
        "List the recipes of `adlm train` and `adlm reason train`, or show one: its method, "
        "device, data and settings.",
    ),
    "doctor": Command(
        "adlm.cli.doctor:doctor",
        "Print versions, devices and the state of the bundled models for a bug report.",
    ),
    "serve": Command(
        "adlm.cli.serve:serve",
        "Serve models over HTTP: OpenAI's completions API and, at /, a page; prints the address "
        "when ready.",
    ),
    "experiment": Command(
        "adlm.apps.experiments.cli:app",
        "Train arms × corpora × seeds in parallel and compare them in pairs.",
    ),
    "reason": Command(
        "adlm.apps.reasoning.cli:app", "Train models to reason, and compare ways to do it."
    ),
    "eval": Command("adlm.cli.eval:app", "Evaluate models and texts."),
    "eval anchors": Command(
        "adlm.apps.anchor_study.cli:app",
        "Measure an anchor network: its predictions, the loss with perturbed anchor features, "
        "the unmasking order.",
    ),
    "eval code": Command(
        "adlm.apps.code_eval.cli:app",
        "Measure Python code: the share of generated and filled-in functions that parse, "
        "or pass@k of problems.",
    ),
}


def add_commands(app: typer.Typer, group: str = "") -> None:
    """List the commands of a group ("" is `adlm` itself) in its `--help`."""
    for words, command in COMMANDS.items():
        own_group, _, name = words.rpartition(" ")
        if own_group == group:
            app.command(name, help=command.help)(_not_loaded)


def load_command(words: str) -> Any:
    """Import a command and return it as the command line runs it."""
    target = load_object(COMMANDS[words].target)
    if not isinstance(target, typer.Typer):
        function = target
        target = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        target.command()(function)
    return get_command(target)


def _not_loaded() -> None:
    """Stand for a command in `--help` alone."""
    raise AssertionError("a command was run before it was loaded")
