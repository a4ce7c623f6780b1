"""The curves of one or several runs as a figure, and what they came to in a few lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from adlm.training.metrics import read_metrics
from adlm.view.look import COLORS, GREY, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
AXES = ("step", "tokens")
DASHED = (0, (5, 3))
SMOOTH = 50  # the bold curves are running means over so many-th part of the record
LEAST_STALL = 0.05  # the top of the stall's axis at least: what is nothing should look like nothing
FAR = 2.5  # heights of the curves: a level further above them is named, not drawn, or they would be flat


@dataclass(frozen=True, eq=False)
class Curves:
    """A run's records by column; NaN where a record does not say."""

    name: str
    train: dict[str, np.ndarray] = field(repr=False)  # step, tokens, train/nll, lr, …, time/…
    valid: dict[str, np.ndarray] = field(repr=False)  # step, tokens, val/nll, val/stderr, …

    @property
    def last_step(self) -> int:
        return int(max(part["step"][-1] for part in (self.train, self.valid) if len(part["step"])))

    @property
    def unigram_ppl(self) -> float | None:
        level = self.valid["unigram/ppl"]
        return float(level[-1]) if len(level) and np.isfinite(level[-1]) else None


def read_run(folder: Path) -> Curves:
    """The curves of RUN/metrics.jsonl."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give the folder of a run")
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no metrics.jsonl: it is not the folder of a run, or the run has told nothing yet"
        )
    records = read_metrics(path)
    train = [record for record in records if "train/nll" in record]
    valid = [record for record in records if "val/nll" in record]
    if not train and not valid:
        raise ValueError(f"{path} has no step yet: plot it when the run has told its first loss")
    names = ("train/nll", "lr", "anchor_weight", "tokens")
    columns = {name: column(train, name) for name in ("step", *names)}
    columns |= {
        f"time/{name}": column([r.get("time", {}) for r in train], name) for name in ("tokens_per_second", "stall")
    }
    held = {name: column(valid, name) for name in ("step", "val/nll", "val/ppl", "val/stderr", "unigram/ppl")}
    # Validations are told by step; how many tokens that is, the training records around them say.
    known = np.isfinite(columns["tokens"])
    held["tokens"] = (
        np.interp(held["step"], columns["step"][known], columns["tokens"][known])
        if known.any()
        else np.full(len(valid), math.nan)
    )
    return Curves(folder.resolve().name, columns, held)


def column(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([math.nan if record.get(name) is None else float(record[name]) for record in records], dtype=float)


def smooth(values: np.ndarray) -> np.ndarray:
    """A running mean of the finite values; NaN where there are none."""
    half, is_known = max(2, len(values) // SMOOTH // 2), np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_known)])
    place = np.arange(len(values))
    # Where a run begins it falls steeply: there the mean reaches as far ahead as it does back.
    start, end = np.maximum(place - half, 0), np.minimum(place + np.minimum(place, half) + 1, len(values))
    count = counts[end] - counts[start]
    return np.where(count > 0, (sums[end] - sums[start]) / np.maximum(count, 1), math.nan)


def draw_run(folders: Sequence[Path], out: Path | None = None, *, x: str = "step") -> Path:
    """Draw the runs into one figure and return where it is; without `out`, in the first run's plots/run.png."""
    if not folders:
        raise ValueError("there is no run to draw: give at least one folder")
    if x not in AXES:
        raise ValueError(f"x {x!r} is not one of {', '.join(AXES)}")
    out = out or folders[0] / "plots" / "run.png"
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"{out.name}: a figure's name ends in one of {', '.join(FORMATS)}")
    runs = [read_run(folder) for folder in folders]
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}): pip install 'adlm[track]'") from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 5.4), layout="constrained")
        FigureCanvasAgg(figure)  # no window and no global state, wherever this runs
        draw(figure, runs, x)
        out.parent.mkdir(parents=True, exist_ok=True)
        # An SVG or PDF of the same runs is the same file, byte for byte: no date in it.
        dated = {".svg": "Date", ".pdf": "CreationDate"}.get(out.suffix.lower())
        figure.savefig(out, dpi=200, metadata={dated: None} if dated else None)
    return out


def labels(runs: Sequence[Curves]) -> list[str]:
    """Folder names; runs whose folders are called the same are numbered."""
    names = [run.name for run in runs]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def draw(figure: Figure, runs: Sequence[Curves], x: str) -> None:
    """Likelihood above; learning rate with γ and speed with stalls below."""
    grid = figure.add_gridspec(2, 2, height_ratios=[2.2, 1], wspace=0.08)
    top, left, right = (figure.add_subplot(place) for place in (grid[0, :], grid[1, 0], grid[1, 1]))
    draw_likelihood(top, runs, x)
    draw_schedule(left, runs, x)
    draw_speed(right, runs, x)
    for axes in (top, left, right):
        axes.set_xlabel(x)
        axes.margins(x=0.02)
        axes.xaxis.set_major_formatter(counts())
    handles, _ = top.get_legend_handles_labels()
    figure.legend(handles=handles, frameon=False, loc="outside upper center", ncols=min(len(handles), 5))


def counts() -> Any:
    """2K, 1M, 500B: what fits under a tick."""
    from matplotlib.ticker import FuncFormatter

    def short(value: float, place: object) -> str:
        for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
            if abs(value) >= size:
                return f"{value / size:.4g}{unit}"
        return f"{value:.4g}"

    return FuncFormatter(short)


def draw_likelihood(axes: Axes, runs: Sequence[Curves], x: str) -> None:
    """Training and validation in nats, perplexity beside them; the entries of the legend."""
    shown: list[float] = []  # what must be inside the panel
    for i, (run, label) in enumerate(zip(runs, labels(runs))):
        color, train, valid = COLORS[i % len(COLORS)], run.train, run.valid
        bold = smooth(train["train/nll"])
        axes.plot(train[x], train["train/nll"], color=color, alpha=0.25, linewidth=0.7)
        axes.plot(train[x], bold, color=color, linewidth=1.6, label=label)
        error = np.nan_to_num(2 * valid["val/stderr"])
        look: dict[str, Any] = {"color": color, "elinewidth": 1.1, "capsize": 2.5, "markersize": 5, "zorder": 4}
        axes.errorbar(valid[x], valid["val/nll"], error, fmt="o", markeredgecolor="white", markeredgewidth=0.7, **look)
        settled = train["train/nll"][len(bold) // 20 :]
        usual = settled[np.isfinite(settled)]
        shown += [*(valid["val/nll"] + error), *(valid["val/nll"] - error), *bold[len(bold) // 20 :]]
        shown += [float(np.percentile(usual, 1))] if len(usual) else []
    axes.plot([], [], color=GREY, marker="o", linestyle="none", markersize=5, label="validation ± 2 s.e.")
    finite = [value for value in shown if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    levels = sorted({math.log(run.unigram_ppl) for run in runs if run.unigram_ppl})
    near = [level for level in levels if level - low <= FAR * (high - low)]
    for level in near:
        axes.axhline(level, color=GREY, linestyle=DASHED, linewidth=1.0, label="unigram" if level == near[0] else None)
    for number, level in enumerate(level for level in levels if level not in near):
        text = f"↑ unigram perplexity {math.exp(level):,.0f}"
        axes.annotate(text, (0.99, 0.96 - 0.07 * number), xycoords="axes fraction", ha="right", va="top", color=GREY)
    low, high = min([low, *near]), max([high, *near])
    room = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - room, high + room)
    axes.set_ylabel("nll (nats per token)")
    beside = axes.secondary_yaxis("right", functions=(np.exp, lambda ppl: np.log(np.maximum(ppl, 1e-9))))
    beside.set_ylabel("perplexity")
    ticks = nice_perplexities(*axes.get_ylim())
    beside.set_yticks(ticks, [f"{tick:,.0f}" if tick >= 10 else f"{tick:g}" for tick in ticks])
    beside.minorticks_off()


def nice_perplexities(low: float, high: float) -> list[float]:
    """Round numbers between two levels of nats, as many as have room."""
    fine = tuple(step / 10 for step in range(10, 100))
    for steps in (fine, fine[::2], fine[::5], (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1,)):
        found = [10**k * step for k in range(12) for step in steps if low <= math.log(10**k * step) <= high]
        if len(found) <= 8:
            break
    return found


def draw_schedule(axes: Axes, runs: Sequence[Curves], x: str) -> None:
    """The learning rate, solid, and γ of the runs that have one, dashed."""
    anchored = [run for run in runs if np.nan_to_num(run.train["anchor_weight"]).any()]
    beside = axes.twinx() if anchored else None
    for i, run in enumerate(runs):
        # Runs of one recipe have one schedule: what lies below shows at the edges of what lies above.
        width = 1.4 + 1.0 * (len(runs) - 1 - i)
        axes.plot(run.train[x], run.train["lr"], color=COLORS[i % len(COLORS)], linewidth=width)
        if beside is not None and run in anchored:
            look: dict[str, Any] = {"color": COLORS[i % len(COLORS)], "linewidth": 1.2, "linestyle": DASHED}
            beside.plot(run.train[x], run.train["anchor_weight"], **look)
    both = ((axes, "learning rate", 1.1), (beside, "γ (dashed)", 1.35))  # or the two would lie on each other
    for each, label, room in both:
        if each is not None:
            from_zero(each, label, room, is_right=each is beside)
            each.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)


def draw_speed(axes: Axes, runs: Sequence[Curves], x: str) -> None:
    """Tokens a second, solid, and the share of the time in which the data was waited for, dashed."""
    beside = axes.twinx()
    for i, run in enumerate(runs):
        color, speed = COLORS[i % len(COLORS)], run.train["time/tokens_per_second"]
        axes.plot(run.train[x], speed, color=color, alpha=0.25, linewidth=0.7)
        axes.plot(run.train[x], smooth(speed), color=color, linewidth=1.4)
        beside.plot(run.train[x], smooth(run.train["time/stall"]), color=color, linewidth=1.2, linestyle=DASHED)
    from_zero(axes, "tokens/s", 1.1)
    from_zero(beside, "stall (dashed)", 1.1, is_right=True)
    beside.set_ylim(0, max(LEAST_STALL, beside.get_ylim()[1]))
    axes.yaxis.set_major_formatter(counts())
    beside.yaxis.set_major_formatter(lambda share, place: f"{100 * share:.3g}%")


def from_zero(axes: Axes, label: str, room: float, *, is_right: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    high = max((float(np.nanmax(line.get_ydata(), initial=0.0)) for line in axes.get_lines()), default=0.0)
    axes.set_ylim(0, room * high or 1.0)
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    if is_right:
        axes.grid(False)
        axes.spines["right"].set_visible(True)


def summary(runs: Sequence[Curves]) -> Table:
    """What the runs came to; a bound of a masked model and the unigram level stand side by side."""
    table = Table(box=None, pad_edge=False)
    for name in ("run", "last step", "val/ppl", "± 2 s.e.", "best", "at step", "unigram/ppl"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for run, label in zip(runs, labels(runs)):
        nll, ppl, error = (run.valid[name] for name in ("val/nll", "val/ppl", "val/stderr"))
        cells = [label, f"{run.last_step:,}"]
        if np.isfinite(nll).any():
            best = int(np.nanargmin(nll))
            # The error is of the nll; that of its exponential, to first order.
            cells += [f"{ppl[-1]:.2f}", f"{2 * ppl[-1] * error[-1]:.2f}", f"{ppl[best]:.2f}"]
            cells += [f"{run.valid['step'][best]:,.0f}"]
        else:
            cells += ["–"] * 4
        table.add_row(*cells, "–" if run.unigram_ppl is None else f"{run.unigram_ppl:.2f}")
    return table


def figures_of(run: Curves) -> dict[str, Any]:
    """What a run came to, for JSON."""
    nll = run.valid["val/nll"]
    found: dict[str, Any] = {"last_step": run.last_step, "unigram/ppl": run.unigram_ppl}
    if np.isfinite(nll).any():
        best = int(np.nanargmin(nll))
        found |= {name: float(run.valid[name][-1]) for name in ("val/nll", "val/ppl", "val/stderr")}
        found |= {"best/ppl": float(run.valid["val/ppl"][best]), "best/step": int(run.valid["step"][best])}
    return found
