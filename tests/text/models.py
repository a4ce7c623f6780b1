"""Small models with random weights, or rigged ones, as `adlm.load` would give them; and random text."""

import random
import re
from functools import cache
from typing import Any

import torch

import adlm
from adlm import LM, LanguageModel
from adlm.bundled import DEFAULT, find_bundled_model
from adlm.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from adlm.models.folder import LoadedModel
from adlm.models.methods import METHODS
from adlm.text.templates import parse_template
from tests.world import random_model

TOKENIZERS = ("gpt2", "bert-base-uncased", "bytes", "prose")
PROSE = "the cat sat on the mat and the dog sat on the log while it rained all day and all night "
ATOMS = [
    "the cat", "A", "word", "don't", "3.14", "naïve", "e\u0301", "n\u0303o\u0308", "😀", "👩‍👩‍👧‍👦", "🇫🇷", "漢字",
    "こんにちは", "שלום", "مرحبا", "Ελληνικά", "ﬁ", "\u200b", "\u200d", "\ufeff", "\u202e", "\u00ad", "\u00a0",
    "\u2028", "\x00", "\x07", "\x1b[31m", "\x7f", "\t", "\n", "\r\n", " ", "  ", "     ", "\n\n  ", "_", "__", "___",
    "____{3}", "{2}", "<|endoftext|>", "[MASK]", "[CLS]", "[SEP]", "[PAD]", "[UNK]", "##ing", "Ġ", "▁", "░", "\ufffd",
    "<script>", "한국어", "\\n", "'s", " ,", ".", "?!", "𝔘𝔫𝔦", "\U0010ffff", "ʼn", "İ", "ß",
]  # fmt: skip


@cache
def tokenizer(name: str) -> Tokenizer:
    """By name; `prose` is the bundled model's own, `bare` has no token that begins or ends a text."""
    if name == "prose":
        return Tokenizer.load(find_bundled_model(DEFAULT))
    if name == "bare":
        return train_bpe([PROSE], 270, name="bare")
    return load_tokenizer(name)


def wrap(
    model: LanguageModel,
    words: str | Tokenizer = "bytes",
    method: str = "adlm",
    rows: str = "wrapped",
) -> LM:
    """A model as `adlm.load` returns it."""
    known = tokenizer(words) if isinstance(words, str) else words
    return LM(LoadedModel(model, known, method, 0, rows), f"small {method}", device="cpu")


def rigged(
    method: str, bias: dict[int, float], words: str = "bytes", rows: str = "wrapped", **changes: Any
) -> LM:
    """A model with random weights whose head adds to the logits of some tokens at every position."""
    known = tokenizer(words)
    size = {
        "vocab_size": known.vocab_size,
        "mask_id": known.mask_id,
        "dim": 16,
        "length": 64,
        "scale": 0.6,
    }
    model = random_model(method, **(size | changes))
    with torch.no_grad():
        for token, value in bias.items():
            model.head.bias[token] += value
    return wrap(model, known, method, rows)


@cache
def lm(method: str = "adlm", words: str = "bytes", rows: str = "wrapped", **changes: Any) -> LM:
    """A model with random weights; a causal one has no mask token unless `mask_id` gives it one."""
    known = tokenizer(words)
    if METHODS[method].is_causal and known.mask_id == known.vocab_size - 1:
        changes = {"vocab_size": known.vocab_size - 1, "mask_id": None} | changes
    return rigged(method, {}, words, rows, **changes)


def any_text(rng: random.Random, most: int = 4) -> str:
    """Some atoms of every kind in a row, now and then a random character."""
    atoms = [rng.choice(ATOMS) for _ in range(rng.randint(1, most))]
    if rng.random() < 0.3:
        atoms.append(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])))
    return "".join(atoms)


def any_template(rng: random.Random, most_tokens: int = 3) -> list[str | adlm.Hole]:
    """Text and holes of given length in any order, at least one of them; two holes may touch."""
    pieces: list[str | adlm.Hole] = []
    for _ in range(rng.randint(1, 4)):
        pieces.append(any_text(rng) + rng.choice(["", "", " "]))
        if rng.random() < 0.7:
            pieces.append(adlm.Hole.of_length(rng.randint(1, most_tokens)))
    pieces.insert(rng.randint(0, len(pieces)), adlm.Hole.of_length(rng.randint(1, most_tokens)))
    return pieces[rng.randint(0, 1) :] if isinstance(pieces[0], str) else pieces


def given_in(template: list[str | adlm.Hole]) -> list[str]:
    """The given pieces, neighbors joined."""
    return [piece for piece in parse_template(template) if isinstance(piece, str)]


def holds_in_order(text: str, pieces: list[str]) -> bool:
    """Whether the pieces stand in the text one after the other."""
    return re.search(".*?".join(map(re.escape, pieces)), text, re.DOTALL) is not None
