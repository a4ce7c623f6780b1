"""`adlm eval frontier`: a table, a JSON and a picture of the same points; the same command goes on."""

import json
from functools import partial
from pathlib import Path

import pytest

import adlm
from adlm.checkpoint import Loaded, export
from adlm.evaluate.generative import generative_perplexity
from adlm.evaluate.judges import load_judge
from tests.cli.evaluation import answers
from tests.cli.evaluation.answers import text
from tests.cli.terminal import assert_told, invoke, screen, trained, without_escapes
from tests.evaluate.small_judges import causal_folder, needs
from tests.studies.drawn import pixels, with_matplotlib
from tests.text.models import lm, rigged

FEW = ("--steps", "2,4", "--samplers", "ancestral,confidence", "--top-p", "1.0", "--n", 3, "--length", 12, "--batch", 2)
FEW = (*FEW, "--repeats", 2, "--device", "cpu")
answered = partial(answers.answered, "frontier")


@with_matplotlib
def test_three_models_in_one_run(tmp_path: Path) -> None:
    models = [trained(), trained("mdlm"), trained("ar")]
    words = (*models, *FEW, "--reference", text(), "--out", tmp_path / "out")
    found = answered(*words)
    points = found["points"]
    assert [point["model"] for point in points] == [models[0]] * 4 + [models[1]] * 4 + [models[2]]
    assert points[-1]["nfe"] == 12 and points[-1]["steps"] is None
    for point in points:
        assert point["entropy"] > 0 and point["entropy_se"] >= 0 and point["seconds"] > 0 and point["gen_ppl"] is None
    assert any(point["is_pareto"] for point in points)
    assert found["reference"]["texts"] == 3 and found["settings"]["batch"] == 2 and found["provenance"]["threads"]
    assert [each["method"] for each in found["settings"]["models"]] == ["adlm", "mdlm", "ar"]
    assert [Path(name).name for name in found["files"]] == ["frontier.json", "frontier.png"]
    kept = json.loads((tmp_path / "out" / "frontier.json").read_text("utf-8"))
    assert kept["points"] == points
    assert pixels(tmp_path / "out" / "frontier.png").std() > 0.05
    again = answered(*words)
    assert again["points"] == points  # times too: nothing was measured twice
    assert len((tmp_path / "out" / "points.jsonl").read_text("utf-8").splitlines()) == 9


def test_a_judge_reads_samples_and_held_out_text_alike() -> None:
    needs("transformers")
    words = (trained(), *FEW, "--steps", "2", "--judge", causal_folder(), "--reference", text())
    found = answered(*words)
    judge = load_judge(causal_folder())
    for point in found["points"]:
        how = {"sampler": point["sampler"], "steps": 2, "top_p": 1.0}
        texts = adlm.load(trained(), device="cpu").generate(length=12, n=3, **how).texts
        expected = generative_perplexity(judge, texts)
        assert (point["gen_ppl"], point["gen_ppl_se"]) == pytest.approx((expected.value, expected.stderr), rel=1e-4)
    assert found["reference"]["gen_ppl"] > 0 and found["settings"]["judge"]["kind"] == "causal LM"
    shown = invoke("eval", "frontier", *words)
    assert "held-out text" in shown.stdout and f"{found['points'][0]['gen_ppl']:.1f} ±" in shown.stdout


def test_a_window_lets_a_judge_read_longer_texts_than_it_can(tmp_path: Path) -> None:
    """The figures are those of windows, of samples and of held-out text; without one it is an error that names it."""
    needs("transformers")
    folder = causal_folder(positions=24)
    words = (trained(), *FEW, "--steps", "2", "--samplers", "ancestral", "--judge", folder, "--length", 30)
    judge = load_judge(folder)
    most = judge.context - sum(map(len, judge.ends))
    texts = adlm.load(trained(), device="cpu").generate(length=30, n=3, sampler="ancestral", steps=2, top_p=1.0).texts
    assert max(map(len, judge.encode(texts))) > most
    assert_told(invoke("eval", "frontier", *words), "longer than", "--window")
    words = (*words, "--reference", text(), "--out", tmp_path)
    small, large = (answered(*words, "--window", window, "--judge-batch", 2) for window in (4, most))
    for window, found in ((4, small), (most, large)):
        (point,) = found["points"]
        expected = generative_perplexity(judge, texts, window=window)
        assert (point["gen_ppl"], point["gen_ppl_se"]) == pytest.approx((expected.value, expected.stderr), rel=1e-4)
        assert found["settings"]["window"] == window == found["settings"]["judge"]["window"]
    assert small["reference"]["gen_ppl"] != large["reference"]["gen_ppl"]
    assert len((tmp_path / "points.jsonl").read_text("utf-8").splitlines()) == 2  # another window, another point
    again = answered(*words, "--window", 4, "--judge-batch", 16)
    assert again["points"] == small["points"]  # another batch of the judge's, the same point


def test_texts_that_are_left_out_are_told(tmp_path: Path) -> None:
    """A causal model that ends its texts at once, most of the time."""
    model = rigged("ar", {lm("ar").tokenizer.eos_id: 5.0})
    folder = export(Loaded(model.model, model.tokenizer, "ar", 0, "wrapped"), tmp_path / "model")
    words = (folder, *FEW, "--n", 12)
    (point,) = answered(*words)["points"]
    assert point["short"] > 0 and point["texts"] + point["short"] == 12 and 4 <= point["tokens"] < 12
    said = invoke("eval", "frontier", *words).stderr.replace("\n", " ")
    assert f"{point['short']} of 12 texts have fewer than four tokens" in said


def test_the_table_says_what_json_says() -> None:
    words = (trained(), *FEW, "--steps", "2", "--samplers", "ancestral")
    result = invoke("eval", "frontier", *words)
    assert result.exit_code == 0, result.output
    header, row = result.stdout.splitlines()
    assert header.split() == [
        "model", "sampler", "steps", "T", "p", "NFE", "s/text", "tokens", "Gen-PPL", "entropy", "distinct-2",
        "repeated-4",
    ]  # fmt: skip
    (point,) = answered(*words)["points"]
    assert f"{point['entropy']:.3f} ± {point['entropy_se']:.3f}" in row and "–" in row and "★" in row
    assert "--judge NAME adds Gen-PPL" in result.stderr.replace("\n", " ")


def test_a_narrow_terminal_loses_columns_and_cuts_no_figure() -> None:
    shown, code = screen("eval", "frontier", trained(), *FEW, columns=70)
    assert code == 0, shown
    lines = without_escapes(shown).splitlines()
    (header,) = (line for line in lines if "sampler" in line and "NFE" in line)
    rows = lines[lines.index(header) + 1 :][:4]
    assert "entropy" in header and "distinct-2" not in header and all("±" in row and "…" not in row for row in rows)
    assert all(len(line) <= 70 for line in (header, *rows))
    assert "For want of room not shown: distinct-2, repeated-4" in shown.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--steps", "a"), "--steps 'a': 'a' is not a whole number"),
        (("--steps", ""), "there are no steps: give at least one"),
        (("--samplers", "fast"), "unknown sampler 'fast'"),
        (("--length", 500), "length must be a whole number between 1 and"),
        (("--top-p", "1.5"), "top_p"),
        (("--n", 1), "--n"),
        (("--reference", "nowhere.txt"), "nowhere.txt"),
        (("--judge", "nobody-at-all.gguf"), "nobody-at-all.gguf is not there"),
        (("--device", "abacus"), "device 'abacus'"),
        (("--window", 8), "--window 8 says how a judge reads long texts, and there is none: give --judge"),
    ],
)
def test_mistakes_are_told_in_a_line(words: tuple[object, ...], said: str) -> None:
    assert_told(invoke("eval", "frontier", trained(), *FEW, *words, "--json"), said)


def test_a_window_that_cannot_be_is_told_before_anything_is_written(tmp_path: Path) -> None:
    needs("transformers")
    words = (trained(), *FEW, "--judge", causal_folder(), "--window", 10**6, "--out", tmp_path)
    assert_told(invoke("eval", "frontier", *words), "window=1000000", "at most the")
    assert list(tmp_path.iterdir()) == []


def test_an_out_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert_told(invoke("eval", "frontier", trained(), *FEW, "--out", path), "is a file: give the name of a folder")


def test_a_model_that_is_none() -> None:
    assert_told(invoke("eval", "frontier", "novel", *FEW), "there is no model 'novel'")


def test_time_is_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_told(invoke("eval", "frontier", trained(), *FEW, "--json"), "without torchrun")
