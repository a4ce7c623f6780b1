"""The four models of the paper as one: masked or causal, one stage or two.

Why two stages? A masked model restores hidden tokens from visible ones. When the words that carry a sentence are
hidden, everything else is hard to restore. So an anchor network first predicts a distribution for every position,
supervised lightly on the important tokens (the anchors), and a denoiser then predicts the hidden tokens from the
anchor network's output alone: the bridge between them is the denoiser's only input. The composition is

    tokens -> anchor_features -> (anchor_head: anchor logits) -> bridge -> denoise_features -> (head: logits).

The bridge of the paper is a linear map V -> dim of the anchor logits ("factored"); as a product of two matrices it is
one dim × dim map, so the logits between the stages never exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Self, TypeGuard

import pydantic
import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt
from torch import Tensor, nn

from adlm.diffusion.features import Features
from adlm.models.transformer import (
    Layer,
    Norm,
    Rotary,
    SlotCache,
    Stack,
    UnpaddedRows,
    gather_rows,
    rms_norm,
    rotary_table,
    scatter_rows,
)
from adlm.settings import Settings

# Inductor's fusion of row sums with column sums gives wrong gradients of the modulations at training sizes (torch 2.11,
# relative errors of 0.4 to 7); without it a step takes as long.
INDUCTOR_OPTIONS: dict[str, str | int | bool] = {"triton.mix_order_reduction": False}
# Settings that the paper's models do not have.
EXTENSIONS = ("embed_norm", "qk_norm", "project_after")
NEG_INF = -1e6  # log-probability of the impossible; finite, so that 0 · log 0 stays 0

Width = Annotated[int, Field(ge=1, le=2**16)]
Depth = Annotated[int, Field(ge=0, le=1024)]


class ModelConfig(Settings):
    """The shape of a model. `vocab_size` counts the mask token, if there is one."""

    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    """Tokens of the vocabulary, with the mask."""
    mask_id: NonNegativeInt | None
    """Id of the mask; a masked model needs one."""
    dim: Width = 768
    """Width of the network."""
    heads: Width = 12
    """Attention heads."""
    anchor_layers: Depth = 0
    """Layers of the anchor network; 0: the model has one stage."""
    denoiser_layers: Annotated[int, Field(ge=1, le=1024)] = 12
    """Layers of the denoiser."""
    length: Annotated[int, Field(ge=1, le=2**17)] = 1024
    """Positions of a row."""
    is_causal: bool = False
    """Whether the model reads from left to right."""
    bridge: Literal["factored", "direct", "softmax", "none"] = "factored"
    """What the denoiser reads: a map of the anchor logits, of the features, or the tokens."""
    cond_dim: Width | None = 128
    """Width of the layers' modulation; null: none."""
    time_conditioning: bool = False
    """Give the layers the noise level."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Dropout after attention and MLP."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Position encoding."""
    norm_bias: bool = False
    """Biases in the norms."""
    attention_bias: bool = False
    """Biases in the attention."""
    tied: bool = False
    """One matrix as embedding and head."""
    embed_norm: bool = False
    """Divide embeddings by their root mean square."""
    qk_norm: bool = False
    """Divide queries and keys by their root mean square."""
    project_after: Depth = 0
    """A dim × dim matrix after this layer of the denoiser, at first the identity; 0: none."""

    @pydantic.model_validator(mode="after")
    def check_together(self) -> Self:
        """Check the rules about several settings."""
        self.require(self.dim % self.heads == 0, "dim to be a multiple of heads", "dim", "heads")
        self.require(self.dim // self.heads % 2 == 0, "dim / heads to be even", "dim", "heads")
        is_inside = self.mask_id is None or self.mask_id < self.vocab_size
        self.require(is_inside, "an id of the vocabulary", "mask_id", "vocab_size")
        has_mask = self.is_causal or self.mask_id is not None
        self.require(has_mask, "a mask_id for a masked model", "mask_id", "is_causal")
        has_condition = self.cond_dim is not None or not self.time_conditioning
        self.require(has_condition, "a cond_dim with it", "time_conditioning", "cond_dim")
        is_layer = self.project_after <= self.denoiser_layers
        return self.require(is_layer, "one of the layers", "project_after", "denoiser_layers")


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


Caches = Sequence[SlotCache] | None  # of a causal model, one per layer
Valid = (
    Tensor | UnpaddedRows | None
)  # False at padding (B, L), or where the tokens are (`can_unpad`)


class LanguageModel(nn.Module):
    """MDLM, ADLM, AR or A2R; objectives and samplers apply the linear heads where they need them."""

    config_class = ModelConfig

    def __init__(self, config: ModelConfig, *, seed: int | None = 0) -> None:
        """Build a model; without a seed its parameters have shapes and no memory."""
        super().__init__()
        self.config, vocab, dim = config, config.vocab_size, config.dim
        self._rotary: Rotary | None = None
        with torch.device("meta"):  # so that building draws nothing from the global generator
            self.embed = empty_embedding(vocab, dim)
            self.positions = (
                empty_embedding(config.length, dim) if config.positions == "learned" else None
            )
            self.anchor = Stack(config, config.anchor_layers) if config.anchor_layers else None
            self.anchor_head = nn.Linear(dim, vocab) if config.anchor_layers else None
            has_bridge = config.anchor_layers > 0 and config.bridge != "none"
            self.bridge = (
                nn.Linear(dim if config.bridge == "direct" else vocab, dim) if has_bridge else None
            )
            self.denoiser = Stack(config, config.denoiser_layers, config.project_after)
            self.head = nn.Linear(dim, vocab, bias=not config.tied)
        if config.tied:
            self.head.weight = self.embed.weight
        if seed is not None:
            self.to_empty(device="cpu")
            if config.tied:  # which that undid
                self.head.weight = self.embed.weight
            initialize(self, torch.Generator().manual_seed(seed))

    @classmethod
    def build(cls, config: ModelConfig, seed: int | None) -> LanguageModel:
        """Build a model; without a seed its parameters have shapes and no memory."""
        return cls(config, seed=seed)

    def layers(self) -> list[nn.Module]:
        """Return the layers of both stages, which are compiled, sharded and checkpointed one by one."""
        return [module for module in self.modules() if isinstance(module, Layer)]

    def forward(
        self,
        tokens: Tensor,
        noise_level: Tensor | None = None,
        *,
        valid: Valid = None,
        cache: Caches = None,
    ) -> Features:
        """Map tokens (B, L), or embeddings (B, L, dim), to Features: `denoise_features` of `anchor_features`.

        `valid` (B, L) is False at padding, which then changes nothing elsewhere (with learned positions: on the right);
        features at padding are undefined.
        """
        if self.anchor is None:
            return Features(
                None,
                self._run_stage(self.denoiser, tokens, noise_level, valid, cache, is_first=True),
            )
        anchor = self.anchor_features(tokens, noise_level, valid=valid, cache=cache)
        return Features(
            anchor, self.denoise_features(anchor, noise_level, valid=valid, cache=cache)
        )

    def anchor_features(
        self,
        tokens: Tensor,
        noise_level: Tensor | None = None,
        *,
        valid: Valid = None,
        cache: Caches = None,
    ) -> Tensor:
        """Run the anchor network: tokens (B, L) to features (B, L, dim), which `anchor_head` maps to logits."""
        if self.anchor is None:
            raise ValueError(
                "this model has one stage and no anchor network: use a two-stage model (adlm, a2r)"
            )
        caches = None if cache is None else cache[: self.config.anchor_layers]
        return self._run_stage(self.anchor, tokens, noise_level, valid, caches, is_first=True)

    def denoise_features(
        self,
        anchor: Tensor,
        noise_level: Tensor | None = None,
        *,
        valid: Valid = None,
        cache: Caches = None,
    ) -> Tensor:
        """Run bridge and denoiser: anchor features (B, L, dim) to features (B, L, dim), which `head` maps to logits."""
        caches = None if cache is None else cache[self.config.anchor_layers :]
        return self._run_stage(self.denoiser, self.apply_bridge(anchor), noise_level, valid, caches)

    def _run_stage(
        self,
        stack: Stack,
        x: Tensor,
        level: Tensor | None,
        valid: Valid,
        cache: Caches,
        is_first: bool = False,
    ) -> Tensor:
        """Run a stage on features (B, L, dim), the first one on tokens (B, L) or embeddings (B, L, dim)."""
        config = self.config
        length = x.shape[1]
        if length > config.length:
            raise ValueError(
                f"{length} tokens are longer than this model's length of {config.length}: shorten them"
            )
        if config.time_conditioning and (level is None or level.shape != x.shape[:1]):
            got = "none" if level is None else f"shape {tuple(level.shape)}"
            expected = f"a noise_level of shape ({x.shape[0]},), one per row"  # zero instead would be another model
            raise ValueError(f"a time-conditioned model needs {expected}; got {got}")
        rows = x.shape[0]
        place: slice | Tensor = slice(length)
        mask: Valid = None
        if cache is not None:
            if valid is not None:
                problem = "`valid` and a cache were given: expected one of them"
                raise ValueError(f"{problem}, all cached tokens are valid; leave `valid` out")
            window = cache[0].window
            assert window is not None, "a cache is used within a window"
            place, mask = window.position, window.mask
        elif valid is not None:
            x, place, mask = arrange_rows(x, valid, config)
        rotary = None
        if self.positions is None:
            cos, sin = self.rotary(x.device)
            rotary = cos[place], sin[place]
        if is_first:
            x = self._embed_tokens(x, place)
        x = stack(x, level if config.time_conditioning else None, rotary, mask, cache)
        return scatter_rows(x, valid, rows) if isinstance(valid, UnpaddedRows) else x

    def _embed_tokens(self, tokens: Tensor, place: slice | Tensor) -> Tensor:
        """Embed tokens with learned positions, if there are any, in the dtype of autocast."""
        x = tokens if tokens.is_floating_point() else self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[place]
        if self.config.embed_norm:
            x = rms_norm(x)
        is_half = torch.is_autocast_enabled(x.device.type)
        return x.to(torch.get_autocast_dtype(x.device.type)) if is_half else x

    def rotary(self, device: torch.device) -> Rotary:
        """Return the rotary angles, made once and no buffer, because a cast of the model must not round them."""
        if self._rotary is None or self._rotary[0].device != device:
            with torch.inference_mode(False):  # they outlive the call, and training may use them
                self._rotary = rotary_table(
                    self.config.length, self.config.dim // self.config.heads, device
                )
        return self._rotary

    def apply_bridge(self, anchor: Tensor) -> Tensor:
        """Map the anchor network's features (B, L, dim) to the denoiser's input, its only view of the text."""
        if self.config.bridge == "none":
            return anchor
        assert self.bridge is not None and self.anchor_head is not None
        if self.config.bridge == "direct":
            return self.bridge(anchor)
        if self.config.bridge == "softmax":
            return self.bridge(self.anchor_head(anchor).softmax(-1).to(anchor.dtype))
        return F.linear(anchor, *self.bridge_product())

    def bridge_product(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias of W_in (W_out h + b_out) + b_in as one dim × dim map."""
        assert self.bridge is not None and self.anchor_head is not None
        weight = self.bridge.weight @ self.anchor_head.weight
        return weight, torch.mv(self.bridge.weight, self.anchor_head.bias) + self.bridge.bias

    def log_probs(
        self, tokens: Tensor, noise_level: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Return log-probabilities (B, L, V) of every position: (anchor log-softmax or None, SUBS or next token)."""
        return compute_log_probs(self, tokens, noise_level)

    def new_slot_cache(self, slots: int, length: int) -> list[SlotCache]:
        """Return empty key-value caches for all layers, anchor network first."""
        config, weight = self.config, self.embed.weight
        if not config.is_causal:
            raise ValueError("this model is masked: only causal models can use a key-value cache")
        shape = slots, config.heads, length, config.dim // config.heads
        layers = config.anchor_layers + config.denoiser_layers
        return [SlotCache(weight.new_zeros(shape)) for _ in range(layers)]

    def fold(self) -> LanguageModel:
        """Return the inference form: bridge product and constant modulations in the matrices, equal up to rounding."""
        return fold_model(self)


def compute_log_probs(
    model: LanguageModel, tokens: Tensor, noise_level: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Compute `LanguageModel.log_probs` (SUBS): the mask has probability zero, and a visible token predicts itself."""
    features = model(tokens, noise_level)
    anchor = (
        None
        if model.anchor_head is None
        else model.anchor_head(features.anchor).float().log_softmax(-1)
    )
    mask_id, logits = model.config.mask_id, model.head(features.final).float()
    if (
        mask_id is not None
    ):  # -1000 is the lineage's value for AR, so that log-probabilities agree in every column
        logits[..., mask_id] = -1000.0 if model.config.is_causal else NEG_INF
    log_probs = logits.log_softmax(-1)
    if model.config.is_causal:
        return anchor, log_probs
    assert mask_id is not None
    itself = torch.full_like(logits, NEG_INF).scatter_(-1, tokens[..., None], 0.0)
    return anchor, torch.where((tokens == mask_id)[..., None], log_probs, itself)


def empty_embedding(rows: int, dim: int) -> nn.Embedding:
    """Make an uninitialized embedding: torch's own initialization on the meta device would load the compiler."""
    return nn.Embedding(rows, dim, _weight=torch.empty(rows, dim))


def attention_mask(valid: Tensor, is_causal: bool) -> Tensor:
    """Return which keys each query may attend to: valid ones; in a causal model earlier ones, and itself."""
    if not is_causal:
        return valid[:, None, None, :]
    position = torch.arange(valid.shape[1], device=valid.device)
    is_before = position <= position[:, None]
    itself = position == position[:, None]  # else a padded query would attend to nothing
    return (is_before & valid[:, None, None, :]) | itself


def arrange_rows(
    x: Tensor, valid: Tensor | UnpaddedRows, config: ModelConfig
) -> tuple[Tensor, slice | Tensor, Valid]:
    """Return the input of a stage, its positions and what attention may read: of unpadded rows the tokens alone."""
    if isinstance(valid, UnpaddedRows):
        if not can_unpad(config):
            raise ValueError(
                "this model cannot leave padding out (`can_unpad`): give `valid` as a mask (B, L)"
            )
        return gather_rows(x, valid), valid.position, valid
    return x, slice(x.shape[1]), attention_mask(valid, config.is_causal)


def can_unpad(config: ModelConfig) -> bool:
    """Whether a model takes UnpaddedRows: heads fit the kernel, and only attention and rotary angles depend on rows."""
    head_dim = config.dim // config.heads
    fits_kernel = head_dim % 8 == 0 and head_dim <= 256
    return fits_kernel and not config.time_conditioning and config.positions == "rotary"


def build_on_meta(config: ModelConfig) -> LanguageModel:
    """Build a model whose parameters have shapes but no memory."""
    return LanguageModel(config, seed=None)


@torch.no_grad()
def fold_model(model: LanguageModel) -> LanguageModel:
    """Copy a model with everything that does not depend on the tokens multiplied into its matrices."""
    config, state = model.config, dict(model.state_dict())
    if config.cond_dim is not None and not config.time_conditioning:
        config = config.replace(cond_dim=None, norm_bias=True)
        for name, stage in (("anchor", model.anchor), ("denoiser", model.denoiser)):
            if stage is not None:
                state |= {f"{name}.{key}": value for key, value in stage.fold().items()}
    if config.anchor_layers and config.bridge == "factored":
        config = config.replace(bridge="direct")
        state["bridge.weight"], state["bridge.bias"] = model.bridge_product()
    copy = build_on_meta(config)
    copy.load_state_dict({name: state[name].clone() for name in copy.state_dict()}, assign=True)
    if config.tied:
        copy.head.weight = copy.embed.weight
    return copy.requires_grad_(False).eval()


@torch.no_grad()
def initialize(model: LanguageModel, rng: torch.Generator) -> None:
    """Initialize as the lineage: uniform ±1/√fan_in; heads and modulations zero; a direct bridge is the identity."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.Linear):
            bound = 1 / math.sqrt(module.weight.shape[1])
            for parameter in module.parameters():
                parameter.uniform_(-bound, bound, generator=rng)
        elif isinstance(module, Norm):
            module.weight.fill_(1.0)
            if module.bias is not None:
                module.bias.zero_()
    modulations = [
        module.modulation for module in model.modules() if isinstance(module, Layer | Stack)
    ]
    for linear in (*modulations, model.anchor_head, None if model.config.tied else model.head):
        for parameter in () if linear is None else linear.parameters():
            parameter.zero_()
    if model.bridge is not None and model.config.bridge == "direct":
        nn.init.eye_(model.bridge.weight)
        model.bridge.bias.zero_()
    for module in model.modules():
        if isinstance(module, Stack) and module.projection is not None:
            module.projection.zero_()
