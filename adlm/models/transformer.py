"""Transformer layers: pre-norm attention and MLP, rotary positions, adaLN modulation by the noise level."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

if TYPE_CHECKING:
    from adlm.models.language_model import ModelConfig

Rotary = tuple[Tensor, Tensor]

CUDA_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def rotary_table(length: int, head_dim: int, device: torch.device) -> Rotary:
    """Return cosines and sines (length, head_dim / 2) in float32, also for a model in bfloat16."""
    frequency = 10000.0 ** (
        -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    )
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate the two halves of every head of x (B, L, heads, head_dim) by angles (L, …) or (B, L, …)."""
    cos, sin = (table.unsqueeze(-2) for table in rotary)
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class UnpaddedRows(NamedTuple):
    """Where the tokens of padded rows (B, L) are: with it, layers compute these N positions and no padding."""

    places: Tensor  # (N,): in the flattened rows; B · L at the end, where N is rounded up
    position: Tensor  # (N,): in the row
    cu_seqlens: (
        Tensor  # (S + 1,), int32: where each row begins; what rounds N up is divided into rows too
    )
    length: int  # of the longest row


def unpad(valid: Tensor) -> UnpaddedRows:
    """Find the tokens of rows whose padding is not `valid` (B, L); N is rounded up to a multiple of about B · L / √B,
    so that few shapes are compiled."""
    rows, length = valid.shape
    multiple = 64 * math.ceil(length * math.sqrt(rows) / 64)  # GPUs like round sizes
    places = valid.reshape(-1).nonzero()[:, 0]
    count = len(places)
    rounded = count + -count % multiple
    ends = torch.cat(
        [valid.sum(1).cumsum(0), count + length * torch.arange(1, math.ceil(multiple / length) + 1)]
    )
    places = F.pad(places, (0, rounded - count), value=rows * length)
    return UnpaddedRows(
        places, places % length, F.pad(ends.clamp(max=rounded), (1, 0)).int(), length
    )


def gather_rows(x: Tensor, rows: UnpaddedRows) -> Tensor:
    """Take the tokens (B, L), or features (B, L, dim), of padded rows: (1, N) or (1, N, dim)."""
    flat = x.flatten(0, 1)
    return flat.index_select(0, rows.places.clamp(max=len(flat) - 1))[None]


def scatter_rows(x: Tensor, rows: UnpaddedRows, count: int) -> Tensor:
    """Return features (1, N, dim) to `count` padded rows (B, L, dim), zero at padding."""
    flat = x.new_zeros(count * rows.length + 1, x.shape[-1])
    return flat.index_copy(0, rows.places, x[0])[:-1].view(count, rows.length, -1)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: UnpaddedRows, is_causal: bool
) -> Tensor:
    """Compute attention (1, heads, N, head_dim) within each row; without a kernel for it, by a mask (N, N)."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
        ends, window = (
            rows.cu_seqlens,
            (-1, 0 if is_causal else -1),
        )  # keys before and after a query; -1: all
        y = varlen_attn(q, k, v, ends, ends, rows.length, rows.length, window_size=window)
        assert isinstance(y, Tensor)
        return y.transpose(0, 1)[None]
    row = torch.searchsorted(rows.cu_seqlens, torch.arange(q.shape[2], device=q.device), right=True)
    mask = row == row[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.tril() if is_causal else mask)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, attend: Tensor | UnpaddedRows | None
) -> Tensor:
    """Compute scaled dot-product attention with the fastest kernel."""
    if isinstance(attend, UnpaddedRows):
        return varlen_attention(q, k, v, attend, is_causal)
    if q.is_cuda and attend is None:
        with sdpa_kernel(CUDA_KERNELS, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attend, is_causal=is_causal)


@torch.library.custom_op("adlm::gelu_in_product", mutates_args=())
def gelu_in_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute gelu(x W' + b) with the activation in the product's epilogue; a custom op, so that compilers keep it."""
    y = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], weight.shape[0])


@gelu_in_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
    """Compute the tanh-GELU of a linear map."""
    if (
        x.is_cuda
        and x.dtype == linear.weight.dtype == torch.bfloat16
        and not torch.is_grad_enabled()
    ):
        return gelu_in_product(x, linear.weight, linear.bias)
    return F.gelu(linear(x), approximate="tanh")


def rms_norm(x: Tensor) -> Tensor:
    """Divide by the root mean square over the last dimension, in float32; no parameters."""
    return F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)


class Norm(nn.Module):
    """LayerNorm computed in float32; a modulation scales and shifts its weight and bias."""

    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def affine(self, shift: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias after modulation: (norm·w + b)(1 + scale) + shift as one affine map."""
        if shift is None or scale is None:
            return self.weight, self.bias
        weight = self.weight * (1 + scale)
        return weight, shift if self.bias is None else self.bias * (1 + scale) + shift

    def forward(
        self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        weight, bias = self.affine(shift, scale)
        dim = self.weight.shape[0]
        if weight.dim() == 1:
            bias = None if bias is None else bias.float()
            return F.layer_norm(x.float(), (dim,), weight.float(), bias).to(x.dtype)
        assert bias is not None
        return (F.layer_norm(x.float(), (dim,)) * weight + bias).to(x.dtype)


def gate_weights(linear: nn.Linear, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of gate · linear(x) for a gate that is the same at every position."""
    if gate is None:
        return linear.weight, linear.bias
    return gate[:, None] * linear.weight, None if linear.bias is None else gate * linear.bias


def apply_gate(linear: nn.Linear, x: Tensor, gate: Tensor | None) -> Tensor:
    """Compute gate · linear(x); a constant gate multiplies the matrix, not the (B, L, dim) result."""
    if gate is not None and gate.dim() > 1:
        return gate * linear(x)
    return F.linear(x, *gate_weights(linear, gate))


def compute_modulations(
    linear: nn.Linear | None, cond: Tensor | None, parts: int
) -> list[Tensor | None]:
    """Return the adaLN vectors: (dim,) each when one condition serves all rows, (B, 1, dim) when rows differ."""
    if linear is None or cond is None:
        return [None] * parts
    with torch.autocast(cond.device.type, enabled=False):
        vectors = F.linear(cond.to(linear.weight.dtype), linear.weight, linear.bias)
    return list((vectors[0] if cond.shape[0] == 1 else vectors[:, None]).chunk(parts, -1))


class SlotWindow(NamedTuple):
    """Where the tokens (n, L) of a call are read in the rows of a `SlotCache`."""

    slots: Tensor | None  # (n,): rows of the cache; None: the first n
    position: Tensor  # (n, L): of the tokens in their rows
    mask: Tensor  # (n, 1, L, K): which of the first K positions each token may attend to

    @classmethod
    def open(cls, slots: Tensor | None, position: Tensor, length: int) -> Self:
        """Return a window in which each token attends to the positions up to its own, `length` at most."""
        mask = torch.arange(length, device=position.device) <= position[:, None, :, None]
        return cls(slots, position, mask)


class SlotCache:
    """One causal layer's keys and values (slots, heads, length, head_dim).

    Each row has its own length. What is written behind a row's end is overwritten before it is attended to.
    """

    def __init__(self, keys: Tensor) -> None:
        self.keys, self.values = keys, torch.zeros_like(keys)
        self.window: SlotWindow | None = None  # of the next call

    def grow(self, slots: int, length: int) -> None:
        """Make room for more rows, or longer ones."""
        missing = (0, 0, 0, length - self.keys.shape[2], 0, 0, 0, slots - self.keys.shape[0])
        self.keys, self.values = F.pad(self.keys, missing), F.pad(self.values, missing)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions (n, heads, L, head_dim) and return those that they may attend to."""
        assert self.window is not None, "a cache is used within a window"
        slots, position, mask = self.window
        count, length = len(position), mask.shape[-1]
        rows = torch.arange(count, device=k.device) if slots is None else slots
        self.keys[rows[:, None], :, position] = k.transpose(1, 2)
        self.values[rows[:, None], :, position] = v.transpose(1, 2)
        if slots is None:
            return self.keys[:count, :, :length], self.values[:count, :, :length]
        return self.keys[slots, :, :length], self.values[slots, :, :length]


class Layer(nn.Module):
    """Attention and MLP with residual connections: the DiT block of SEDD and MDLM."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, bias = config.dim, config.attention_bias
        self.heads, self.is_causal, self.dropout = config.heads, config.is_causal, config.dropout
        self.qk_norm = config.qk_norm
        self.norm1 = Norm(dim, config.norm_bias)
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)
        self.norm2 = Norm(dim, config.norm_bias)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.modulation = None if config.cond_dim is None else nn.Linear(config.cond_dim, 6 * dim)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        cond: Tensor | None = None,
        attend: Tensor | UnpaddedRows | None = None,
        cache: SlotCache | None = None,
    ) -> Tensor:
        batch, length, dim = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = compute_modulations(self.modulation, cond, 6)
        qkv = self.qkv(self.norm1(x, shift1, scale1)).view(
            batch, length, 3, self.heads, dim // self.heads
        )
        q, k, v = qkv.unbind(2)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if self.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        # Transposed views, not copies: the kernel's output has the layout of q, ready for the output projection.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        is_causal = self.is_causal and not isinstance(attend, Tensor)
        if cache is not None:
            k, v = cache.append(k, v)
        y = attention(q, k, v, is_causal=is_causal, attend=attend)
        y = y.transpose(1, 2).reshape(batch, length, dim)
        x = x + F.dropout(apply_gate(self.out, y, gate1), self.dropout, self.training).to(x.dtype)
        y = linear_gelu(self.norm2(x, shift2, scale2), self.up)
        return x + F.dropout(apply_gate(self.down, y, gate2), self.dropout, self.training).to(
            x.dtype
        )


class NoiseEmbedding(nn.Module):
    """Noise level (B,) -> conditioning vector (B, cond_dim): sinusoids, a two-layer MLP, SiLU."""

    WIDTH = 256

    def __init__(self, cond_dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(self.WIDTH, cond_dim)
        self.second = nn.Linear(cond_dim, cond_dim)

    def forward(self, noise_level: Tensor) -> Tensor:
        half = self.WIDTH // 2
        ramp = torch.arange(half, device=noise_level.device, dtype=torch.float32) / half
        angle = noise_level.float()[:, None] * torch.exp(-math.log(10000.0) * ramp)
        x = torch.cat([angle.cos(), angle.sin()], -1).to(self.first.weight.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.silu(self.second(F.silu(self.first(x))))


class Stack(nn.Module):
    """One stage: layers and the final norm, conditioned on the noise level or the constant zero; after `project_after`
    layers there is a matrix, at first the identity."""

    def __init__(self, config: ModelConfig, layers: int, project_after: int = 0) -> None:
        super().__init__()
        dim, self.project_after = config.dim, project_after
        self.condition = None if config.cond_dim is None else NoiseEmbedding(config.cond_dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(layers))
        self.norm = Norm(dim, config.norm_bias)
        self.modulation = None if config.cond_dim is None else nn.Linear(config.cond_dim, 2 * dim)
        self.states: list[Tensor] | None = None
        self.projection = (
            nn.Parameter(torch.zeros(dim, dim)) if project_after else None
        )  # minus the identity

    @contextmanager
    def collect_states(self) -> Iterator[list[Tensor]]:
        """A context with a list to which passes append the output (B, L, dim) of every layer."""
        self.states = []
        try:
            yield self.states
        finally:
            self.states = None

    def condition_on(self, noise_level: Tensor | None, device: torch.device) -> Tensor | None:
        """Return the conditioning vector (B, cond_dim); without a noise level that of zero (1, cond_dim)."""
        if self.condition is None:
            return None
        return self.condition(torch.zeros(1, device=device) if noise_level is None else noise_level)

    def forward(
        self,
        x: Tensor,
        noise_level: Tensor | None = None,
        rotary: Rotary | None = None,
        attend: Tensor | UnpaddedRows | None = None,
        caches: Sequence[SlotCache] | None = None,
    ) -> Tensor:
        cond = self.condition_on(noise_level, x.device)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, cond, attend, None if caches is None else caches[i])
            if self.projection is not None and i + 1 == self.project_after:
                x = x + F.linear(x, self.projection)
            if self.states is not None:
                self.states.append(x)
        return self.norm(x, *compute_modulations(self.modulation, cond, 2))

    def fold(self) -> dict[str, Tensor]:
        """Return the parameters with the modulation at noise level zero folded in, under the unmodulated names."""
        cond = self.condition_on(None, self.norm.weight.device)
        state: dict[str, Tensor | None] = {}
        state["norm.weight"], state["norm.bias"] = self.norm.affine(
            *compute_modulations(self.modulation, cond, 2)
        )
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            shift1, scale1, gate1, shift2, scale2, gate2 = compute_modulations(
                layer.modulation, cond, 6
            )
            folded = {
                "norm1": layer.norm1.affine(shift1, scale1),
                "norm2": layer.norm2.affine(shift2, scale2),
                "out": gate_weights(layer.out, gate1),
                "down": gate_weights(layer.down, gate2),
            }
            for name, (weight, bias) in folded.items():
                state |= {f"layers.{i}.{name}.weight": weight, f"layers.{i}.{name}.bias": bias}
        return {name: value for name, value in state.items() if value is not None}
