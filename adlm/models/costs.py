"""Parameters, FLOPs and memory of a model, counted or estimated from its config."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from adlm.diffusion.features import FeatureModel
from adlm.models.language_model import LanguageModel, ModelConfig, build_on_meta

LAYER_WEIGHTS = 12  # times dim²: the matrices qkv (3), out (1), up (4) and down (4)
HIDDEN_SHARE = 0.5  # of a masked model's positions, on average over t (log-linear schedule)
MAX_LOGIT_ROWS = {
    True: 24576,
    False: 256,
}  # rows of logits at a time, on CUDA or not: those of diffusion/selected.py

# Values a layer saves for its backward per token and unit of dim: x, norm 1, qkv (3), rotated q and k (2), attention,
# x again, norm 2, the MLP before and after GELU (4 + 4); 2 more with qk_norm. Counted by saved-tensor hooks.
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


def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of `LanguageModel(config)`, from shapes without memory; a tied head counts once."""
    model = build_on_meta(config)
    return sum(p.numel() for p in model.parameters())


def flops_per_token(config: ModelConfig, *, length: int, anchor_share: float = 0.6) -> float:
    """Return the training FLOPs per token: three times the forward's products.

    Counted: the layers' matrices, attention (causal: half), the bridge as a dim × dim map, and the heads where they are
    applied: hidden positions (half of a masked model's, all of a causal one's) and anchors. Not counted: the product of
    the factored bridge (0.5% of a step of 32 × 1,024 tokens), constant modulations, elementwise operations and
    recomputation by activation checkpointing.
    """
    dim, vocab = config.dim, config.vocab_size
    attention = (2 if config.is_causal else 4) * length * dim
    forward = float(
        (config.anchor_layers + config.denoiser_layers) * (2 * LAYER_WEIGHTS * dim**2 + attention)
    )
    forward += (1.0 if config.is_causal else HIDDEN_SHARE) * 2 * vocab * dim
    if config.anchor_layers:
        forward += anchor_share * 2 * vocab * dim
        forward += {"softmax": 4 * vocab * dim, "none": 0}.get(config.bridge, 2 * dim * dim)
    if config.project_after:
        forward += 2 * dim * dim
    return 3 * forward


@dataclass(frozen=True)
class Costs:
    """What a network of your own costs, for the log of a run (`costs()`)."""

    flops_per_token: float  # of training: three times those of the forward pass


def count_flops(model: FeatureModel, length: int) -> float | None:
    """Return the training FLOPs per token of a network in rows of a length; None if it does not say."""
    if isinstance(model, LanguageModel):
        return flops_per_token(model.config, length=length)
    costs: Callable[[], Costs] | None = getattr(model, "costs", None)
    return None if costs is None else costs().flops_per_token


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
    shards: int = 1,
    checkpoint_activations: bool = False,
    is_cuda: bool,
) -> int:
    """Estimate the bytes at the peak of a training step of `rows` × `length` tokens on one of `shards` devices.

    Counted: weights, gradients, two moments and the EMA in float32, what is gathered of sharded weights and gradients
    (embedding, heads, two layers), what the layers save for their backward, and a chunk of logits.
    """
    dim, layers = config.dim, config.anchor_layers + config.denoiser_layers
    states = 4 * count_parameters(config) * (5 if ema else 4) // shards
    gathered = (
        4 * 2 * (2 * LAYER_WEIGHTS * dim**2 + 3 * config.vocab_size * dim) if shards > 1 else 0
    )
    saved = rows * length * dim * bytes_per_activation
    per_layer = SAVED_PER_LAYER + 2 * config.qk_norm  # q and k before their norm
    saved *= layers + per_layer if checkpoint_activations else layers * per_layer
    if (
        bytes_per_activation == 2 and not checkpoint_activations
    ):  # autocast keeps a copy of every matrix
        saved += 2 * LAYER_WEIGHTS * dim**2 * layers
    logits = config.vocab_size * bytes_per_activation * min(MAX_LOGIT_ROWS[is_cuda], rows * length)
    return states + gathered + logits + int(ALLOCATOR_OVERHEAD[is_cuda] * saved)
