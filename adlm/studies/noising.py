"""Rows of about one length a piece, and the held-out bound's noise on them, for studies that look further into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.data.batches import RowDataset, is_valid
from adlm.diffusion.masking import NoisyBatch, corrupt
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear
from adlm.evaluate.likelihood import place_of

SCHEDULE = LogLinear()
LOOK = 1024  # rows whose lengths are asked for at a time
TOKENS_AT_ONCE = {"cpu": 2048}  # what a core's cache holds the features of; more are slower by a fifth


@dataclass(frozen=True)
class Piece:
    """Some rows, as wide as the longest of them."""

    number: Tensor  # (n,): what each row's noise is known by
    x0: Tensor  # (n, L)
    lengths: Tensor  # (n,)

    @property
    def valid(self) -> Tensor | None:
        """(n, L), False at padding; None where there is none."""
        width = self.x0.shape[1]
        return None if bool((self.lengths == width).all()) else is_valid(self.lengths, width)


def pieces(rows: RowDataset, batch: int, device: torch.device) -> Iterator[Piece]:
    """All rows, at most `batch` at a time; where they differ in length, from the shortest to the longest."""
    most = TOKENS_AT_ONCE.get(device.type)
    every = [rows.fetch(number)[1] for number in torch.arange(len(rows)).split(LOOK)]
    known = [lengths for lengths in every if lengths is not None]
    order = torch.cat(known).argsort(stable=True) if known else torch.arange(len(rows))
    start = 0
    while start < len(order):
        number = order[start : start + batch]
        x0, lengths = rows.fetch(number)
        lengths = torch.full((len(x0),), x0.shape[1]) if lengths is None else lengths
        if most is not None:  # the widest is the last, so that those before it are as wide at most
            fitting = int((lengths * torch.arange(1, len(lengths) + 1) <= most).sum())
            number, x0, lengths = (each[: max(1, fitting)] for each in (number, x0, lengths))
        yield Piece(number, x0[:, : int(lengths.max())], lengths)
        start += len(number)


def noised_rows(
    x0: Tensor, number: Tensor, valid: Tensor | None, *, mask_id: int, draw: int, draws: int, seed: int, total: int
) -> NoisyBatch:
    """Rows number `number` of `total` as `held_out_bound` hides them in its draw number `draw` of `draws`."""
    rng, place = CounterRng.of(seed, number), place_of(number, total, draw, draws, seed)
    return corrupt(x0, SCHEDULE, rng, draw, mask_id=mask_id, index=place, total=total, valid=valid)
