"""Parameters, FLOPs and memory of a model, counted or estimated from its config."""

import re
from typing import NamedTuple

from torch import nn

from adlm.models.language_model import ModelConfig, build_on_meta

LAYER_WEIGHTS = 12  # times dim²: the matrices qkv (3), out (1), up (4) and down (4)
HIDDEN_SHARE = 0.5  # of a masked model's positions, on average over t (log-linear schedule)
MAX_LOGIT_ROWS = {True: 24576, False: 256}  # rows of logits at a time, on CUDA or not: those of diffusion/selected.py

# Values a layer saves for its backward per token and unit of dim: x, norm 1, qkv (3), rotated q and k (2), attention,
# x again, norm 2, the MLP before and after GELU (4 + 4). Counted by saved-tensor hooks; dropout adds to them.
SAVED_PER_LAYER = 18
# Measured peaks of CPU processes are 1.8 times the saved activations, because glibc keeps freed memory; CUDA's
# allocator needs no such factor.
ALLOCATOR_OVERHEAD = {True: 1.0, False: 1.8}

# Dense half-precision peaks with float32 accumulation, TFLOP/s by the vendors' data sheets; the first match counts.
# `$`: slower variants have longer names (Laptop, D).
PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "H200 NVL|H100 NVL": 835, "H100 PCIe": 756, "GH200|H200|H100|H800": 989, "H20": 148,
    "A100|A800": 312, "A40": 150, "A30": 165, "L40S": 362, "L40": 181, "L4": 121,
    "RTX 6000 Ada Generation": 364, "RTX A6000": 155, "RTX 5090$": 209, "RTX 4090$": 165, "RTX 3090 Ti": 80,
    "RTX 3090$": 71, "MI300X|MI325X": 1307, "V100-PCIE": 112, "V100": 125, "T4": 65,  # V100: float16, it has no bf16
}  # fmt: skip


class ParameterCounts(NamedTuple):
    """Parameters of a model by part; a tied head counts once, as embedding."""

    layers: int  # both stages with their norms, modulations and noise embeddings
    embedding: int  # of tokens and of learned positions
    heads: int
    bridge: int

    @property
    def total(self) -> int:
        return sum(self)


class MemoryEstimate(NamedTuple):
    """Estimated bytes on one device at the peak of a training step."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return sum(self)


def count_parameters_by_part(config: ModelConfig) -> ParameterCounts:
    """Count the parameters of `LanguageModel(config)` by part, from shapes without memory."""
    model = build_on_meta(config)

    def count(*modules: nn.Module | None) -> int:
        return sum(p.numel() for module in modules if module is not None for p in module.parameters())

    return ParameterCounts(
        layers=count(model.anchor, model.denoiser),
        embedding=count(model.embed, model.positions),
        heads=count(model.anchor_head, None if config.tied else model.head),
        bridge=count(model.bridge),
    )


def count_parameters(config: ModelConfig) -> int:
    """Count all parameters of `LanguageModel(config)`."""
    return count_parameters_by_part(config).total


def flops_per_token(config: ModelConfig, *, length: int, anchor_share: float = 0.6) -> float:
    """Return the training FLOPs per token: three times the forward's products.

    Counted: the layers' matrices, attention (causal: half), the bridge as a dim × dim map, and the heads where they are
    applied: hidden positions (half of a masked model's, all of a causal one's) and anchors. Not counted: the product of
    the factored bridge (0.5% of a step of 32 × 1,024 tokens), constant modulations, elementwise operations and
    recomputation by activation checkpointing.
    """
    dim, vocab = config.dim, config.vocab_size
    attention = (2 if config.is_causal else 4) * length * dim
    forward = float((config.anchor_layers + config.denoiser_layers) * (2 * LAYER_WEIGHTS * dim**2 + attention))
    forward += (1.0 if config.is_causal else HIDDEN_SHARE) * 2 * vocab * dim
    if config.anchor_layers:
        forward += anchor_share * 2 * vocab * dim
        forward += 4 * vocab * dim if config.bridge == "softmax" else 2 * dim * dim
    return 3 * forward


def peak_flops(device_name: str) -> float | None:
    """Return the dense half-precision peak of a GPU in FLOP/s by its name, None for an unknown one."""
    if "MIG" in device_name.split():
        return None  # a slice of a GPU
    for pattern, tera in PEAK_TFLOPS.items():
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", device_name):
            return tera * 1e12
    return None


def estimate_memory(
    config: ModelConfig,
    *,
    rows: int,
    length: int,
    bytes_per_activation: int,
    ema: bool,
    optimizer: str,
    shards: int = 1,
    checkpoint_activations: bool = False,
    is_cuda: bool,
    anchor_share: float = 0.6,
) -> MemoryEstimate:
    """Estimate the bytes at the peak of a training step of `rows` × `length` tokens on one of `shards` devices.

    Weights, gradients, optimizer states and EMA are float32 and divided by `shards`; sharded embedding, heads, bridge
    and two layers are gathered at a time. All gradients are counted together with all activations, which is too high
    for one unsharded micro-batch. Not counted: CUDA context, communication buffers, fragmentation, time conditioning
    and a CPU process's libraries.
    """
    parts, layers = count_parameters_by_part(config), config.anchor_layers + config.denoiser_layers
    matrices, full = LAYER_WEIGHTS * config.dim**2, 4 * parts.total // shards
    states = 2 * parts.total - (layers * matrices if optimizer == "muon" else 0)
    all_gather = 4 * (parts.total - parts.layers + 2 * parts.layers // layers) if shards > 1 else 0
    return MemoryEstimate(
        weights=full + all_gather,
        gradients=full + all_gather,
        optimizer=4 * states // shards,
        average=full if ema else 0,
        activations=activation_bytes(config, rows * length, bytes_per_activation, checkpoint_activations, is_cuda),
        head=head_bytes(config, rows * length, bytes_per_activation, anchor_share, is_cuda),
    )


def activation_bytes(config: ModelConfig, tokens: int, width: int, checkpoint: bool, is_cuda: bool) -> int:
    """Estimate what the layers save for the backward, and the copies of their weights."""
    layers, stages = config.anchor_layers + config.denoiser_layers, 2 if config.anchor_layers else 1
    # Two dropouts save a byte per value in compiled layers, a value in eager ones.
    dropout = (2 if is_cuda else 2 * width) if config.dropout else 0
    layer = (SAVED_PER_LAYER * width + dropout) * config.dim
    kept = layers * width * config.dim + layer if checkpoint else layers * layer
    outside = 3 * stages * width * config.dim  # a stage's input, its final norm and that norm's input
    if config.anchor_layers and config.bridge == "softmax":
        outside += (width + 4) * config.vocab_size
    copies = 0
    if width == 2:
        copies = 2 * LAYER_WEIGHTS * config.dim**2
    elif config.cond_dim is not None and not config.time_conditioning:
        copies = 4 * 5 * config.dim**2  # gates multiply the matrices `out` and `down`
    copies *= 1 if checkpoint else layers
    return int(ALLOCATOR_OVERHEAD[is_cuda] * (tokens * (kept + outside) + copies))


def head_bytes(config: ModelConfig, tokens: int, width: int, anchor_share: float, is_cuda: bool) -> int:
    """Estimate one chunk of logits, and each head's gradient and that of its features."""
    shares = [1.0 if config.is_causal else HIDDEN_SHARE] + ([anchor_share] if config.anchor_layers else [])
    positions = [int(share * tokens) for share in shares]
    matrix = config.vocab_size * config.dim
    chunk = width * config.vocab_size * min(MAX_LOGIT_ROWS[is_cuda], max(positions))
    copy = 2 * matrix if width == 2 else 0
    ready = sum(2 * n * config.dim * width + (width if n <= MAX_LOGIT_ROWS[is_cuda] else 4) * matrix for n in positions)
    return chunk + copy + ready
