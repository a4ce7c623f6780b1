"""Host time of sampling, of two commits in turns: with a network that costs nothing.

    python -m bench.host_time 3da4d78 .
    python -m bench.host_time 3da4d78 HEAD --only remask_loop --repeats 9

Times are CPU time in one thread, the least of the repeats: of one row divided by its evaluations,
where nearly all steps are idle by all steps, and of many rows by the steps of the batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from bench.host_loops import CASES, MAX_LENGTH, Case, Timing
from bench.setting import describe_machine, print_report
from bench.trees import build_environment, copy_tree

START = [sys.executable, "-P", "-m"]
COLUMNS = [
    "rows × length, sampler",
    "steps",
    "NFE",
    "by",
    "old µs",
    "new µs",
    "new / old",
    "spread",
]


class Sampling:
    """A process that samples with the loop of one tree."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a tree's process ended: exit code {self.process.wait()}")
        return line

    def run(self, case: Case) -> Timing:
        """Sample a case once."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{CASES.index(case)}\n")
        self.process.stdin.flush()
        return Timing(**json.loads(self.read()))


@contextmanager
def start_sampling(tree: Path, fixtures: Path) -> Iterator[Sampling]:
    """Start the process of a tree; it ends with the context."""
    pipe = subprocess.PIPE
    given = {"cwd": fixtures, "env": build_environment(tree), "text": True}
    command = [*START, "bench.host_loops"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, **given) as process:  # type: ignore[call-overload]
        try:
            yield Sampling(process)
        finally:
            process.terminate()


def make_model(tree: Path, fixtures: Path) -> None:
    """Make a model of many positions; its weights are never used."""
    fixtures.mkdir()
    command = [*START, "bench.freeze.fixtures", "--only", "adlm"]
    subprocess.run(command, cwd=fixtures, env=build_environment(tree), check=True)
    folder = (fixtures / "models" / "adlm").rename(fixtures / "models" / "long")
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["model"]["length"] = MAX_LENGTH
    path.write_text(json.dumps(config), "utf-8")


def compare_case(case: Case, sides: list[Sampling], repeats: int) -> list[tuple[Timing, Timing]]:
    """Time a case in both trees in turns, each first every other time; return old and new."""
    pairs = []
    for number in range(repeats + 1):
        order = [0, 1] if number % 2 == 0 else [1, 0]
        found = {side: sides[side].run(case) for side in order}
        if number > 0:  # the first run warms up
            pairs.append((found[0], found[1]))
    return pairs


def describe_case(case: Case, pairs: list[tuple[Timing, Timing]]) -> dict[str, object]:
    """Return the least times of both trees and their ratio."""
    first, second = pairs[0]
    if first.nfe != second.nfe:
        raise RuntimeError(f"{case.name}: {first.nfe} evaluations became {second.nfe}")
    is_idle = first.steps > 4 * first.nfe
    by = "step" if is_idle or case.rows > 1 else "evaluation"
    count = first.nfe if by == "evaluation" else first.steps
    old = 1e6 * min(each.seconds for each, _ in pairs) / count
    new = 1e6 * min(each.seconds for _, each in pairs) / count
    ratios = sorted(b.seconds / a.seconds for a, b in pairs)
    return {
        "case": f"{case.rows} × {case.length}, {case.name}",
        "steps": first.steps,
        "nfe": first.nfe,
        "by": by,
        "old_us": round(old, 1),
        "new_us": round(new, 1),
        "ratio": round(new / old, 3),
        "ratios": [round(ratios[0], 3), round(ratios[-1], 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="a commit, or a folder with the package")
    parser.add_argument("new", help="another one; . is the files here")
    parser.add_argument("--only", default="", help="part of a case's name, such as remask_loop")
    parser.add_argument("--rows", type=int, choices=(1, 64), help="only cases of so many rows")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in the processes that are timed
    cases = [case for case in CASES if args.only in case.name and args.rows in (None, case.rows)]
    records = []
    with tempfile.TemporaryDirectory(prefix="adlm-host-time-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        trees = [folder / "old", folder / "new"]
        copy_tree(args.old, trees[0])
        copy_tree(args.new, trees[1])
        make_model(trees[0], folder / "fixtures")
        sides = [stack.enter_context(start_sampling(tree, folder / "fixtures")) for tree in trees]
        for case in cases:
            records.append(describe_case(case, compare_case(case, sides, args.repeats)))
            print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    rows = []
    for record in records:
        spread = "–".join(map(str, record.pop("ratios")))  # type: ignore[call-overload]
        rows.append([*map(str, record.values()), spread])
    title = f"Host time of sampling, {args.old} and {args.new}"
    about = describe_machine("host_time", "cpu") | {"old": args.old, "new": args.new}
    print_report(title, COLUMNS, rows, {**about, "cases": records})


if __name__ == "__main__":
    main()
