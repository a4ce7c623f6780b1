"""What the model loses when the anchor network's output is blurred, shuffled, another row's or out of date.

The features between the stages are changed, nothing else; the noise on the text is the same for all changes, so the
differences have small errors although the figures themselves have not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adlm.data.batches import Fetch, is_valid
from adlm.diffusion.masking import Noised, mask_tokens
from adlm.diffusion.objectives import diffusion_loss
from adlm.diffusion.orders import Order
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.schedules import noise_level
from adlm.evaluate.tallies import ratio
from adlm.generate import ready
from adlm.models.language_model import LanguageModel
from adlm.studies.noising import SCHEDULE, noised_rows
from adlm.studies.stages import first_stage, require_two_stages, second_stage
from adlm.text.jobs import Job
from adlm.text.lm import LM, Row, frames

LEVELS = 32  # of masking: being k levels out of date is having seen the text at time t + k / LEVELS
Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Change:
    """What becomes of the anchor network's features before the bridge.

    none; noise: Gaussian, its norm `amount` times the features'; permuted: over the row's positions; other_row: of
    another row with the same positions hidden; stale: of the text `amount` masking levels earlier (sampling: of the
    evaluation up to `amount` − 1 before, each used `amount` times).
    """

    kind: str = "none"
    amount: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"change {self.kind!r} is not one of {', '.join(KINDS)}")
        if not self.amount >= 0:
            raise ValueError(f"the amount of {self.kind} must not be negative, got {self.amount}")
        if self.kind == "stale" and (self.amount != int(self.amount) or self.amount < 1):
            raise ValueError(f"stale takes a whole number of steps from 1 on, got {self.amount}")

    @property
    def name(self) -> str:
        return f"{self.kind} {self.amount:g}" if self.kind in ("noise", "stale") else self.kind


KINDS = ("none", "noise", "permuted", "other_row", "stale")
NONE = Change()


@dataclass(frozen=True)
class Loss:
    """The held-out bound with a change: nats per token, and what the change costs, each with its error over rows."""

    change: str
    kind: str
    amount: float
    nll: float
    nll_se: float
    cost: float  # against the model as it is, on the same noise
    cost_se: float
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def blur(anchor: Tensor, scale: float, noise: Tensor) -> Tensor:
    """Gaussian noise whose expected norm is about `scale` times each position's own."""
    size = anchor.float().norm(dim=-1, keepdim=True) / anchor.shape[-1] ** 0.5
    return (anchor.float() + scale * size * noise.to(anchor.device)).to(anchor.dtype)


def gaussian(seed: int, rows: Sequence[int], turn: int, shape: tuple[int, int]) -> Tensor:
    """Standard normal (n, *shape): a function of the seed, each row's own number and the turn."""
    made = [np.random.default_rng([seed, row, turn]).standard_normal(shape, dtype=np.float32) for row in rows]
    return torch.from_numpy(np.stack(made))


def shuffles(seed: int, rows: Sequence[int], turn: int, lengths: Sequence[int], width: int) -> Tensor:
    """A permutation (n, width) of each row's first `length` positions; padding stays where it is."""
    found = np.tile(np.arange(width), (len(rows), 1))
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        found[i, :length] = np.random.default_rng([seed, row, turn]).permutation(length)
    return torch.from_numpy(found)


def taken(anchor: Tensor, places: Tensor) -> Tensor:
    """Features (B, L, dim) in another order (B, L)."""
    return anchor.gather(1, places.to(anchor.device)[..., None].expand_as(anchor))


@torch.no_grad()
def perturbed_losses(
    model: LanguageModel,
    rows: Fetch,
    changes: Sequence[Change],
    *,
    draws: int = 1,
    seed: int = 0,
    batch: int = 32,
    on_rows: Told | None = None,
) -> list[Loss]:
    """The NELBO of held-out rows under each change; the first is the model as it is, equal to `held_out_bound`."""
    require_two_stages(model, "this model")
    changes, count = [NONE, *(change for change in changes if change != NONE)], len(rows)
    if count < 2:
        raise ValueError(f"a standard error needs at least 2 rows, got {count}")
    nats, tokens = np.zeros((len(changes), count)), np.zeros(count)
    for number in torch.arange(count).split(batch):
        x0, lengths = rows.fetch(number)
        kept = torch.full((len(x0),), x0.shape[1]) if lengths is None else lengths
        other, other_lengths = rows.fetch((number + 1) % count)
        if other_lengths is not None:  # a shorter row goes round and round
            other = other.gather(1, torch.arange(other.shape[1]) % other_lengths[:, None])
        tokens[number.numpy()] = kept.numpy()
        for draw in range(draws):
            turn = Turn(model, x0, lengths, other, number, (draw, draws), seed, count)
            for place, change in enumerate(changes):
                loss = turn.loss(change)
                nats[place, number.numpy()] += loss.double().cpu().numpy() / draws
        if on_rows:
            on_rows(int(number[-1]) + 1, count)
    return [
        Loss(
            change.name,
            change.kind,
            change.amount,
            *ratio(nats[place], tokens),
            *ratio(nats[place] - nats[0], tokens),
            int(tokens.sum()),
        )
        for place, change in enumerate(changes)
    ]


class Turn:
    """A batch under one noise, and the loss of it under every change."""

    def __init__(
        self,
        model: LanguageModel,
        x0: Tensor,
        lengths: Tensor | None,
        other: Tensor,
        number: Tensor,
        draw: tuple[int, int],  # number and of how many
        seed: int,
        total: int,
    ) -> None:
        assert model.config.mask_id is not None
        self.model, self.x0, self.other, self.number = model, x0, other, number.tolist()
        self.draw, self.seed, self.mask_id = draw[0], seed, model.config.mask_id
        self.lengths = [x0.shape[1]] * len(x0) if lengths is None else lengths.tolist()
        valid = None if lengths is None else is_valid(lengths, x0.shape[1])
        self.rng = CounterRng.of(seed, number)
        self.noised: Noised = noised_rows(
            x0, number, valid, mask_id=self.mask_id, draw=draw[0], draws=draw[1], seed=seed, total=total
        )
        self.at = self.noised.to(model.embed.weight.device)
        self.own = self._first(self.at.xt, self.at.noise_level)

    def _first(self, tokens: Tensor, level: Tensor) -> Tensor:
        device = self.at.xt.device
        return first_stage(self.model, tokens.to(device), level.to(device), self.at.valid)

    def features(self, change: Change) -> Tensor:
        """What the bridge is given."""
        if change.kind == "noise":
            noise = gaussian(self.seed, self.number, self.draw, (self.own.shape[1], self.own.shape[2]))
            return blur(self.own, change.amount, noise)
        if change.kind == "permuted":
            return taken(self.own, shuffles(self.seed, self.number, self.draw, self.lengths, self.own.shape[1]))
        if change.kind == "other_row":
            hidden = torch.where(self.noised.xt == self.mask_id, self.mask_id, self.other)
            return self._first(hidden, self.noised.noise_level)
        if change.kind == "stale":
            earlier = (self.noised.t + change.amount / LEVELS).clamp(max=1.0)
            # The same random numbers: what is hidden now was hidden then.
            u = self.rng.uniform(self.draw, self.x0.shape[1], Purpose.MASK)
            padding = None if self.noised.valid is None else ~self.noised.valid
            xt = mask_tokens(self.x0, 1 - SCHEDULE.alpha(earlier.double()), u, self.mask_id, padding)
            return self._first(xt, noise_level(SCHEDULE, earlier))
        return self.own

    def loss(self, change: Change) -> Tensor:
        """Each row's nats (B,)."""
        final = second_stage(self.model, self.features(change), self.at.noise_level, self.at.valid)
        return diffusion_loss(final, self.model.head, self.at, mask_id=self.mask_id).row_nll


@dataclass
class ChangedNetwork:
    """The network of a predictor with the features between its stages changed; made anew for every batch."""

    model: LanguageModel
    change: Change
    rows: Sequence[int]
    seed: int
    calls: int = 0
    kept: Tensor | None = field(default=None, repr=False)

    def final(self, tokens: Tensor, noise_level: Tensor | None, valid: Tensor | None) -> Tensor:
        """The denoiser's features of these rows, one call for every evaluation."""
        if len(tokens) != len(self.rows):
            raise ValueError(f"{len(tokens)} of {len(self.rows)} rows were asked: rows that pause go one at a time")
        change, turn = self.change, self.calls
        self.calls += 1
        if change.kind == "stale" and self.kept is not None and turn % int(change.amount):
            return second_stage(self.model, self.kept, noise_level, valid)
        anchor = first_stage(self.model, tokens, noise_level, valid)
        if change.kind == "stale":
            self.kept = anchor
        elif change.kind == "noise":
            anchor = blur(
                anchor, change.amount, gaussian(self.seed, self.rows, turn, (anchor.shape[1], anchor.shape[2]))
            )
        elif change.kind == "permuted":
            lengths = [anchor.shape[1]] * len(tokens) if valid is None else valid.sum(-1).tolist()
            anchor = taken(anchor, shuffles(self.seed, self.rows, turn, lengths, anchor.shape[1]))
        elif change.kind == "other_row":
            raise ValueError("a text that is being written has no other row: use permuted, noise or stale")
        return second_stage(self.model, anchor, noise_level, valid)


def changed_texts(lm: LM, job: Job, change: Change) -> Iterator[Row]:
    """A job's texts, written with a change of the anchor features; without one, the texts of `lm.rows(job)`.

    Where rows pause in steps that reveal nothing in them, they are written one at a time: what is kept for later steps
    is a row's own.
    """
    require_two_stages(lm.model, lm.name)
    together = isinstance(job.sampler, Order) and job.sampler.entropy_bound is None and len(job.layouts) == 1
    size = job.batch if together else 1
    predictor = ready(lm.model, lm.device, is_compiled=False)
    for first in range(0, len(job.rows), size):
        part = job.rows[first : first + size]
        numbers = [number for _, number in part]
        predictor.final = ChangedNetwork(predictor.model, change, numbers, job.seed).final
        with torch.no_grad():
            *_, frame = frames(predictor, job, part)
        for (layout, _), ids, nfe in zip(part, frame.tokens.tolist(), frame.nfe.tolist(), strict=True):
            yield Row(layout, ids[: len(layout)], nfe)
