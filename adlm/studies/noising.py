"""The held-out bound's own noise on rows, for studies that look further into it."""

from __future__ import annotations

from torch import Tensor

from adlm.diffusion.masking import Noised, corrupt
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear

SCHEDULE = LogLinear()


def noised_rows(
    x0: Tensor, number: Tensor, valid: Tensor | None, *, mask_id: int, draw: int, draws: int, seed: int, total: int
) -> Noised:
    """Rows number `number` of `total` as `held_out_bound` hides them in its draw number `draw` of `draws`."""
    # Times are even over the rows, and over the draws of a row.
    place = number if draw == 0 else number + total * draw / draws
    rng = CounterRng.of(seed, number)
    return corrupt(x0, SCHEDULE, rng, draw, mask_id=mask_id, index=place, total=total, valid=valid)
