"""Self-BLEU is nltk's and sacrebleu's with all other texts as references."""

import importlib.util
import os
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adlm.evaluate.bleu import self_bleu, self_bleus

SETS = st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=14), min_size=2, max_size=6)


def needs(module: str) -> None:
    if importlib.util.find_spec(module) is None and os.environ.get("ADLM_ALL") != "1":
        pytest.skip(f"needs {module}: pip install 'adlm[eval]'")


def zipf(rng: np.random.Generator, texts: int, length: int, words: int = 500) -> list[np.ndarray]:
    share = 1 / np.arange(1, words + 1)
    return list(rng.choice(words, size=(texts, length), p=share / share.sum()))


@settings(deadline=None)  # the first import takes long
@given(SETS)
@example([[0, 0, 0, 0], [1, 1, 1, 1]])  # not a token in common
@example([[0, 1, 2, 3], [3, 3, 0, 0, 1, 1], [2, 2, 2, 2]])
def test_it_is_nltks(rows: list[list[int]]) -> None:
    needs("nltk")
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    smooth = SmoothingFunction().method1
    expected = [
        sentence_bleu(rows[:number] + rows[number + 1 :], row, smoothing_function=smooth)
        for number, row in enumerate(rows)
    ]
    assert self_bleus(rows) == pytest.approx(expected, abs=1e-12)


def test_it_is_sacrebleus() -> None:
    needs("sacrebleu")
    import sacrebleu

    lines = ["a b c d e", "a b c x y z", "q a b c d", "l m n a"]  # where no word is shared sacrebleu gives nothing
    rows = [line.split() for line in lines]
    expected = [
        sacrebleu.sentence_bleu(
            line, lines[:k] + lines[k + 1 :], smooth_method="floor", smooth_value=0.1, tokenize="none"
        ).score / 100
        for k, line in enumerate(lines)
    ]  # fmt: skip
    assert self_bleus(rows) == pytest.approx(expected, abs=1e-9)


def test_the_same_text_again_is_one_and_nothing_in_common_is_nearly_none() -> None:
    assert self_bleus([[1, 2, 3, 4, 5]] * 3) == pytest.approx(1)
    rows = [list(range(k, k + 20)) for k in (0, 100, 200)]
    assert (self_bleus(rows) == 0).all()
    assert (self_bleus([[*row, 7] for row in rows]) < 0.03).all()  # a token in common


def test_the_error_is_the_spread_over_sets() -> None:
    rng = np.random.default_rng(0)
    figures = [self_bleu(zipf(rng, 60, 40)) for _ in range(40)]
    spread = np.std([figure.value for figure in figures], ddof=1)
    assert np.mean([figure.stderr for figure in figures]) == pytest.approx(spread, rel=0.3)
    assert figures[0].texts == 60 and figures[0].tokens == 2400


def test_it_rises_with_the_number_of_texts() -> None:
    """Why amounts must be equal."""
    texts = zipf(np.random.default_rng(1), 200, 40)
    assert self_bleu(texts).value > self_bleu(texts[:40]).value + 5 * self_bleu(texts).stderr


def test_a_thousand_texts_take_seconds() -> None:
    """With the error, for which parts of them are compared again and again: 5,000 texts must not take an hour."""
    texts = zipf(np.random.default_rng(2), 1000, 128, words=5000)
    began = time.process_time()
    self_bleu(texts)
    assert time.process_time() - began < 6


def test_errors_teach() -> None:
    with pytest.raises(ValueError, match="got 1: give at least 2"):
        self_bleu([[1, 2, 3, 4]])
    with pytest.raises(ValueError, match=r"1 of 2 texts are shorter than 4 tokens \(text 1 has 3\)"):
        self_bleu([[1, 2, 3, 4], [1, 2, 3]])
    with pytest.raises(ValueError, match="text 0 is not tokenized"):
        self_bleu(["a text", [1, 2, 3, 4]])
