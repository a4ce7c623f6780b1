"""`adlm sample`: the API's texts in pipes, files, terminals and JSON; errors in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import adlm
from adlm.bundled import DEFAULT
from adlm.settings import DEFAULT_SAMPLER
from adlm.view.console import escape_controls
from tests.cli.terminal import (
    answer_json,
    assert_error,
    invoke,
    make_env,
    process,
    screen,
    trained,
    without_escapes,
)
from tests.training.runs import ROOT
from tests.view.test_player import read_data

SHORT = ("--length", 20, "--steps", 6)


def test_the_bundled_model_answers_with_one_json_object() -> None:
    words = (
        "sample",
        "--n",
        2,
        "--length",
        16,
        "--steps",
        8,
        "--seed",
        1,
        "--json",
        "--device",
        "cpu",
    )
    done = process(*words, "--prompt", "Café – “", PYTHONIOENCODING="ascii", FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1 and done.stdout.endswith(b"}\n")
    result = json.loads(done.stdout.decode("utf-8"))
    expected = adlm.load(device="cpu").generate("Café – “", length=16, steps=8, n=2, seed=1)
    assert result == expected.as_dict() | {"prompt": ["Café – “"], "seconds": result["seconds"]}
    assert all(text.startswith("Café – “") for text in result["texts"])
    assert b"2 texts, NFE" in done.stderr


def test_texts_do_not_depend_on_the_batch() -> None:
    prompts = ["It was", "the ", ""]
    expected = adlm.load(trained(), device="cpu").generate(
        prompts, n=2, length=20, steps=6, seed=5, temperature=0.8
    )
    words = [trained(), *SHORT, "--n", 2, "--seed", 5, "--temperature", 0.8]
    for prompt in prompts:
        words += ["--prompt", prompt]
    for batch in (1, 4, 16):
        result = answer_json("sample", *words, "--batch", batch)
        assert (result["texts"], result["nfe_each"], result["prompt"]) == (
            expected.texts,
            expected.nfe_each,
            prompts,
        )
    assert answer_json("sample", *words, "--seed", 6)["texts"] != expected.texts


def test_a_pipe_and_a_file_get_only_the_texts(tmp_path: Path) -> None:
    out, words = tmp_path / "new" / "texts.txt", (trained(), *SHORT, "--n", 2)
    result = invoke("sample", *words, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout_bytes == out.read_bytes() and f"wrote {out}" in result.stderr
    texts = out.read_text("utf-8").removesuffix("\n").split("\n<|endoftext|>\n")
    assert texts == answer_json("sample", *words)["texts"]


def test_a_terminal_shows_the_steps_and_the_same_texts() -> None:
    words = (trained(), *SHORT, "--n", 2, "--seed", 3, "--prompt", "It was")
    shown, code = screen("sample", *words, "--pause", 0, "--compare", trained("ar"))
    assert code == 0 and "run-ar · left_to_right" in without_escapes(shown), shown
    assert "\x1b[?25l" in shown and "\x1b[?25h" in shown  # the cursor is hidden and restored
    plain = without_escapes(shown)
    assert "step 0 of 6" in plain and "step 6 of 6" in plain and "guess <25%" in plain
    for text in answer_json("sample", *words)["texts"]:
        assert escape_controls(text) in plain[plain.rindex("hidden again") :]


def read_titles(page: Path) -> list[str]:
    return [
        trajectory["title"] for trajectory in read_data(page.read_text("utf-8"))["trajectories"]
    ]


def test_two_samplers_compared_generate_what_each_does_alone(tmp_path: Path) -> None:
    words, page, gif = (
        (trained(), *SHORT, "--n", 2, "--seed", 3),
        tmp_path / "new" / "a.html",
        tmp_path / "a.gif",
    )
    options = ("--sampler", "remask_loop", "--option", "eta=0.3")
    both = answer_json(
        "sample", *words, *options, "--compare", "remask_cap", "--html", page, "--gif", gif
    )
    assert (both["html"], both["gif"]) == (str(page), str(gif))
    assert (
        both["texts"] == answer_json("sample", *words, *options)["texts"]
    )  # recording changes nothing
    alone = answer_json("sample", *words, "--sampler", "remask_cap")
    assert both["compare"]["texts"] == alone["texts"] and both["compare"]["settings"]["steps"] == 6
    assert both["settings"]["eta"] == 0.3 and "eta" not in both["compare"]["settings"]
    assert [title.split(" · ")[1] for title in read_titles(page)] == ["remask_loop", "remask_cap"]
    assert gif.read_bytes().startswith(b"GIF89a")
    without_steps = answer_json("sample", *words, "--compare", "first_hitting")
    assert "steps" not in without_steps["compare"]["settings"]
    assert without_steps["settings"]["sampler"] == DEFAULT_SAMPLER
    alias = answer_json("sample", *words, "--compare", "low_confidence")["compare"]
    assert (
        alias["texts"]
        == answer_json("sample", *words, "--compare", "confidence")["compare"]["texts"]
    )
    own = answer_json("sample", *words, "--compare", "examples.sampler:OutsideIn")
    assert own["compare"]["settings"]["sampler"] == "examples.sampler:OutsideIn"


def test_two_models_compared(tmp_path: Path) -> None:
    words, page, sampler = (*SHORT, "--seed", 3), tmp_path / "a.html", ("--sampler", "ancestral")
    both = answer_json("sample", trained(), *words, *sampler, "--compare", trained("mdlm"))
    assert (
        both["compare"]["texts"]
        == answer_json("sample", trained("mdlm"), *words, *sampler)["texts"]
    )
    causal = answer_json(
        "sample", trained(), *words, *sampler, "--compare", trained("ar"), "--html", page
    )
    assert causal["compare"]["settings"]["sampler"] == "left_to_right"
    assert (
        causal["compare"]["texts"]
        == answer_json("sample", trained("ar"), "--length", 20, "--seed", 3)["texts"]
    )
    assert read_titles(page) == ["run-adlm · ancestral", "run-ar · left_to_right"]
    reverse = answer_json("sample", trained("ar"), *words, "--compare", trained())
    assert reverse["compare"]["texts"] == answer_json("sample", trained(), *words)["texts"]


def test_a_prompt_from_stdin() -> None:
    result = invoke("sample", trained(), *SHORT, "--prompt", "-", given="It was\n")
    assert result.stdout == invoke("sample", trained(), *SHORT, "--prompt", "It was").stdout
    assert result.stdout.startswith("It was")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sampler", "best"), "unknown sampler 'best'"),
        (("--top-p", "2"), "--top-p='2': expected a number above 0 and at most 1; leave it out"),
        (("--length", "33"), "--length=33: expected at most 31"),
        (
            ("--length", "9", "--max-new-tokens", "3"),
            "--length=9 and --max-new-tokens=3: expected one",
        ),
        (("--max-new-tokens", "33"), "--max-new-tokens=33: expected at most 31"),
        (
            ("--option", "eta"),
            "--option=['eta']: expected name=value; write it as eta=0.04, not 'eta'",
        ),
        (("--option", "eta=much"), "of remask_loop, eta='much': expected a number; leave it out"),
        (("--option", "seed=3"), "--option={'seed': '3'}: of remask_loop, seed='3': unknown name"),
        (("--option", "steps=3"), "steps is a setting; give it outside of options"),
        (("--n", "1e6"), "--n='1e6': expected a whole number above 0"),
        (
            ("--sampler", "ancestral", "--option", "bound=1"),
            "of ancestral, bound='1': unknown name; expected one of compat",
        ),
        (("--compare", "better"), "--compare 'better' is neither a sampler (ancestral,"),
        (("--device", "abacus"), "device 'abacus' is not one of"),
        (("--gif", "a.png"), "does not end in .gif: call it a.gif"),
        (("--steps", "0"), "--steps"),
        (
            ("--sampler", "ancestral", "--steps", "999999999"),
            "steps must be at most 65,536, got 999,999,999: use fewer, or the sampler first_hitt",
        ),
        (("--seed", "-1"), "--seed"),
        (("--temperature", "-1"), "temperature"),
        (("--what",), "--what"),
    ],
)
def test_errors(options: tuple[str, ...], message: str) -> None:
    assert_error(invoke("sample", trained(), *options, "--json"), message)


def test_errors_of_models(tmp_path: Path) -> None:
    assert_error(
        invoke("sample", "novel"), "there is no model 'novel'", "a run folder", f"one of {DEFAULT}"
    )
    assert_error(invoke("sample", tmp_path), "neither a run folder nor a model folder")
    assert_error(
        invoke("sample", trained("ar"), "--sampler", "ancestral"),
        "ancestral",
        "left to right",
        "leave it out",
    )


def test_an_output_file_is_checked_before_the_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", "utf-8")
    for option in ("--out", "--html", "--gif"):
        result = invoke("sample", "no-model", option, tmp_path / "file" / "a.gif")
        assert_error(
            result,
            f"{option} {tmp_path / 'file' / 'a.gif'}: {tmp_path / 'file'} is a file, not a folder",
        )
        assert_error(
            invoke("sample", "no-model", option, tmp_path), f"{option} {tmp_path} is a folder"
        )
    assert_error(
        invoke("sample", "no-model", "--html", "/proc/a.html"),
        "--html /proc/a.html cannot be written (/proc:",
    )
    twice = invoke("sample", "no-model", "--out", tmp_path / "a", "--html", tmp_path / "a")
    assert_error(twice, "--html and --out are the same file")
    assert (tmp_path / "file").read_text("utf-8") == "mine"


def test_names_of_files_do_not_control_the_terminal_and_new_folders_are_reported(
    tmp_path: Path,
) -> None:
    name = tmp_path / "a\x1b[31mb" / "c\x9b\u202e.html"
    result = invoke("sample", trained(), "--length", 8, "--steps", 2, "--html", name)
    assert result.exit_code == 0 and name.is_file()
    assert f"created folder {tmp_path}/a␛[31mb" in result.stderr and "/c��.html" in result.stderr
    answer = invoke("sample", trained(), "--length", 8, "--steps", 2, "--html", name, "--json")
    assert "created folder" not in answer.stderr and json.loads(answer.stdout)["html"] == str(name)
    error = invoke("sample", name.parent)
    for text in (result.stderr, answer.stdout, error.stderr):
        assert not set("\x1b\x9b") & set(text), text


def test_a_gif_without_pillow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = invoke("sample", "no-model", "--gif", tmp_path / "a.gif")
    assert_error(result, "--gif needs Pillow")


def test_settings_are_options() -> None:
    words = (trained(), "--prompt", "It was", "--max-new-tokens", 9, "--steps", 4, "--seed", "null")
    drawn = answer_json("sample", *words, "--n", 2, "--compare", "ancestral")
    seed = drawn["settings"]["seed"]
    assert drawn["compare"]["settings"]["seed"] == seed  # one for both
    again = answer_json("sample", *words[:-1], seed, "--n", 2)
    assert again["texts"] == drawn["texts"]
    stop = drawn["texts"][0].removeprefix("It was")[2:4]
    cut = answer_json("sample", *words[:-1], seed, "--n", 2, "--stop", stop)
    own = {"sampler": "remask_cap", "options": {"eta": 0.3, "compat": True}}
    assert cut["texts"][0] == "It was" + drawn["texts"][0].removeprefix("It was").split(stop)[0]
    options = ("--sampler", "remask_cap", "--option", "eta=0.3", "--option", "compat=true")
    lm = adlm.load(trained(), device="cpu")
    expected = lm.generate("a", n=2, length=9, steps=4, **own)
    assert (
        answer_json(
            "sample", trained(), "--prompt", "a", "--n", 2, "--length", 9, "--steps", 4, *options
        )["texts"]
        == expected
    )


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m adlm sample {trained()} --length 20 --steps 2 --n 2 | true"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=make_env(), capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr and "error" not in done.stderr, done.stderr
