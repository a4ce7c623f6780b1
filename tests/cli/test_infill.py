"""`adlm infill`: given text comes back to the byte, and is shown apart from what was filled in."""

from pathlib import Path

import pytest

import adlm
from adlm.text.templates import HOLE
from tests.cli.terminal import answer_json, assert_error, invoke, trained

CAT = "The ___ sat on the ___{2}."


def test_the_bundled_model_fills_as_the_api_does() -> None:
    result = answer_json("infill", CAT, "--n", 2, "--seed", 4, "--device", "cpu")
    expected = adlm.load(device="cpu").infill(CAT, n=2, seed=4)
    assert (result["texts"], result["nfe"], result["settings"]) == (
        expected.texts,
        expected.nfe,
        expected.settings,
    )
    assert result["template"] == [CAT] and len(result["fills"]) == 2


@pytest.mark.parametrize(
    "template",
    [
        "___{3}",
        "Süß ___{1}, 東京 ___{2}\n\t🦊___{1}!  ",
        "a___{1}___{1}b",
        "  ___{2}",
        "<|endoftext|> ___{1} \u200b",
    ],
)
def test_fills_in_their_places_make_the_text(template: str) -> None:
    result = answer_json("infill", template, "--model", trained(), "--n", 2)
    assert result["texts"] == adlm.load(trained(), device="cpu").infill(template, n=2).texts
    for text, fills in zip(result["texts"], result["fills"], strict=True):
        left = iter(fills)
        assert HOLE.sub(lambda _: next(left), template) == text  # noqa: B023
        assert next(left, None) is None


def test_several_templates_and_batches() -> None:
    words = (CAT, "It ___{1} was", "--model", trained(), "--n", 2)
    result = answer_json("infill", *words)
    assert [text.startswith("The ") for text in result["texts"]] == [True, True, False, False]
    assert result["texts"] == answer_json("infill", *words, "--batch", 1)["texts"]


def test_a_template_from_stdin() -> None:
    text = "Tom ___{1}\nsaid “___{1}”."
    by_stdin = invoke("infill", "-", "--model", trained(), given=(text + "\n").encode())
    assert by_stdin.stdout == invoke("infill", text, "--model", trained()).stdout
    assert_error(
        invoke("infill", "-", "--model", trained(), given=b"\xff ___"),
        "stdin is not UTF-8 at byte 0",
    )


def test_recording_and_comparing(tmp_path: Path) -> None:
    words, page = ("infill", CAT, "--model", trained(), "--steps", 5), tmp_path / "a.html"
    both = answer_json(
        *words, "--html", page, "--gif", tmp_path / "a.gif", "--compare", "ancestral"
    )
    assert both["texts"] == answer_json(*words)["texts"] and '"given"' in page.read_text("utf-8")
    assert (
        both["compare"]["settings"]["sampler"] == "ancestral"
        and len(both["compare"]["fills"][0]) == 2
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("The cat sat.",), "has no hole: write ___ where something is to be filled in"),
        (("The ___{40} sat.",), "make it shorter"),
        ((CAT, "--length", "9"), "--length"),
        ((), "'template'"),
        ((CAT, "--model", "CAUSAL"), "a causal model sees only what is before it"),
    ],
)
def test_errors(words: tuple[str, ...], message: str) -> None:
    options = [trained("ar") if word == "CAUSAL" else word for word in words]
    assert_error(invoke("infill", "--model", trained(), *options), message)
