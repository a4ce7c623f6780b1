"""Converts weights of the authors' implementation, and of MDLM's, which it is based on."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from adlm.models.language_model import LanguageModel, ModelConfig

# Names in the reference -> ours, in a stage and in its layers.
STAGE_NAMES = {
    "sigma_map.mlp.0.": "condition.first.",
    "sigma_map.mlp.2.": "condition.second.",
    "output_layer.norm_final.": "norm.",
    "output_layer.adaLN_modulation.": "modulation.",
}
LAYER_NAMES = {"attn_qkv.": "qkv.", "attn_out.": "out.", "mlp.0.": "up.", "mlp.2.": "down."}
LAYER_NAMES |= {"adaLN_modulation.": "modulation.", "norm1.": "norm1.", "norm2.": "norm2."}
STAGES = {"backbone": 0, "denoiser": 1, "replica": 1}  # `replica` is an older name of the denoiser


def convert_name(name: str, *, two_stages: bool) -> str | None:
    """Return our name of a reference parameter, or None if it is unknown."""
    prefix, _, rest = name.partition(".")
    if prefix not in STAGES:
        return None
    first = STAGES[prefix] == 0
    stage, head = ("anchor", "anchor_head") if two_stages and first else ("denoiser", "head")
    whole = {"output_layer.linear.weight": f"{head}.weight", "output_layer.linear.bias": f"{head}.bias"}
    if first:
        whole["vocab_embed.embedding"] = "embed.weight"
    else:
        whole |= {"vocab_embed.0.weight": "bridge.weight", "vocab_embed.0.bias": "bridge.bias"}
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
    """Convert a reference state dict: ADLM, MDLM or AR by its keys, sizes by its shapes."""
    if "backbone.vocab_embed.embedding" not in state:
        raise ValueError(
            f"the state dict has no 'backbone.vocab_embed.embedding', its keys start with {sorted(state)[:3]}: give "
            "the reference's `state_dict` itself, with its names unchanged"
        )
    vocab_size, dim = state["backbone.vocab_embed.embedding"].shape
    two_stages = any(STAGES.get(name.partition(".")[0]) == 1 for name in state)
    cond = state.get("backbone.sigma_map.mlp.2.weight")

    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, value in state.items():
        if name.endswith("rotary_emb.inv_freq"):
            expected = 10000.0 ** (-torch.arange(0, dim // heads, 2) / (dim // heads))
            if value.shape != expected.shape or not torch.allclose(value.float().cpu(), expected, rtol=1e-4):
                raise ValueError(
                    f"{name} has {value.numel()} frequencies, which do not fit heads = {heads} and base 10,000: check "
                    "the number of heads"
                )
            continue
        ours = convert_name(name, two_stages=two_stages)
        if ours is None:
            unknown.append(name)
        else:
            renamed[ours] = value
    if unknown:
        raise ValueError(f"{len(unknown)} keys of the state dict are not the reference's: remove {unknown[:8]}")

    def count_layers(stage: str) -> int:
        return len({name.split(".")[2] for name in renamed if name.startswith(f"{stage}.layers.")})

    config = ModelConfig(
        vocab_size=vocab_size,
        mask_id=mask_id,
        dim=dim,
        heads=heads,
        anchor_layers=count_layers("anchor"),
        denoiser_layers=count_layers("denoiser"),
        length=length,
        is_causal=cond is None,
        bridge="factored",
        cond_dim=None if cond is None else cond.shape[0],
        time_conditioning=time_conditioning,
        dropout=dropout,
    )
    model = LanguageModel(config)
    model.load_state_dict(renamed, strict=True)  # a missing or misshaped key is an error that names it
    return model.eval()
