"""`adlm infill`: what is given comes back to the byte, and is told apart from what was filled."""

import json
from pathlib import Path

import pytest
from rich.console import Console

import adlm
from adlm.cli.generate import style_row
from adlm.text.templates import HOLE, parse_template
from adlm.view.terminal import escape_controls
from tests.cli.terminal import answer_json, assert_told, invoke, process, screen, trained, without_escapes

CAT = "The ___ sat on the ___{2}."


def test_the_bundled_model_fills_as_the_api_does() -> None:
    done = process("infill", CAT, "--n", 2, "--seed", 4, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    same = adlm.load(device="cpu").infill(CAT, n=2, seed=4)
    assert (found["texts"], found["nfe"], found["settings"]) == (same.texts, same.nfe, same.settings)
    assert found["template"] == [CAT] and len(found["fills"]) == 2


@pytest.mark.parametrize(
    "template",
    [
        CAT,
        "___{3}",
        "Süß ___{1}, 東京 ___{2}\n\t🦊___{1}!  ",
        "a___{1}___{1}b",
        "  ___{2}",
        "<|endoftext|> ___{1} \u200b",
    ],
)
def test_fills_in_their_places_make_the_text(template: str) -> None:
    found = answer_json("infill", template, "--model", trained(), "--n", 2)
    assert found["texts"] == adlm.load(trained(), device="cpu").infill(template, n=2).texts
    for text, fills in zip(found["texts"], found["fills"], strict=True):
        left = iter(fills)
        assert HOLE.sub(lambda _: next(left), template) == text  # noqa: B023
        assert next(left, None) is None


def test_several_templates_and_batches() -> None:
    words = (CAT, "It ___{1} was", "--model", trained(), "--n", 2)
    found = answer_json("infill", *words)
    assert [text.startswith("The ") for text in found["texts"]] == [True, True, False, False]
    assert found["texts"] == answer_json("infill", *words, "--batch", 1)["texts"]


def test_a_template_comes_by_stdin() -> None:
    text = "Tom ___{1}\nsaid “___{1}”."
    by_stdin = invoke("infill", "-", "--model", trained(), given=(text + "\n").encode())
    assert by_stdin.stdout == invoke("infill", text, "--model", trained()).stdout
    assert_told(invoke("infill", "-", "--model", trained(), given=b"\xff ___"), "stdin is not UTF-8 at byte 0")


def test_a_terminal_tells_given_from_filled() -> None:
    words = ("infill", CAT, "--model", trained(), "--seed", 2)
    shown, code = screen(*words, "--pause", 0)
    found = answer_json(*words)
    assert code == 0 and escape_controls(found["texts"][0]) in without_escapes(shown)
    last = shown[shown.rindex("\x1b[3;38;5;31mThe ") :]  # italic, in the color of what is given
    assert "\x1b[1;32m" in last and last.count("\x1b[3;38;5;31m") == 3  # bold and green: the two fills between


def test_marks_do_without_colors() -> None:
    lm = adlm.load(trained(), device="cpu")
    output = lm.infill("It ___{2} was", seed=1)
    shown = style_row(output.rows[0])
    console = Console(no_color=True, force_terminal=True, color_system="truecolor", highlight=False)
    with console.capture() as captured:
        console.print(shown)
    assert "\x1b[3m" in captured.get() and "\x1b[1m" in captured.get()
    assert shown.plain == escape_controls(output[0])


def test_the_way_is_kept(tmp_path: Path) -> None:
    found = answer_json("infill", CAT, "--model", trained(), "--html", tmp_path / "a.html", "--gif", tmp_path / "a.gif")
    assert found["texts"] == answer_json("infill", CAT, "--model", trained())["texts"]
    assert '"given"' in (tmp_path / "a.html").read_text("utf-8")
    both = answer_json("infill", CAT, "--model", trained(), "--compare", "ancestral", "--steps", 5)
    assert both["compare"]["settings"]["sampler"] == "ancestral" and len(both["compare"]["fills"][0]) == 2
    assert len(parse_template(CAT)) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("The cat sat.",), "has no hole: write ___ where something is to be filled in"),
        (("The ___{40} sat.",), "make it shorter"),
        (("The ___{0} sat.",), "a hole"),
        ((CAT, "--length", "9"), "--length"),
        ((), "'template'"),
    ],
)
def test_mistakes_are_told_in_a_line(words: tuple[str, ...], said: str) -> None:
    assert_told(invoke("infill", *words, "--model", trained()), said)


def test_a_causal_model_cannot_look_ahead() -> None:
    assert_told(invoke("infill", CAT, "--model", trained("ar")), "a causal model sees only what is before it")
