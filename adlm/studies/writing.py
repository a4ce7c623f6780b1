"""What written texts are worth: Gen-PPL by a judge, never without entropy, and how much they repeat themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm.data.tokenizers import Tokenizer
from adlm.evaluate.diversity import distinct, entropy, repetition
from adlm.evaluate.generative import generative_perplexity
from adlm.evaluate.judges import load_judge
from adlm.evaluate.reading import read
from adlm.evaluate.verdicts import windows
from adlm.methods import SAMPLERS, named

DISTINCT, REPETITION = 2, 4  # the n of their n-grams
GenPpl = Callable[[Sequence[str]], tuple[float, float]]  # texts -> Gen-PPL and its standard error


def takes_steps(sampler: str) -> bool:
    """Whether a sampler of that name has a number of steps."""
    return "steps" in inspect.signature(named(SAMPLERS, sampler, "sampler")).parameters


@dataclass(frozen=True)
class TextFigures:
    """Figures of a set of texts, each with its standard error over texts."""

    gen_ppl: float | None  # None: no judge was asked
    gen_ppl_se: float | None
    entropy: float  # nats, unigram, of a text's own tokens
    entropy_se: float
    distinct_2: float  # different pairs of neighbours as a share of all
    distinct_2_se: float
    repetition_4: float  # share of a text's 4-grams that it has said before
    repetition_4_se: float
    texts: int  # that were measured
    short: int  # left out: fewer than four tokens
    tokens: float  # in a text, on average: entropy and repetition grow with it

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Assessor:
    """Texts -> TextFigures, tokens counted by one tokenizer whoever wrote them."""

    tokenizer: Tokenizer
    judge: GenPpl | None = None
    said: dict[str, Any] = field(default_factory=dict)  # of the judge, for the record

    @property
    def settings(self) -> dict[str, Any]:
        """What a figure depends on."""
        return {
            "tokenizer": self.tokenizer.name,
            "tokenizer_sha256": self.tokenizer.sha256,
            "judge": self.said or None,
        }

    def __call__(self, texts: Sequence[str]) -> TextFigures:
        rows = [self.tokenizer.encode(text) for text in texts]
        kept = [number for number, row in enumerate(rows) if len(row) >= REPETITION]
        if len(kept) < 2:
            raise ValueError(
                f"{len(texts) - len(kept)} of {len(texts)} texts have fewer than {REPETITION} tokens: there is nothing "
                "to measure; write longer texts, or more of them"
            )
        rows, left = [rows[number] for number in kept], [texts[number] for number in kept]
        value, error = self.judge(left) if self.judge else (None, None)
        spread, pairs, again = entropy(rows), distinct(rows, DISTINCT), repetition(rows, REPETITION)
        return TextFigures(
            gen_ppl=value,
            gen_ppl_se=error,
            entropy=spread.value,
            entropy_se=spread.stderr,
            distinct_2=pairs.value,
            distinct_2_se=pairs.stderr,
            repetition_4=again.value,
            repetition_4_se=again.stderr,
            texts=len(kept),
            short=len(texts) - len(kept),
            tokens=float(np.mean([len(row) for row in rows])),
        )


def load_assessor(
    tokenizer: Tokenizer,
    judge: str | Path | None = None,
    *,
    device: torch.device | str = "cpu",
    window: int | None = None,
    batch: int = 16,
) -> Assessor:
    """An assessor with a judge by name (see `load_judge`), or without one: entropy and repetition alone.

    The judge reads `batch` texts at a time, and with `window` long ones in windows of so many tokens (see `judged`).
    """
    if judge is None:
        if window is not None:
            raise ValueError(f"--window {window} says how a judge reads long texts, and there is none: give --judge")
        return Assessor(tokenizer)
    reader = load_judge(judge, device=device)
    reader.require_causal()
    windows([], reader.context - sum(map(len, reader.ends)), window)  # one that cannot be is told before any writing

    def ask(texts: Sequence[str]) -> tuple[float, float]:
        found = generative_perplexity(reader, texts, window=window, batch=batch)
        return found.value, found.stderr

    said = reader.settings | {"identity": reader.identity, "counts": "every token, of end-of-text tokens the first"}
    # Without a window nothing is said of one: what a folder keeps is known by these words.
    return Assessor(tokenizer, ask, said if window is None else said | {"window": window, "stride": window // 2})


def held_out_texts(source: str | Path, tokenizer: Tokenizer, length: int, n: int) -> tuple[list[str], dict[str, Any]]:
    """`n` stretches of `length` tokens from all over a held-out text, and what they are: as much as a sample has."""
    reading = read(source, tokenizer, length + 2, rows="wrapped")
    if len(reading.rows) < n:
        raise ValueError(
            f"{source} has {len(reading.rows)} stretches of {length} tokens, and {n} are to be compared with as many "
            "texts: give more text, or a smaller --n or --length"
        )
    places = np.linspace(0, len(reading.rows) - 1, n).round().astype(np.int64)
    tokens, _ = reading.rows.fetch(torch.from_numpy(places))
    texts = [tokenizer.decode(row, skip_special=True) for row in tokens.tolist()]
    return texts, {"source": str(source), "rows_hash": reading.rows_hash, "stretches": n, "tokens": length}
