"""Converts GPT-2 weights of transformers to the causal LanguageModel: a folder (`load`), or a state dict."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from adlm.errors import import_extra
from adlm.models.language_model import LanguageModel, ModelConfig

# Names in transformers -> ours. Conv1D stores the linear maps of a layer transposed.
NAMES = {
    "wte.weight": "embed.weight",
    "wpe.weight": "positions.weight",
    "lm_head.weight": "head.weight",
}
NAMES |= {"ln_f.weight": "denoiser.norm.weight", "ln_f.bias": "denoiser.norm.bias"}
LAYER_NAMES = {"ln_1": "norm1", "attn.c_attn": "qkv", "attn.c_proj": "out"}
LAYER_NAMES |= {"ln_2": "norm2", "mlp.c_fc": "up", "mlp.c_proj": "down"}
IGNORED = ("attn.bias", "attn.masked_bias")  # constants of older versions: the causal mask
# Settings of config.json that change the function, with the supported value.
SUPPORTED: dict[str, Any] = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def load(folder: str | Path) -> LanguageModel:
    """Load a GPT-2 folder as transformers saves it: the causal model with exactly the file's vocabulary, no mask."""
    transformers = import_extra("transformers", "a GPT-2 folder needs transformers", "hf")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        for name, value in (
            SUPPORTED | {"n_inner": getattr(config, "n_inner", None) and 4 * config.n_embd}
        ).items():
            if (actual := getattr(config, name, value)) != value:
                raise ValueError(
                    f"{name} is {actual!r:.80}: supported is {value!r}; give a GPT-2 with that"
                )
        options = {"config": config, "use_safetensors": True, "ignore_mismatched_sizes": True}
        theirs, report = transformers.GPT2LMHeadModel.from_pretrained(
            folder, output_loading_info=True, **options
        )
        if wrong := {
            problem: sorted(map(str, keys))[:4] for problem, keys in report.items() if keys
        }:
            raise ValueError(f"config.json does not fit the weights: {wrong}")
        # Embeddings and attention weights have no dropout here.
        return from_state_dict(theirs.state_dict(), heads=config.n_head, dropout=config.resid_pdrop)
    except Exception as error:  # transformers raises errors of every kind at a damaged folder
        problem = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{folder} is no GPT-2 folder as transformers saves it ({problem}): save it again"
        ) from error


def from_state_dict(
    state: Mapping[str, Tensor], *, heads: int, dropout: float = 0.1
) -> LanguageModel:
    """Convert the state dict of a `GPT2LMHeadModel` or `GPT2Model`; sizes follow from its shapes."""
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        bare = name.removeprefix("transformer.")
        match = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", bare)
        if match and match[2] in LAYER_NAMES:
            ours = f"denoiser.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
            renamed[ours] = value.t() if value.dim() == 2 else value
        elif not bare.endswith(IGNORED):
            renamed[NAMES.get(bare, bare)] = value
    if "embed.weight" not in renamed or "positions.weight" not in renamed:
        problem = f"the state dict has no 'wte.weight' or 'wpe.weight', its keys start with {sorted(state)[:3]}"
        raise ValueError(
            f"{problem}: give the state_dict() of transformers' GPT2LMHeadModel, with its names unchanged"
        )
    if not bool(
        (
            renamed.setdefault("head.weight", renamed["embed.weight"]) == renamed["embed.weight"]
        ).all()
    ):
        raise ValueError("lm_head.weight is not wte.weight: convert a GPT-2 with tied embeddings")
    vocab_size, dim = renamed["embed.weight"].shape
    layers = len({name.split(".")[2] for name in renamed if name.startswith("denoiser.layers.")})
    config = ModelConfig.parse(
        "python",
        vocab_size=vocab_size,
        mask_id=None,
        dim=dim,
        heads=heads,
        denoiser_layers=layers,
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
    model.load_state_dict(renamed)
    return model.eval()
