"""Train the bundled models at once on one GPU, for as many steps as end in time.

    python bundled/train.py --data DATA --runs runs --minutes 16

All three get the same number of steps, found by a short run of each and kept in the file `steps` of the runs' folder.
Start `nvidia-cuda-mps-control -d` before: the processes then share the GPU instead of taking turns. The same command
resumes, without a time limit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("adlm", "mdlm", "ar")
PROBE = ("steps=250", "log.every=25", "valid.every=100000", "valid.rows=64")
MARGIN = 0.93  # of the time is for steps, the rest for validation, checkpoints and the start


def train_all(runs: Path, changes: Sequence[str]) -> None:
    """Train every model in a process of its own; if one fails, or this process is stopped, stop the others."""
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"} | os.environ
    processes: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for method in METHODS:
            folder = runs / method
            folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "adlm", "train", str(ROOT / f"recipes/bundled-{method}.yaml")]
            with (folder / "log.txt").open("a", encoding="utf-8") as log:
                command += [f"folder={folder}", *changes]
                processes[folder] = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        while None in (codes := [process.poll() for process in processes.values()]) and not any(codes):
            time.sleep(0.2)
    finally:
        for process in processes.values():
            process.terminate()  # of those that still run: they save and exit
    if failed := [str(folder / "log.txt") for folder, process in processes.items() if process.wait()]:
        raise RuntimeError(f"training failed or was stopped: see {', '.join(failed)}")


def measure_seconds_per_step(run: Path) -> float:
    """Compute the seconds of a step in the second half of a short run; the first half compiles."""
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    ends = [(each["step"], each["time"]["seconds"]) for each in map(json.loads, lines) if "lr" in each]
    (first, start), (last, end) = ends[len(ends) // 2 - 1], ends[-1]
    return (end - start) / (last - first)


def choose_steps(probe: Path, seconds: float) -> int:
    """Return how many steps the slowest model takes in so many seconds, in hundreds."""
    slowest = max(measure_seconds_per_step(probe / method) for method in METHODS)
    steps = int(MARGIN * seconds / slowest / 100) * 100
    if steps < 100:
        raise ValueError(
            f"{seconds:.0f} s are left after the short runs, 100 steps take {100 * slowest:.0f} s: raise --minutes"
        )
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", required=True, help="folder written by adlm prepare")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs [default: %(default)s]")
    parser.add_argument(
        "--minutes", type=float, default=16, help="time limit, with the short runs [default: %(default)s]"
    )
    parser.add_argument("--steps", type=int, help="number of steps [default: as many as end in time]")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="settings of the recipes to change")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that train_all stops its processes
    start, changes = time.monotonic(), [f"data.path={options.data}", *options.changes]
    steps, steps_file = options.steps, options.runs / "steps"
    if steps is None and steps_file.is_file():
        steps = int(steps_file.read_text("utf-8"))
        print(f"resuming with the {steps:,} steps of {steps_file}", flush=True)
    elif steps is None:
        train_all(options.runs / "probe", [*changes, *PROBE])
        steps = choose_steps(options.runs / "probe", 60 * options.minutes - (time.monotonic() - start))
        steps_file.write_text(str(steps), "utf-8")
    print(f"{steps:,} steps of {', '.join(METHODS)}", flush=True)
    train_all(options.runs, [*changes, f"steps={steps}"])


if __name__ == "__main__":
    main()
