"""What the model loses when the anchor network's output is blurred, shuffled, another row's or out of date.

The features between the stages are changed, nothing else; the noise on the text is the same for all changes, so the
differences have small errors although the figures themselves have not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adlm.data.batches import RowDataset
from adlm.diffusion.masking import NoisyBatch, mask_tokens
from adlm.diffusion.objectives import diffusion_loss
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.schedules import noise_level
from adlm.evaluate.tallies import ratio
from adlm.generate import compile_for_sampling
from adlm.models.language_model import LanguageModel
from adlm.studies.noising import SCHEDULE, Piece, noised_rows, pieces
from adlm.studies.stages import first_stage, require_two_stages, second_stage
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, GeneratedRow, denoise_rows

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
        if not 0 <= self.amount < math.inf:
            raise ValueError(f"the amount of {self.kind} must not be negative or infinite, got {self.amount}")
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


def gaussian(seed: int, rows: Sequence[int], turns: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """Standard normal (n, *shape): a function of the seed, each row's own number and its turn; fewer positions have the
    first of more."""
    made = [
        np.random.default_rng([seed, row, turn]).standard_normal(shape, dtype=np.float32)
        for row, turn in zip(rows, turns, strict=True)
    ]
    return torch.from_numpy(np.stack(made))


def shuffles(seed: int, rows: Sequence[int], turns: Sequence[int], lengths: Sequence[int], width: int) -> Tensor:
    """A permutation (n, width) of each row's first `length` positions; padding stays where it is."""
    found = np.tile(np.arange(width), (len(rows), 1))
    for i, (row, turn, length) in enumerate(zip(rows, turns, lengths, strict=True)):
        found[i, :length] = np.random.default_rng([seed, row, turn]).permutation(length)
    return torch.from_numpy(found)


def taken(anchor: Tensor, places: Tensor) -> Tensor:
    """Features (B, L, dim) in another order (B, L)."""
    return anchor.gather(1, places.to(anchor.device)[..., None].expand_as(anchor))


@torch.no_grad()
def perturbed_losses(
    model: LanguageModel,
    rows: RowDataset,
    changes: Sequence[Change],
    *,
    draws: int = 1,
    seed: int = 0,
    batch: int = 32,
    on_turn: Callable[[Turn], None] | None = None,
    on_rows: Told | None = None,
) -> list[Loss]:
    """The NELBO of held-out rows under each change; the first is the model as it is, equal to `held_out_bound`.

    `on_turn` sees every batch under every noise, for what else there is to measure of it.
    """
    require_two_stages(model, "this model")
    changes, count, done = [NONE, *(change for change in changes if change != NONE)], len(rows), 0
    if count < 2:
        raise ValueError(f"a standard error needs at least 2 rows, got {count}")
    folded = model.fold()  # the bridge is multiplied out once, and no head has a gradient to compute
    nats, tokens = np.zeros((len(changes), count)), np.zeros(count)
    for piece in pieces(rows, batch, model.embed.weight.device):
        number = piece.number.numpy()
        tokens[number] = piece.lengths.numpy()
        for draw in range(draws):
            turn = Turn(folded, rows, piece, draw, draws, seed)
            for place, change in enumerate(changes):
                nats[place, number] += turn.loss(change).double().cpu().numpy() / draws
            if on_turn:
                on_turn(turn)
        done += len(number)
        if on_rows:
            on_rows(done, count)
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

    def __init__(self, model: LanguageModel, rows: RowDataset, piece: Piece, draw: int, draws: int, seed: int) -> None:
        assert model.config.mask_id is not None
        self.model, self.rows, self.piece, self.draw, self.seed = model, rows, piece, draw, seed
        self.mask_id, self.width = model.config.mask_id, piece.x0.shape[1]
        self.corrupt: NoisyBatch = noised_rows(
            piece.x0, piece.number, piece.valid, mask_id=self.mask_id, draw=draw, draws=draws, seed=seed,
            total=len(rows),
        )  # fmt: skip
        self.at = self.corrupt.to(model.embed.weight.device)
        self.own = self._first(self.at.xt, self.at.noise_level)

    @cached_property
    def final(self) -> Tensor:
        """The denoiser's features without a change."""
        return self._second(self.own)

    @cached_property
    def gaussian(self) -> Tensor:
        """The noise of every amount."""
        return gaussian(self.seed, *self._known, (self.width, self.own.shape[2])).to(self.own.device)

    @property
    def _known(self) -> tuple[list[int], list[int]]:
        """What random numbers follow from, beside the seed."""
        return self.piece.number.tolist(), [self.draw] * len(self.piece.number)

    def _first(self, tokens: Tensor, level: Tensor) -> Tensor:
        device = self.at.xt.device
        return first_stage(self.model, tokens.to(device), level.to(device), self.at.valid)

    def _second(self, anchor: Tensor) -> Tensor:
        return second_stage(self.model, anchor, self.at.noise_level, self.at.valid)

    def features(self, change: Change) -> Tensor:
        """What the bridge is given."""
        if change.kind == "noise":
            return blur(self.own, change.amount, self.gaussian)
        if change.kind == "permuted":
            return taken(self.own, shuffles(self.seed, *self._known, self.piece.lengths.tolist(), self.width))
        if change.kind == "other_row":
            other, lengths = self.rows.fetch((self.piece.number + 1) % len(self.rows))
            round_it = torch.full((len(other),), other.shape[1]) if lengths is None else lengths
            other = other.gather(1, torch.arange(self.width) % round_it[:, None])  # a shorter row goes round and round
            return self._first(torch.where(self.corrupt.xt == self.mask_id, self.mask_id, other), self.at.noise_level)
        if change.kind == "stale":
            earlier = (self.corrupt.t + change.amount / LEVELS).clamp(max=1.0)
            # The same random numbers: what is hidden now was hidden then.
            u = CounterRng.of(self.seed, self.piece.number).uniform(self.draw, self.width, Purpose.MASK)
            padding = None if self.corrupt.valid is None else ~self.corrupt.valid
            xt = mask_tokens(self.piece.x0, 1 - SCHEDULE.alpha(earlier.double()), u, self.mask_id, padding)
            return self._first(xt, noise_level(SCHEDULE, earlier))
        return self.own

    def loss(self, change: Change) -> Tensor:
        """Each row's nats (B,)."""
        final = self.final if change == NONE else self._second(self.features(change))
        return diffusion_loss(final, self.model.head, self.at, mask_id=self.mask_id).row_nll


class ChangedNetwork:
    """The network of a predictor with the features between its stages changed; made anew for every batch.

    A row's turn is its own count of evaluations, and what is kept for later ones is its own: rows may pause.
    """

    def __init__(self, model: LanguageModel, change: Change, numbers: Sequence[int], seed: int) -> None:
        if change.kind == "other_row":
            raise ValueError("a text that is being written has no other row: use permuted, noise or stale")
        self.model, self.change, self.seed = model, change, seed
        self.numbers, self.turns = torch.tensor(numbers), torch.zeros(len(numbers), dtype=torch.int64)
        self.asked = torch.arange(len(numbers))  # the rows of the next evaluation
        self.kept: Tensor | None = None  # (B, L, dim)

    def on_rows(self, rows: Tensor) -> None:
        """Hear which rows of the batch come next."""
        self.asked = rows

    def final(self, tokens: Tensor, noise_level: Tensor | None, valid: Tensor | None) -> Tensor:
        """The denoiser's features of these rows."""
        turns, change = self.turns[self.asked], self.change
        self.turns[self.asked] += 1
        if change.kind == "stale":
            anchor = self._late(turns % int(change.amount) == 0, tokens, noise_level, valid)
        else:
            anchor = first_stage(self.model, tokens, noise_level, valid)
        known = self.numbers[self.asked].tolist(), turns.tolist()
        if change.kind == "noise":
            anchor = blur(anchor, change.amount, gaussian(self.seed, *known, (anchor.shape[1], anchor.shape[2])))
        elif change.kind == "permuted":
            lengths = [anchor.shape[1]] * len(tokens) if valid is None else valid.sum(-1).tolist()
            anchor = taken(anchor, shuffles(self.seed, *known, lengths, anchor.shape[1]))
        return second_stage(self.model, anchor, noise_level, valid)

    def _late(self, is_due: Tensor, tokens: Tensor, noise_level: Tensor | None, valid: Tensor | None) -> Tensor:
        """Anchor features, computed anew for the rows whose turn it is, for others those that were kept."""
        rows, due = self.asked.to(tokens.device), is_due.nonzero()[:, 0].to(tokens.device)
        if len(due):
            level, seen = (None if each is None else each[due] for each in (noise_level, valid))
            fresh = first_stage(self.model, tokens[due], level, seen)
            if self.kept is None:
                self.kept = fresh.new_zeros(len(self.numbers), *fresh.shape[1:])
            self.kept[rows[due]] = fresh
        assert self.kept is not None  # a row's first turn is due
        return self.kept[rows]


def changed_texts(lm: LM, job: GenerationRequest, change: Change) -> Iterator[GeneratedRow]:
    """A job's texts, written with a change of the anchor features; without one, the texts of `lm.generate_rows(job)`."""
    require_two_stages(lm.model, lm.name)
    predictor = compile_for_sampling(lm.model, lm.device, is_compiled=False)
    for first in range(0, len(job.rows), job.batch):
        part = job.rows[first : first + job.batch]
        network = ChangedNetwork(predictor.model, change, [number for _, number in part], job.seed)
        predictor.final, predictor.on_rows = network.final, network.on_rows
        *_, frame = denoise_rows(predictor, job, part)
        for (layout, _), ids, nfe in zip(part, frame.tokens.tolist(), frame.nfe.tolist(), strict=True):
            yield GeneratedRow(layout, ids[: len(layout)], nfe)
