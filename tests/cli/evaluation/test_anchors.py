"""`adlm eval anchors`: the study of a run, of its checkpoints, and what it refuses."""

from functools import cache, partial
from pathlib import Path

import pytest

import adlm
from adlm.evaluate.likelihood import held_out_bound
from adlm.evaluate.reading import read
from adlm.studies.anchors import checkpoints_of, rule_of
from tests.cli.evaluation import answers
from tests.cli.evaluation.answers import text
from tests.cli.terminal import assert_told, invoke, trained
from tests.evaluate.small_judges import causal_folder, needs
from tests.studies.drawn import pixels, with_matplotlib
from tests.training.runs import run, shelf

FEW = ("--limit", 8, "--draws", 2, "--perturb", "0.5", "--stale", "2", "--device", "cpu")
TEXTS = ("--samples", 2, "--length", 12, "--steps", 3)
answered = partial(answers.answered, "anchors")


@cache
def long_run() -> str:
    """A run that keeps three checkpoints."""
    return kept_run("long", "objective.max_count=2")


@cache
def kept_run(name: str, *settings: str) -> str:
    """A run that keeps its checkpoints of steps 2, 4 and 6."""
    folder = shelf() / f"run-{name}"
    run(folder, "steps=6", "checkpoint.every=2", "checkpoint.keep=3", *settings)
    return str(folder)


@with_matplotlib
def test_a_models_study_is_kept_and_drawn(tmp_path: Path) -> None:
    words = (trained(), "--data", text(), *FEW, *TEXTS, "--out", tmp_path)
    found = answered(*words)
    (model,) = found["models"]
    assert [loss["change"] for loss in model["losses"]] == ["none", "noise 0.5", "permuted", "other_row", "stale 2"]
    assert [sample["change"] for sample in model["samples"]] == ["none", "noise 0.5", "permuted", "stale 2"]
    assert {each["sampler"] for each in model["reveals"]} == {"ancestral", "confidence"}
    assert found["correlations"] == [] and "at least 3 models" in found["no_correlation"][0]
    said = found["settings"]["models"][0]
    assert said["anchors"] == {"rule": "rare_in_sequence", "max_count": 5} and len(said["reading"]["rows_hash"]) == 64
    assert [Path(name).name for name in found["files"]] == ["anchors.json", "anchors.png"]
    assert pixels(tmp_path / "anchors.png").std() > 0.05
    before = (tmp_path / "models.jsonl").read_bytes()
    assert answered(*words)["models"] == found["models"]
    assert (tmp_path / "models.jsonl").read_bytes() == before  # nothing was measured again


def test_the_bound_is_that_of_the_same_rows() -> None:
    (model,) = answered(trained(), "--data", text(), *FEW)["models"]
    lm = adlm.load(trained(), device="cpu")
    rows = read(text(), lm.tokenizer, lm.model.config.length, limit=8).rows
    assert model["losses"][0]["nll"] == pytest.approx(held_out_bound(lm.model, rows, draws=2).nll, rel=1e-5)


@with_matplotlib
def test_checkpoints_of_a_run_are_correlated(tmp_path: Path) -> None:
    words = (long_run(), "--checkpoints", "--data", text(), *FEW)
    found = answered(*words, "--out", tmp_path)
    assert [model["step"] for model in found["models"]] == [2, 4, 6]
    (one,) = found["correlations"]
    assert (one["points"], one["y"], one["low"], one["high"]) == (3, "nll", -1, 1)
    assert pixels(tmp_path / "correlation.png").std() > 0.03
    result = invoke("eval", "anchors", *words)
    assert " ".join(["nll", "all models", "3", f"{one['rho']:.2f}"]) in " ".join(result.stdout.split())
    assert any("of one run" in why for why in found["no_correlation"]) and "of one run" in result.output


@with_matplotlib
def test_checkpoints_of_several_runs_are_compared_as_they_are(tmp_path: Path) -> None:
    """Nothing is changed, texts are written and judged once, and everything is done once."""
    needs("transformers")
    runs = [
        kept_run(f"seed-{seed}", f"seed={seed}", f"optimizer.lr={lr}") for seed, lr in ((1, 3e-3), (2, 1e-3), (3, 1e-2))
    ]
    words = (*runs, "--checkpoints", "--data", text(), "--limit", 8, "--draws", 2, "--perturb", "", "--stale", "")
    texts = ("--samples", 6, "--length", 24, "--steps", 4, "--judge", causal_folder())
    words = (*words, *texts, "--out", tmp_path, "--device", "cpu")
    found = answered(*words)
    assert [(Path(each["model"]).parent.parent.name, each["step"]) for each in found["models"]] == [
        (f"run-seed-{seed}", step) for seed in (1, 2, 3) for step in (2, 4, 6)
    ]
    for model in found["models"]:
        assert [loss["change"] for loss in model["losses"]] == ["none"]
        assert [sample["change"] for sample in model["samples"]] == ["none"] and len(model["reveals"]) == 1
    looks = [(each["y"], each["among"], each["points"], each["independent"]) for each in found["correlations"]]
    every = (("all models", 9, 9), ("within runs", 9, 7), ("at equal steps", 9, 3))
    assert looks == [(y, *look) for y in ("nll", "gen_ppl", "entropy") for look in every]
    assert [Path(name).name for name in found["files"]] == ["anchors.json", "correlation.png", "correlation.md"]
    assert pixels(tmp_path / "correlation.png").std() > 0.03
    page = (tmp_path / "correlation.md").read_text("utf-8")
    assert all(f"| run-seed-{seed} | 4 | " in page for seed in (1, 2, 3))
    assert len((tmp_path / "models.jsonl").read_text("utf-8").splitlines()) == 9
    again = answered(*words, "--batch", 3)  # a batch is no other study
    assert again["models"] == found["models"] and again["correlations"] == found["correlations"]
    assert len((tmp_path / "models.jsonl").read_text("utf-8").splitlines()) == 9
    result = invoke("eval", "anchors", *words)
    assert "run-seed-1" in result.stdout and "within runs" in result.stdout and "head" not in result.stdout


def test_what_does_not_compare_is_not_correlated() -> None:
    words = ("--data", text(), "--limit", 4, "--draws", 1, "--perturb", "", "--stale", "", "--device", "cpu")
    models = (long_run(), trained(), kept_run("seed-1", "seed=1", "optimizer.lr=0.003"))
    found = answered(*models, *words)
    assert found["correlations"] == [] and "give --max-count N" in found["no_correlation"][0]
    found = answered(*models, *words, "--max-count", 2)
    assert found["correlations"] or "--max-count" not in found["no_correlation"][0]


def test_a_model_counts_once() -> None:
    words = ("--data", text(), "--limit", 4, "--draws", 1, "--perturb", "", "--stale", "", "--device", "cpu")
    run, *checkpoints = long_run(), *checkpoints_of(long_run())
    found = answered(run, *checkpoints, *words)
    assert found["correlations"] == [] and f"{checkpoints[-1]} has the weights of {run}" in found["no_correlation"][0]


def test_long_texts_are_judged_in_windows() -> None:
    needs("transformers")
    words = (trained(), "--data", text(), "--limit", 4, "--draws", 1, "--perturb", "", "--stale", "", "--device", "cpu")
    words = (*words, "--samples", 2, "--length", 28, "--steps", 3, "--judge", causal_folder())
    whole, parts = (answered(*words, *more) for more in ((), ("--window", 8)))
    assert parts["settings"]["models"][0]["assessor"]["judge"]["window"] == 8
    assert parts["models"][0]["samples"][0]["gen_ppl"] != whole["models"][0]["samples"][0]["gen_ppl"]
    assert parts["models"][0]["samples"][0]["entropy"] == whole["models"][0]["samples"][0]["entropy"]


def test_the_rule_is_that_of_the_run() -> None:
    assert len(checkpoints_of(long_run())) == 3
    for name in (long_run(), checkpoints_of(long_run())[0]):
        assert rule_of(adlm.load(name, device="cpu"))[1] == {"rule": "rare_in_sequence", "max_count": 2}
    assert rule_of(adlm.load(long_run(), device="cpu"), 7)[1]["max_count"] == 7


def test_texts_are_judged() -> None:
    needs("transformers")
    (model,) = answered(trained(), "--data", text(), *FEW, *TEXTS, "--judge", causal_folder())["models"]
    as_it_is, *_, late = model["samples"]
    assert as_it_is["gen_ppl"] > 0 and late["change"] == "stale 2" and late["gen_ppl"] > 0
    assert all(sample["entropy"] > 0 for sample in model["samples"])


def test_the_tables_say_what_json_says() -> None:
    words = (trained(), "--data", text(), *FEW, *TEXTS)
    result = invoke("eval", "anchors", *words)
    assert result.exit_code == 0, result.output
    (model,) = answered(*words)["models"]
    for loss in model["losses"][1:]:
        assert f"{loss['cost']:.3f} ± {loss['cost_se']:.3f}" in result.stdout
    for sample in model["samples"]:
        assert f"{sample['entropy']:.3f}" in result.stdout
    assert "anchor network  hidden" in result.stdout and "rank of the reveal" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--perturb", "loud"), "--perturb 'loud': 'loud' is not a number"),
        (("--perturb", "-1"), "must not be negative"),
        (("--stale", "0"), "from 1 on"),
        (("--samples", 1), "samples must be 0 or at least 2"),
        (("--rows", "any"), "--rows is wrapped or documents"),
        (("--judge", "anyone"), "give --samples N too"),
        (("--window", 8), "--window 8 says how a judge reads"),
        (("--checkpoints",), "takes at least 3"),
        (("--data", "nowhere.txt"), "nowhere.txt"),
        (("--samples", 2, "--sampler", "fast"), "unknown sampler 'fast'"),
    ],
)
def test_mistakes_are_told_in_a_line(words: tuple[object, ...], said: str) -> None:
    assert_told(invoke("eval", "anchors", trained(), "--data", text(), *FEW, *words, "--json"), said)


def test_models_without_an_anchor_network_and_no_data_are_told() -> None:
    assert_told(invoke("eval", "anchors", trained("mdlm"), "--data", text(), *FEW), "one stage", "method=adlm")
    assert_told(invoke("eval", "anchors", trained("a2r"), "--data", text(), *FEW), "left to right", "masked two-stage")
    assert_told(invoke("eval", "anchors", trained()), "give --data FILE")
