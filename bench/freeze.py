"""Compare what two commits compute, on one machine: bits are not portable between machines.

    python -m bench.freeze 3da4d78 HEAD                  # all probes
    python -m bench.freeze 3da4d78 . --only frames ppl   # the files here, uncommitted ones too

Both trees run the probes of `bench/freeze_probes.py`, as it is here, side by side in processes of their own. The exit
code is 1 if a probe fails, or if something differs that `ALLOWED` does not list.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PROBE_SECONDS = 600  # that a probe may take
LOG_LINES = 25  # of a failed probe that are shown
SKIPPED = {
    "transformers": "transformers",
    "diffusers": "diffusers",
    "server": "uvicorn",
}  # probe -> what it imports
NAMES = (
    "frames",
    "batches",
    "long_plans",
    "causal",
    "holes",
    "recorded",
    "bundled",
    "scores",
    "training",
    "resume",
    "prepare",
    "ppl",
    "commands",
    "recipes",
    "reasoning",
    "server",
    "transformers",
    "diffusers",
)


@dataclass(frozen=True)
class Allowed:
    """Cases that may differ."""

    probe: str
    case: str  # a pattern, such as "adlm, *"
    reason: str
    limit: float = math.inf  # the largest difference that is allowed; inf: texts may differ too


ALLOWED: tuple[Allowed, ...] = ()


@dataclass
class Difference:
    """Where two values differ, and by how much: inf where they are no numbers."""

    place: str
    size: float
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.place or 'value'}: {shorten(self.old)} became {shorten(self.new)}"


@dataclass
class Comparison:
    """What the two trees have made of a probe."""

    probe: str
    cases: int
    differing: dict[str, Difference]  # by case
    allowed: dict[str, str]  # reason by case, of those that differ
    problem: str = ""
    seconds: float = 0.0

    @property
    def is_fine(self) -> bool:
        return not self.problem and self.differing.keys() == self.allowed.keys()

    @property
    def largest(self) -> str:
        """The largest difference, as the table shows it."""
        sizes = [each.size for each in self.differing.values()]
        if not sizes:
            return "0"
        numbers = [size for size in sizes if math.isfinite(size)]
        texts = ["not a number"] if len(numbers) < len(sizes) else []
        return ", ".join([f"{max(numbers):.3g}" for _ in numbers[:1]] + texts)

    @property
    def first(self) -> str:
        """The first case that differs and is not allowed to, else the first that is."""
        wrong = [name for name in self.differing if name not in self.allowed]
        if self.problem:
            return self.problem
        if wrong:
            return f"{wrong[0]}: {self.differing[wrong[0]]}"
        if self.allowed:
            name, reason = next(iter(self.allowed.items()))
            return f"{name} ({reason})"
        return ""


# ---------------------------------------------------------------------------------------- the trees


def copy_tree(commit: str, folder: Path) -> None:
    """Write the files of a commit, or with "." those here, and our own probes among them."""
    folder.mkdir()
    git = ["git", "-C", str(ROOT)]
    if commit == ".":
        command = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for name in listed.rstrip("\0").split("\0"):
            if (ROOT / name).is_file():  # a deleted file is still listed
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
    else:
        packed = subprocess.run([*git, "archive", commit], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
    shutil.rmtree(folder / "bench", ignore_errors=True)
    shutil.copytree(ROOT / "bench", folder / "bench", ignore=shutil.ignore_patterns("__pycache__"))


def build_environment(tree: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a process that imports the package from a tree."""
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    own |= {
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }
    return os.environ | own


def run_python(words: Sequence[str], tree: Path, cwd: Path, folder: Path) -> str:
    """Run a module of a tree; return the end of its log if it fails, else nothing."""
    command = [sys.executable, "-P", "-m", *words]
    folder.mkdir(parents=True, exist_ok=True)
    environment = build_environment(tree, folder)
    log = folder / "log.txt"
    with log.open("wb") as file:
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env=environment,
                stdout=file,
                stderr=file,
                timeout=PROBE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"still running after {PROBE_SECONDS} s"
    if done.returncode == 0:
        return ""
    lines = log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
    return f"exit code {done.returncode}\n" + "\n".join(lines)


def run_probe(
    name: str, tree: Path, fixtures: Path, out: Path, *, is_quick: bool
) -> tuple[str, float]:
    """Run a probe in a tree, in a copy of the fixtures; return its problem, if any, and its seconds."""
    began = time.perf_counter()
    cwd = out / "fixtures"
    shutil.copytree(fixtures, cwd, symlinks=True)
    words = ["bench.freeze_probes", name, str(out), "--tree", str(tree)]
    problem = run_python(words + ["--quick"] * is_quick, tree, cwd, out)
    shutil.rmtree(cwd)
    return problem, time.perf_counter() - began


# --------------------------------------------------------------------------------------- comparing


def shorten(value: Any) -> str:
    """Return a value for the table."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def find_difference(old: Any, new: Any, place: str = "") -> Difference | None:
    """Return the largest difference of two values of JSON, or None."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return pick_largest(
            find_difference(old[key], new[key], f"{place}.{key}".lstrip(".")) for key in old
        )
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = zip(old, new, strict=True)
        return pick_largest(
            find_difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(pairs)
        )
    if isinstance(old, dict) and isinstance(new, dict):
        gone = {key: old[key] for key in old.keys() - new.keys()}
        added = {key: new[key] for key in new.keys() - old.keys()}
        return Difference(f"{place} (keys)".lstrip(), math.inf, gone, added)
    are_numbers = is_number(old) and is_number(new)
    if old == new and (are_numbers or type(old) is type(new)):
        return None
    return Difference(place, abs(old - new) if are_numbers else math.inf, old, new)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def pick_largest(differences: Iterator[Difference | None]) -> Difference | None:
    """Return the largest difference, of equal ones the first."""
    found = [each for each in differences if each is not None]
    return max(found, key=lambda each: each.size, default=None)


def compare_arrays(old: np.ndarray, new: np.ndarray) -> Difference | None:
    """Return the difference of two arrays, which are equal if all bits are."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        before, after = f"{old.dtype}{list(old.shape)}", f"{new.dtype}{list(new.shape)}"
        return Difference("shape", math.inf, before, after)
    if old.tobytes() == new.tobytes():
        return None
    apart = np.abs(old.astype(np.float64) - new.astype(np.float64))
    place = np.unravel_index(int(np.nan_to_num(apart, nan=np.inf).argmax()), apart.shape)
    size = float(np.nan_to_num(apart[place], nan=np.inf))
    return Difference(f"at {[int(i) for i in place]}", size, old[place].item(), new[place].item())


def read_cases(folder: Path) -> dict[str, Any]:
    """Read what a probe has written."""
    values: dict[str, Any] = json.loads((folder / "cases.json").read_text("utf-8"))
    with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
        for name, value in values.items():
            if isinstance(value, dict) and value.keys() == {"array"}:
                values[name] = arrays[value["array"]]
    return values


def compare_case(old: Any, new: Any) -> Difference | None:
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return compare_arrays(old, new)
    return find_difference(old, new)


def compare_probe(name: str, old: Path, new: Path) -> Comparison:
    """Compare what two trees have made of a probe; a case that one of them lacks differs."""
    before, after = read_cases(old), read_cases(new)
    differing: dict[str, Difference] = {}
    for case in before | after:
        if case not in before or case not in after:
            present = [case in before, case in after]
            differing[case] = Difference("is there", math.inf, *present)
            continue
        difference = compare_case(before[case], after[case])
        if difference is not None:
            differing[case] = difference
    allowed: dict[str, str] = {}
    for case, difference in differing.items():
        for each in ALLOWED:
            if (
                each.probe == name
                and fnmatchcase(case, each.case)
                and difference.size <= each.limit
            ):
                allowed.setdefault(case, each.reason)
    return Comparison(name, len(before | after), differing, allowed)


# ------------------------------------------------------------------------------------------- main


def print_comparisons(comparisons: Sequence[Comparison], old: str, new: str) -> None:
    """Print one table."""
    table = Table(title=f"{old} and {new}", title_justify="left")
    for column in (
        "probe",
        "cases",
        "equal",
        "differing",
        "allowed",
        "largest difference",
        "seconds",
    ):
        table.add_column(column, justify="left" if column == "probe" else "right")
    table.add_column("first case that differs", overflow="fold")
    for each in comparisons:
        counts = [
            each.cases,
            each.cases - len(each.differing),
            len(each.differing),
            len(each.allowed),
        ]
        first = each.first.splitlines()[0] if each.first else ""
        cells = [each.probe, *map(str, counts), each.largest, f"{each.seconds:.0f}", first]
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    Console(width=None if sys.stdout.isatty() else 220).print(table)
    for each in comparisons:
        if each.problem:
            print(f"\n{each.probe} failed: {each.problem}")


def list_missing(names: Sequence[str]) -> list[str]:
    """Return the probes whose library is not installed."""
    return [
        name
        for name in names
        if name in SKIPPED and importlib.util.find_spec(SKIPPED[name]) is None
    ]


def run(args: argparse.Namespace, folder: Path) -> list[Comparison]:
    """Run the probes in both trees and compare them, each probe as soon as both have run it."""
    trees = {"old": folder / "trees" / "old", "new": folder / "trees" / "new"}
    (folder / "trees").mkdir()
    copy_tree(args.old, trees["old"])
    copy_tree(args.new, trees["new"])
    fixtures = folder / "fixtures"
    fixtures.mkdir()
    problem = run_python(["bench.freeze_fixtures"], trees["old"], fixtures, folder / "made")
    if problem:
        raise RuntimeError(f"{args.old} cannot make the fixtures: {problem}")
    comparisons = []
    with ThreadPoolExecutor(1) as old_side, ThreadPoolExecutor(1) as new_side:
        sides = {"old": old_side, "new": new_side}
        running = {}
        for name in args.only:
            for side, pool in sides.items():
                out = folder / side / name
                running[side, name] = pool.submit(
                    run_probe, name, trees[side], fixtures, out, is_quick=args.quick
                )
        for name in args.only:
            problems = [
                f"{side}: {running[side, name].result()[0]}"
                for side in sides
                if running[side, name].result()[0]
            ]
            seconds = max(running[side, name].result()[1] for side in sides)
            if problems:
                comparison = Comparison(name, 0, {}, {}, "\n".join(problems))
            else:
                comparison = compare_probe(name, folder / "old" / name, folder / "new" / name)
            comparison.seconds = seconds
            comparisons.append(comparison)
            state = "as before" if comparison.is_fine else "DIFFERS"
            print(
                f"{name}: {comparison.cases} cases, {state}, {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return comparisons


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="another commit, or . for the files here")
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES)
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases of the largest probes")
    parser.add_argument(
        "--keep", type=Path, help="an empty folder for all results; by default they are removed"
    )
    args = parser.parse_args()
    if missing := list_missing(args.only):
        parser.error(
            f"{', '.join(missing)}: install the extras hf and serve, or name other probes with --only"
        )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="adlm-freeze-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        comparisons = run(args, folder.resolve())
    print_comparisons(comparisons, args.old, args.new)
    wrong = [each.probe for each in comparisons if not each.is_fine]
    print(
        f"{time.perf_counter() - began:.0f} s; "
        + (f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
