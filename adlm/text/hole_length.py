"""Choose the length of a hole: the one that makes the text around it likeliest, with a penalty on long holes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from adlm.diffusion.plans import EPS
from adlm.generate import Predictor
from adlm.text.templates import Hole, Layout, Pieces, find_holes, set_hole_lengths

MAX_NEIGHBORS = 4  # given tokens on each side of a hole that are scored
MAX_ROWS = 64  # evaluated at a time
# The prior of n tokens is n ** -LENGTH_PENALTY. Without it holes are too long: distant tokens say little about each
# other, so all long holes fit about equally well (docs/LOG.md).
LENGTH_PENALTY = 2.0


def choose_hole_lengths(
    predictor: Callable[[], Predictor], pieces: Pieces, room: int, *, build_layout: Callable[[Pieces], Layout]
) -> Pieces:
    """Choose a length for every hole, one by one from the left.

    The score of a length is the sum of log p(token | all the rest, the hole hidden) over the given tokens next to the
    hole (the same tokens for every length) and −LENGTH_PENALTY · log length. All holes together have at most `room`
    tokens.
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
    """Choose the length of hole `number`, the others unchanged."""
    rows: list[list[int]] = []
    targets: list[tuple[int, int, int]] = []  # length, position and token that each row is for
    for length in range(hole.min_tokens, hole.max_tokens + 1):
        layout = build_layout(set_hole_lengths(pieces, [length if i == number else n for i, n in enumerate(lengths)]))
        for position in find_neighbors(layout, number):
            row = list(layout.ids)
            targets.append((length, position, row[position]))
            row[position] = layout.tokenizer.mask_id
            rows.append(row)
    if not targets:  # nothing is given: all lengths are equal
        return hole.max_tokens
    scores = {length: -LENGTH_PENALTY * math.log(length) for length in range(hole.min_tokens, hole.max_tokens + 1)}
    for start in range(0, len(rows), MAX_ROWS):
        part, expected = rows[start : start + MAX_ROWS], targets[start : start + MAX_ROWS]
        longest = max(len(row) for row in part)
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in part])
        valid = torch.arange(longest) < torch.tensor([len(row) for row in part])[:, None]
        hidden = ((tokens == predictor.config.mask_id) & valid).sum(-1) / valid.sum(-1)
        level, tokens = -torch.log(1 - (1 - EPS) * hidden), tokens.to(predictor.device)
        features = predictor.predict(tokens, level, valid.to(predictor.device))
        positions = torch.tensor([position for _, position, _ in expected], device=predictor.device)
        logits = predictor.logits_at(features[torch.arange(len(part), device=predictor.device), positions])
        log_probs = logits.float().log_softmax(-1).cpu()
        for (length, _, token), row_probs in zip(expected, log_probs, strict=True):
            scores[length] += float(row_probs[token])
    return max(scores, key=lambda length: (scores[length], -length))


def find_neighbors(layout: Layout, number: int) -> list[int]:
    """Return the positions of given text next to hole `number`, on both sides up to the next hole."""
    holes = [i for i, span in enumerate(layout.spans) if span.texts is None]
    at = holes[number]
    left = layout.spans[at - 1] if at > 0 and layout.spans[at - 1].texts is not None else None
    right = layout.spans[at + 1] if at + 1 < len(layout.spans) and layout.spans[at + 1].texts is not None else None
    positions: list[int] = []
    if left is not None:
        positions += range(max(left.start, left.end - MAX_NEIGHBORS), left.end)
    if right is not None:
        positions += range(right.start, min(right.end, right.start + MAX_NEIGHBORS))
    return positions
