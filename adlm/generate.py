"""Bind a model to the samplers: tokens with holes in, frames out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adlm.diffusion.categorical import Draw
from adlm.diffusion.denoise import Frame, denoise
from adlm.diffusion.next_token import continue_tokens
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.diffusion.rng import CounterRng
from adlm.models.language_model import LanguageModel


class Predictor:
    """A folded model as the samplers see it. On a GPU it is compiled into graphs of few batch sizes.

    `deterministic` pads every call to one batch size, so that a row's features do not depend on how many others
    needed an evaluation.
    """

    def __init__(self, model: LanguageModel, *, deterministic: bool = False) -> None:
        self.model = model
        self.deterministic = deterministic
        self.largest = 0
        self.final = self._final
        if model.embed.weight.is_cuda:
            self.final = torch.compile(self._final, mode="max-autotune-no-cudagraphs" if False else "reduce-overhead", dynamic=False)

    def _final(self, tokens: Tensor, noise_level: Tensor, valid: Tensor | None) -> Tensor:
        return self.model(tokens, noise_level, valid=valid).final

    def __call__(self, tokens: Tensor, noise_level: Tensor, valid: Tensor | None) -> Tensor:
        rows = tokens.shape[0]
        self.largest = max(self.largest, rows)
        size = rows
        if self.deterministic:
            size = self.largest
        elif tokens.is_cuda:
            size = min(self.largest, 1 << (rows - 1).bit_length())
        if size > rows:
            repeat = torch.arange(size, device=tokens.device).clamp(max=rows - 1)
            tokens, noise_level = tokens[repeat], noise_level[repeat]
            valid = None if valid is None else valid[repeat]
        return self.final(tokens, noise_level, valid)[:rows]


def ready(model: LanguageModel, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> LanguageModel:
    """The inference form on a device: folded in the dtype it has, then cast (a GPU: bfloat16 unless told)."""
    device = torch.device(device)
    return model.fold().to(device, dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32))


@torch.no_grad()
def stream_tokens(
    model: LanguageModel,
    xt: Tensor,
    sampler: Plan | Order | None = None,
    *,
    seed: int,
    rows: Tensor | None = None,
    how: Draw | None = None,
    is_fixed: Tensor | None = None,
    valid: Tensor | None = None,
    block: int | None = None,
    deterministic: bool = False,
) -> Iterator[Frame]:
    """Fill the mask tokens of xt (B, L) and yield frames; a causal model needs no sampler and goes left to right.

    `rows` are the numbers that the rows are known by: a row's text depends on the seed and its number alone.
    """
    rng = CounterRng.of(seed, xt.shape[0] if rows is None else rows, xt.device)
    config = model.config
    if config.is_causal:
        if sampler is not None or block is not None:
            raise ValueError("a causal model samples from left to right: leave sampler and block out")
        if is_fixed is None:
            raise ValueError("is_fixed must say which tokens are given: a causal model has no mask token to tell")
        cache = model.new_cache(xt.shape[0], xt.shape[1])
        yield from continue_tokens(
            xt,
            lambda tokens: model(tokens, cache=cache).final[:, -1],
            model.logits_at,
            is_fixed=is_fixed,
            rng=rng,
            how=how,
        )
        return
    if sampler is None:
        raise ValueError("a masked model needs a sampler: see adlm.methods.SAMPLERS")
    assert config.mask_id is not None
    yield from denoise(
        xt,
        sampler,
        Predictor(model, deterministic=deterministic),
        model.logits_at,
        mask_id=config.mask_id,
        rng=rng,
        how=how,
        is_fixed=is_fixed,
        valid=valid,
        block=block,
        time_conditioning=config.time_conditioning,
    )
