"""What a judge finds in texts: the nats of every token and the features of every text, in one pass.

Texts are sorted by length, padded at their ends and read some at a time: none of it changes a figure but by rounding.
A text that is longer than the judge reads at once is an error, or with `window` is read in windows of that many tokens,
each half a window further on: every token is then judged once, in the first window that reaches it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adlm.evaluate.judges import Judge, Piece

FORMAT = 1  # of a reading: another number where its arithmetic changes, so that kept ones are not taken for it
BATCH = 32  # rows read at once, if they are short
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


@dataclass(frozen=True)
class Reading:
    """What was found in one text: the nats of its tokens, its features; what was not asked for is empty."""

    nats: NDArray[np.float64]
    features: NDArray[np.float32]


@dataclass(frozen=True)
class Request:
    """Texts, who is to judge them, and what is asked."""

    judge: Judge
    pieces: Sequence[Piece]
    with_nats: bool = True
    with_features: bool = False
    window: int | None = None

    def check(self) -> None:
        """Refuse what cannot be judged."""
        if self.with_nats:
            self.judge.require_causal()
        if empty := [number for number, piece in enumerate(self.pieces) if len(piece) == 0]:
            raise ValueError(
                f"{len(empty)} of {len(self.pieces)} texts are empty, text {empty[0]} among them: leave them out"
            )
        self.parts()

    def parts(self) -> list[Window]:
        """How the texts are read."""
        room = self.judge.context - sum(map(len, self.judge.ends))
        return windows([len(piece) for piece in self.pieces], room, self.window)

    @cached_property
    def keys(self) -> list[str]:
        """For each text a hash of all that its reading follows from.

        The batch, the device and versions of libraries are not in it: they change a figure by rounding only.
        """
        asked = {"format": FORMAT, "nats": self.with_nats, "features": self.with_features, "window": self.window}
        about = hashlib.sha256(json.dumps({"judge": self.judge.identity, **asked}, sort_keys=True).encode())
        found = []
        for piece in self.pieces:
            digest = about.copy()
            digest.update(np.asarray(piece.ids, dtype="<i8").tobytes())
            found.append(digest.hexdigest())
        return found


def judged(
    judge: Judge,
    pieces: Sequence[Piece],
    *,
    with_nats: bool = True,
    with_features: bool = False,
    window: int | None = None,
    batch: int = BATCH,
    on_texts: Told | None = None,
) -> Verdict:
    """Read texts; of a causal LM the nats of their tokens are to be had, of every judge the features.

    Features of a causal LM are its last layer's state at a text's last token (MAUVE's own, of GPT-2), of an encoder
    the mean of its last layer over the tokens and what stands around them (as sentence encoders are trained).
    """
    request = Request(judge, pieces, with_nats, with_features, window)
    require_batch(batch)
    request.check()
    found: dict[int, Reading] = {}
    for some in readings(request, range(len(pieces)), batch=batch):
        found |= some
        if on_texts:
            on_texts(len(found), len(pieces))
    return verdict_of(request, [found[number] for number in range(len(pieces))])


def require_batch(batch: int) -> None:
    """Refuse a batch of nothing."""
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")


def verdict_of(request: Request, found: Sequence[Reading]) -> Verdict:
    """The readings of all texts of a request together."""
    features = np.stack([each.features for each in found]) if request.with_features else None
    return Verdict([each.nats for each in found] if request.with_nats else [], features)


@torch.no_grad()
def readings(request: Request, numbers: Sequence[int], *, batch: int = BATCH) -> Iterator[dict[int, Reading]]:
    """Read the texts of these numbers; after every batch, those that are finished by it."""
    judge, pieces = request.judge, request.pieces
    before, after = judge.ends
    is_asked = set(numbers)
    parts = [part for part in request.parts() if part.text in is_asked]
    left = Counter(part.text for part in parts)  # parts that are not read yet
    nats = {number: np.full(len(pieces[number]), np.nan) for number in is_asked if request.with_nats}
    sums: dict[int, Any] = dict.fromkeys(is_asked, 0.0)
    counts = dict.fromkeys(is_asked, 0)
    for group in batches(parts, batch, len(before) + len(after)):
        rows = [[*before, *pieces[part.text].ids[part.start : part.end], *after] for part in group]
        scored, states = passed(judge, rows, request.with_nats, request.with_features)
        finished = {}
        for row, part in enumerate(group):
            text, fresh = part.text, part.fresh - part.start
            if request.with_nats:
                own = scored[row, : len(rows[row]) - 1].numpy()  # own[i] is of token i + 1 of the row
                first = max(fresh, 1 - len(before))
                nats[text][part.start + first : part.end] = own[len(before) + first - 1 :]
            if request.with_features and judge.is_causal and part.end == len(pieces[text]):
                sums[text], counts[text] = states[row, len(rows[row]) - 1], 1
            elif request.with_features and not judge.is_causal:
                is_counted = np.ones(len(rows[row]), dtype=bool)
                is_counted[len(before) : len(before) + fresh] = False
                sums[text] = sums[text] + states[row, : len(is_counted)][is_counted].sum(0, dtype=np.float64)
                counts[text] += int(is_counted.sum())
            left[text] -= 1
            if left[text] == 0:
                whole = sums.pop(text) / counts[text] if request.with_features else np.zeros(0)
                finished[text] = Reading(nats.pop(text, np.zeros(0)), np.asarray(whole, dtype=np.float32))
        require_finite(finished, judge)
        yield finished


def batches(parts: Sequence[Window], most: int, around: int) -> Iterator[list[Window]]:
    """Parts of like length together, the longest first: if memory is short, it is so at once."""
    group: list[Window] = []
    for part in sorted(parts, key=lambda part: (part.start - part.end, part.text)):
        widest = (group[0].end - group[0].start if group else part.end - part.start) + around
        if group and (len(group) == most or (len(group) + 1) * widest > AT_ONCE):
            yield group
            group = []
        group.append(part)
    if group:
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


def require_finite(found: Mapping[int, Reading], judge: Judge) -> None:
    """A figure that is not one must not vanish in a mean."""
    first = 1 - len(judge.ends[0])
    for what, wrong in (
        ("nats", [number for number, each in found.items() if not np.isfinite(each.nats[first:]).all()]),
        ("features", [number for number, each in found.items() if not np.isfinite(each.features).all()]),
    ):
        if wrong:
            raise FloatingPointError(
                f"{judge.name} gives {what} that are not finite in {len(wrong)} of {len(found)} texts, text "
                f"{min(wrong)} among them: its weights or its precision are broken"
            )
