"""A run that was stopped anywhere and resumed computes and logs what one that was not does."""

import json
import math
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import adlm
from tests.laws import adapter
from tests.laws.commands import read_metrics, start_command
from tests.laws.texts import FIXTURES, METHODS

Workplace = Callable[..., Path]


def run_changes(method: str, folder: str, *changes: str, rows: str = "wrapped") -> list[str]:
    """Return a recipe and its changes for a run of a method."""
    words = ["recipe.yaml", f"method={method}", f"data.path=data-{rows}", f"folder={folder}"]
    if not adapter.has_two_stages(method):
        words.append("model.anchor_layers=null")
    if not adapter.is_causal(method):
        words.append("model.cond_dim=8")
    return [*words, *changes]


def train(method: str, folder: str, *changes: str, rows: str = "wrapped") -> None:
    """Train in this process."""
    adlm.train(*run_changes(method, folder, *changes, rows=rows))


def read_tensors(folder: str) -> dict[str, Tensor]:
    """Return all tensors of a run's latest checkpoint, by file and name."""
    latest = (Path(folder) / "checkpoints" / "latest").resolve()
    found = {}
    for path in sorted(latest.rglob("*.safetensors")):
        for name, value in load_file(path).items():
            found[f"{path.relative_to(latest)}: {name}"] = value
    assert found
    return found


def assert_same_runs(one: str, other: str) -> None:
    """Compare all tensors bit for bit, and all metrics but for times."""
    mine, theirs = read_tensors(one), read_tensors(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert read_metrics(Path(one)) == read_metrics(Path(other))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_in_two_parts_is_the_run(method: str, workplace: Workplace) -> None:
    """With dropout and an average of the weights, over the end of an epoch."""
    workplace("recipe.yaml", "data-wrapped")
    train(method, "whole", "steps=10", "valid.every=5", "checkpoint.every=5")
    train(method, "parts", "steps=5", "valid.every=5", "checkpoint.every=5")
    before = read_tensors("parts")
    train(method, "parts", "steps=10", "valid.every=5", "checkpoint.every=5")
    assert_same_runs("parts", "whole")
    after = read_tensors("parts")
    assert any(not torch.equal(before[name], after[name]) for name in before)


CASES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "documents": ("adlm", (), "documents"),
    "causal documents": ("a2r", (), "documents"),
    "muon": ("adlm", ("optimizer.name=muon", "optimizer.muon_lr=0.01"), "wrapped"),
    "micro-batches": ("mdlm", ("micro_batch=3", "ema=null"), "wrapped"),
    "random anchors": (
        "adlm",
        ("objective.anchor_rule=random", "objective.fraction=0.3", "data.workers=1"),
        "wrapped",
    ),
    "discrete": ("mdlm", ("objective.discrete_steps=7", "objective.time_std=0.3"), "wrapped"),
}


@pytest.mark.parametrize("case", CASES)
def test_other_runs_in_two_parts(case: str, workplace: Workplace) -> None:
    method, changes, rows = CASES[case]
    workplace("recipe.yaml", f"data-{rows}")
    changes = (*changes, "valid.every=4", "checkpoint.every=4")
    train(method, "whole", "steps=8", *changes, rows=rows)
    train(method, "parts", "steps=4", *changes, rows=rows)
    train(method, "parts", "steps=8", *changes, rows=rows)
    assert_same_runs("parts", "whole")


LONG = ("steps=150", "valid.every=50", "checkpoint.every=20", "checkpoint.background=false")


def kill_in_training(method: str, place: Path, step: int) -> None:
    """Start `adlm train` in a process of its own and kill it once a step is in its metrics."""
    words = run_changes(method, "torn", *LONG)
    metrics = place / "torn" / "metrics.jsonl"
    with start_command("train", *words, cwd=place, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if metrics.exists() and f'"step": {step},' in metrics.read_text("utf-8"):
                process.kill()
            time.sleep(0.002)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_a_killed_run_resumes_bit_for_bit(method: str, workplace: Workplace) -> None:
    """Killed somewhere between two checkpoints: the same command again ends in the same run."""
    place = workplace("recipe.yaml", "data-wrapped")
    kill_in_training(method, place, 23)
    checkpoints = place / "torn" / "checkpoints"
    assert list(checkpoints.glob("step-*")), "there is nothing to resume from: the test is void"
    assert not (checkpoints / "step-00000150").exists(), "the run had ended: the test is void"
    train(method, "torn", *LONG)
    train(method, "straight", *LONG)
    assert_same_runs("torn", "straight")


def test_a_finished_run_is_not_trained_further(workplace: Workplace) -> None:
    workplace("recipe.yaml", "data-wrapped")
    train("adlm", "run")
    before, metrics = read_tensors("run"), read_metrics(Path("run"))
    train("adlm", "run")
    after = read_tensors("run")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert read_metrics(Path("run")) == metrics


def test_the_average_is_what_is_loaded(workplace: Workplace) -> None:
    """It follows the weights with the decay of the recipe, from the first step on."""
    workplace("recipe.yaml", "data-wrapped")
    shared = ("model.dropout=0.0", "checkpoint.every=1", "checkpoint.keep=9", "valid.every=100")
    train("mdlm", "averaged", "steps=3", *shared, "ema=0.5")
    train("mdlm", "plain", "steps=3", *shared, "ema=null")
    weights = []
    for step in (1, 2, 3):
        path = Path("plain") / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
        weights.append(load_file(path))
    latest = load_file(Path("averaged") / "checkpoints" / "latest" / "model.safetensors")
    # The lineage's decay of update n is min(decay, (1 + n) / (10 + n)).
    decays = [min(0.5, (1 + n) / (10 + n)) for n in (1, 2, 3)]
    start = adlm.load("plain/checkpoints/step-00000001", device="cpu").model
    config = start.config
    average = {
        name: value.clone() for name, value in type(start)(config, seed=0).state_dict().items()
    }
    for decay, current in zip(decays, weights, strict=True):
        for name in average:
            average[name] = decay * average[name] + (1 - decay) * current[name]
    for name, value in latest.items():
        torch.testing.assert_close(value, average[name], atol=1e-6, rtol=1e-5)


def test_the_learning_rate_rises_from_the_first_step_and_falls_to_the_last(
    workplace: Workplace,
) -> None:
    """It is warmed up over 3 steps, and ends at the floor (cosine) or near 0 (wsd)."""
    workplace("recipe.yaml", "data-wrapped")
    shared = ("steps=8", "optimizer.lr=1e-2", "optimizer.warmup=3", "valid.every=100")
    falls = {
        "constant": [1, 1, 1, 1, 1, 1],
        "cosine": [0.1 + 0.45 * (1 + math.cos(math.pi * n / 5)) for n in range(6)],
        "wsd": [1, 1, 1, 3 / 4, 2 / 4, 1 / 4],
    }
    for decay, fall in falls.items():
        own = ("optimizer.decay_share=0.5",) if decay == "wsd" else ()
        train("mdlm", decay, *shared, f"optimizer.decay={decay}", *own)
        found = [each["lr"] for each in read_metrics(Path(decay)) if "lr" in each]
        expected = [1e-2 * share for share in [1 / 3, 2 / 3, *fall]]
        assert found == pytest.approx(expected, rel=1e-6)


def test_the_first_step_is_as_long_as_its_learning_rate(workplace: Workplace) -> None:
    """Adam divides its first gradient by its own size: what is left is the rate, warmed up."""
    workplace("recipe.yaml", "data-wrapped")
    own = ("steps=1", "ema=null", "optimizer.lr=1e-2", "optimizer.warmup=4")
    train("mdlm", "run", *own)
    model = adlm.load("run", device="cpu").model
    start = type(model)(model.config, seed=0).state_dict()
    moved = [(value - start[name]).abs().max() for name, value in model.state_dict().items()]
    assert float(max(moved)) == pytest.approx(1e-2 / 4, rel=1e-3)


OLD_RUNS = FIXTURES / "runs.jsonl"
RECIPES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "moments": (
        "adlm",
        ("optimizer.betas=[0.7,0.8]", "optimizer.weight_decay=0.5", "optimizer.eps=1e-3"),
        "wrapped",
    ),
    "ramp": ("adlm", ("objective.anchor_ramp=true", "objective.anchor_weight=0.5"), "wrapped"),
    "seed": ("mdlm", ("seed=3", "ema=null", "optimizer.clip=0.1"), "wrapped"),
    "epochs": ("ar", ("batch=48", "steps=9"), "wrapped"),
    "documents": ("a2r", ("seed=1", "objective.max_count=2"), "documents"),
    "discrete": ("mdlm", ("objective.discrete_steps=7", "objective.time_std=0.3"), "wrapped"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_run_is_the_run_of_an_earlier_version(case: str, workplace: Workplace) -> None:
    method, changes, rows = RECIPES[case]
    workplace("recipe.yaml", f"data-{rows}")
    train(method, "run", *changes, rows=rows)
    records = [json.loads(line) for line in OLD_RUNS.read_text("utf-8").splitlines()]
    (expected,) = [each["metrics"] for each in records if each["case"] == case]
    found = read_metrics(Path("run"))
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=2e-4, abs=1e-5), (mine["step"], key)


def test_the_best_checkpoint_has_the_least_loss_on_held_out_rows(workplace: Workplace) -> None:
    """Where the rate is small at first the last is best, where it is huge an earlier one."""
    workplace("recipe.yaml", "data-wrapped")
    places = set()
    for rate in ("1e-2", "0.3"):
        own = ("steps=12", "valid.every=3", "checkpoint.every=3", f"optimizer.lr={rate}")
        train("mdlm", rate, *own, "optimizer.warmup=9", "checkpoint.keep=9", "ema=null")
        found = [each for each in read_metrics(Path(rate)) if "val/nll" in each]
        least = min(found, key=lambda each: each["val/nll"])["step"]
        best = (Path(rate) / "checkpoints" / "best").resolve()
        assert best.name == f"step-{least:08d}"
        places.add(least)
    assert len(places) == 2


def test_the_size_of_micro_batches_changes_rounding_alone(workplace: Workplace) -> None:
    workplace("recipe.yaml", "data-documents")
    shared = ("model.dropout=0.0", "steps=4")
    train("adlm", "whole", *shared, rows="documents")
    train("adlm", "micro", *shared, "micro_batch=3", rows="documents")
    for one, other in zip(read_metrics(Path("whole")), read_metrics(Path("micro")), strict=True):
        for key, value in one.items():
            assert other[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_another_seed_is_another_run(workplace: Workplace) -> None:
    workplace("recipe.yaml", "data-wrapped")
    train("adlm", "one")
    train("adlm", "other", "seed=1")
    train("adlm", "again")
    assert_same_runs("one", "again")
    losses = [read_metrics(Path(name))[0]["train/loss"] for name in ("one", "other")]
    assert losses[0] != losses[1]


def test_other_settings_do_not_resume(workplace: Workplace) -> None:
    workplace("recipe.yaml", "data-wrapped", "data-documents")
    train("adlm", "run")
    before = read_metrics(Path("run"))
    with pytest.raises(ValueError, match="batch") as caught:
        train("adlm", "run", "steps=8", "batch=4", "optimizer.lr=0.1")
    assert "lr" in str(caught.value)
    with pytest.raises(ValueError, match="data"):
        train("adlm", "run", "steps=8", rows="documents")
    assert read_metrics(Path("run")) == before


def test_training_learns(workplace: Workplace) -> None:
    """In 60 steps the text's bytes become likelier than by their frequencies alone at the start."""
    workplace("recipe.yaml", "data-wrapped")
    changes: dict[str, Any] = {"mdlm": (), "ar": ()}
    for method in changes:
        train(method, method, "steps=60", "valid.every=30", "model.dim=16", "optimizer.lr=0.02")
        losses = [each["val/nll"] for each in read_metrics(Path(method)) if "val/nll" in each]
        assert losses[-1] < losses[0] < 5.6
        assert losses[-1] < 3.6
