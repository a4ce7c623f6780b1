"""Diversity: the authors' entropy, n-grams counted as one would by hand, errors of estimates that are real."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adlm.evaluate.diversity import cut_alike, distinct, entropies, entropy, repetition, repetitions
from tests.goldens import arrays

ORDERS = (1, 2, 3, 4)
ROWS = [[1, 2, 1, 2, 1], [3, 3, 3, 3], [1, 2, 4, 5, 6, 7]]
SETS = st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=12), min_size=2, max_size=6)


def ngrams(row: list[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(row[k:] for k in range(n)), strict=False))


def by_hand(rows: list[list[int]], n: int) -> float:
    every = [gram for row in rows for gram in ngrams(row, n)]
    return len(set(every)) / len(every)


def zipf(rng: np.random.Generator, texts: int, length: int) -> list[np.ndarray]:
    """Texts of independent tokens, a few frequent and many rare."""
    share = 1 / np.arange(1, 2001)
    return list(rng.choice(2000, size=(texts, length), p=share / share.sum()))


def test_entropy_is_the_authors() -> None:
    golden = arrays("generation_metrics")
    rows = golden["tokens"].numpy()  # their entropies were computed in float32
    assert entropies(rows) == pytest.approx(golden["entropy"].numpy(), rel=1e-6)
    figure = entropy(rows)
    assert figure.value == pytest.approx(float(golden["entropy"].mean()), rel=1e-6)
    assert figure.stderr == pytest.approx(float(golden["entropy"].std() / 2), rel=1e-5)
    assert (figure.texts, figure.tokens) == (4, 80)


def test_entropy_lies_between_one_token_and_all_different() -> None:
    assert entropies([[7] * 9, list(range(9))]) == pytest.approx([0, math.log(9)])


@given(SETS)
def test_entropy_is_that_of_the_counts(rows: list[list[int]]) -> None:
    expected = [-sum(c / len(row) * math.log(c / len(row)) for c in Counter(row).values()) for row in rows]
    assert entropies(rows) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n", ORDERS)
@given(SETS)
def test_ngrams_are_counted_as_by_hand(n: int, rows: list[list[int]]) -> None:
    """None spans two texts: the lengths differ, so one that did would change the count."""
    assert distinct(rows, n).value == pytest.approx(by_hand(rows, n))
    assert repetitions(rows, n) == pytest.approx([1 - by_hand([row], n) for row in rows])


@pytest.mark.parametrize("n", ORDERS)
@given(SETS)
def test_the_error_of_distinct_is_the_jackknife(n: int, rows: list[list[int]]) -> None:
    without = np.array([by_hand(rows[:i] + rows[i + 1 :], n) for i in range(len(rows))])
    k = len(rows)
    expected = math.sqrt((k - 1) / k * np.square(without - without.mean()).sum())
    assert distinct(rows, n).stderr == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("measure", [lambda rows: distinct(rows, 1), lambda rows: distinct(rows, 2),
                                     lambda rows: repetition(rows, 1), entropy])  # fmt: skip
def test_errors_are_the_spread_over_sets(measure) -> None:
    """Fifty sets of sixty texts: the standard error that each states is how far they lie apart."""
    rng = np.random.default_rng(0)
    figures = [measure(zipf(rng, 60, 40)) for _ in range(50)]
    spread = np.std([figure.value for figure in figures], ddof=1)
    assert np.mean([figure.stderr for figure in figures]) == pytest.approx(spread, rel=0.3)


def test_a_known_set() -> None:
    assert distinct(ROWS, 1).value == 7 / 15
    assert distinct(ROWS, 2).value == 7 / 12
    assert distinct(ROWS, 4).value == 6 / 6
    assert repetition(ROWS, 1).value == pytest.approx((3 / 5 + 3 / 4 + 0) / 3)
    assert repetition(ROWS, 2).value == pytest.approx((2 / 4 + 2 / 3 + 0) / 3)


def test_words_are_tokens_too() -> None:
    words = [[f"word{token}" for token in row] for row in ROWS]
    for n in (1, 2, 3):
        assert distinct(words, n) == distinct(ROWS, n) and repetition(words, n) == repetition(ROWS, n)
    assert entropy(words).value == pytest.approx(entropy(ROWS).value)


def test_distinct_falls_as_the_set_grows() -> None:
    """Why amounts must be equal: the same source, four times as much of it."""
    texts = zipf(np.random.default_rng(1), 80, 40)
    few, many = distinct(texts[:20], 2), distinct(texts, 2)
    assert few.value - many.value > 5 * few.stderr
    doubled = distinct([*ROWS, *ROWS], 3)
    assert doubled.value == distinct(ROWS, 3).value / 2


@given(SETS, SETS)
def test_cut_alike_gives_equal_amounts_of_what_was_there(rows: list[list[int]], other: list[list[int]]) -> None:
    most = min(len(rows), len(other))
    rows, other = rows[:most], other[:most]
    one, two = cut_alike(rows, other)
    assert sorted(map(len, one)) == sorted(map(len, two))
    for cut, whole in ((one, rows), (two, other)):
        assert [list(row) for row in cut] == [row[: len(kept)] for row, kept in zip(whole, cut, strict=True)]
    assert sum(map(len, one)) == sum(min(a, b) for a, b in zip(sorted(map(len, rows)), sorted(map(len, other))))


def test_errors_teach() -> None:
    for measure in (entropy, lambda rows: distinct(rows, 1), lambda rows: repetition(rows, 1)):
        with pytest.raises(ValueError, match="no texts to measure"):
            measure([])
        with pytest.raises(ValueError, match="at least 2 texts, got 1"):
            measure([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"2 of 3 texts are shorter than 3 tokens \(text 1 has 2\)"):
        distinct([[1, 2, 3], [1, 2], []], 3)
    with pytest.raises(ValueError, match=r"1 of 2 texts are shorter than 1 tokens \(text 1 has 0\)"):
        entropy([[1], []])
    with pytest.raises(ValueError, match="text 1 is not tokenized"):
        distinct([["a", "text"], "a text"], 1)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        distinct(ROWS, 0)
    with pytest.raises(ValueError, match="3 texts and 2 to compare with"):
        cut_alike(ROWS, ROWS[:2])
