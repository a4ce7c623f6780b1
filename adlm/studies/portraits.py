"""Figures of a model's anchors, and of several models' side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adlm.studies.anchors import Study
from adlm.studies.comparison import ACCURACY, FIGURES, figure, run_names
from adlm.studies.correlation import EQUAL, Correlation, shared_steps
from adlm.studies.guesses import Guess
from adlm.studies.pictures import LINES, MARKERS, drawing, few_ticks, figure_of, plain_number, short
from adlm.view.look import COLORS, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_anchors(study: Study, path: Path) -> Path:
    """One model's anchors: guesses, calibration, what changes cost; with samples their quality and order too."""
    panels: list[Callable[[Axes, Study], None]] = [_accuracy, _nll, _reliability, _costs]
    if study.samples:
        panels = [_accuracy, _nll, _reliability, _costs, _samples, _reveals]
    columns = 3 if study.samples else 2
    with drawing(path, 3.4 * columns + 0.4, 6.4) as figure:
        grid = figure.add_gridspec(2, columns)
        places = [figure.add_subplot(grid[divmod(place, columns)]) for place in range(len(panels))]
        for axes, draw in zip(places, panels, strict=True):
            draw(axes, study)
        handles, labels = places[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=columns)
        figure.suptitle(f"{short(study.model)}: the anchor network", fontsize=10)
    return path


SERIES = (
    ("anchor", "anchors", COLORS[0], "-", "o"),
    ("anchor", "others", COLORS[0], (0, (3, 2)), "s"),
    ("final", "anchors", COLORS[1], "-", "o"),
    ("final", "others", COLORS[1], (0, (3, 2)), "s"),
)
EDGE: Any = {"markeredgecolor": "white", "markeredgewidth": 0.6, "markersize": 6, "zorder": 4}
HEADS = {"anchor": "anchor network", "final": "denoiser"}


def _by_rate(study: Study, head: str, state: str, kind: str) -> list[Guess]:
    chosen = [g for g in study.guesses if (g.head, g.state, g.kind) == (head, state, kind) and g.tokens]
    return [guess for guess in chosen if tuple(guess.mask_rate) != (0.0, 1.0)]


def _rates(axes: Axes, study: Study, name: str) -> None:
    for head, kind, color, style, marker in SERIES:
        found = _by_rate(study, head, "hidden", kind)
        middle = [sum(guess.mask_rate) / 2 for guess in found]
        values, errors = ([getattr(guess, each) for guess in found] for each in (name, f"{name}_se"))
        look: dict[str, Any] = {
            "color": color,
            "linestyle": style,
            "marker": marker,
            "markersize": 4,
            "linewidth": 1.3,
        }
        axes.errorbar(middle, values, errors, elinewidth=0.8, label=f"{HEADS[head]}, {kind}", **look)
    axes.set_xlabel("share of the row that is hidden")
    axes.set_xlim(0, 1)


def _accuracy(axes: Axes, study: Study) -> None:
    _rates(axes, study, "accuracy")
    seen = _by_rate(study, "anchor", "visible", "every")
    middle = [sum(guess.mask_rate) / 2 for guess in seen]
    look: dict[str, Any] = {"color": GREY, "marker": "^", "markersize": 4, "linewidth": 1.0}
    axes.plot(middle, [guess.accuracy for guess in seen], label="anchor network, visible tokens", **look)
    axes.set_ylabel("accuracy")
    axes.set_ylim(bottom=0)
    axes.set_title("guesses of hidden tokens")


def _nll(axes: Axes, study: Study) -> None:
    _rates(axes, study, "nll")
    axes.set_ylabel("nll (nats per token)")
    axes.set_title("likelihood of hidden tokens")


def _reliability(axes: Axes, study: Study) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=(0, (2, 2)), linewidth=1.0)
    for head, kind, color, style, marker in SERIES:
        guess = study.guess(head, "hidden", kind)
        known = [(mean, share) for count, mean, share in guess.reliability if count >= 20]
        look: dict[str, Any] = {
            "color": color,
            "linestyle": style,
            "marker": marker,
            "markersize": 4,
            "linewidth": 1.3,
        }
        label = f"{guess.calibration_error:.3f}"
        axes.plot([mean for mean, _ in known], [share for _, share in known], label=label, **look)
    axes.set_xlabel("probability of the likeliest token")
    axes.set_ylabel("how often it is right")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_title("calibration of hidden tokens")
    axes.legend(frameon=False, loc="upper left", title="expected error", title_fontsize=8, alignment="left")


def _words(change: str) -> str:
    return {"other_row": "of another row", "none": "as it is"}.get(change, change)


def _costs(axes: Axes, study: Study) -> None:
    changed = study.losses[1:]
    place = list(range(len(changed)))[::-1]
    colors = {"noise": COLORS[4], "stale": COLORS[2], "permuted": COLORS[3], "other_row": COLORS[3]}
    axes.barh(
        place,
        [loss.cost for loss in changed],
        xerr=[2 * loss.cost_se for loss in changed],
        color=[colors[loss.kind] for loss in changed],
        error_kw={"elinewidth": 0.9, "capsize": 2},
        height=0.65,
    )
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(place, [_words(loss.change) for loss in changed])
    axes.grid(False, axis="y")
    axes.set_xlabel("more nats per token (± 2 s.e.)")
    axes.set_title(f"anchor features changed (nll {study.losses[0].nll:.3f} as it is)")


def _samples(axes: Axes, study: Study) -> None:
    """Gen-PPL over entropy, or entropy alone, by change."""
    colors = {"none": "black", "noise": COLORS[4], "stale": COLORS[2], "permuted": COLORS[3]}
    is_judged = all(sample.quality.gen_ppl is not None for sample in study.samples)
    place = list(range(len(study.samples)))[::-1]
    for at, sample in zip(place, study.samples, strict=True):
        value, error = figure_of(sample.quality, "gen_ppl" if is_judged else "entropy")
        look: dict[str, Any] = {"color": colors[sample.kind], "marker": "o", "markersize": 5, "elinewidth": 0.9}
        axes.errorbar([value], [at], xerr=[2 * error], capsize=2, **look)
        if is_judged:
            text = f" {sample.quality.entropy:.2f}"
            axes.annotate(text, (1.0, at), xycoords=("axes fraction", "data"), va="center", fontsize=7, color=GREY)
    axes.set_yticks(place, [_words(sample.change) for sample in study.samples])
    axes.set_ylim(-0.6, len(place) - 0.4)
    axes.set_title("texts written that way")
    if not is_judged:
        axes.set_xlabel("entropy (nats, ± 2 s.e.)")
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(plain_number)
    few_ticks(axes.xaxis)
    axes.set_xlabel("Gen-PPL (± 2 s.e.); on the right, entropy")


def _reveals(axes: Axes, study: Study) -> None:
    place = list(range(len(study.reveals)))[::-1]
    axes.axvline(0.5, color=GREY, linestyle=(0, (2, 2)), linewidth=1.0)
    for kind, color, shift in (("anchors", COLORS[0], 0.1), ("others", COLORS[1], -0.1)):
        values, errors = ([getattr(each, name) for each in study.reveals] for name in (kind, f"{kind}_se"))
        look: dict[str, Any] = {"color": color, "marker": "o", "linestyle": "none", "markersize": 5, "capsize": 2}
        axes.errorbar(values, [at + shift for at in place], xerr=[2 * e for e in errors], label=kind, **look)
    axes.set_yticks(place, [each.sampler for each in study.reveals])
    axes.set_ylim(-0.6, len(place) - 0.4)
    axes.set_xlabel("mean rank of the reveal: 0 first, 1 last")
    axes.set_title("when tokens are revealed")
    axes.legend(frameon=False)


def draw_correlation(studies: Sequence[Study], found: Sequence[Correlation], path: Path) -> Path:
    """The bound, and what else there is, over anchor accuracy: a point a model, a line a run, a marker a step.

    Below, where there are runs at equal steps, the same with each step's mean taken out.
    """
    names, figures = run_names(studies), list(dict.fromkeys(each.y for each in found))
    steps = sorted({study.step for study in studies})
    markers = {step: MARKERS[place] if len(steps) <= len(MARKERS) else "o" for place, step in enumerate(steps)}
    looks = {
        run: {"color": COLORS[place % len(COLORS)], "linestyle": LINES[place // len(COLORS) % len(LINES)]}
        for place, run in enumerate(names)
    }
    has_equal = any(each.among == EQUAL for each in found)
    with drawing(path, 3.6 * len(figures) + 1.9, 7.4 if has_equal else 4.0) as page:
        for place, name in enumerate(figures):
            said = {each.among: _words_of(each) for each in found if each.y == name}
            equal = said.pop(EQUAL, None)
            axes = page.add_subplot(1 + has_equal, len(figures), place + 1)
            for run in names:
                _course(axes, [study for study in studies if study.run == run], name, looks[run], markers)
            axes.set_xlabel("accuracy on hidden anchors")
            axes.set_ylabel(FIGURES[name])
            axes.set_title("\n".join(said.values()), fontsize=7)
            axes.margins(0.1)
            if name == "gen_ppl":
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(plain_number)
                few_ticks(axes.yaxis)
            if equal is not None:
                below = page.add_subplot(2, len(figures), len(figures) + place + 1)
                _beside_each_other(below, studies, name, looks, markers)
                below.set_title(equal, fontsize=7)
        page.legend(handles=_keys(names, looks, markers), frameon=False, loc="outside right upper", labelspacing=0.55)
    return path


def _words_of(each: Correlation) -> str:
    spearman = f"ρ = {each.rho:.2f} [{each.low:.2f}, {each.high:.2f}]"
    return f"{each.among}: {spearman}, r = {each.r:.2f} [{each.r_low:.2f}, {each.r_high:.2f}]"


def _course(axes: Axes, own: Sequence[Study], name: str, look: dict[str, Any], markers: dict[int, str]) -> None:
    """A run's checkpoints in their order."""
    own = sorted(own, key=lambda study: study.step)
    across, up = ([figure(study, each) for study in own] for each in (ACCURACY, name))
    axes.errorbar(
        [value for value, _ in across],
        [value for value, _ in up],
        [error for _, error in up],
        [error for _, error in across],
        linewidth=1.2,
        elinewidth=0.6,
        alpha=0.8,
        **look,
    )
    for study, (x, _), (y, _) in zip(own, across, up, strict=True):
        axes.plot([x], [y], marker=markers[study.step], **_inked(look))


def _inked(look: dict[str, Any]) -> dict[str, Any]:
    """A marker of a run: full where its line is, hollow where a color comes the second time."""
    if look["linestyle"] == LINES[0]:
        return {"color": look["color"], **EDGE}
    return {"color": look["color"], **EDGE, "markerfacecolor": "white", "markeredgecolor": look["color"]}


def _beside_each_other(
    axes: Axes, studies: Sequence[Study], name: str, looks: dict[str, dict[str, Any]], markers: dict[int, str]
) -> None:
    """Runs at equal steps: what is left of both figures without the step's mean."""
    for step in shared_steps([study.run for study in studies], [study.step for study in studies]):
        here = [study for study in studies if study.step == step]
        x, y = (np.array([figure(study, each)[0] for study in here]) for each in (ACCURACY, name))
        y = np.log(y) if name == "gen_ppl" else y
        for study, across, up in zip(here, x - x.mean(), y - y.mean(), strict=True):
            axes.plot([across], [up], marker=markers[step], **_inked(looks[study.run]))
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_xlabel("accuracy less the step's mean")
    axes.set_ylabel(f"{'log Gen-PPL' if name == 'gen_ppl' else FIGURES[name]} less the step's mean")
    axes.margins(0.1)


def _keys(names: dict[str, str], looks: dict[str, dict[str, Any]], markers: dict[int, str]) -> list[Any]:
    """What colors and markers stand for; of very many steps nothing is said."""
    from matplotlib.lines import Line2D

    found = [
        Line2D([], [], linewidth=2, label=name, marker="o", **(_inked(looks[run]) | looks[run]))
        for run, name in names.items()
    ]
    if len(markers) > len(MARKERS):
        return found
    look: dict[str, Any] = {"color": GREY, "linestyle": "none", "markersize": 6}
    return found + [Line2D([], [], marker=marker, label=f"step {step:,}", **look) for step, marker in markers.items()]
