"""The command line; commands import what is slow to import when they run, so that `--help` is fast."""

import sys
from typing import Annotated

import typer

from adlm import __version__
from adlm.cli.apps import add_app_commands
from adlm.cli.convert import convert, export
from adlm.cli.demo import demo
from adlm.cli.doctor import doctor, models, recipes
from adlm.cli.eval import app as eval_app
from adlm.cli.output import Commands
from adlm.cli.serve import serve
from adlm.cli.text import infill, sample, score
from adlm.cli.train import plot, prepare, train

# Markdown keeps `[default: …]` in help texts, which rich markup would take for a style.
app = typer.Typer(
    cls=Commands,
    help="Anchored diffusion language models.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(is_set: bool) -> None:
    """Print the version and exit."""
    if is_set:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def adlm(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Anchored diffusion language models: generate, infill and score text; prepare data, train, evaluate, plot."""
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a character that the terminal lacks is escaped, not an error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


COMMANDS = (
    demo,
    sample,
    infill,
    score,
    prepare,
    train,
    plot,
    convert,
    export,
    models,
    recipes,
    doctor,
)
for command in (*COMMANDS, serve):
    app.command()(command)
app.add_typer(eval_app, name="eval")
add_app_commands(app)
