"""`adlm plot`: a figure of one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.output import json_stdout, print_json


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are drawn into one figure.")],
    out: Annotated[Path | None, typer.Option(help="A .png, .svg or .pdf (plots/run.png of the first run).")] = None,
    x: Annotated[str, typer.Option(help="What the curves are over: step or tokens.")] = "step",
    is_json: options.Json = False,
) -> Path:
    """Draw the curves of one or several runs: likelihood, learning rate and γ, speed."""
    with report_errors():
        from adlm.cli.figures import draw_run, figures_of, read_run, summary

        with json_stdout(is_json):
            drawn = draw_run(runs, out, x=x)
            curves = [read_run(folder) for folder in runs]
        if is_json:
            told_of = [{"run": folder} | figures_of(run) for folder, run in zip(runs, curves, strict=True)]
            print_json({"figure": drawn, "runs": told_of})
            return drawn
        console = Console(highlight=False, soft_wrap=True)
        console.print(summary(curves))
        console.print(f"\n{drawn}", markup=False)
        return drawn
