"""MAUVE: the package's value, an interval with the coverage it claims, warnings for few texts."""

import numpy as np
import pytest

from adlm.evaluate.mauve import SCALE, integrate_curve, list_warnings, measure_mauve
from tests.evaluate.scorers import needs

WIDTH = 16


def features(rng: np.random.Generator, texts: int, shift: float = 0.0) -> np.ndarray:
    """Twelve topics; half of them are shifted."""
    topic = rng.integers(0, 12, texts)
    centres = np.random.default_rng(7).normal(size=(12, WIDTH))
    moved = shift * np.eye(WIDTH)[0] * (topic < 6)[:, None]
    return (centres[topic] + 0.6 * rng.normal(size=(texts, WIDTH)) + moved).astype(np.float32)


def test_the_area_is_the_packages() -> None:
    """What the bootstrap computes of a histogram is what the package computes of the texts in it."""
    needs("mauve")
    from mauve import compute_mauve

    rng = np.random.default_rng(0)
    for shift in (0.0, 1.0, 2.0, 8.0):
        p, q = features(rng, 80), features(rng, 60, shift)
        found = compute_mauve(p_features=p, q_features=q, num_buckets=6, mauve_scaling_factor=SCALE, seed=3)
        assert float(integrate_curve(found.p_hist, found.q_hist)) == pytest.approx(found.mauve, abs=1e-9)
        assert measure_mauve(p, q, seeds=(3,), buckets=6).estimate.value == pytest.approx(found.mauve, abs=1e-9)


def test_the_area_of_equal_and_of_disjoint_histograms() -> None:
    """Of equal ones the package makes 0.75."""
    p = np.array([0.5, 0.5, 0.0, 0.0])
    assert float(integrate_curve(p, p)) == pytest.approx(1)
    assert float(integrate_curve(p, p[::-1].copy())) == pytest.approx(0.004, abs=0.004)
    many = integrate_curve(np.stack([p, p]), np.stack([p, p[::-1]]))
    assert many == pytest.approx([float(integrate_curve(p, p)), float(integrate_curve(p, p[::-1].copy()))])
    q = np.array([0.4, 0.3, 0.2, 0.1])
    assert float(integrate_curve(p, q)) == pytest.approx(float(integrate_curve(q, p)))


def test_alike_is_near_one_and_apart_near_nothing() -> None:
    needs("mauve")
    rng = np.random.default_rng(1)
    alike, apart = (measure_mauve(features(rng, 150), features(rng, 150, shift)) for shift in (0.0, 20.0))
    assert alike.estimate.value > 0.9 and alike.estimate.interval[1] == 1
    assert apart.estimate.value < 0.5 and apart.estimate.interval[1] < alike.estimate.interval[0]
    assert alike.buckets == 15 and len(alike.by_seed) == 5
    for found in (alike, apart):
        assert 0 <= found.estimate.interval[0] <= found.estimate.value <= found.estimate.interval[1] <= 1
        assert found.estimate.value == pytest.approx(np.mean(found.by_seed))


def test_the_same_seeds_give_the_same_figure() -> None:
    needs("mauve")
    p, q = features(np.random.default_rng(2), 100), features(np.random.default_rng(3), 100, 2.0)
    assert measure_mauve(p, q, seeds=(4, 5)) == measure_mauve(p, q, seeds=(4, 5))
    assert measure_mauve(p, q, seeds=(4,)).estimate.value != measure_mauve(p, q, seeds=(5,)).estimate.value


def test_the_interval_holds_what_other_texts_give() -> None:
    """Thirty pairs of sets from one source: nearly all intervals hold the mean of the figures."""
    needs("mauve")
    rng = np.random.default_rng(4)
    found = [measure_mauve(features(rng, 200), features(rng, 200, 2.0), seeds=(0, 1)) for _ in range(30)]
    mean = np.mean([each.estimate.value for each in found])
    assert sum(each.estimate.interval[0] <= mean <= each.estimate.interval[1] for each in found) >= 26
    spread = np.std([each.estimate.value for each in found])
    assert 0.7 * spread < np.mean([each.estimate.stderr for each in found]) < 3 * spread


def test_few_texts_are_told() -> None:
    needs("mauve")
    assert list_warnings(200, 20) == []
    assert any(
        "too low with 30 buckets for 200 texts" in said and "at most 20 buckets" in said
        for said in list_warnings(200, 30)
    )
    assert any("only 2 buckets" in said for said in list_warnings(24, 2))
    rng = np.random.default_rng(5)
    assert len(measure_mauve(features(rng, 50), features(rng, 40), buckets=9).warnings) == 2


def test_nothing_but_our_words_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Faiss writes its advice from C."""
    needs("mauve")
    rng = np.random.default_rng(6)
    measure_mauve(features(rng, 40), features(rng, 40))
    assert capfd.readouterr() == ("", "")


def test_errors_teach() -> None:
    needs("mauve")
    p = features(np.random.default_rng(8), 20)
    for q, how, said in [
        (p[:1], {}, "got 20 and 1: give at least 2"),
        (p[:, :4], {}, "of one model for both"),
        (p, {"buckets": 1}, "buckets=1"),
        (p, {"buckets": 41}, "at most the number of texts, 40"),
        (p, {"seeds": ()}, "at least one seed"),
    ]:
        with pytest.raises(ValueError, match=said):
            measure_mauve(p, q, **how)
