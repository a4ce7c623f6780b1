"""`adlm sample`: the API's texts wherever they go, one JSON object, mistakes in a line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import adlm
from adlm.bundled import DEFAULT
from adlm.cli.generate import parse_sampler_options
from adlm.view.terminal import escape_controls
from tests.cli.terminal import ROOT, answer_json, assert_told, env_of, invoke, process, screen, trained, without_escapes

SHORT = ("--length", 20, "--steps", 6)
KEYS = {"texts", "nfe", "seconds", "settings"}


def test_the_bundled_model_answers_with_one_json_object() -> None:
    words = ("sample", "--n", 2, "--length", 16, "--steps", 8, "--seed", 1, "--json", "--device", "cpu")
    done = process(*words, "--prompt", "Café – “", PYTHONIOENCODING="ascii", FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1 and done.stdout.endswith(b"}\n")
    found = json.loads(done.stdout.decode("utf-8"))
    assert found.keys() >= KEYS
    same = adlm.load(device="cpu").generate("Café – “", length=16, steps=8, n=2, seed=1)
    assert (found["texts"], found["nfe"], found["settings"]) == (same.texts, same.nfe, same.settings)
    assert found["seconds"] > 0 and found["nfe_each"] == same.nfe_each
    assert all(text.startswith("Café – “") for text in found["texts"])
    assert b"2 texts, NFE" in done.stderr  # what it took is a note


def test_an_error_leaves_stdout_empty() -> None:
    for words in (("--temperature", "-1"), ("--n", "0"), ("--what",)):
        done = process("sample", "--json", *words)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.count(b"\n") == 1 and done.stderr.startswith(b"error: ")


def test_texts_are_the_apis_whatever_the_batch() -> None:
    prompts = ["It was", "the ", ""]
    same = adlm.load(trained(), device="cpu").generate(prompts, n=2, length=20, steps=6, seed=5, temperature=0.8)
    words = [trained(), *SHORT, "--n", 2, "--seed", 5, "--temperature", 0.8]
    for prompt in prompts:
        words += ["--prompt", prompt]
    for batch in (1, 4, 16):
        found = answer_json("sample", *words, "--batch", batch)
        assert (found["texts"], found["nfe_each"], found["prompt"]) == (same.texts, same.nfe_each, prompts)
    assert answer_json("sample", *words, "--seed", 6)["texts"] != same.texts


def test_a_pipe_and_a_file_get_the_texts_alone(tmp_path: Path) -> None:
    out = tmp_path / "new" / "texts.txt"
    result = invoke("sample", trained(), *SHORT, "--n", 2, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout_bytes == out.read_bytes()
    assert (
        out.read_text("utf-8").removesuffix("\n").split("\n<|endoftext|>\n")
        == answer_json("sample", trained(), *SHORT, "--n", 2)["texts"]
    )
    assert f"wrote {out}" in result.stderr


def test_a_terminal_shows_the_way_and_the_same_texts() -> None:
    words = (trained(), *SHORT, "--n", 2, "--seed", 3, "--prompt", "It was")
    shown, code = screen("sample", *words, "--pause", 0)
    assert code == 0, shown
    assert "\x1b[?25l" in shown and "\x1b[?25h" in shown  # the cursor is put away, and brought back
    seen = without_escapes(shown)
    assert "step 0 of 6" in seen and "step 6 of 6" in seen and "guess <25%" in seen
    plainly = seen[seen.rindex("hidden again") :]
    for text in answer_json("sample", *words)["texts"]:
        assert escape_controls(text) in plainly
    bare, code = screen("sample", *words, "--pause", 0, "--no-guesses")
    assert code == 0 and "guess" not in bare and "step 6 of 6" in bare


@pytest.mark.parametrize("html", [True, False])
def test_the_way_is_kept_without_changing_the_text(tmp_path: Path, html: bool) -> None:
    path = tmp_path / "new" / ("a.html" if html else "a.gif")
    words = (trained(), *SHORT, "--n", 2, "--seed", 3)
    kept = answer_json("sample", *words, "--html" if html else "--gif", path)
    assert kept["html" if html else "gif"] == str(path)
    assert kept["texts"] == answer_json("sample", *words)["texts"]
    content = path.read_bytes()
    assert b"remask_loop" in content if html else content.startswith(b"GIF89a")


def recordings(page: Path) -> list[dict[str, Any]]:
    data = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert data is not None
    found: list[dict[str, Any]] = json.loads(data[1])["recordings"]
    return found


def test_two_samplers_compared_write_what_each_writes_alone(tmp_path: Path) -> None:
    words, page, picture = (trained(), *SHORT, "--n", 2, "--seed", 3), tmp_path / "a.html", tmp_path / "a.gif"
    both = answer_json(
        "sample", *words, "--option", "eta=0.3", "--compare", "remdm-cap", "--html", page, "--gif", picture
    )
    assert both["texts"] == answer_json("sample", *words, "--option", "eta=0.3")["texts"]
    alone = answer_json("sample", *words, "--sampler", "remask_cap")
    assert both["compare"]["texts"] == alone["texts"] and both["compare"]["settings"]["steps"] == 6
    assert both["settings"]["eta"] == 0.3 and "eta" not in both["compare"]["settings"]
    assert [each["title"].split(" · ")[1] for each in recordings(page)] == ["remask_loop", "remdm-cap"]
    assert picture.read_bytes().startswith(b"GIF89a")
    without_steps = answer_json("sample", *words, "--compare", "first_hitting")
    assert "steps" not in without_steps["compare"]["settings"]


def test_two_models_compared(tmp_path: Path) -> None:
    words, page = (*SHORT, "--seed", 3), tmp_path / "a.html"
    both = answer_json("sample", trained(), *words, "--sampler", "ancestral", "--compare", trained("mdlm"))
    assert both["compare"]["texts"] == answer_json("sample", trained("mdlm"), *words, "--sampler", "ancestral")["texts"]
    causal = answer_json(
        "sample", trained(), *words, "--sampler", "ancestral", "--compare", trained("ar"), "--html", page
    )
    assert causal["compare"]["settings"]["sampler"] == "left_to_right"
    assert causal["compare"]["texts"] == answer_json("sample", trained("ar"), "--length", 20, "--seed", 3)["texts"]
    assert [each["title"] for each in recordings(page)] == ["run-adlm · ancestral", "run-ar · left_to_right"]
    turned = answer_json("sample", trained("ar"), *words, "--compare", trained())
    assert turned["compare"]["texts"] == answer_json("sample", trained(), *words)["texts"]
    shown, code = screen("sample", trained(), *words, "--compare", trained("ar"), "--pause", 0)
    assert code == 0 and "run-ar · left_to_right" in without_escapes(shown)


def test_a_prompt_comes_by_stdin() -> None:
    result = invoke("sample", trained(), *SHORT, "--prompt", "-", given="It was\n")
    assert result.stdout == invoke("sample", trained(), *SHORT, "--prompt", "It was").stdout
    assert result.stdout.startswith("It was")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sampler", "best"), "unknown sampler 'best': expected one of ancestral,"),
        (("--temperature", "-1"), "temperature must be 0 (take the likeliest token) or above, got -1.0"),
        (("--top-p", "2"), "top_p must be above 0 and at most 1"),
        (("--length", "33"), "between 1 and 31, got 33"),
        (("--length", "2", "--prompt", "It was the best of times"), "make length larger"),
        (("--option", "eta"), "--option 'eta': give name=value, such as eta=0.04"),
        (("--option", "eta=much"), "'much' is not a number, true or false"),
        (("--option", "seed=3"), "see --help for --seed"),
        (("--option", "bound=1"), "t_on, t_off, alpha_on"),
        (("--compare", "better"), "--compare 'better' is neither a sampler (ancestral,"),
        (("--device", "abacus"), "device 'abacus' is not one of"),
        (("--gif", "a.png"), "does not end in .gif: call it a.gif"),
        (("--steps", "0"), "--steps"),
        (("--seed", "-1"), "--seed"),
        (("--color", "red"), "--color"),
    ],
)
def test_mistakes_are_told_in_a_line(options: tuple[str, ...], said: str) -> None:
    assert_told(invoke("sample", trained(), *options, "--json"), said)


def test_models_that_are_none(tmp_path: Path) -> None:
    assert_told(invoke("sample", "novel"), "there is no model 'novel'", f"one of {DEFAULT}")
    assert_told(invoke("sample", tmp_path), "neither a run folder nor a model folder")


def test_a_causal_model_takes_no_sampler() -> None:
    assert_told(invoke("sample", trained("ar"), "--sampler", "ancestral"), "leave ancestral out")


def test_a_file_that_cannot_be_written_is_told_before_a_model_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", "utf-8")
    for option in ("--out", "--html", "--gif"):
        result = invoke("sample", "no-model", option, tmp_path / "file" / "a.gif")
        assert_told(result, f"{option} {tmp_path / 'file' / 'a.gif'}: {tmp_path / 'file'} is a file, not a folder")
        assert_told(invoke("sample", "no-model", option, tmp_path), f"{option} {tmp_path} is a folder")
    twice = invoke("sample", "no-model", "--out", tmp_path / "a", "--html", tmp_path / "a")
    assert_told(twice, "--html and --out are the same file")
    assert (tmp_path / "file").read_text("utf-8") == "mine"


def test_a_gif_without_pillow_names_the_extra(tmp_path: Path) -> None:
    line = "import sys; sys.modules['PIL'] = None; from adlm.cli.main import app; app(sys.argv[1:])"
    command = [sys.executable, "-c", line, "sample", "no-model", "--gif", str(tmp_path / "a.gif")]
    done = subprocess.run(command, cwd=ROOT, env=env_of(), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --gif needs Pillow: pip install 'adlm[view]'")


def test_values_of_options_are_numbers_or_yes_or_no() -> None:
    assert parse_sampler_options(["eta=0.5", "compat=true"]) == {"eta": 0.5, "compat": True}


def test_who_stops_reading_is_no_error() -> None:
    command = f"{sys.executable} -m adlm sample {trained()} --length 20 --steps 2 --n 2 | true"
    done = subprocess.run(command, shell=True, cwd=ROOT, env=env_of(), capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "error" not in done.stderr, done.stderr
