"""Every plot of an evaluation, drawn from the plain data in `EvalResult.figures` without a window or global state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adlm.evaluate.anchor_study import ACCURACY, ALL_RATES, HEADS, METRICS, find_guess, find_run, get_metric
from adlm.evaluate.results import EvalResult, shorten_names
from adlm.evaluate.stats import AT_EQUAL_STEPS, find_shared_steps
from adlm.remedies import import_extra
from adlm.view.look import COLORS, GRAY, LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]  # one entry of a result's metrics
Look = dict[str, Any]  # matplotlib's options of a line
MARKERS = "osD^vPX*<>hd"
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
PLOT_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRAY,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT,
    "grid.linewidth": 0.6,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "legend.fontsize": 8,
    "text.parse_math": False,  # a model's name may contain dollar signs
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 5,
    "errorbar.capsize": 2,
    "svg.hashsalt": "adlm",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
LINE_LOOKS: list[Look] = [{"color": color, "linestyle": style} for style in LINES for color in COLORS]
LABELS = {"gen_ppl": "Gen-PPL", "entropy": "entropy (nats)", "nfe": "NFE", "seconds": "seconds per text"}


def draw_figures(result: EvalResult, folder: Path, suffix: str = ".png") -> list[Path]:
    """Draw all figures of a result into a folder, each under its own name."""
    kinds: Any = {"frontier": draw_frontier, "anchors": draw_anchors, "correlation": draw_correlation}
    kinds |= {"arms": draw_arms, "accuracy": draw_accuracy}
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


def set_log_scale(axes: Axes, side: str, base: int = 10) -> None:
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
    is_pareto: Look = {"markeredgecolor": "black", "markeredgewidth": 1.2, "zorder": 5}
    star: Look = {"marker": "*", "color": "black", "markersize": 11, "linestyle": "none"}
    with new_figure(path, 8.6, 3 * size[0] + 0.6) as figure:
        for axes, (x, y) in zip(figure.subplots(*size).flat, panels, strict=True):
            for (model, sampler, *style), line in lines.items():
                (xs, x_errors), (ys, y_errors) = (_split_errors(line, name) for name in (x, y))
                look: Look = {"color": colors[model], "linestyle": styles[tuple(style)], "marker": markers[sampler]}
                axes.errorbar(xs, ys, y_errors, x_errors if x == "entropy" else None, **look)
                for point, across, up in zip(line, xs, ys, strict=True):
                    if point["is_pareto"]:
                        axes.plot([across], [up], **look, **is_pareto)
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
        looks.append(("Pareto-optimal", bare | {"marker": "o", "color": "white", **is_pareto}))
        add_legend(figure, looks if reference is None else [*looks, ("real text", star)])
    return path


# One model's anchors.

SERIES: dict[tuple[str, str, str], Look] = {
    ("anchor", "hidden", "anchors"): {"color": COLORS[0], "marker": "o"},
    ("anchor", "hidden", "others"): {"color": COLORS[0], "marker": "s", "linestyle": "--"},
    ("final", "hidden", "anchors"): {"color": COLORS[1], "marker": "o"},
    ("final", "hidden", "others"): {"color": COLORS[1], "marker": "s", "linestyle": "--"},
    ("anchor", "visible", "every"): {"color": GRAY, "marker": "^"},
}
CHANGE_COLORS = {"none": "black", "noise": COLORS[4], "stale": COLORS[2], "permuted": COLORS[3], "other_row": COLORS[3]}
CHANGE_LABELS = {"none": "unchanged", "other_row": "from another row"}
MIN_BIN_TOKENS = 20  # of a point in the calibration plot


def draw_anchors(study: Row, path: Path) -> Path:
    """Plot one model's anchors: accuracy, likelihood, calibration, costs of changes; with samples two panels more."""
    panels: list[Callable[[Axes, Row], None]] = [partial(_draw_rates, name=name) for name in ("accuracy", "nll")]
    panels += [_draw_calibration, _draw_costs, *([_draw_samples, _draw_reveals] if study["samples"] else [])]
    columns = len(panels) // 2
    with new_figure(path, 3.4 * columns + 0.4, 6.4) as figure:
        for axes, draw in zip(figure.subplots(2, columns).flat, panels, strict=True):
            draw(axes, study)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
        figure.suptitle(f"{study['model']}: the anchor network", fontsize=10)
    return path


def _draw_rates(axes: Axes, study: Row, name: str) -> None:
    for (head, state, kind), look in SERIES.items():
        key = {"head": head, "state": state, "kind": kind}
        guesses = [each for each in study["guesses"] if each | key == each and each["tokens"]]
        guesses = [guess for guess in guesses if guess["mask_rate"] != ALL_RATES]
        middles, label = [sum(guess["mask_rate"]) / 2 for guess in guesses], f"{HEADS[head]}: {state} {kind}"
        axes.errorbar(middles, *_split_errors(guesses, name), label=label, **look)
    axes.set(xlabel="masked share of the row", ylabel=METRICS.get(name, name), title=f"{name} of guesses")


def _draw_calibration(axes: Axes, study: Row) -> None:
    axes.plot([0, 1], [0, 1], color=GRAY, linestyle=":")
    for key, look in SERIES.items():
        guess = find_guess(study, *key)
        bins = [(mean, share) for count, mean, share in guess["reliability"] if count >= MIN_BIN_TOKENS]
        axes.plot(*np.array(bins).reshape(-1, 2).T, label=f"{guess['calibration_error']:.3f}", **look)
    axes.set(xlabel="highest probability", ylabel="accuracy", title="calibration of guesses")
    axes.legend(loc="upper left", title="expected error")


def _draw_costs(axes: Axes, study: Row) -> None:
    unchanged, *changed = study["losses"]
    _draw_changes(axes, changed, "cost")
    axes.axvline(0, color=GRAY, linewidth=0.8)
    title = f"changed anchor features (nll {unchanged['nll']:.3f} unchanged)"
    axes.set(xlabel="more nats per token (± 2 s.e.)", title=title)


def _draw_changes(axes: Axes, rows: Sequence[Row], name: str) -> None:
    for place, row, value, error in zip(range(len(rows))[::-1], rows, *_split_errors(rows, name), strict=True):
        axes.errorbar([value], [place], xerr=[2 * error], color=CHANGE_COLORS[row["kind"]], marker="o")
    _label_rows(axes, [str(CHANGE_LABELS.get(row["kind"], row["perturbation"])) for row in rows])


def _label_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names))[::-1], names)
    axes.set_ylim(-0.6, len(names) - 0.4)


def _draw_samples(axes: Axes, study: Row) -> None:
    """Plot Gen-PPL with entropy in the margin, or entropy only, for every change."""
    samples = study["samples"]
    has_gen_ppl = all(sample["gen_ppl"] is not None for sample in samples)
    _draw_changes(axes, samples, "gen_ppl" if has_gen_ppl else "entropy")
    axes.set(title="texts sampled that way", xlabel="entropy (nats, ± 2 s.e.)")
    if has_gen_ppl:
        margin: Any = {"transform": axes.get_yaxis_transform(), "fontsize": 7, "color": GRAY}
        for place, sample in enumerate(reversed(samples)):
            axes.text(1.0, place, f" {sample['entropy']:.2f}", **margin)
        set_log_scale(axes, "x")
        axes.set_xlabel("Gen-PPL (± 2 s.e.); right margin: entropy")


def _draw_reveals(axes: Axes, study: Row) -> None:
    reveals = study["reveals"]
    axes.axvline(0.5, color=GRAY, linestyle=":")
    for kind, color, shift in (("anchors", COLORS[0], 0.1), ("others", COLORS[1], -0.1)):
        values, errors = _split_errors(reveals, kind)
        places = [place + shift for place in range(len(reveals))[::-1]]
        look: Look = {"color": color, "marker": "o", "linestyle": "none", "label": kind}
        axes.errorbar(values, places, xerr=[2 * error for error in errors], **look)
    _label_rows(axes, [each["sampler"] for each in reveals])
    axes.set(xlabel="mean rank of the reveal: 0 first, 1 last", title="order of reveals")
    axes.legend()


# Several models' anchors.


def draw_correlation(studies: Sequence[Row], correlations: Sequence[Row], path: Path) -> Path:
    """Plot every metric over anchor accuracy; below, runs at equal steps with each step's mean subtracted."""
    names = shorten_names([find_run(study) for study in studies])
    metrics, steps = dict.fromkeys(each["y"] for each in correlations), sorted({study["step"] for study in studies})
    markers = {step: MARKERS[place] if len(steps) <= len(MARKERS) else "o" for place, step in enumerate(steps)}
    runs: dict[str, Look] = _assign(list(names), LINE_LOOKS)
    for run, look in runs.items():  # of one color differ in their line, and in markers that are filled or hollow
        runs[run] = look | {"markerfacecolor": look["color"] if look["linestyle"] == "-" else "white"}
    looks = [runs[find_run(study)] | {"marker": markers[study["step"]]} for study in studies]
    has_equal = any(each["among"] == AT_EQUAL_STEPS for each in correlations)
    with new_figure(path, 3.6 * len(metrics) + 1.9, 7.4 if has_equal else 4.0) as figure:
        for place, name in enumerate(metrics, 1):
            text = "{among}: ρ = {rho:.2f} [{low:.2f}, {high:.2f}], r = {r:.2f} [{r_low:.2f}, {r_high:.2f}]"
            titles = {each["among"]: text.format(**each) for each in correlations if each["y"] == name}
            equal = titles.pop(AT_EQUAL_STEPS, None)
            axes = figure.add_subplot(1 + has_equal, len(metrics), place)
            _draw_runs(axes, studies, name, looks)
            axes.set_title("\n".join(titles.values()), fontsize=7)
            if equal is not None:
                axes = figure.add_subplot(2, len(metrics), len(metrics) + place)
                _draw_equal_steps(axes, studies, name, looks)
                axes.set_title(equal, fontsize=7)
        legend = [(name, runs[run] | {"marker": "o"}) for run, name in names.items()]
        if len(steps) <= len(MARKERS):
            bare = {"color": GRAY, "linestyle": "none"}
            legend += [(f"step {step:,}", bare | {"marker": marker}) for step, marker in markers.items()]
        add_legend(figure, legend)
    return path


def _draw_runs(axes: Axes, studies: Sequence[Row], name: str, looks: Sequence[Look]) -> None:
    """Draw a line through each run's checkpoints, and a marker for each of them."""
    for run in dict.fromkeys(map(find_run, studies)):
        own = [i for i in np.argsort([study["step"] for study in studies]) if find_run(studies[i]) == run]
        across, up = ([get_metric(studies[i], each) for i in own] for each in (ACCURACY, name))
        xs, ys = ([each.value for each in values] for values in (across, up))
        x_errors, y_errors = ([each.stderr or 0.0 for each in values] for values in (across, up))
        axes.errorbar(xs, ys, y_errors, x_errors, **looks[own[0]] | {"marker": ""})
        for i, x, y in zip(own, xs, ys, strict=True):
            axes.plot([x], [y], **looks[i])
    axes.set(xlabel="accuracy on masked anchors", ylabel=METRICS[name])
    if name == "gen_ppl":
        set_log_scale(axes, "y")


def _draw_equal_steps(axes: Axes, studies: Sequence[Row], name: str, looks: Sequence[Look]) -> None:
    """Draw runs at equal steps, each step's mean subtracted from both metrics."""
    for step in find_shared_steps([find_run(study) for study in studies], [study["step"] for study in studies]):
        here = [i for i, study in enumerate(studies) if study["step"] == step]
        x, y = (np.array([get_metric(studies[i], each).value for i in here]) for each in (ACCURACY, name))
        y = np.log(y) if name == "gen_ppl" else y
        for i, across, up in zip(here, x - x.mean(), y - y.mean(), strict=True):
            axes.plot([across], [up], **looks[i])
    label = "log Gen-PPL" if name == "gen_ppl" else METRICS[name]
    axes.set(xlabel="accuracy minus the step's mean", ylabel=f"{label} minus the step's mean")


# Arms of reasoning.


def draw_arms(sets: Sequence[Row], path: Path) -> Path:
    """Plot the accuracy of arms, a panel for each task: means as bars, seeds as dots, a color for each test set."""
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
                axes.plot([], [], color=color, linewidth=5, alpha=0.45, label=each["test"])
            _label_rows(axes, arms)
            axes.set(xlabel="accuracy (%)", title=task, xlim=(0, 101))
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=len(own))
    return path


def draw_accuracy(curves: Sequence[Row], path: Path) -> Path:
    """Plot the accuracy on validation problems during training, a panel for each task and a line for each run."""
    tasks = list(dict.fromkeys(curve["task"] for curve in curves))
    looks: dict[str, Look] = _assign([curve["arm"] for curve in curves], LINE_LOOKS)
    with new_figure(path, 3.6 * len(tasks) + 1.9, max(3.2, 0.2 * len(looks) + 0.6)) as figure:
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            for curve in (curve for curve in curves if curve["task"] == task and curve["points"]):
                steps, values = zip(*curve["points"], strict=True)
                axes.plot(steps, [100 * value for value in values], **looks[curve["arm"]], alpha=0.8)
            axes.set(xlabel="optimizer step", ylabel="accuracy (%)", title=task, ylim=(0, 101))
        add_legend(figure, list(looks.items()))
    return path
