"""`adlm eval anchors` and `adlm.evaluate.anchors`: a run, its checkpoints, several runs, and what is refused."""

from functools import cache, partial
from pathlib import Path

import pytest

import adlm
import adlm.evaluate
from adlm.evaluate.anchor_study import find_anchor_rule, list_run_checkpoints
from adlm.evaluate.data import load_eval_data
from adlm.likelihood import estimate_nll
from tests.cli.eval_answers import evaluate
from tests.cli.eval_answers import held_out as text
from tests.cli.terminal import invoke, trained
from tests.evaluate.scorers import causal_folder, needs, pixels, with_matplotlib
from tests.training.runs import run, shelf

FEW = ("--limit", 8, "--draws", 2, "--perturb", "0.5", "--stale", "2", "--device", "cpu")
BARE = ("--limit", 4, "--draws", 1, "--perturb", "", "--stale", "", "--device", "cpu")
run_json = partial(evaluate, "anchors")


@cache
def train_run(name: str, *settings: str) -> str:
    """A run that keeps its checkpoints of steps 2, 4 and 6."""
    folder = shelf() / f"run-{name}"
    run(folder, "steps=6", "checkpoint.every=2", "checkpoint.keep=3", *settings)
    return str(folder)


def train_seed(seed: int) -> str:
    return train_run(f"seed-{seed}", f"seed={seed}", f"optimizer.lr={(3e-3, 1e-3, 1e-2)[seed - 1]}")


@with_matplotlib
def test_a_model_is_measured_once_drawn_and_printed(tmp_path: Path) -> None:
    words = (trained(), "--data", text(), *FEW, "--samples", 2, "--length", 12, "--steps", 3, "--out", tmp_path)
    found, lm = run_json(*words), adlm.load(trained(), device="cpu")
    (model,) = found["models"]
    names = ["none", "noise 0.5", "permuted", "other_row", "stale 2"]
    assert [loss["perturbation"] for loss in model["losses"]] == names
    assert [sample["perturbation"] for sample in model["samples"]] == [each for each in names if each != "other_row"]
    assert {each["sampler"] for each in model["reveals"]} == {"ancestral", "confidence"}
    assert found["correlations"] == [] and "at least 3 models" in found["skipped_correlations"][0]
    settings = found["settings"]["models"][0]
    assert settings["anchors"] == {"rule": "rare_in_sequence", "max_count": 5}
    assert len(settings["data"]["rows_hash"]) == 64 and found["provenance"]["versions"]["torch"]
    assert {path.name for path in tmp_path.iterdir()} == {"anchors.json", "anchors.png", "cache.jsonl"}
    assert pixels(tmp_path / "anchors.png").std() > 0.05
    before = (tmp_path / "cache.jsonl").read_bytes()
    result = invoke("eval", "anchors", *words)
    assert (tmp_path / "cache.jsonl").read_bytes() == before  # nothing was measured again
    for row, name in [(loss, "cost") for loss in model["losses"][1:]] + [(row, "entropy") for row in model["samples"]]:
        assert f"{row[name]:.3f} ± {row[f'{name}_se']:.3f}" in result.stdout
    assert "calibration error" in result.stdout and "mean rank of reveals" in result.stdout
    same = adlm.evaluate.anchors(lm, text(), limit=8, draws=2, perturb=[0.5], stale=[2])
    assert same["models"][0]["losses"] == model["losses"] and "anchor network" in str(same)
    rows = load_eval_data(text(), lm.tokenizer, lm.model.config.length, limit=8).rows
    assert model["losses"][0]["nll"] == pytest.approx(estimate_nll(lm.model, rows, draws=2).nll, rel=1e-5)


@with_matplotlib
def test_checkpoints_of_several_runs_are_compared(tmp_path: Path) -> None:
    """Nothing is perturbed, and every checkpoint is measured once."""
    needs("transformers")
    runs = [train_seed(seed) for seed in (1, 2, 3)]
    words = ("--checkpoints", "--data", text(), *BARE, "--out", tmp_path)
    words = (*words, "--samples", 4, "--length", 24, "--steps", 3, "--judge", causal_folder())
    found = run_json(*runs, *words)
    assert [(Path(each["model"]).parent.parent.name, each["step"]) for each in found["models"]] == [
        (f"run-seed-{seed}", step) for seed in (1, 2, 3) for step in (2, 4, 6)
    ]
    for model in found["models"]:
        assert [loss["perturbation"] for loss in model["losses"]] == ["none"]
        assert [sample["perturbation"] for sample in model["samples"]] == ["none"] and len(model["reveals"]) == 1
    looks = [(each["y"], each["among"], each["points"], each["independent"]) for each in found["correlations"]]
    among = (("all models", 9, 9), ("within runs", 9, 7), ("at equal steps", 9, 3))
    assert looks == [(y, *look) for y in ("nll", "gen_ppl", "entropy") for look in among]
    assert {path.name for path in tmp_path.iterdir()} == {"anchors.json", "cache.jsonl", "correlation.png"}
    assert pixels(tmp_path / "correlation.png").std() > 0.03
    again = run_json(*runs, *words, "--batch", 3)  # the batch size is no other setting
    assert again["models"] == found["models"] and again["correlations"] == found["correlations"]
    result = invoke("eval", "anchors", runs[0], *words)
    assert "all models" in result.stdout and "head" not in result.stdout and "of one run" in result.stderr
    assert len((tmp_path / "cache.jsonl").read_text("utf-8").splitlines()) == 9


def test_runs_have_their_own_rules_and_are_compared_by_one() -> None:
    own = train_run("long", "objective.max_count=2")
    checkpoints = list_run_checkpoints([own])
    assert len(checkpoints) == 3
    for name in (own, checkpoints[0]):
        assert find_anchor_rule(adlm.load(name, device="cpu"))[1] == {"rule": "rare_in_sequence", "max_count": 2}
    models = (own, trained(), train_seed(1))
    found = run_json(*models, "--data", text(), *BARE)
    assert found["correlations"] == [] and "give max_count" in found["skipped_correlations"][0]
    found = run_json(*models, "--data", text(), *BARE, "--max-count", 2)
    assert found["correlations"] or "max_count" not in found["skipped_correlations"][0]
    found = run_json(own, *checkpoints, "--data", text(), *BARE)
    assert f"{checkpoints[-1]} has the same weights as {own}" in found["skipped_correlations"][0]
