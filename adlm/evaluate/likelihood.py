"""Held-out likelihood: the NELBO with fixed noise, as a mean with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from adlm.data.batches import Fetch, TensorRows, is_valid
from adlm.diffusion.masking import Noised, corrupt, shifted
from adlm.diffusion.objectives import Loss
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear, NoiseSchedule
from adlm.methods import training_loss
from adlm.models.language_model import LanguageModel


class Bound(NamedTuple):
    """Nats per token and the standard error over rows. For a masked model an upper bound, for a causal one exact."""

    nll: float
    stderr: float
    tokens: int

    @property
    def ppl(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf  # of a model that diverged


@torch.no_grad()
def held_out_bound(
    model: LanguageModel,
    rows: Tensor | Fetch,
    *,
    batch: int = 32,
    draws: int = 1,
    seed: int = 0,
    schedule: NoiseSchedule | None = None,
    steps: int | None = None,
    score_entropy: bool = False,
    attend_padding: bool = False,
    first: int | None = None,
    loss_of: Callable[[Noised], Loss] | None = None,
    rank: int = 0,
    size: int = 1,
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> Bound:
    """The NELBO of rows (n, L), never with an anchor term; `draws` noises each, the same for every model.

    Continuous time, or with `steps` the bound of a process with that many steps. `first` takes only so many rows.

    A row's noise follows from (seed, its number, the draw), its time from its place among all rows: the batch size
    changes nothing but rounding, nor does the number of processes (`rank` of `size`, which `total` adds up over; a
    model that they share is asked through `loss_of`, equally often by each).
    """
    source = TensorRows(rows) if isinstance(rows, Tensor) else rows
    count = len(source) if first is None else min(first, len(source))
    if count < 2:
        raise ValueError(f"a standard error needs at least 2 rows, got {count}")
    is_causal, device, was_training = model.config.is_causal, model.embed.weight.device, model.training
    draws = 1 if is_causal else draws
    sums = torch.zeros(2, count, dtype=torch.float64)  # each row's nats and tokens
    model.eval()
    pieces = torch.arange(count).split(batch)
    try:
        for turn in range(-(-len(pieces) // size)):
            mine = turn * size + rank
            number = pieces[min(mine, len(pieces) - 1)]  # a process without a piece keeps the others company
            x0, lengths = source.fetch(number)
            valid = None if lengths is None else is_valid(lengths, x0.shape[1])
            rng = CounterRng.of(seed, number)
            nll = torch.zeros(len(number), dtype=torch.float64)
            for draw in range(draws):
                if is_causal:
                    noised = shifted(x0, valid=valid)
                else:
                    assert model.config.mask_id is not None
                    noised = corrupt(
                        x0,
                        schedule or LogLinear(),
                        rng,
                        draw,
                        mask_id=model.config.mask_id,
                        index=number,
                        total=count,
                        steps=steps,
                        valid=valid,
                        attend_padding=attend_padding,
                    )
                noised = noised.to(device)
                loss = loss_of(noised) if loss_of else training_loss(model, noised, score_entropy=score_entropy)
                nll += loss.row_nll.double().cpu() / draws
            # A causal model is not asked for the first token.
            tokens = torch.full_like(nll, x0.shape[1]) if lengths is None else lengths.double()
            if mine < len(pieces):
                sums[:, number] += torch.stack([nll, tokens - int(is_causal)])
    finally:
        model.train(was_training)
    nll, tokens = total(sums)
    if not bool(torch.isfinite(nll).all()):
        bad = (~torch.isfinite(nll)).nonzero()[:, 0].tolist()
        raise FloatingPointError(f"the loss of {len(bad)} held-out rows is not finite, row {bad[0]} among them")
    mean = nll.sum() / tokens.sum()
    # Of a ratio: rows may differ in length.
    error = (nll - mean * tokens).square().sum().mul(count / (count - 1)).sqrt() / tokens.sum()
    return Bound(float(mean), float(error), int(tokens.sum()))


def unigram_nll(counts: Tensor, tokens: Tensor, valid: Tensor | None = None) -> float:
    """Nats per token of the model that knows only how often each token was counted (V,), with one added to each count:
    what a bound must beat."""
    nll = -((counts.double() + 1) / (counts.sum() + len(counts))).log()[tokens]
    return float(nll.mean() if valid is None else nll[valid].mean())
