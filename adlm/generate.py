"""Bind a model to the samplers: tokens with holes in, frames out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.categorical import Limits, SamplingParams
from adlm.diffusion.denoise import Frame, OnRows, denoise
from adlm.diffusion.next_token import continue_tokens
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.diffusion.rng import CounterRng
from adlm.models.language_model import LanguageModel, ModelConfig

Inputs = tuple[Tensor | None, ...]
ALIGN = 64  # a GPU's half-precision product wants rows that start on a boundary


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is this process's GPU if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from error
    if device.type not in ("cpu", "cuda"):  # torch knows others, such as mps, which nothing here is made for
        raise ValueError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {name!r}: this torch sees no CUDA device; use device=cpu, or auto")
        if device.index is None:
            device = torch.device("cuda", local_rank)
        if device.index >= torch.cuda.device_count():
            raise ValueError(
                f"there is no {device}: this node has {torch.cuda.device_count()} GPUs; start as many processes as it "
                "has (torchrun --nproc-per-node), or name one that is there"
            )
    return device


class Graph:
    """A CUDA graph of a function for one set of shapes. Its output is overwritten by the next call."""

    def __init__(self, function: Callable[..., Tensor], inputs: Inputs, pool: Any) -> None:
        self.inputs = tuple(None if x is None else x.clone() for x in inputs)
        for x in self.inputs:
            if x is not None and x.shape[0] > 1:
                torch._dynamo.mark_dynamic(x, 0)  # one compilation for every number of rows
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile and warm up outside the capture
            for _ in range(3):
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.output = function(*self.inputs)

    def __call__(self, inputs: Inputs) -> Tensor:
        for static, fresh in zip(self.inputs, inputs, strict=True):
            if static is not None and fresh is not None:
                static.copy_(fresh)
        self.graph.replay()
        return self.output


class Predictor:
    """A model as the samplers see it: folded, on its device, on a GPU compiled into graphs of few batch sizes.

    With a `fixed_batch` the network always sees that many rows, padded or in turns: then on a GPU, too, whose kernels
    round differently at different sizes, a row's text does not depend on its batch.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        fixed_batch: int | None = None,
        is_compiled: bool = True,
    ) -> None:
        device = torch.device(device)
        is_cuda = device.type == "cuda"
        if fixed_batch is not None and fixed_batch < 1:
            raise ValueError(f"fixed_batch must be at least 1 row, or None, got {fixed_batch}")
        broken = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
        if broken:
            raise ValueError(
                f"{len(broken)} parameters are not finite, {broken[0]} among them: this model has diverged"
            )
        self.model = model.fold().to(device, dtype or (torch.bfloat16 if is_cuda else torch.float32))
        self.config, self.device, self.fixed_batch, self.max_batch = model.config, device, fixed_batch, 1
        head = self.model.head
        bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias.clone()
        if self.config.mask_id is not None:
            bias[self.config.mask_id] = -torch.inf
        pad = -len(bias) % ALIGN if is_cuda else 0
        self.head = F.pad(head.weight, (0, 0, 0, pad)), F.pad(bias, (0, pad), value=-torch.inf)
        if self.model.positions is None:
            self.model.rotary(self.head[0].device)  # before compiling, which would compute the angles in every layer
        self.is_compiled = is_cuda and is_compiled
        self.final = torch.compile(self._final) if self.is_compiled else self._final
        self.graphs: dict[tuple[int, ...], Graph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.is_compiled else None
        self.on_rows: OnRows | None = None  # hears which rows of a batch `predict` is asked for next

    def _final(self, tokens: Tensor, noise_level: Tensor | None, valid: Tensor | None) -> Tensor:
        return self.model(tokens, noise_level, valid=valid).final

    def predict(self, tokens: Tensor, noise_level: Tensor, valid: Tensor | None) -> Tensor:
        """Features (n, L, dim) of n rows; on a GPU they are good until the next call."""
        level = noise_level.to(self.device) if self.config.time_conditioning else None
        most = self.fixed_batch or tokens.shape[0]
        if tokens.shape[0] <= most:
            return self._predict(tokens, level, valid)
        parts = [[None] * len(tokens) if x is None else x.split(most) for x in (tokens, level, valid)]
        return torch.cat([self._predict(*part).clone() for part in zip(*parts, strict=False)])

    def _predict(self, tokens: Tensor, level: Tensor | None, valid: Tensor | None) -> Tensor:
        rows = size = tokens.shape[0]
        if self.fixed_batch:
            size = self.fixed_batch
        elif self.is_compiled:  # eight sizes up to the largest batch
            self.max_batch = max(self.max_batch, rows)
            unit = max(1, self.max_batch // 8)
            size = min(self.max_batch, -(-rows // unit) * unit)
        if size > rows:
            repeat = torch.arange(size, device=tokens.device).clamp(max=rows - 1)
            tokens = tokens[repeat]
            level, valid = (None if x is None else x[repeat] for x in (level, valid))
        if not self.is_compiled:
            return self.final(tokens, level, valid)[:rows]
        shape = (*tokens.shape, valid is not None)
        if shape not in self.graphs:
            self.graphs[shape] = Graph(self.final, (tokens, level, valid), self.pool)
        return self.graphs[shape]((tokens, level, valid))[:rows]

    def logits_at(self, features: Tensor) -> Tensor:
        """Logits (N, V), on a GPU a few more; the mask token and what lies beyond the vocabulary are impossible."""
        return F.linear(features, *self.head)


def compile_for_sampling(
    model: LanguageModel,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    fixed_batch: int | None = None,
    is_compiled: bool = True,
) -> Predictor:
    """Make a model ready to sample: make it once, use it for many calls (a GPU: bfloat16 unless told).

    On a GPU it is compiled, which takes a while and pays when many texts are sampled.
    """
    return Predictor(model, device, dtype, fixed_batch=fixed_batch, is_compiled=is_compiled)


@torch.no_grad()
def stream_tokens(
    predictor: Predictor,
    xt: Tensor,
    sampler: Plan | Order | None = None,
    *,
    seed: int,
    rows: Tensor | None = None,
    how: SamplingParams | None = None,
    is_fixed: Tensor | None = None,
    valid: Tensor | None = None,
    limits: Limits | None = None,
    block: int | None = None,
) -> Iterator[Frame]:
    """Fill the mask tokens of xt (B, L) and yield frames; a causal model needs no sampler and goes left to right.

    `rows` are the numbers that the rows are known by: a row's text depends on the seed and its number alone.
    """
    config, xt = predictor.config, xt.to(predictor.device)
    if xt.shape[1] > config.length:
        raise ValueError(f"{xt.shape[1]} tokens are longer than this model's length of {config.length}")
    if rows is not None and rows.shape != xt.shape[:1]:
        raise ValueError(f"rows has shape {tuple(rows.shape)}: give one number for each of the {xt.shape[0]} rows")
    if isinstance(sampler, str):
        raise ValueError(f"sampler is a name, {sampler!r}: make it with adlm.build_sampler({sampler!r}, ...) first")
    predictor.max_batch = max(predictor.max_batch, xt.shape[0])
    rng = CounterRng.of(seed, xt.shape[0] if rows is None else rows)
    is_fixed = None if is_fixed is None else is_fixed.to(xt.device)
    valid = None if valid is None else valid.to(xt.device)
    if limits is not None:  # a head may be wider than the vocabulary
        extra = predictor.head[1].numel() - limits.banned.shape[1]
        limits = Limits(limits.kind.cpu(), F.pad(limits.banned, (0, extra), value=True).to(xt.device))
    if config.is_causal:
        if sampler is not None or block is not None:
            raise ValueError("a causal model samples from left to right: leave sampler and block out")
        if is_fixed is None:
            raise ValueError("is_fixed must say which tokens are given: a causal model has no mask token to tell")
        is_fixed = is_fixed if valid is None else is_fixed | ~valid  # padding is no one's to write
        model = predictor.model
        cache = model.new_cache(xt.shape[0], xt.shape[1])
        yield from continue_tokens(
            xt,
            lambda tokens: model(tokens, cache=cache).final[:, -1],
            predictor.logits_at,
            is_fixed=is_fixed,
            rng=rng,
            how=how,
            limits=limits,
        )
        return
    if sampler is None:
        raise ValueError("a masked model needs a sampler: adlm.build_sampler makes one by name")
    assert config.mask_id is not None
    yield from denoise(
        xt,
        sampler,
        predictor.predict,
        predictor.logits_at,
        mask_id=config.mask_id,
        rng=rng,
        how=how,
        is_fixed=is_fixed,
        valid=valid,
        limits=limits,
        block=block,
        on_rows=predictor.on_rows,
    )


def blank_rows(
    config: ModelConfig, tokenizer: Tokenizer, rows: int, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows to be written, (rows, length), and what of them is given: nothing but, for a causal model, the beginning."""
    length = length or config.length
    if not 1 <= length <= config.length:
        raise ValueError(f"length must be between 1 and this model's {config.length}, got {length}")
    is_fixed = torch.zeros(rows, length, dtype=torch.bool)
    if not config.is_causal:
        assert config.mask_id is not None
        return torch.full((rows, length), config.mask_id), is_fixed
    if tokenizer.bos_id is None:
        raise ValueError("a causal model begins with a BOS token, and this tokenizer has none")
    is_fixed[:, 0] = True
    return torch.full((rows, length), tokenizer.bos_id), is_fixed


def generate_texts(
    predictor: Predictor,
    tokenizer: Tokenizer,
    sampler: Plan | Order | None,
    *,
    rows: int = 1,
    seed: int = 0,
    length: int | None = None,
    how: SamplingParams | None = None,
) -> list[str]:
    """Texts from nothing, one a row; special tokens are left out of them."""
    xt, is_fixed = blank_rows(predictor.config, tokenizer, rows, length)
    *_, frame = stream_tokens(predictor, xt, sampler, seed=seed, how=how, is_fixed=is_fixed)
    return [tokenizer.decode(row, skip_special=True) for row in frame.tokens.tolist()]
