"""Converts GPT-2 weights of transformers to the causal LanguageModel."""

import re
from collections.abc import Mapping

from torch import Tensor

from adlm.models.language_model import LanguageModel, ModelConfig

# Names in transformers -> ours. Conv1D stores the linear maps of a layer transposed.
NAMES = {"wte.weight": "embed.weight", "wpe.weight": "positions.weight"}
NAMES |= {"ln_f.weight": "denoiser.norm.weight", "ln_f.bias": "denoiser.norm.bias"}
LAYER_NAMES = {"ln_1": "norm1", "attn.c_attn": "qkv", "attn.c_proj": "out"}
LAYER_NAMES |= {"ln_2": "norm2", "mlp.c_fc": "up", "mlp.c_proj": "down"}
IGNORED = ("attn.bias", "attn.masked_bias")  # constants of older versions: the causal mask


def from_state_dict(state: Mapping[str, Tensor], *, heads: int, dropout: float = 0.1) -> LanguageModel:
    """Convert the state dict of a `GPT2LMHeadModel` or `GPT2Model`; sizes follow from its shapes.

    The outputs equal those of transformers for gelu_new (tanh) and a layer-norm epsilon of 1e-5, GPT-2's settings.
    """
    bare = {name.removeprefix("transformer."): value for name, value in state.items()}
    if "wte.weight" not in bare or "wpe.weight" not in bare:
        raise ValueError(
            f"the state dict has no 'wte.weight' or 'wpe.weight', its keys start with {sorted(state)[:3]}: give the "
            "state_dict() of transformers' GPT2LMHeadModel, with its names unchanged"
        )
    head = bare.pop("lm_head.weight", None)
    names = {name: convert_name(name) for name in bare}
    unknown = [name for name, ours in names.items() if ours is None and not name.endswith(IGNORED)]
    if unknown:
        raise ValueError(f"{len(unknown)} keys of the state dict are not GPT-2's: remove {unknown[:8]}")
    renamed: dict[str, Tensor] = {}
    for name, ours in names.items():
        if ours is not None:
            is_conv = bare[name].dim() == 2 and name not in NAMES
            renamed[ours] = bare[name].t().contiguous() if is_conv else bare[name]
    if head is not None and not bool((head == renamed["embed.weight"]).all()):
        raise ValueError("lm_head.weight is not wte.weight: convert a GPT-2 with tied embeddings")
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
    """Return our name of a GPT-2 parameter, or None if it is unknown."""
    if name in NAMES:
        return NAMES[name]
    match = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None or match[2] not in LAYER_NAMES:
        return None
    return f"denoiser.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
