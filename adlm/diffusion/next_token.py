"""Left-to-right sampling for the causal models: one new token an evaluation, over a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.diffusion.categorical import Limits, SamplingParams, draw
from adlm.diffusion.denoise import Frame, LogitsAt
from adlm.diffusion.rng import CounterRng, Purpose

# The tokens that follow those read so far (B, n) -> features of the last of them (B, dim)
PredictNext = Callable[[Tensor], Tensor]


def continue_tokens(
    xt: Tensor,
    predict_next: PredictNext,
    logits_at: LogitsAt,
    *,
    is_fixed: Tensor,
    rng: CounterRng,
    how: SamplingParams | None = None,
    limits: Limits | None = None,
) -> Iterator[Frame]:
    """Fill what is not fixed in xt (B, L), left to right; fixed tokens are read, never altered. Yields a frame a token.

    A hole between fixed tokens is filled from its left side only: a causal model cannot see the right.
    """
    if not bool(is_fixed[:, 0].all()):
        raise ValueError("a causal model continues text: position 0 of every row must be given (the BOS token, say)")
    xt, how = xt.to(torch.int64).clone(), how or SamplingParams()
    batch, length = xt.shape
    is_fixed = is_fixed.cpu()
    is_masked = ~is_fixed
    nfe = torch.zeros(batch, dtype=torch.int64)
    given = int(is_fixed.long().cumprod(-1).sum(-1).min())  # the prefix that all rows have is read at once
    read = 0
    for position in range(given, length):
        features = predict_next(xt[:, read:position])
        read = position
        u = rng.pairs(position, 1, 1, Purpose.SAMPLE)[1][0, :, 0].to(xt.device)
        logits = logits_at(features)
        if limits is not None:
            logits = limits.applied(logits, torch.arange(batch) * length + position)
        drawn = draw(logits, u, how).tokens
        is_new = ~is_fixed[:, position]
        nfe += is_new  # as if the row were alone: its neighbours' prompts may be shorter
        xt[:, position] = torch.where(is_new.to(xt.device), drawn, xt[:, position])
        is_masked[:, position] = False
        changed = torch.zeros_like(is_fixed)
        changed[:, position] = is_new
        yield Frame(position - given + 1, xt.clone(), is_masked.clone(), changed, nfe.clone())
    if given == length:
        yield Frame(1, xt, is_masked, torch.zeros_like(is_fixed), nfe)
