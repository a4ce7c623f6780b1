"""GPT-2's weights, as transformers names them, in our causal model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from adlm.models.language_model import LanguageModel, ModelConfig

# Their names -> ours. Their linear maps inside a layer (Conv1D) are stored transposed.
NAMES = {
    "wte.weight": "embed.weight",
    "wpe.weight": "positions.weight",
    "ln_f.weight": "denoiser.norm.weight",
    "ln_f.bias": "denoiser.norm.bias",
}
LAYER_NAMES = {
    "ln_1": "norm1",
    "attn.c_attn": "qkv",
    "attn.c_proj": "out",
    "ln_2": "norm2",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}
IGNORED = ("attn.bias", "attn.masked_bias")  # constants of older versions: the causal mask


def from_state_dict(state: Mapping[str, Tensor], *, heads: int, dropout: float = 0.1) -> LanguageModel:
    """Our model from the state dict of a `GPT2LMHeadModel` or `GPT2Model`: sizes from its shapes, no key left over.

    It computes what theirs does with gelu_new (the tanh form) and a layer-norm epsilon of 1e-5, which GPT-2 has.
    """
    bare = {name.removeprefix("transformer."): value for name, value in state.items()}
    if "wte.weight" not in bare or "wpe.weight" not in bare:
        raise ValueError(
            f"no 'wte.weight' and 'wpe.weight' in the state dict; its keys start with {sorted(state)[:3]}. Give the "
            "state_dict() of transformers' GPT2LMHeadModel, with its names unchanged"
        )
    head = bare.pop("lm_head.weight", None)
    renamed: dict[str, Tensor] = {}
    unknown = []
    for name, value in bare.items():
        ours, is_known = convert_name(name), True
        if ours is None:
            is_known = name.endswith(IGNORED)
        else:
            is_matrix = value.dim() == 2 and name not in NAMES
            renamed[ours] = value.t().contiguous() if is_matrix else value
        if not is_known:
            unknown.append(name)
    if unknown:
        raise ValueError(f"{len(unknown)} keys of the state dict have no place in our model: {unknown[:8]}")
    is_tied = head is None or bool((head == renamed["embed.weight"]).all())
    if not is_tied:
        raise ValueError("lm_head.weight is not wte.weight: an untied GPT-2 has a head without bias, ours has one")
    vocab_size, dim = renamed["embed.weight"].shape
    config = ModelConfig(
        vocab_size=vocab_size,
        mask_id=None,
        dim=dim,
        heads=heads,
        denoiser_layers=len({name.split(".")[2] for name in renamed if name.startswith("denoiser.layers.")}),
        length=renamed["positions.weight"].shape[0],
        is_causal=True,
        cond_dim=None,
        dropout=dropout,
        positions="learned",
        norm_bias=True,
        attention_bias=True,
        tied=True,
    )
    model = LanguageModel(config)
    model.load_state_dict(renamed | {"head.weight": renamed["embed.weight"]}, strict=True)
    return model.eval()


def convert_name(name: str) -> str | None:
    """Our name of a parameter of GPT-2, or None when it is not one we know."""
    if name in NAMES:
        return NAMES[name]
    found = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name)
    if found is None or found[2] not in LAYER_NAMES:
        return None
    return f"denoiser.layers.{found[1]}.{LAYER_NAMES[found[2]]}.{found[3]}"
