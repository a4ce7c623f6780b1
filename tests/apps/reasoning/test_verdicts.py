"""The rules of the verdicts, and the table of arms from the results of runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from adlm.apps.reasoning import verdicts
from adlm.apps.reasoning.verdicts import (
    ANCHORS_HELP,
    CLAIMS,
    compare_arms,
    judge_claim,
    judge_tasks,
    pool_deviation,
)
from adlm.evaluate.plots import draw_figures
from tests.evaluate.scorers import with_matplotlib

GOOD = {"acot": (90.0, 91, 89), "pause_curriculum": (80.0, 81, 79), "acot_foreign": (70.0, 71, 69)}
GOOD |= {
    "acot_off_path": (60.0, 61, 59),
    "short_cot": (90.0, 91, 89),
    "acot_feedback": (90.5, 91.5, 89.5),
}


def write_run(
    folder: Path, task: str, arm: str, seed: int, accuracies: tuple[float, ...], **changes: Any
) -> Path:
    """Write what `adlm reason train` and `adlm reason eval` leave of a run."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"reasoning:\n  task: {task}\n", "utf-8")
    records = [{"step": step, "val/accuracy": 0.1 * step, "val/error": 0.5} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records), "utf-8"
    )
    tests = {
        f"{4 + number} hops": {
            "accuracy": value / 100,
            "problems": 4000,
            "tokens": 3.0,
            "passes": 4.0,
            "sha256": "0",
        }
        for number, value in enumerate(accuracies)
    }
    result: dict[str, Any] = {
        "task": task,
        "arm": arm,
        "seed": seed,
        "tests": tests,
        "flops": 1.5e12,
    }
    result |= {"parameters": 3000, "settings": {"steps": 4000, "optimizer": {"lr": 1e-3}}}
    (folder / "reasoning.json").write_text(json.dumps(result | changes), "utf-8")
    return folder


def test_the_deviation_is_pooled_over_arms_and_has_a_floor() -> None:
    assert pool_deviation({"a": [10, 12, 14], "b": [50, 50, 50]}) == pytest.approx(math.sqrt(8 / 4))
    assert pool_deviation({"a": [10, 12, 14], "b": [50]}) == pytest.approx(
        2.0
    )  # one seed says nothing about seeds
    assert pool_deviation({"a": [10, 10.1], "b": [50]}) == pool_deviation({"a": [10]}) == 0.8


@pytest.mark.parametrize(
    ("difference", "deviation", "verdict"),
    [
        (1.61, 0.8, "better"),
        (1.6, 0.8, "not told apart"),  # more than 2 SD, not 2 SD
        (-1.61, 0.8, "worse"),
        (0.92, 0.8, "equivalent"),  # 0.92 + 1.65 · 0.8 · 0.8165 = 1.998
        (-0.93, 0.8, "not told apart"),  # 2.008
        (0.0, 1.48, "equivalent"),
        (0.0, 1.49, "not told apart"),
        (3.1, 1.5, "better"),
    ],
)
def test_differences_are_judged_by_the_rule(
    difference: float, deviation: float, verdict: str
) -> None:
    assert verdicts.judge_difference(difference, deviation) == verdict


@pytest.mark.parametrize(
    ("right", "text"), [(0, "0.0 (0.0–7.1)"), (50, "100.0 (92.9–100.0)"), (7, "14.0 (7.0–26.2)")]
)
def test_an_accuracy_has_an_interval_even_where_all_or_none_are_right(
    right: int, text: str
) -> None:
    tests = {
        "2 hops": {
            "accuracy": right / 50,
            "stderr": 0.0,
            "problems": 50,
            "tokens": 1.0,
            "passes": 1.0,
        }
    }
    result = verdicts.summarize_runs(
        {"run": {"task": "arithmetic", "arm": "cot", "seed": 0, "tests": tests}}
    )
    (row,) = result.tables[0].format_rows()
    assert row[5] == text
    assert result["runs"][0]["tests"] == tests
    theirs = binomtest(right, 50).proportion_ci(method="wilson")
    assert verdicts.estimate_accuracy(right / 50, 50).interval == pytest.approx(
        (100 * theirs.low, 100 * theirs.high)
    )


def test_fewer_than_three_seeds_have_no_verdict() -> None:
    few = {"acot": [90.0, 90, 90], "cot": [10.0, 10]}
    compared = compare_arms(few, "acot", "cot")
    assert compared["difference"] == 80 and compared["verdict"] is None
    assert compare_arms(few, "acot", "icot") == {
        "arm": "acot", "other": "icot", "difference": None, "sd": None, "verdict": None
    }  # fmt: skip


def test_claims_follow_from_the_pairs() -> None:
    assert [judge_claim(claim, GOOD) for claim in CLAIMS] == [True, True, False]
    assert (
        judge_claim(ANCHORS_HELP, GOOD | {"acot_off_path": (89.0, 90, 91)}) is False
    )  # each control counts
    assert (
        judge_claim(ANCHORS_HELP, {arm: own for arm, own in GOOD.items() if arm != "acot_foreign"})
        is None
    )
    short, feedback = CLAIMS[1:]
    assert (
        judge_claim(short, GOOD | {"short_cot": (95.0, 96, 94)}) is True
    )  # better counts like equivalent
    assert judge_claim(short, GOOD | {"short_cot": (85.0, 86, 84)}) is False
    assert judge_claim(feedback, GOOD | {"acot_feedback": (95.0, 96, 94)}) is True


def test_anchors_help_in_two_of_three_tasks() -> None:
    assert judge_tasks({"arithmetic": True}) is None
    assert judge_tasks({"arithmetic": True, "graphs": None}) is None
    assert judge_tasks({"arithmetic": True, "graphs": False}) is False
    assert judge_tasks({"arithmetic": True, "graphs": False, "chains": True}) is True
    assert judge_tasks({"arithmetic": True, "gsm8k": True}) is None  # only generated tasks count


@with_matplotlib
def test_the_table_of_a_folder_of_runs(tmp_path: Path) -> None:
    for task in ("arithmetic", "graphs"):
        for arm, values in GOOD.items():
            for seed, value in enumerate(values):
                write_run(
                    tmp_path / "runs" / f"{task}-{arm}-{seed}",
                    task,
                    arm,
                    seed,
                    (value, value - 10, 50.0),
                )
    result = verdicts.tabulate([tmp_path / "runs"], tmp_path / "out")
    arithmetic = result.tables[0]
    rows = {row[0]: row for row in arithmetic.format_rows()}
    assert list(rows) == [
        "short_cot",
        "pause_curriculum",
        "acot",
        "acot_feedback",
        "acot_foreign",
        "acot_off_path",
    ]
    assert rows["acot"][1:5] == ["3", "90.0 (89.0–91.0)", "80.0 (79.0–81.0)", "50.0 (50.0–50.0)"]
    assert rows["acot"][5:] == ["3.0", "4.0", "1.50e+12", "3,000"]
    by_claim = {(each["claim"], each["level"]): each for each in result["verdicts"]}
    assert by_claim["Anchors help", "h"] == {
        "claim": "Anchors help", "level": "h", "tasks": {"arithmetic": True, "graphs": True}, "holds": True
    }  # fmt: skip
    assert (
        by_claim["Anchors help", "h+1"]["holds"] is True
        and by_claim["Anchors help", "h+2"]["holds"] is False
    )
    assert by_claim["They are a short CoT", "h"]["tasks"] == {"arithmetic": True, "graphs": True}
    assert by_claim["Feedback helps", "h"]["tasks"] == {"arithmetic": False, "graphs": False}
    page = (tmp_path / "out" / "reasoning_table.md").read_text("utf-8")
    assert (
        "| acot | 3 | 90.0 (89.0–91.0) |" in page
        and "| Anchors help | two of the generated tasks | yes |" in page
    )
    assert verdicts.RULE in page and not result.warnings
    plots = draw_figures(result, tmp_path / "out")
    assert [path.name for path in plots] == ["reasoning_accuracy.png", "reasoning_training.png"]
    assert all(path.stat().st_size > 5000 for path in plots)
    assert result.figures["reasoning_training"][1]["curves"][0]["points"] == [(1, 10.0), (2, 20.0)]


def test_runs_that_do_not_belong_together(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", "arithmetic", "cot", 0, (90.0,))
    again = write_run(tmp_path / "again", "arithmetic", "cot", 0, (90.0,))
    other = write_run(tmp_path / "other", "arithmetic", "cot", 1, (90.0, 80.0))
    longer = write_run(
        tmp_path / "longer", "arithmetic", "acot", 0, (90.0,), settings={"steps": 8000}
    )
    broken = write_run(tmp_path / "broken", "arithmetic", "cot", 2, (90.0,))
    (broken / "reasoning.json").write_text('{"task": "arithmetic"}', "utf-8")
    bare = write_run(tmp_path / "bare", "arithmetic", "cot", 3, (90.0,))
    (bare / "reasoning.json").unlink()
    (tmp_path / "empty").mkdir()
    cases = {
        (one, again): "are both arithmetic cot 0: leave one of them out",
        (one, other): "different test problems (4 hops; 4 hops, 5 hops)",
        (broken,): f"run `adlm reason eval {broken}` again",
        (bare,): f"run `adlm reason eval {bare}` first",
        (tmp_path / "empty",): "has no reasoning run: give a folder that `adlm reason train` wrote",
    }
    for runs, message in cases.items():
        with pytest.raises((ValueError, OSError)) as error:
            verdicts.tabulate(runs)
        assert message in str(error.value)
    assert verdicts.tabulate([one, longer]).warnings == [
        "runs of arithmetic differ in optimizer.lr, steps"
    ]
