"""Correlations of known points, and what they say of several models."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from adlm.studies.anchors import Study
from adlm.studies.comparison import correlations, page_of, run_names, table_of_correlations, table_of_models
from adlm.studies.correlation import ALL, EQUAL, WITHIN, at_equal_steps, correlate, midranks, within_runs
from adlm.studies.portraits import draw_correlation
from tests.studies.drawn import pixels, with_matplotlib
from tests.studies.small import studied

study = cache(studied)


def test_correlations_of_known_points() -> None:
    up = correlate([1, 2, 3, 4, 5], [2, 4, 8, 16, 32])
    assert (up.rho, up.high) == (1, 1) and 0 < up.low < 0.9 and up.p_value == pytest.approx(2 / 120)
    down = correlate([1, 2, 3, 4, 5], [5, 4, 3, 2, 1])
    assert down.rho == -1 and down.high == pytest.approx(-up.low)
    three = correlate([1, 2, 3], [1, 3, 2])
    assert (three.rho, three.low, three.high) == (pytest.approx(0.5), -1, 1)
    assert midranks(np.array([5.0, 1.0, 5.0])).tolist() == [2.5, 1, 2.5]
    rng = np.random.default_rng(0)
    x = rng.normal(size=200)
    many = correlate(x, x + rng.normal(size=200))
    assert many.low < 0.69 < many.high and many.p_value < 0.01


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    truth, ranked = 0.6, 6 / math.pi * math.asin(0.3)  # of a normal pair, Spearman's
    inside = np.zeros(2)
    for _ in range(120):
        x = rng.normal(size=16)
        y = truth * x + math.sqrt(1 - truth**2) * rng.normal(size=16)
        found = correlate(x.tolist(), y.tolist())
        assert found.r == pytest.approx(np.corrcoef(x, y)[0, 1])
        inside += [found.r_low < truth < found.r_high, found.low < ranked < found.high]
    assert (inside > 0.88 * 120).all() and (inside < 120).all()


RUN, STEP = np.divmod(np.arange(24), 4)  # six runs, four checkpoints of each
NAMES = [str(run) for run in RUN]


def test_within_runs_nothing_is_left_of_what_tells_runs_apart() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=24), rng.normal(size=24)
    plain = within_runs(x.tolist(), y.tolist(), NAMES)
    moved = within_runs((x + 9 * RUN).tolist(), (y - 5 * RUN).tolist(), NAMES)
    assert (moved.r, moved.rho, moved.p_value) == pytest.approx((plain.r, plain.rho, plain.p_value))
    runs = np.eye(6)[RUN]
    left = [each - runs @ np.linalg.lstsq(runs, each, rcond=None)[0] for each in (x, y)]
    assert plain.r == pytest.approx(np.corrcoef(*left)[0, 1])
    assert (plain.points, plain.groups, plain.independent) == (24, 6, 19)
    short = within_runs([1, 2, 3, 4], [4, 3, 2, 9], ["a", "a", "a", "b"])
    assert (short.points, short.rho) == (3, -1) and short.p_value == pytest.approx(2 / 6)
    with pytest.raises(ValueError, match="of 3 runs 1 have several checkpoints, 2 in all"):
        within_runs([1, 2, 3, 4], [1, 2, 3, 4], ["a", "a", "b", "c"])


@pytest.mark.parametrize(("size", "r"), [(2, 0.9), (3, 0.97)])
def test_the_interval_within_short_runs_holds_the_truth(size: int, r: float) -> None:
    """Where all runs agree rho is 1, and of few checkpoints a run it often is: one exchange would change it much."""
    rng, runs = np.random.default_rng(4), [str(place // size) for place in range(12)]
    found = []
    for _ in range(300):
        x = rng.normal(size=12)
        y = r * x + math.sqrt(1 - r * r) * rng.normal(size=12)
        found.append(within_runs(x.tolist(), y.tolist(), runs))
    truth = np.mean([each.rho for each in found])
    if size == 2:
        assert truth == pytest.approx(2 / math.pi * math.asin(r), abs=0.05)  # Kendall's tau
    assert np.mean([each.rho == 1 for each in found]) > 0.1
    assert np.mean([each.low <= truth <= each.high for each in found]) > 0.93


def test_at_equal_steps_nothing_is_left_of_what_training_does() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=24), rng.normal(size=24)
    plain = at_equal_steps(x.tolist(), y.tolist(), NAMES, STEP.tolist())
    moved = at_equal_steps((x + 9 * STEP).tolist(), (y - 5 * STEP).tolist(), NAMES, STEP.tolist())
    assert (moved.r, moved.rho, moved.r_p_value) == pytest.approx((plain.r, plain.rho, plain.r_p_value))
    assert (plain.points, plain.groups, plain.independent) == (24, 4, 6)
    order = rng.permutation(24)
    mixed = at_equal_steps(x[order].tolist(), y[order].tolist(), RUN[order].astype(str).tolist(), STEP[order].tolist())
    assert (mixed.r, mixed.p_value) == pytest.approx((plain.r, plain.p_value))
    last = STEP == 3
    one = at_equal_steps(x[last].tolist(), y[last].tolist(), RUN[last].astype(str).tolist(), [3] * 6)
    same = correlate(x[last].tolist(), y[last].tolist())
    assert replace(one, among=ALL) == same
    # A step that not all runs have is left out.
    fewer = at_equal_steps(x[1:].tolist(), y[1:].tolist(), NAMES[1:], STEP[1:].tolist())
    assert (fewer.points, fewer.groups) == (18, 3)
    with pytest.raises(ValueError, match="no step that all of them have kept"):
        at_equal_steps([1, 2, 3], [1, 2, 3], ["a", "b", "c"], [1, 2, 3])
    with pytest.raises(ValueError, match="there are 2 runs"):
        at_equal_steps([1, 2, 3, 4], [1, 2, 3, 5], ["a", "a", "b", "b"], [1, 2, 1, 2])


def test_checkpoints_of_one_run_are_one_piece_of_evidence() -> None:
    """Runs that differ for good and for no reason: whole runs are exchanged, so chance looks like chance."""
    rng = np.random.default_rng(2)
    found = []
    for _ in range(200):
        x, y = (rng.normal(size=6)[RUN] + 0.1 * rng.normal(size=24) for _ in range(2))
        found.append(at_equal_steps(x.tolist(), y.tolist(), NAMES, STEP.tolist()).r_p_value)
    assert np.mean(np.array(found) <= 0.05) < 0.1 and 0.4 < np.mean(found) < 0.6


def test_correlations_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 models"):
        correlate([1, 2], [1, 2])
    with pytest.raises(ValueError, match="accuracy is the same for all 3"):
        correlate([1, 1, 1], [1, 2, 3], ("accuracy", "nll"))
    with pytest.raises(ValueError, match="nll is not finite"):
        correlate([1, 2, 3], [1, math.nan, 3], ("accuracy", "nll"))


# Several models.


def several(one: Study, points: Sequence[tuple[str, int, float, float]]) -> list[Study]:
    """Checkpoints of runs: (run, step, nll, accuracy)."""
    return [
        replace(
            one,
            model=f"runs/{run}/checkpoints/step-{step:08d}",
            step=step,
            losses=[replace(one.losses[0], nll=nll)],
            guesses=[replace(guess, accuracy=accuracy) for guess in one.guesses],
            samples=[],
        )
        for run, step, nll, accuracy in points
    ]


def test_several_models_go_together_or_do_not() -> None:
    one = study()
    with pytest.raises(ValueError, match="at least 3 models"):
        correlations([one, one])
    alone = correlations(several(one, ALONE))
    assert [(each.y, each.among, each.rho) for each in alone.found] == [("nll", ALL, -1)]
    assert any("of one run" in why for why in alone.unsaid) and any("there are 1 runs" in why for why in alone.unsaid)
    finals = correlations(several(one, [(str(nll), 8, nll, accuracy) for _, _, nll, accuracy in ALONE]))
    assert [each.among for each in finals.found] == [ALL]
    assert any("at one step" in why for why in finals.unsaid)
    # Training makes both better, and at one step they are against each other.
    whole = correlations(several(one, RUNS))
    assert [(each.among, each.points, each.groups, each.independent) for each in whole.found] == [
        (ALL, 8, 1, 8), (WITHIN, 8, 4, 5), (EQUAL, 8, 2, 4)
    ]  # fmt: skip
    together, within, equal = whole.found
    assert together.rho < -0.5 and within.rho == pytest.approx(-1) and equal.rho == pytest.approx(1)
    assert equal.p_value == pytest.approx(2 / 24) and whole.unsaid == []


ALONE = (("a", 2, 5.0, 0.1), ("a", 4, 4.0, 0.2), ("a", 6, 3.0, 0.3), ("a", 8, 2.5, 0.4))
RUNS = [(run, step, 6 - step / 2 + i / 10, step / 10 + i / 100) for i, run in enumerate("abcd") for step in (2, 4)]


def test_a_page_says_all_of_it() -> None:
    studies = several(study(), RUNS)
    together = correlations(studies)
    page = page_of(studies, together, "x.png")
    assert page.count("\n| ") == 2 + 3 + 8 and "(x.png)" in page
    assert [line[:2] for line in table_of_models(studies)[1:]] == [[run, str(step)] for run, step, _, _ in RUNS]
    assert table_of_models(studies)[1][2:] == ["0.200 ± " + f"{studies[0].guess().accuracy_se:.3f}",
                                              "5.000 ± " + f"{studies[0].losses[0].nll_se:.3f}"]  # fmt: skip
    assert [line[1] for line in table_of_correlations(together.found)[1:]] == [ALL, WITHIN, EQUAL]
    judged = [replace(each, samples=study().samples) for each in studies]
    assert table_of_models(judged)[0][-2:] == ["Gen-PPL", "entropy (nats)"]
    told = correlations(judged)
    assert {each.y for each in told.found} == {"nll"} and any("gen_ppl is the same" in why for why in told.unsaid)


def test_a_page_holds_text_and_dashes_for_what_is_not_known() -> None:
    studies = several(study(), RUNS)
    unknown = [replace(guess, accuracy=math.nan) for guess in study().guesses]
    odd = [replace(each, model=f"<b>|{number}", guesses=unknown) for number, each in enumerate(studies)]
    page = page_of(odd, correlations(studies), "x.png")
    assert "<b>" not in page and page.count(" | – | ") == 8


def test_runs_are_known_by_the_ends_of_their_paths() -> None:
    one = study()
    names = ("x/a/checkpoints/step-00000002", "x/a/checkpoints/step-00000004", "y/a/checkpoints/best", "b")
    assert run_names([replace(one, model=name) for name in names]) == {"x/a": "x/a", "y/a": "y/a", "b": "b"}
    assert run_names([replace(one, model=name) for name in names[:2]]) == {"x/a": "a"}


@with_matplotlib
def test_a_picture_has_runs_steps_and_figures(tmp_path: Path) -> None:
    few = several(study(), RUNS)
    picture = draw_correlation(few, correlations(few).found, tmp_path / "together.svg").read_text("utf-8")
    for word in ("within runs: ρ = -1.00", "at equal steps: ρ = 1.00", "step 4", ">a<", ">d<"):
        assert word in picture
    many = several(
        study(), [(f"run {i}", step, 6 - step / 9 - i, step / 99) for i in range(9) for step in range(1, 15)]
    )
    assert pixels(draw_correlation(many, correlations(many).found, tmp_path / "many.png")).std() > 0.05
