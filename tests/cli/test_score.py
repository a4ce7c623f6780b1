"""`adlm score`: the API's values, in a table and in JSON."""

import json
import math
from pathlib import Path

import pytest

import adlm
from adlm.bundled import DEFAULT
from tests.cli.terminal import answer_json, assert_error, invoke, process, trained, without_escapes

TEXTS = ("It was the best of times.", "times of best the was It.")


def test_the_scores_are_the_apis() -> None:
    done = process("score", *TEXTS, "--draws", 8, "--seed", 3, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1
    answer = json.loads(done.stdout)
    assert answer["settings"] == {
        "model": DEFAULT,
        "method": "adlm",
        "draws": 8,
        "seed": 3,
        "device": "cpu",
    }
    for text, result, expected in zip(
        TEXTS, answer["scores"], adlm.load(device="cpu").score(TEXTS, draws=8, seed=3)
    ):
        assert (
            result["text"] == text
            and result["tokens"] == expected.tokens
            and result["is_exact"] is False
        )
        for name in ("nll", "stderr", "ppl", "bits_per_byte"):
            assert math.isclose(result[name], getattr(expected, name), rel_tol=1e-4)


def test_the_table_has_the_values_of_the_json() -> None:
    words = (*TEXTS, "--model", trained(), "--draws", 8)
    result = invoke("score", *words)
    assert result.exit_code == 0, result.output
    header, *rows = (line for line in result.stdout.splitlines() if "│" in line or "┃" in line)
    assert header.split()[1:6:2] == ["text", "tokens", "nats/token"]
    for row, score in zip(rows, answer_json("score", *words)["scores"], strict=True):
        assert score["text"] in row and f" ≤ {score['nll']:.3f} ± {score['stderr']:.3f} " in row
        assert f"≤ {score['ppl']:,.1f}" in row and f"≤ {score['bits_per_byte']:.3f}" in row
    assert "upper bound, 8 noise samples per text" in result.stderr


@pytest.mark.parametrize("columns", [80, 60])
def test_numbers_are_whole_in_a_narrow_terminal_and_in_a_pipe(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "worst\nof times,\x1b[31m it was"
    monkeypatch.setattr("adlm.cli.text.MAX_TEXT_WIDTH", 23)
    words = ("score", TEXTS[0], long, "--model", trained(), "--draws", 8)
    monkeypatch.setenv("COLUMNS", str(columns))
    piped, scores = invoke(*words).stdout, answer_json(*words)["scores"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = invoke(*words).stdout
    assert max(map(len, without_escapes(shown).splitlines())) <= columns
    assert "\x1b[31m" not in shown and "worst↵of times,␛[31m i… │" in piped
    for text in (without_escapes(shown), piped):
        for score in scores:
            for number in (
                f"≤ {score['nll']:.3f}",
                f"± {score['stderr']:.3f}",
                f"≤ {score['ppl']:,.1f}",
            ):
                assert f"{number} " in text
            assert f"≤ {score['bits_per_byte']:.3f} " in text


def test_a_causal_models_score_is_exact() -> None:
    scores = answer_json("score", *TEXTS, "--model", trained("ar"))["scores"]
    assert all(score["is_exact"] and score["stderr"] == 0 for score in scores)
    result = invoke("score", *TEXTS, "--model", trained("ar"))
    assert "≤" not in result.stdout and "exact" in result.stdout


def test_texts_from_arguments_files_and_stdin(tmp_path: Path) -> None:
    whole, lines = tmp_path / "whole.txt", tmp_path / "lines.txt"
    whole.write_bytes(b"One text\nof two lines.\n")
    lines.write_bytes("first\r\n\nsecond – é\n".encode())
    words = ("given", "-", "--file", whole, "--lines", lines, "--model", trained(), "--draws", 2)
    result = invoke("score", *words, "--json", given="from stdin\n")
    texts = [score["text"] for score in json.loads(result.stdout)["scores"]]
    assert texts == ["given", "from stdin", "One text\nof two lines.", "first", "second – é"]
    assert "empty lines skipped: 1" in result.stderr
    by_stdin = answer_json(
        "score", "--lines", "-", "--model", trained(), "--draws", 2, given="first\nsecond – é\n"
    )
    assert [score["text"] for score in by_stdin["scores"]] == texts[3:]
    alone = answer_json("score", "first", "--model", trained(), "--draws", 2)["scores"][0]
    assert math.isclose(by_stdin["scores"][0]["nll"], alone["nll"], rel_tol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no text to score: give some, --file FILE, --lines FILE, or - to read stdin"),
        (("",), "score"),
        (("word " * 50,), "make it shorter"),
        (("a", "--draws", "1"), "--draws"),
        (
            ("--file", "nowhere.txt"),
            "nowhere.txt cannot be read (No such file or directory): give a file of text",
        ),
    ],
)
def test_errors(words: tuple[str, ...], message: str) -> None:
    assert_error(invoke("score", *words, "--model", trained(), "--json"), message)
