"""Choose the length of a hole: the one that makes the text around it likeliest, with a penalty on long holes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from adlm.diffusion.plans import mean_noise_level
from adlm.generate import Predictor
from adlm.text.templates import Layout, Pieces, find_holes, set_hole_lengths

MAX_NEIGHBORS = 4  # given tokens on each side of a hole that are scored
MAX_ROWS = 64  # evaluated at a time
# The prior of n tokens is n ** -LENGTH_PENALTY. Without it holes are too long: distant tokens say little about each
# other, so all long holes fit about equally well (docs/LOG.md).
LENGTH_PENALTY = 2.0


def choose_hole_lengths(
    predictor: Callable[[], Predictor], build_layout: Callable[[Pieces], Layout], pieces: Pieces, room: int
) -> Pieces:
    """Choose a length for every hole, one by one from the left; all together have at most `room` tokens."""
    holes = find_holes(pieces)
    lengths = [hole.min_tokens for hole in holes]
    for number, hole in enumerate(holes):
        most = min(hole.max_tokens, room - sum(lengths) + lengths[number])
        if most > hole.min_tokens:
            layouts = {}
            for length in range(hole.min_tokens, most + 1):
                lengths[number] = length
                layouts[length] = build_layout(set_hole_lengths(pieces, lengths))
            lengths[number] = choose_hole_length(predictor(), layouts, number)
    return set_hole_lengths(pieces, lengths)


@torch.no_grad()
def choose_hole_length(predictor: Predictor, layouts: dict[int, Layout], number: int) -> int:
    """Choose the length of hole `number` among layouts with each length.

    The score of a length is the sum of log p(token | all the rest, the hole hidden) over the given tokens next to the
    hole (the same tokens for every length) and −LENGTH_PENALTY · log length.
    """
    rows: list[list[int]] = []
    targets: list[tuple[int, int, int]] = []  # length, position and token that each row is for
    for length, layout in layouts.items():
        for position in find_neighbors(layout, number):
            row = list(layout.ids)
            targets.append((length, position, row[position]))
            row[position] = layout.tokenizer.mask_id
            rows.append(row)
    if not targets:  # nothing is given: all lengths are equal
        return max(layouts)
    scores = {length: -LENGTH_PENALTY * math.log(length) for length in layouts}
    for start in range(0, len(rows), MAX_ROWS):
        part, expected = rows[start : start + MAX_ROWS], targets[start : start + MAX_ROWS]
        longest = max(len(row) for row in part)
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in part])
        valid = torch.arange(longest) < torch.tensor([len(row) for row in part])[:, None]
        hidden = ((tokens == predictor.config.mask_id) & valid).sum(-1) / valid.sum(-1)
        level, tokens = mean_noise_level(hidden), tokens.to(predictor.device)
        features = predictor.predict(tokens, level, valid.to(predictor.device))
        positions = torch.tensor([position for _, position, _ in expected], device=predictor.device)
        logits = predictor.logits_at(features[torch.arange(len(part), device=predictor.device), positions])
        for (length, _, token), log_probs in zip(expected, logits.float().log_softmax(-1).cpu(), strict=True):
            scores[length] += float(log_probs[token])
    return max(scores, key=lambda length: (scores[length], -length))


def find_neighbors(layout: Layout, number: int) -> list[int]:
    """Return the positions of given text next to hole `number`, on both sides up to the next hole."""
    at = [i for i, span in enumerate(layout.spans) if span.texts is None][number]
    positions: list[int] = []
    for left in layout.spans[max(0, at - 1) : at]:
        if left.texts is not None:
            positions += range(max(left.start, left.end - MAX_NEIGHBORS), left.end)
    for right in layout.spans[at + 1 : at + 2]:
        if right.texts is not None:
            positions += range(right.start, min(right.end, right.start + MAX_NEIGHBORS))
    return positions
