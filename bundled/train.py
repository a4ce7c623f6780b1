"""Train the bundled models at once on one GPU, for as many steps as end in time.

    python bundled/train.py --data DATA --runs runs --minutes 18 adlm mdlm

All get the same number of steps, found by a short run of each and kept in the file `steps` of the runs' folder, where
a later command for another model reads it; the run folders are `adlm-0`, `mdlm-0` and `ar-0`. Start
`nvidia-cuda-mps-control -d` before: the processes then share the GPU instead of taking turns. The same command resumes,
without a time limit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adlm.apps.experiments.experiment import (
    Experiment,
    ExperimentArm,
    MeasureSettings,
    run_experiment,
)
from adlm.errors import check_known
from adlm.training.logging import read_metrics

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("adlm", "mdlm", "ar")
PROBE = {"steps": 500, "log.every": 25, "valid.every": 10**9, "valid.rows": 64}
MEASURE = MeasureSettings(rows=2048, batch=256)
MARGIN = 0.96  # of the time is for steps, the rest for validation, checkpoints and the start


def train_all(methods: Sequence[str], runs: Path, data: str, settings: Mapping[str, Any]) -> None:
    """Train and measure models, each in a process of its own, with changed settings of their recipes."""
    arms = {
        name: ExperimentArm(
            recipe=str(ROOT / f"recipes/bundled-{name}.yaml"), overrides=dict(settings)
        )
        for name in methods
    }
    experiment = Experiment(
        question="The bundled models",
        arms=arms,
        corpora={"": data},
        seeds=[0],
        measure=MEASURE,
        jobs=len(arms),
    )
    results, failures = run_experiment(experiment, runs / f"{'-'.join(methods)}.json", runs)
    if failed := sorted(failures):  # they failed in any order
        raise RuntimeError(
            f"training failed: {', '.join(failed)}; see {runs / failed[0] / 'log.txt'}"
        )
    if len(results["runs"]) < len(arms):
        raise SystemExit("stopped; the same command resumes")


def measure_seconds_per_step(run: Path) -> float:
    """Compute the seconds of a step in the second half of a short run; the first half compiles."""
    ends = [
        (each["step"], each["time"]["seconds"])
        for each in read_metrics(run / "metrics.jsonl")
        if "lr" in each
    ]
    (first, start), (last, end) = ends[len(ends) // 2 - 1], ends[-1]
    return (end - start) / (last - first)


def choose_steps(methods: Sequence[str], probe: Path, seconds: float) -> int:
    """Return how many steps the slowest model takes in so many seconds, in hundreds."""
    slowest = max(measure_seconds_per_step(probe / f"{method}-0") for method in methods)
    steps = int(MARGIN * seconds / slowest / 100) * 100
    if steps < 100:
        problem = (
            f"{seconds:.0f} s are left after the short runs, 100 steps take {100 * slowest:.0f} s"
        )
        raise ValueError(f"{problem}: raise --minutes")
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", required=True, help="folder written by adlm prepare")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="folder of the runs [default: %(default)s]"
    )
    parser.add_argument(
        "--minutes", type=float, default=18, help="with the short runs [default: %(default)s]"
    )
    parser.add_argument(
        "methods",
        nargs="*",
        default=METHODS,
        metavar="METHOD",
        help="methods to train: adlm, mdlm, ar [default: all]",
    )
    options = parser.parse_args()
    for method in options.methods:
        check_known("method", method, METHODS)
    start, steps_file = time.monotonic(), options.runs / "steps"
    if not steps_file.is_file():
        train_all(options.methods, options.runs / "probe", options.data, PROBE)
        steps = choose_steps(
            options.methods,
            options.runs / "probe",
            60 * options.minutes - (time.monotonic() - start),
        )
        steps_file.write_text(str(steps), "utf-8")
    train_all(
        options.methods, options.runs, options.data, {"steps": int(steps_file.read_text("utf-8"))}
    )


if __name__ == "__main__":
    main()
