"""Experiments: runs are planned, killed, resumed and measured with equal noise; differences, verdicts, checks."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student
from typer.testing import CliRunner

import adlm
from adlm.apps.experiments.experiment import (
    NOT_TESTABLE,
    VERDICTS,
    Experiment,
    ExperimentArm,
    ExperimentClaim,
    MeasureSettings,
    build_report,
    check_claims,
    list_runs,
    load_experiment,
    measure_run,
    recompute_claim,
    run_experiment,
    summarize,
)
from adlm.cli.main import app
from adlm.evaluate.cache import decode_array, encode_array
from adlm.evaluate.plots import draw_figures
from adlm.evaluate.results import to_json
from adlm.evaluate.stats import describe_seeds
from tests.evaluate.scorers import with_matplotlib
from tests.training.runs import data

ROOT = Path(__file__).resolve().parents[3]
TOY = ROOT / "experiments/toy.yaml"
CLAIMS = ROOT / "docs/reproduce.json"
CLAIM_KEYS = {
    "claim",
    "paper",
    "ours",
    "interval",
    "scale",
    "command",
    "gpu_hours",
    "verdict",
    "evidence",
}
SUPPORTED, NOT_SUPPORTED = VERDICTS[True], VERDICTS[False]


def record(arm: str, seed: int, nats: np.ndarray, **more: Any) -> dict[str, Any]:
    """A run on ten rows of five documents, of 4 tokens a row."""
    run = {
        "name": f"{arm}-c-{seed}",
        "arm": arm,
        "variant": "",
        "corpus": "c",
        "seed": seed,
        "rows_sha256": "x",
    }
    run["row_nats"] = encode_array(nats.astype("<f4"))
    run["row_tokens"] = encode_array(np.full(10, 4, "<u2"))
    run["documents"] = encode_array(np.arange(10) // 2)
    return run | {"curve": [[1, 3.0 + seed], [2, 2.0]]} | more


def results(differences: list[float], noise: float = 0.0, **rule: Any) -> dict[str, Any]:
    """Arm b, and arm a that much above it for each seed."""
    rng, runs = np.random.default_rng(0), []
    for seed, difference in enumerate(differences):
        rows = rng.uniform(8, 16, 10)
        runs += [
            record("a", seed, rows + 4 * difference + noise * rng.normal(size=10)),
            record("b", seed, rows),
        ]
    rules = [ExperimentClaim(text="a is better", arm="a", than="b").model_dump() | rule]
    return {"question": "?", "measure": {}, "planned_runs": len(runs), "rules": rules, "runs": runs}


def test_fifty_runs_fit_into_two_megabytes(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).uniform(100, 1500, 2048).astype("<f4")
    assert (decode_array(json.loads(json.dumps(encode_array(rows)))) == rows).all()
    counts = encode_array(np.arange(2048, dtype="<i4")), encode_array(np.full(2048, 256, "<i2"))
    assert 50 * len(json.dumps([encode_array(rows), *counts])) < 1.5e6


@pytest.mark.parametrize("count", [2, 3, 4, 10])
def test_the_interval_is_students(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    half = student.ppf(0.975, count - 1) * values.std(ddof=1) / count**0.5
    interval = [values.mean() - half, values.mean() + half]
    assert describe_seeds(values.tolist())["interval"] == pytest.approx(interval, rel=1e-4)
    assert describe_seeds([1.0]) == {"by_seed": [1.0], "mean": 1.0, "interval": None}


def test_differences_are_paired_and_their_interval_is_over_seeds() -> None:
    (pair,) = summarize(results([0.1, 0.2, 0.3]))["comparisons"]
    assert pair["by_seed"] == pytest.approx([0.1, 0.2, 0.3], abs=1e-4) and pair[
        "mean"
    ] == pytest.approx(0.2, abs=1e-4)
    assert pair["document_se"] == pytest.approx(0, abs=1e-4)  # every row differs by the same
    assert (
        0.01 < summarize(results([0.1, 0.2, 0.3], noise=1.0))["comparisons"][0]["document_se"] < 0.3
    )


@pytest.mark.parametrize(
    ("differences", "rule", "verdict"),
    [
        ([-0.1, -0.2, -0.3], {}, SUPPORTED),
        ([-0.01, -0.2, -0.6], {}, NOT_SUPPORTED),  # within 2 SD/√3
        ([*[-0.1] * 20, 0.001], {}, NOT_SUPPORTED),  # not of one sign
        ([-0.1, -0.2], {}, NOT_TESTABLE),
        ([-0.1, -0.2], {"min_seeds": 2}, SUPPORTED),
        ([-0.001, 0.001, 0.0], {"within": 0.01}, SUPPORTED),
        ([-0.001, 0.02, 0.0], {"within": 0.01}, NOT_SUPPORTED),
    ],
)
def test_a_claim_is_judged_by_its_rule(
    differences: list[float], rule: dict[str, Any], verdict: str
) -> None:
    assert summarize(results(differences, **rule))["comparisons"][0]["verdict"] == verdict


def test_a_pooled_deviation_is_that_of_all_claims() -> None:
    content = results([-0.1, -0.2, -0.3])
    loud = [record("z", seed, 12 + 3 * np.full(10, seed + 0.5) * (seed - 1)) for seed in range(3)]
    content["runs"] += loud
    content["rules"] = [
        content["rules"][0] | {"is_pooled": True},
        content["rules"][0] | {"arm": "z"},
    ]
    assert [each["verdict"] for each in summarize(content)["comparisons"]][:2] == [
        NOT_SUPPORTED,
        NOT_SUPPORTED,
    ]


def test_runs_on_different_rows_are_not_compared() -> None:
    content = results([0.1, 0.2])
    content["runs"][0]["rows_sha256"] = "y"
    with pytest.raises(ValueError, match="measured on different rows"):
        summarize(content)


def test_arms_are_compared_as_claimed_on_every_corpus_or_with_the_first_one() -> None:
    content = results([-0.1, -0.2, -0.3])
    content["runs"] += [record("z", seed, np.full(10, 12.0)) for seed in range(3)]
    content["runs"] += [each | {"corpus": "d"} for each in content["runs"][:2]]

    def compare() -> list[tuple[str, str, str | None]]:
        return [
            (each["corpus"], each["name"], each["verdict"])
            for each in summarize(content)["comparisons"]
        ]

    assert compare() == [("c", "a − b", SUPPORTED), ("d", "a − b", NOT_TESTABLE)]
    content["rules"] = []
    assert compare() == [("c", "b − a", None), ("c", "z − a", None), ("d", "b − a", None)]


def test_scouts_choose_the_value_of_the_other_seeds_and_a_diverged_one_is_not_chosen(
    tmp_path: Path,
) -> None:
    experiment, path = load_experiment(TOY), tmp_path / "results.json"
    experiment.arms["adlm"].scout["optimizer.lr"] = [1e-4, 1e-3, 1e-2]
    runs = [run for run in list_runs(experiment, path).values() if run["arm"] == "adlm"]
    assert [run["variant"] for run in runs[:3]] == [
        "optimizer.lr=0.0001",
        "optimizer.lr=0.001",
        "optimizer.lr=0.01",
    ]
    assert [run["is_waiting"] for run in runs] == [False, False, False, True]
    scouts = [record("adlm", 0, np.full(10, 4.0 * nll)) for nll in (5.0, 4.0, 3.0)]
    scouts = [
        each | {key: run[key] for key in ("name", "variant", "key")}
        for each, run in zip(scouts, runs)
    ]
    scouts[2]["error"] = "the loss is NaN"
    path.write_text(json.dumps({"runs": scouts}), "utf-8")
    chosen = list(list_runs(experiment, path).values())[-1]
    assert (chosen["variant"], chosen["seed"], chosen["is_waiting"]) == (
        "optimizer.lr=0.001",
        1,
        False,
    )
    assert chosen["config"].optimizer.lr == 1e-3
    path.write_text(
        json.dumps({"runs": [each | {"error": "the loss is NaN"} for each in scouts]}), "utf-8"
    )
    left = [run["seed"] for run in list_runs(experiment, path).values() if run["arm"] == "adlm"]
    assert left == [0, 0, 0], "another seed trains with a value that diverges"
    better = scouts[1] | {"seed": 1}
    content = results([]) | {"runs": [*scouts, better, record("mdlm", 0, np.full(10, 16.5))]}
    (pair,) = summarize(content | {"rules": []})["comparisons"]
    assert pair["name"] == "mdlm − adlm" and pair["by_seed"] == [
        0.125
    ]  # with the best of the scouts
    path.write_text(json.dumps({"runs": [*scouts, record("removed", 0, np.ones(10))]}), "utf-8")
    with pytest.raises(
        ValueError,
        match=r"1 runs are not planned, or had other settings \(removed-c-0, …\): undo the",
    ):
        list_runs(experiment, path)
    scouts[1]["key"] = "of other settings"
    path.write_text(json.dumps({"runs": scouts}), "utf-8")
    with pytest.raises(
        ValueError, match=r"1 runs .* other settings \(adlm-optimizer\.lr=0\.001-toy-0, …\)"
    ):
        list_runs(experiment, path)


def test_the_noise_does_not_depend_on_the_arm(tmp_path: Path) -> None:
    """Weights that do not move are the same model under every γ: the nats of every row must be equal bit for bit."""
    experiment = load_experiment(TOY, f"corpora.toy={data()}", "overrides.steps=2")
    arm = list_runs(experiment, tmp_path / "none")["adlm-toy-0"]["config"]
    nats = []
    for gamma in (0.0, 1.0):
        still = {"folder": str(tmp_path / str(gamma)), "device": "cpu"}
        adlm.train(
            arm.model_dump() | still,
            "optimizer.lr=1e-30",
            f"objective.anchor_weight={gamma}",
            "log.show=false",
        )
        measured = measure_run(
            still["folder"], str(data()), MeasureSettings(rows=16, draws=2), "cpu"
        )
        nats.append(measured["row_nats"])
    assert nats[0] == nats[1]
    other = measure_run(
        still["folder"], str(data()), MeasureSettings(rows=16, draws=2, seed=1), "cpu"
    )
    assert other["row_nats"] != nats[0] and other["rows_sha256"] == measured["rows_sha256"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda path: path.stem
)
def test_committed_experiments_plan_their_runs(path: Path) -> None:
    experiment = load_experiment(path)
    arms, seeds = experiment.arms.values(), experiment.corpus_seeds
    points = [seed for corpus in experiment.corpora for seed in seeds.get(corpus, experiment.seeds)]
    scouts = sum(len(values) - 1 for arm in arms for values in arm.scout.values())
    planned = sum(arm.seeds is None or seed in arm.seeds for seed in points for arm in arms)
    assert len(list_runs(experiment, Path("none"))) == planned + scouts  # every name once


def test_an_arm_may_have_fewer_seeds() -> None:
    with pytest.raises(
        ValueError, match=r"toy.yaml: an arm has the seed 7: expected some of the seeds \[0, 1\]"
    ):
        load_experiment(TOY, "arms.adlm.seeds=[1,7]")
    scout = {"seeds": [1], "scout": {"optimizer.lr": [1e-3, 2e-3]}}
    for own, names in (
        ({"seeds": [1]}, ["adlm-toy-1"]),
        ({"seeds": []}, []),
        (scout, ["adlm-toy-1"] * 2),
    ):
        experiment = load_experiment(TOY)
        arms = experiment.arms | {"adlm": experiment.arms["adlm"].replace(**own)}
        runs = list_runs(experiment.replace(arms=arms), Path("none"))
        planned = [
            f"{run['arm']}-{run['corpus']}-{run['seed']}"
            for run in runs.values()
            if run["arm"] == "adlm"
        ]
        assert planned == names and sum(run["arm"] == "mdlm" for run in runs.values()) == 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("corpus_seeds.tyo=[5]", "unknown corpus 'tyo': expected one of toy"),
        ("arms.adlm.scout.ema=[0.9]", "arm 'adlm' scouts several keys: give one"),
        ("arms.ad_lm.recipe=cpu-nano", "two runs are named ad_lm-toy-0: rename the arm 'ad_lm'"),
    ],
)
def test_wrong_settings_are_refused(change: str, problem: str, tmp_path: Path) -> None:
    arms = "arms.adlm.scout={optimizer.lr: [1e-3, 2e-3]}", "arms={ad lm: {recipe: cpu-nano}}"
    with pytest.raises(ValueError, match=problem):
        list_runs(load_experiment(TOY, "claims=[]", *arms, change), tmp_path / "none")


def test_a_corpus_may_have_seeds_of_its_own() -> None:
    runs = list_runs(
        load_experiment(TOY, "corpus_seeds.toy=[5]", "arms.adlm.seeds=[5]"), Path("none")
    )
    assert list(runs) == ["mdlm-toy-5", "adlm-toy-5"]


def test_a_dry_run_prints_runs_and_minutes(tmp_path: Path) -> None:
    answer = CliRunner().invoke(
        app, ["experiment", str(TOY), "--dry-run", "--set", "jobs=4", "--out", str(tmp_path)]
    )
    assert answer.exit_code == 0 and "adlm-toy-1" in answer.output
    assert "4 runs, 4 at once: 0.2 minutes" in answer.output  # 7 s + 60 steps × 0.04 s
    command = ["experiment", str(TOY), "--dry-run", "--json", "--out", str(tmp_path)]
    planned = json.loads(CliRunner().invoke(app, command).stdout)
    assert (
        len(planned["minutes"]) == 4
        and planned["minutes"]["adlm-toy-0"] > 0
        and planned["jobs"] == 2
    )


def test_wrong_files_are_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("question: why\narmz: {}\n", "utf-8")
    with pytest.raises(
        ValueError, match=r"x\.yaml: armz={}: unknown name; did you mean arms.*docs/reproduce\.md"
    ):
        load_experiment(path)
    path.write_text(TOY.read_text("utf-8").replace("arm: adlm", "arm: adml"), "utf-8")
    with pytest.raises(ValueError, match=r"unknown arm 'adml' \(did you mean adlm\?\)"):
        load_experiment(path)
    path.write_text("- a list\n", "utf-8")
    with pytest.raises(ValueError, match=r"x\.yaml is not an experiment"):
        load_experiment(path)
    for text in ("[]", "{}"):
        path.write_text(text, "utf-8")
        answer = CliRunner().invoke(app, ["experiment", "--check", str(path)])
        assert answer.exit_code == 2 and "has no claims" in answer.output
    answer = CliRunner().invoke(app, ["experiment"])
    assert answer.exit_code == 2 and "FILE is required" in answer.output


def test_a_claim_without_keys_or_with_unknown_evidence_is_named(tmp_path: Path) -> None:
    path, evidence = (
        tmp_path / "claims.json",
        {"file": "results.json", "kind": "experiment", "claim": "a is better"},
    )
    (tmp_path / "results.json").write_text(json.dumps(results([-0.1, -0.2])), "utf-8")
    path.write_text(json.dumps({"claims": [{"claim": "c", "evidence": evidence}]}), "utf-8")
    assert "'c', ours: stored None, computed -0.1" in check_claims(path)[0]
    for key, wrong in (("kind", "experimnt"), ("claim", "a is bettr")):
        path.write_text(
            json.dumps({"claims": [{"claim": "c", "evidence": evidence | {key: wrong}}]}), "utf-8"
        )
        with pytest.raises(ValueError, match=rf"unknown {key} of .* {wrong!r} \(did you mean"):
            check_claims(path)


def test_a_diverged_seed_has_no_mean_and_a_failed_run_says_why(tmp_path: Path) -> None:
    diverged = results([-0.1, -0.2])
    diverged["runs"][0] = {
        key: diverged["runs"][0][key] for key in ("arm", "variant", "corpus", "seed")
    } | {"error": "!"}
    (arms, _) = build_report(diverged).tables
    assert "diverged, " in str(arms.rows[0][2]) and arms.rows[0][3].interval is None  # type: ignore[union-attr]
    lines = list[str]()
    experiment = Experiment(
        question="?",
        arms={"x": ExperimentArm(model="no-such-model")},
        corpora={"c": "held-out"},
        seeds=[0],
    )
    _, failures = run_experiment(
        experiment, tmp_path / "results.json", tmp_path / "runs", on_event=lines.append
    )
    assert failures == ["x-c-0"] and "no-such-model" in lines[-1] and "log.txt" in lines[-1]


@pytest.mark.parametrize("arm", ["a", "b"])
def test_a_claim_about_an_arm_with_a_diverged_seed_is_not_supported(arm: str) -> None:
    content = results([-0.1, -0.2, -0.3, -0.2])
    assert summarize(content)["comparisons"][0]["verdict"] == SUPPORTED
    for run in content["runs"]:
        if (run["arm"], run["seed"]) == (arm, 2):
            run["error"] = "the loss is NaN"
    assert summarize(content)["comparisons"][0]["verdict"] == NOT_SUPPORTED
    report = build_report(content)
    assert (
        "diverged" in report.tables[1].format_rows()[0][2] and "differences" not in report.figures
    )
    json.dumps(to_json(report.as_dict()), allow_nan=False)


def test_a_claim_without_common_seeds_is_not_testable_here() -> None:
    content = results([-0.1, -0.2, -0.3])
    content["runs"] = [run for run in content["runs"] if (run["arm"] == "a") == (run["seed"] == 0)]
    (claim,) = summarize(content)["comparisons"]
    assert (claim["by_seed"], claim["verdict"]) == ([], NOT_TESTABLE)
    assert NOT_TESTABLE in str(build_report(content))


def test_a_run_folder_of_other_steps_or_other_data_is_not_taken(tmp_path: Path) -> None:
    def run(out: str, *changes: str) -> tuple[dict[str, Any], list[str]]:
        short = (
            "overrides.steps=1",
            "seeds=[0]",
            "measure.rows=4",
            "jobs=1",
            "claims=[]",
            f"corpora.toy={data()}",
        )
        experiment = load_experiment(TOY, *short, *changes)
        del experiment.arms["adlm"]
        return run_experiment(experiment, tmp_path / out, tmp_path / "runs")

    content, failures = run("one.json")
    assert not failures and len(content["runs"]) == 1
    with pytest.raises(
        ValueError, match="mdlm-toy-0 is a run of 1 steps, not 2: give another --runs"
    ):
        run("two.json", "overrides.steps=2")
    with pytest.raises(
        ValueError, match=r"mdlm-toy-0 had other data than .*: give that, or another --out"
    ):
        run("one.json", "seeds=[0,1]", f"corpora.toy={data('documents')}")


def test_no_process_outlives_an_error(tmp_path: Path) -> None:
    def fail(event: str) -> None:
        if len(multiprocessing.active_children()) == 1:  # at the start of the second
            raise OSError("no space left on device")

    experiment = load_experiment(TOY, f"corpora.toy={data()}", "jobs=2")
    with pytest.raises(OSError, match="no space left"):
        run_experiment(experiment, tmp_path / "results.json", tmp_path / "runs", on_event=fail)
    assert multiprocessing.active_children() == []


def accuracies(**seeds: list[int]) -> dict[str, Any]:
    """Results of ten problems for every arm: how many of them its seeds, from 0, solve."""
    runs = []
    for arm, solved in seeds.items():
        for seed, right in enumerate(solved):
            test = {"right": f"{(1 << right) - 1:x}", "problems": 10}
            runs.append({"task": "t", "arm": arm, "seed": seed, "tests": {"test": test}})
    return {"runs": runs}


def test_accuracies_are_paired_by_seed_and_need_three(tmp_path: Path) -> None:
    evidence = {
        "file": "r.json",
        "kind": "accuracy",
        "task": "t",
        "test": "test",
        "arm": "a",
        "than": "b",
    }

    def recompute(content: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "r.json").write_text(json.dumps(content), "utf-8")
        return recompute_claim(evidence, tmp_path)

    three = accuracies(a=[9, 8, 9], b=[1, 2, 1])
    own = recompute(three)
    assert own["ours"] == pytest.approx(220 / 3) and own["verdict"] == SUPPORTED
    assert own["threshold"] == pytest.approx(2 * 100 * np.std([0.9, 0.8, 0.9], ddof=1))
    assert recompute({"runs": three["runs"][::-1]}) == own, (
        "the order in the file changes the pairs"
    )
    assert recompute(accuracies(a=[9, 8], b=[1, 2]))["verdict"] == NOT_TESTABLE
    two = {"runs": [each for each in three["runs"] if (each["arm"], each["seed"]) != ("a", 1)]}
    with pytest.raises(
        ValueError, match=r"a and b have different seeds in r\.json: give both the same"
    ):
        recompute(two)
    with pytest.raises(ValueError, match=r"unknown arm of r\.json 'b'"):
        recompute(accuracies(a=[9, 8, 9]))
    (tmp_path / "r.json").write_text('{"x": 1.0}', "utf-8")
    with pytest.raises(ValueError, match="no bound, so every value would be supported"):
        recompute_claim({"file": "r.json", "kind": "value", "value": "x"}, tmp_path)


def format_claim(claim: dict[str, Any]) -> str:
    """The row of docs/reproduce.md."""
    ours, interval = claim["ours"], claim["interval"]
    text = (
        f"{ours:+.3f}" if claim["evidence"]["kind"] in ("experiment", "report") else f"{ours:.4g}"
    )
    text += f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
    if "threshold" in claim:
        text = f"{ours:+.1f} (counts above {claim['threshold']:.1f})"
    return (
        f"| {claim['claim']} | {claim['paper']} | {text.replace('-', '−')} | {claim['verdict']} |"
    )


def test_the_page_has_the_claims_of_the_file() -> None:
    page, claims = (
        CLAIMS.with_suffix(".md").read_text("utf-8"),
        json.loads(CLAIMS.read_text("utf-8"))["claims"],
    )
    rows = page.partition(
        "| claim | paper | ours (95% over seeds) | verdict |\n|---|---|---|---|\n"
    )[2].splitlines()
    assert rows == [format_claim(claim) for claim in claims]


def test_missing_data_is_reported_before_anything_starts(tmp_path: Path) -> None:
    experiment = load_experiment(TOY, f"corpora.toy={tmp_path / 'nothing'}")
    with pytest.raises((ValueError, OSError), match="nothing"):
        run_experiment(experiment, tmp_path / "results.json", tmp_path / "runs")


def test_no_run_starts_that_cannot_end_in_time(tmp_path: Path) -> None:
    experiment = load_experiment(TOY, f"corpora.toy={data()}")
    content, failures = run_experiment(
        experiment, tmp_path / "results.json", tmp_path / "runs", minutes=0.3
    )
    assert (
        content["runs"] == []
        and failures == []
        and list((tmp_path / "runs").iterdir()) == [tmp_path / "runs/.lock"]
    )


def test_the_committed_claims_follow_from_the_committed_measurements(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["experiment", "--check", str(CLAIMS)])
    assert answer.exit_code == 0, answer.output
    content = json.loads(
        CLAIMS.read_text("utf-8").replace('"file": "', f'"file": "{CLAIMS.parent}/')
    )
    altered, numbers = tmp_path / "altered.json", [claim["ours"] for claim in content["claims"]]
    for claim in content["claims"]:
        assert claim.keys() >= CLAIM_KEYS and set(claim["gpu_hours"]) == {"here", "full_scale"}
        claim["ours"] = claim["ours"] and 1.001 * claim["ours"]
    altered.write_text(json.dumps(content), "utf-8")
    expected = [
        f"{claim['claim']!r}, ours: stored "
        for claim in content["claims"]
        if claim["ours"] is not None
    ]
    for start, problem in zip(expected, check_claims(altered), strict=True):
        assert problem.startswith(start)
    for claim, number in zip(content["claims"], numbers, strict=True):
        claim["ours"] = number
    content["claims"][0]["verdict"] = NOT_TESTABLE
    altered.write_text(json.dumps(content), "utf-8")
    assert f"verdict: stored '{NOT_TESTABLE}'" in check_claims(altered)[0]
    answer = CliRunner().invoke(app, ["experiment", "--check", str(altered), "--json"])
    assert answer.exit_code == 1 and "1 values differ" in answer.output


def test_an_altered_row_is_found(tmp_path: Path) -> None:
    claim = next(
        each for each in json.loads(CLAIMS.read_text("utf-8"))["claims"] if "A2R" in each["claim"]
    )
    source = json.loads((CLAIMS.parent / claim["evidence"]["file"]).read_text("utf-8"))
    rows = source["runs"][0]["row_nats"]
    for change, problems in ((0.0, 0), (0.5, 2)):  # ours and its interval
        nats = decode_array(rows).copy()
        nats[3] += change
        rows |= encode_array(nats)
        (tmp_path / "results.json").write_text(json.dumps(source), "utf-8")
        claim["evidence"]["file"] = "results.json"
        (tmp_path / "claims.json").write_text(json.dumps({"claims": [claim]}), "utf-8")
        assert len(check_claims(tmp_path / "claims.json")) == problems


@with_matplotlib
def test_the_report_has_tables_and_plots(tmp_path: Path) -> None:
    report = build_report(results([0.1, 0.2, 0.3]))
    assert "| a − b | 0.1000, 0.2000, 0.3000 | 0.2000 (-0.0484–0.4484) |" in str(report)
    assert [path.name for path in draw_figures(report, tmp_path, ".svg")] == [
        "curves.svg",
        "differences.svg",
    ]
    assert "a − b" in (tmp_path / "differences.svg").read_text("utf-8")
    assert build_report(results([])).figures == {}


def wait_for(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_experiment_continues(tmp_path: Path) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    command = [
        sys.executable,
        "-m",
        "adlm",
        "experiment",
        str(TOY),
        "--out",
        str(out),
        "--runs",
        str(runs),
    ]
    changes = (
        f"corpora.toy={data()}",
        "overrides.steps=200",
        "overrides.valid.every=100",
        "measure.rows=32",
    )
    command += [part for change in changes for part in ("--set", change)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: (runs / "adlm-toy-1/checkpoints/latest").exists())
        process.send_signal(signal.SIGKILL)
    first = (runs / "mdlm-toy-0/measured.json").stat().st_mtime_ns
    assert len(json.loads((out / "results.json").read_text("utf-8"))["runs"]) == 2
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    path = out / "results.json"
    content = json.loads(path.read_text("utf-8"))
    names = [run["name"] for run in content["runs"]]
    assert names == ["mdlm-toy-0", "adlm-toy-0", "mdlm-toy-1", "adlm-toy-1"]
    assert (runs / "mdlm-toy-0/measured.json").stat().st_mtime_ns == first, (
        "a finished run was run again"
    )
    assert "resuming from" in (runs / "adlm-toy-1/log.txt").read_text("utf-8")
    summary = json.loads((out / "experiment.json").read_text("utf-8"))
    assert [each["verdict"] for each in summary["comparisons"]][1] == NOT_TESTABLE
    assert len({run["rows_sha256"] for run in content["runs"]}) == 1
    assert [step for step, _ in content["runs"][0]["curve"]] == [100, 200]


@pytest.mark.slow
def test_a_recipe_that_is_edited_during_an_experiment_loses_no_run(tmp_path: Path) -> None:
    recipe, path = tmp_path / "mine.yaml", tmp_path / "results.json"
    recipe.write_text("method: mdlm\n", "utf-8")
    changes = (
        f"corpora.toy={data()}",
        f"arms.mdlm.recipe={recipe}",
        "jobs=1",
        "overrides.steps=2",
        "measure.rows=4",
    )
    experiment = load_experiment(TOY, *changes)
    del experiment.arms["adlm"]

    def edit(event: str) -> None:
        if "nll" in event:
            recipe.write_text("method: mdlm\noptimizer: {clip: 0.5}\n", "utf-8")

    content, failures = run_experiment(
        experiment.replace(claims=[]), path, tmp_path / "runs", on_event=edit
    )
    assert not failures, [
        (tmp_path / "runs" / name / "log.txt").read_text("utf-8") for name in failures
    ]
    assert [run["name"] for run in content["runs"]] == ["mdlm-toy-0", "mdlm-toy-1"]
    with pytest.raises(ValueError, match="2 runs are not planned, or had other settings"):
        run_experiment(experiment.replace(claims=[]), path, tmp_path / "runs")
    assert len(json.loads(path.read_text("utf-8"))["runs"]) == 2


def test_the_defaults_of_a_claim_are_the_written_rule() -> None:
    claim = ExperimentClaim(text="", arm="", than="")
    assert (claim.min_seeds, claim.is_pooled, claim.within) == (3, False, None)
    assert Experiment(question="").seeds == [0, 1, 2]
