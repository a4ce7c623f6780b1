"""Metrics of a set of texts: Gen-PPL, MAUVE, entropy, distinct n-grams and repetition, with standard errors over texts.

No metric is meaningful alone: repetition has a low Gen-PPL, random text a high entropy. All of them depend on the
length of the texts, distinct-n and MAUVE also on their number. So `compare_texts` measures samples and as much real
text: one half of the reference is the MAUVE reference, the other the real-text baseline, all texts truncated to the
same lengths. All then lose their last eighth, because a model that ends its texts writes a full stop, which a truncated
passage does not have: MAUVE would tell ends from middles.

Gen-PPL counts every token as MDLM's code does, also those after an end-of-text token, but of the end-of-text tokens of
a text only the first; with `until_eos`, tokens up to the first of them. A BOS added by the scoring model does not
count; without a BOS the first token is not scored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adlm.data.tokenizers import Tokenizer
from adlm.evaluate.cache import Cache
from adlm.evaluate.mauve import SEEDS, MauveScore, describe_mauve, measure_mauve
from adlm.evaluate.results import Estimate, ProgressCallback, ignore_progress
from adlm.evaluate.scorer import ScoringModel, TokenizedText
from adlm.evaluate.scoring import BATCH, ScoringRequest, score_texts, split_windows
from adlm.evaluate.stats import estimate_ratio
from adlm.training.distributed import DistributedContext

Tokens = Sequence[int] | Sequence[str] | NDArray[Any]  # of one text
DISTINCT, REPETITION = (1, 2, 3), 4  # orders of n-grams
MIN_TOKENS = max(REPETITION, *DISTINCT)  # of a text
DROPPED_END = 8  # one part in so many


@dataclass(frozen=True)
class GenPpl:
    """Generative perplexity of a set of texts under a scoring model, as nats per token and bits per character."""

    nll: Estimate
    bits_per_character: Estimate  # comparable between scoring models with different vocabularies
    tokens: int  # that are counted
    characters: int  # of these tokens

    @property
    def estimate(self) -> Estimate:
        """The perplexity; its standard error is first-order."""
        value = math.exp(self.nll.value)
        return Estimate(value, value * (self.nll.stderr or 0.0))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        parts = {"nll": self.nll, "bits_per_character": self.bits_per_character}
        values = {name: each.value for name, each in parts.items()}
        errors = {f"{name}_stderr": each.stderr for name, each in parts.items()}
        return {**self.estimate.as_dict(), **values, **errors, "tokens": self.tokens, "characters": self.characters}


@dataclass(frozen=True)
class SampleMetrics:
    """Metrics of a set of texts."""

    texts: int  # that were measured
    tokens: int  # in all of them
    entropy: Estimate  # nats, unigram, of a text's own tokens
    distinct: dict[int, Estimate]  # different n-grams as a share of all, by n
    repetition: Estimate  # share of a text's 4-grams that occurred in it before
    gen_ppl: GenPpl | None = None
    mauve: MauveScore | None = None
    short: int = 0  # texts left out: fewer than four tokens

    @property
    def estimates(self) -> dict[str, Estimate]:
        """The metrics that need no scoring model, by name."""
        distinct = {f"distinct_{n}": each for n, each in self.distinct.items()}
        return {"entropy": self.entropy, **distinct, f"repetition_{REPETITION}": self.repetition}

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, an object for every metric."""
        values = {"gen_ppl": self.gen_ppl, "mauve": self.mauve, **self.estimates}
        parts = {name: each.as_dict() for name, each in values.items() if each is not None}
        return parts | {"texts": self.texts, "tokens": self.tokens}

    def as_row(self) -> dict[str, Any]:
        """The flat form, `NAME` and `NAME_se` for every metric; `tokens` is the mean of a text."""
        gen_ppl = self.gen_ppl.estimate if self.gen_ppl else None
        row: dict[str, Any] = {}
        for name, each in {"gen_ppl": gen_ppl, **self.estimates}.items():
            row |= {name: each.value if each else None, f"{name}_se": each.stderr if each else None}
        return row | {"texts": self.texts, "short": self.short, "tokens": self.tokens / self.texts}


@dataclass(frozen=True)
class TextScorer:
    """Measures texts: entropy and n-grams in the tokens of one tokenizer, and Gen-PPL if there is a scoring model."""

    tokenizer: Tokenizer
    scorer: ScoringModel | None = None
    window: int | None = None  # for texts longer than the scoring model's context
    batch: int = 16

    def __post_init__(self) -> None:
        if self.scorer is not None:
            self.scorer.require_causal()
            split_windows([], self.scorer.max_tokens, self.window)
        elif self.window is not None:
            raise ValueError(f"window={self.window} needs a scoring model: give scorer (--judge)")

    @property
    def settings(self) -> dict[str, Any]:
        """What the metrics depend on."""
        scorer = None
        if self.scorer is not None:
            counts = {"counts": "every token, of end-of-text tokens the first"}
            window = {} if self.window is None else {"window": self.window, "stride": self.window // 2}
            scorer = self.scorer.settings | {"identity": self.scorer.identity, **counts, **window}
        return {"tokenizer": self.tokenizer.name, "tokenizer_sha256": self.tokenizer.sha256, "judge": scorer}

    def measure_gen_ppl(self, texts: Sequence[str]) -> GenPpl | None:
        """Gen-PPL of texts, or None without a scoring model."""
        if self.scorer is None:
            return None
        request = ScoringRequest(self.scorer, self.scorer.encode(texts), window=self.window)
        (scores,) = score_texts([request], batch=self.batch)
        return compute_gen_ppl(self.scorer, request.texts, scores.nats)

    def __call__(self, texts: Sequence[str]) -> SampleMetrics:
        rows = [self.tokenizer.encode(text) for text in texts]
        long = [number for number, row in enumerate(rows) if len(row) >= REPETITION]
        if len(long) < 2:
            raise ValueError(
                f"{len(texts) - len(long)} of {len(texts)} texts have fewer than {REPETITION} tokens and at least 2 "
                "texts are needed: generate longer texts, or more of them"
            )
        gen_ppl = self.measure_gen_ppl([texts[number] for number in long])
        return measure_tokens([rows[number] for number in long], (2,), gen_ppl=gen_ppl, short=len(texts) - len(long))


def measure_tokens(rows: Sequence[Tokens], orders: Sequence[int] = DISTINCT, **others: Any) -> SampleMetrics:
    """The metrics of tokens, together with others."""
    entropy, repetition = estimate_mean(compute_entropies(rows)), estimate_mean(compute_repetitions(rows, REPETITION))
    distinct = {n: measure_distinct(rows, n) for n in orders}
    return SampleMetrics(len(rows), sum(len(row) for row in rows), entropy, distinct, repetition, **others)


# Entropy and n-grams.


def compute_entropies(rows: Sequence[Tokens]) -> NDArray[np.float64]:
    """Each text's unigram entropy in nats over its own tokens, as in MDLM's code; at most ln L for L tokens."""
    ngrams = count_ngrams(rows, 1)
    share = ngrams.counts / ngrams.sizes[ngrams.text]
    return np.bincount(ngrams.text, weights=-share * np.log(share), minlength=len(rows)).astype(np.float64)


def compute_repetitions(rows: Sequence[Tokens], n: int) -> NDArray[np.float64]:
    """Each text's share of n-grams that occurred in it before."""
    ngrams = count_ngrams(rows, n)
    return 1 - np.bincount(ngrams.text, minlength=len(rows)) / ngrams.sizes


def measure_distinct(rows: Sequence[Tokens], n: int) -> Estimate:
    """Distinct-n: the number of different n-grams of the set as a share of all its n-grams; none spans two texts.

    It falls as the set grows. The standard error is the jackknife's over texts; a bootstrap would draw texts twice and
    be biased downwards.
    """
    ngrams = count_ngrams(rows, n)
    require_two(len(rows))
    is_in_one_text = np.bincount(ngrams.ngram, minlength=ngrams.distinct)[ngrams.ngram] == 1
    lost = np.bincount(ngrams.text[is_in_one_text], minlength=len(rows))  # without each text
    without = (ngrams.distinct - lost) / (ngrams.sizes.sum() - ngrams.sizes)
    return Estimate(float(ngrams.distinct / ngrams.sizes.sum()), math.sqrt((len(rows) - 1) * without.var()))


class NgramCounts(NamedTuple):
    """Which n-gram occurs in which text and how often there."""

    ngram: NDArray[np.int64]
    text: NDArray[np.int64]
    counts: NDArray[np.int64]
    distinct: int  # different n-grams in all texts
    sizes: NDArray[np.int64]  # n-grams of each text


def count_ngrams(rows: Sequence[Tokens], n: int) -> NgramCounts:
    """Count the n-grams of texts."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if len(rows) == 0:
        raise ValueError("there are no texts to measure: give at least two")
    if texts := [number for number, row in enumerate(rows) if isinstance(row, str | bytes)]:
        raise ValueError(f"text {texts[0]} is not tokenized: give its tokens, tokenizer.encode(text) or text.split()")
    if short := [number for number, row in enumerate(rows) if len(row) < n]:
        raise ValueError(
            f"{len(short)} of {len(rows)} texts are shorter than {n} tokens (text {short[0]} has "
            f"{len(rows[short[0]])}): leave them out, or use a smaller n"
        )
    lengths = np.array([len(row) for row in rows])
    text = np.repeat(np.arange(len(rows)), lengths)
    _, tokens = np.unique(np.concatenate([np.asarray(row) for row in rows]), return_inverse=True)
    ngram, vocabulary = tokens, int(tokens.max()) + 1
    for k in range(1, n):  # renumbered at every length, so that the codes stay small
        _, ngram = np.unique(ngram[:-1] * vocabulary + tokens[k:], return_inverse=True)
    is_inside = text[: len(ngram)] == text[n - 1 :]
    pairs, counts = np.unique(ngram[is_inside] * len(rows) + text[: len(ngram)][is_inside], return_counts=True)
    _, number = np.unique(pairs // len(rows), return_inverse=True)
    return NgramCounts(number, pairs % len(rows), counts, int(number.max()) + 1, lengths - n + 1)


def require_two(texts: int) -> None:
    """Refuse fewer than two texts."""
    if texts < 2:
        raise ValueError(f"a standard error needs at least 2 texts, got {texts}")


def estimate_mean(values: NDArray[np.float64]) -> Estimate:
    """The mean over texts."""
    require_two(len(values))
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))


# Gen-PPL.


def is_counted(ids: Sequence[int] | NDArray[Any], eos_id: int | None, *, until_eos: bool = False) -> NDArray[np.bool_]:
    """Which tokens of a text count in Gen-PPL."""
    row = np.asarray(ids)
    is_eos = row == eos_id if eos_id is not None else np.zeros(len(row), dtype=bool)
    before = is_eos.cumsum() - is_eos  # end-of-text tokens before each token
    return before == 0 if until_eos else ~(is_eos & (before > 0))


def compute_gen_ppl(
    scorer: ScoringModel, texts: Sequence[TokenizedText], nats: Sequence[NDArray[Any]], *, until_eos: bool = False
) -> GenPpl:
    """Gen-PPL of texts from the nats of their tokens; standard errors are those of ratios over texts."""
    require_two(len(texts))
    sums = np.zeros((3, len(texts)))  # nats, tokens and characters of each text
    for number, (text, own) in enumerate(zip(texts, nats, strict=True)):
        is_in = is_counted(text.ids, scorer.tokenizer.eos_token_id, until_eos=until_eos)
        is_in[: 1 - len(scorer.special_ids[0])] = False  # a first token without a BOS before it
        sums[:, number] = own[is_in].sum(), is_in.sum(), np.diff(text.ends, prepend=0)[is_in].sum()
    if not np.isfinite(sums).all():
        wrong = int(np.flatnonzero(~np.isfinite(sums).all(0))[0])
        raise FloatingPointError(f"nats of text {wrong} by {scorer.name} are not finite")
    if not sums[1].sum():
        raise ValueError("no token is scored: texts have one token and the scoring model no BOS; give longer texts")
    nll = Estimate(*estimate_ratio(sums[0], sums[1]))
    bits = Estimate(*estimate_ratio(sums[0] / math.log(2), sums[2]))
    return GenPpl(nll, bits, int(sums[1].sum()), int(sums[2].sum()))


# Samples and real text.


def compare_texts(
    samples: Sequence[str],
    reference: Sequence[str],
    scorer: ScoringModel,
    features: ScoringModel | None = None,
    *,
    until_eos: bool = False,
    window: int | None = None,
    seeds: Sequence[int] = SEEDS,
    buckets: int | None = None,
    batch: int = BATCH,
    cache: Cache | None = None,
    context: DistributedContext | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[SampleMetrics, SampleMetrics, dict[str, Any]]:
    """Measure samples and real text: the metrics of both and their settings.

    `reference` has twice as many texts as there are samples (see `cut_passages`).
    `scorer` gives Gen-PPL and the tokens of all metrics, `features` (by default the scorer) what MAUVE compares.
    """
    scorer.require_causal()
    features, n = features or scorer, len(samples)
    if n < 2:
        raise ValueError(f"metrics of a set need at least 2 texts, got {n}: generate a hundred or more (n)")
    if len(reference) < 2 * n:
        raise ValueError(f"{n} samples need {2 * n} reference texts, got {len(reference)}: give more, or fewer samples")
    whole = [scorer.encode(texts) for texts in (samples, reference[:n], reference[n : 2 * n])]
    sets = [[drop_end(text) for text in texts] for texts in truncate_together(whole)]
    names = ("samples", "reference texts", "reference texts", *["texts, truncated to the lengths of the others,"] * 3)
    for texts, name in zip((*whole, *sets), names, strict=True):
        require_long(texts, name)
    requests = [build_requests(scorer, features, texts, number != 1, window) for number, texts in enumerate(sets)]
    flat = [request for each in requests for request in each]
    scores = iter(score_texts(flat, cache=cache, context=context, batch=batch, on_progress=on_progress))
    scored = [[next(scores) for _ in each] for each in requests]  # first has the nats, last the features; may be one
    vectors: list[Any] = [each[-1].features for each in scored]
    metrics = [
        measure_tokens(
            [text.ids for text in sets[number]],
            gen_ppl=compute_gen_ppl(scorer, sets[number], scored[number][0].nats, until_eos=until_eos),
            mauve=measure_mauve(vectors[1], vectors[number], seeds=seeds, buckets=buckets),
        )
        for number in (0, 2)
    ]
    kind = "last layer at the last token" if features.is_causal else "mean of the last layer over tokens"
    cut = f"all sets truncated to the same lengths, the longest with the longest, and by their last 1/{DROPPED_END}"
    settings: dict[str, Any] = {"judge": scorer.settings, "features": features.settings, "features_are": kind}
    settings |= {"tokens_of": f"the tokenizer of {scorer.name}, for every metric but MAUVE", "until_eos": until_eos}
    settings |= {"first_token_is_scored": bool(scorer.special_ids[0]), "mauve": describe_mauve(seeds, buckets)}
    settings |= {"window": window, "stride": None if window is None else window // 2}
    settings |= {"texts": n, "tokens": metrics[0].tokens, "cut": cut}
    settings |= {"share_of_samples_cut": 1 - metrics[0].tokens / sum(map(len, whole[0]))}
    return metrics[0], metrics[1], settings


def build_requests(
    scorer: ScoringModel, features: ScoringModel, texts: Sequence[TokenizedText], with_nats: bool, window: int | None
) -> list[ScoringRequest]:
    """Requests for nats of the scorer and features of the other model: one if they are the same."""
    if features is scorer:
        return [ScoringRequest(scorer, texts, with_nats, True, window)]
    encoded = features.encode([text.text for text in texts])
    size = window if window is None else min(window, features.max_tokens)  # an encoder's context may be shorter
    nats = [ScoringRequest(scorer, texts, True, False, window)] if with_nats else []
    return [*nats, ScoringRequest(features, encoded, False, True, size)]


def require_long(texts: Sequence[TokenizedText], name: str) -> None:
    """Refuse texts that are too short for n-grams."""
    remedy = "leave such texts out, or generate longer ones"
    if empty := [number for number, text in enumerate(texts) if not text.text.strip()]:
        raise ValueError(f"{len(empty)} of {len(texts)} {name} are empty (number {empty[0]} first): {remedy}")
    if short := [number for number, text in enumerate(texts) if len(text) < MIN_TOKENS]:
        raise ValueError(
            f"{len(short)} of {len(texts)} {name} have fewer than {MIN_TOKENS} tokens (number {short[0]} has "
            f"{len(texts[short[0]])}): {remedy}"
        )


def truncate_alike(rows: Sequence[Tokens], reference: Sequence[Tokens]) -> tuple[list[Tokens], list[Tokens]]:
    """Truncate two sets to the same lengths: the longest text of one with the longest of the other, and so on."""
    if len(rows) != len(reference):
        raise ValueError(f"{len(rows)} texts and {len(reference)} to compare with: give equally many of both")
    cut: tuple[list[Tokens], list[Tokens]] = list(rows), list(reference)
    for one, other in zip(*(np.argsort([len(row) for row in each], kind="stable") for each in cut), strict=True):
        length = min(len(rows[one]), len(reference[other]))
        cut[0][one], cut[1][other] = rows[one][:length], reference[other][:length]
    return cut


def truncate_together(sets: Sequence[Sequence[TokenizedText]]) -> list[list[TokenizedText]]:
    """Truncate several sets of equally many texts to the same lengths."""
    rows: list[Any] = [[text.ids for text in texts] for texts in sets]
    # The first set becomes the shortest, then the others are truncated to it.
    for other in (*range(1, len(rows)), *range(1, len(rows) - 1)):
        rows[0], rows[other] = truncate_alike(rows[0], rows[other])
    return [[text.truncate(len(row)) for text, row in zip(texts, each, strict=True)] for texts, each in zip(sets, rows)]


def drop_end(text: TokenizedText) -> TokenizedText:
    """A text without its last eighth, so that no text ends where its writer ended it."""
    return text.truncate(len(text) - len(text) // DROPPED_END)
