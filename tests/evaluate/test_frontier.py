"""The frontier: no point twice, the Pareto set of known points, resumed as uninterrupted."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adlm.evaluate import frontier as frontier_function
from adlm.evaluate.cache import MERGED
from adlm.evaluate.frontier import (
    Point,
    SamplerSetting,
    build_grid,
    draw_reference_texts,
    find_pareto,
    frontier,
    mark_pareto,
)
from adlm.evaluate.results import EvalResult
from adlm.text.lm import LM
from tests.evaluate.scorers import causal
from tests.text.models import lm, rigged

FEW: dict[str, Any] = {"samplers": ["ancestral"], "steps": [4], "temperatures": [1.0], "top_p": [1.0]}
SIZE: dict[str, Any] = {"n": 4, "length": 12, "seed": 3, "batch": 3, "repeats": 2}


def grid(model: LM, **changes: Any) -> list[SamplerSetting]:
    return build_grid(model, 12, **(FEW | changes))


def measure(model: LM | None = None, **changes: Any) -> EvalResult:
    return frontier(model or lm(), **(FEW | SIZE | changes))


def without_times(points: list[Point]) -> list[Point]:
    return [point | {"seconds": 0, "seconds_sd": 0, "timings": 0} for point in points]


def test_every_combination_is_a_point() -> None:
    some = {"steps": [4, 8], "temperatures": [1.0, 0.5], "top_p": [1.0, 0.9]}
    found = grid(lm(), samplers=["ancestral", "remask_loop"], **some)
    assert len(found) == len(set(found)) == 16


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("ar", {"samplers": ["ancestral", "confidence"], "steps": [4, 8], "top_p": [1.0, 0.9]},
         [("left_to_right", None, 1.0, 1.0), ("left_to_right", None, 1.0, 0.9)]),
        ("adlm", {"samplers": ["first_hitting", "entropy_bounded"], "steps": [4, 8]},
         [("first_hitting", None, 1.0, 1.0), ("entropy_bounded", None, 1.0, 1.0)]),
        ("adlm", {"samplers": ["confidence"], "steps": [8, 12, 64]},
         [("confidence", 8, 1.0, 1.0), ("confidence", 12, 1.0, 1.0)]),
        ("adlm", {"samplers": ["ddpm"], "top_p": [1.0, 0.9]}, [("ddpm", 4, 1.0, 1.0)]),
        ("adlm", {"temperatures": [0.0], "top_p": [0.9, 1.0]}, [("ancestral", 4, 0.0, 1.0)]),
        ("mdlm", {"samplers": ["mdlm", "ancestral"]}, [("ancestral", 4, 1.0, 1.0)]),
    ],
)  # fmt: skip
def test_settings_that_give_the_same_texts_are_one_point(method: str, changes: Any, expected: list[Any]) -> None:
    assert grid(lm(method), **changes) == [SamplerSetting(*each) for each in expected]


def test_wrong_settings_are_refused() -> None:
    for changes, said in (
        ({"steps": []}, "steps is empty: give at least one"),
        ({"samplers": ["fast"]}, "unknown sampler 'fast'; known: ancestral"),
        ({"n": 1}, "n must be at least 2, got 1"),
        ({"repeats": 1}, "repeats must be at least 2, got 1"),
        ({"window": 8}, r"window=8 needs a scoring model"),
    ):
        with pytest.raises(ValueError, match=said):
            measure(**changes)
    with pytest.raises(ValueError, match="at least one model"):
        frontier([])


def test_an_order_with_more_steps_than_tokens_takes_one_a_token() -> None:
    """Why such steps are one point: the texts are the same."""
    one, other = (lm().generate(length=12, n=2, sampler="confidence", steps=steps) for steps in (12, 64))
    assert one.texts == other.texts and one.nfe == other.nfe == 12


# The Pareto set.


def test_the_pareto_set_of_known_costs() -> None:
    costs = np.array([[1, 4], [2, 2], [4, 1], [3, 3], [2, 5], [2, 2]], dtype=float)
    assert find_pareto(costs).tolist() == [True, True, True, False, False, True]
    assert find_pareto(np.zeros((3, 2))).tolist() == [True] * 3


def test_a_beaten_point_is_beaten_by_one_that_is_not() -> None:
    costs = np.random.default_rng(0).integers(0, 6, (60, 3)).astype(float)
    best = find_pareto(costs)
    for number in range(60):
        beats = (costs <= costs[number]).all(1) & (costs < costs[number]).any(1)
        assert best[number] == (not beats.any())
        assert best[number] or (beats & best).any()


def test_more_entropy_than_held_out_text_is_not_better() -> None:
    def marks(points: list[tuple[int, int | None, float]], reference: Point | None = None) -> list[bool]:
        rows = [dict(zip(("nfe", "gen_ppl", "entropy"), point)) for point in points]
        return [point["is_pareto"] for point in mark_pareto(rows, reference)]

    points = [(8, 50, 4.0), (8, 60, 4.5), (8, 40, 3.0)]
    assert marks(points) == [True, True, True] and marks(points, {"entropy": 4.0}) == [True, False, True]
    assert marks([(8, None, 4.0), (16, None, 3.9), (16, None, 4.2)]) == [True, False, True]


# Measuring.


def test_a_point_measures_the_texts_of_generate() -> None:
    result = measure(scorer=causal())
    (found,) = result["points"]
    expected = lm().generate(length=12, n=4, seed=3, sampler="ancestral", steps=4, top_p=1.0)
    assert found["nfe"] == np.mean(expected.nfe_each) and found["texts"] + found["short"] == 4
    assert found["seconds"] > 0 and found["timings"] == 2 and found["gen_ppl"] > 1
    assert {"gen_ppl_se", "entropy", "entropy_se", "distinct_2", "repetition_4", "is_pareto"} <= found.keys()
    assert result.figures["frontier"] == {"kind": "frontier", "points": [found], "reference": None}
    names = {"models", "n", "length", "seed", "batch", "repeats", "threads", "device", "timing", "judge", "samplers"}
    assert names <= result.settings.keys() and json.dumps(result.settings)
    assert frontier_function is frontier


def test_a_causal_model_takes_an_evaluation_a_token() -> None:
    (found,) = measure(lm("ar"))["points"]
    assert (found["nfe"], found["steps"], found["sampler"]) == (12, None, "left_to_right")


def test_the_batch_size_changes_time_alone() -> None:
    one, other = (measure(steps=[2, 4], batch=size)["points"] for size in (1, 4))
    assert without_times(one) == without_times(other)


def test_resumed_is_as_uninterrupted(tmp_path: Path) -> None:
    some = {"samplers": ["ancestral", "confidence"], "steps": [2, 4]}

    def stop(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(**some, out=tmp_path, on_progress=stop)
    with (tmp_path / "cache.0.jsonl").open("ab") as file:
        file.write(b'{"key": "half a li')  # killed while it wrote
    resumed = measure(**some, out=tmp_path)["points"]
    assert without_times(resumed) == without_times(measure(**some)["points"])
    assert measure(**some, out=tmp_path)["points"] == resumed  # times too: they were not measured again
    assert len((tmp_path / MERGED).read_text("utf-8").splitlines()) == 4


def test_other_settings_weights_or_machine_are_another_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(out=tmp_path)
    measure(out=tmp_path, seed=4)
    measure(out=tmp_path, scorer=causal())
    measure(rigged("adlm", {3: 1.0}), out=tmp_path)
    monkeypatch.setattr(sys.modules["adlm.evaluate.frontier"], "hardware_name", lambda device: "another machine")
    measure(out=tmp_path)  # time is a metric
    assert len((tmp_path / MERGED).read_text("utf-8").splitlines()) == 5


def test_reference_texts_are_as_long_as_samples_and_evenly_spaced(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "text.txt", lm().tokenizer
    path.write_text("".join(f"{number:03d} " for number in range(300)), "utf-8")
    texts, about = draw_reference_texts(path, tokenizer, 40, 5)
    assert [len(tokenizer.encode(text)) for text in texts] == [40] * 5
    assert texts[0].startswith("000") and "290" in texts[-1] and about["stretches"] == 5
    with pytest.raises(ValueError, match="30 texts of 40 tokens, but 31"):
        draw_reference_texts(path, tokenizer, 40, 31)
