"""Generative perplexity: how likely a judge finds texts, per token over all of them, as the lineage reports it.

Which tokens count. `until_eos=False` is the lineage's way: every token counts, those behind an end-of-text token too,
but of the end-of-text tokens of a text the first only. `until_eos=True` counts up to and with the first of them.
A BOS that the judge puts before a text is no part of it. Where it has none, the first token is not scored.

Perplexities of judges with different vocabularies do not compare; bits per character do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.evaluate.judges import Judge, Piece
from adlm.evaluate.tallies import ratio
from adlm.evaluate.verdicts import BATCH, Told, judged

Nats = Sequence[NDArray[np.float64]]
Counted = Sequence[NDArray[np.bool_]]


@dataclass(frozen=True)
class GenPpl:
    """Gen-PPL of a set of texts: nats per token of the judge's, with standard errors over texts."""

    nll: float
    nll_stderr: float
    bits_per_character: float
    bits_per_character_stderr: float
    texts: int
    tokens: int  # that were scored
    characters: int  # of which they are

    @property
    def value(self) -> float:
        return math.exp(self.nll)

    @property
    def stderr(self) -> float:
        """Of the perplexity, to first order."""
        return self.value * self.nll_stderr

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"value": self.value, "stderr": self.stderr, **vars(self)}


def counted(ids: Sequence[int] | NDArray[Any], eos_id: int | None, *, until_eos: bool = False) -> NDArray[np.bool_]:
    """Which tokens of a text count."""
    row = np.asarray(ids)
    is_eos = row == eos_id if eos_id is not None else np.zeros(len(row), dtype=bool)
    before = is_eos.cumsum() - is_eos  # ends that stand before each token
    return before == 0 if until_eos else ~(is_eos & (before > 0))


def aggregated(nats: Nats, is_counted: Counted, characters: Sequence[int]) -> GenPpl:
    """From the nats of tokens and which of them count; standard errors of ratios, as texts differ in length."""
    if len(nats) < 2:
        raise ValueError(f"a standard error needs at least 2 texts, got {len(nats)}: give more")
    kept = [each[is_in] for each, is_in in zip(nats, is_counted, strict=True)]
    if wrong := [number for number, each in enumerate(kept) if not np.isfinite(each).all()]:
        raise FloatingPointError(f"{len(wrong)} texts have nats that are not finite, text {wrong[0]} among them")
    sums, tokens = (np.array([f(each) for each in kept], dtype=float) for f in (np.sum, len))
    if not tokens.sum():
        raise ValueError("no token is scored: the texts have one token each, and the judge no BOS; give longer texts")
    sizes = np.asarray(characters, dtype=float)
    nll, nll_error = ratio(sums, tokens)
    bits, bits_error = ratio(sums / math.log(2), sizes)
    return GenPpl(nll, nll_error, bits, bits_error, len(nats), int(tokens.sum()), int(sizes.sum()))


def gen_ppl_of(judge: Judge, pieces: Sequence[Piece], nats: Nats, *, until_eos: bool = False) -> GenPpl:
    """Gen-PPL of texts whose tokens were judged."""
    first = 1 - len(judge.ends[0])  # 1 where the first token is not scored
    eos_id = judge.tokenizer.eos_token_id
    is_counted, characters = [], []
    for piece in pieces:
        is_in = counted(piece.ids, eos_id, until_eos=until_eos)
        is_in[:first] = False
        is_counted.append(is_in)
        starts = np.array([0, *piece.ends[:-1]])
        characters.append(int((np.array(piece.ends) - starts)[is_in].sum()))
    return aggregated(nats, is_counted, characters)


def generative_perplexity(
    judge: Judge,
    texts: Sequence[str],
    *,
    until_eos: bool = False,
    window: int | None = None,
    batch: int = BATCH,
    on_texts: Told | None = None,
) -> GenPpl:
    """Gen-PPL of texts by a judge. Never report it alone: repeated text has a low one (see `quality`)."""
    if len(texts) < 2:
        raise ValueError(f"a standard error needs at least 2 texts, got {len(texts)}: give more")
    pieces = judge.encode(texts)
    verdict = judged(judge, pieces, window=window, batch=batch, on_texts=on_texts)
    return gen_ppl_of(judge, pieces, verdict.nats, until_eos=until_eos)
