"""The table of arms and the verdicts, from the results of runs; the rules were written down before the runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adlm.data.tokenizers import read_json
from adlm.evaluate.results import Cell, Column, Estimate, EvalResult, Table, render_markdown
from adlm.methods import look_up
from adlm.reasoning.arms import ARMS
from adlm.reasoning.tasks import GENERATORS
from adlm.training.logging import read_metrics

RESULT = "reasoning.json"  # in a run's folder
MIN_SEEDS = 3
MIN_DEVIATION = 0.8  # points: the sampling error of 4,000 problems
ALL_TASKS = "two of the generated tasks"
MIN_TASKS = 2  # of the generated ones, for a claim about all tasks
LEVELS = ("h", "h+1", "h+2")  # test sets of a generated task, by hops; the verdict counts at the first
BETTER, WORSE, EQUIVALENT, UNDECIDED = "better", "worse", "equivalent", "not told apart"
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
    "Anchors help", [("acot", other) for other in ("pause_curriculum", "acot_foreign", "acot_off_path")], [BETTER]
)
CLAIMS = (
    ANCHORS_HELP,
    Claim("They are a short CoT", [("short_cot", "acot")], [BETTER, EQUIVALENT]),
    Claim("Feedback helps", [("acot_feedback", "acot")], [BETTER]),
)
Accuracies = Mapping[str, Sequence[float]]  # by arm: those of its seeds, in points


def pool_deviation(accuracies: Accuracies) -> float:
    """Return the standard deviation over seeds, pooled over all arms, at least MIN_DEVIATION."""
    means = {arm: math.fsum(own) / len(own) for arm, own in accuracies.items()}
    squares = math.fsum((value - means[arm]) ** 2 for arm, own in accuracies.items() for value in own)
    freedom = sum(len(own) - 1 for own in accuracies.values())
    return max(MIN_DEVIATION, math.sqrt(squares / freedom) if freedom else 0.0)


def compare_arms(accuracies: Accuracies, one: str, other: str) -> dict[str, Any]:
    """Compare two arms of a task; the verdict is None where an arm has fewer than MIN_SEEDS seeds."""
    pair = [accuracies.get(arm, ()) for arm in (one, other)]
    compared: dict[str, Any] = {"arm": one, "other": other, "difference": None, "sd": None, "verdict": None}
    if all(pair):
        means = [math.fsum(own) / len(own) for own in pair]
        difference, deviation = means[0] - means[1], pool_deviation(accuracies)
        compared |= {"difference": difference, "sd": deviation}
        if min(map(len, pair)) >= MIN_SEEDS:
            compared["verdict"] = judge_difference(difference, deviation)
    return compared


def judge_difference(difference: float, deviation: float) -> str:
    """Judge the difference of two means in points."""
    if abs(difference) > 2 * deviation:
        return BETTER if difference > 0 else WORSE
    is_equivalent = abs(difference) + 1.65 * deviation * math.sqrt(2 / 3) < 2
    return EQUIVALENT if is_equivalent else UNDECIDED


def judge_claim(claim: Claim, accuracies: Accuracies) -> bool | None:
    """Return whether a claim holds in a task; None if one of its arms has too few seeds."""
    verdicts = [compare_arms(accuracies, *pair)["verdict"] for pair in claim.pairs]
    return None if None in verdicts else all(verdict in claim.expected for verdict in verdicts)


def judge_tasks(holds: Mapping[str, bool | None]) -> bool | None:
    """Return whether a claim holds in two of the generated tasks; None if fewer than two have a verdict."""
    judged = [holds[task] for task in GENERATORS if holds.get(task) is not None]
    return None if len(judged) < MIN_TASKS else sum(map(bool, judged)) >= MIN_TASKS


# Results of runs.


def find_results(places: Sequence[str | Path]) -> dict[str, dict[str, Any]]:
    """Read the results of runs and of folders of runs, by run folder."""
    results: dict[str, dict[str, Any]] = {}
    for place in map(Path, places):
        folders = [place] if (place / "config.yaml").is_file() else [p.parent for p in place.rglob("config.yaml")]
        if not folders:
            raise FileNotFoundError(f"{place} has no run: give a folder that `adlm reason train` wrote, or one of runs")
        for folder in sorted(folders):
            if not (folder / RESULT).is_file():
                raise FileNotFoundError(f"{folder} has no {RESULT}: run `adlm reason eval {folder}` first")
            result = read_json(folder / RESULT)
            if not isinstance(result, dict) or missing_keys(result):
                raise ValueError(f"{folder / RESULT} is no result of a run: run `adlm reason eval {folder}` again")
            look_up(ARMS, result["arm"], "arm")
            results[str(folder)] = result
    check_results(results)
    order = list(ARMS)
    return dict(
        sorted(results.items(), key=lambda each: (each[1]["task"], order.index(each[1]["arm"]), each[1]["seed"]))
    )


def missing_keys(result: Mapping[str, Any]) -> set[str]:
    """Return the keys of a result that the table needs and that are not there."""
    return {"task", "arm", "seed", "tests", "flops", "parameters", "settings"} - set(result)


def check_results(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError if a seed of an arm is there twice, or if the runs of a task have different tests."""
    runs: dict[Any, str] = {}
    for folder, result in results.items():
        key = result["task"], result["arm"], result["seed"]
        if other := runs.get(key):
            raise ValueError(f"{other} and {folder} are both {' '.join(map(str, key))}: leave one of them out")
        runs[key] = folder
        first = next(name for name, each in results.items() if each["task"] == result["task"])
        tests, others = (
            {name: test["sha256"] for name, test in results[run]["tests"].items()} for run in (folder, first)
        )
        if tests != others:
            raise ValueError(
                f"{first} and {folder} have different test problems ({', '.join(others)}; {', '.join(tests)}): run "
                "`adlm reason eval` with the same --tests and --data on runs with the same reasoning.hops"
            )


def group_accuracies(results: Sequence[Mapping[str, Any]], test: str) -> dict[str, list[float]]:
    """Return the accuracies of a task on a test set in points, by arm."""
    arms = [arm for arm in ARMS if arm in {result["arm"] for result in results}]
    return {arm: [100 * r["tests"][test]["accuracy"] for r in results if r["arm"] == arm] for arm in arms}


def list_differences(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the settings in which runs of a task differ."""
    flat = [flatten_settings(result["settings"]) for result in results]
    return sorted({key for own in flat for key in own if any(each.get(key) != own[key] for each in flat)})


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flatten_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


# The table.


def tabulate(places: Sequence[str | Path], out: Path | None = None) -> EvalResult:
    """Make the table of arms and the verdicts; with `out`, write them as Markdown there."""
    results = find_results(places)
    by_task: dict[str, list[dict[str, Any]]] = {}
    for result in results.values():
        by_task.setdefault(result["task"], []).append(result)
    tables, comparisons, warnings = [], [], []
    for task, own in by_task.items():
        tables.append(build_table(task, own))
        for level, test in zip(LEVELS if task in GENERATORS else own[0]["tests"], own[0]["tests"]):
            accuracies = group_accuracies(own, test)
            pairs = [
                pair for claim in CLAIMS for pair in claim.pairs if pair[0] in accuracies and pair[1] in accuracies
            ]
            place = {"task": task, "test": test, "level": level}
            comparisons += [place | compare_arms(accuracies, *pair) for pair in pairs]
        if differences := list_differences(own):
            warnings.append(f"runs of {task} differ in {', '.join(differences)}")
    verdicts = judge_claims(by_task)
    tables += build_verdict_tables(comparisons, verdicts)
    curves = [
        {"task": result["task"], "arm": result["arm"], "seed": result["seed"], "points": read_accuracy(Path(folder))}
        for folder, result in results.items()
    ]
    bars = [
        {"task": task, "test": test, "arms": group_accuracies(own, test)}
        for task, own in by_task.items()
        for test in own[0]["tests"]
    ]
    metrics: dict[str, Any] = {"verdicts": verdicts, "comparisons": comparisons, "runs": list(results.values())}
    if out is not None:
        metrics["files"] = ["reasoning_table.md"]
        text = "\n\n".join(
            part for table in tables for part in (f"**{table.title}**", render_markdown(table), *table.notes)
        )
        out.mkdir(parents=True, exist_ok=True)
        (out / "reasoning_table.md").write_text(text + "\n", "utf-8")
    provenance = {"runs": list(results)}
    figures = {"reasoning_accuracy": ("arms", {"sets": bars}), "reasoning_training": ("accuracy", {"curves": curves})}
    return EvalResult("reasoning_table", metrics, {"rule": RULE}, provenance, tables, warnings, figures)


def judge_claims(by_task: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Judge all claims in every task at its first test set, and at the levels above; anchors over all tasks, too."""
    verdicts: list[dict[str, Any]] = []
    for claim in CLAIMS:
        for number, level in enumerate(LEVELS):
            holds: dict[str, bool | None] = {}
            for task, results in by_task.items():
                tests = list(results[0]["tests"])
                if number < len(tests) and (task in GENERATORS or number == 0):
                    holds[task] = judge_claim(claim, group_accuracies(results, tests[number]))
            overall = {"holds": judge_tasks(holds)} if claim is ANCHORS_HELP else {}
            verdicts.append({"claim": claim.text, "level": level, "tasks": holds} | overall)
    return verdicts


def build_table(task: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """Build the table of a task: one row for each arm, in the order of ARMS."""
    tests = list(results[0]["tests"])
    columns = [Column("arm", is_text=True), Column("seeds"), *(Column(f"{test}, %", 1) for test in tests)]
    columns += [Column("tokens", 1), Column("passes", 1), Column("training FLOPs", is_text=True), Column("parameters")]
    rows: list[list[Cell]] = []
    accuracies = {test: group_accuracies(results, test) for test in tests}
    for arm in accuracies[tests[0]]:
        own = [result for result in results if result["arm"] == arm]

        costs = {key: math.fsum(r["tests"][tests[0]][key] for r in own) / len(own) for key in ("tokens", "passes")}
        flops = math.fsum(result["flops"] for result in own) / len(own)
        cells: list[Cell] = [arm, len(own)]
        for test in tests:
            values = accuracies[test][arm]
            span = (min(values), max(values)) if len(values) > 1 else None
            cells.append(Estimate(math.fsum(values) / len(values), interval=span))
        rows.append([*cells, costs["tokens"], costs["passes"], f"{flops:.2e}", own[0]["parameters"]])
    notes = (
        f"Accuracy: mean (range over seeds) of {results[0]['tests'][tests[0]]['problems']:,} problems a set. Tokens "
        f"written and sequential forward passes for a problem of the set {tests[0]}.",
    )
    return Table(columns, rows, f"{task}: arms", notes)


def build_verdict_tables(
    comparisons: Sequence[Mapping[str, Any]], verdicts: Sequence[Mapping[str, Any]]
) -> list[Table]:
    """Build the tables of compared arms and of claims."""
    words = {None: "no verdict", True: "yes", False: "no"}
    pairs = [
        [c["task"], c["test"], f"{c['arm']} – {c['other']}", c["difference"], c["sd"], c["verdict"] or words[None]]
        for c in comparisons
    ]
    names = ("task", "test", "arms", "difference", "SD", "verdict")
    columns = [Column(name, 2, is_text=name not in ("difference", "SD")) for name in names]
    cells: dict[tuple[str, str], list[Cell]] = {}
    for each in verdicts:
        holds = each["tasks"] | ({ALL_TASKS: each["holds"]} if "holds" in each else {})
        for task, value in holds.items():
            cells.setdefault((each["claim"], task), []).append(words[value])
    rows = [[*key, *row, *[None] * (len(LEVELS) - len(row))] for key, row in cells.items()]
    heads = [Column(name, is_text=True) for name in ("claim", "task", *LEVELS)]
    return [
        Table(columns, pairs, "compared arms, in points", [RULE]),
        Table(heads, rows, "verdicts at h, h+1, h+2 hops"),
    ]


def read_accuracy(folder: Path) -> list[tuple[int, float]]:
    """Read a run's accuracy on validation problems during training."""
    path = folder / "metrics.jsonl"
    records = read_metrics(path) if path.is_file() else []
    return [(record["step"], record["val/accuracy"]) for record in records if "val/accuracy" in record]
