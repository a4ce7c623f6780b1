"""Figures of the studies: how they look, and the frontier. Drawn without a window and without global state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adlm.studies.frontier import Point
from adlm.studies.writing import TextFigures
from adlm.view.look import COLORS, GREY, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX*<>hd"
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2, 1, 2, 1, 2)))
# A name with dollars is a name.
OWN_STYLE: Any = STYLE | {"axes.spines.right": False, "text.parse_math": False}
NAMES = {"gen_ppl": "Gen-PPL", "entropy": "entropy (nats)", "nfe": "NFE", "seconds": "seconds per text"}


@contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Figure]:
    """An empty figure; it is written when the block ends."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib ({error}): pip install 'adlm[eval]'") from error
    with mpl.rc_context(OWN_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        dated = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix.lower())
        figure.savefig(path, dpi=200, metadata={dated: None} if dated else None)


def draw_frontier(points: Sequence[Point], path: Path, reference: TextFigures | None = None) -> Path:
    """Gen-PPL over NFE, entropy and time, and time over NFE; without a judge, entropy in Gen-PPL's place."""
    if not points:
        raise ValueError("there are no points to draw")
    is_judged = all(point.quality.gen_ppl is not None for point in points)
    panels = [("nfe", "gen_ppl"), ("entropy", "gen_ppl"), ("seconds", "gen_ppl"), ("nfe", "seconds")]
    if not is_judged:
        panels = [("nfe", "entropy"), ("seconds", "entropy"), ("nfe", "seconds")]
    columns = 2 if is_judged else 3
    with drawing(path, 8.6, 6.6 if is_judged else 3.6) as figure:
        grid = figure.add_gridspec(-(-len(panels) // columns), columns)
        for place, (x, y) in enumerate(panels):
            axes = figure.add_subplot(grid[divmod(place, columns)])
            for line in lines_of(points):
                _line(axes, line, points, x, y)
            if reference is not None:
                _held_out(axes, reference, x, y)
            _scales(axes, x, y)
        handles = _legend(points, reference)
        figure.legend(handles=handles, frameon=False, loc="outside right upper", handlelength=2.6, labelspacing=0.55)
    return path


def lines_of(points: Sequence[Point]) -> list[list[Point]]:
    """Points that differ in their steps alone, in the order of these."""
    found: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        found.setdefault((point.model, point.sampler, point.temperature, point.top_p), []).append(point)
    return [sorted(line, key=lambda point: point.nfe) for line in found.values()]


def figure_of(point: Point | TextFigures, name: str) -> tuple[float, float]:
    """A figure of a point and its error."""
    owner = point if isinstance(point, TextFigures) or hasattr(point, name) else point.quality
    error = {"nfe": None, "seconds": "seconds_sd"}.get(name, f"{name}_se")
    return float(getattr(owner, name)), float(getattr(owner, error) if error else 0.0)


def _looks(points: Sequence[Point]) -> tuple[dict[str, str], dict[str, str], dict[tuple[float, float], Any]]:
    """Color by model, marker by sampler, line by temperature and nucleus."""
    models, samplers = dict.fromkeys(p.model for p in points), dict.fromkeys(p.sampler for p in points)
    draws = dict.fromkeys((p.temperature, p.top_p) for p in points)
    return (
        {model: COLORS[i % len(COLORS)] for i, model in enumerate(models)},
        {sampler: MARKERS[i % len(MARKERS)] for i, sampler in enumerate(samplers)},
        {draw: LINES[i % len(LINES)] for i, draw in enumerate(draws)},
    )


def _line(axes: Axes, line: Sequence[Point], points: Sequence[Point], x: str, y: str) -> None:
    colors, markers, draws = _looks(points)
    first = line[0]
    color, marker = colors[first.model], markers[first.sampler]
    style = draws[first.temperature, first.top_p]
    across, up = ([figure_of(point, name) for point in line] for name in (x, y))
    axes.errorbar(
        [value for value, _ in across],
        [value for value, _ in up],
        [error for _, error in up],
        [error for _, error in across] if x == "entropy" else None,
        color=color,
        linestyle=style,
        linewidth=1.2,
        elinewidth=0.8,
        alpha=0.9,
    )
    for point, (value, _), (height, _) in zip(line, across, up, strict=True):
        edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 4}
        if point.is_pareto:
            edge = {"markeredgecolor": "black", "markeredgewidth": 1.2, "zorder": 5}
        axes.plot([value], [height], marker=marker, color=color, markersize=5.5, **edge)


def _held_out(axes: Axes, reference: TextFigures, x: str, y: str) -> None:
    """The held-out text: a star where both figures are its own, a level where one is."""
    own = ("gen_ppl", "entropy")
    if y not in own or getattr(reference, y) is None:
        return
    value, error = figure_of(reference, y)
    if x not in own:
        axes.axhline(value, color=GREY, linestyle=(0, (2, 2)), linewidth=1.1, zorder=1)
        return
    across, width = figure_of(reference, x)
    axes.errorbar([across], [value], [error], [width], color=GREY, elinewidth=0.8, zorder=3)
    axes.plot([across], [value], marker="*", color="black", markersize=12, markeredgecolor="white", zorder=6)


def _scales(axes: Axes, x: str, y: str) -> None:
    for name, axis, scale in ((x, axes.xaxis, axes.set_xscale), (y, axes.yaxis, axes.set_yscale)):
        if name != "entropy":
            scale("log", base=2 if name == "nfe" else 10)
            axis.set_major_formatter(plain_number)
            if name != "nfe":
                few_ticks(axis)
    axes.set_xlabel(NAMES[x])
    axes.set_ylabel(NAMES[y])


def few_ticks(axis: Any) -> None:
    """Ticks of a logarithmic axis that are read even where it spans less than a power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if low > 0 else 1.0
    subs = (1.0,) if decades > 3 else (1.0, 2.0, 5.0) if decades > 0.7 else (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axis.set_major_locator(LogLocator(10, subs=subs))
    axis.set_minor_formatter(NullFormatter())


def plain_number(value: float, place: object = None) -> str:
    """What fits beside a tick."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _legend(points: Sequence[Point], reference: TextFigures | None) -> list[Any]:
    from matplotlib.lines import Line2D

    colors, markers, draws = _looks(points)
    found = [Line2D([], [], color=color, linewidth=3, label=short(model)) for model, color in colors.items()]
    look: dict[str, Any] = {"color": GREY, "linestyle": "none", "markersize": 5.5}
    found += [Line2D([], [], marker=marker, label=sampler, **look) for sampler, marker in markers.items()]
    if len(draws) > 1:
        found += [
            Line2D([], [], color=GREY, linestyle=style, linewidth=1.2, label=f"T {heat:g}, p {top_p:g}")
            for (heat, top_p), style in draws.items()
        ]
    ring = {"markeredgecolor": "black", "markeredgewidth": 1.2}
    found.append(Line2D([], [], marker="o", label="not beaten", **(look | ring | {"color": "white"})))
    if reference is not None:
        found.append(Line2D([], [], marker="*", label="held-out text", **(look | {"color": "black", "markersize": 11})))
    return found


def short(name: str) -> str:
    """A model in a legend: the end of its path."""
    parts = [part for part in name.split("/") if part]
    return "/".join(parts[-3::2]) if "checkpoints" in parts else parts[-1] if parts else name
