"""Training curves of one or several runs as a figure and a table, for `adlm plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adlm.cli.output import make_folder
from adlm.evaluate.plots import new_figure
from adlm.evaluate.results import Column, Estimate, Table, shorten_names
from adlm.training.logging import read_metrics
from adlm.view.look import COLORS, GRAY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
DASHED = (0, (5, 3))
SMOOTHING = 50  # the window of the bold curves is this fraction of a run
MIN_STALL_TOP = 0.05  # of the stall axis, so that a negligible stall looks negligible
MAX_UNIGRAM_HEIGHT = 2.5  # heights of the curves; a unigram level further above them is only in the legend


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
    """Return the running mean of the finite values; NaN where there are none."""
    half, is_finite = max(2, len(values) // SMOOTHING // 2), np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_finite)])
    place = np.arange(len(values))
    # The loss falls steeply at first: there the window is symmetric.
    start, end = np.maximum(place - half, 0), np.minimum(place + np.minimum(place, half) + 1, len(values))
    count = counts[end] - counts[start]
    return np.where(count > 0, (sums[end] - sums[start]) / np.maximum(count, 1), math.nan)


def plot_runs(runs: Sequence[RunCurves], out: Path, *, x: str = "step") -> Path:
    """Draw likelihood above, learning rate with γ and throughput with stalls below, all runs in one figure."""
    if x not in ("step", "tokens"):
        raise ValueError(f"x is {x!r}: expected one of step, tokens")
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"{out.name} has no suffix of a plot: give a name that ends in one of {', '.join(FORMATS)}")
    with new_figure(out, 7.2, 5.4) as figure:
        make_folder(out.parent)
        from matplotlib.ticker import EngFormatter, PercentFormatter

        grid = figure.add_gridspec(2, 2, height_ratios=[2.2, 1], wspace=0.08)
        top, left, right = (figure.add_subplot(place) for place in (grid[0, :], grid[1, 0], grid[1, 1]))
        draw_likelihood(top, runs, x)
        anchor_axes = draw_pair(left, runs, x, {"lr": "learning rate", "anchor_weight": "γ (dashed)"})
        for axes in filter(None, (left, anchor_axes)):
            axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        labels = {"tokens_per_second": "tokens/s", "stall": "stall (dashed)"}
        stall_axes = draw_pair(right, runs, x, labels, is_smooth=True)
        right.yaxis.set_major_formatter(EngFormatter(sep=""))
        if stall_axes is not None:
            stall_axes.set_ylim(0, max(MIN_STALL_TOP, stall_axes.get_ylim()[1]))
            stall_axes.yaxis.set_major_formatter(PercentFormatter(1))
        for axes in (top, left, right):
            axes.set_xlabel(x)
            axes.margins(x=0.02)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        handles, _ = top.get_legend_handles_labels()
        figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5))
    return out


def draw_likelihood(axes: Axes, runs: Sequence[RunCurves], x: str) -> None:
    """Draw training and validation in nats, with an axis of perplexity and the legend's entries."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    names, levels = shorten_names([run.folder for run in runs]), set[float]()
    shown: list[float] = []  # values that must be inside the panel
    for i, run in enumerate(runs):
        train, valid, color = run.train, run.valid, COLORS[i % len(COLORS)]
        smooth = smooth_curve(train["train/nll"])
        axes.plot(train[x], train["train/nll"], color=color, alpha=0.25, linewidth=0.7)
        axes.plot(train[x], smooth, color=color, linewidth=1.6, label=names[run.folder])
        error = np.nan_to_num(2 * valid["val/stderr"])
        axes.errorbar(valid[x], valid["val/nll"], error, fmt="o", color=color, markeredgecolor="white", zorder=4)
        start = len(smooth) // 20  # the steep beginning may be cut off
        finite = train["train/nll"][start:][np.isfinite(train["train/nll"][start:])]
        shown += [*(valid["val/nll"] + error), *(valid["val/nll"] - error), *smooth[start:]]
        shown += [float(np.percentile(finite, 1))] if len(finite) else []
        levels |= set(np.log(valid["unigram/ppl"][-1:]).tolist())
    axes.plot([], [], color=GRAY, marker="o", linestyle="none", label="validation ± 2 s.e.")
    inside = [value for value in shown if math.isfinite(value)] or [0.0]
    low, high = min(inside), max(inside)
    for level in sorted(filter(math.isfinite, levels)):
        label = f"unigram perplexity {math.exp(level):,.0f}"
        axes.axhline(level, color=GRAY, linestyle=DASHED, linewidth=1.0, label=label)
        if level - min(inside) <= MAX_UNIGRAM_HEIGHT * (max(inside) - min(inside)):
            low, high = min(low, level), max(high, level)
    room = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - room, high + room)
    axes.set_ylabel("nll (nats per token)")
    right = axes.secondary_yaxis("right", functions=(np.exp, lambda ppl: np.log(np.maximum(ppl, 1e-9))))
    right.set_ylabel("perplexity")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high - low > 2.5 else MaxNLocator(6))
    right.yaxis.set_major_formatter(lambda ppl, place: f"{ppl:,.0f}" if ppl >= 10 else f"{ppl:.3g}")
    right.minorticks_off()


def draw_pair(
    axes: Axes, runs: Sequence[RunCurves], x: str, labels: dict[str, str], is_smooth: bool = False
) -> Axes | None:
    """Draw the first metric solid and the second, where a run has it, dashed on the right axis, which is returned."""
    from matplotlib.ticker import MaxNLocator

    solid, dashed = labels
    right = axes.twinx() if any(np.nan_to_num(run.train[dashed]).any() for run in runs) else None
    for i, run in enumerate(runs):
        first, second = (smooth_curve(run.train[name]) if is_smooth else run.train[name] for name in labels)
        color = COLORS[i % len(COLORS)]
        # Runs of one recipe have one schedule: the lower curve shows at the edges of the upper one.
        axes.plot(run.train[x], first, color=color, linewidth=1.4 + len(runs) - 1 - i)
        if right is not None and np.nan_to_num(second).any():
            right.plot(run.train[x], second, color=color, linestyle=DASHED)
    for each, name, room in ((axes, solid, 1.1), (right, dashed, 1.35)):  # apart from each other
        if each is not None:
            high = max(float(np.nanmax(line.get_ydata(), initial=0.0)) for line in each.get_lines())
            each.set_ylim(0, room * high or 1.0)
            each.set_ylabel(labels[name])
            each.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    if right is not None:
        right.grid(False)
        right.spines["right"].set_visible(True)
    return right


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
