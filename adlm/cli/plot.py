"""Training curves of one or several runs as a figure and a table, for `adlm plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adlm.cli.output import make_folder
from adlm.evaluate.plots import new_figure, set_log_scale
from adlm.evaluate.results import Column, Estimate, Table, shorten_names
from adlm.training.logging import read_metrics
from adlm.view.look import COLORS, GRAY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
SMOOTHING = 50  # the window of the bold curves is this fraction of a run
PANELS = {"lr": "learning rate", "anchor_weight": "γ", "tokens_per_second": "tokens/s", "stall": "stall"}


@dataclass(frozen=True, eq=False)
class RunCurves:
    """The metrics of a run by name; NaN where a record lacks one."""

    folder: str
    train: dict[str, np.ndarray]  # step, tokens, train/nll, lr, …
    valid: dict[str, np.ndarray]  # step, tokens, val/nll, val/stderr, …

    def summarize(self) -> dict[str, Any]:
        """Return the last and the best validation."""
        summary: dict[str, Any] = {"last_step": int(max([*self.train["step"][-1:], *self.valid["step"][-1:]]))}
        if np.isfinite(self.valid["val/nll"]).any():
            best = int(np.nanargmin(self.valid["val/nll"]))
            names = ("val/nll", "val/ppl", "val/stderr", "unigram/ppl")
            summary |= {name: float(self.valid[name][-1]) for name in names}
            summary |= {"best/ppl": float(self.valid["val/ppl"][best]), "best/step": int(self.valid["step"][best])}
        return summary


def read_run(folder: Path) -> RunCurves:
    """Read the curves from RUN/metrics.jsonl."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        problem = "has no metrics.jsonl" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {problem}: give the folder of a run that has logged a step")
    records = [record | record.get("time", {}) for record in read_metrics(path)]
    train, valid = ([record for record in records if name in record] for name in ("train/nll", "val/nll"))
    if not train and not valid:
        raise ValueError(f"{path} has no step yet: plot it when the run has logged its first loss")

    def read_columns(records: Sequence[dict[str, Any]], names: str) -> dict[str, np.ndarray]:
        return {name: np.array([record.get(name) for record in records], dtype=float) for name in names.split()}

    curves = read_columns(train, "step tokens train/nll lr anchor_weight tokens_per_second stall")
    held_out = read_columns(valid, "step tokens val/nll val/ppl val/stderr unigram/ppl")
    if train:  # validations have steps; the training records around them have the tokens
        held_out["tokens"] = np.interp(held_out["step"], curves["step"], curves["tokens"])
    return RunCurves(str(folder), curves, held_out)


def smooth_curve(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and those before it in a window; NaN where any of them is."""
    window = max(1, min(5, len(values)), len(values) // SMOOTHING)
    padded = np.concatenate([np.full(window, math.nan), values])
    return np.lib.stride_tricks.sliding_window_view(padded, window).mean(-1)[1:]


def plot_runs(runs: Sequence[RunCurves], out: Path, *, x: str = "step") -> Path:
    """Draw the likelihood above; learning rate, γ, throughput and the share of stalls below; all runs in one figure."""
    if x not in ("step", "tokens"):
        raise ValueError(f"x is {x!r}: expected one of step, tokens")
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"{out.name} has no suffix of a plot: give a name that ends in one of {', '.join(FORMATS)}")
    with new_figure(out, 9.0, 5.4) as figure:
        make_folder(out.parent)
        grid = figure.add_gridspec(2, len(PANELS), height_ratios=[2.2, 1])
        top = figure.add_subplot(grid[0, :])
        draw_likelihood(top, runs, x)
        for place, (name, label) in enumerate(PANELS.items()):
            axes = figure.add_subplot(grid[1, place])
            for run, color in zip(runs, COLORS * len(runs)):
                axes.plot(run.train[x], run.train[name], color=color)
            axes.ticklabel_format(style="sci", scilimits=(-2, 4))
            axes.set(title=label, ylim=(0, None))
        for axes in figure.axes:
            axes.set_xlabel(x)
        figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return out


def draw_likelihood(axes: Axes, runs: Sequence[RunCurves], x: str) -> None:
    """Draw training and validation in nats, with an axis of perplexity and the legend's entries."""
    names = shorten_names([run.folder for run in runs])
    for run, color in zip(runs, COLORS * len(runs)):
        train, valid = run.train, run.valid
        axes.plot(train[x], train["train/nll"], color=color, alpha=0.25, linewidth=0.7)
        axes.plot(train[x], smooth_curve(train["train/nll"]), color=color, linewidth=1.6, label=names[run.folder])
        error = np.nan_to_num(2 * valid["val/stderr"])
        axes.errorbar(valid[x], valid["val/nll"], error, fmt="o", color=color, markeredgecolor="white", zorder=4)
    axes.plot([], [], color=GRAY, marker="o", linestyle="none", label="validation ± 2 s.e.")
    for unigram in sorted({float(ppl) for run in runs for ppl in run.valid["unigram/ppl"][-1:] if ppl > 0}):
        label = f"unigram perplexity {unigram:,.0f}"
        axes.axhline(math.log(unigram), color=GRAY, linestyle="--", linewidth=1.0, label=label)
    axes.set_ylabel("nll (nats per token)")
    perplexities = axes.secondary_yaxis("right", functions=(np.exp, lambda ppl: np.log(np.maximum(ppl, 1e-9))))
    perplexities.set_ylabel("perplexity")
    set_log_scale(perplexities, "y")


def build_runs_table(runs: Sequence[RunCurves]) -> Table:
    """Build a table of the summaries; the error of the perplexity is that of its logarithm, to first order."""
    names, rows = shorten_names([run.folder for run in runs]), []
    for run in runs:
        last = run.summarize()
        ppl = Estimate(last["val/ppl"], last["val/ppl"] * last["val/stderr"]) if "val/ppl" in last else None
        best = [last.get(name) for name in ("best/ppl", "best/step", "unigram/ppl")]
        rows.append([names[run.folder], last["last_step"], ppl, *best])
    numbers = ("last step", "val/ppl", "best/ppl", "best/step", "unigram/ppl")
    return Table([Column("run", is_text=True), *(Column(name, digits=2) for name in numbers)], rows)
