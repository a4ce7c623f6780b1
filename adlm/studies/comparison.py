"""Several models' anchors side by side: which of their figures go together, and a page to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath

from adlm.studies.anchors import Study
from adlm.studies.correlation import Correlation, at_equal_steps, correlate, require_points, within_runs
from adlm.studies.pages import markdown_table

ACCURACY = "anchor accuracy"
FIGURES = {"nll": "nll (nats per token)", "gen_ppl": "Gen-PPL", "entropy": "entropy (nats)"}
ONE_RUN = "all models are of one run: what goes together over them may be training alone"
ONE_STEP = "all models stand at one step: that is `at equal steps`"
NOTE = (
    "ρ is Spearman's, r Pearson's (with the logarithm of Gen-PPL), intervals are of 95%, p is of a permutation test. "
    "Over all models both take checkpoints for independent, which those of one run are not. Within runs each run's "
    "mean is taken out: training alone makes figures go together there. At equal steps each step's mean is taken out, "
    "whole runs are exchanged and the intervals count runs. ± is a standard error over rows or texts, which all models "
    "share: differences between models have smaller ones."
)
Table = list[list[str]]  # columns, then a line each


@dataclass(frozen=True)
class Together:
    """Which figures of models go together, and why some cannot be said to."""

    found: list[Correlation]
    unsaid: list[str]


def correlations(studies: Sequence[Study]) -> Together:
    """How anchor accuracy goes together with the bound, and with sample quality where texts were judged.

    Over all models, within runs and at equal steps, as far as there are any. Pearson's r takes Gen-PPL's logarithm.
    """
    require_points(len(studies))
    accuracy = [study.guess().accuracy for study in studies]
    runs, steps = [study.run for study in studies], [study.step for study in studies]
    found: list[Correlation] = []
    unsaid: dict[str, None] = {}
    for name in known_figures(studies):
        values = [figure(study, name)[0] for study in studies]
        y, names = [math.log(value) for value in values] if name == "gen_ppl" else values, (ACCURACY, name)
        looks: list[Callable[[], Correlation]] = [partial(correlate, accuracy, y, names)]
        if len(set(runs)) > 1:
            looks.append(partial(within_runs, accuracy, y, runs, names))
        else:
            unsaid[ONE_RUN] = None
        if len(set(steps)) > 1:
            looks.append(partial(at_equal_steps, accuracy, y, runs, steps, names))
        else:
            unsaid[ONE_STEP] = None
        for look in looks:
            try:
                found.append(look())
            except ValueError as error:
                unsaid[str(error)] = None
    return Together(found, list(unsaid))


def known_figures(studies: Sequence[Study]) -> list[str]:
    """The figures beside anchor accuracy that every model has."""
    return [name for name in FIGURES if all(not math.isnan(figure(study, name)[0]) for study in studies)]


def figure(study: Study, name: str) -> tuple[float, float]:
    """A figure of the model as it is, and its error; NaN where it was not measured."""
    if name == ACCURACY:
        return study.guess().accuracy, study.guess().accuracy_se
    if name == "nll":
        return study.losses[0].nll, study.losses[0].nll_se
    if not study.samples or (value := getattr(study.samples[0].quality, name)) is None:
        return math.nan, math.nan
    return float(value), float(getattr(study.samples[0].quality, f"{name}_se"))


def run_names(studies: Sequence[Study]) -> dict[str, str]:
    """Every run by as little of the end of its path as tells it from the others."""
    runs = list(dict.fromkeys(study.run for study in studies))
    for kept in range(1, 1 + max(len(PurePath(run).parts) for run in runs)):
        names = {run: "/".join(PurePath(run).parts[-kept:]) for run in runs}
        if len(set(names.values())) == len(runs):
            return names
    return {run: run for run in runs}


def table_of_models(studies: Sequence[Study]) -> Table:
    """The figures that are compared, a line a model."""
    known, names = known_figures(studies), run_names(studies)
    lines = [["run", "step", ACCURACY, *(FIGURES[name] for name in known)]]
    for study in studies:
        cells = []
        for name in (ACCURACY, *known):
            value, error = figure(study, name)
            digits = 1 if name == "gen_ppl" else 3
            cells.append("–" if math.isnan(value) else f"{value:.{digits}f} ± {error:.{digits}f}")
        lines.append([names[study.run], f"{study.step:,}", *cells])
    return lines


def table_of_correlations(found: Sequence[Correlation]) -> Table:
    """How the figures go together, a line for each look at them."""
    lines = [[f"{ACCURACY} with", "among", "models", "ρ", "95%", "p", "r", "95%", "p"]]
    for each in found:
        spearman = [f"{each.rho:.2f}", f"[{each.low:.2f}, {each.high:.2f}]", _chance(each.p_value)]
        pearson = [f"{each.r:.2f}", f"[{each.r_low:.2f}, {each.r_high:.2f}]", _chance(each.r_p_value)]
        lines.append([each.y, each.among, str(each.points), *spearman, *pearson])
    return lines


def _chance(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def page_of(studies: Sequence[Study], together: Together, picture: str) -> str:
    """Markdown to keep beside the picture."""
    parts = ["# Anchor accuracy and the rest", f"![Anchor accuracy and the rest]({picture})"]
    parts += [_markdown(table_of_correlations(together.found)), NOTE, *together.unsaid]
    return "\n\n".join([*parts, _markdown(table_of_models(studies))]) + "\n"


def _markdown(lines: Table) -> str:
    return markdown_table({"caption": "", "columns": lines[0], "rows": lines[1:]})
