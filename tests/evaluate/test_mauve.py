"""MAUVE: the package's value, an interval with the coverage it claims, warnings for few texts."""

import numpy as np
import pytest

from adlm.evaluate.mauve import SCALE, MauveScore, integrate_curve, list_warnings, measure_mauve
from tests.evaluate.scorers import needs

WIDTH = 16


def features(rng: np.random.Generator, texts: int, shift: float = 0.0) -> np.ndarray:
    """Twelve topics; half of them are shifted."""
    topic = rng.integers(0, 12, texts)
    centers = np.random.default_rng(7).normal(size=(12, WIDTH))
    moved = shift * np.eye(WIDTH)[0] * (topic < 6)[:, None]
    return (centers[topic] + 0.6 * rng.normal(size=(texts, WIDTH)) + moved).astype(np.float32)


def measure(seed: int, texts: int, shift: float = 0.0, **settings) -> MauveScore:
    needs("mauve")
    rng = np.random.default_rng(seed)
    return measure_mauve(features(rng, texts), features(rng, texts, shift), **settings)


def test_the_area_is_the_packages() -> None:
    """What the bootstrap computes of a histogram is what the package computes of the texts in it."""
    needs("mauve")
    from mauve import compute_mauve

    rng = np.random.default_rng(0)
    for shift in (0.0, 1.0, 2.0, 8.0):
        p, q = features(rng, 80), features(rng, 60, shift)
        result = compute_mauve(p_features=p, q_features=q, num_buckets=6, mauve_scaling_factor=SCALE, seed=3)
        assert float(integrate_curve(result.p_hist, result.q_hist)) == pytest.approx(result.mauve, abs=1e-9)
        assert measure_mauve(p, q, seeds=(3,), buckets=6).estimate.value == pytest.approx(result.mauve, abs=1e-9)


def test_the_area_of_equal_and_of_disjoint_histograms() -> None:
    """Of equal ones the package makes 0.75."""
    p, q = np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.4, 0.3, 0.2, 0.1])
    both = integrate_curve(np.stack([p, p]), np.stack([p, p[::-1]]))
    assert both == pytest.approx([1, 0.004], abs=0.004) and both[0] == pytest.approx(1)
    assert both == pytest.approx([float(integrate_curve(p, each)) for each in (p, p[::-1])])
    assert float(integrate_curve(p, q)) == pytest.approx(float(integrate_curve(q, p)))


def test_alike_is_near_one_and_apart_near_zero() -> None:
    alike, apart = (measure(1, 150, shift) for shift in (0.0, 20.0))
    assert alike.estimate.value > 0.9 and alike.estimate.interval[1] == 1
    assert apart.estimate.value < 0.5 and apart.estimate.interval[1] < alike.estimate.interval[0]
    assert alike.buckets == 15 and len(alike.by_seed) == 5 and alike == measure(1, 150)
    for each in (alike, apart):
        assert 0 <= each.estimate.interval[0] <= each.estimate.value <= each.estimate.interval[1] <= 1
        assert each.estimate.value == pytest.approx(np.mean(each.by_seed))
    assert len(set(measure(2, 100, 2.0).by_seed)) > 1


def test_the_interval_holds_what_other_texts_give() -> None:
    """Thirty pairs of sets from one source: nearly all intervals hold the mean of the values."""
    estimates = [measure(seed, 200, 2.0, seeds=(0, 1)).estimate for seed in range(30)]
    mean, spread = np.mean([each.value for each in estimates]), np.std([each.value for each in estimates])
    assert sum(each.interval[0] <= mean <= each.interval[1] for each in estimates) >= 26
    assert 0.7 * spread < np.mean([each.stderr for each in estimates]) < 3 * spread


def test_few_texts_give_warnings_and_nothing_else_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Faiss writes its advice from C."""
    assert list_warnings(200, 20) == []
    (warning,) = list_warnings(200, 30)
    assert "too low with 30 buckets for 200 texts" in warning and "at most 20 buckets" in warning
    assert any("only 2 buckets" in each for each in list_warnings(24, 2))
    assert len(measure(5, 40, buckets=9).warnings) == 2 and capfd.readouterr() == ("", "")
    for buckets in (1, 41):
        with pytest.raises(ValueError, match=rf"buckets={buckets}: give at least 2 .* number of texts, 40"):
            measure(8, 20, buckets=buckets)
