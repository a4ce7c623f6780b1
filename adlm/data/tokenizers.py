"""A small byte-level BPE: any text goes in, the same text comes out, and one id beyond its own stands for the mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

BYTES = 256


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. The mask is the last id: `vocab_size` counts it, no text is ever encoded to it."""

    bpe: tokenizers.Tokenizer

    @property
    def vocab_size(self) -> int:
        return self.bpe.get_vocab_size() + 1

    @property
    def mask_id(self) -> int:
        return self.vocab_size - 1

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; a mask among them has none, and is an error."""
        for position, token in enumerate(ids):
            if not 0 <= token < self.mask_id:
                what = "the mask" if token == self.mask_id else f"outside the vocabulary of {self.vocab_size}"
                raise ValueError(f"token {token} at position {position} is {what}: only text can be decoded")
        return self.bpe.decode(list(ids))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE learned from the texts; `vocab_size` counts the mask."""
    if vocab_size <= BYTES:
        raise ValueError(f"vocab_size must be above {BYTES} (every byte, and the mask), got {vocab_size}")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # sorted: the order that the ids of the bytes get
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    )
    return Tokenizer(bpe)
