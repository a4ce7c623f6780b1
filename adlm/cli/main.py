"""The command line: thin, every command calls a function that does the work."""

from __future__ import annotations

from typing import Annotated

import typer

from adlm import __version__
from adlm.cli.demo import DemoResult, run_demo
from adlm.cli.plot import plot
from adlm.cli.prepare import prepare
from adlm.cli.sample import sample
from adlm.cli.train import train

app = typer.Typer(help="Anchored diffusion language models.", no_args_is_help=True, add_completion=False)


@app.callback()
def adlm() -> None:
    """Anchored diffusion language models."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1, help="About how long to train; the number of steps follows.")] = 70,
    steps: Annotated[int | None, typer.Option(min=1, help="Train exactly this many steps, whatever they take.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the order, the noise and the samples.")] = 0,
) -> DemoResult:
    """Train a tiny anchored diffusion model on a novel's opening, on the CPU, and watch it write and fill in."""
    return run_demo(seconds=seconds, steps=steps, seed=seed)


for command in (prepare, train, plot, sample):
    app.command()(command)

if __name__ == "__main__":
    app()
