"""`adlm eval anchors`: the study of a run, of its checkpoints, and what it refuses."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import adlm
from adlm.evaluate.likelihood import held_out_bound
from adlm.evaluate.reading import read
from adlm.studies.anchors import checkpoints_of, rule_of
from tests.cli.terminal import assert_told, invoke, trained
from tests.evaluate.small_judges import causal_folder, needs
from tests.studies.drawn import pixels, with_matplotlib
from tests.train.runs import TEXT, run, shelf

FEW = ("--limit", 8, "--draws", 2, "--perturb", "0.5", "--stale", "2", "--device", "cpu")
TEXTS = ("--samples", 2, "--length", 12, "--steps", 3)


@cache
def text() -> str:
    path = shelf() / "held-out.txt"
    path.write_text(TEXT[:4000], "utf-8")
    return str(path)


@cache
def long_run() -> str:
    """A run that keeps three checkpoints."""
    folder = shelf() / "run-long"
    run(folder, "steps=6", "checkpoint.every=2", "checkpoint.keep=3", "objective.max_count=2")
    return str(folder)


def answered(*words: object) -> dict[str, Any]:
    result = invoke("eval", "anchors", *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@with_matplotlib
def test_a_models_study_is_kept_and_drawn(tmp_path: Path) -> None:
    words = (trained(), "--data", text(), *FEW, *TEXTS, "--out", tmp_path)
    found = answered(*words)
    (model,) = found["models"]
    assert [loss["change"] for loss in model["losses"]] == ["none", "noise 0.5", "permuted", "other_row", "stale 2"]
    assert [sample["change"] for sample in model["samples"]] == ["none", "noise 0.5", "permuted", "stale 2"]
    assert {each["sampler"] for each in model["reveals"]} == {"ancestral", "confidence"}
    assert found["correlations"] == [] and "at least 3 models" in found["no_correlation"]
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
    assert "anchor accuracy with nll over 3 models: ρ = " in result.stdout


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
