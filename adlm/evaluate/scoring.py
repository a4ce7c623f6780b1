"""Scores of texts by a scoring model: the nats of every token and the features of every text, in one pass.

Texts are sorted by length, padded at the end and scored in batches; this changes scores by rounding only. A text longer
than the model's context is an error, or with `window` is scored in windows of that many tokens that overlap by half:
every token is scored once, in the first window that reaches it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adlm.evaluate.cache import Cache, hash_settings
from adlm.evaluate.results import ProgressCallback, ignore_progress
from adlm.evaluate.scorer import ScoringModel, TokenizedText
from adlm.training.distributed import DistributedContext

FORMAT = 1  # of a cached score: raise it where the arithmetic changes
BATCH = 32  # rows in a forward pass
MAX_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}  # padding included: bounds the memory of the logits


class TokenWindow(NamedTuple):
    """A range of a text's tokens; those from `first_scored` on are scored in it."""

    text: int
    start: int
    end: int
    first_scored: int


@dataclass(frozen=True)
class TextScores:
    """Scores of texts, in their order."""

    nats: list[NDArray[np.float64]]  # of each token; nan at a first token without a BOS before it
    features: NDArray[np.float32] | None  # (texts, width)


@dataclass(frozen=True)
class ScoringRequest:
    """Texts, the model that scores them, and what is computed.

    Features of a causal LM are the last layer's state at the last token (as MAUVE takes them of GPT-2), of an encoder
    the mean of the last layer over all tokens (as sentence encoders are trained).
    """

    scorer: ScoringModel
    texts: Sequence[TokenizedText]
    with_nats: bool = True
    with_features: bool = False
    window: int | None = None

    def windows(self) -> list[TokenWindow]:
        """The windows of all texts; texts that cannot be scored are refused."""
        if self.with_nats:
            self.scorer.require_causal()
        if empty := [number for number, text in enumerate(self.texts) if len(text) == 0]:
            raise ValueError(f"{len(empty)} of {len(self.texts)} texts are empty (text {empty[0]} first): remove them")
        return split_windows([len(text) for text in self.texts], self.scorer.max_tokens, self.window)

    @cached_property
    def keys(self) -> list[str]:
        """The cache key of each text: a hash of everything that changes its score by more than rounding."""
        base = [FORMAT, self.scorer.identity, self.with_nats, self.with_features, self.window]
        return [f"score-{hash_settings([*base, text.ids])}" for text in self.texts]


def split_windows(lengths: Sequence[int], max_tokens: int, window: int | None) -> list[TokenWindow]:
    """Split texts of these lengths into windows; without `window`, each text is one."""
    if window is not None and not 2 <= window <= max_tokens:
        raise ValueError(f"window={window}: give 2 to {max_tokens} tokens, what this scoring model's context holds")
    if window is None and (long := [number for number, length in enumerate(lengths) if length > max_tokens]):
        raise ValueError(
            f"{len(long)} of {len(lengths)} texts are longer than the {max_tokens:,} tokens of this model's context "
            f"(text {long[0]} has {lengths[long[0]]:,}): shorten them (length), or score in windows of fewer (window)"
        )
    size, windows = window or max_tokens, list[TokenWindow]()
    for text, length in enumerate(lengths):
        windows.append(TokenWindow(text, 0, min(size, length), 0))
        while (last := windows[-1]).end < length:
            start = min(last.start + size // 2, length - size)
            windows.append(TokenWindow(text, start, start + size, last.end))
    return windows


def score_texts(
    requests: Sequence[ScoringRequest],
    *,
    cache: Cache | None = None,
    context: DistributedContext | None = None,
    batch: int = BATCH,
    on_progress: ProgressCallback = ignore_progress,
) -> list[TextScores]:
    """Score the texts of all requests; texts in the cache are not scored again.

    With several processes, all make the same requests with caches in one folder; each scores its part and returns the
    scores of all.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    cache, (rank, world_size) = cache or Cache(), (context.rank, context.world_size) if context else (0, 1)
    for request in requests:
        request.windows()  # texts that cannot be scored are refused before anything is
    missing = [[number for number, key in enumerate(request.keys) if key not in cache] for request in requests]
    total = sum(len(request.keys) for request in requests)
    done = total - sum(map(len, missing))
    on_progress("scoring", done, total)
    try:
        for request, numbers in zip(requests, missing, strict=True):
            numbers.sort(key=lambda number: -len(request.texts[number]))
            # Every world_size-th from the longest on: equal work, and texts of similar length together.
            for scores in compute_scores(request, numbers[rank::world_size], batch):
                for number, score in scores.items():
                    cache.put(request.keys[number], score)
                done += world_size * len(scores)  # the other ranks are assumed to be as fast
                on_progress("scoring", min(done, total), total)
    finally:
        cache.flush()
    cache.sync(context)
    results = []
    for request in requests:
        entries = [cache.get(key) for key in request.keys]
        nats = [each["nats"].astype(np.float64) for each in entries] if request.with_nats else []
        features = np.stack([each["features"] for each in entries]) if request.with_features else None
        results.append(TextScores(nats, features))
    return results


@torch.no_grad()
def compute_scores(request: ScoringRequest, numbers: Sequence[int], batch: int) -> Iterator[dict[int, dict[str, Any]]]:
    """Score the texts with these numbers; after every batch, yield the texts that it completes."""
    scorer, texts = request.scorer, request.texts
    before, after = scorer.special_ids
    nats = {number: np.full(len(texts[number]), np.nan, np.float32) for number in numbers}
    windows = [window for window in request.windows() if window.text in nats]
    unread = Counter(window.text for window in windows)
    sums: dict[int, Any] = dict.fromkeys(numbers, 0.0)
    counts = dict.fromkeys(numbers, 0)
    max_tokens = MAX_BATCH_TOKENS[scorer.model.device.type]
    for group in batch_windows(windows, batch, len(before) + len(after), max_tokens):
        rows = [[*before, *texts[window.text].ids[window.start : window.end], *after] for window in group]
        row_nats, states = run_scorer(scorer, rows, request.with_nats, request.with_features)
        finished: dict[int, dict[str, Any]] = {}
        for row, (text, start, end, first_scored) in enumerate(group):
            skipped, length = first_scored - start, len(rows[row])
            if request.with_nats:
                first = max(skipped, 1 - len(before))  # row_nats[i] is of token i + 1 of the row
                nats[text][start + first : end] = row_nats[row, len(before) + first - 1 : length - 1]
            if request.with_features:
                is_counted = np.full(length, not scorer.is_causal)
                is_counted[len(before) : len(before) + skipped] = False
                is_counted[-1] |= end == len(texts[text])
                sums[text] = sums[text] + states[row, :length][is_counted].sum(0, dtype=np.float64)
                counts[text] += int(is_counted.sum())
            unread[text] -= 1
            if unread[text] == 0:
                score = {"nats": nats.pop(text)} if request.with_nats else {}
                if request.with_features:
                    score["features"] = np.asarray(sums.pop(text) / counts[text], dtype=np.float32)
                for name, values in score.items():
                    unscored = 1 - len(before) if name == "nats" else 0
                    if not np.isfinite(values[unscored:]).all():  # they would vanish in a mean
                        raise FloatingPointError(f"{name} by {scorer.name} are not finite: its weights are broken")
                finished[text] = score
        yield finished


def batch_windows(
    windows: Sequence[TokenWindow], batch: int, special: int, max_tokens: int
) -> Iterator[list[TokenWindow]]:
    """Batches of windows of similar length, the longest first: if memory is too small, that shows at once."""
    group: list[TokenWindow] = []
    for window in sorted(windows, key=lambda window: (window.start - window.end, window.text)):
        width = (group[0].end - group[0].start if group else window.end - window.start) + special
        if group and (len(group) == batch or (len(group) + 1) * width > max_tokens):
            yield group
            group = []
        group.append(window)
    if group:
        yield group


def run_scorer(
    scorer: ScoringModel, rows: Sequence[Sequence[int]], with_nats: bool, with_states: bool
) -> tuple[NDArray[np.float32], Any]:
    """One forward pass: nats (B, L − 1) of every token but the first, and states (B, L, width) of the last layer."""
    width, pad_id = max(len(row) for row in rows), scorer.tokenizer.eos_token_id or 0  # any token will do
    ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows]).to(scorer.model.device)
    is_text = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    inputs = {"input_ids": ids, "attention_mask": is_text.long().to(scorer.model.device)}
    if not with_nats:
        out = scorer.model.base_model(**inputs)
        return np.zeros((len(rows), 0), np.float32), out.last_hidden_state.float().cpu().numpy()
    out = scorer.model(**inputs, output_hidden_states=with_states)
    states = out.hidden_states[-1].float().cpu().numpy() if with_states else None
    return token_nats(out.logits, ids).cpu().numpy(), states


def token_nats(logits: Tensor, ids: Tensor) -> Tensor:
    """−ln p of every token but the first (B, L − 1), from logits (B, L, V); row by row, to hold one copy of a row."""
    nats = [F.cross_entropy(row[:-1].float(), each[1:], reduction="none") for row, each in zip(logits, ids)]
    return torch.stack(nats)
