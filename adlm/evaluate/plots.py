"""All plots, without a window or global state: of evaluations, from the data in `EvalResult.figures`, and of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adlm.errors import import_extra
from adlm.evaluate.results import Estimate, EvalResult, Table, TableColumn, shorten_names
from adlm.registry import load_object
from adlm.training.logging import read_metrics
from adlm.view.look import COLORS, GRAY, LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axes._secondary_axes import SecondaryAxis
    from matplotlib.figure import Figure

Row = Mapping[str, Any]  # one entry of a result's metrics
Look = dict[str, Any]  # matplotlib's options of a line
MARKERS = "osD^vPX*<>hd"
LINES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1, 1.5)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (8, 2, 1, 2, 1, 2)),
)
PLOT_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
}
PLOT_STYLE |= {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
}
PLOT_STYLE |= {
    "grid.color": LIGHT,
    "lines.linewidth": 1.2,
    "lines.markersize": 5,
    "errorbar.capsize": 2,
}
PLOT_STYLE |= {"svg.hashsalt": "adlm", "svg.fonttype": "none"}
PLOT_STYLE |= {"text.parse_math": False}  # a model's name may contain dollar signs
LINE_LOOKS: list[Look] = [
    {"color": color, "linestyle": style} for style in LINES for color in COLORS
]
APP_KINDS = {"correlation": "adlm.apps.anchor_study.plots:draw_correlation"}
LABELS = {
    "gen_ppl": "Gen-PPL",
    "entropy": "entropy (nats)",
    "nfe": "NFE",
    "seconds": "seconds per text",
}


def draw_figures(result: EvalResult, folder: Path, suffix: str = ".png") -> list[Path]:
    """Draw all figures of a result into a folder, each under its own name."""
    kinds: Any = {
        "frontier": draw_frontier,
        "arms": draw_arms,
        "curves": draw_curves,
    }
    paths = []
    for name, (kind, data) in result.figures.items():
        draw = load_object(APP_KINDS[kind]) if kind in APP_KINDS else kinds[kind]
        paths.append(draw(path=folder / f"{name}{suffix}", **data))
    return paths


@contextmanager
def new_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A context manager that yields an empty figure and saves it at the end of the block."""
    mpl = import_extra("matplotlib", "plots need matplotlib", "eval")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        date = {".svg": "Date", ".pdf": "CreationDate"}.get(
            path.suffix.lower()
        )  # equal data, equal files
        figure.savefig(path, dpi=200, metadata={date: None} if date else None)


def set_log_scale(axes: Axes | SecondaryAxis, side: str, base: int = 10) -> None:
    """Make the axis `x` or `y` logarithmic, with plain numbers that are dense enough for less than a decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    getattr(axes, f"set_{side}scale")("log", base=base)
    axis = getattr(axes, f"{side}axis")
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}")
    if base == 10:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(5))
        axis.set_minor_formatter(NullFormatter())


def add_legend(figure: Figure, looks: Sequence[tuple[str, Look]]) -> None:
    """Put a legend of names and their looks at the right of a figure."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, **look) for name, look in looks]
    figure.legend(handles=handles, loc="outside right upper", labelspacing=0.55)


def assign_looks(values: Sequence[Any], looks: Sequence[Any]) -> dict[Any, Any]:
    """One look for every different value, in their order."""
    return {value: looks[place % len(looks)] for place, value in enumerate(dict.fromkeys(values))}


def _split_errors(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """A metric of every row, and its standard errors (of seconds the standard deviation)."""
    error = {"nfe": "", "seconds": "seconds_sd"}.get(name, f"{name}_se")
    return [float(row[name]) for row in rows], [float(row[error]) if error else 0.0 for row in rows]


# The frontier.


def draw_frontier(points: Sequence[Row], path: Path, reference: Row | None = None) -> Path:
    """Plot Gen-PPL (or entropy, where there is none) over NFE, entropy and time, and time over NFE."""
    panels = [
        ("nfe", "gen_ppl"),
        ("entropy", "gen_ppl"),
        ("seconds", "gen_ppl"),
        ("nfe", "seconds"),
    ]
    if any(point["gen_ppl"] is None for point in points):
        panels = [("nfe", "entropy"), ("seconds", "entropy"), ("nfe", "seconds")]
    size = (2, 2) if len(panels) == 4 else (1, 3)
    colors = assign_looks([point["model"] for point in points], COLORS)
    markers = assign_looks([point["sampler"] for point in points], MARKERS)
    styles = assign_looks([(point["temperature"], point["top_p"]) for point in points], LINES)
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for point in sorted(points, key=lambda point: point["nfe"]):
        lines.setdefault(
            (point["model"], point["sampler"], point["temperature"], point["top_p"]), []
        ).append(point)
    star: Look = {"marker": "*", "color": "black", "markersize": 11, "linestyle": "none"}
    with new_figure(path, 8.6, 3 * size[0] + 0.6) as figure:
        for axes, (x, y) in zip(figure.subplots(*size).flat, panels, strict=True):
            for (model, sampler, *style), line in lines.items():
                (xs, x_errors), (ys, y_errors) = (_split_errors(line, name) for name in (x, y))
                look: Look = {
                    "color": colors[model],
                    "linestyle": styles[tuple(style)],
                    "marker": markers[sampler],
                }
                axes.errorbar(xs, ys, y_errors, x_errors if x == "entropy" else None, **look)
            if reference is not None and y != "seconds":
                (level,), error = _split_errors([reference], y)
                axes.axhline(level, color=GRAY, linestyle=":")
                if x == "entropy":
                    axes.errorbar([reference[x]], [level], error, **star)
            for name, side in ((x, "x"), (y, "y")):
                if name != "entropy":
                    set_log_scale(axes, side, base=2 if name == "nfe" else 10)
            axes.set(xlabel=LABELS[x], ylabel=LABELS[y])
        bare, names = {"color": GRAY, "linestyle": "none"}, shorten_names(list(colors))
        looks: list[tuple[str, Look]] = [
            (names[model], {"color": colors[model], "linewidth": 3}) for model in names
        ]
        looks += [(sampler, bare | {"marker": marker}) for sampler, marker in markers.items()]
        for (temperature, top_p), style in styles.items() if len(styles) > 1 else ():
            looks.append((f"T {temperature:g}, p {top_p:g}", {"color": GRAY, "linestyle": style}))
        add_legend(figure, looks if reference is None else [*looks, ("real text", star)])
    return path


# Arms of reasoning and of experiments.


def draw_arms(sets: Sequence[Row], path: Path, label: str = "accuracy (%)") -> Path:
    """Plot values of arms, a panel for each task: means as bars, seeds as dots, a color for each test set."""
    tasks = list(dict.fromkeys(each["task"] for each in sets))
    arms = list(dict.fromkeys(arm for each in sets for arm in each["arms"]))
    with new_figure(path, 3.6 * len(tasks) + 1.6, 0.32 * len(arms) + 1.4) as figure:
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            own = [each for each in sets if each["task"] == task]
            for number, each in enumerate(own):
                height, color = 0.8 / len(own), COLORS[number % len(COLORS)]
                for arm, values in each["arms"].items():
                    up = len(arms) - 1 - arms.index(arm) + 0.4 - (number + 0.5) * height
                    axes.barh([up], [np.mean(values)], height=height, color=color, alpha=0.45)
                    axes.plot(values, [up] * len(values), "o", color=color, markersize=2.5)
                    span = each.get("intervals", {}).get(arm) or []
                    axes.plot(span, [up] * len(span), color="black", linewidth=1)
                axes.plot([], [], color=color, linewidth=5, alpha=0.45, label=each["test"])
            axes.set_yticks(range(len(arms))[::-1], arms)
            limits: Look = {
                "xlim": (0, 101) if label.endswith("(%)") else None,
                "ylim": (-0.6, len(arms) - 0.4),
            }
            axes.set(xlabel=label, **limits)
            axes.set_title(task, loc="left")  # beside the legend
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1.06), ncols=len(own))
    return path


def draw_curves(curves: Sequence[Row], path: Path, label: str = "accuracy (%)") -> Path:
    """Plot validation during training, a panel for each task and a line for each run."""
    tasks = list(dict.fromkeys(curve["task"] for curve in curves))
    looks: dict[str, Look] = assign_looks([curve["arm"] for curve in curves], LINE_LOOKS)
    with new_figure(path, 3.6 * len(tasks) + 1.9, max(3.2, 0.2 * len(looks) + 0.6)) as figure:
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            for curve in (curve for curve in curves if curve["task"] == task and curve["points"]):
                axes.plot(*zip(*curve["points"], strict=True), **looks[curve["arm"]], alpha=0.8)
            axes.set(
                xlabel="step",
                ylabel=label,
                title=task,
                ylim=(0, 101) if label.endswith("(%)") else None,
            )
        add_legend(figure, list(looks.items()))
    return path


# Training curves of runs, for `adlm plot`.

FORMATS = (".png", ".svg", ".pdf")
SMOOTHING = 50  # the window of the bold curves is this fraction of a run
PANELS = {
    "lr": "learning rate",
    "anchor_weight": "γ",
    "tokens_per_second": "tokens/s",
    "stall": "stall",
}


@dataclass(frozen=True, eq=False)
class RunCurves:
    """The metrics of a run by name; NaN where a record lacks one."""

    folder: str
    train: dict[str, np.ndarray]  # step, tokens, train/loss, lr, …
    valid: dict[str, np.ndarray]  # step, tokens, val/nll, val/stderr, …

    def summarize(self) -> dict[str, Any]:
        """Return the last and the best validation."""
        summary: dict[str, Any] = {
            "last_step": int(max([*self.train["step"][-1:], *self.valid["step"][-1:]]))
        }
        if np.isfinite(self.valid["val/nll"]).any():
            best = int(np.nanargmin(self.valid["val/nll"]))
            names = ("val/nll", "val/ppl", "val/stderr", "unigram/ppl")
            summary |= {name: float(self.valid[name][-1]) for name in names}
            summary |= {
                "best/ppl": float(self.valid["val/ppl"][best]),
                "best/step": int(self.valid["step"][best]),
            }
        return summary


def read_run(folder: Path) -> RunCurves:
    """Read the curves from RUN/metrics.jsonl."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        problem = "has no metrics.jsonl" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {problem}: give the folder of a run that has logged a step")
    records = [record | record.get("time", {}) for record in read_metrics(path)]
    train, valid = (
        [record for record in records if name in record] for name in ("train/loss", "val/nll")
    )
    if not train and not valid:
        raise ValueError(f"{path} has no step yet: plot it when the run has logged its first loss")

    def read_columns(records: Sequence[dict[str, Any]], names: str) -> dict[str, np.ndarray]:
        return {
            name: np.array([record.get(name) for record in records], dtype=float)
            for name in names.split()
        }

    curves = read_columns(train, "step tokens train/loss lr anchor_weight tokens_per_second stall")
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
        raise ValueError(
            f"{out.name} has no suffix of a plot: give a name that ends in one of {', '.join(FORMATS)}"
        )
    with new_figure(out, 9.0, 5.4) as figure:
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
    """Draw the training loss and the validation nll in nats, with an axis of perplexity and the legend's entries."""
    names = shorten_names([run.folder for run in runs])
    for run, color in zip(runs, COLORS * len(runs)):
        train, valid = run.train, run.valid
        axes.plot(train[x], train["train/loss"], color=color, alpha=0.25, linewidth=0.7)
        axes.plot(
            train[x],
            smooth_curve(train["train/loss"]),
            color=color,
            linewidth=1.6,
            label=names[run.folder],
        )
        error = np.nan_to_num(2 * valid["val/stderr"])
        axes.errorbar(
            valid[x],
            valid["val/nll"],
            error,
            fmt="o",
            color=color,
            markeredgecolor="white",
            zorder=4,
        )
    axes.plot([], [], color=GRAY, marker="o", linestyle="none", label="validation ± 2 s.e.")
    for unigram in sorted(
        {float(ppl) for run in runs for ppl in run.valid["unigram/ppl"][-1:] if ppl > 0}
    ):
        label = f"unigram perplexity {unigram:,.0f}"
        axes.axhline(math.log(unigram), color=GRAY, linestyle="--", linewidth=1.0, label=label)
    axes.set_ylabel("training loss, validation nll (nats per token)")
    perplexities = axes.secondary_yaxis(
        "right", functions=(np.exp, lambda ppl: np.log(np.maximum(ppl, 1e-9)))
    )
    perplexities.set_ylabel("perplexity")
    set_log_scale(perplexities, "y")


def build_runs_table(runs: Sequence[RunCurves]) -> Table:
    """Build a table of the summaries; the error of the perplexity is that of its logarithm, to first order."""
    names, rows = shorten_names([run.folder for run in runs]), []
    for run in runs:
        last = run.summarize()
        ppl = (
            Estimate(last["val/ppl"], last["val/ppl"] * last["val/stderr"])
            if "val/ppl" in last
            else None
        )
        best = [last.get(name) for name in ("best/ppl", "best/step", "unigram/ppl")]
        rows.append([names[run.folder], last["last_step"], ppl, *best])
    numbers = ("last step", "val/ppl", "best/ppl", "best/step", "unigram/ppl")
    return Table(
        [TableColumn("run", is_text=True), *(TableColumn(name, digits=2) for name in numbers)], rows
    )
