"""`adlm train` end to end; a user's mistake is one message."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file

from adlm.data.tokenizers import train_bpe
from adlm.models.folder import load_model
from adlm.training.logging import read_metrics
from adlm.training.state import verify_checkpoint
from tests.cli.terminal import invoke
from tests.training.runs import ROOT, TEXT, arguments, data, run

SMALL = (
    "batch=8",
    "model.dim=32",
    "model.heads=2",
    "model.anchor_layers=1",
    "optimizer.warmup=3",
    "device=cpu",
)


def nano(folder: Path, *changes: str, source: Path | None = None) -> list[str]:
    """The contract's own words, with a smaller model."""
    given = [f"data.path={source or data()}", f"folder={folder}", "steps=12"]
    return ["train", "recipes/cpu-nano.yaml", *given, *SMALL, *changes]


def assert_error(result: Result, code: int, *parts: str) -> None:
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output
    (error,) = (line for line in result.output.splitlines() if line.startswith("error: "))
    assert [part for part in parts if part not in error] == []


def last_valid(folder: Path) -> dict[str, Any]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if "val/ppl" in record][-1]


def test_a_run_ends_with_its_folder_and_its_metrics(tmp_path: Path) -> None:
    result = invoke(*nano(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    *_, place, metrics = result.output.strip().splitlines()
    assert str(tmp_path / "run" / "checkpoints" / "latest") in place
    valid = last_valid(tmp_path / "run")
    assert metrics.startswith(
        f"{tmp_path / 'run'}: validation perplexity at most {valid['val/ppl']:.2f}"
    )
    assert f"unigram model {valid['unigram/ppl']:.2f}" in metrics
    for name in ("checkpoints/latest/model.safetensors", "metrics.jsonl", "config.yaml"):
        assert (tmp_path / "run" / name).is_file()
    loaded = load_model(tmp_path / "run")
    assert (loaded.step, loaded.model.config.vocab_size, loaded.model.config.length) == (
        12,
        300,
        32,
    )


@pytest.mark.slow
def test_the_model_learns_more_than_how_often_tokens_occur(tmp_path: Path) -> None:
    assert invoke(*nano(tmp_path, "steps=500", "valid.draws=8")).exit_code == 0
    valid = last_valid(tmp_path)
    assert valid["val/ppl"] * math.exp(2 * valid["val/stderr"]) < valid["unigram/ppl"]


@pytest.mark.parametrize("damage", ["cut", "changed", "tokenizer"])
def test_damaged_data_are_refused(tmp_path: Path, damage: str) -> None:
    shutil.copytree(data(), tmp_path / "data")
    shard = tmp_path / "data" / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    if damage == "tokenizer":
        train_bpe([TEXT[:5000]], 280).save(tmp_path / "data")
    else:
        shard.write_bytes(content if damage == "changed" else content[:-2])
    parts = {"cut": ["train-00000.bin", "bytes"], "changed": ["train-00000.bin", "checksum"]}
    result = invoke(*nano(tmp_path / "run", source=tmp_path / "data"))
    assert_error(result, 2, *parts.get(damage, ["tokenizer.json", "checksum"]), "adlm prepare")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.lrate=1", "did you mean optimizer.lr"),
        ("method=gpt", "unknown method 'gpt': expected one of mdlm, adlm"),
        ("model.preset=huge", "unknown preset 'huge'"),
        ("model.heads=5", "5"),
        ("objective.anchor_rule=loud", "unknown anchor rule 'loud'"),
        ("objective.max_fraction=0.1", "one of them"),
        ("samples.sampler=fastest", "unknown sampler 'fastest'"),
        ("parallel.kind=fsdp", "needs torchrun"),
        ("data.path=nowhere", "manifest.json"),
        ("device=gpu", "auto, cpu, cuda"),
        ("device=cuda:99", "cuda"),
        ("resume=nowhere", "is not a checkpoint"),
        ("batch=100000000", "Reduce micro_batch"),
        (
            "log.track=[paper]",
            "unknown tracker 'paper': expected one of tensorboard, wandb, trackio",
        ),
    ],
)
def test_a_wrong_setting_is_one_message(tmp_path: Path, change: str, message: str) -> None:
    assert_error(invoke(*nano(tmp_path / "run", change)), 2, message)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert change.startswith("log.track") or not (tmp_path / "run" / "config.yaml").exists()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine", "utf-8")
    assert_error(invoke(*nano(tmp_path / "run")), 2, "is a file")
    assert (tmp_path / "run").read_text("utf-8") == "mine"


@pytest.mark.parametrize(
    "changes",
    [
        ("valid.every=100",),
        ("valid.every=1",),
        ("guard.spike=null", "log.every=100", "valid.every=100"),
    ],
    ids=["seen in the loss", "seen in validation", "not looked for"],
)
def test_a_run_that_diverges_stops_with_its_batch(tmp_path: Path, changes: tuple[str, ...]) -> None:
    result = invoke(
        "train", *arguments(tmp_path, "optimizer.lr=1e30", "checkpoint.every=100", *changes)
    )
    assert_error(
        result,
        1,
        "step",
        "failures",
        "Look at these rows, or start a new run with a smaller optimizer.lr",
    )
    assert (
        "resume=" not in result.output and "guard.spike" not in result.output
    )  # there is no checkpoint, and no spike
    kept = list((tmp_path / "failures").glob("step-*-process-0"))
    assert len(kept) == 1
    assert load_file(kept[0] / "batch.safetensors")["tokens"].shape == (8, 32)
    assert json.loads((kept[0] / "error.json").read_text("utf-8"))["step"] >= 1


def test_a_spike_stops_the_run_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    spike = ("guard.window=5", "guard.spike=0.01", "optimizer.lr=1e-6", "steps=60", "log.every=1")
    result = invoke("train", *arguments(tmp_path, *spike))
    assert_error(
        result,
        1,
        "guard.spike=0.01",
        "failures",
        "a larger guard.spike, or null, resumes this run from step",
    )
    path = verify_checkpoint(tmp_path / "checkpoints" / "latest")
    failed = int(next((tmp_path / "failures").iterdir()).name.split("-")[1])
    assert 5 <= load_model(path).step < failed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_during_the_imports_has_the_exit_code_of_a_stop(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [
        sys.executable,
        "-m",
        "adlm",
        "train",
        "cpu-nano",
        f"data.path={data()}",
        f"folder={tmp_path / 'run'}",
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        status, mask = Path(f"/proc/{process.pid}/status"), 1 << number - 1
        while (
            not int(status.read_text("utf-8").split("SigCgt:")[1].split()[0], 16) & mask
        ):  # caught by no handler yet
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(number)
        assert (
            process.communicate(timeout=60)[1]
            == "stopped; the same command starts or resumes the run\n"
        )
    assert process.returncode == 75 and not (tmp_path / "run").exists()


def test_with_json_stdout_has_only_the_result(tmp_path: Path) -> None:
    result = invoke("train", *arguments(tmp_path, "log.show=true"), "--json")
    assert result.exit_code == 0, result.output
    printed, valid = json.loads(result.stdout), last_valid(tmp_path)
    assert (printed["folder"], printed["step"]) == (str(tmp_path), 10)
    assert printed["valid"] == {
        name: valid[name] for name in ("val/nll", "val/ppl", "val/stderr", "unigram/ppl")
    }
    assert load_model(Path(printed["checkpoint"])).step == 10
    assert "validation perplexity" in result.stderr  # progress
    wrong = invoke("train", *arguments(tmp_path, "stepps=3"), "--json")
    assert wrong.exit_code == 2 and wrong.stdout == ""


def test_samples_are_written_while_training(tmp_path: Path) -> None:
    run(tmp_path, "samples.every=5", "samples.steps=4")
    written = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert written == ["step-00000005.txt", "step-00000010.txt"]
    plain = tmp_path / "plain"
    run(plain)
    mine, theirs = (path / "checkpoints/latest/model.safetensors" for path in (tmp_path, plain))
    assert mine.read_bytes() == theirs.read_bytes()  # to look on changes nothing


def test_a_line_of_python_is_enough(tmp_path: Path) -> None:
    changes = dict(change.split("=") for change in SMALL)
    given = f"folder={str(tmp_path)!r}, data={{'path': {str(data())!r}}}, steps=12, **{changes!r}"
    code = f"import adlm; run = adlm.train('recipes/cpu-nano.yaml', {given}); print(run.step, run.valid)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("12 {'val/nll': ")
