"""Left-to-right sampling for causal models: one new token per evaluation, with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adlm.diffusion.categorical import SamplingParams, TokenLimits, draw
from adlm.diffusion.denoising import Frame, LogitsAt
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
    sampling: SamplingParams | None = None,
    limits: TokenLimits | None = None,
) -> Iterator[Frame]:
    """Fill what is not fixed in xt (B, L) from left to right and yield a frame a token.

    Fixed tokens are read, never altered; one after a hole does not influence what is drawn before it.
    """
    if not bool(is_fixed[:, 0].all()):
        raise ValueError("position 0 of every row must be fixed for a causal model: a BOS token, for example")
    xt, sampling = xt.to(torch.int64).clone(), sampling or SamplingParams()
    batch, length = xt.shape
    is_fixed = is_fixed.cpu()
    is_masked = ~is_fixed
    nfe = torch.zeros(batch, dtype=torch.int64)
    given = int(is_fixed.long().cumprod(-1).sum(-1).min())  # the prefix that all rows have is read at once
    read = 0
    for position in range(given, length):
        with torch.no_grad():
            features = predict_next(xt[:, read:position])
        read = position
        u = rng.pairs(position, 1, 1, Purpose.SAMPLE)[1][0, :, 0].to(xt.device)
        logits = logits_at(features)
        if limits is not None:
            logits = limits.apply(logits, torch.arange(batch) * length + position)
        drawn = draw(logits, u, sampling).tokens
        is_new = ~is_fixed[:, position]
        nfe += is_new  # as if the row were alone: its neighbors' prompts may be shorter
        xt[:, position] = torch.where(is_new.to(xt.device), drawn, xt[:, position])
        is_masked[:, position] = False
        changed = torch.zeros_like(is_fixed)
        changed[:, position] = is_new
        yield Frame(position - given + 1, xt.clone(), is_masked.clone(), changed, nfe.clone())
    if given == length:
        yield Frame(1, xt, is_masked, torch.zeros_like(is_fixed), nfe)
