"""GPU-minutes of an experiment's arms: their steps × the time of a step alone on the device, with the nll they reach.

python -m bench.speedrun experiments/speedrun.yaml
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from adlm.apps.experiments.experiment import compute_nll, list_runs, load_experiment
from adlm.config import Config
from adlm.training.logging import read_metrics
from adlm.training.train import train
from bench.setting import compute_spread, describe_machine, print_report

STEPS_PER_TIMING = 5


def time_steps(config: Config, steps: int, device: str) -> list[float]:
    """Time the steps of a run, in seconds; the first third, in which torch compiles, is left out."""
    quiet = {
        "log.every": STEPS_PER_TIMING,
        "log.show": False,
        "valid.every": 10**9,
        "checkpoint.every": 10**9,
    }
    with TemporaryDirectory() as folder:
        run = train(config, folder=folder, device=device, steps=steps, **quiet)
        logged = [record for record in read_metrics(run.folder / "metrics.jsonl") if "lr" in record]
    ends = [
        (record["step"], record["time"]["seconds"])
        for record in logged
        if record["step"] > steps // 3
    ]
    return [(end - start) / (last - first) for (first, start), (last, end) in pairwise(ends)]


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    experiment = load_experiment(args.file, *args.set)
    runs = list_runs(experiment, (args.out or args.file.with_suffix("")) / "results.json").values()
    rows, measured = list[list[str]](), dict[str, dict[str, Any]]()
    for name, arm in experiment.arms.items():
        own = [
            run
            for run in runs
            if run["arm"] == name and run["corpus"] == next(iter(experiment.corpora))
        ]
        if arm.model or arm.scout or not own:
            raise ValueError(
                f"{args.file}: arm {name!r} has a model, a scout or no seed: expected one recipe and seeds"
            )
        config, nll = own[0]["config"], [compute_nll(run["record"]) for run in own if run["record"]]
        step, half = compute_spread(time_steps(config, args.steps, args.device))
        minutes = config.steps * step / 60
        timing = {"minutes": minutes, "step_ms": 1e3 * step, "spread_ms": 1e3 * half}
        measured[name] = timing | {"steps": config.steps, "batch": config.batch, "nll": nll}
        share = minutes / next(iter(measured.values()))["minutes"]
        nll_range = f"{fmean(nll):.3f} ({min(nll):.3f}–{max(nll):.3f})" if nll else "not run"
        cost = [f"{1e3 * step:.1f} ± {1e3 * half:.1f}", f"{minutes:.2f}", f"{share:.3f}"]
        rows.append([name, f"{config.steps:,} × {config.batch}", *cost, nll_range])
    columns = [
        "arm",
        "steps × rows",
        "ms per step",
        "minutes",
        "of the first",
        "nll (least–largest)",
    ]
    print_report(
        experiment.question,
        columns,
        rows,
        describe_machine("speedrun", args.device) | {"arms": measured},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="YAML file of `adlm experiment`")
    parser.add_argument(
        "--set", action="append", default=[], help="key=value, as of `adlm experiment`"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the results [default: the file without .yaml]"
    )
    parser.add_argument(
        "--steps", type=int, default=90, help="steps that are run, the first third untimed"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    main(parser.parse_args())
