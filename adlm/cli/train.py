"""`adlm train` and `adlm plot`: train with a recipe and overrides, and plot runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adlm.cli import options
from adlm.cli.output import check_output_files, json_stdout, print_json, print_table, status_console
from adlm.view.console import SafeConsole

if TYPE_CHECKING:
    from adlm.training.loop import Run


def train(
    recipe: Annotated[str, typer.Argument(help="YAML file, or name of a bundled recipe (cpu-nano, …).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value: data.path=DATA folder=RUN …")] = None,
    is_json: options.Json = False,
) -> None:
    """Train a model on prepared data. Running the same command again resumes a stopped run.

    Exit codes: 0 done; 75 stopped by SIGTERM or SIGUSR1 after saving, start again to resume; 2 a setting or a file is
    wrong; 1 the loss diverged.
    """
    from adlm.training.loop import train as run_training

    run = run_or_exit(lambda: run_training(recipe, *(overrides or [])), is_json=is_json)
    if is_json and is_main_process():
        print_json(asdict(run))


def run_or_exit(start: Callable[[], Run], *, is_json: bool) -> Run:
    """Train; where a signal stops the run, print that it is saved and exit with the signal's code."""
    from adlm.training.guard import Preempted

    try:
        with json_stdout(is_json):
            return start()
    except Preempted as stopped:
        status_console().print(str(stopped), markup=False)
        raise typer.Exit(stopped.code) from stopped


def is_main_process() -> bool:
    """Return whether this is the one of torchrun's processes that prints results."""
    return os.environ.get("RANK", "0") == "0"


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are drawn into one figure.")],
    out: Annotated[Path | None, typer.Option(help="Output .png, .svg or .pdf. [default: RUN/plots/run.png]")] = None,
    x: Annotated[str, typer.Option(help="Horizontal axis: step or tokens.")] = "step",
    is_json: options.Json = False,
) -> None:
    """Plot runs: likelihood, learning rate and γ, throughput."""
    from adlm.evaluate.plots import build_runs_table, plot_runs, read_run

    check_output_files({"--out": out})
    with json_stdout(is_json):
        curves = [read_run(folder) for folder in runs]
        path = out or runs[0] / "plots" / "run.png"
        is_new = not path.parent.is_dir()
        plot_runs(curves, path, x=x)
        if is_new:
            status_console().print(f"created folder {path.parent}", style="dim", markup=False)
    if is_json:
        print_json({"figure": path, "runs": [{"run": run.folder} | run.summarize() for run in curves]})
    else:
        print_table(build_runs_table(curves))
        SafeConsole(soft_wrap=True).print(str(path), markup=False)
