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


def require_server() -> None:
    """Skip the rest of a test where the extra is missing."""
    if os.environ.get("ADLM_ALL") != "1":
        for extra in ("fastapi", "uvicorn", "prometheus_client"):
            pytest.importorskip(extra)


@contextmanager
def serve(folder: Path, *arguments: str) -> Iterator[str]:
    require_server()
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
    require_server()
    error = run_command(folder, "serve", MODEL, "--plugin", "sampler:Column", fails=True)
    assert "sampler:Column" in error
    assert "expected a sampler" in error


OPTION_MISTAKES = {
    "{skip: two}": "skip='two': expected a whole number",
    "{skp: 1}": "skp=1: unknown name; did you mean skip?",
    "{seed: 1}": "seed=1: unknown name",
    "{max_count: 1}": "max_count is given as objective.max_count",
}
TRY = """
import adlm, json, sys

end = sys.argv.index("--")
for change in sys.argv[end + 1 :]:
    try:
        adlm.train(*sys.argv[1:end], change)
    except ValueError as error:
        print(json.dumps(str(error)))
"""


def test_a_schedule_and_an_anchor_rule_train_and_are_evaluated(folder: Path) -> None:
    prepare_data(folder)
    schedule = ("objective.schedule=schedule:Polynomial", "objective.schedule_options.power=3")
    rule = ("objective.anchor_rule=anchor_rule:first_occurrence",)
    metrics = train(folder, *schedule, *rule, "objective.anchor_options.skip=30")
    assert metrics
    stored = (folder / "run" / "config.yaml").read_text("utf-8")
    assert "schedule:Polynomial" in stored
    assert "anchor_rule:first_occurrence" in stored
    anchored = read_anchor_losses(folder / "run")
    assert all(value > 0 for value in anchored)

    # Where all 32 positions of a row are left out, there are no anchors.
    train(folder, *rule, "objective.anchor_options={skip: 32}", "folder=none")
    assert read_anchor_losses(folder / "none") == [0.0] * len(anchored)

    recipe = str(ROOT / "recipes" / "cpu-nano.yaml")
    given = (recipe, "data.path=data", "folder=wrong", *NANO, *rule)
    changes = [f"objective.anchor_options={options}" for options in OPTION_MISTAKES]
    errors = run(folder, "-c", TRY, *given, "--", *changes).splitlines()
    for line, message in zip(errors, OPTION_MISTAKES.values(), strict=True):
        assert "objective.anchor_options=" in json.loads(line) and message in json.loads(line)


def read_anchor_losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record["train/anchor"] for record in records if "train/anchor" in record]


OWN = ("--network", "network:Mixer", "--objective", "objective:Flat")
LOAD = """
import adlm
from network import Mixer
from objective import Flat

named = adlm.load("run", network="network:Mixer", objective="objective:Flat", device="cpu")
given = adlm.load("run", network=Mixer, objective=Flat, device="cpu")
text = named.generate(length=12, seed=1)
assert list(text) == list(given.generate(length=12, seed=1))
assert named.score("of the work")[0] == given.score("of the work")[0]

given.save("saved")
saved = adlm.load("saved", network="network:Mixer", objective="objective:Flat", device="cpu")
assert list(saved.generate(length=12, seed=1)) == list(text)
print(text.texts[0], end="")
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare_data(folder)
    return folder


@pytest.fixture
def own(folder: Path, prepared: Path) -> Path:
    """A folder with the examples, a recipe of them, and data."""
    shutil.copy(EXAMPLES / "network.yaml", folder)
    return shutil.copytree(prepared, folder, dirs_exist_ok=True)


def train_own(folder: Path, *changes: str, fails: bool = False) -> str:
    sizes = ("steps=4", "batch=4", "valid.every=2", "valid.rows=8", "checkpoint.every=2")
    own = ("train", "network.yaml", "data.path=data", "folder=run", "device=cpu", *sizes)
    return run_command(folder, *own, *changes, fails=fails)


def test_a_network_and_an_objective_train_score_sample_and_serve(own: Path) -> None:
    train_own(own, "samples.every=4")
    assert (own / "run" / "samples" / "step-00000004.txt").stat().st_size > 10
    content = json.loads((own / "run/checkpoints/latest/config.json").read_text("utf-8"))
    assert (content["network"], content["objective"]) == ("network:Mixer", "objective:Flat")
    assert content["model"]["dim"] == 64

    text = run(own, "-c", LOAD)
    printed = ("sample", "run", *OWN, "--length", "12", "--seed", "1", "--device", "cpu", "--json")
    assert json.loads(run_command(own, *printed))["texts"] == [text]
    result = json.loads(
        run_command(own, "eval", "ppl", "run", *OWN, "--data", "text.txt", "--json")
    )
    assert result["kind"] == "nelbo" and result["nll"] > 1
    scored = json.loads(run_command(own, "score", "a work", "--model", "run", *OWN, "--json"))
    assert scored["scores"][0]["nll"] > 1
    with serve(own, "run", *OWN, "--device", "cpu") as address:
        answer = complete(address, prompt="", max_tokens=12, seed=1)
        assert answer["choices"][0]["text"]


def test_a_run_of_an_own_network_resumes_and_starts_others(own: Path) -> None:
    train_own(own, "steps=2")
    train_own(own)
    whole = (own / "run" / "checkpoints" / "latest" / "model.safetensors").read_bytes()
    train_own(own, "folder=other")
    other = (own / "other" / "checkpoints" / "latest" / "model.safetensors").read_bytes()
    assert whole == other
    train_own(own, "folder=third", "init=run", "steps=1")
    for change, message in (
        ("init=adlm-prose", "has the built-in network 'transformer': leave model.network out"),
        ("init=run model.network=null model.options=null", "set model.network=MODULE:OBJECT"),
        ("init=run objective.name=null", "set objective.name to it"),
    ):
        error = train_own(own, "folder=fourth", "steps=1", *change.split(), fails=True)
        assert message in " ".join(error.split())


MISTAKES = {
    "model.dim=32": "model.dim is a setting of the transformer",
    "method=adlm": "method is a setting of the transformer",
    "model.options={wings: 2}": "wings=2: unknown name",
    "model.network=network:Mixr": "network has no 'Mixr'",
    "objective.name=causal": "objective.name=causal does not fit a masked network",
    "objective.name=flat": "unknown objective 'flat'",
}


def test_mistakes_in_a_recipe_of_an_own_network(own: Path) -> None:
    given = ("network.yaml", "data.path=data", "folder=run", "steps=1")
    errors = run(own, "-c", TRY, *given, "--", *MISTAKES).splitlines()
    for line, message in zip(errors, MISTAKES.values(), strict=True):
        assert message in json.loads(line)


def test_a_folder_of_an_own_network_says_what_it_needs(own: Path) -> None:
    train_own(own)
    error = run_command(own, "sample", "run", fails=True)
    assert "the network 'network:Mixer' is not built in" in error and "--network" in error
    error = run_command(own, "sample", "run", "--network", "network:Mixer", fails=True)
    assert "the objective 'objective:Flat' is not built in" in error and "--objective" in error
    error = run_command(own, "sample", MODEL, *OWN[:2], fails=True)
    assert "this model has the built-in network 'transformer': leave network= out" in error
    for words in (
        ("export", "run", "--out", "hub"),
        ("convert", "run", "--out", "model.ckpt", "--to", "lightning"),
        ("eval", "anchors", "run", "--data", "text.txt", *OWN),
    ):
        assert (
            "needs the transformer, and this model has the network 'network:Mixer'"
            in run_command(own, *words, fails=True)
        )
