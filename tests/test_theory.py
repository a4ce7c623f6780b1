"""docs/theory/sample_complexity.py: estimators against naive ones, slopes, the toy chain, the committed results."""

import importlib.util
import json
import math
import sys
from collections import Counter
from itertools import permutations, product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.evaluate.scorers import with_matplotlib

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "theory"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "sample_complexity", FOLDER / "sample_complexity.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = load_script()
RESULTS: dict[str, Any] = json.loads((FOLDER / "results.json").read_text("utf-8"))


def test_the_toy_chain_is_exact():
    toy = script.compute_toy()
    assert toy["t"] == pytest.approx(2 / 3, abs=1e-12)
    assert toy["reveal_prob"] == pytest.approx(0.5, abs=1e-12)
    assert toy["marginals"] == pytest.approx(0.1125, abs=1e-12) == toy["marginals_formula"]
    assert toy["certain"] == pytest.approx(0.125, abs=1e-12) == toy["certain_formula"]
    assert toy["marginals_mean"] == pytest.approx(0.125 * (0.9 * 0.9 + 0.1 * 0.1), abs=1e-12)
    assert toy["certain_mean"] == pytest.approx(0.125 * 0.9, abs=1e-12)


def naive_conditional(samples, child, visible, x, states):
    """(count + 1/2) / (count of the context + K/2), counted in a list of samples."""
    context = [y for y in samples if all(y[i] == x[i] for i in visible)]
    return (sum(y[child] == x[child] for y in context) + 0.5) / (len(context) + states / 2)


def draw_case(states=3, length=3, parents=1, samples=11, seed=5):
    """One network and a list of samples from it, also as counts."""
    rng = np.random.default_rng(seed)
    truth, graph = script.draw_network(rng, states, length, parents, 1.0, 1)
    texts = list(product(range(states), repeat=length))
    drawn = [texts[i] for i in rng.choice(len(texts), samples, p=truth.ravel() / truth.sum())]
    counts = np.zeros((1, *truth.shape))
    for text, count in Counter(drawn).items():
        counts[(0, *text, 0)] = count
    return truth, graph, drawn, counts


def test_gaps_by_hand_for_two_bits():
    truth, counts = (
        np.array([[0.4, 0.1], [0.2, 0.3]])[..., None],
        np.array([[3, 1], [0, 2]])[None, ..., None],
    )
    ar = script.build_ordered(2, [(), ()])["ar"]
    first = 0.5 * math.log(0.5 / (4.5 / 7)) + 0.5 * math.log(0.5 / (2.5 / 7))
    second = 0.4 * math.log(0.8 / (3.5 / 5)) + 0.1 * math.log(0.2 / (1.5 / 5))
    second += 0.2 * math.log(0.4 / (0.5 / 3)) + 0.3 * math.log(0.6 / (2.5 / 3))
    assert ar.compute_gap(ar.prepare(truth), counts) == pytest.approx(first + second, abs=1e-12)
    alone = script.build_ordered(2, [(), ()])[
        "anchored"
    ]  # no parents: q(x_2) is 3.5/7 for either token
    marginal = 0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.5)
    assert alone.compute_gap(alone.prepare(truth), counts) == pytest.approx(
        first + marginal, abs=1e-12
    )


def test_ar_and_anchored_gaps_are_divergences_of_joint_laws():
    truth, graph, drawn, counts = draw_case()
    for name, visible in {"ar": [(), (0,), (0, 1)], "anchored": graph}.items():
        estimator = script.build_ordered(3, graph)[name]
        divergence = 0.0
        for x in product(range(3), repeat=3):
            q = math.prod(
                naive_conditional(drawn, child, visible[child], x, 3) for child in range(3)
            )
            divergence += truth[(*x, 0)] * math.log(truth[(*x, 0)] / q)
        assert estimator.compute_gap(estimator.prepare(truth), counts) == pytest.approx(
            divergence, rel=1e-9
        )


def test_the_diffusion_gap_is_the_mean_over_orders():
    """The NELBO is the mean over orders of -log of the product of conditionals; here every mask has all samples."""
    truth, _, drawn, counts = draw_case()
    gaps = []
    for order in permutations(range(3)):
        for x in product(range(3), repeat=3):
            q = math.prod(naive_conditional(drawn, order[i], order[:i], x, 3) for i in range(3))
            gaps.append(truth[(*x, 0)] * math.log(truth[(*x, 0)] / q))
    estimators = script.build_masked(3, 3)
    repeated = np.repeat(counts, len(estimators["diffusion"].mask_probs), axis=0)
    for estimator, seen in ((estimators["diffusion"], repeated), (estimators["all_masks"], counts)):
        assert estimator.compute_gap(estimator.prepare(truth), seen) == pytest.approx(
            sum(gaps) / 6, rel=1e-9
        )


def test_diffusion_reads_each_table_from_its_own_mask():
    truth, *_ = draw_case()
    estimator = script.build_masked(3, 3)["diffusion"]
    seen = np.zeros((len(estimator.mask_probs), *truth.shape))
    targets = estimator.prepare(truth)
    untrained = estimator.compute_gap(targets, seen)
    shares = []
    for mask in range(len(seen)):
        seen[:] = 0
        seen[mask] = 1e9 * truth
        shares.append(float((untrained - estimator.compute_gap(targets, seen))[0]))
    assert min(shares) > 0
    assert sum(shares) == pytest.approx(float(untrained[0]), rel=1e-6)


@pytest.mark.parametrize(
    ("states", "length", "parents"), [(2, 3, 1), (3, 4, 2), (4, 3, 1), (2, 6, 3)]
)
def test_numbers_of_parameters_and_predictions(states, length, parents):
    _, graph = script.draw_network(np.random.default_rng(0), states, length, parents, 1.0, 1)
    assert [len(visible) for visible in graph] == [min(i, parents) for i in range(length)]
    assert all(max(visible, default=-1) < child for child, visible in enumerate(graph))
    estimators = script.build_ordered(states, graph) | script.build_masked(states, length)
    free = {name: estimator.free_parameters for name, estimator in estimators.items()}
    assert free["ar"] == states**length - 1
    assert (
        free["diffusion"]
        == free["all_masks"]
        == length * (states - 1) * (states + 1) ** (length - 1)
    )
    assert free["anchored"] == sum((states - 1) * states ** min(i, parents) for i in range(length))
    predicted = {name: estimator.predict_samples() for name, estimator in estimators.items()}
    assert sum(estimators["diffusion"].mask_probs) == pytest.approx(1)
    assert predicted["ar"] == pytest.approx(10 * free["ar"]) == predicted["all_masks"]
    assert predicted["anchored"] == pytest.approx(10 * free["anchored"])
    masks = (states + 1) ** length - states**length
    assert predicted["diffusion"] == pytest.approx(10 * length * (states - 1) * masks)


def test_anchored_tables_with_all_parents_are_those_of_ar():
    estimators = script.build_ordered(2, [tuple(range(child)) for child in range(4)])
    assert estimators["ar"] == estimators["anchored"]


def test_n_star_is_where_the_mean_gap_is_reached(monkeypatch):
    """At n* fresh data has the wanted mean gap, up to its standard error."""
    rng = np.random.default_rng(3)
    truth, graph = script.draw_network(rng, 3, 3, 1, 2.0, 400)
    estimator = script.build_ordered(3, graph)["ar"]
    n_star, error = script.find_samples(estimator, truth, rng)
    assert error < 0.05 * n_star
    counts = np.stack(
        [rng.multinomial(round(n_star), p / p.sum()) for p in truth.reshape(27, -1).T], axis=-1
    )
    gaps = estimator.compute_gap(estimator.prepare(truth), counts.reshape(1, *truth.shape))
    assert gaps.mean() == pytest.approx(script.GAP, abs=5 * gaps.std() / math.sqrt(400))
    monkeypatch.setattr(script, "FIRST_SAMPLES", 10_000)
    with pytest.raises(ValueError, match="use a larger network"):
        script.find_samples(estimator, truth, rng)


def test_slopes_and_their_errors():
    x = np.array([1.0, 2.0, 5.0, 9.0, 20.0])
    assert script.fit_slope(x, 3 * x**1.5) == pytest.approx((1.5, 0), abs=1e-7)
    y = x * np.array([1.1, 0.9, 1.2, 0.8, 1.0])
    (slope, _), cov = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    assert script.fit_slope(x, y) == pytest.approx((slope, math.sqrt(cov[0, 0])), rel=1e-9)


SHORT = [(2, 3, 1), (2, 5, 2), (3, 3, 1), (3, 4, 2), (4, 3, 1), (5, 3, 1)]


@pytest.fixture(scope="module")
def short_form() -> dict[str, Any]:
    return script.compute_results(SHORT, [(2, 9, 1), (2, 10, 2), (2, 11, 2)], (2.0,), draws=8)


def test_a_short_sweep_has_slopes_near_one(short_form):
    for name in script.CLAIMED:
        slope, error = short_form["fits"]["2.0"][name]["slope"]
        assert 0.8 < slope < 1.2
        assert 0 < error < 0.2


def test_equal_seeds_give_equal_files(short_form, tmp_path, monkeypatch):
    again = script.compute_results(SHORT, [(2, 9, 1), (2, 10, 2), (2, 11, 2)], (2.0,), draws=8)
    for name, results in {"one": short_form, "two": again}.items():
        script.write_results(results, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert json.loads((tmp_path / "one").read_text("utf-8")) == short_form
    monkeypatch.setattr(script, "SEED", 1)
    point = script.measure_point(*SHORT[0], 2.0, 8)
    assert point["ar"]["n_star"] != pytest.approx(short_form["points"][0]["ar"]["n_star"], rel=1e-4)


def test_a_point_of_the_committed_results_is_reproduced():
    """If a release of numpy draws other numbers, run the script again."""
    point = script.round_numbers(script.measure_point(3, 4, 2, 1.0))
    keys = ("states", "length", "parents", "concentration")
    committed = next(p for p in RESULTS["points"] if all(p[key] == point[key] for key in keys))
    for name in script.ORDERS:
        assert point[name] == pytest.approx(committed[name], rel=1e-4)


def test_the_committed_results_support_the_page():
    kinds = [
        (p["concentration"], p["states"], p["length"], p["parents"]) for p in RESULTS["points"]
    ]
    assert sorted(kinds) == sorted(
        (c, *point) for c in script.CONCENTRATIONS for point in script.POINTS
    )
    assert RESULTS["toy"] == script.round_numbers(script.compute_toy())
    page = (ROOT / "docs" / "theory.md").read_text("utf-8")
    for concentration in script.CONCENTRATIONS:
        fits = script.fit_points(
            [p for p in RESULTS["points"] if p["concentration"] == concentration]
        )
        for name, fit in RESULTS["fits"][str(concentration)].items():
            assert fit["slope"] == pytest.approx(list(fits[name]["slope"]), abs=1e-3)
            assert "{:.3f} ± {:.3f}".format(*fit["slope"]) in page
            if name in script.CLAIMED:
                assert abs(fit["slope"][0] - 1) <= 0.1
        assert (
            "{:.3f} ± {:.3f}".format(*RESULTS["long_fits"][str(concentration)]["ar"]["slope"])
            in page
        )


def test_the_bound_holds_for_every_text():
    rows = script.compute_bounds((0.5,))
    assert len(rows) == 27
    assert all(row["left"] <= row["anelbo"] + 1e-5 for row in rows)
    assert max(row["left"] - row["nll"] for row in rows) > 1  # the anchor term is no detail here
    assert len(RESULTS["bounds"]) == 81
    for row, committed in zip(rows, RESULTS["bounds"][54:], strict=True):
        assert row.pop("text") == committed["text"]
        assert row == pytest.approx({key: committed[key] for key in row}, rel=1e-3, abs=1e-5)


@with_matplotlib
def test_the_plot_is_drawn(tmp_path):
    script.draw_plot(RESULTS, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text("utf-8")
    assert all(
        words in text for words in ("free parameters", "diffusion: slope", "n* / the paper's order")
    )
