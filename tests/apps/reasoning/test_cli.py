"""`adlm reason` end to end; a user's mistake is one message."""

import html
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adlm.apps.reasoning import cli as reason
from adlm.apps.reasoning.arms import ARMS, Arm, Curriculum, ReasoningObjective
from adlm.apps.reasoning.datasets import DATASETS
from adlm.apps.reasoning.runs import count_stages, count_training_flops, draw_graph, load_run
from adlm.apps.reasoning.tasks import GENERATORS
from adlm.config import load_config
from adlm.view.look import COLORS
from tests.cli.terminal import answer_json, assert_error, invoke, trained
from tests.evaluate.scorers import with_matplotlib
from tests.training.runs import ROOT

EXCERPTS = ROOT / "tests/apps/reasoning/excerpts"
TINY = [
    "steps=2",
    "batch=4",
    "model.dim=32",
    "model.heads=2",
    "model.denoiser_layers=1",
    "reasoning.hops=2",
]
TINY += [
    "reasoning.tests=9",
    "reasoning.stage_steps=1",
    "valid.rows=4",
    "device=cpu",
    "log.show=false",
]
QUESTION = "b = a - 9 | a = 13 + 4 ? b"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny runs: two arms of arithmetic, one of graphs, evaluated."""
    folder = tmp_path_factory.mktemp("runs")
    for task, arm in [("arithmetic", "acot_feedback"), ("arithmetic", "cot"), ("graphs", "acot")]:
        result = invoke("reason", "train", task, arm, *TINY, "--out", folder / f"{task}-{arm}")
        assert result.exit_code == 0, result.output
    assert invoke("reason", "eval", *folder.iterdir(), "--device", "cpu").exit_code == 0
    return folder


def test_the_help_names_all_tasks_and_arms() -> None:
    assert set(reason.TASKS) == {*GENERATORS, *DATASETS, "sudoku"}
    assert set(ARMS) <= set(re.findall(r"\w+", reason.ARM_HELP))


def test_a_run_is_evaluated_into_its_folder(runs: Path) -> None:
    folder = runs / "arithmetic-cot"
    answer = answer_json("reason", "eval", folder, "--tests", 5, "--device", "cpu")["runs"][0]
    saved = json.loads((folder / "reasoning.json").read_text("utf-8"))
    assert answer == {"run": str(folder)} | saved
    assert (saved["task"], saved["arm"], saved["seed"], saved["settings"]["step"]) == (
        "arithmetic",
        "cot",
        0,
        2,
    )
    assert list(saved["tests"]) == ["2 hops", "3 hops", "4 hops"]
    for test in saved["tests"].values():
        right = np.unpackbits(np.frombuffer(bytes.fromhex(test["right"]), np.uint8))[:5]
        assert test["problems"] == 5 and right.mean() == test["accuracy"]
        assert test["stderr"] == pytest.approx(
            np.sqrt(test["accuracy"] * (1 - test["accuracy"]) / 5)
        )
        assert "→" in test["example"]
    assert (
        saved["flops"] > 0 and saved["parameters"] > 0 and saved["provenance"]["versions"]["torch"]
    )
    assert (
        invoke("reason", "eval", folder, "--device", "cpu").exit_code == 0
    )  # as the recipe, for other tests
    assert (
        json.loads((folder / "reasoning.json").read_text("utf-8"))["tests"]["2 hops"]["problems"]
        == 9
    )


def test_published_problems_are_a_second_test(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "prosqa").mkdir()
    shutil.copy(EXCERPTS / "text_prosqa.json", tmp_path / "prosqa" / "prosqa_test.json")
    copy = shutil.copytree(runs / "graphs-acot", tmp_path / "run")
    answer = answer_json(
        "reason", "eval", copy, "--data", tmp_path, "--tests", 2, "--device", "cpu"
    )["runs"][0]
    assert list(answer["tests"]) == ["2 hops", "3 hops", "4 hops", "prosqa"]
    assert answer["tests"]["prosqa"]["problems"] == 2


def test_flops_follow_the_curriculum_and_the_passes(runs: Path) -> None:
    assert count_stages(Curriculum(2, 10, 0.0), 25).tolist() == [10, 10, 5]
    assert count_stages(Curriculum(2, 10, 0.3), 25).tolist() == pytest.approx(
        [10 + 2, 10 - 1.5 + 0.5 - 0.0, 5 - 1.0]
    )
    assert count_stages(Curriculum(4, 10, 0.1), 5).tolist() == [5, 0, 0, 0, 0]
    fed, cot = (load_run(runs / f"arithmetic-{arm}") for arm in ("acot_feedback", "cot"))
    per_token = count_training_flops(cot) / (2 * 4)
    items = cot.task.draw(0, 1, 256)
    mean = np.mean([len(cot.objective.lay_out(item).tokens) - 1 for item in items])
    assert per_token / mean == pytest.approx(
        3 * (2 * 12 * 32**2 + 2 * 141 * 32 + 2 * mean * 32), rel=0.05
    )
    assert count_training_flops(fed) > 1.2 * count_training_flops(cot)  # each slot is one pass more

    def count(arm: Arm) -> float:
        assert isinstance(fed.objective, ReasoningObjective)
        return count_training_flops(replace(fed, objective=replace(fed.objective, arm=arm)))

    teacher = count(ARMS["codi"]) - count(replace(ARMS["codi"], auxiliary=None))
    assert teacher == pytest.approx(count(ARMS["cot"]), rel=0.01)
    decoder = count(ARMS["simcot"]) - count(ARMS["coconut"])
    assert 0 < decoder < 0.1 * count(ARMS["coconut"])


def test_ask_prints_slots_text_and_answer(runs: Path) -> None:
    reply = answer_json(
        "reason", "ask", runs / "arithmetic-acot_feedback", QUESTION, "--device", "cpu"
    )
    assert (
        reply["question"] == QUESTION
        and len(reply["slots"]) == 2
        and isinstance(reply["text"], str)
    )
    shown = invoke(
        "reason", "ask", runs / "arithmetic-acot_feedback", QUESTION, "--device", "cpu"
    ).stdout
    assert [line.split(":")[0] for line in shown.splitlines()] == ["slots", "writes", "answer"]
    assert answer_json("reason", "ask", runs / "arithmetic-cot", QUESTION)["slots"] is None


@with_matplotlib
def test_a_graph_is_drawn_with_its_path_the_guesses_and_the_answer(
    runs: Path, tmp_path: Path
) -> None:
    question, file = "3 5 | 0 3 | 5 7 | 4 6 ? 0 6 7", tmp_path / "graph.svg"
    reply = answer_json(
        "reason", "ask", runs / "graphs-acot", question, "--plot", file, "--device", "cpu"
    )
    text = html.unescape(file.read_text("utf-8"))
    assert (
        f"from 0: 6 or 7?  slots: {' '.join(reply['slots'])}  answer: {reply['answer'] or 'none'}"
        in text
    )
    draw_graph(question, "slot", ["3", "4", "9"], "7", file)  # right, wrong, not in the graph
    text = file.read_text("utf-8")
    assert [text.count(f">{each}</text>") for each in ("slot 1", "slot 2", "slot 3", "answer")] == [
        1,
        1,
        0,
        1,
    ]
    right, wrong, path = COLORS[2].lower(), COLORS[1].lower(), COLORS[0].lower()
    assert text.count(f"fill: {right}") == text.count(f"fill: {wrong}") == 1
    assert (
        text.count(f"stroke: {path}; stroke-width: 2.5") == 3 * 2
    )  # the edges of the path: a line and its tip
    words = ["reason", "ask", runs / "arithmetic-cot", QUESTION, "--plot", file]
    assert_error(invoke(*words), "takes a question of graphs such as '3 5 | 0 3 ? 0 5 4'")


@with_matplotlib
def test_the_table_prints_and_writes(runs: Path, tmp_path: Path) -> None:
    result = invoke("reason", "table", runs, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (
        "acot_feedback" in result.stdout
        and "no verdict" in result.stdout
        and "Equivalent:" in result.stdout
    )
    names = {
        "reasoning_table.json",
        "reasoning_table.md",
        "reasoning_accuracy.png",
        "reasoning_training.png",
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    answer = answer_json("reason", "table", runs / "arithmetic-cot", runs / "graphs-acot")
    assert [run["arm"] for run in answer["runs"]] == ["cot", "acot"]
    assert all(verdict.get("holds") is None for verdict in answer["verdicts"])


def test_the_table_skips_what_is_no_reasoning_run(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "arithmetic-cot", tmp_path / "cot")
    for name, text in {
        "other": "[",
        "text": (Path(trained()) / "config.yaml").read_text("utf-8"),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text, "utf-8")
    assert [run["arm"] for run in answer_json("reason", "table", tmp_path)["runs"]] == ["cot"]
    (tmp_path / "cot" / "reasoning.json").unlink()
    assert_error(
        invoke("reason", "table", tmp_path), f"run `adlm reason eval {tmp_path / 'cot'}` first"
    )


def test_quick_tests_itself_and_shows_a_solution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("reason-quick", "reasoning.task=arithmetic", "folder=run")
    assert (config.reasoning.hops, config.model.dim, config.model.denoiser_layers) == (2, 64, 2)
    monkeypatch.chdir(tmp_path)
    small = [
        "steps=3",
        "batch=4",
        "valid.rows=4",
        "reasoning.tests=6",
        "log.show=false",
        "device=cpu",
    ]
    result = invoke("reason", "train", "arithmetic", "acot", *small, "--quick")
    assert result.exit_code == 0, result.output
    assert "2 hops" in result.stdout and re.search(
        r"^example: .+ → .+\((right|wrong)", result.stdout, re.MULTILINE
    )
    assert (tmp_path / "arithmetic-acot-quick" / "reasoning.json").is_file()
    answer = answer_json(
        "reason", "train", "arithmetic", "acot", *small, "--quick"
    )  # resumes: nothing is left to do
    assert answer["step"] == 3 and list(answer["tests"]) == ["2 hops", "3 hops", "4 hops"]


@pytest.mark.slow
def test_quick_learns_arithmetic(tmp_path: Path) -> None:
    """1,000 of its 1,800 steps, after which 25% are right; chance is 1%."""
    short = "steps=1000", "reasoning.stage_steps=140", "valid.every=1000", "device=cpu"
    answer = answer_json(
        "reason", "train", "arithmetic", "acot", *short, "--quick", "--out", tmp_path
    )
    assert answer["tests"]["2 hops"]["accuracy"] >= 0.1


def test_a_stop_signal_has_the_exit_code_of_adlm_train(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "adlm",
        "reason",
        "train",
        "arithmetic",
        "cot",
        f"folder={tmp_path / 'run'}",
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        status, mask = Path(f"/proc/{process.pid}/status"), 1 << signal.SIGTERM - 1
        while not int(status.read_text("utf-8").split("SigCgt:")[1].split()[0], 16) & mask:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert (
            process.communicate(timeout=60)[1]
            == "stopped; the same command starts or resumes the run\n"
        )
    assert process.returncode == 75


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["arithmetik", "acot"],
            "unknown task 'arithmetik' (did you mean arithmetic?): expected one of arithmetic",
        ),
        (["arithmetic", "acott"], "unknown arm 'acott' (did you mean acot"),
        (
            ["arithmetic", "acot", "reasoning.hops=25"],
            "reasoning.hops=25 is out of range for arithmetic: give 1 to 24",
        ),
        (["gsm8k", "cot"], "reasoning.path is required for gsm8k: the folder with its files"),
        (["gsm8k", "cot", "reasoning.path=nowhere"], "no file or folder 'nowhere'"),
        (["arithmetic", "acot", "reasoning.hop=2"], "did you mean reasoning.hops"),
        (
            ["arithmetic", "acot", "--quick", "--recipe", "reason"],
            "leave out --recipe reason, or --quick",
        ),
        (["arithmetic", "acot", "--recipe", "nothing"], "nothing"),
    ],
)
def test_a_wrong_training_is_one_message(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_error(invoke("reason", "train", *words), message)
    assert not list(tmp_path.iterdir())


def test_a_line_without_a_field_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?"}\n', "utf-8")
    words = ["gsm8k", "cot", f"reasoning.path={tmp_path}", "--out", tmp_path / "run"]
    assert_error(
        invoke("reason", "train", *words), "train.jsonl, line 1", "has no answer, expected a text"
    )


def test_wrong_questions_and_runs_are_one_message(runs: Path, tmp_path: Path) -> None:
    run, graphs = runs / "arithmetic-cot", runs / "graphs-acot"
    long = " | ".join(["a = 1 + 1"] * 40)
    cases = {
        ("ask", run, "x = 5 / 2 ? x"): "'/' is no word of arithmetic: ask as in '",
        ("ask", run, "x=5+2?x"): ", with spaces between words",
        (
            "ask",
            run,
            "x = 5 + 2 ? z",
        ): "'z' is not assigned in 'x = 5 + 2 ? z': assign every variable",
        ("ask", run, "x = y + 2 ? x"): "'y' is not assigned",
        ("ask", run, "x = 5 + 2 ? 7"): "'7' is not assigned",
        ("ask", run, "x = 5 + 2"): "'x = 5 + 2' is no question of arithmetic: ask as in '",
        ("ask", run, "x = 5 + 2 ? ? x"): "'x = 5 + 2 ? ? x' is no question of arithmetic",
        ("ask", run, f"{long} ? a"): "the model 160: shorten the question",
        ("ask", run, " "): "the question is empty",
        (
            "ask",
            tmp_path,
            QUESTION,
        ): "has no config.yaml: give a folder that `adlm reason train` wrote",
        ("ask", trained(), QUESTION): "was trained on text, not on a reasoning task",
        ("eval", trained()): "was trained on text",
        ("eval", run, "--data", tmp_path): "arithmetic has no published problems",
        ("eval", graphs, "--data", tmp_path): "prosqa has no split 'test'",
        ("eval", run, "--device", "gpu"): "device 'gpu' is not one of auto, cpu",
        ("table", tmp_path): "has no reasoning run",
        ("table", trained()): "has no reasoning run: give a folder that `adlm reason train` wrote",
        ("table", run, run / "config.yaml"): "has no reasoning run",
        ("table", runs, "--out", run / "config.yaml"): "is a file",
    }
    for words, message in cases.items():
        assert_error(invoke("reason", *words), message)
