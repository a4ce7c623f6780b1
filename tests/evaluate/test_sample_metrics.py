"""Metrics of texts: the authors' entropy and Gen-PPL, n-grams by hand, the package's MAUVE, errors that hold."""

import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adlm.evaluate import sample_metrics as metrics
from adlm.evaluate.cache import Cache
from adlm.evaluate.sample_metrics import (
    TextScorer,
    compute_entropies,
    compute_gen_ppl,
    cut_passages,
    estimate_mean,
    is_counted,
    measure_distinct,
)
from adlm.evaluate.scorer import ScoringRequest, TokenizedText, score_texts, token_nats
from tests.evaluate.scorers import END, causal, documents, encoder, needs
from tests.goldens import arrays
from tests.text.models import lm

ROWS = [[1, 2, 1, 2, 1], [3, 3, 3, 3], [1, 2, 4, 5, 6, 7]]
SETS = st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=12), min_size=2, max_size=6)


def count_distinct(rows: list[list[int]], n: int) -> float:
    every = [ngram for row in rows for ngram in zip(*(row[k:] for k in range(n)), strict=False)]
    return len(set(every)) / len(every)


def zipf(rng: np.random.Generator, texts: int, length: int) -> list[np.ndarray]:
    """Texts of independent tokens, a few frequent and many rare."""
    share = 1 / np.arange(1, 2001)
    return list(rng.choice(2000, size=(texts, length), p=share / share.sum()))


def test_entropy_is_the_authors() -> None:
    golden = arrays("generation_metrics")
    rows = golden["tokens"].numpy()  # their entropies were computed in float32
    assert compute_entropies(rows) == pytest.approx(golden["entropy"].numpy(), rel=1e-6)
    entropy = estimate_mean(compute_entropies(rows))
    assert entropy.value == pytest.approx(float(golden["entropy"].mean()), rel=1e-6)
    assert entropy.stderr == pytest.approx(float(golden["entropy"].std() / 2), rel=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@given(SETS)
def test_ngrams_are_counted_as_by_hand(n: int, rows: list[list[int]]) -> None:
    """None spans two texts: the lengths differ, so one that did would change the count."""
    k, distinct = len(rows), measure_distinct(rows, n)
    assert distinct.value == pytest.approx(count_distinct(rows, n))
    without = np.array([count_distinct(rows[:i] + rows[i + 1 :], n) for i in range(k)])
    jackknife = math.sqrt((k - 1) / k * np.square(without - without.mean()).sum())
    assert distinct.stderr == pytest.approx(jackknife, abs=1e-12)
    assert metrics.compute_repetitions(rows, n) == pytest.approx(
        [1 - count_distinct([row], n) for row in rows]
    )
    entropies = [
        -sum(c / len(row) * math.log(c / len(row)) for c in Counter(row).values()) for row in rows
    ]
    assert compute_entropies(rows) == pytest.approx(entropies, abs=1e-12)


@pytest.mark.parametrize(
    "measure",
    [
        lambda rows: measure_distinct(rows, 1),
        lambda rows: measure_distinct(rows, 2),
        lambda rows: estimate_mean(metrics.compute_repetitions(rows, 1)),
        lambda rows: estimate_mean(compute_entropies(rows)),
    ],
)
def test_standard_errors_are_the_spread_over_sets(measure) -> None:
    rng = np.random.default_rng(0)
    estimates = [measure(zipf(rng, 60, 40)) for _ in range(50)]
    spread = np.std([each.value for each in estimates], ddof=1)
    assert np.mean([each.stderr for each in estimates]) == pytest.approx(spread, rel=0.3)


# Gen-PPL.

TEXTS = [document[:120] for document in documents()[:9]]


def gen_ppl(texts: list[str], **settings) -> metrics.Scored:
    request = ScoringRequest(causal(), causal().encode(texts), window=63)
    return compute_gen_ppl(causal(), request.texts, score_texts([request])[0].nats, **settings)


def test_gen_ppl_is_the_authors() -> None:
    """The logits of their scoring model are given; targets are all tokens but the first."""
    golden, eos = arrays("generation_metrics"), 63
    rows = golden["tokens"].numpy()
    nats = token_nats(golden["eval_logits"], golden["tokens"]).double().numpy()
    assert (
        np.stack([is_counted(row, eos)[1:] for row in rows]) == golden["token_mask"].numpy()
    ).all()
    scorer: Any = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=eos), special_ids=([], []))
    texts = [
        TokenizedText("x" * len(row), tuple(row), tuple(range(1, len(row) + 1))) for row in rows
    ]
    found, details = compute_gen_ppl(scorer, texts, [np.array([np.nan, *row]) for row in nats])
    assert found.value == pytest.approx(float(golden["gen_ppl"]), rel=1e-5)
    assert details["tokens"] == int(golden["token_mask"].sum())


def test_which_tokens_count() -> None:
    row = [5, 9, 1, 9, 9, 2]
    assert is_counted(row, 9).tolist() == [
        True,
        True,
        True,
        False,
        False,
        True,
    ]  # as in MDLM's code
    assert is_counted(row, 9, until_eos=True).tolist() == [True, True, False, False, False, False]
    assert (
        is_counted(row, 3).all()
        and is_counted(row, None).all()
        and is_counted(row, 3, until_eos=True).all()
    )
    ended, more = [f"{text}{END}" for text in TEXTS], [f"{text}{END}{text[::-1]}" for text in TEXTS]
    (_, short), (_, cut), (_, whole) = (
        gen_ppl(ended, until_eos=True),
        gen_ppl(more, until_eos=True),
        gen_ppl(more),
    )
    assert (cut["tokens"], cut["characters"]) == (short["tokens"], short["characters"])
    assert whole["tokens"] > cut["tokens"] and whole["nll"] != pytest.approx(cut["nll"], rel=1e-3)


@pytest.mark.parametrize("bos", [True, False])
def test_gen_ppl_is_over_all_tokens_and_characters(bos: bool) -> None:
    texts = [text.truncate(40) for text in causal(bos).encode(TEXTS)]
    nats = score_texts([ScoringRequest(causal(bos), texts)])[0].nats
    (ppl, more), total = (
        compute_gen_ppl(causal(bos), texts, nats),
        sum(float(np.nansum(each)) for each in nats),
    )
    assert more["tokens"] == sum(map(len, texts)) - (0 if bos else len(texts))
    assert more["characters"] == sum(
        len(text.text) - (0 if bos else text.ends[0]) for text in texts
    )
    assert (
        more["nll"] == pytest.approx(total / more["tokens"])
        and more["bits_per_character_stderr"] > 0
    )
    assert more["bits_per_character"] == pytest.approx(total / math.log(2) / more["characters"])
    assert ppl.value == pytest.approx(math.exp(more["nll"])) and ppl.stderr is not None
    assert ppl.stderr == pytest.approx(
        math.exp(more["nll"] + more["nll_stderr"]) - ppl.value, rel=0.2
    )


def test_texts_that_are_too_short_are_left_out_and_counted() -> None:
    measure = TextScorer(lm().tokenizer)
    found = measure(["abcdefgh", "hgfedcba", "a", ""])
    row = found.as_row()
    assert (found.texts, found.short, row["tokens"]) == (2, 2, 8) and row["gen_ppl"] is row[
        "gen_ppl_se"
    ] is None
    with pytest.raises(ValueError, match="3 of 4 texts have fewer than 4 tokens"):
        measure(["abcdefgh", "a", "b", "c"])
    with pytest.raises(ValueError, match="is an encoder"):
        TextScorer(lm().tokenizer, encoder())
    short = cut(TEXTS, 60)
    scored = TextScorer(lm().tokenizer, causal())(short)
    estimate, more = gen_ppl(short)
    assert scored.as_row()["gen_ppl"] == estimate.value and scored.details["gen_ppl"] == more


# Samples and real text.

N, TOKENS = 20, 40


def real_texts(count: int, seed: int = 0) -> list[str]:
    return cut_passages(documents(), count, 6 * TOKENS, seed=seed)


def cut(texts: list[str], tokens: int = TOKENS) -> list[str]:
    return [text.truncate(tokens).text for text in causal().encode(texts)]


def compare(samples: list[str], **settings) -> tuple[Any, metrics.SampleMetrics, dict[str, Any]]:
    needs("mauve")
    return metrics.compare_texts(
        samples, real_texts(2 * len(samples), seed=1), causal(), seeds=(0, 1), **settings
    )


def test_a_comparison_is_that_of_its_parts() -> None:
    rng = random.Random(0)
    samples = [text.truncate(rng.randint(10, 60)).text for text in causal().encode(real_texts(N))]
    found, reference, settings = compare(samples)
    assert (found.texts, found.tokens) == (reference.texts, reference.tokens)
    assert settings["truncated_share"] == pytest.approx(1 / 8, abs=0.05)
    assert settings["scorer"]["dtype"] == "float32" and settings["until_eos"] is False
    assert found.details["mauve"]["buckets"] == 2
    names = [
        "gen_ppl",
        "mauve",
        "entropy",
        "distinct_1",
        "distinct_2",
        "distinct_3",
        "repetition_4",
        "texts",
        "tokens",
    ]
    assert list(found.as_dict()) == list(reference.as_dict()) == names


def test_the_last_eighth_of_a_text_does_not_count() -> None:
    """A model that ends its texts writes an end, passages have none: MAUVE must not be about that."""
    samples = cut(real_texts(N))
    ended, whole = (
        compare(texts)[0] for texts in ([f"{text}!!" for text in cut(samples, TOKENS - 2)], samples)
    )
    assert ended == whole
    texts = causal().encode(cut(samples, TOKENS - TOKENS // 8))
    expected = gen_ppl([text.text for text in texts])[1]["nll"]
    assert whole.details["gen_ppl"]["nll"] == pytest.approx(expected, abs=1e-5)
    assert whole.estimates["entropy"] == estimate_mean(
        compute_entropies([text.ids for text in texts])
    )


def test_three_sets_are_truncated_to_one_shape() -> None:
    rng = random.Random(1)
    sets = [
        [text.truncate(rng.randint(4, 60)) for text in causal().encode(real_texts(12, seed))]
        for seed in range(3)
    ]
    after = metrics.truncate_together(sets)
    shapes, lengths = ([sorted(map(len, texts)) for texts in each] for each in (after, sets))
    assert shapes[0] == shapes[1] == shapes[2]
    assert shapes[0] == [min(each) for each in zip(*lengths)], "no more is cut than must be"
    for whole, less in zip(sets, after, strict=True):
        assert all(one.text.startswith(other.text) for one, other in zip(whole, less, strict=True))


def test_features_of_another_model_change_mauve_alone() -> None:
    progress: list[tuple[str, int, int]] = []
    samples = cut(real_texts(N), 30)
    caches = [Cache(), Cache()]
    for cache in caches:
        cache.on_progress = lambda *done: progress.append(done)
    (found, _, settings), (own, _, _) = (
        compare(samples, features=each, cache=cache)
        for each, cache in zip((encoder(), None), caches, strict=True)
    )
    assert found.details["gen_ppl"]["nll"] == pytest.approx(own.details["gen_ppl"]["nll"], abs=1e-5)
    assert all(
        found.estimates[name] == own.estimates[name]
        for name in found.estimates
        if name not in ("gen_ppl", "mauve")
    )
    assert (
        found.details["mauve"] != own.details["mauve"] and settings["features"]["kind"] == "encoder"
    )
    assert ("scoring", 5 * N, 5 * N) in progress and progress[-1] == ("scoring", 3 * N, 3 * N)
    assert (
        compare(cut(real_texts(N), 60), features=encoder(), window=60)[2]["stride"] == 30
    )  # longer than its context


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            "",
            r"1 of 2 samples are empty or have fewer than 4 tokens \(number 1 has 0\): leave such texts out",
        ),
        (" \n" * 9, "1 of 2 samples are empty"),
        ("no", "1 of 2 samples are empty or have fewer than 4 tokens"),
        (documents()[1][:900], r"longer than the 63 tokens .*window"),
    ],
)
def test_samples_that_cannot_be_compared(second: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.compare_texts(
            [documents()[0][:900], second], [document[-900:] for document in documents()], causal()
        )


WIDTH = 16


def features(rng: np.random.Generator, texts: int, shift: float = 0.0) -> np.ndarray:
    """Twelve topics; half of them are shifted."""
    topic = rng.integers(0, 12, texts)
    centers = np.random.default_rng(7).normal(size=(12, WIDTH))
    moved = shift * np.eye(WIDTH)[0] * (topic < 6)[:, None]
    return (centers[topic] + 0.6 * rng.normal(size=(texts, WIDTH)) + moved).astype(np.float32)


def measure(seed: int, texts: int, shift: float = 0.0, **settings) -> metrics.Scored:
    needs("mauve")
    rng = np.random.default_rng(seed)
    return metrics.measure_mauve(features(rng, texts), features(rng, texts, shift), **settings)


def test_the_area_is_the_packages() -> None:
    """What the bootstrap computes of a histogram is what the package computes of the texts in it."""
    needs("mauve")
    from mauve import compute_mauve

    rng = np.random.default_rng(0)
    for shift in (0.0, 1.0, 2.0, 8.0):
        p, q = features(rng, 80), features(rng, 60, shift)
        result = compute_mauve(
            p_features=p, q_features=q, num_buckets=6, mauve_scaling_factor=metrics.SCALE, seed=3
        )
        assert float(metrics.integrate_curve(result.p_hist, result.q_hist)) == pytest.approx(
            result.mauve, abs=1e-9
        )
        found = metrics.measure_mauve(p, q, seeds=(3,), buckets=6)[0].value
        assert found == pytest.approx(result.mauve, abs=1e-9)


def test_the_area_of_equal_and_of_disjoint_histograms() -> None:
    """Of equal ones the package makes 0.75."""
    p, q = np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.4, 0.3, 0.2, 0.1])
    both = metrics.integrate_curve(np.stack([p, p]), np.stack([p, p[::-1]]))
    assert both == pytest.approx([1, 0.004], abs=0.004) and both[0] == pytest.approx(1)
    assert both == pytest.approx([float(metrics.integrate_curve(p, each)) for each in (p, p[::-1])])
    assert float(metrics.integrate_curve(p, q)) == pytest.approx(
        float(metrics.integrate_curve(q, p))
    )


def test_alike_is_near_one_and_apart_near_zero() -> None:
    (alike, details), (apart, _) = both = [measure(1, 150, shift) for shift in (0.0, 20.0)]
    assert alike.value > 0.9 and alike.interval[1] == 1
    assert apart.value < 0.5 and apart.interval[1] < alike.interval[0]
    assert (
        details["buckets"] == 15
        and len(details["by_seed"]) == 5
        and (alike, details) == measure(1, 150)
    )
    for each, more in both:
        assert 0 <= each.interval[0] <= each.value <= each.interval[1] <= 1
        assert each.value == pytest.approx(np.mean(more["by_seed"]))
    assert len(set(measure(2, 100, 2.0)[1]["by_seed"])) > 1


def test_the_interval_holds_what_other_texts_give() -> None:
    """Thirty pairs of sets from one source: nearly all intervals hold the mean of the values."""
    estimates = [measure(seed, 200, 2.0, seeds=(0, 1))[0] for seed in range(30)]
    mean, spread = (
        np.mean([each.value for each in estimates]),
        np.std([each.value for each in estimates]),
    )
    assert sum(each.interval[0] <= mean <= each.interval[1] for each in estimates) >= 26
    assert 0.7 * spread < np.mean([each.stderr for each in estimates]) < 3 * spread


def test_few_texts_give_warnings_and_nothing_else_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Faiss writes its advice from C."""
    assert metrics.warn_few_texts(200, 20) == []
    assert any("only 2 buckets" in each for each in metrics.warn_few_texts(24, 2))
    assert measure(5, 40, buckets=9)[1]["buckets"] == 9 and capfd.readouterr() == ("", "")
    for buckets in (1, 41):
        with pytest.raises(
            ValueError, match=rf"buckets={buckets}: give at least 2 .* number of texts, 40"
        ):
            measure(8, 20, buckets=buckets)
