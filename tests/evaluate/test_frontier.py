"""The frontier: no point twice, the Pareto set of known points, resumed as uninterrupted."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adlm.evaluate.cache import MERGED
from adlm.evaluate.frontiers import Point, SamplerSetting, build_grid, draw_reference_texts, frontier, mark_pareto
from adlm.evaluate.results import EvalResult
from adlm.text.lm import LM
from tests.evaluate.scorers import causal
from tests.text.models import lm, rigged

FEW: dict[str, Any] = {"samplers": ["ancestral"], "steps": [4], "temperatures": [1.0], "top_p": [1.0]}
SIZE: dict[str, Any] = {"n": 4, "length": 12, "seed": 3, "batch": 3, "repeats": 2}


def measure(model: LM | None = None, **changes: Any) -> EvalResult:
    return frontier(model or lm(), **(FEW | SIZE | changes))


def without_times(points: list[Point]) -> list[Point]:
    return [point | {"seconds": 0, "seconds_sd": 0, "timings": 0} for point in points]


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
    assert build_grid(lm(method), 12, *(FEW | changes).values()) == [SamplerSetting(*each) for each in expected]


def test_every_other_combination_is_a_point() -> None:
    grid = build_grid(lm(), 12, ["ancestral", "remask_loop"], [4, 8], [1.0, 0.5], [1.0, 0.9])
    assert len(grid) == len(set(grid)) == 16
    # An order with more steps than tokens takes one a token: such steps are one point, because the texts are the same.
    one, other = (lm().generate(length=12, n=2, sampler="confidence", steps=steps) for steps in (12, 64))
    assert one.texts == other.texts and one.nfe == other.nfe == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": []}, "steps, .* is empty: give at least one"),
        ({"samplers": ["fast"]}, "unknown sampler 'fast': expected one of ancestral"),
        ({"n": 1}, "n must be a whole number from 2 on, got 1"),
        ({"repeats": 1}, "repeats must be a whole number from 2 on, got 1"),
        ({"window": 8}, r"window=8 needs a scoring model"),
        ({"models": []}, "models is empty"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        frontier(**({"models": lm()} | FEW | SIZE | changes))


def mark(costs: Any, reference: Point | None = None) -> list[bool]:
    points = [dict(zip(("nfe", "gen_ppl", "entropy"), cost, strict=True)) for cost in costs]
    return [point["is_pareto"] for point in mark_pareto(points, reference)]


def test_the_pareto_set_of_known_points() -> None:
    assert mark([(1, 4, 0), (2, 2, 0), (4, 1, 0), (3, 3, 0), (2, 5, 0), (2, 2, 0)]) == [True] * 3 + [False] * 2 + [True]
    assert mark([(8, None, 4.0), (16, None, 3.9), (16, None, 4.2)]) == [True, False, True]
    points = [(8, 50, 4.0), (8, 60, 4.5), (8, 40, 3.0)]  # more entropy than held-out text is not better
    assert mark(points) == [True, True, True] and mark(points, {"entropy": 4.0}) == [True, False, True]
    costs = np.random.default_rng(0).integers(1, 7, (60, 3)).astype(float)
    best, costs[:, 2] = mark(costs), -costs[:, 2]
    for cost, is_best in zip(costs, best, strict=True):
        beats = (costs <= cost).all(1) & (costs < cost).any(1)
        assert is_best == (not beats.any()) and (is_best or (beats & best).any())


def test_a_point_measures_the_texts_of_generate() -> None:
    result = measure(scorer=causal())
    (point,) = result["points"]
    expected = lm().generate(length=12, n=4, seed=3, sampler="ancestral", steps=4, top_p=1.0)
    assert point["nfe"] == np.mean(expected.nfe_each) and point["texts"] + point["short"] == 4
    assert point["seconds"] > 0 and point["timings"] == 2 and point["gen_ppl"] > 1
    assert {"gen_ppl_se", "entropy", "entropy_se", "distinct_2", "repetition_4", "is_pareto"} <= point.keys()
    assert result.figures["frontier"] == {"kind": "frontier", "points": [point], "reference": None}
    names = {"models", "n", "length", "seed", "batch", "repeats", "threads", "device", "scorer", "samplers"}
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
    assert without_times(resumed) == without_times(measure(**some, batch=1)["points"])  # the batch changes time alone
    assert measure(**some, out=tmp_path)["points"] == resumed  # times too: they were not measured again
    assert len((tmp_path / MERGED).read_text("utf-8").splitlines()) == 4


def test_other_settings_weights_or_machine_are_another_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({}, {"seed": 4}, {"scorer": causal()}, {"model": rigged("adlm", {3: 1.0})}):
        measure(out=tmp_path, **changes)
    monkeypatch.setattr(sys.modules["adlm.evaluate.frontiers"], "get_device_name", lambda device: "another machine")
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
