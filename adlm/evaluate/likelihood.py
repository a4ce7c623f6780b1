"""Held-out likelihood, a bound with fixed noise or exact for a causal model, as a mean with its standard errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.data.batches import RowDataset, TensorRows, is_valid
from adlm.diffusion.masking import NoisyBatch, corrupt, shift_tokens
from adlm.diffusion.objectives import Loss
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.schedules import LogLinear, NoiseSchedule
from adlm.evaluate.metrics import Bound, Likelihood, noise_variance, units_of
from adlm.methods import training_loss
from adlm.models.language_model import LanguageModel

Told = Callable[[int, int], None]  # rows done, rows in all


@dataclass(frozen=True)
class Piece:
    """Some rows, and which of their tokens count."""

    number: Tensor  # (n,): what each row's noise is known by
    x0: Tensor  # (n, L)
    valid: Tensor | None  # (n, L), False at padding; None if there is none
    is_given: Tensor | None  # (n, L): marks, which are always visible and not counted; None if all tokens are asked for
    counted: Tensor  # (n, L)


@dataclass(frozen=True)
class Walk:
    """How rows are gone through, and what counts.

    `marks` are tokens that are given wherever they stand: visible, not counted. `first` takes only so many rows. Of
    `size` processes this is number `rank`, and `total` adds up over them. `documents` (n,) numbers the document that
    each row begins in: the standard error is over documents, without it over rows. `on_rows` hears how far it is.
    """

    batch: int = 32
    first: int | None = None
    marks: Sequence[int] = ()
    documents: Tensor | None = None
    rank: int = 0
    size: int = 1
    total: Callable[[Tensor], Tensor] = lambda x: x
    on_rows: Told | None = None

    def measure(
        self,
        rows: Tensor | RowDataset,
        nats_of: Callable[[Piece, int], Tensor],
        *,
        draws: int,
        is_exact: bool = False,
        skips_first: bool = False,
        times: Callable[[int], Tensor] | None = None,
    ) -> Bound:
        """The mean of the nats (n, draws) that every piece has (it is told of how many rows it is a piece).

        Without noise it `is_exact`; a causal model `skips_first`, which it is not asked for. `times` says of so
        many rows at which times (n, draws) their draws are.
        """
        source = TensorRows(rows) if isinstance(rows, Tensor) else rows
        count = len(source) if self.first is None else min(self.first, len(source))
        documents = None if self.documents is None else self.documents[:count]
        units_of(count, documents)  # what is wrong with them is said before anything runs
        sums = torch.zeros(2, count, dtype=torch.float64)  # each row's nats and tokens
        every = torch.zeros(count, draws, dtype=torch.float64)
        pieces = torch.arange(count).split(self.batch)
        for turn in range(-(-len(pieces) // self.size)):
            mine = turn * self.size + self.rank
            number = pieces[min(mine, len(pieces) - 1)]  # a process without a piece keeps the others company
            x0, lengths = source.fetch(number)
            valid = None if lengths is None else is_valid(lengths, x0.shape[1])
            is_given = torch.isin(x0, torch.tensor(list(self.marks))) if self.marks else None
            counted = torch.ones_like(x0, dtype=torch.bool) if valid is None else valid.clone()
            if is_given is not None:
                counted &= ~is_given
            counted[:, :1] &= not skips_first
            nats = nats_of(Piece(number, x0, valid, is_given, counted), count)
            if mine < len(pieces):
                sums[:, number] = torch.stack([nats.mean(1), counted.sum(1).double()])
                every[number] = nats
            if self.on_rows is not None:
                self.on_rows(min((turn + 1) * self.size * self.batch, count), count)
        found = Likelihood()
        found.add_rows(*self.total(sums))
        variance = torch.zeros(count) if is_exact else None
        if draws > 1:
            variance = noise_variance(self.total(every), found.counts, None if times is None else times(count))
        return found.bound(documents, variance=variance, draws=draws)


def place_of(number: Tensor, count: int, draw: int, draws: int, seed: int) -> Tensor:
    """Where draw number `draw` of rows by their numbers is, in n-ths of the unit interval (n = `count`), modulo n.

    The seed moves all rows alike. Without that a row would be at the same times whatever the seed, and where they are
    easy ones for it, no mean over seeds would find out. A single draw stays where the lineage has it.
    """
    turn = float(CounterRng.of(seed, 1).uniform(draws, 1, Purpose.TIME)) if draws > 1 else 0.0  # no draw's own number
    return number.double() + count * (draw / draws + turn)


@torch.no_grad()
def held_out_bound(
    model: LanguageModel,
    rows: Tensor | RowDataset,
    *,
    batch: int = 32,
    draws: int = 1,
    seed: int = 0,
    schedule: NoiseSchedule | None = None,
    steps: int | None = None,
    score_entropy: bool = False,
    attend_padding: bool = False,
    marks: Sequence[int] = (),
    documents: Tensor | None = None,
    first: int | None = None,
    loss_of: Callable[[NoisyBatch], Loss] | None = None,
    rank: int = 0,
    size: int = 1,
    total: Callable[[Tensor], Tensor] = lambda x: x,
    on_rows: Told | None = None,
) -> Bound:
    """The NELBO of rows (n, L), never with an anchor term; `draws` noises each, the same for every model.

    Continuous time, or with `steps` the bound of a process with that many steps. For `marks`, `documents`, `first` and
    sharing see `Walk`; a model that processes share is asked through `loss_of`, equally often by each.

    A row's noise follows from (seed, its number, the draw). One draw has the lineage's time: in the row's own n-th of
    the unit interval. Several are spread evenly, k / draws later each, from a beginning that the seed moves for all
    rows alike: so times are even over the draws of a row and over the rows, and over seeds every row is seen at every
    time. The batch size changes nothing but rounding, nor does the number of processes.
    """
    if draws < 1 or batch < 1:
        raise ValueError(f"draws and batch must be at least 1, got {draws} and {batch}")
    config, device, was_training = model.config, model.embed.weight.device, model.training
    draws = 1 if config.is_causal else draws

    def times(count: int) -> Tensor:
        every = torch.arange(count)
        return torch.stack([place_of(every, count, draw, draws, seed) / count % 1 for draw in range(draws)], dim=1)

    def noised_of(piece: Piece, count: int, draw: int, is_given: Tensor | None) -> NoisyBatch:
        if config.is_causal:
            return shift_tokens(piece.x0, valid=piece.counted if is_given is not None else piece.valid)
        assert config.mask_id is not None
        return corrupt(
            piece.x0,
            schedule or LogLinear(),
            CounterRng.of(seed, piece.number),
            draw,
            mask_id=config.mask_id,
            index=place_of(piece.number, count, draw, draws, seed),
            total=count,
            steps=steps,
            valid=piece.valid,
            is_fixed=is_given,
            attend_padding=attend_padding,
        )

    def nats_of(piece: Piece, count: int) -> Tensor:
        # Where all is given nothing counts, but processes that share a model must all ask it.
        is_asked = bool(piece.counted.any())
        each = []
        for draw in range(draws):
            noised = noised_of(piece, count, draw, piece.is_given if is_asked else None).to(device)
            loss = loss_of(noised) if loss_of else training_loss(model, noised, score_entropy=score_entropy)
            each.append(loss.row_nll.double().cpu() * is_asked)
        return torch.stack(each, dim=1)

    walk = Walk(batch, first, marks, documents, rank, size, total, on_rows)
    model.eval()
    try:
        is_causal = config.is_causal
        return walk.measure(rows, nats_of, draws=draws, is_exact=is_causal, skips_first=is_causal, times=times)
    finally:
        model.train(was_training)


def unigram_nll(counts: Tensor, tokens: Tensor, valid: Tensor | None = None) -> float:
    """Nats per token of the model that knows only how often each token was counted (V,), with one added to each count:
    what a bound must beat."""
    nll = -((counts.double() + 1) / (counts.sum() + len(counts))).log()[tokens]
    return float(nll.mean() if valid is None else nll[valid].mean())
