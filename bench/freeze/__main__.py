"""Compare what two commits compute, on one machine: bits are not portable between machines.

    python -m bench.freeze 3da4d78 HEAD                  # all probes
    python -m bench.freeze 3da4d78 . --only frames ppl   # the files here, uncommitted ones too

Both trees run the same probes, as they are here, side by side and each in a process of its own.
The exit code is 1 if a probe fails, if something differs that is not listed, or if something is
listed that does not happen. `ALLOWED` in bench/freeze/compare.py lists what may differ from
3da4d78; of two other commits everything must be equal.

A commit may need what this one does not: 3da4d78 needs omegaconf. Install that into a folder of its
own and give the folder in PYTHONPATH:

    pip install --no-deps --target FOLDER omegaconf
    PYTHONPATH=FOLDER python -m bench.freeze 3da4d78 HEAD

The two trees run at the same time, so two cores are busy for some minutes; the parts of --only can
be run one after the other, and beside each other where there are more cores.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.freeze.compare import ALLOWED, BASE, Comparison, compare_probe
from bench.freeze.probes import PROBES
from bench.trees import build_environment, copy_tree, name_tree

MAX_SECONDS = 1800  # of a probe
MAX_LOG_LINES = 25  # of a failed probe that are printed
LIBRARIES = {"transformers": "transformers", "diffusers": "diffusers", "server": "uvicorn"}


@dataclass(frozen=True)
class Outcome:
    """How a process has ended."""

    problem: str  # empty: well
    seconds: float


def run_module(words: Sequence[str], tree: Path, cwd: Path, out: Path) -> Outcome:
    """Run a module in a process that imports the package from a tree."""
    environment = build_environment(tree) | {
        "HF_HOME": str(out / "huggingface"),  # each tree's remote code has its own cache
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    began = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *words],
            cwd=cwd,
            env=environment,
            stdout=file,
            stderr=file,
        )
        try:
            code = process.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return Outcome(f"still running after {MAX_SECONDS} s", time.perf_counter() - began)
    seconds = time.perf_counter() - began
    if code == 0:
        return Outcome("", seconds)
    lines = log.read_text("utf-8", "replace").splitlines()[-MAX_LOG_LINES:]
    return Outcome("\n".join([f"exit code {code}", *lines]), seconds)


def run_probe(name: str, tree: Path, fixtures: Path, out: Path, *, is_quick: bool) -> Outcome:
    """Run a probe in a tree, in a copy of the fixtures of its own."""
    cwd = out / "fixtures"
    shutil.copytree(fixtures, cwd, symlinks=True)
    words = ["bench.freeze.probes", name, str(out), "--tree", str(tree)]
    outcome = run_module(words + ["--quick"] * is_quick, tree, cwd, out)
    shutil.rmtree(cwd)
    return outcome


def compare_trees(
    old: str, new: str, names: Sequence[str], folder: Path, *, is_quick: bool
) -> list[Comparison]:
    """Run probes in both trees and compare each as soon as both have run it."""
    listed = ALLOWED if old.startswith(BASE) else ()
    trees = {"old": folder / "trees" / "old", "new": folder / "trees" / "new"}
    copy_tree(old, trees["old"])
    copy_tree(new, trees["new"])
    fixtures = folder / "fixtures"
    fixtures.mkdir()
    made = run_module(["bench.freeze.fixtures"], trees["old"], fixtures, folder / "made")
    if made.problem:
        raise RuntimeError(f"{old} cannot make the fixtures: {made.problem}")
    comparisons = []
    with ThreadPoolExecutor(1) as old_side, ThreadPoolExecutor(1) as new_side:
        sides = {"old": old_side, "new": new_side}
        running: dict[tuple[str, str], Future[Outcome]] = {}
        for name in names:
            for side, pool in sides.items():
                given = (name, trees[side], fixtures, folder / side / name)
                running[side, name] = pool.submit(run_probe, *given, is_quick=is_quick)
        for name in names:
            outcomes = {side: running[side, name].result() for side in sides}
            problems = [
                f"{side}: {each.problem}" for side, each in outcomes.items() if each.problem
            ]
            if problems:
                comparison = Comparison(name, 0, problem="\n".join(problems))
            else:
                results = (folder / "old" / name, folder / "new" / name)
                comparison = compare_probe(name, *results, listed, is_quick=is_quick)
            comparison.seconds = max(each.seconds for each in outcomes.values())
            comparisons.append(comparison)
            print(f"{name}: {comparison.describe()}", file=sys.stderr, flush=True)
    return comparisons


def print_comparisons(comparisons: Sequence[Comparison], shown: int) -> None:
    """Print what is equal, what differs by how much and why, and what is wrong, as Markdown."""
    for each in comparisons:
        print(f"- {each.probe}: {each.describe()} ({each.seconds:.0f} s)")
        for reason, cases in each.group_by_reason().items():
            example = each.differing[cases[0]]
            print(f"    - {len(cases):,}, because {reason}; `{cases[0]}`: {example}")
    for each in comparisons:
        if each.problem:
            print(f"\n{each.probe} failed: {each.problem}")
        for case, difference in list(each.wrong.items())[:shown]:
            print(f"{each.probe} is wrong: {case}: {difference}")
        for entry in each.unused:
            print(f"{each.probe} is wrong: nothing differs in {entry.case!r}, but it is listed")


def main() -> int:
    """Compare, print and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="a commit, or a folder with the package")
    parser.add_argument("new", help="another one; . is the files here")
    parser.add_argument("--only", nargs="+", choices=PROBES, default=list(PROBES), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="fewer cases of the largest probes")
    parser.add_argument("--show", type=int, default=5, help="wrong cases of a probe to print")
    parser.add_argument("--keep", type=Path, help="empty folder for all results [default: none]")
    args = parser.parse_args()
    missing = [name for name in args.only if name in LIBRARIES and not find_spec(LIBRARIES[name])]
    if missing:
        parser.error(f"{', '.join(missing)} need the extras hf and serve: install them, or --only")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="adlm-freeze-") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        given = (args.old, args.new, args.only, folder)
        comparisons = compare_trees(*given, is_quick=args.quick)
    wrong = [each.probe for each in comparisons if not each.is_fine]
    verdict = f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong"
    cases = sum(each.cases for each in comparisons)
    differing = sum(len(each.differing) for each in comparisons)
    seconds = time.perf_counter() - began
    title = f"{name_tree(args.old)} and {name_tree(args.new)}{', quick' * args.quick}"
    equal = f"{cases - differing:,} of {cases:,} cases are equal"
    print(f"{title}: {equal}, {verdict} ({seconds:.0f} s).\n")
    print_comparisons(comparisons, args.show)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
