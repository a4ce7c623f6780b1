"""The table of arms and the verdicts, from the results of runs; the rules were written down before the runs."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pydantic

from adlm.apps.reasoning.arms import ARMS
from adlm.apps.reasoning.tasks import GENERATORS
from adlm.evaluate.results import Cell, Estimate, EvalResult, Table, TableColumn
from adlm.evaluate.stats import NORMAL_975
from adlm.files import read_stored, write_atomically
from adlm.settings import Stored
from adlm.training.logging import read_metrics

RESULT = "reasoning.json"  # in a run's folder
TASK_LINE = (
    r"(?m)^reasoning:\n(?:  .*\n)*?  task: (?!null$)"  # of the config.yaml of a reasoning run
)
MIN_SEEDS = 3
MIN_DEVIATION = 0.8  # points: the sampling error of 4,000 problems
MIN_TASKS = 2  # of the generated ones, for a claim about all tasks
LEVELS = (
    "h",
    "h+1",
    "h+2",
)  # test sets of a generated task, by hops; the verdict counts at the first
BETTER, WORSE, EQUIVALENT, UNDECIDED = "better", "worse", "equivalent", "not told apart"
WORDS = {None: "no verdict", True: "yes", False: "no"}
RULE = (
    "SD: standard deviation over seeds, pooled over all arms of the task, at least 0.8 points. Better: mean difference "
    "> 2 SD. Equivalent: |difference| + 1.65 SD √(2/3) < 2 points. Else not told apart; an arm with fewer than 3 seeds "
    "has no verdict. Verdicts count at h hops, the most of training; other test sets are for information."
)


class Claim(NamedTuple):
    """A claim about a task: each of these pairs of arms must compare in one of these ways."""

    text: str
    pairs: Sequence[tuple[str, str]]
    expected: Sequence[str]


ANCHORS_HELP = Claim(
    "Anchors help",
    [("acot", other) for other in ("pause_curriculum", "acot_foreign", "acot_off_path")],
    [BETTER],
)
CLAIMS = (
    ANCHORS_HELP,
    Claim("They are a short CoT", [("short_cot", "acot")], [BETTER, EQUIVALENT]),
    Claim("Feedback helps", [("acot_feedback", "acot")], [BETTER]),
)
Accuracies = Mapping[str, Sequence[float]]  # by arm: those of its seeds, in points
Result = Mapping[str, Any]  # of a run


class RunResult(Stored):
    """The measurements of a run, reasoning.json."""

    task: str
    """The task."""
    arm: str
    """The arm."""
    seed: int
    """The seed of the run."""
    tests: dict[str, Any]
    """What was measured on each test set."""
    flops: int | float | None = None
    """Operations of the training."""
    settings: dict[str, Any]
    """The settings of the run."""

    @pydantic.field_validator("arm")
    @classmethod
    def check_arm(cls, value: str) -> str:
        """Refuse an arm that does not exist."""
        if value not in ARMS:
            raise ValueError(f"expected one of {', '.join(ARMS)}")
        return value


def pool_deviation(accuracies: Accuracies) -> float:
    """Return the standard deviation over seeds, pooled over all arms, at least MIN_DEVIATION."""
    squares = math.fsum((value - fmean(own)) ** 2 for own in accuracies.values() for value in own)
    freedom = sum(len(own) - 1 for own in accuracies.values())
    return max(MIN_DEVIATION, math.sqrt(squares / max(freedom, 1)))


def compare_arms(accuracies: Accuracies, one: str, other: str) -> dict[str, Any]:
    """Compare two arms of a task; the verdict is None where an arm has fewer than MIN_SEEDS seeds."""
    compared: dict[str, Any] = {
        "arm": one,
        "other": other,
        "difference": None,
        "sd": None,
        "verdict": None,
    }
    if one in accuracies and other in accuracies:
        difference = fmean(accuracies[one]) - fmean(accuracies[other])
        compared |= {"difference": difference, "sd": pool_deviation(accuracies)}
        if min(len(accuracies[one]), len(accuracies[other])) >= MIN_SEEDS:
            compared["verdict"] = judge_difference(difference, compared["sd"])
    return compared


def judge_difference(difference: float, deviation: float) -> str:
    """Judge the difference of two means in points."""
    if abs(difference) > 2 * deviation:
        return BETTER if difference > 0 else WORSE
    return EQUIVALENT if abs(difference) + 1.65 * deviation * math.sqrt(2 / 3) < 2 else UNDECIDED


def judge_claim(claim: Claim, accuracies: Accuracies) -> bool | None:
    """Return whether a claim holds in a task; None if one of its arms has too few seeds."""
    verdicts = [compare_arms(accuracies, *pair)["verdict"] for pair in claim.pairs]
    return None if None in verdicts else all(verdict in claim.expected for verdict in verdicts)


def judge_tasks(holds: Mapping[str, bool | None]) -> bool | None:
    """Return whether a claim holds in two of the generated tasks; None if fewer than two have a verdict."""
    judged = [holds[task] for task in GENERATORS if holds.get(task) is not None]
    return None if len(judged) < MIN_TASKS else sum(map(bool, judged)) >= MIN_TASKS


def find_results(places: Sequence[str | Path]) -> dict[str, Result]:
    """Read the results of runs and of folders of runs, by run folder, in the order of tasks, arms and seeds."""
    found: dict[str, Result] = {}
    for place in map(Path, places):
        paths = (
            [place / "config.yaml"]
            if (place / "config.yaml").is_file()
            else place.rglob("config.yaml")
        )
        folders = [
            path.parent
            for path in paths
            if re.search(TASK_LINE, path.read_text("utf-8", "replace"))
        ]
        if not folders:
            expected = "a folder that `adlm reason train` wrote, or one of such folders"
            raise FileNotFoundError(f"{place} has no reasoning run: give {expected}")
        for folder in folders:
            if not (folder / RESULT).is_file():
                raise FileNotFoundError(
                    f"{folder} has no {RESULT}: run `adlm reason eval {folder}` first"
                )
            remedy = f"run `adlm reason eval {folder}` again"
            found[str(folder)] = read_stored(folder / RESULT, RunResult, remedy).model_dump()
    keys = {
        run: (each["task"], list(ARMS).index(each["arm"]), each["seed"])
        for run, each in found.items()
    }
    results = {run: found[run] for run in sorted(found, key=lambda run: (keys[run], run))}
    for (one, first), (other, second) in pairwise(results.items()):
        if keys[one] == keys[other]:
            names = " ".join(str(first[key]) for key in ("task", "arm", "seed"))
            raise ValueError(f"{one} and {other} are both {names}: leave one of them out")
        mine, theirs = (
            {name: test["sha256"] for name, test in each["tests"].items()}
            for each in (first, second)
        )
        if first["task"] == second["task"] and mine != theirs:
            names = f"{one} and {other} have different test problems ({', '.join(mine)}; {', '.join(theirs)})"
            raise ValueError(
                f"{names}: run `adlm reason eval` with the same --tests and --data, at the same hops"
            )
    return results


def group_by(results: Iterable[Result], key: str) -> dict[str, list[Result]]:
    """Return the results by task or arm, in their order."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result[key], []).append(result)
    return groups


def list_accuracies(results: Sequence[Result], test: str) -> list[float]:
    """Return the accuracies on a test set in points."""
    return [100 * result["tests"][test]["accuracy"] for result in results]


def flatten_settings(settings: Result, prefix: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= (
            flatten_settings(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {prefix + key: value}
        )
    return flat


def tabulate(places: Sequence[str | Path], out: Path | None = None) -> EvalResult:
    """Make the table of arms and the verdicts; with `out`, write them as Markdown there."""
    results = find_results(places)
    sets: list[dict[str, Any]] = []
    tables, warnings = [], []
    for task, own in group_by(results.values(), "task").items():
        arms, tests = group_by(own, "arm"), list(own[0]["tests"])
        levels = LEVELS if task in GENERATORS else LEVELS[:1]  # by hops; later test sets have none
        for level, test in zip_longest(levels[: len(tests)], tests):
            accuracies = {arm: list_accuracies(runs, test) for arm, runs in arms.items()}
            sets.append({"task": task, "test": test, "level": level, "arms": accuracies})
        tables.append(build_table(task, arms))
        flat = [flatten_settings(result["settings"]) for result in own]
        if different := sorted(
            {key for each in flat for key in each if any(o.get(key) != each[key] for o in flat)}
        ):
            warnings.append(f"runs of {task} differ in {', '.join(different)}")
    comparisons = [
        {key: each[key] for key in ("task", "test", "level")} | compare_arms(each["arms"], *pair)
        for each in sets
        for claim in CLAIMS
        for pair in claim.pairs
        if set(pair) <= set(each["arms"])
    ]
    verdicts: list[dict[str, Any]] = []
    for claim, level in product(CLAIMS, LEVELS):
        holds = {
            each["task"]: judge_claim(claim, each["arms"])
            for each in sets
            if each["level"] == level
        }
        overall = {"holds": judge_tasks(holds)} if claim is ANCHORS_HELP else {}
        verdicts.append({"claim": claim.text, "level": level, "tasks": holds} | overall)
    tables += build_verdict_tables(comparisons, verdicts)
    metrics: dict[str, Any] = {
        "verdicts": verdicts,
        "comparisons": comparisons,
        "runs": list(results.values()),
    }
    curves: list[dict[str, Any]] = []
    for (
        folder,
        result,
    ) in results.items():  # accuracy on validation problems during training, in percent
        path = Path(folder) / "metrics.jsonl"
        records = [
            each
            for each in (read_metrics(path) if path.is_file() else [])
            if "val/accuracy" in each
        ]
        points = [(each["step"], 100 * each["val/accuracy"]) for each in records]
        curves.append({"task": result["task"], "arm": result["arm"], "points": points})
    figures = {
        "reasoning_accuracy": ("arms", {"sets": sets}),
        "reasoning_training": ("curves", {"curves": curves}),
    }
    about = {"rule": RULE}, {"runs": list(results)}
    report = EvalResult("reasoning_table", metrics, *about, tables, warnings, figures)
    if out is not None:
        metrics["files"] = ["reasoning_table.md"]
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "reasoning_table.md", f"{report}\n".encode())
    return report


def build_table(task: str, arms: Mapping[str, Sequence[Result]]) -> Table:
    """Build the table of a task from the results by arm: one row for each."""
    tests = next(iter(arms.values()))[0]["tests"]
    first = next(iter(tests))
    columns = [
        TableColumn("arm", is_text=True),
        TableColumn("seeds"),
        *(TableColumn(f"{test}, %", 1) for test in tests),
    ]
    columns += [
        TableColumn("tokens", 1),
        TableColumn("passes", 1),
        TableColumn("training FLOPs", is_text=True),
        TableColumn("parameters"),
    ]
    rows: list[list[Cell]] = []
    for arm, own in arms.items():
        cells: list[Cell] = [arm, len(own)]
        for values in (list_accuracies(own, test) for test in tests):
            span = (min(values), max(values)) if len(values) > 1 else None
            cells.append(Estimate(fmean(values), interval=span))
        cells += [
            fmean(result["tests"][first][key] for result in own) for key in ("tokens", "passes")
        ]
        flops = [result["flops"] for result in own]
        rows.append(
            [*cells, None if None in flops else f"{fmean(flops):.2e}", own[0]["parameters"]]
        )
    note = f"Accuracy: mean (range over seeds) of {tests[first]['problems']:,} problems a set."
    costs = f"Tokens written and sequential forward passes for a problem of the set {first}."
    return Table(columns, rows, f"{task}: arms", [f"{note} {costs}"])


def build_verdict_tables(comparisons: Sequence[Result], verdicts: Sequence[Result]) -> list[Table]:
    """Build the table of compared arms, and that of claims: a row for each claim and task, a column for each level."""
    names = ("task", "test", "arms", "difference", "SD", "verdict")
    columns = [TableColumn(name, 2, is_text=name not in ("difference", "SD")) for name in names]
    compared = []
    for each in comparisons:
        pair, verdict = f"{each['arm']} – {each['other']}", each["verdict"] or WORDS[None]
        compared.append([each["task"], each["test"], pair, each["difference"], each["sd"], verdict])
    cells: dict[tuple[str, str], list[Cell]] = {}
    for each in verdicts:
        overall = {"two of the generated tasks": each["holds"]} if "holds" in each else {}
        for task, value in (each["tasks"] | overall).items():
            cells.setdefault((each["claim"], task), []).append(WORDS[value])
    claims = [[*key, *row, *[None] * (len(LEVELS) - len(row))] for key, row in cells.items()]
    texts = [TableColumn(name, is_text=True) for name in ("claim", "task", *LEVELS)]
    compared_arms = Table(columns, compared, "compared arms, in points", [RULE])
    return [compared_arms, Table(texts, claims, "verdicts at h, h+1, h+2 hops")]


def estimate_accuracy(accuracy: float, problems: int) -> Estimate:
    """Return an accuracy in percent with Wilson's 95% interval, which is no point where all or none are right."""
    weight = NORMAL_975**2 / problems
    half = NORMAL_975 * math.sqrt((accuracy * (1 - accuracy) + weight / 4) / problems)
    low, high = ((accuracy + weight / 2 + side) / (1 + weight) for side in (-half, half))
    return Estimate(100 * accuracy, interval=(100 * max(0.0, low), 100 * min(1.0, high)))


def summarize_runs(results: Mapping[str, Mapping[str, Any]]) -> EvalResult:
    """Build the table of runs' results, by folder: one row for each test set."""
    names = ("run", "task", "arm", "seed", "test", "accuracy, %", "problems", "tokens", "passes")
    columns = [
        TableColumn(name, 1, is_text=name in ("run", "task", "arm", "test")) for name in names
    ]
    rows: list[list[Cell]] = []
    for folder, result in results.items():
        for sampler, tests in result.get("samplers", {"": result["tests"]}).items():
            for name, test in tests.items():
                accuracy = estimate_accuracy(test["accuracy"], test["problems"])
                start: list[Cell] = [
                    folder,
                    result["task"],
                    result["arm"],
                    result["seed"],
                    f"{name} {sampler}".strip(),
                ]
                rows.append([*start, accuracy, test["problems"], test["tokens"], test["passes"]])
    metrics = {"runs": [{"run": folder, **result} for folder, result in results.items()]}
    return EvalResult(
        "reasoning", metrics, {}, {}, [Table(columns, rows, "accuracy (95% interval)")]
    )
