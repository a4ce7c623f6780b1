"""Weights of the authors' implementation (and of MDLM's, its parent) under our names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.models.transformer import NoiseEmbedding

# Their names -> ours, in a stage and in its layers.
STAGE_NAMES = {
    "sigma_map.mlp.0.": "condition.first.",
    "sigma_map.mlp.2.": "condition.second.",
    "output_layer.norm_final.": "norm.",
    "output_layer.adaLN_modulation.": "modulation.",
}
LAYER_NAMES = {
    "attn_qkv.": "qkv.",
    "attn_out.": "out.",
    "mlp.0.": "up.",
    "mlp.2.": "down.",
    "adaLN_modulation.": "modulation.",
    "norm1.": "norm1.",
    "norm2.": "norm2.",
}
STAGES = {"backbone": 0, "denoiser": 1, "replica": 1}  # `replica` is an older name of the denoiser


def convert_name(name: str, *, two_stages: bool) -> str | None:
    """Our name of a reference parameter, or None when it is not one we know."""
    prefix, _, rest = name.partition(".")
    if prefix not in STAGES:
        return None
    first = STAGES[prefix] == 0
    stage = "anchor" if two_stages and first else "denoiser"
    whole = {
        "vocab_embed.embedding": "embed.weight" if first else None,
        "vocab_embed.0.weight": None if first else "bridge.weight",
        "vocab_embed.0.bias": None if first else "bridge.bias",
        "output_layer.linear.weight": "anchor_head.weight" if stage == "anchor" else "head.weight",
        "output_layer.linear.bias": "anchor_head.bias" if stage == "anchor" else "head.bias",
    }
    if rest in whole:
        return whole[rest]
    block = re.match(r"blocks\.(\d+)\.", rest)
    path, inside = (f"layers.{block[1]}.", rest[block.end() :]) if block else ("", rest)
    for theirs, ours in (LAYER_NAMES if block else STAGE_NAMES).items():
        if inside.startswith(theirs):
            return f"{stage}.{path}{ours}{inside[len(theirs) :]}"
    return None


def from_state_dict(
    state: Mapping[str, Tensor],
    *,
    heads: int,
    mask_id: int | None,
    time_conditioning: bool = False,
    length: int = 1024,
    dropout: float = 0.1,
) -> LanguageModel:
    """Our model from a reference state dict: ADLM, MDLM or AR by its keys, sizes from its shapes, no key left over."""
    if "backbone.vocab_embed.embedding" not in state:
        raise ValueError(
            "no 'backbone.vocab_embed.embedding' in the state dict; its keys start with "
            f"{sorted(state)[:3]}. Give the reference's `state_dict` itself, with its names unchanged"
        )
    vocab_size, dim = state["backbone.vocab_embed.embedding"].shape
    if dim % heads:
        raise ValueError(f"heads = {heads} does not divide the width {dim} found in the state dict")
    two_stages = any(STAGES.get(name.partition(".")[0]) == 1 for name in state)
    cond = state.get("backbone.sigma_map.mlp.2.weight")

    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, value in state.items():
        if name.endswith("rotary_emb.inv_freq"):
            expected = 10000.0 ** (-torch.arange(0, dim // heads, 2) / (dim // heads))
            if value.shape != expected.shape or not torch.allclose(value.float().cpu(), expected, rtol=1e-4):
                raise ValueError(
                    f"{name} has {value.numel()} frequencies that do not fit heads = {heads} and base 10,000: "
                    "is the number of heads right?"
                )
            continue
        ours = convert_name(name, two_stages=two_stages)
        if ours is None:
            unknown.append(name)
        else:
            renamed[ours] = value
    if unknown:
        raise ValueError(f"{len(unknown)} keys of the state dict have no place in our model: {unknown[:8]}")

    def depth(stage: str) -> int:
        numbers = {int(n.split(".")[2]) for n in renamed if n.startswith(f"{stage}.layers.")}
        return len(numbers)

    config = ModelConfig(
        vocab_size=vocab_size,
        mask_id=mask_id,
        dim=dim,
        heads=heads,
        anchor_layers=depth("anchor"),
        denoiser_layers=depth("denoiser"),
        length=length,
        is_causal=cond is None,
        bridge="factored",
        cond_dim=None if cond is None else cond.shape[0],
        time_conditioning=time_conditioning,
        dropout=dropout,
    )
    first = state.get("backbone.sigma_map.mlp.0.weight")
    if first is not None and first.shape[1] != NoiseEmbedding.WIDTH:
        raise ValueError(
            f"a reference model's noise embedding is {NoiseEmbedding.WIDTH} wide, this one {first.shape[1]}"
        )
    model = LanguageModel(config)
    model.load_state_dict(renamed, strict=True)  # a missing or misshapen key is an error that names it
    return model.eval()
