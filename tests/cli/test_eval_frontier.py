"""`adlm eval frontier`: a table, JSON and a plot of the same points; the same command resumes."""

import json
from functools import partial
from pathlib import Path

import pytest

from adlm.checkpoint import LoadedModel, export_model
from tests.cli import eval_answers
from tests.cli.terminal import assert_error, invoke, trained
from tests.evaluate.scorers import causal_folder, needs, pixels, with_matplotlib
from tests.text.models import lm, rigged

FEW = ("--steps", "2,4", "--samplers", "ancestral,confidence", "--top-p", "1.0", "--n", 3, "--length", 12, "--batch", 2)
FEW = (*FEW, "--repeats", 2, "--device", "cpu")
evaluate = partial(eval_answers.evaluate, "frontier")


@with_matplotlib
def test_three_models_in_one_run(tmp_path: Path) -> None:
    models = [trained(), trained("mdlm"), trained("ar")]
    words = (*models, *FEW, "--reference", eval_answers.documents(), "--out", tmp_path)
    found = evaluate(*words)
    points = found["points"]
    assert [point["model"] for point in points] == [models[0]] * 4 + [models[1]] * 4 + [models[2]]
    assert points[-1]["nfe"] == 12 and any(point["is_pareto"] for point in points)
    assert found["reference"]["texts"] == 3 and found["settings"]["batch"] == 2 and found["provenance"]["threads"]
    assert [each["method"] for each in found["settings"]["models"]] == ["adlm", "mdlm", "ar"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.jsonl", "frontier.json", "frontier.png"]
    assert json.loads((tmp_path / "frontier.json").read_text("utf-8"))["points"] == points
    assert pixels(tmp_path / "frontier.png").std() > 0.05
    assert evaluate(*words)["points"] == points  # times too: nothing was measured twice


def test_gen_ppl_of_texts_longer_than_the_context(tmp_path: Path) -> None:
    needs("transformers")
    words = (trained(), *FEW, "--steps", "2", "--judge", causal_folder(positions=24), "--length", 30, "--out", tmp_path)
    assert_error(invoke("eval", "frontier", *words), "longer than", "(window)")
    words = (*words, "--window", 4, "--reference", eval_answers.documents())
    found = evaluate(*words, "--judge-batch", 2)
    assert found["settings"]["window"] == found["settings"]["scorer"]["window"] == 4
    assert all(each["gen_ppl"] > 1 for each in (*found["points"], found["reference"]))
    assert evaluate(*words, "--judge-batch", 16)["points"] == found["points"]  # the batch is not part of the key


def test_texts_that_are_left_out_give_a_warning(tmp_path: Path) -> None:
    """A causal model that ends most of its texts at once."""
    model = rigged("ar", {lm("ar").tokenizer.eos_id: 5.0})
    folder = export_model(LoadedModel(model.model, model.tokenizer, "ar", 0, "wrapped"), tmp_path / "model")
    result = invoke("eval", "frontier", folder, *FEW, "--n", 12, "--json")
    (point,) = json.loads(result.stdout)["points"]
    assert point["short"] > 0 and point["texts"] + point["short"] == 12 and 4 <= point["tokens"] < 12
    assert f"{point['short']} of 12 texts have fewer than four tokens" in result.stderr.replace("\n", " ")


def test_the_table_has_the_values_of_the_json() -> None:
    words = (trained(), *FEW, "--steps", "2", "--samplers", "ancestral", "--reference", eval_answers.documents())
    result = invoke("eval", "frontier", *words)
    assert result.exit_code == 0, result.output
    header, row, held_out = (line for line in result.stdout.splitlines() if "│" in line or "┃" in line)
    names = [name.strip() for name in header.strip("┃").split("┃")]
    assert names[1:8] == ["model", "sampler", "steps", "T", "p", "NFE", "s/text"]
    answer = evaluate(*words)
    for line, values in ((row, answer["points"][0]), (held_out, answer["reference"])):
        cells = dict(zip(names, (cell.strip() for cell in line.strip("│").split("│")), strict=True))
        for name, key in (("entropy", "entropy"), ("distinct-2", "distinct_2"), ("repeated-4", "repetition_4")):
            assert cells[name] == f"{values[key]:.3f} ± {values[f'{key}_se']:.3f}"
        assert cells["tokens"] == f"{values['tokens']:.1f}" and cells["Gen-PPL"] == "–"
    assert "★" in row and "held-out text" in held_out and "(--judge)" in result.stdout


def test_errors_come_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    words = ("eval", "frontier", trained(), *FEW, "--out", tmp_path)
    assert_error(invoke(*words, "--judge", causal_folder(), "--window", 10**6), "window=1000000", "give 2 to")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_error(invoke(*words), "frontier runs in one process", "without torchrun")
    assert list(tmp_path.iterdir()) == []
