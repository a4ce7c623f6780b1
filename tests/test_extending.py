"""The examples of docs/extending.md, each used from a folder of its own, in a fresh process, as a reader would."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
MODEL = "adlm-prose"
PROMPT = "The old man"
SERVING = re.compile(r"on (http://\S+)")
NANO = (
    "model.dim=32",
    "model.heads=2",
    "model.anchor_layers=1",
    "model.denoiser_layers=1",
    "steps=3",
    "batch=4",
    "valid.every=3",
    "valid.rows=8",
    "checkpoint.every=3",
    "device=cpu",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, tmp_path)
    return tmp_path


def environment() -> dict[str, str]:
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def run(folder: Path, *command: str, fails: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def run_command(folder: Path, *arguments: str, fails: bool = False) -> str:
    return run(folder, "-m", "adlm", *arguments, fails=fails)


def prepare_data(folder: Path) -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    (folder / "text.txt").write_text(text, "utf-8")
    run_command(
        folder, "prepare", "text.txt", "--out", "data", "--train-tokenizer", "300", "--length", "32"
    )


def train(folder: Path, *changes: str) -> dict[str, Any]:
    """Train a tiny model, and return what `adlm eval ppl` says of it."""
    recipe = str(ROOT / "recipes" / "cpu-nano.yaml")
    run_command(folder, "train", recipe, "data.path=data", "folder=run", *NANO, *changes)
    return json.loads(run_command(folder, "eval", "ppl", "run", "--data", "text.txt", "--json"))


@contextmanager
def serve(folder: Path, *arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "adlm", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = SERVING.search(line)
        assert address is not None, line
        yield address[1]
    finally:
        process.terminate()
        process.wait(30)


def complete(address: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)
    except HTTPError as error:
        return json.load(error)


SETTINGS = {"max_tokens": 6, "seed": 1, "options": {"prob": 0.4}}
PYTHON = f"""
import adlm
from sampler import Patient

lm = adlm.load({MODEL!r}, device="cpu")
named = lm.generate({PROMPT!r}, sampler="sampler:Patient", options={{"prob": 0.4}}, seed=1, max_tokens=6)
given = lm.generate({PROMPT!r}, sampler=Patient(prob=0.4), seed=1, max_tokens=6)
outside = lm.generate({PROMPT!r}, sampler="sampler:OutsideIn", seed=1, max_tokens=6)
assert list(named) == list(given)
assert outside.nfe == 3  # of six positions two are revealed in a step
print(named.texts[0], end="")
"""


def test_a_sampler_has_one_text_in_python_on_the_command_line_and_over_http(folder: Path) -> None:
    text = run(folder, "-c", PYTHON)
    options = ("--sampler", "sampler:Patient", "--option", "prob=0.4", "--seed", "1")
    own = ("--prompt", PROMPT, "--max-new-tokens", "6", "--json", "--device", "cpu")
    printed = json.loads(run_command(folder, "sample", MODEL, *options, *own))
    assert printed["texts"] == [text]

    with serve(folder, MODEL, "--plugin", "sampler:Patient", "--device", "cpu") as address:
        named = complete(address, prompt=PROMPT, echo=True, sampler="sampler:Patient", **SETTINGS)
        assert named["choices"][0]["text"] == text
        # What was not named at the start is not imported for a request.
        other = complete(address, prompt=PROMPT, sampler="sampler:OutsideIn", max_tokens=6)
        assert "sampler:OutsideIn" in other["error"]["message"]


def test_a_plugin_that_is_no_sampler_is_refused(folder: Path) -> None:
    error = run_command(folder, "serve", MODEL, "--plugin", "sampler:Column", fails=True)
    assert "sampler:Column" in error
    assert "expected a sampler" in error


def test_a_schedule_and_an_anchor_rule_train_and_are_evaluated(folder: Path) -> None:
    prepare_data(folder)
    schedule = ("objective.schedule=schedule:Polynomial", "objective.schedule_options.power=3")
    rule = ("objective.anchor_rule=anchor_rule:first_occurrence",)
    metrics = train(folder, *schedule, *rule)
    assert metrics
    stored = (folder / "run" / "config.yaml").read_text("utf-8")
    assert "schedule:Polynomial" in stored
    assert "anchor_rule:first_occurrence" in stored
