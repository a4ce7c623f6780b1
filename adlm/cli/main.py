"""The command line. Its commands are imported when they are used."""

import sys
from typing import Annotated

import typer

from adlm import __version__
from adlm.cli.commands import add_commands
from adlm.cli.output import Commands

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
    """Generate, infill and score text; prepare data, train, evaluate, plot."""
    # A character that the terminal lacks is escaped, not an error.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


add_commands(app)
