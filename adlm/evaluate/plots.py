"""Every plot of an evaluation: the frontier, one model's anchors, anchor accuracy against other metrics.

A plot is drawn from the plain data in `EvalResult.figures`, without a window and without global state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adlm.evaluate.anchors import ACCURACY, HEADS, METRICS, find_guess, find_run, get_metric, name_runs
from adlm.evaluate.results import EvalResult
from adlm.evaluate.stats import AT_EQUAL_STEPS, find_shared_steps
from adlm.view.look import COLORS, GREY, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]  # one entry of a result's metrics
MARKERS = "osD^vPX*<>hd"
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
DOTTED: Any = (0, (2, 2))
# A model's name may contain dollar signs.
PLOT_STYLE: Any = STYLE | {"axes.spines.right": False, "text.parse_math": False}
LABELS = {"gen_ppl": "Gen-PPL", "entropy": "entropy (nats)", "nfe": "NFE", "seconds": "seconds per text"}


def draw_figures(result: EvalResult, folder: Path, suffix: str = ".png") -> list[Path]:
    """Draw all figures of a result into a folder, each under its own name."""
    kinds: Any = {"frontier": draw_frontier, "anchors": draw_anchors, "correlation": draw_correlation}
    paths = []
    for name, figure in result.figures.items():
        arguments = {key: value for key, value in figure.items() if key != "kind"}
        paths.append(kinds[figure["kind"]](path=folder / f"{name}{suffix}", **arguments))
    return paths


@contextmanager
def new_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A context manager that yields an empty figure and saves it at the end of the block."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}): pip install 'adlm[eval]'") from error
    with mpl.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        date = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix.lower())  # equal data, equal files
        figure.savefig(path, dpi=200, metadata={date: None} if date else None)


def set_log_scale(axes: Axes, side: str, base: int = 10) -> None:
    """Make the axis `x` or `y` logarithmic, with plain numbers that are dense enough for less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axes, f"set_{side}scale")("log", base=base)
    axis = getattr(axes, f"{side}axis")
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}")
    if base == 10:
        low, high = axis.get_view_interval()
        decades = math.log10(high / low) if low > 0 else 1.0
        subs = (1.0,) if decades > 3 else (1.0, 2.0, 5.0) if decades > 0.7 else (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
        axis.set_major_locator(LogLocator(10, subs=subs))
        axis.set_minor_formatter(NullFormatter())


def shorten_name(name: str) -> str:
    """A model's name in a legend: the end of its path."""
    parts = [part for part in name.split("/") if part]
    return "/".join(parts[-3::2]) if "checkpoints" in parts else parts[-1] if parts else name


# The frontier.


def draw_frontier(points: Sequence[Row], path: Path, reference: Row | None = None) -> Path:
    """Plot Gen-PPL over NFE, entropy and time, and time over NFE; without Gen-PPL, entropy takes its place.

    Color is the model, marker the sampler, line style the temperature and nucleus. Points of one line differ in their
    steps only.
    """
    if not points:
        raise ValueError("there are no points to draw: give at least one")
    has_gen_ppl = all(point["gen_ppl"] is not None for point in points)
    panels = [("nfe", "gen_ppl"), ("entropy", "gen_ppl"), ("seconds", "gen_ppl"), ("nfe", "seconds")]
    if not has_gen_ppl:
        panels = [("nfe", "entropy"), ("seconds", "entropy"), ("nfe", "seconds")]
    columns = 2 if has_gen_ppl else 3
    colors = _assign([point["model"] for point in points], COLORS)
    markers = _assign([point["sampler"] for point in points], MARKERS)
    styles = _assign([(point["temperature"], point["top_p"]) for point in points], LINES)
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for point in sorted(points, key=lambda point: point["nfe"]):
        lines.setdefault((point["model"], point["sampler"], point["temperature"], point["top_p"]), []).append(point)
    with new_figure(path, 8.6, 6.6 if has_gen_ppl else 3.6) as figure:
        for place, (x, y) in enumerate(panels, 1):
            axes = figure.add_subplot(-(-len(panels) // columns), columns, place)
            for (model, sampler, *style), line in lines.items():
                _draw_line(axes, line, x, y, colors[model], markers[sampler], styles[tuple(style)])
            if reference is not None:
                _draw_reference(axes, reference, x, y)
            for name, side in ((x, "x"), (y, "y")):
                if name != "entropy":
                    set_log_scale(axes, side, base=2 if name == "nfe" else 10)
            axes.set(xlabel=LABELS[x], ylabel=LABELS[y])
        handles = _build_frontier_legend(colors, markers, styles, reference is not None)
        figure.legend(handles=handles, frameon=False, loc="outside right upper", handlelength=2.6, labelspacing=0.55)
    return path


def _assign(values: Sequence[Any], looks: Sequence[Any]) -> dict[Any, Any]:
    """One look for every different value, in their order."""
    return {value: looks[place % len(looks)] for place, value in enumerate(dict.fromkeys(values))}


def _split_errors(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """A metric of every row, and its standard errors (of seconds the standard deviation)."""
    error = {"nfe": "", "seconds": "seconds_sd"}.get(name, f"{name}_se")
    return [float(row[name]) for row in rows], [float(row[error]) if error else 0.0 for row in rows]


def _draw_line(axes: Axes, line: Sequence[Row], x: str, y: str, color: str, marker: str, style: Any) -> None:
    (xs, x_errors), (ys, y_errors) = (_split_errors(line, name) for name in (x, y))
    look: Any = {"color": color, "linestyle": style, "linewidth": 1.2, "elinewidth": 0.8, "alpha": 0.9}
    axes.errorbar(xs, ys, y_errors, x_errors if x == "entropy" else None, **look)
    for point, across, up in zip(line, xs, ys, strict=True):
        edge: Any = {"markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 4}
        if point["is_pareto"]:
            edge = {"markeredgecolor": "black", "markeredgewidth": 1.2, "zorder": 5}
        axes.plot([across], [up], marker=marker, color=color, markersize=5.5, **edge)


def _draw_reference(axes: Axes, reference: Row, x: str, y: str) -> None:
    """Draw the real text: a star where both axes are metrics of text, a level where only y is."""
    of_text = ("gen_ppl", "entropy")
    if y not in of_text or reference[y] is None:
        return
    ys, y_errors = _split_errors([reference], y)
    if x not in of_text:
        axes.axhline(ys[0], color=GREY, linestyle=DOTTED, linewidth=1.1, zorder=1)
        return
    xs, x_errors = _split_errors([reference], x)
    axes.errorbar(xs, ys, y_errors, x_errors, color=GREY, elinewidth=0.8, zorder=3)
    axes.plot(xs, ys, marker="*", color="black", markersize=12, markeredgecolor="white", zorder=6)


def _build_frontier_legend(
    colors: dict[str, Any], markers: dict[str, Any], styles: dict[tuple[float, float], Any], has_reference: bool
) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, linewidth=3, label=shorten_name(model)) for model, color in colors.items()]
    look: Any = {"color": GREY, "linestyle": "none", "markersize": 5.5}
    handles += [Line2D([], [], marker=marker, label=sampler, **look) for sampler, marker in markers.items()]
    if len(styles) > 1:
        handles += [
            Line2D([], [], color=GREY, linestyle=style, linewidth=1.2, label=f"T {temperature:g}, p {top_p:g}")
            for (temperature, top_p), style in styles.items()
        ]
    ring = look | {"markeredgecolor": "black", "markeredgewidth": 1.2, "color": "white"}
    handles.append(Line2D([], [], marker="o", label="Pareto-optimal", **ring))
    if has_reference:
        handles.append(Line2D([], [], marker="*", label="real text", **(look | {"color": "black", "markersize": 11})))
    return handles


# One model's anchors.

SERIES = (
    ("anchor", "anchors", COLORS[0], "-", "o"),
    ("anchor", "others", COLORS[0], (0, (3, 2)), "s"),
    ("final", "anchors", COLORS[1], "-", "o"),
    ("final", "others", COLORS[1], (0, (3, 2)), "s"),
)
CHANGE_COLORS = {"none": "black", "noise": COLORS[4], "stale": COLORS[2], "permuted": COLORS[3], "other_row": COLORS[3]}
CHANGE_LABELS = {"none": "unchanged", "other_row": "from another row"}
MIN_BIN_TOKENS = 20  # of a point in the calibration plot


def draw_anchors(study: Row, path: Path) -> Path:
    """Plot one model's anchors: accuracy, likelihood, calibration, costs of changes; with samples two panels more."""
    panels: list[Callable[[Axes, Row], None]] = [_draw_accuracy, _draw_nll, _draw_calibration, _draw_costs]
    panels += [_draw_samples, _draw_reveals] if study["samples"] else []
    columns = len(panels) // 2
    with new_figure(path, 3.4 * columns + 0.4, 6.4) as figure:
        for place, draw in enumerate(panels, 1):
            draw(figure.add_subplot(2, columns, place), study)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=columns)
        figure.suptitle(f"{shorten_name(study['model'])}: the anchor network", fontsize=10)
    return path


def _select_rates(study: Row, head: str, state: str, kind: str) -> tuple[list[Row], list[float]]:
    """The guesses by mask rate, and the middle of each range."""
    selected = [
        guess
        for guess in study["guesses"]
        if (guess["head"], guess["state"], guess["kind"]) == (head, state, kind)
        and guess["tokens"]
        and tuple(guess["mask_rate"]) != (0.0, 1.0)
    ]
    return selected, [sum(guess["mask_rate"]) / 2 for guess in selected]


def _draw_rates(axes: Axes, study: Row, name: str) -> None:
    for head, kind, color, style, marker in SERIES:
        guesses, middles = _select_rates(study, head, "hidden", kind)
        values, errors = _split_errors(guesses, name)
        look: Any = {"color": color, "linestyle": style, "marker": marker, "markersize": 4, "linewidth": 1.3}
        axes.errorbar(middles, values, errors, elinewidth=0.8, label=f"{HEADS[head]}, {kind}", **look)
    axes.set_xlabel("masked share of the row")
    axes.set_xlim(0, 1)


def _draw_accuracy(axes: Axes, study: Row) -> None:
    _draw_rates(axes, study, "accuracy")
    visible, middles = _select_rates(study, "anchor", "visible", "every")
    look: Any = {"color": GREY, "marker": "^", "markersize": 4, "linewidth": 1.0}
    axes.plot(middles, [guess["accuracy"] for guess in visible], label="anchor network, visible tokens", **look)
    axes.set_ylabel("accuracy")
    axes.set_ylim(bottom=0)
    axes.set_title("accuracy on masked tokens")


def _draw_nll(axes: Axes, study: Row) -> None:
    _draw_rates(axes, study, "nll")
    axes.set(ylabel="nll (nats per token)", title="likelihood of masked tokens")


def _draw_calibration(axes: Axes, study: Row) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=DOTTED, linewidth=1.0)
    for head, kind, color, style, marker in SERIES:
        guess = find_guess(study, head, "hidden", kind)
        bins = [(mean, share) for count, mean, share in guess["reliability"] if count >= MIN_BIN_TOKENS]
        look: Any = {"color": color, "linestyle": style, "marker": marker, "markersize": 4, "linewidth": 1.3}
        label = f"{guess['calibration_error']:.3f}"
        axes.plot([mean for mean, _ in bins], [share for _, share in bins], label=label, **look)
    axes.set(xlabel="highest probability", ylabel="accuracy")
    axes.set(xlim=(0, 1), ylim=(0, 1), title="calibration on masked tokens")
    axes.legend(frameon=False, loc="upper left", title="expected error", title_fontsize=8, alignment="left")


def _draw_costs(axes: Axes, study: Row) -> None:
    changed = study["losses"][1:]
    axes.barh(
        range(len(changed))[::-1],
        [loss["cost"] for loss in changed],
        xerr=[2 * loss["cost_se"] for loss in changed],
        color=[CHANGE_COLORS[loss["kind"]] for loss in changed],
        error_kw={"elinewidth": 0.9, "capsize": 2},
        height=0.65,
    )
    axes.axvline(0, color=GREY, linewidth=0.8)
    _label_rows(axes, changed, "change")
    axes.grid(False, axis="y")
    axes.set(
        xlabel="more nats per token (± 2 s.e.)",
        title=f"changed anchor features (nll {study['losses'][0]['nll']:.3f} unchanged)",
    )


def _label_rows(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """Name the rows of a horizontal plot from top to bottom."""
    axes.set_yticks(range(len(rows))[::-1], [str(CHANGE_LABELS.get(row[name], row[name])) for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)


def _draw_samples(axes: Axes, study: Row) -> None:
    """Plot Gen-PPL with entropy in the margin, or entropy only, for every change."""
    samples = study["samples"]
    name = "gen_ppl" if all(sample["gen_ppl"] is not None for sample in samples) else "entropy"
    places, (values, errors) = range(len(samples))[::-1], _split_errors(samples, name)
    for place, sample, value, error in zip(places, samples, values, errors, strict=True):
        look: Any = {"color": CHANGE_COLORS[sample["kind"]], "marker": "o", "markersize": 5, "elinewidth": 0.9}
        axes.errorbar([value], [place], xerr=[2 * error], capsize=2, **look)
        if name == "gen_ppl":
            text = f" {sample['entropy']:.2f}"
            axes.annotate(text, (1.0, place), xycoords=("axes fraction", "data"), va="center", fontsize=7, color=GREY)
    _label_rows(axes, samples, "change")
    axes.set(title="texts sampled that way", xlabel="entropy (nats, ± 2 s.e.)")
    if name == "gen_ppl":
        set_log_scale(axes, "x")
        axes.set_xlabel("Gen-PPL (± 2 s.e.); right margin: entropy")


def _draw_reveals(axes: Axes, study: Row) -> None:
    reveals = study["reveals"]
    axes.axvline(0.5, color=GREY, linestyle=DOTTED, linewidth=1.0)
    for kind, color, shift in (("anchors", COLORS[0], 0.1), ("others", COLORS[1], -0.1)):
        values, errors = _split_errors(reveals, kind)
        places = [place + shift for place in range(len(reveals))[::-1]]
        look: Any = {"color": color, "marker": "o", "linestyle": "none", "markersize": 5, "capsize": 2}
        axes.errorbar(values, places, xerr=[2 * error for error in errors], label=kind, **look)
    _label_rows(axes, reveals, "sampler")
    axes.set(xlabel="mean rank of the reveal: 0 first, 1 last", title="order of reveals")
    axes.legend(frameon=False)


# Several models' anchors.


def draw_correlation(studies: Sequence[Row], correlations: Sequence[Row], path: Path) -> Path:
    """Plot every metric over anchor accuracy: a point per model, a line per run, a marker per step.

    A second line of panels shows runs at equal steps, with each step's mean subtracted.
    """
    names, metrics = name_runs(studies), list(dict.fromkeys(each["y"] for each in correlations))
    steps = sorted({study["step"] for study in studies})
    markers = {step: MARKERS[place] if len(steps) <= len(MARKERS) else "o" for place, step in enumerate(steps)}
    looks = {
        run: {"color": COLORS[place % len(COLORS)], "linestyle": LINES[place // len(COLORS) % len(LINES)]}
        for place, run in enumerate(names)
    }
    has_equal = any(each["among"] == AT_EQUAL_STEPS for each in correlations)
    with new_figure(path, 3.6 * len(metrics) + 1.9, 7.4 if has_equal else 4.0) as figure:
        for place, name in enumerate(metrics, 1):
            titles = {each["among"]: _describe(each) for each in correlations if each["y"] == name}
            equal = titles.pop(AT_EQUAL_STEPS, None)
            axes = figure.add_subplot(1 + has_equal, len(metrics), place)
            for run, look in looks.items():
                _draw_run(axes, [study for study in studies if find_run(study) == run], name, look, markers)
            axes.set(xlabel="accuracy on masked anchors", ylabel=METRICS[name])
            axes.set_title("\n".join(titles.values()), fontsize=7)
            axes.margins(0.1)
            if name == "gen_ppl":
                set_log_scale(axes, "y")
            if equal is not None:
                below = figure.add_subplot(2, len(metrics), len(metrics) + place)
                _draw_equal_steps(below, studies, name, looks, markers)
                below.set_title(equal, fontsize=7)
        handles = _build_run_legend(names, looks, markers)
        figure.legend(handles=handles, frameon=False, loc="outside right upper", labelspacing=0.55)
    return path


def _describe(each: Row) -> str:
    rho = f"ρ = {each['rho']:.2f} [{each['low']:.2f}, {each['high']:.2f}]"
    return f"{each['among']}: {rho}, r = {each['r']:.2f} [{each['r_low']:.2f}, {each['r_high']:.2f}]"


def _draw_run(axes: Axes, studies: Sequence[Row], name: str, look: dict[str, Any], markers: dict[int, str]) -> None:
    """Draw a run's checkpoints in their order."""
    studies = sorted(studies, key=lambda study: study["step"])
    across, up = ([get_metric(study, each) for study in studies] for each in (ACCURACY, name))
    xs, ys = ([each.value for each in values] for values in (across, up))
    y_errors, x_errors = ([each.stderr or 0.0 for each in values] for values in (up, across))
    axes.errorbar(xs, ys, y_errors, x_errors, linewidth=1.2, elinewidth=0.6, alpha=0.8, **look)
    for study, x, y in zip(studies, xs, ys, strict=True):
        axes.plot([x], [y], marker=markers[study["step"]], **_marker_look(look))


def _marker_look(look: dict[str, Any]) -> dict[str, Any]:
    """A run's marker: filled, or hollow where another run has the same color."""
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.6, "markersize": 6, "zorder": 4, "color": look["color"]}
    is_first = look["linestyle"] == LINES[0]
    return edge if is_first else edge | {"markerfacecolor": "white", "markeredgecolor": look["color"]}


def _draw_equal_steps(
    axes: Axes, studies: Sequence[Row], name: str, looks: dict[str, dict[str, Any]], markers: dict[int, str]
) -> None:
    """Draw runs at equal steps, each step's mean subtracted from both metrics."""
    for step in find_shared_steps([find_run(study) for study in studies], [study["step"] for study in studies]):
        here = [study for study in studies if study["step"] == step]
        x, y = (np.array([get_metric(study, each).value for study in here]) for each in (ACCURACY, name))
        y = np.log(y) if name == "gen_ppl" else y
        for study, across, up in zip(here, x - x.mean(), y - y.mean(), strict=True):
            axes.plot([across], [up], marker=markers[step], **_marker_look(looks[find_run(study)]))
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set(
        xlabel="accuracy minus the step's mean",
        ylabel=f"{'log Gen-PPL' if name == 'gen_ppl' else METRICS[name]} minus the step's mean",
    )
    axes.margins(0.1)


def _build_run_legend(names: dict[str, str], looks: dict[str, dict[str, Any]], markers: dict[int, str]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linewidth=2, label=name, marker="o", **(_marker_look(looks[run]) | looks[run]))
        for run, name in names.items()
    ]
    if len(markers) > len(MARKERS):  # all steps have one marker
        return handles
    look: Any = {"color": GREY, "linestyle": "none", "markersize": 6}
    return handles + [Line2D([], [], marker=marker, label=f"step {step:,}", **look) for step, marker in markers.items()]
