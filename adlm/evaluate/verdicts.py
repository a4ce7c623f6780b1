"""What a judge finds in texts: the nats of every token and the features of every text, in one pass.

Texts are sorted by length, padded at their ends and read some at a time: none of it changes a figure but by rounding.
A text that is longer than the judge reads at once is an error, or with `window` is read in windows of that many tokens,
each half a window further on: every token is then judged once, in the first window that reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adlm.evaluate.judges import Judge, Piece

AT_ONCE = 4096  # tokens of a batch, padding among them: what bounds the memory of its logits
Told = Callable[[int, int], None]  # texts done, texts in all
LIMITS = "cut the texts (--length), take a judge that reads more, or judge in windows of fewer tokens (--window)"


class Window(NamedTuple):
    """A part of a text's tokens; those from `fresh` on are judged in it."""

    text: int
    start: int
    end: int
    fresh: int


@dataclass(frozen=True)
class Verdict:
    """What was found in the texts, in their order."""

    nats: list[NDArray[np.float64]]  # of each token; nan where none is scored: a first token without a BOS before it
    features: NDArray[np.float32] | None  # (texts, width)


def windows(lengths: Sequence[int], most: int, window: int | None) -> list[Window]:
    """How texts of these lengths are read, `most` tokens at once or as many as the window says."""
    if window is not None and not 2 <= window <= most:
        raise ValueError(
            f"window={window}: a window has at least 2 tokens, and at most the {most} that this judge reads at once "
            "beside what begins and ends a text"
        )
    size = window or most
    if window is None and (long := [number for number, length in enumerate(lengths) if length > most]):
        raise ValueError(
            f"{len(long)} of {len(lengths)} texts are longer than the {most:,} tokens that this judge reads at once "
            f"(text {long[0]} has {lengths[long[0]]:,}): {LIMITS}"
        )
    found, stride = [], size // 2
    for text, length in enumerate(lengths):
        found.append(Window(text, 0, min(size, length), 0))
        while (last := found[-1]).end < length:
            start = min(last.start + stride, length - size)
            found.append(Window(text, start, start + size, last.end))
    return found


@torch.no_grad()
def judged(
    judge: Judge,
    pieces: Sequence[Piece],
    *,
    with_nats: bool = True,
    with_features: bool = False,
    window: int | None = None,
    batch: int = 16,
    on_texts: Told | None = None,
) -> Verdict:
    """Read texts; of a causal LM the nats of their tokens are to be had, of every judge the features.

    Features of a causal LM are its last layer's state at a text's last token (MAUVE's own, of GPT-2), of an encoder
    the mean of its last layer over the tokens and what stands around them (as sentence encoders are trained).
    """
    if with_nats:
        judge.require_causal()
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    if empty := [number for number, piece in enumerate(pieces) if len(piece) == 0]:
        raise ValueError(f"{len(empty)} of {len(pieces)} texts are empty, text {empty[0]} among them: leave them out")
    lengths = [len(piece) for piece in pieces]
    before, after = judge.ends
    parts = windows(lengths, judge.context - len(before) - len(after), window)
    nats = [np.full(length, np.nan) for length in lengths]
    sums: list[Any] = [0.0] * len(pieces)
    read, left, done = np.zeros(len(pieces)), [part.text for part in parts], 0
    for group in batches(parts, batch, len(before) + len(after)):
        rows = [[*before, *pieces[part.text].ids[part.start : part.end], *after] for part in group]
        found, states = passed(judge, rows, with_nats, with_features)
        for row, part in enumerate(group):
            fresh = part.fresh - part.start
            if with_nats:
                own = found[row, : len(rows[row]) - 1].numpy()  # own[i] is of token i + 1 of the row
                first = max(fresh, 1 - len(before))
                nats[part.text][part.start + first : part.end] = own[len(before) + first - 1 :]
            if with_features and judge.is_causal and part.end == lengths[part.text]:
                sums[part.text], read[part.text] = states[row, len(rows[row]) - 1], 1
            elif with_features and not judge.is_causal:
                is_counted = np.ones(len(rows[row]), dtype=bool)
                is_counted[len(before) : len(before) + fresh] = False
                sums[part.text] = sums[part.text] + states[row, : len(is_counted)][is_counted].sum(0, dtype=np.float64)
                read[part.text] += is_counted.sum()
            left.remove(part.text)
        if on_texts:
            done = len(pieces) - len(set(left))
            on_texts(done, len(pieces))
    features = None
    if with_features:
        features = np.stack([total / count for total, count in zip(sums, read)]).astype(np.float32)
    require_finite(nats, features, with_nats, judge)
    return Verdict(nats if with_nats else [], features)


def batches(parts: Sequence[Window], most: int, around: int) -> Iterator[list[Window]]:
    """Parts of like length together, the longest first: if memory is short, it is so at once."""
    group: list[Window] = []
    for part in sorted(parts, key=lambda part: (part.start - part.end, part.text)):
        widest = (group[0].end - group[0].start if group else part.end - part.start) + around
        if group and (len(group) == most or (len(group) + 1) * widest > AT_ONCE):
            yield group
            group = []
        group.append(part)
    yield group


def passed(judge: Judge, rows: Sequence[Sequence[int]], with_nats: bool, with_states: bool) -> tuple[Tensor, Any]:
    """One pass: nats (B, L − 1) of every token but the first in float64, states (B, L, width) of the last layer."""
    widest = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[judge.pad_id] * (widest - len(row))] for row in rows]).to(judge.device)
    is_text = torch.arange(widest) < torch.tensor([len(row) for row in rows])[:, None]
    given = {"input_ids": ids, "attention_mask": is_text.long().to(judge.device)}
    nats, states = torch.zeros(len(rows), 0), None
    if with_nats:
        out = judge.model(**given, output_hidden_states=with_states)
        nats = token_nats(out.logits, ids).cpu()
        states = out.hidden_states[-1] if with_states else None
    elif with_states:
        states = judge.model.base_model(**given).last_hidden_state
    return nats, None if states is None else states.float().cpu().numpy()


def token_nats(logits: Tensor, ids: Tensor) -> Tensor:
    """−ln p of every token but the first (B, L − 1), from logits (B, L, V); row by row, so that one copy exists."""
    found = [F.cross_entropy(row[:-1].float(), each[1:], reduction="none") for row, each in zip(logits, ids)]
    return torch.stack(found).double()


def require_finite(
    nats: Sequence[NDArray[np.float64]], features: NDArray[np.float32] | None, with_nats: bool, judge: Judge
) -> None:
    """A figure that is not one must not vanish in a mean."""
    if with_nats:
        first = 1 - len(judge.ends[0])
        if wrong := [number for number, each in enumerate(nats) if not np.isfinite(each[first:]).all()]:
            raise FloatingPointError(
                f"{judge.name} gives nats that are not finite in {len(wrong)} of {len(nats)} texts, text {wrong[0]} "
                "among them: its weights or its precision are broken"
            )
    if features is not None and not np.isfinite(features).all():
        count = int((~np.isfinite(features)).any(1).sum())
        raise FloatingPointError(f"{judge.name} gives features that are not finite in {count} of {len(features)} texts")
