"""Scores of texts: nats per token, an upper bound with its standard error for a masked model, else exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adlm.likelihood import estimate_token_nats
from adlm.methods import METHODS
from adlm.models.language_model import LanguageModel
from adlm.text.templates import Layout


@dataclass(frozen=True)
class Score:
    """Nats per token of a text, its standard error over the noise, and bits per byte. A bound unless `is_exact`."""

    nll: float
    stderr: float
    tokens: int
    bits_per_byte: float
    is_exact: bool

    @property
    def ppl(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf


def score_rows(
    model: LanguageModel,
    layouts: Sequence[Layout],
    sizes: Sequence[tuple[int, int]],
    *,
    method: str,
    draws: int,
    seed: int,
    batch: int,
) -> list[Score]:
    """Score rows of text by `draws` noises each; `sizes` are their scored tokens and bytes, BOS and EOS are given.

    The draws are counted as if they were independent, so the standard error is on the safe side.
    """
    is_causal = model.config.is_causal
    if draws < 2 and not is_causal:
        raise ValueError(f"draws must be at least 2, or there is no standard error; got {draws}: 64 is usual")
    is_scored = [[any(span.start <= i < span.end for span in row.spans) for i in range(len(row))] for row in layouts]
    rows, score_entropy = [row.ids for row in layouts], METHODS[method].score_entropy
    nats = estimate_token_nats(model, rows, is_scored, draws=draws, seed=seed, batch=batch, score_entropy=score_entropy)
    scores = []
    for (tokens, size), values in zip(sizes, nats, strict=True):
        error = 0.0 if is_causal else float(values.std() / math.sqrt(draws))
        mean = float(values.mean())
        scores.append(Score(mean / tokens, error / tokens, tokens, mean / math.log(2) / size, is_exact=is_causal))
    return scores
