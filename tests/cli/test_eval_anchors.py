"""`adlm eval anchors` and `adlm.evaluate.anchors`: a run, its checkpoints, several runs, and what is refused."""

from functools import cache, partial
from pathlib import Path

import pytest

import adlm
import adlm.evaluate
from adlm.evaluate.anchors import find_anchor_rule, list_run_checkpoints
from adlm.evaluate.data import load_eval_data
from adlm.likelihood import estimate_nll
from tests.cli.eval_answers import evaluate
from tests.cli.eval_answers import held_out as text
from tests.cli.terminal import assert_told, invoke, trained
from tests.evaluate.drawn import pixels, with_matplotlib
from tests.evaluate.scorers import causal_folder, needs
from tests.training.runs import run, shelf

FEW = ("--limit", 8, "--draws", 2, "--perturb", "0.5", "--stale", "2", "--device", "cpu")
BARE = ("--limit", 4, "--draws", 1, "--perturb", "", "--stale", "", "--device", "cpu")
TEXTS = ("--samples", 2, "--length", 12, "--steps", 3)
run_json = partial(evaluate, "anchors")


@cache
def train_run(name: str, *settings: str) -> str:
    """A run that keeps its checkpoints of steps 2, 4 and 6."""
    folder = shelf() / f"run-{name}"
    run(folder, "steps=6", "checkpoint.every=2", "checkpoint.keep=3", *settings)
    return str(folder)


@cache
def long_run() -> str:
    return train_run("long", "objective.max_count=2")


@with_matplotlib
def test_a_model_is_measured_once_and_drawn(tmp_path: Path) -> None:
    words = (trained(), "--data", text(), *FEW, *TEXTS, "--out", tmp_path)
    found = run_json(*words)
    (model,) = found["models"]
    assert [loss["change"] for loss in model["losses"]] == ["none", "noise 0.5", "permuted", "other_row", "stale 2"]
    assert [sample["change"] for sample in model["samples"]] == ["none", "noise 0.5", "permuted", "stale 2"]
    assert {each["sampler"] for each in model["reveals"]} == {"ancestral", "confidence"}
    assert found["correlations"] == [] and "at least 3 models" in found["no_correlation"][0]
    settings = found["settings"]["models"][0]
    assert settings["anchors"] == {"rule": "rare_in_sequence", "max_count": 5}
    assert len(settings["data"]["rows_hash"]) == 64 and found["provenance"]["versions"]["torch"]
    assert {path.name for path in tmp_path.iterdir()} == {"anchors.json", "anchors.png", "cache.jsonl"}
    assert pixels(tmp_path / "anchors.png").std() > 0.05
    before = (tmp_path / "cache.jsonl").read_bytes()
    assert run_json(*words)["models"] == found["models"]
    assert (tmp_path / "cache.jsonl").read_bytes() == before  # nothing was measured again


def test_the_function_gives_what_the_command_prints_and_the_bound_of_the_rows() -> None:
    found, lm = run_json(trained(), "--data", text(), *FEW), adlm.load(trained(), device="cpu")
    result = adlm.evaluate.anchors(lm, text(), limit=8, draws=2, perturb=[0.5], stale=[2])
    assert result["models"][0]["losses"] == found["models"][0]["losses"] and "anchor network" in str(result)
    rows = load_eval_data(text(), lm.tokenizer, lm.model.config.length, limit=8).rows
    bound = estimate_nll(lm.model, rows, draws=2).nll
    assert found["models"][0]["losses"][0]["nll"] == pytest.approx(bound, rel=1e-5)


@with_matplotlib
def test_checkpoints_of_a_run_are_correlated(tmp_path: Path) -> None:
    words = (long_run(), "--checkpoints", "--data", text(), *FEW)
    found = run_json(*words, "--out", tmp_path)
    assert [model["step"] for model in found["models"]] == [2, 4, 6]
    (one,) = found["correlations"]
    assert (one["points"], one["y"], one["low"], one["high"]) == (3, "nll", -1, 1)
    assert pixels(tmp_path / "correlation.png").std() > 0.03
    result = invoke("eval", "anchors", *words)
    assert "all models" in result.stdout and f"{one['rho']:.2f} (-1.00–1.00)" in result.stdout
    assert any("of one run" in reason for reason in found["no_correlation"]) and "of one run" in result.stderr


@with_matplotlib
def test_checkpoints_of_several_runs_are_compared(tmp_path: Path) -> None:
    """Nothing is perturbed, and every checkpoint is measured once."""
    needs("transformers")
    runs = [
        train_run(f"seed-{seed}", f"seed={seed}", f"optimizer.lr={lr}")
        for seed, lr in ((1, 3e-3), (2, 1e-3), (3, 1e-2))
    ]
    words = (*runs, "--checkpoints", "--data", text(), *BARE, "--limit", 8, "--draws", 2, "--out", tmp_path)
    words = (*words, "--samples", 6, "--length", 24, "--steps", 4, "--judge", causal_folder())
    found = run_json(*words)
    assert [(Path(each["model"]).parent.parent.name, each["step"]) for each in found["models"]] == [
        (f"run-seed-{seed}", step) for seed in (1, 2, 3) for step in (2, 4, 6)
    ]
    for model in found["models"]:
        assert [loss["change"] for loss in model["losses"]] == ["none"]
        assert [sample["change"] for sample in model["samples"]] == ["none"] and len(model["reveals"]) == 1
    looks = [(each["y"], each["among"], each["points"], each["independent"]) for each in found["correlations"]]
    among = (("all models", 9, 9), ("within runs", 9, 7), ("at equal steps", 9, 3))
    assert looks == [(y, *look) for y in ("nll", "gen_ppl", "entropy") for look in among]
    files = {"anchors.json", "cache.jsonl", "correlation.png"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert pixels(tmp_path / "correlation.png").std() > 0.03
    assert len((tmp_path / "cache.jsonl").read_text("utf-8").splitlines()) == 9
    again = run_json(*words, "--batch", 3)  # the batch size is no other setting
    assert again["models"] == found["models"] and again["correlations"] == found["correlations"]
    assert len((tmp_path / "cache.jsonl").read_text("utf-8").splitlines()) == 9
    result = invoke("eval", "anchors", *words)
    assert "run-seed-1" in result.stdout and "within runs" in result.stdout and "head" not in result.stdout


def test_models_that_do_not_compare_are_not_correlated() -> None:
    models = (long_run(), trained(), train_run("seed-1", "seed=1", "optimizer.lr=0.003"))
    found = run_json(*models, "--data", text(), *BARE)
    assert found["correlations"] == [] and "give max_count" in found["no_correlation"][0]
    found = run_json(*models, "--data", text(), *BARE, "--max-count", 2)
    assert found["correlations"] or "max_count" not in found["no_correlation"][0]
    checkpoints = list_run_checkpoints([long_run()])
    found = run_json(long_run(), *checkpoints, "--data", text(), *BARE)
    assert found["correlations"] == []
    assert f"{checkpoints[-1]} has the same weights as {long_run()}" in found["no_correlation"][0]


def test_the_rule_is_that_of_the_run() -> None:
    assert len(list_run_checkpoints([long_run()])) == 3
    for name in (long_run(), list_run_checkpoints([long_run()])[0]):
        assert find_anchor_rule(adlm.load(name, device="cpu"))[1] == {"rule": "rare_in_sequence", "max_count": 2}
    assert find_anchor_rule(adlm.load(long_run(), device="cpu"), 7)[1]["max_count"] == 7


def test_texts_are_scored_whole_or_in_windows() -> None:
    needs("transformers")
    words = (trained(), "--data", text(), *BARE, "--stale", 2, "--samples", 2, "--length", 28, "--steps", 3)
    whole, parts = (run_json(*words, "--judge", causal_folder(), *more) for more in ((), ("--window", 8)))
    assert parts["settings"]["models"][0]["scorer"]["judge"]["window"] == 8
    own, *_, late = whole["models"][0]["samples"]
    assert own["gen_ppl"] > 0 and late["change"] == "stale 2" and late["gen_ppl"] > 0
    first = parts["models"][0]["samples"][0]
    assert first["gen_ppl"] != own["gen_ppl"] and first["entropy"] == own["entropy"] > 0


def test_the_tables_hold_the_numbers_of_the_json() -> None:
    words = (trained(), "--data", text(), *FEW, *TEXTS)
    result = invoke("eval", "anchors", *words)
    assert result.exit_code == 0, result.output
    (model,) = run_json(*words)["models"]
    for loss in model["losses"][1:]:
        assert f"{loss['cost']:.3f} ± {loss['cost_se']:.3f}" in result.stdout
    for sample in model["samples"]:
        assert f"{sample['entropy']:.3f}" in result.stdout
    assert "calibration error" in result.stdout and "mean rank of reveals" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--perturb", "loud"), "--perturb 'loud': 'loud' is not a number"),
        (("--perturb", "-1"), "must be finite and not negative"),
        (("--stale", "0"), "at least 1"),
        (("--samples", 1), "samples must be 0 or at least 2"),
        (("--rows", "any"), "rows must be one of"),
        (("--judge", "anyone"), "give samples too"),
        (("--window", 8), "window=8 needs a scoring model"),
        (("--data", "nowhere.txt"), "nowhere.txt"),
        (("--samples", 2, "--sampler", "fast"), "unknown sampler 'fast'"),
    ],
)
def test_mistakes_are_one_line(words: tuple[object, ...], message: str) -> None:
    assert_told(invoke("eval", "anchors", trained(), "--data", text(), *FEW, *words, "--json"), message)


def test_other_models_and_missing_data_are_refused() -> None:
    assert_told(invoke("eval", "anchors", trained("mdlm"), "--data", text(), *FEW), "one stage", "method=adlm")
    assert_told(invoke("eval", "anchors", trained("a2r"), "--data", text(), *FEW), "causal", "two-stage masked")
    assert_told(invoke("eval", "anchors", trained()), "--data is required")
