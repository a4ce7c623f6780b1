"""How long should a hole be? As long as makes the text around it likeliest, where short is likelier to begin with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from adlm.diffusion.plans import EPS
from adlm.generate import Predictor
from adlm.text.templates import Hole, Layout, Pieces, find_holes, set_hole_lengths

MAX_NEIGHBORS = 4  # given tokens on each side of a hole that are asked
MAX_ROWS = 64  # evaluated at a time
# Before anything is read, a hole of n tokens is n ** -RARER as likely as one of one. Without it holes come out too
# long: what stands far apart says little about each other, so all long holes fit about equally well (docs/LOG.md).
LENGTH_PENALTY = 2.0


def choose_hole_lengths(
    predictor: Callable[[], Predictor], pieces: Pieces, room: int, *, build_layout: Callable[[Pieces], Layout]
) -> Pieces:
    """The pieces with every hole of one length; those that leave a choice are chosen one by one, from the left.

    The score of a length is the sum of log p(token | all the rest, the hole hidden) over the given tokens next to the
    hole (the same tokens for every length, so lengths compare) and −RARER · log length. At most `room` tokens may
    stand in all holes together.
    """
    holes = find_holes(pieces)
    lengths = [hole.min_tokens for hole in holes]
    for number, hole in enumerate(holes):
        most = min(hole.max_tokens, room - sum(lengths) + lengths[number])
        if most > hole.min_tokens:
            lengths[number] = choose_hole_length(
                predictor(), pieces, build_layout, lengths, number, Hole(hole.min_tokens, most)
            )
    return set_hole_lengths(pieces, lengths)


@torch.no_grad()
def choose_hole_length(
    predictor: Predictor,
    pieces: Pieces,
    build_layout: Callable[[Pieces], Layout],
    lengths: list[int],
    number: int,
    hole: Hole,
) -> int:
    """The length of hole `number`, the others as they are."""
    rows: list[list[int]] = []
    asked: list[tuple[int, int, int]] = []  # length, place and token of each row's question
    for length in range(hole.min_tokens, hole.max_tokens + 1):
        layout = build_layout(set_hole_lengths(pieces, [length if i == number else n for i, n in enumerate(lengths)]))
        for place in find_neighbors(layout, number):
            row = list(layout.ids)
            asked.append((length, place, row[place]))
            row[place] = layout.tokenizer.mask_id
            rows.append(row)
    if not asked:  # nothing is given: every length is as good as another
        return hole.max_tokens
    scores = {length: -LENGTH_PENALTY * math.log(length) for length in range(hole.min_tokens, hole.max_tokens + 1)}
    for start in range(0, len(rows), MAX_ROWS):
        part, questions = rows[start : start + MAX_ROWS], asked[start : start + MAX_ROWS]
        widest = max(len(row) for row in part)
        tokens = torch.tensor([row + [0] * (widest - len(row)) for row in part])
        valid = torch.arange(widest) < torch.tensor([len(row) for row in part])[:, None]
        hidden = ((tokens == predictor.config.mask_id) & valid).sum(-1) / valid.sum(-1)
        level, tokens = -torch.log(1 - (1 - EPS) * hidden), tokens.to(predictor.device)
        features = predictor.predict(tokens, level, valid.to(predictor.device))
        places = torch.tensor([place for _, place, _ in questions], device=predictor.device)
        logits = predictor.logits_at(features[torch.arange(len(part), device=predictor.device), places])
        log_probs = logits.float().log_softmax(-1).cpu()
        for (length, _, token), row_probs in zip(questions, log_probs, strict=True):
            scores[length] += float(row_probs[token])
    return max(scores, key=lambda length: (scores[length], -length))


def find_neighbors(layout: Layout, number: int) -> list[int]:
    """The places of given text next to hole `number`, on both sides as far as the next hole."""
    holes = [i for i, span in enumerate(layout.spans) if span.texts is None]
    at = holes[number]
    left = layout.spans[at - 1] if at > 0 and layout.spans[at - 1].texts is not None else None
    right = layout.spans[at + 1] if at + 1 < len(layout.spans) and layout.spans[at + 1].texts is not None else None
    places: list[int] = []
    if left is not None:
        places += range(max(left.start, left.end - MAX_NEIGHBORS), left.end)
    if right is not None:
        places += range(right.start, min(right.end, right.start + MAX_NEIGHBORS))
    return places
