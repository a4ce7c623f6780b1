"""The frontier: no point twice, the Pareto set of known points, resumed as uninterrupted, pictures that show it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adlm.studies.frontier import Amount, Point, Setting, depends_on, grid, marked, measure_points, pareto, settings_of
from adlm.studies.ledger import Ledger
from adlm.studies.pictures import draw_frontier, lines_of
from adlm.studies.writing import Assessor, TextFigures, held_out_texts
from adlm.text.lm import LM
from tests.studies.drawn import pixels, with_matplotlib
from tests.text.models import lm

FEW = Amount(n=4, length=12, seed=3, batch=3, repeats=2)
EVERY = {"samplers": ["ancestral"], "steps": [4], "temperatures": [1.0], "top_ps": [1.0]}


def settings(writer: LM, length: int = 12, **changes: Any) -> list[Setting]:
    return grid(writer, length, **(EVERY | changes))


def assessor() -> Assessor:
    """With a judge that counts characters: what is asked of it is known."""
    return Assessor(lm().tokenizer, lambda texts: (sum(map(len, texts)) / len(texts), 0.5), {"name": "length"})


def test_every_combination_is_a_point() -> None:
    some = {"steps": [4, 8], "temperatures": [1.0, 0.5], "top_ps": [1.0, 0.9]}
    found = settings(lm(), samplers=["ancestral", "remask_loop"], **some)
    assert len(found) == len(set(found)) == 16


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("ar", {"samplers": ["ancestral", "confidence"], "steps": [4, 8], "top_ps": [1.0, 0.9]},
         [Setting("left_to_right", None, 1.0, 1.0), Setting("left_to_right", None, 1.0, 0.9)]),
        ("adlm", {"samplers": ["first_hitting", "entropy_bounded"], "steps": [4, 8]},
         [Setting("first_hitting", None, 1.0, 1.0), Setting("entropy_bounded", None, 1.0, 1.0)]),
        ("adlm", {"samplers": ["confidence"], "steps": [8, 12, 64]},
         [Setting("confidence", 8, 1.0, 1.0), Setting("confidence", 12, 1.0, 1.0)]),
        ("adlm", {"samplers": ["ddpm"], "top_ps": [1.0, 0.9]}, [Setting("ddpm", 4, 1.0, 1.0)]),
        ("adlm", {"temperatures": [0.0], "top_ps": [0.9, 1.0]}, [Setting("ancestral", 4, 0.0, 1.0)]),
        ("mdlm", {"samplers": ["mdlm", "ancestral"]}, [Setting("ancestral", 4, 1.0, 1.0)]),
    ],
)  # fmt: skip
def test_points_that_would_be_the_same_are_one(method: str, changes: Any, expected: list[Setting]) -> None:
    assert settings(lm(method), **changes) == expected


def test_a_grid_without_values_and_an_unknown_sampler_are_told() -> None:
    with pytest.raises(ValueError, match="no steps: give at least one"):
        settings(lm(), steps=[])
    with pytest.raises(ValueError, match="unknown sampler 'fast'; known: ancestral"):
        settings(lm(), samplers=["fast"])


def test_an_order_with_more_steps_than_tokens_takes_one_a_token() -> None:
    """Why such steps are one point: the texts are the same."""
    writer = lm()
    texts = [writer.generate(length=12, n=2, sampler="confidence", steps=steps) for steps in (12, 64)]
    assert texts[0].texts == texts[1].texts and texts[0].nfe == texts[1].nfe == 12


# The Pareto set.


def test_the_pareto_set_of_known_costs() -> None:
    costs = np.array([[1, 4], [2, 2], [4, 1], [3, 3], [2, 5], [2, 2]], dtype=float)
    assert pareto(costs).tolist() == [True, True, True, False, False, True]
    assert pareto(np.zeros((3, 2))).tolist() == [True] * 3


def test_what_is_beaten_is_beaten_by_one_that_is_not() -> None:
    costs = np.random.default_rng(0).integers(0, 6, (60, 3)).astype(float)
    best = pareto(costs)
    for number in range(60):
        beats = (costs <= costs[number]).all(1) & (costs < costs[number]).any(1)
        assert best[number] == (not beats.any())
        assert best[number] or (beats & best).any()


def figures(gen_ppl: float | None, entropy: float) -> TextFigures:
    return TextFigures(gen_ppl, None if gen_ppl is None else 1.0, entropy, 0.1, 0.9, 0.01, 0.1, 0.01, 4, 0, 12.0)


def point(nfe: float, gen_ppl: float | None, entropy: float) -> Point:
    name = f"{nfe:g} {gen_ppl}"
    return Point(name, "adlm", "ancestral", int(nfe), 1.0, 1.0, nfe, nfe / 10, 0.01, 3, figures(gen_ppl, entropy))


def test_more_entropy_than_the_held_out_text_has_is_no_merit() -> None:
    points = [point(8, 50, 4.0), point(8, 60, 4.5), point(8, 40, 3.0)]
    assert [p.is_pareto for p in marked(points)] == [True, True, True]
    assert [p.is_pareto for p in marked(points, figures(20, 4.0))] == [True, False, True]
    assert [p.is_pareto for p in marked([point(8, None, 4.0), point(16, None, 3.9), point(16, None, 4.2)])] == [
        True,
        False,
        True,
    ]


# Measuring.


def without_times(points: list[Point]) -> list[Point]:
    return [replace(each, seconds=0, seconds_sd=0) for each in points]


def test_a_point_says_what_was_written() -> None:
    writer = lm()
    (found,) = measure_points(writer, settings(writer), FEW, assessor())
    expected = writer.generate(length=12, n=4, seed=3, sampler="ancestral", steps=4, top_p=1.0)
    assert found.nfe == np.mean(expected.nfe_each) and found.quality.texts == 4
    assert found.quality.gen_ppl == np.mean([len(text) for text in expected.texts])
    assert found.seconds > 0 and found.timings == 2
    flat = found.as_dict()
    assert {"gen_ppl", "gen_ppl_se", "entropy", "entropy_se", "distinct_2", "repetition_4", "nfe"} <= flat.keys()
    assert "quality" not in flat


def test_a_causal_model_takes_an_evaluation_a_token() -> None:
    writer = lm("ar")
    (found,) = measure_points(writer, settings(writer), FEW, assessor())
    assert found.nfe == 12 and found.steps is None and found.sampler == "left_to_right"


def test_the_batch_size_changes_time_alone() -> None:
    writer = lm()
    one, other = (
        list(measure_points(writer, settings(writer, steps=[2, 4]), replace(FEW, batch=size), assessor()))
        for size in (1, 4)
    )
    assert without_times([replace(p, timings=0) for p in one]) == without_times([replace(p, timings=0) for p in other])


def test_resumed_is_as_uninterrupted(tmp_path: Path) -> None:
    writer, path = lm(), tmp_path / "points.jsonl"
    asked = settings(writer, samplers=["ancestral", "confidence"], steps=[2, 4])
    whole = list(measure_points(writer, asked, FEW, assessor()))
    begun = measure_points(writer, asked, FEW, assessor(), ledger=Ledger(path))
    first = [next(begun), next(begun)]
    begun.close()
    with path.open("ab") as file:
        file.write(b'{"key": "half a li')  # killed while it wrote
    resumed = list(measure_points(writer, asked, FEW, assessor(), ledger=Ledger(path)))
    assert without_times(resumed) == without_times(whole)
    assert resumed[:2] == first  # times too: they were not measured again
    assert len(path.read_text("utf-8").splitlines()) == 4
    again = list(measure_points(writer, asked, FEW, assessor(), ledger=Ledger(path)))
    assert again == resumed


def test_another_amount_judge_model_or_machine_is_another_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, (setting,) = lm(), settings(lm())
    asked = depends_on(writer, setting, FEW, assessor(), "a")
    others = [
        depends_on(writer, setting, replace(FEW, seed=4), assessor(), "a"),
        depends_on(writer, setting, FEW, Assessor(writer.tokenizer), "a"),
        depends_on(writer, setting, FEW, assessor(), "b"),
        depends_on(writer, replace(setting, steps=5), FEW, assessor(), "a"),
    ]
    monkeypatch.setattr("adlm.studies.frontier.hardware_name", lambda device: "another machine")
    others.append(depends_on(writer, setting, FEW, assessor(), "a"))  # time is a figure too
    ledger = Ledger(tmp_path / "points.jsonl")
    ledger.put(asked, {"it": 1})
    assert Ledger(tmp_path / "points.jsonl").get(asked) == {"it": 1}
    assert all(ledger.get(other) is None for other in others)


def test_a_file_of_something_else_is_told(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text('{"a": 1}\n', "utf-8")
    with pytest.raises(ValueError, match=r"line 1 of .* is not one of ours"):
        Ledger(path)


def test_settings_name_the_models_and_the_machine() -> None:
    found = settings_of([lm(), lm("ar")], FEW, assessor())
    assert [each["method"] for each in found["models"]] == ["adlm", "ar"]
    assert {"n", "length", "seed", "batch", "repeats", "threads", "device", "timing", "judge"} <= found.keys()
    json.dumps(found)


def test_texts_that_are_too_short_are_counted() -> None:
    assess = Assessor(lm().tokenizer)
    found = assess(["abcdefgh", "hgfedcba", "a", ""])
    assert (found.texts, found.short, found.tokens) == (2, 2, 8) and found.gen_ppl is None
    assert assess(["abcdefgh", "abcd"]).tokens == 6  # why an entropy may be low
    with pytest.raises(ValueError, match="3 of 4 texts have fewer than 4 tokens"):
        assess(["abcdefgh", "a", "b", "c"])


def test_held_out_texts_are_as_long_as_samples_and_from_all_over(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "text.txt", lm().tokenizer
    path.write_text("".join(f"{number:03d} " for number in range(300)), "utf-8")
    texts, said = held_out_texts(path, tokenizer, 40, 5)
    assert [len(tokenizer.encode(text)) for text in texts] == [40] * 5
    assert texts[0].startswith("000") and "290" in texts[-1] and said["stretches"] == 5
    with pytest.raises(ValueError, match="30 stretches of 40 tokens, and 31"):
        held_out_texts(path, tokenizer, 40, 31)


# Pictures.


@with_matplotlib
def test_pictures_show_something(tmp_path: Path) -> None:
    points = marked([point(8, 50, 4.0), point(16, 40, 3.9), replace(point(8, 70, 4.2), sampler="confidence")])
    assert len(lines_of([replace(each, model="a") for each in points])) == 2
    judged = pixels(draw_frontier(points, tmp_path / "judged.png", figures(20, 4.1)))
    bare = pixels(draw_frontier(points, tmp_path / "bare.png"))
    assert judged.std() > 0.05 and judged.shape == bare.shape and (judged != bare).any()
    unjudged = [replace(each, quality=figures(None, each.quality.entropy)) for each in points]
    assert pixels(draw_frontier(unjudged, tmp_path / "unjudged.png")).std() > 0.05
    drawn = draw_frontier(points, tmp_path / "points.svg", figures(20, 4.1)).read_text("utf-8")
    for word in ("Gen-PPL", "NFE", "entropy (nats)", "seconds per text", "held-out text", "confidence"):
        assert word in drawn
    odd = [replace(each, model=r"$\frac{1$") for each in points]
    assert "frac{1" in draw_frontier(odd, tmp_path / "odd.svg").read_text("utf-8")
    with pytest.raises(ValueError, match="no points"):
        draw_frontier([], tmp_path / "none.png")
