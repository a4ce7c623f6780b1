"""`adlm eval card`: one command, one folder, every figure from a command that the card names."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal import assert_told, invoke, process, trained
from tests.evaluate.small_judges import causal_folder, documents, needs
from tests.studies.answered import answers, held_out, sample_figures
from tests.studies.drawn import with_matplotlib
from tests.studies.test_card import Reader, unknown_numbers

FILES = ("card.json", "card.html", "card.md")


def filled(folder: Path) -> Path:
    """A folder with what other commands wrote."""
    folder.mkdir()
    for name, found in (answers() | {"samples": [sample_figures(trained())]}).items():
        for number, each in enumerate(found):
            (folder / f"{name}{number or ''}.json").write_text(json.dumps(each), "utf-8")
    return folder


@with_matplotlib
def test_what_lies_in_the_folder_is_taken(tmp_path: Path) -> None:
    folder = filled(tmp_path / "card")
    words = (trained(), trained("ar"), "--data", held_out(), "--train", held_out(), "--out", folder, "--device", "cpu")
    result = invoke("eval", "card", *words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1 and "$ adlm" not in result.stderr  # nothing was run
    assert all(part["is_measured"] for part in found["sections"])
    assert found["sections"][0]["commands"] == ["taken from ppl.json", "taken from ppl1.json"]
    assert found["models"][0]["name"] == "run-adlm" and list(found["data"]) == [held_out().name]
    assert found["license"] == "unknown" and "license: unknown" in (folder / "card.md").read_text("utf-8")
    assert len(found["provenance"]["versions"]) > 2 and found["provenance"]["commit"]
    kept = json.loads((folder / "card.json").read_text("utf-8"))
    assert kept == {key: value for key, value in found.items() if key != "files"}
    for name in FILES:
        whole = (folder / name).read_text("utf-8")
        assert str(tmp_path) not in whole and str(held_out().parent) not in whole
    page = " ".join(Reader((folder / "card.html").read_text("utf-8")).words)
    assert unknown_numbers(page, kept) == set() and "bigram" in page
    shown = invoke("eval", "card", *words)
    assert "Held-out likelihood: measured" in shown.stderr and "card.html" in shown.stderr


@pytest.mark.slow
@with_matplotlib
def test_one_command_measures_everything(tmp_path: Path) -> None:
    needs("transformers", "mauve")
    folder, text = tmp_path / "card", tmp_path / "prose.txt"
    text.write_text("\n<|endoftext|>\n".join(documents()), "utf-8")
    words: tuple[Any, ...] = (trained(), trained("ar"), "--data", text, "--judge", causal_folder(), "--quick")
    done = process("eval", "card", *words, "--out", folder, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    states = {part["name"]: part["is_measured"] for part in found["sections"]}
    assert states == {
        "ppl": True, "samples": True, "frontier": True, "anchors": True, "examples": True,
        "zeroshot": False, "domains": False, "code": False,
    }  # fmt: skip
    for name in FILES:
        assert str(tmp_path) not in (folder / name).read_text("utf-8")
    commands = [command for part in found["sections"] for command in part["commands"]]
    assert len(commands) == 8 and all(command.startswith("adlm ") and "--json" in command for command in commands)
    assert found["command"].startswith("adlm eval card run-adlm run-ar --data prose.txt")
    again = process("eval", "card", *words, "--out", folder, "--device", "cpu", "--json")
    assert b"$ adlm" in done.stderr and b"$ adlm" not in again.stderr  # what is done is not done again
    assert json.loads(again.stdout)["sections"] == found["sections"]
    (folder / "ppl-1.json").unlink()
    third = process("eval", "card", *words, "--out", folder, "--device", "cpu", "--json")
    assert third.stderr.count(b"$ adlm") == 1 and json.loads(third.stdout)["metrics"] == found["metrics"]


@pytest.mark.slow
@with_matplotlib
def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("", "utf-8")
    words = ("eval", "card", trained("mdlm"), "--data", empty, "--out", tmp_path / "card", "--device", "cpu", "--quick")
    done = process(*words)
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: `adlm eval ppl") and "did not answer: " in last


@with_matplotlib
@pytest.mark.parametrize(
    ("content", "said"),
    [("{}", "is not what `adlm eval frontier --json` prints"), ("no JSON", "frontier.json is not what")],
)
def test_a_file_that_is_something_else_is_told(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "frontier.json").write_text(content, "utf-8")
    assert_told(invoke("eval", "card", trained(), "--data", held_out(), "--out", tmp_path, "--json"), said)


def test_mistakes_are_told_in_a_line(tmp_path: Path) -> None:
    assert_told(invoke("eval", "card", trained()), "what to measure on is not said")
    file = tmp_path / "file"
    file.write_text("x", "utf-8")
    assert_told(invoke("eval", "card", trained(), "--data", file, "--out", file), "is a file")
    assert_told(invoke("eval", "card", "novel", "--data", file, "--out", tmp_path / "c"), "there is no model 'novel'")
