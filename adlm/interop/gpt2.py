"""Converts GPT-2 weights of transformers to the causal LanguageModel: a folder (`load`), or a state dict."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from adlm.convert import FETCH_AGAIN, read_state_dict
from adlm.data.tokenizers import END_OF_TEXT, Tokenizer, load_tokenizer, read_json
from adlm.models.language_model import LanguageModel, ModelConfig, is_whole

# Names in transformers -> ours. Conv1D stores the linear maps of a layer transposed.
NAMES = {"wte.weight": "embed.weight", "wpe.weight": "positions.weight"}
NAMES |= {"ln_f.weight": "denoiser.norm.weight", "ln_f.bias": "denoiser.norm.bias"}
LAYER_NAMES = {"ln_1": "norm1", "attn.c_attn": "qkv", "attn.c_proj": "out"}
LAYER_NAMES |= {"ln_2": "norm2", "mlp.c_fc": "up", "mlp.c_proj": "down"}
IGNORED = ("attn.bias", "attn.masked_bias")  # constants of older versions: the causal mask
# Settings of config.json that change the function, with the supported value, which is also transformers' default.
SUPPORTED: dict[str, Any] = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
SIZES = {"vocab_size": "vocab_size", "n_embd": "dim", "n_layer": "denoiser_layers", "n_positions": "length"}


def load(folder: str | Path) -> LanguageModel:
    """Load a GPT-2 folder as transformers saves it: the causal model with exactly the file's vocabulary, no mask.

    Dropout is `resid_pdrop`, on the two outputs of a layer; embeddings and attention weights have none here.
    """
    folder = Path(folder)
    settings = read_settings(folder)
    try:
        model = from_state_dict(
            read_state_dict(folder), heads=settings["n_head"], dropout=settings.get("resid_pdrop", 0.1)
        )
    except (RuntimeError, ValueError) as error:  # RuntimeError: a tensor is missing or has another shape
        raise ValueError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    for name, ours in SIZES.items():
        if settings.get(name, getattr(model.config, ours)) != (stored := getattr(model.config, ours)):
            raise ValueError(
                f"{folder}: {name} is {settings[name]!r:.80}, but the weights have {stored}: {FETCH_AGAIN}"
            )
    return model


def load_gpt2_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a GPT-2 folder: tokenizer.json, or vocab.json and merges.txt."""
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder)
    files = [folder / "vocab.json", folder / "merges.txt"]
    if not all(path.is_file() for path in files):
        remedy = "copy them there, or use load_tokenizer('gpt2') for the published vocabulary"
        raise FileNotFoundError(f"{folder} has neither tokenizer.json nor vocab.json and merges.txt: {remedy}")
    read_json(files[0], FETCH_AGAIN)  # its own error is one line
    try:
        bpe = tokenizers.Tokenizer(models.BPE.from_file(*map(str, files)))
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"{folder}: vocab.json and merges.txt do not fit ({error}): {FETCH_AGAIN}") from error
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    end_id = bpe.token_to_id(END_OF_TEXT)
    return Tokenizer(bpe, bos_id=end_id, eos_id=end_id, name=folder.name)


def read_settings(folder: Path) -> dict[str, Any]:
    """Read config.json of a GPT-2 folder, and raise ValueError for a setting that the model here does not have."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give a GPT-2 folder as transformers' save_pretrained writes it")
    settings = read_json(path, FETCH_AGAIN)
    if not isinstance(settings, dict) or settings.get("model_type") != "gpt2":
        found = settings.get("model_type") if isinstance(settings, dict) else settings
        raise ValueError(f"{path}: model_type is {found!r:.80}: supported is 'gpt2'; give the folder of a GPT-2")
    if not is_whole(heads := settings.get("n_head")) or heads < 1:
        raise ValueError(f"{path}: n_head is {heads!r:.80}: expected a whole number, at least 1; {FETCH_AGAIN}")
    supported = dict(SUPPORTED)
    if settings.get("n_inner") is not None:
        supported["n_inner"] = 4 * settings["n_embd"] if is_whole(settings.get("n_embd")) else None
    for name, value in supported.items():
        if (found := settings.get(name, value)) != value:
            raise ValueError(f"{path}: {name} is {found!r:.80}: supported is {value!r}; give a GPT-2 with that")
    return settings


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
