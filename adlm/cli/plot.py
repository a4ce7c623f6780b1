"""Training curves of one or several runs as a figure and a table, for `adlm plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from adlm.training.logging import read_metrics
from adlm.view.look import COLORS, GRAY, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
DASHED = (0, (5, 3))
SMOOTHING = 50  # the window of the bold curves is this fraction of a run
MIN_STALL_TOP = 0.05  # of the stall axis, so that a negligible stall looks negligible
MAX_UNIGRAM_HEIGHT = 2.5  # heights of the curves; a unigram level further above them is only in the legend


@dataclass(frozen=True, eq=False)
class RunCurves:
    """The metrics of a run by name; NaN where a record lacks one."""

    name: str
    train: dict[str, np.ndarray]  # step, tokens, train/nll, lr, …, time/…
    valid: dict[str, np.ndarray]  # step, tokens, val/nll, val/stderr, …

    @property
    def unigram_ppl(self) -> float | None:
        level = self.valid["unigram/ppl"]
        return float(level[-1]) if len(level) and math.isfinite(level[-1]) else None

    def summarize(self) -> dict[str, Any]:
        """Return the last and the best validation."""
        last_step = int(max(part["step"][-1] for part in (self.train, self.valid) if len(part["step"])))
        summary: dict[str, Any] = {"last_step": last_step, "unigram/ppl": self.unigram_ppl}
        if np.isfinite(self.valid["val/nll"]).any():
            best = int(np.nanargmin(self.valid["val/nll"]))
            summary |= {name: float(self.valid[name][-1]) for name in ("val/nll", "val/ppl", "val/stderr")}
            summary |= {"best/ppl": float(self.valid["val/ppl"][best]), "best/step": int(self.valid["step"][best])}
        return summary


def read_run(folder: Path) -> RunCurves:
    """Read the curves from RUN/metrics.jsonl."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        problem = "has no metrics.jsonl" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {problem}: give the folder of a run that has logged a step")
    records = read_metrics(path)
    train, valid = ([record for record in records if name in record] for name in ("train/nll", "val/nll"))
    if not train and not valid:
        raise ValueError(f"{path} has no step yet: plot it when the run has logged its first loss")

    def read_column(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
        return np.array([record.get(name) for record in records], dtype=float)  # None becomes NaN

    columns = {name: read_column(train, name) for name in ("step", "train/nll", "lr", "anchor_weight", "tokens")}
    times = [record.get("time", {}) for record in train]
    columns |= {f"time/{name}": read_column(times, name) for name in ("tokens_per_second", "stall")}
    held_out = {name: read_column(valid, name) for name in ("step", "val/nll", "val/ppl", "val/stderr", "unigram/ppl")}
    # Validations have steps; the training records around them have the tokens.
    known = np.isfinite(columns["tokens"])
    held_out["tokens"] = np.full(len(valid), math.nan)
    if known.any():
        held_out["tokens"] = np.interp(held_out["step"], columns["step"][known], columns["tokens"][known])
    return RunCurves(folder.resolve().name, columns, held_out)


def smooth_curve(values: np.ndarray) -> np.ndarray:
    """Return the running mean of the finite values; NaN where there are none."""
    half, is_known = max(2, len(values) // SMOOTHING // 2), np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_known)])
    place = np.arange(len(values))
    # The loss falls steeply at first: there the window is symmetric.
    start, end = np.maximum(place - half, 0), np.minimum(place + np.minimum(place, half) + 1, len(values))
    count = counts[end] - counts[start]
    return np.where(count > 0, (sums[end] - sums[start]) / np.maximum(count, 1), math.nan)


def plot_runs(folders: Sequence[Path], out: Path | None = None, *, x: str = "step") -> Path:
    """Draw the runs into one figure and return its path; by default plots/run.png of the first run."""
    if not folders:
        raise ValueError("there are 0 runs: give at least one folder")
    if x not in ("step", "tokens"):
        raise ValueError(f"x is {x!r}: expected one of step, tokens")
    out = out or folders[0] / "plots" / "run.png"
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"{out.name} has no suffix of a plot: give a name that ends in one of {', '.join(FORMATS)}")
    runs = [read_run(folder) for folder in folders]
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}): pip install 'adlm[track]'") from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 5.4), layout="constrained")
        FigureCanvasAgg(figure)  # without a window or global state
        draw_runs(figure, runs, x)
        out.parent.mkdir(parents=True, exist_ok=True)
        # Without a date, an SVG or PDF of the same runs is the same file.
        date_key = {".svg": "Date", ".pdf": "CreationDate"}.get(out.suffix.lower())
        figure.savefig(out, dpi=200, metadata={date_key: None} if date_key else None)
    return out


def list_labels(runs: Sequence[RunCurves]) -> list[str]:
    """List the folders' names, numbered where two are the same."""
    names = [run.name for run in runs]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def draw_runs(figure: Figure, runs: Sequence[RunCurves], x: str) -> None:
    """Draw likelihood above, learning rate with γ and throughput with stalls below."""
    from matplotlib.ticker import EngFormatter, PercentFormatter

    grid = figure.add_gridspec(2, 2, height_ratios=[2.2, 1], wspace=0.08)
    top, left, right = (figure.add_subplot(place) for place in (grid[0, :], grid[1, 0], grid[1, 1]))
    colors = [COLORS[i % len(COLORS)] for i in range(len(runs))]
    draw_likelihood(top, runs, colors, x)
    anchor_axes = draw_pair(left, runs, colors, x, {"lr": "learning rate", "anchor_weight": "γ (dashed)"})
    for axes in filter(None, (left, anchor_axes)):
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    labels = {"time/tokens_per_second": "tokens/s", "time/stall": "stall (dashed)"}
    stall_axes = draw_pair(right, runs, colors, x, labels, is_smooth=True)
    right.yaxis.set_major_formatter(EngFormatter(sep=""))
    if stall_axes is not None:
        stall_axes.set_ylim(0, max(MIN_STALL_TOP, stall_axes.get_ylim()[1]))
        stall_axes.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in (top, left, right):
        axes.set_xlabel(x)
        axes.margins(x=0.02)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    handles, _ = top.get_legend_handles_labels()
    figure.legend(handles=handles, frameon=False, loc="outside upper center", ncols=min(len(handles), 5))


def draw_likelihood(axes: Axes, runs: Sequence[RunCurves], colors: Sequence[str], x: str) -> None:
    """Draw training and validation in nats, with an axis of perplexity and the legend's entries."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    shown: list[float] = []  # values that must be inside the panel
    for run, label, color in zip(runs, list_labels(runs), colors):
        train, valid = run.train, run.valid
        smooth = smooth_curve(train["train/nll"])
        axes.plot(train[x], train["train/nll"], color=color, alpha=0.25, linewidth=0.7)
        axes.plot(train[x], smooth, color=color, linewidth=1.6, label=label)
        error = np.nan_to_num(2 * valid["val/stderr"])
        style: dict[str, Any] = {"color": color, "elinewidth": 1.1, "capsize": 2.5, "markersize": 5, "zorder": 4}
        axes.errorbar(valid[x], valid["val/nll"], error, fmt="o", markeredgecolor="white", **style)
        settled = train["train/nll"][len(smooth) // 20 :]
        finite = settled[np.isfinite(settled)]
        shown += [*(valid["val/nll"] + error), *(valid["val/nll"] - error), *smooth[len(smooth) // 20 :]]
        shown += [float(np.percentile(finite, 1))] if len(finite) else []
    axes.plot([], [], color=GRAY, marker="o", linestyle="none", markersize=5, label="validation ± 2 s.e.")
    inside = [value for value in shown if math.isfinite(value)] or [0.0]
    low, high = min(inside), max(inside)
    levels = sorted({math.log(run.unigram_ppl) for run in runs if run.unigram_ppl})
    for level in levels:
        label = f"unigram perplexity {math.exp(level):,.0f}"
        axes.axhline(level, color=GRAY, linestyle=DASHED, linewidth=1.0, label=label)
    near = [level for level in levels if level - low <= MAX_UNIGRAM_HEIGHT * (high - low)]
    low, high = min([low, *near]), max([high, *near])
    room = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - room, high + room)
    axes.set_ylabel("nll (nats per token)")
    right = axes.secondary_yaxis("right", functions=(np.exp, lambda ppl: np.log(np.maximum(ppl, 1e-9))))
    right.set_ylabel("perplexity")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high - low > 2.5 else MaxNLocator(6))
    right.yaxis.set_major_formatter(lambda ppl, place: f"{ppl:,.0f}" if ppl >= 10 else f"{ppl:.3g}")
    right.minorticks_off()


def draw_pair(
    axes: Axes, runs: Sequence[RunCurves], colors: list[str], x: str, labels: dict[str, str], is_smooth: bool = False
) -> Axes | None:
    """Draw the first metric solid and the second, where a run has it, dashed on the right axis, which is returned."""
    from matplotlib.ticker import MaxNLocator

    solid, dashed = labels
    with_dashed = [run for run in runs if np.nan_to_num(run.train[dashed]).any()]
    right = axes.twinx() if with_dashed else None
    for i, (run, color) in enumerate(zip(runs, colors)):
        first, second = (smooth_curve(run.train[name]) if is_smooth else run.train[name] for name in labels)
        # Runs of one recipe have one schedule: the lower curve shows at the edges of the upper one.
        axes.plot(run.train[x], first, color=color, linewidth=1.4 + len(runs) - 1 - i)
        if right is not None and run in with_dashed:
            right.plot(run.train[x], second, color=color, linewidth=1.2, linestyle=DASHED)
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
    table = Table(box=None, pad_edge=False)
    for name in ("run", "last step", "val/ppl", "± 2 s.e.", "best", "at step", "unigram/ppl"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for run, label in zip(runs, list_labels(runs)):
        summary, cells = run.summarize(), ["–"] * 4
        if "val/ppl" in summary:
            ppl, best = summary["val/ppl"], summary["best/ppl"]
            cells = [f"{ppl:.2f}", f"{2 * ppl * summary['val/stderr']:.2f}", f"{best:.2f}", f"{summary['best/step']:,}"]
        unigram = "–" if run.unigram_ppl is None else f"{run.unigram_ppl:.2f}"
        table.add_row(label, f"{summary['last_step']:,}", *cells, unigram)
    return table
