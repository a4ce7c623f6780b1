"""`adlm eval card`: one command, one folder, every figure from a command that the card names."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adlm.cli.evaluation.agenda import Asked, own_words, planned
from adlm.cli.evaluation.card import all_gather, files_in, hashes, short_names
from adlm.studies.card import scrubbed
from tests.cli.terminal import assert_told, invoke, process, trained
from tests.evaluate.small_judges import causal_folder, documents, needs
from tests.evaluate.test_zeroshot import write_sets
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
    words: tuple[Any, ...] = (trained(), "--data", text, "--judge", causal_folder(), "--quick")
    sets = write_sets(tmp_path / "sets")
    words += ("--with", "code --infills 0", "--with", f"domains --set prose={text}")
    words += ("--with", f"zeroshot --data-dir {sets} --sets ptb,lambada")
    done = process("eval", "card", *words, "--out", folder, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    states = {part["name"]: part["is_measured"] for part in found["sections"]}
    assert len(states) == 8 and all(states.values())
    for name in FILES:
        assert str(tmp_path) not in (folder / name).read_text("utf-8")
    commands = [command for part in found["sections"] for command in part["commands"]]
    assert len(commands) == 8 and all(command.startswith("adlm ") and "--json" in command for command in commands)
    assert found["command"].startswith("adlm eval card run-adlm --data prose.txt")
    for part, kept in {"samples": "samples.jsonl", "frontier": "points.jsonl", "anchors": "models.jsonl"}.items():
        assert list(folder.glob(f"parts/{part}-*/{kept}")), part  # what goes on after a Ctrl-C
    again = process("eval", "card", *words, "--out", folder, "--device", "cpu", "--json")
    assert b"$ adlm" in done.stderr and b"$ adlm" not in again.stderr  # what is done is not done again
    assert json.loads(again.stdout)["sections"] == found["sections"]
    (folder / "ppl-1.json").unlink()
    third = process("eval", "card", *words, "--out", folder, "--device", "cpu", "--json")
    assert third.stderr.count(b"$ adlm") == 1 and json.loads(third.stdout)["metrics"] == found["metrics"]


def test_options_for_one_command_come_before_the_cards() -> None:
    own = own_words(["ppl --limit=7 --draws 2", "zeroshot --data-dir 'my sets'", "anchors --samples 100", "code"])
    found = planned_words(own=own, limit=40, n=50, steps=(8,))
    assert found["ppl"][0][2:7] == ["two", "--data", "text.txt", "--limit=7", "--draws"]
    assert given_to(found["anchors"][0], "--samples", "--limit") == ["100", "40"] and "50" not in found["anchors"][0]
    assert [words[2:4] for words in found["zeroshot"]] == [["two", "ar"]]  # together
    assert given_to(found["zeroshot"][0], "--data-dir", "--limit") == ["my sets", "40"]
    assert given_to(found["code"][0], "--steps") == ["8"] and "domains" not in found


def test_a_way_of_writing_of_ones_own_goes_only_to_who_can_write_so() -> None:
    needs("mauve")
    both = ("--sampler", "--steps")
    for own in ("--sampler first_hitting", "--sampler=first_hitting"):  # it has no steps
        two, causal = planned_words(own=own_words([f"samples {own} --n 9"]), steps=(8,))["samples"]
        assert "--steps" not in two and two[-7:-5] == ["--n", "9"] and "first_hitting" in " ".join(two)
        assert "first_hitting" not in " ".join(causal) and given_to(causal, *both, "--n") == [None, None, "9"]
    two, causal = planned_words(own=own_words(["code --steps=4 --texts 3"]))["code"]
    assert "--steps=4" in two and "--steps=4" not in causal and given_to(causal, "--texts") == ["3"]
    (points,) = planned_words(own=own_words(["frontier --steps 4"]))["frontier"]
    assert given_to(points, "--steps") == ["4"]


def test_files_that_such_options_name_are_found(tmp_path: Path) -> None:
    spaced, other = tmp_path / "a b.txt", tmp_path / "c=d.txt"
    for path in (spaced, other):
        path.write_text("x", "utf-8")
    own = own_words([f"domains '--set=prose={spaced}' --set code={other}", f"examples --prompt {'x' * 300}"])
    assert files_in(own) == [str(spaced), str(other)]
    assert files_in(own_words([f"zeroshot --data-dir={tmp_path}"])) == [str(tmp_path)]


def test_a_path_is_known_however_a_command_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "it's a folder" / "it's text.txt"
    path.parent.mkdir()
    path.write_text("x", "utf-8")
    names = short_names([str(path)])
    slashed = str(path).replace(" ", "\\ ").replace("'", "\\'")
    inner = [shlex.join(["eval", "--set", f"prose={path}"]), f"eval --set prose={slashed}"]
    for command in (*inner, *(shlex.join(["adlm", "--with", each]) for each in inner)):
        shown = scrubbed(command, names)
        assert "folder" not in shown and tmp_path.name not in shown
        words = shlex.split(shown)
        assert (shlex.split(words[-1]) if words[0] == "adlm" else words)[-1] == "prose=it's text.txt"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([""], "it is empty"),
        (["code 'open"], "No closing quotation"),
        (["train --steps 1"], "'train' is not one of ppl, samples"),
        (["code --texts 1", "code"], "names code twice"),
        (["ppl adlm-prose"], "'adlm-prose' is no option"),
        (["ppl --seed 3"], "--seed is the card's own"),
        (["samples --judge=x"], "--judge=x is the card's own"),
    ],
)
def test_what_is_wrong_with_such_options_is_told(given: list[str], said: str, tmp_path: Path) -> None:
    words = [word for each in given for word in ("--with", each)]
    assert_told(invoke("eval", "card", trained(), "--data", held_out(), "--out", tmp_path / "card", *words), said)


def planned_words(**changes: Any) -> dict[str, list[list[str]]]:
    """The commands of a card of two models, one of them causal, by section."""
    asked = Asked(["two", "ar"], "text.txt", None, "judge", None, 0, "cpu", False)
    facts = [{"name": "two", "is_causal": False, "is_two_stage": True}]
    facts += [{"name": "ar", "is_causal": True, "is_two_stage": False}]
    found: dict[str, list[list[str]]] = {}
    for name, words in planned(replace(asked, **changes), facts, set(), {}):
        found.setdefault(name, []).append(words)
    return found


def given_to(words: list[str], *options: str) -> list[str | None]:
    return [words[words.index(each) + 1] if each in words else None for each in options]


def test_what_is_asked_for_is_passed_on_where_it_applies() -> None:
    needs("mauve")
    how = {"n": 100, "length": 64, "steps": (16, 64, 32), "samplers": ("confidence", "ancestral"), "limit": 40}
    found = planned_words(**how)
    writing = ("--length", "--steps", "--sampler")
    for name, option, count in (("samples", "--n", "100"), ("anchors", "--samples", "32")):
        assert given_to(found[name][0], option, *writing) == [count, "64", "64", "confidence"]
    assert given_to(planned_words(n=8)["anchors"][0], "--samples") == ["8"]
    assert given_to(found["samples"][1], "--n", *writing) == ["100", "64", None, None]  # the causal model's
    (points,) = found["frontier"]
    assert given_to(points, "--n", "--length", "--steps", "--samplers") == [
        "48", "64", "16,64,32", "confidence,ancestral"
    ]  # fmt: skip
    assert given_to(found["ppl"][0], "--limit", "--n") == ["40", None]
    assert given_to(found["anchors"][0], "--limit") == ["40"]
    assert given_to(found["examples"][0], "--n", *writing) == ["2", "64", "64", "confidence"]
    bare = planned_words()
    assert given_to(bare["samples"][0], "--n", *writing) == [None] * 4
    assert given_to(bare["anchors"][0], "--samples") == ["32"]
    quick = planned_words(is_quick=True, n=6)
    assert given_to(quick["samples"][0], "--n", "--steps") == ["6", "8"]
    free = planned_words(samplers=("first_hitting",), steps=(8,))  # a sampler without steps
    assert given_to(free["samples"][0], "--sampler", "--steps") == ["first_hitting", None]
    assert given_to(free["frontier"][0], "--steps") == ["8"]


@with_matplotlib
def test_what_cannot_be_asked_for_is_told_before_anything_runs(tmp_path: Path) -> None:
    words = ("eval", "card", trained(), "--data", held_out(), "--out", tmp_path / "card", "--device", "cpu")
    assert_told(invoke(*words, "--samplers", "fast"), "unknown sampler 'fast'")
    assert_told(invoke(*words, "--length", 500), "length must be a whole number between 1 and 31")
    assert_told(invoke(*words, "--steps", "many"), "--steps 'many': 'many' is not a whole number")
    assert_told(invoke(*words, "--with", "code --sampler fast"), "unknown sampler 'fast'")
    assert not (tmp_path / "card").exists()


@with_matplotlib
def test_an_answer_holds_as_long_as_what_it_follows_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model at the same place, another text of the same name: measured again."""
    run: list[str] = []

    def answer_of(words: list[str]) -> dict[str, Any]:
        name = "examples" if words[0] == "sample" else words[1]
        run.append(name)
        return answers()[name][0]

    monkeypatch.setattr("adlm.cli.evaluation.card.answer_of", answer_of)
    data = tmp_path / "text.txt"
    data.write_text("one", "utf-8")
    asked = Asked([trained()], str(data), None, None, None, 0, "cpu", False)
    facts = [{"name": trained(), "weights_sha256": "a", "is_causal": False, "is_two_stage": True}]
    every = ["ppl", "frontier", "anchors", "examples"]
    for changed, expected in (({}, every), ({}, []), ({"weights_sha256": "b"}, every)):
        run.clear()
        facts = [facts[0] | changed]
        found = all_gather(asked, facts, tmp_path / "card")
        assert run == expected and list(found.answers) == every
    data.write_text("two", "utf-8")
    run.clear()
    all_gather(asked, facts, tmp_path / "card")
    assert run == ["ppl", "frontier", "anchors"]
    judge = tmp_path / "judge.gguf"
    for content, expected in (("one", ["frontier", "anchors"]), ("one", []), ("two", ["frontier", "anchors"])):
        judge.write_text(content, "utf-8")
        run.clear()
        with monkeypatch.context() as without:
            without.setattr("adlm.cli.evaluation.agenda.find_spec", lambda name: None)  # no texts are judged here
            all_gather(replace(asked, judge=str(judge)), facts, tmp_path / "card")
        assert run == expected
    all_gather(asked, facts, tmp_path / "card")
    (sets := tmp_path / "sets").mkdir()
    (sets / "one").write_text("1", "utf-8")
    wider = replace(asked, own=own_words([f"zeroshot --data-dir {sets}", f"domains --set prose={data}"]))
    for content, expected in (("1", ["zeroshot", "domains"]), ("1", []), ("two", ["zeroshot"])):
        if content != "1":
            (sets / "one").write_text(content, "utf-8")
        run.clear()
        all_gather(wider, facts, tmp_path / "card")
        assert run == expected

    def interrupted(words: list[str]) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr("adlm.cli.evaluation.card.answer_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        all_gather(replace(asked, seed=1), facts, tmp_path / "card")
    monkeypatch.setattr("adlm.cli.evaluation.card.answer_of", answer_of)
    run.clear()
    all_gather(replace(asked, seed=1), facts, tmp_path / "card")
    assert run == every  # no half of it is taken for somebody else's file


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


@with_matplotlib
def test_files_of_other_weights_are_not_taken(tmp_path: Path) -> None:
    folder = filled(tmp_path / "card")
    found = json.loads((folder / "frontier.json").read_text("utf-8"))
    found["settings"]["models"][0]["weights_sha256"] = "0" * 64
    (folder / "frontier.json").write_text(json.dumps(found), "utf-8")
    words = ("eval", "card", trained(), trained("ar"), "--data", held_out(), "--out", folder, "--device", "cpu")
    assert_told(invoke(*words), "frontier.json is about other weights of", "000000000000…", "take it out of the folder")


def test_two_files_of_one_name_have_a_hash_each(tmp_path: Path) -> None:
    files = [tmp_path / name / "test.txt" for name in ("one", "two")]
    for path in files:
        path.parent.mkdir()
        path.write_text(str(path), "utf-8")
    given = [str(path) for path in files]
    assert len(hashes(given, short_names(given))) == 2


def test_mistakes_are_told_in_a_line(tmp_path: Path) -> None:
    assert_told(invoke("eval", "card", trained()), "what to measure on is not said")
    file = tmp_path / "file"
    file.write_text("x", "utf-8")
    assert_told(invoke("eval", "card", trained(), "--data", file, "--out", file), "is a file")
    assert_told(invoke("eval", "card", "novel", "--data", file, "--out", tmp_path / "c"), "there is no model 'novel'")
