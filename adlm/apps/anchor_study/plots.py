"""Plots of an anchor study."""

from collections.abc import Sequence
from pathlib import Path

from adlm.apps.anchor_study.study import ACCURACY, METRICS, find_run, get_metric
from adlm.evaluate.plots import (
    LINE_LOOKS,
    Look,
    Row,
    add_legend,
    assign_looks,
    new_figure,
    set_log_scale,
)
from adlm.evaluate.results import shorten_names


def draw_correlation(models: Sequence[Row], correlations: Sequence[Row], path: Path) -> Path:
    """Plot every metric over anchor accuracy, with a line through the checkpoints of each run."""
    names = shorten_names([find_run(study) for study in models])
    looks: dict[str, Look] = {
        run: look | {"marker": "o"} for run, look in assign_looks(list(names), LINE_LOOKS).items()
    }
    metrics = list(dict.fromkeys(each["y"] for each in correlations))
    with new_figure(path, 3.6 * len(metrics) + 1.9, 4.0) as figure:
        for axes, name in zip(
            figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True
        ):
            for run, look in looks.items():
                own = sorted(
                    (study for study in models if find_run(study) == run),
                    key=lambda study: study["step"],
                )
                across, up = (
                    [get_metric(study, each) for study in own] for each in (ACCURACY, name)
                )
                errors = ([each.stderr or 0.0 for each in values] for values in (up, across))
                axes.errorbar(
                    [each.value for each in across], [each.value for each in up], *errors, **look
                )
            text = "{among}: ρ = {rho:.2f} [{low:.2f}, {high:.2f}]"
            axes.set_title(
                "\n".join(text.format(**each) for each in correlations if each["y"] == name),
                fontsize=7,
            )
            axes.set(xlabel="accuracy on masked anchors", ylabel=METRICS[name])
            if name == "gen_ppl":
                set_log_scale(axes, "y")
        add_legend(figure, [(name, looks[run]) for run, name in names.items()])
    return path
