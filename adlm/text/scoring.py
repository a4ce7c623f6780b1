"""How likely is a text? A bound with its standard error for a masked model, exactly for a causal one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adlm.diffusion.masking import ForwardProcess, corrupt, shift_tokens
from adlm.diffusion.objectives import training_loss
from adlm.diffusion.rng import CounterRng
from adlm.methods import METHODS
from adlm.models.language_model import LanguageModel
from adlm.text.templates import Layout


@dataclass(frozen=True)
class Score:
    """Nats per token of a text, its standard error over the noise, and bits per byte. A bound unless `is_exact`."""

    nll: float
    stderr: float
    tokens: int
    bits_per_byte: float
    is_exact: bool

    @property
    def ppl(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf


@torch.no_grad()
def score_rows(
    model: LanguageModel,
    layouts: Sequence[Layout],
    asked: Sequence[tuple[int, int]],
    *,
    method: str,
    draws: int,
    seed: int,
    batch: int,
) -> list[Score]:
    """Scores of rows of given text, each `asked` for so many tokens and bytes: what begins and ends it is given.

    Every text gets `draws` noises, their times spread evenly; a text's score does not depend on its neighbours. The
    draws are counted as if they were independent, so the standard error is on the safe side.
    """
    config, device = model.config, model.embed.weight.device
    draws = 1 if config.is_causal else draws
    if draws < 2 and not config.is_causal:
        raise ValueError(f"draws must be at least 2, or there is no standard error; got {draws}: 64 is usual")
    numbers = [(text, draw) for text in range(len(layouts)) for draw in range(draws)]
    nats = torch.zeros(len(layouts), draws, dtype=torch.float64)
    for start in range(0, len(numbers), batch):
        part = numbers[start : start + batch]
        rows = [layouts[text] for text, _ in part]
        widest = max(len(row) for row in rows)
        x0 = torch.tensor([[*row.ids, *[0] * (widest - len(row))] for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        valid = torch.arange(widest) < lengths[:, None]
        if config.is_causal:
            noised = shift_tokens(x0, valid=valid)
        else:
            assert config.mask_id is not None
            draw = torch.tensor([number for _, number in part])
            is_frame = torch.ones_like(valid)
            for i, row in enumerate(rows):
                for span in row.spans:
                    is_frame[i, span.start : span.end] = False
            noised = corrupt(
                x0,
                ForwardProcess(config.mask_id),
                CounterRng.from_seed(seed, draw),
                0,
                index=draw,
                total=draws,
                valid=valid,
                is_fixed=is_frame,
            )
        loss = training_loss(model, noised.to(device), score_entropy=METHODS[method].score_entropy)
        for (text, number), value in zip(part, loss.row_nll.double().tolist(), strict=True):
            nats[text, number] = value
    scores = []
    for (tokens, size), values in zip(asked, nats, strict=True):
        error = 0.0 if config.is_causal else float(values.std() / math.sqrt(draws))
        mean = float(values.mean())
        scores.append(
            Score(mean / tokens, error / tokens, tokens, mean / math.log(2) / size, is_exact=config.is_causal)
        )
    return scores
