"""Run a model in the samplers: tokens with masks in, frames out."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion.categorical import SamplingParams, TokenLimits
from adlm.diffusion.denoising import Frame, continue_tokens, denoise
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.diffusion.rng import CounterRng
from adlm.models.language_model import LanguageModel

Inputs = tuple[Tensor | None, ...]
ALIGN = 64  # half-precision products on a GPU are fastest when rows start on this boundary


class CudaGraph:
    """A CUDA graph of a function for one set of shapes; the next call overwrites its output."""

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

    By default in bfloat16 on a GPU. Compiling takes a while and pays when many texts are sampled.
    With `fixed_batch` every evaluation has exactly that many rows (more are split, fewer padded), so that even on a
    GPU, whose kernels round differently at different sizes, a row's text does not depend on its batch.
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
        broken = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
        if broken:
            problem = f"{len(broken)} parameters are not finite, for example {broken[0]}"
            raise ValueError(
                f"{problem}: training of this model has diverged; use an earlier checkpoint"
            )
        self.model = model.fold().to(
            device, dtype or (torch.bfloat16 if is_cuda else torch.float32)
        )
        self.config, self.device, self.fixed_batch, self.max_batch = (
            model.config,
            device,
            fixed_batch,
            1,
        )
        head = self.model.head
        bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias.clone()
        if self.config.mask_id is not None:
            bias[self.config.mask_id] = -torch.inf
        pad = -len(bias) % ALIGN if is_cuda else 0
        self.head = F.pad(head.weight, (0, 0, 0, pad)), F.pad(bias, (0, pad), value=-torch.inf)
        if self.model.positions is None:
            self.model.rotary(
                self.head[0].device
            )  # before compiling, which would compute the angles in every layer
        self.is_compiled = is_cuda and is_compiled
        if self.is_compiled:
            self.compiled = torch.compile(
                lambda tokens, level, valid: self.model(tokens, level, valid=valid).final
            )
            self.graphs: dict[tuple[int, ...], CudaGraph] = {}
            self.pool = torch.cuda.graph_pool_handle()

    def predict(
        self,
        tokens: Tensor,
        noise_level: Tensor,
        valid: Tensor | None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return features (n, L, dim) of n rows; on a GPU they are valid until the next call."""
        rows = size = tokens.shape[0]
        if self.fixed_batch is not None and rows > self.fixed_batch:
            parts = [
                [None] * rows if x is None else x.split(self.fixed_batch)
                for x in (tokens, noise_level, valid)
            ]
            return torch.cat([self.predict(*part).clone() for part in zip(*parts, strict=False)])
        level = noise_level.to(self.device) if self.config.time_conditioning else None
        if self.fixed_batch is not None:
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
            features: Tensor = self.model(tokens, level, valid=valid).final
            return features[:rows]
        shape = (*tokens.shape, valid is not None)
        if shape not in self.graphs:
            self.graphs[shape] = CudaGraph(self.compiled, (tokens, level, valid), self.pool)
        return self.graphs[shape]((tokens, level, valid))[:rows]

    def logits_at(self, features: Tensor) -> Tensor:
        """Return logits (N, V), on a GPU padded; the mask token and the padding are impossible."""
        return F.linear(features, *self.head)

    def pad_limits(self, limits: TokenLimits) -> TokenLimits:
        """Return limits for the logits of the head, which may be wider than the vocabulary."""
        extra = self.head[1].numel() - limits.banned.shape[1]
        return TokenLimits(
            limits.kind.cpu(), F.pad(limits.banned, (0, extra), value=True).to(self.device)
        )


compile_for_sampling = Predictor  # the public name: make it once, use it for many calls


def stream_tokens(
    predictor: Predictor,
    xt: Tensor,
    sampler: Plan | Order | None = None,
    *,
    seed: int | Tensor,  # or one for each row
    rows: Tensor
    | None = None,  # their own numbers: a row's text depends on the seed and its number alone
    sampling: SamplingParams | None = None,
    is_fixed: Tensor | None = None,
    valid: Tensor | None = None,
    limits: TokenLimits | None = None,
    block: int | None = None,
) -> Iterator[Frame]:
    """Fill the mask tokens of xt (B, L) and return the frames; a causal model has no sampler and goes left to right."""
    config, xt = predictor.config, xt.to(predictor.device)
    if xt.shape[1] > config.length:
        raise ValueError(
            f"a row has {xt.shape[1]} tokens, this model's rows at most {config.length}: shorten it"
        )
    predictor.max_batch = max(predictor.max_batch, xt.shape[0])
    rng = CounterRng.from_seed(seed, xt.shape[0] if rows is None else rows)
    is_fixed, valid = (None if x is None else x.to(xt.device) for x in (is_fixed, valid))
    limits = None if limits is None else predictor.pad_limits(limits)
    same: dict[str, Any] = {"rng": rng, "sampling": sampling, "limits": limits}
    if config.is_causal:
        if sampler is not None or block is not None:
            raise ValueError(
                "a causal model samples from left to right: leave sampler and block out"
            )
        if is_fixed is None:
            raise ValueError(
                "is_fixed is None: a causal model has no mask token, so say which tokens are given"
            )
        is_fixed = is_fixed if valid is None else is_fixed | ~valid  # padding is never generated
        model, cache = predictor.model, predictor.model.new_cache(*xt.shape)
        same |= {
            "predict_next": lambda tokens: model(tokens, cache=cache).final[:, -1],
            "is_fixed": is_fixed,
        }
        return continue_tokens(xt, logits_at=predictor.logits_at, **same)
    if sampler is None or isinstance(sampler, str):
        raise ValueError(
            f"sampler is {sampler!r}: make one with adlm.build_sampler(NAME), as a masked model needs"
        )
    assert config.mask_id is not None
    same |= {"mask_id": config.mask_id, "is_fixed": is_fixed, "valid": valid, "block": block}
    return denoise(xt, sampler, predictor.predict, predictor.logits_at, **same)
