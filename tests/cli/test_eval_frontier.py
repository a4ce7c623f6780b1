"""`adlm eval frontier`: a table, JSON and a plot of the same points; the same command resumes."""

import json
from functools import partial
from pathlib import Path

import pytest

import adlm
from adlm.checkpoint import LoadedModel, export_model
from adlm.evaluate.sample_metrics import TextScorer
from adlm.evaluate.scorer import load_scorer
from tests.cli import eval_answers
from tests.cli.terminal import assert_told, invoke, trained
from tests.evaluate.drawn import pixels, with_matplotlib
from tests.evaluate.scorers import causal_folder, needs
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


@pytest.mark.parametrize("window", [None, 4])
def test_gen_ppl_of_samples_and_held_out_text(tmp_path: Path, window: int | None) -> None:
    """With a window also of texts that are longer than the context."""
    needs("transformers")
    folder, length = causal_folder(positions=24 if window else 64), 30 if window else 12
    words = (trained(), *FEW, "--steps", "2", "--judge", folder, "--length", length, "--out", tmp_path)
    if window:
        assert_told(invoke("eval", "frontier", *words), "longer than", "(window)")
        words = (*words, "--window", window)
    found = evaluate(*words, "--reference", eval_answers.documents(), "--judge-batch", 2)
    measure = TextScorer(lm().tokenizer, load_scorer(folder), window)
    for point in found["points"]:
        sampling = {"sampler": point["sampler"], "steps": 2, "top_p": 1.0}
        expected = measure(adlm.load(trained(), device="cpu").generate(length=length, n=3, **sampling).texts).as_row()
        names = ("gen_ppl", "gen_ppl_se")
        assert [point[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-4)
    assert found["reference"]["gen_ppl"] > 0 and found["settings"]["judge"]["kind"] == "causal LM"
    assert found["settings"]["window"] == window == found["settings"]["judge"].get("window")
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


def test_a_narrow_terminal_drops_columns_and_cuts_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = eval_answers.narrow_table(monkeypatch, 90, "eval", "frontier", trained(), *FEW)
    assert "entropy" in lines[1] and "distinct-2" not in lines[1]
    assert sum("±" in line for line in lines) == 4 and not any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "a"), "--steps 'a': 'a' is not a whole number"),
        (("--steps", ""), "is empty: give at least one"),
        (("--length", 500), "length must be a whole number between 1 and"),
        (("--reference", "nowhere.txt"), "nowhere.txt"),
        (("--judge", "nowhere.gguf"), "nowhere.gguf does not exist"),
        (("--window", 8), "window=8 needs a scoring model: give scorer (--judge)"),
    ],
)
def test_wrong_options_are_errors_of_one_line(words: tuple[object, ...], message: str) -> None:
    assert_told(invoke("eval", "frontier", trained(), *FEW, *words, "--json"), message)


def test_errors_come_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    words = ("eval", "frontier", trained(), *FEW, "--out", tmp_path)
    assert_told(invoke(*words, "--judge", causal_folder(), "--window", 10**6), "window=1000000", "give 2 to")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_told(invoke(*words), "frontier runs in one process", "without torchrun")
    assert list(tmp_path.iterdir()) == []
