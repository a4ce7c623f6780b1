"""The held-out bound's own noise on rows, for studies that look further into it."""

from __future__ import annotations

from torch import Tensor

from adlm.diffusion.masking import Noised, corrupt
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear
from adlm.evaluate.likelihood import place_of

SCHEDULE = LogLinear()


def noised_rows(
    x0: Tensor, number: Tensor, valid: Tensor | None, *, mask_id: int, draw: int, draws: int, seed: int, total: int
) -> Noised:
    """Rows number `number` of `total` as `held_out_bound` hides them in its draw number `draw` of `draws`."""
    rng, place = CounterRng.of(seed, number), place_of(number, total, draw, draws, seed)
    return corrupt(x0, SCHEDULE, rng, draw, mask_id=mask_id, index=place, total=total, valid=valid)
