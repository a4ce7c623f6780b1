"""Every plot of an evaluation, drawn from the plain data in `EvalResult.figures` without a window or global state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adlm.evaluate.anchor_study import ACCURACY, METRICS, find_run, get_metric
from adlm.evaluate.results import EvalResult, shorten_names
from adlm.remedies import import_extra
from adlm.view.look import COLORS, GRAY, LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axes._secondary_axes import SecondaryAxis
    from matplotlib.figure import Figure

Row = Mapping[str, Any]  # one entry of a result's metrics
Look = dict[str, Any]  # matplotlib's options of a line
MARKERS = "osD^vPX*<>hd"
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
PLOT_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 5,
    "errorbar.capsize": 2,
    "text.parse_math": False,  # a model's name may contain dollar signs
    "svg.hashsalt": "adlm",
    "svg.fonttype": "none",
}
LINE_LOOKS: list[Look] = [{"color": color, "linestyle": style} for style in LINES for color in COLORS]
LABELS = {"gen_ppl": "Gen-PPL", "entropy": "entropy (nats)", "nfe": "NFE", "seconds": "seconds per text"}


def draw_figures(result: EvalResult, folder: Path, suffix: str = ".png") -> list[Path]:
    """Draw all figures of a result into a folder, each under its own name."""
    kinds: Any = {"frontier": draw_frontier, "correlation": draw_correlation}
    kinds |= {"arms": draw_arms, "curves": draw_curves}
    return [kinds[kind](path=folder / f"{name}{suffix}", **data) for name, (kind, data) in result.figures.items()]


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
        date = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix.lower())  # equal data, equal files
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


def _assign(values: Sequence[Any], looks: Sequence[Any]) -> dict[Any, Any]:
    """One look for every different value, in their order."""
    return {value: looks[place % len(looks)] for place, value in enumerate(dict.fromkeys(values))}


def _split_errors(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """A metric of every row, and its standard errors (of seconds the standard deviation)."""
    error = {"nfe": "", "seconds": "seconds_sd"}.get(name, f"{name}_se")
    return [float(row[name]) for row in rows], [float(row[error]) if error else 0.0 for row in rows]


# The frontier.


def draw_frontier(points: Sequence[Row], path: Path, reference: Row | None = None) -> Path:
    """Plot Gen-PPL (or entropy, where there is none) over NFE, entropy and time, and time over NFE.

    Color is the model, marker the sampler, line style temperature and nucleus; points of a line differ in their steps.
    """
    panels = [("nfe", "gen_ppl"), ("entropy", "gen_ppl"), ("seconds", "gen_ppl"), ("nfe", "seconds")]
    if any(point["gen_ppl"] is None for point in points):
        panels = [("nfe", "entropy"), ("seconds", "entropy"), ("nfe", "seconds")]
    size = (2, 2) if len(panels) == 4 else (1, 3)
    colors = _assign([point["model"] for point in points], COLORS)
    markers = _assign([point["sampler"] for point in points], MARKERS)
    styles = _assign([(point["temperature"], point["top_p"]) for point in points], LINES)
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for point in sorted(points, key=lambda point: point["nfe"]):
        lines.setdefault((point["model"], point["sampler"], point["temperature"], point["top_p"]), []).append(point)
    star: Look = {"marker": "*", "color": "black", "markersize": 11, "linestyle": "none"}
    with new_figure(path, 8.6, 3 * size[0] + 0.6) as figure:
        for axes, (x, y) in zip(figure.subplots(*size).flat, panels, strict=True):
            for (model, sampler, *style), line in lines.items():
                (xs, x_errors), (ys, y_errors) = (_split_errors(line, name) for name in (x, y))
                look: Look = {"color": colors[model], "linestyle": styles[tuple(style)], "marker": markers[sampler]}
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
        looks: list[tuple[str, Look]] = [(names[model], {"color": colors[model], "linewidth": 3}) for model in names]
        looks += [(sampler, bare | {"marker": marker}) for sampler, marker in markers.items()]
        for (temperature, top_p), style in styles.items() if len(styles) > 1 else ():
            looks.append((f"T {temperature:g}, p {top_p:g}", {"color": GRAY, "linestyle": style}))
        add_legend(figure, looks if reference is None else [*looks, ("real text", star)])
    return path


# Anchors of several models.


def draw_correlation(models: Sequence[Row], correlations: Sequence[Row], path: Path) -> Path:
    """Plot every metric over anchor accuracy, with a line through the checkpoints of each run."""
    names = shorten_names([find_run(study) for study in models])
    looks: dict[str, Look] = {run: look | {"marker": "o"} for run, look in _assign(list(names), LINE_LOOKS).items()}
    metrics = list(dict.fromkeys(each["y"] for each in correlations))
    with new_figure(path, 3.6 * len(metrics) + 1.9, 4.0) as figure:
        for axes, name in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
            for run, look in looks.items():
                own = sorted((study for study in models if find_run(study) == run), key=lambda study: study["step"])
                across, up = ([get_metric(study, each) for study in own] for each in (ACCURACY, name))
                errors = ([each.stderr or 0.0 for each in values] for values in (up, across))
                axes.errorbar([each.value for each in across], [each.value for each in up], *errors, **look)
            text = "{among}: ρ = {rho:.2f} [{low:.2f}, {high:.2f}]"
            axes.set_title("\n".join(text.format(**each) for each in correlations if each["y"] == name), fontsize=7)
            axes.set(xlabel="accuracy on masked anchors", ylabel=METRICS[name])
            if name == "gen_ppl":
                set_log_scale(axes, "y")
        add_legend(figure, [(name, looks[run]) for run, name in names.items()])
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
            limits: Look = {"xlim": (0, 101) if label.endswith("(%)") else None, "ylim": (-0.6, len(arms) - 0.4)}
            axes.set(xlabel=label, title=task, **limits)
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=len(own))
    return path


def draw_curves(curves: Sequence[Row], path: Path, label: str = "accuracy (%)") -> Path:
    """Plot validation during training, a panel for each task and a line for each run."""
    tasks = list(dict.fromkeys(curve["task"] for curve in curves))
    looks: dict[str, Look] = _assign([curve["arm"] for curve in curves], LINE_LOOKS)
    with new_figure(path, 3.6 * len(tasks) + 1.9, max(3.2, 0.2 * len(looks) + 0.6)) as figure:
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            for curve in (curve for curve in curves if curve["task"] == task and curve["points"]):
                axes.plot(*zip(*curve["points"], strict=True), **looks[curve["arm"]], alpha=0.8)
            axes.set(
                xlabel="optimizer step", ylabel=label, title=task, ylim=(0, 101) if label.endswith("(%)") else None
            )
        add_legend(figure, list(looks.items()))
    return path
