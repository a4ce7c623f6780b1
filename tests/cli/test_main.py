"""The command itself: versions, help, completion, and that asking for them is cheap."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import adlm
from adlm import __version__
from adlm.bundled import DEFAULT, MODELS, find_bundled_model
from adlm.cli.commands import COMMANDS, load_command
from adlm.config import list_recipes
from adlm.settings import DEFAULT_STEPS, DEFAULT_TOP_P
from tests.cli.terminal import ROOT, answer_json, assert_error, invoke, make_env

WITHOUT_JSON = ("serve", "eval", "reason")


def test_the_version_is_one() -> None:
    assert invoke("--version").stdout == __version__ + "\n"


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_is_listed_with_the_help_that_it_has(words: str) -> None:
    *group, name = words.split()
    listed = " ".join(invoke(*group, "--help").stdout.replace("│", " ").split())
    assert f"{name} {COMMANDS[words].help.replace('`', '')}" in listed
    own = " ".join(load_command(words).help.split())
    assert own.startswith(COMMANDS[words].help)

    helped = invoke(*words.split(), "--help")
    assert helped.exit_code == 0 and "Usage: " in helped.stdout
    assert ("--json" in helped.stdout) == (words not in WITHOUT_JSON)
    assert invoke(*words.split(), "-h").stdout == helped.stdout


HELP_SECONDS = 0.25  # of a processor, more than Python itself takes
HELP_RUNS = 9


def measure_process(*words: str) -> float:
    """Return the seconds of a processor that a process takes, the least of several."""
    seconds = []
    for _ in range(HELP_RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        user = after.ru_utime - before.ru_utime
        seconds.append(user + after.ru_stime - before.ru_stime)
    return min(seconds)


def test_the_help_of_adlm_is_fast() -> None:
    taken = measure_process("-m", "adlm", "--help") - measure_process("-c", "pass")
    assert taken <= HELP_SECONDS, f"{taken:.3f} s"


def test_defaults_survive_the_help() -> None:
    shown = " ".join(invoke("sample", "--help").stdout.replace("│", " ").split())
    for default in (DEFAULT, DEFAULT_TOP_P, "auto"):
        assert f"[default: {default}]" in shown
    assert f"by default {DEFAULT_STEPS}, for confidence and margin one per token" in shown
    holes = " ".join(invoke("infill", "--help").stdout.replace("│", " ").split())
    assert "___{2,8}" in holes


def test_the_bundled_models_are_listed_with_what_they_need(tmp_path: Path) -> None:
    listed = answer_json("models")["models"]
    assert [each["model"] for each in listed] == list(MODELS)
    assert (
        listed[0]["method"] == "adlm"
        and listed[0]["memory"] == "83 MB"
        and "English prose" in listed[0]["about"]
    )
    counts = [
        sum(p.numel() for p in adlm.load(name, device="cpu").model.parameters()) for name in MODELS
    ]
    assert [each["parameters"] for each in listed] == counts == [20_632_448, 17_329_920]
    shown = invoke("models", DEFAULT).stdout
    assert f"parameters  {counts[0]:,}" in shown and shown.endswith(f"adlm sample {DEFAULT}\n")
    assert all(name in invoke("models").stdout for name in MODELS)
    (tmp_path / "card").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(find_bundled_model(DEFAULT) / name, tmp_path / "card")
    (tmp_path / "card" / "README.md").write_text("An \x1b[31mevil\x07 card.\n", "utf-8")
    assert "An ␛[31mevil␇ card" in invoke("models", tmp_path / "card").stdout
    assert_error(invoke("models", "adlm-pros"), "did you mean adlm-prose or mdlm-prose?")


def test_the_recipes_are_listed_with_what_they_need() -> None:
    by_name = {each["recipe"]: each for each in answer_json("recipes")["recipes"]}
    assert set(by_name) == set(list_recipes())
    devices = {"owt-adlm": "8 GPUs", "mini-ar": "1 GPU", "cpu-nano": "CPU"}
    devices |= dict.fromkeys(("bundled-adlm", "bundled-mdlm", "bundled-ar"), "1 GPU")
    assert {name: by_name[name]["device"] for name in devices} == devices
    assert by_name["lm1b-ar"]["data"] == "lm1b" and by_name["lm1b-ar"]["method"] == "ar"
    assert by_name["cpu-nano"]["data"] == "TEXTS --train-tokenizer 8192 --length 128"
    reasoning = {
        name: each for name, each in by_name.items() if name.startswith(("reason", "sudoku"))
    }
    assert [each["device"] for each in reasoning.values()].count("1 GPU") == len(
        reasoning
    ) - 1  # all but reason-quick
    assert {each["method"] for each in reasoning.values()} == {"that of the arm"}
    assert reasoning["reason-gsm8k"]["data"] == "files of gsm8k-equations, for adlm reason train"
    assert reasoning["reason-quick"]["data"] == "generated problems, for adlm reason train"
    assert [len(each["about"]) > 20 for each in by_name.values()].count(False) == 0
    assert "adlm prepare TEXTS" in invoke("recipes", "cpu-nano").stdout
    assert_error(invoke("recipes", "cpu-nan"), "did you mean cpu-nano", "expected one of best")


def test_an_unknown_command_is_one_line() -> None:
    assert_error(invoke("smaple"), "smaple", "'sample'")


def installed(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`adlm …` under its own name, which completion goes by."""
    line = "import sys; from adlm.cli.main import app; app(sys.argv[1:], prog_name='adlm')"
    command, env = [sys.executable, "-c", line, *words], make_env(**env)
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("words", "completed"), [("adlm sam", "sample"), ("adlm sample --sampl", "--sampler")]
)
def test_a_shell_completes(words: str, completed: str) -> None:
    count = str(len(words.split()) - 1)
    done = installed(_ADLM_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count)
    assert done.stdout.split() == [completed], done.stderr


def test_a_shell_is_given_its_script() -> None:
    shown = installed("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert shown.returncode == 0, shown.stderr
    assert "_ADLM_COMPLETE=complete_bash" in shown.stdout
