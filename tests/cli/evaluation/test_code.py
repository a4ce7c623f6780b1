"""`adlm eval code`: shares of programs that parse, and pass@k with permission only."""

import json
from pathlib import Path
from typing import Any

import pytest

from adlm.checkpoint import Loaded, export
from adlm.evaluate.programs import read_problems
from tests.cli.terminal import assert_told, invoke, trained
from tests.evaluate.test_programs import FILE
from tests.text.models import lm

ALLOWED = "--allow-code-execution"


def answered(*words: object) -> dict[str, Any]:
    result = invoke("eval", "code", *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def candidates(folder: Path) -> Path:
    """Every canonical solution, and a wrong one beside."""
    file = folder / "candidates.jsonl"
    rows = [
        {"task_id": each.task_id, "completion": text}
        for each in read_problems(FILE)
        for text in (each.canonical_solution, "    return None\n")
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def test_given_candidates_are_judged(tmp_path: Path) -> None:
    words = ("--problems", FILE, "--candidates", candidates(tmp_path), "--k", "1,2", ALLOWED)
    found = answered(*words)
    assert found["pass"]["pass@1"]["value"] == 0.5 and found["pass"]["pass@2"]["value"] == 1.0
    assert found["pass"]["pass@1"]["count"] == 5 and found["ends"] == {"passed": 5, "failed": 5}
    assert found["settings"]["network"] in (["alone"], ["hook"]) and len(found["settings"]["problems_sha256"]) == 64
    assert found["provenance"]["python"] and found["settings"]["model"] is None
    result = invoke("eval", "code", *words)
    assert result.exit_code == 0, result.output
    assert "pass@1" in result.stdout and "0.500" in result.stdout and "5 passed, 5 failed" in result.stderr


def test_a_model_writes_candidates() -> None:
    problems = FILE
    result = invoke("eval", "code", trained(), "--problems", problems, "--n", 2, ALLOWED, "--json")
    # Rows of 32 tokens hold none of these prompts: said, not left out.
    assert_told(result, "the prompt of own/0 has", "take a model with longer rows")


def test_short_problems_are_completed_by_a_model(tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    row = {"task_id": "s", "prompt": "def f(a):\n", "entry_point": "f", "canonical_solution": "    return a\n"}
    file.write_text(json.dumps(row | {"test": "def check(f):\n    assert f(1) == 1\n"}) + "\n", "utf-8")
    words = (trained(), "--problems", file, "--n", 2, "--k", "1,2", "--steps", 4, "--device", "cpu", ALLOWED)
    found = answered(*words)
    assert found["pass"]["pass@2"]["value"] == 0.0 and found["pass"]["pass@1"]["high"] > 0.5
    assert [each["status"] for each in found["candidates"]] == ["syntax"] * 2 or found["ends"].get("failed")
    again = answered(*words, "--batch", 1)
    assert [c["completion"] for c in again["candidates"]] == [c["completion"] for c in found["candidates"]]


def test_a_model_writes_and_fills_in(tmp_path: Path) -> None:
    model = lm("mdlm", length=128)
    folder = export(Loaded(model.model, model.tokenizer, "mdlm", 0, "wrapped"), tmp_path / "model")
    words = (folder, "--texts", 4, "--infills", 1, "--steps", 4, "--device", "cpu", "--seed", 5)
    found = answered(*words)
    assert found["written"]["parses"]["count"] == 4 and len(found["texts"]) == 4
    assert set(found["filled_in"]) == {"lines", "expression"}
    for each in found["filled_in"].values():
        assert set(each["shares"]) == {"parses", "equal", "same_tree", "parses_if_left_empty"}
        assert len(each["examples"]) == 1
    assert found["settings"]["seed"] == 5 and len(found["settings"]["sources_sha256"]) == 64
    result = invoke("eval", "code", *words)
    value = found["written"]["parsing_lines"]["value"]
    assert f"{value:.3f}" in result.stdout and "parses_if_left_empty: what the text" in result.stderr


def test_a_causal_model_fills_nothing_in_and_says_so() -> None:
    result = invoke("eval", "code", trained("ar"), "--texts", 2, "--infills", 2, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["filled_in"] is None
    assert "sees only what is before a hole" in result.stderr


def test_the_standard_library_is_written_as_data(tmp_path: Path) -> None:
    file = tmp_path / "python.jsonl"
    found = answered("--write-data", file)["written"]
    train, held = ([json.loads(line) for line in (tmp_path / each["file"]).open()] for each in found)
    assert len(train) == found[0]["files"] > 5 * len(held) and len(held) == found[1]["files"] > 10
    assert not {row["name"] for row in train} & {row["name"] for row in held}
    assert answered("--write-data", file)["written"] == found
    result = invoke("eval", "code", "--write-data", file)
    assert "PSF-2.0" in result.stderr and found[0]["sha256"][:16] in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--problems", FILE), ALLOWED),
        (("--candidates", FILE, ALLOWED), "give --problems too"),
        (("--problems", FILE, "--k", "2", ALLOWED), "pass@2 needs at least 2 candidates a problem, --n is 1"),
        (("--problems", FILE, "--k", "one", ALLOWED), "--k 'one': 'one' is not a whole number"),
        (("--problems", FILE, "--k", "0", ALLOWED), "--k is whole numbers from 1"),
        (("--problems", "nowhere.jsonl", ALLOWED), "nowhere.jsonl"),
        (("--problems", FILE, "--candidates", FILE, ALLOWED), "lacks completion"),
        (("--infills", "2000", "--texts", "0"), "held-out files fit into"),
    ],
)
def test_mistakes_are_told_in_a_line(words: tuple[object, ...], said: str) -> None:
    assert_told(invoke("eval", "code", trained(), *words, "--json"), said)
