"""The command line: thin, every command calls a function that does the work.

What takes long to import is imported by the command that needs it: `--help` and `--version` answer at once.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from adlm import __version__
from adlm.cli import options
from adlm.cli.doctor import doctor
from adlm.cli.errors import Commands, report_errors
from adlm.cli.eval import app as eval_app
from adlm.cli.infill import infill
from adlm.cli.output import check_output_files, json_stdout, print_json
from adlm.cli.plot import plot
from adlm.cli.prepare import prepare
from adlm.cli.sample import sample
from adlm.cli.score import score
from adlm.cli.train import train

# Markdown keeps `[default: …]` in help texts, which rich markup would take for a style.
app = typer.Typer(
    cls=Commands, help="Anchored diffusion language models.", no_args_is_help=True, rich_markup_mode="markdown"
)


def tell_version(is_asked: bool) -> None:
    """Print the version and end."""
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def adlm(
    version: Annotated[
        bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Anchored diffusion language models: write, fill in and score text; prepare data, train, plot."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without a ✓ gets a stand-in for it, no error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@app.command()
def version(is_json: options.Json = False) -> None:
    """Print the version."""
    if is_json:
        print_json({"version": __version__})
    else:
        typer.echo(__version__)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1, help="About how long to train; the number of steps follows.")] = 45,
    steps: Annotated[int | None, typer.Option(min=1, help="Train exactly this many steps, whatever they take.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the order, the noise and the samples.")] = 1,
    out: Annotated[Path, typer.Option(help="The page that it leaves behind.")] = Path("adlm-demo.html"),
    is_json: options.Json = False,
) -> object:
    """Watch the bundled model write and fill in, train a small one, and keep a page of it. All on the CPU."""
    with report_errors():
        check_output_files({"--out": out})
        from adlm.cli.demo import run_demo

        with json_stdout(is_json):
            found = run_demo(seconds=seconds, steps=steps, seed=seed, out=out)
        if is_json:
            print_json(asdict(found))
        return found


for command in (sample, infill, score, prepare, train, plot, doctor):
    app.command()(command)
app.add_typer(eval_app, name="eval")

if __name__ == "__main__":
    app()
