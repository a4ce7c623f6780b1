"""`adlm train`: a recipe, changes to it, a run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from adlm.cli.errors import told
from adlm.train.guard import Preempted
from adlm.train.loop import Run
from adlm.train.loop import train as run_training


def train(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a recipe that ships (cpu-nano, …).")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="key=value: data.path=DATA folder=RUN steps=1000 optimiser.lr=1e-3 …")
    ] = None,
) -> Run:
    """Train a model on prepared data. A run that was stopped goes on with the same command.

    Exit codes: 0 done; 75 stopped by SIGTERM or SIGUSR1 and saved, to be started again; 2 a setting or a file is
    wrong; 1 the loss diverged.
    """
    with told():
        try:
            return run_training(recipe, *(changes or []))
        except Preempted as stopped:
            Console(stderr=True, highlight=False).print(str(stopped), markup=False, soft_wrap=True)
            raise typer.Exit(stopped.code) from stopped
