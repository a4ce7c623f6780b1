"""The frontier: no point twice, resumed as uninterrupted; table, JSON and plot."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adlm.evaluate.cache import MERGED
from adlm.evaluate.frontiers import (
    Point,
    build_grid,
    choose_settings,
    draw_reference_texts,
    frontier,
)
from adlm.evaluate.results import EvalResult
from adlm.models.folder import LoadedModel, export_model
from adlm.text.lm import LM
from tests.cli import eval_answers
from tests.cli.terminal import assert_error, invoke, trained
from tests.evaluate.scorers import causal, causal_folder, needs, pixels, with_matplotlib
from tests.text.models import lm, rigged

FEW: dict[str, Any] = {
    "samplers": ["ancestral"],
    "steps": [4],
    "temperatures": [1.0],
    "top_p": [1.0],
}
SIZE: dict[str, Any] = {"n": 4, "length": 12, "seed": 3, "batch": 3, "repeats": 2}


def measure(model: LM | None = None, **changes: Any) -> EvalResult:
    return frontier(model or lm(), **(FEW | SIZE | changes))


def without_times(points: list[Point]) -> list[Point]:
    return [point | {"seconds": 0, "seconds_sd": 0, "timings": 0} for point in points]


def test_every_combination_is_a_point() -> None:
    grid = build_grid(lm(), ["ancestral", "first_hitting"], [4, 8], [1.0, 0.5], [1.0, 0.9])
    last = {"sampler": "first_hitting", "steps": None, "temperature": 0.5, "top_p": 0.9}
    assert len(grid) == len({tuple(each.values()) for each in grid}) == 12 and grid[-1] == last
    own = build_grid(lm(), ["examples.sampler:Patient"], [4, 8], [1.0], [1.0])
    assert [point["steps"] for point in own] == [None]
    causal = build_grid(lm("ar"), ["ancestral", "confidence"], [4, 8], [1.0], [1.0, 0.9])
    only = {"sampler": "left_to_right", "steps": None, "temperature": 1.0}
    assert causal == [only | {"top_p": p} for p in (1.0, 0.9)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": []}, "steps, .* is empty: give at least one"),
        ({"samplers": ["fast"]}, "unknown sampler 'fast': expected one of ancestral"),
        ({"n": 1}, "n must be a whole number from 2 on, got 1"),
        ({"repeats": 1}, "repeats must be a whole number from 2 on, got 1"),
        ({"models": []}, "models is empty"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        frontier(**({"models": lm()} | FEW | SIZE | changes))


def test_a_point_measures_the_texts_of_generate() -> None:
    result = measure(scorer=causal())
    (point,) = result["points"]
    expected = lm().generate(length=12, n=4, seed=3, sampler="ancestral", steps=4, top_p=1.0)
    assert point["nfe"] == np.mean(expected.nfe_each) and point["texts"] + point["short"] == 4
    assert point["seconds"] > 0 and point["timings"] == 2 and point["gen_ppl"] > 1
    assert {"gen_ppl_se", "entropy", "entropy_se", "distinct_2", "repetition_4"} <= point.keys()
    assert result.figures["frontier"] == ("frontier", {"points": [point], "reference": None})
    names = {
        "models",
        "n",
        "length",
        "seed",
        "batch",
        "repeats",
        "threads",
        "device",
        "scorer",
        "samplers",
    }
    assert names <= result.settings.keys() and json.dumps(result.settings)
    (point,) = measure(lm("ar"))["points"]
    assert (point["nfe"], point["steps"], point["sampler"]) == (12, None, "left_to_right")


def test_resumed_is_as_uninterrupted(tmp_path: Path) -> None:
    some = {"samplers": ["ancestral", "confidence"], "steps": [2, 4]}

    def stop(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(**some, out=tmp_path, on_progress=stop)
    resumed = measure(**some, out=str(tmp_path))["points"]
    assert without_times(resumed) == without_times(
        measure(**some, batch=1)["points"]
    )  # the batch changes time alone
    assert (
        measure(**some, out=tmp_path)["points"] == resumed
    )  # times too: they were not measured again
    assert len((tmp_path / MERGED).read_text("utf-8").splitlines()) == 4


def test_other_settings_weights_or_machine_are_another_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes in ({}, {"seed": 4}, {"scorer": causal()}, {"model": rigged("adlm", {3: 1.0})}):
        measure(out=tmp_path, **changes)
    monkeypatch.setattr(
        sys.modules["adlm.evaluate.frontiers"], "get_device_name", lambda device: "another machine"
    )
    measure(out=tmp_path)  # time is a metric
    assert len((tmp_path / MERGED).read_text("utf-8").splitlines()) == 5


def test_reference_texts_are_as_long_as_samples_and_evenly_spaced(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "text.txt", lm().tokenizer
    path.write_text("".join(f"{number:03d} " for number in range(300)), "utf-8")
    texts, about = draw_reference_texts(path, tokenizer, 40, 5)
    assert [len(tokenizer.encode(text)) for text in texts] == [40] * 5
    assert texts[0].startswith("000") and "290" in texts[-1] and about["texts"] == 5
    with pytest.raises(ValueError, match="30 texts of 40 tokens, but 31"):
        draw_reference_texts(path, tokenizer, 40, 31)


def test_the_best_setting_has_the_lowest_gen_ppl_at_the_entropy_of_real_text() -> None:
    values = [("a", 90, 4.0), ("a", 120, 4.25), ("a", 110, 4.39), ("a", 100, 4.41), ("b", 80, 4.1)]
    points = [
        {"model": model, "gen_ppl": ppl, "entropy": entropy} for model, ppl, entropy in values
    ]
    real = {"gen_ppl": 66, "entropy": 4.3}
    assert choose_settings(points, real) == {"a": points[2]}  # b has no point that is close enough
    assert choose_settings(points, None) == choose_settings(points, real | {"gen_ppl": None}) == {}


# The command.

ARGS = (
    "--steps",
    "2,4",
    "--samplers",
    "ancestral,confidence",
    "--top-p",
    "1.0",
    "--n",
    3,
    "--length",
    12,
)
ARGS = (*ARGS, "--batch", 2, "--repeats", 2, "--device", "cpu")
run_json = partial(eval_answers.evaluate, "frontier")


@with_matplotlib
def test_three_models_in_one_run(tmp_path: Path) -> None:
    models = [trained(), trained("mdlm"), trained("ar")]
    words = (*models, *ARGS, "--reference", eval_answers.documents(), "--out", tmp_path)
    found = run_json(*words)
    points = found["points"]
    assert [point["model"] for point in points] == [models[0]] * 4 + [models[1]] * 4 + [models[2]]
    assert points[-1]["nfe"] == 12
    assert (
        found["reference"]["texts"] == 3
        and found["settings"]["batch"] == 2
        and found["provenance"]["threads"]
    )
    assert [each["method"] for each in found["settings"]["models"]] == ["adlm", "mdlm", "ar"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "cache.jsonl",
        "frontier.json",
        "frontier.png",
    ]
    assert json.loads((tmp_path / "frontier.json").read_text("utf-8"))["points"] == points
    assert pixels(tmp_path / "frontier.png").std() > 0.05
    assert run_json(*words)["points"] == points  # times too: nothing was measured twice


def test_gen_ppl_and_its_batch(tmp_path: Path) -> None:
    needs("transformers")
    words = (trained(), *ARGS, "--steps", "2", "--judge", causal_folder(), "--out", tmp_path)
    assert_error(
        invoke("eval", "frontier", *words, "--length", 30, "--judge", causal_folder(positions=8)),
        "longer than",
    )
    words = (*words, "--reference", eval_answers.documents())
    found = run_json(*words, "--judge-batch", 2)
    assert all(each["gen_ppl"] > 1 for each in (*found["points"], found["reference"]))
    assert found["best"] == choose_settings(found["points"], found["reference"])
    assert (
        run_json(*words, "--judge-batch", 16)["points"] == found["points"]
    )  # the batch is not part of the key


def test_texts_that_are_left_out_give_a_warning(tmp_path: Path) -> None:
    """A causal model that ends most of its texts at once."""
    model = rigged("ar", {lm("ar").tokenizer.eos_id: 5.0})
    folder = export_model(
        LoadedModel(model.model, model.tokenizer, "ar", 0, "wrapped"), tmp_path / "model"
    )
    result = invoke("eval", "frontier", folder, *ARGS, "--n", 12, "--json")
    (point,) = json.loads(result.stdout)["points"]
    assert (
        point["short"] > 0 and point["texts"] + point["short"] == 12 and 4 <= point["tokens"] < 12
    )
    assert f"{point['short']} of 12 texts have fewer than four tokens" in result.stderr.replace(
        "\n", " "
    )


def test_the_table_has_the_values_of_the_json() -> None:
    words = (
        trained(),
        *ARGS,
        "--steps",
        "2",
        "--samplers",
        "ancestral",
        "--reference",
        eval_answers.documents(),
    )
    result = invoke("eval", "frontier", *words)
    assert result.exit_code == 0, result.output
    header, row, held_out = (
        line for line in result.stdout.splitlines() if "│" in line or "┃" in line
    )
    names = [name.strip() for name in header.strip("┃").split("┃")]
    assert names[:7] == ["model", "sampler", "steps", "T", "p", "NFE", "s/text"]
    answer = run_json(*words)
    for line, values in ((row, answer["points"][0]), (held_out, answer["reference"])):
        cells = dict(zip(names, (cell.strip() for cell in line.strip("│").split("│")), strict=True))
        for name, key in (
            ("entropy", "entropy"),
            ("distinct-2", "distinct_2"),
            ("repeated-4", "repetition_4"),
        ):
            assert cells[name] == f"{values[key]:.3f} ± {values[f'{key}_se']:.3f}"
        assert cells["tokens"] == f"{values['tokens']:.1f}" and cells["Gen-PPL"] == "–"
    assert "held-out text" in held_out and "(--judge)" in result.stdout


def test_errors_come_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("transformers")
    words = ("eval", "frontier", trained(), *ARGS, "--out", tmp_path)
    assert_error(invoke(*words, "--judge", "nowhere.gguf"), "nowhere.gguf does not exist")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_error(invoke(*words), "frontier runs in one process", "without torchrun")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
