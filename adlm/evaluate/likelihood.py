"""Held-out likelihood: the NELBO with fixed noise, as a mean with its standard error."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from adlm.diffusion.masking import corrupt, shifted
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
        return math.exp(self.nll)


@torch.no_grad()
def held_out_bound(
    model: LanguageModel,
    rows: Tensor,
    *,
    batch: int = 32,
    draws: int = 1,
    seed: int = 0,
    schedule: NoiseSchedule | None = None,
    steps: int | None = None,
    score_entropy: bool = False,
) -> Bound:
    """The NELBO of rows (n, L), never with an anchor term; `draws` noises each, the same for every model.

    Continuous time, or with `steps` the bound of a process with that many steps.

    A row's noise follows from (seed, its number, the draw), its time from its place among all rows: the batch size
    changes nothing but rounding.
    """
    if rows.shape[0] < 2:
        raise ValueError(f"a standard error needs at least 2 rows, got {rows.shape[0]}")
    is_causal, device, was_training = model.config.is_causal, model.embed.weight.device, model.training
    draws = 1 if is_causal else draws
    row_nll = torch.zeros(rows.shape[0], dtype=torch.float64)
    model.eval()
    try:
        for first in range(0, rows.shape[0], batch):
            x0 = rows[first : first + batch]
            number = torch.arange(first, first + len(x0))
            rng = CounterRng.of(seed, number)
            for draw in range(draws):
                if is_causal:
                    noised = shifted(x0)
                else:
                    assert model.config.mask_id is not None
                    noised = corrupt(
                        x0,
                        schedule or LogLinear(),
                        rng,
                        draw,
                        mask_id=model.config.mask_id,
                        index=number,
                        total=rows.shape[0],
                        steps=steps,
                    )
                loss = training_loss(model, noised.to(device), score_entropy=score_entropy)
                row_nll[number] += loss.row_nll.double().cpu() / draws
    finally:
        model.train(was_training)
    length = rows.shape[1] - is_causal  # a causal model is not asked for the first token
    row_nll /= length
    return Bound(float(row_nll.mean()), float(row_nll.std() / math.sqrt(len(row_nll))), row_nll.numel() * length)


def unigram_nll(counts_from: Tensor, tokens: Tensor, vocab_size: int) -> float:
    """Nats per token of the model that knows only how frequent tokens are (add-one counts): what a bound must beat."""
    counts = torch.bincount(counts_from.flatten(), minlength=vocab_size).double() + 1
    return float(-(counts / counts.sum()).log()[tokens.flatten()].mean())
