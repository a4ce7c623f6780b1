"""Converts checkpoints of the lineage (ADLM, MDLM, ReMDM, AR): Lightning's files and MDLM's folder on the Hub."""

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from adlm import files
from adlm.data.tokenizers import Tokenizer, load_tokenizer
from adlm.files import read_json
from adlm.models.folder import DOCUMENTS, WRAPPED, LoadedModel, require_transformer
from adlm.models.language_model import (
    EXTENSIONS,
    LanguageModel,
    ModelConfig,
    build_on_meta,
    is_whole,
)

EMBEDDING, CONDITION = "backbone.vocab_embed.embedding", "backbone.sigma_map.mlp.2.weight"
FREQUENCIES = "rotary_emb.inv_freq"  # a buffer of every stage, computed from its sizes
BUFFERS = (f"backbone.{FREQUENCIES}", f"denoiser.{FREQUENCIES}")
CONDITION_NAMES = {"sigma_map.mlp.0": "condition.first", "sigma_map.mlp.2": "condition.second"}
# Names in a layer of the lineage -> ours, in the order of its parameters; `modulation` is missing in causal models.
LAYER_NAMES = {
    "norm1": "norm1",
    "attn_qkv": "qkv",
    "attn_out": "out",
    "norm2": "norm2",
    "mlp.0": "up",
    "mlp.2": "down",
}
WITH_BIAS = ("up", "down", "modulation", "first", "second", "head", "anchor_head", "bridge")
# Settings of a Lightning checkpoint and of MDLM's config.json -> ours; `layers` are those of the first stage.
LIGHTNING_SETTINGS = {
    "model.hidden_size": "dim",
    "model.n_heads": "heads",
    "model.n_blocks": "layers",
}
LIGHTNING_SETTINGS |= {f"model.{name}": name for name in ("length", "cond_dim", "dropout")}
LIGHTNING_SETTINGS |= {"data.tokenizer_name_or_path": "tokenizer", "data.wrap": "wrap"}
LIGHTNING_SETTINGS |= {name: name for name in ("time_conditioning", "parameterization")}
HUB_SETTINGS = {
    "hidden_dim": "dim",
    "n_heads": "heads",
    "n_blocks": "layers",
    "model_length": "length",
}
HUB_SETTINGS |= {name: name for name in ("vocab_size", "cond_dim", "dropout", "time_conditioning")}
TOKENIZERS = {
    50258: "gpt2",
    30522: "bert-base-uncased",
    35: "characters",
}  # by vocabulary; `characters` is text8's
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # the first one that is there
FETCH_AGAIN = "download or save it again"
MAX_LISTED = 20  # names in an error
# What a checkpoint may hold besides tensors. None of it is imported or called: a StoredObject takes its place.
STORED_PACKAGES = (
    "omegaconf",
    "transformers",
    "tokenizers",
    "lightning",
    "pytorch_lightning",
    "dataloader",
)
STORED_TYPES = {
    f"builtins.{name}"
    for name in ("int", "float", "str", "bool", "list", "dict", "tuple", "object")
}
STORED_TYPES |= {
    "typing.Any",
    "collections.defaultdict",
    "pathlib.PosixPath",
    "numpy.dtype",
    "numpy.ndarray",
}
STORED_TYPES |= {
    f"numpy.{core}.multiarray.{name}"
    for core in ("core", "_core")
    for name in ("scalar", "_reconstruct")
}


class StoredObject:
    """An object of another package as a checkpoint stores it: its state, and none of its code."""

    state: Any = None

    def __new__(cls, *_: object) -> "StoredObject":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, key: str) -> Any:
        """Return what an OmegaConf dict holds under a key."""
        content = self.state.get("_content") if isinstance(self.state, dict) else None
        node: Any = content.get(key) if isinstance(content, dict) else None
        return (
            node.state.get("_val", node) if isinstance(getattr(node, "state", None), dict) else node
        )


def map_names(config: ModelConfig) -> dict[str, str]:
    """Map the lineage's names of parameters to ours, in its order."""
    names = {EMBEDDING: "embed.weight"}
    stages = {
        "backbone": ("anchor", config.anchor_layers),
        "denoiser": ("denoiser", config.denoiser_layers),
    }
    if not config.anchor_layers:
        stages = {"backbone": stages["denoiser"]}
    modulation = {} if config.is_causal else {"adaLN_modulation": "modulation"}
    for stage, (ours, layers) in stages.items():
        parts = {"vocab_embed.0": "bridge"} if stage == "denoiser" else {}
        parts |= (
            {}
            if config.is_causal
            else {name: f"{ours}.{own}" for name, own in CONDITION_NAMES.items()}
        )
        for i in range(layers):
            layer = (LAYER_NAMES | modulation).items()
            parts |= {f"blocks.{i}.{name}": f"{ours}.layers.{i}.{own}" for name, own in layer}
        parts |= {"output_layer.norm_final": f"{ours}.norm"}
        parts |= {"output_layer.linear": "anchor_head" if ours == "anchor" else "head"}
        parts |= {f"output_layer.{name}": f"{ours}.{own}" for name, own in modulation.items()}
        for name, own in parts.items():
            names[f"{stage}.{name}.weight"] = f"{own}.weight"
            if own.rpartition(".")[2] in WITH_BIAS:
                names[f"{stage}.{name}.bias"] = f"{own}.bias"
    return names


def format_names(names: list[str]) -> str:
    """List names, at most 20 of them."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(f'{name:.120}' for name in names[:MAX_LISTED])}{more}"


def rotary_frequencies(size: int) -> Tensor:
    """Return the buffer of the lineage's rotary embedding for heads of a size, in its arithmetic."""
    return 1.0 / (10000.0 ** (torch.arange(0, size, 2).float() / size))


def read_embedding_shape(state: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the size of the vocabulary and the width of a lineage's state dict."""
    if EMBEDDING not in state or state[EMBEDDING].dim() != 2:
        problem = f"the state dict has no matrix {EMBEDDING!r}, its keys start with {format_names(sorted(state)[:3])}"
        raise ValueError(
            f"{problem}: give the lineage's `state_dict` itself, with its names unchanged"
        )
    return state[EMBEDDING].shape[0], state[EMBEDDING].shape[1]


def from_state_dict(
    state: Mapping[str, Tensor],
    *,
    mask_id: int | None,
    shadow: Sequence[Tensor]
    | None = None,  # the EMA in the order of the parameters, which replaces the weights
    heads: int | None = None,
    time_conditioning: bool = False,
    length: int = 1024,
    dropout: float = 0.1,
) -> LanguageModel:
    """Convert a lineage's state dict: ADLM, MDLM or AR by its keys, sizes by its shapes, in float32."""
    (vocab_size, dim), count = read_embedding_shape(state), len(state)
    state = {re.sub(r"^replica\.", "denoiser.", name): value for name, value in state.items()}
    if len(state) < count:
        raise ValueError(
            "the state dict has keys of both `denoiser` and `replica`, its older name: remove one of them"
        )
    blocks = {
        match[0]
        for name in state
        if (match := re.match(r"(?:backbone|denoiser)\.blocks\.\d+\.", name))
    }
    first = sum(block.startswith("backbone") for block in blocks)
    layers = (first, len(blocks) - first) if len(blocks) > first else (0, first)
    buffers = {name: state[name] for name in BUFFERS if name in state}
    if heads is None:
        if not (sizes := {2 * value.numel() for value in buffers.values()} - {0}):
            raise ValueError(
                "the number of heads is unknown: keep rotary_emb.inv_freq, or give heads"
            )
        heads = max(1, dim // sizes.pop())
    cond = state.get(CONDITION)
    config = ModelConfig.parse(
        "python",
        vocab_size=vocab_size,
        mask_id=mask_id,
        dim=dim,
        heads=heads,
        anchor_layers=layers[0],
        denoiser_layers=layers[1],
        length=length,
        is_causal=cond is None,
        cond_dim=None if cond is None else cond.shape[:1].numel(),
        time_conditioning=time_conditioning,
        dropout=dropout,
    )
    expected = rotary_frequencies(dim // heads)
    for name, value in buffers.items():
        if value.shape != expected.shape or not torch.allclose(
            value.float().cpu(), expected, rtol=1e-4
        ):
            problem = (
                f"has {value.numel()} frequencies, which do not fit heads = {heads} and base 10,000"
            )
            raise ValueError(f"{name} {problem}: check the number of heads")
    names = map_names(config)
    if leftover := [name for name in state if name not in {*names, *BUFFERS}]:
        listed = format_names(leftover)
        raise ValueError(
            f"{len(leftover)} keys of the state dict are not the lineage's: {listed}; remove them"
        )
    if missing := [name for name in names if name not in state]:
        raise ValueError(f"{len(missing)} keys are missing: {format_names(missing)}; {FETCH_AGAIN}")
    if shadow is not None:
        if sorted(
            (name for name in state if name in names), key=lambda name: name.startswith("denoiser")
        ) != [*names]:
            raise ValueError(
                "the keys are not in the order that the EMA follows: convert with --raw"
            )
        if len(shadow) != len(names):
            problem = f"{len(shadow)} tensors for {len(names)} parameters"
            raise ValueError(
                f"ema.shadow_params has {problem}: {FETCH_AGAIN}, or convert with --raw"
            )
        state = dict(zip(names, shadow))
    model = build_on_meta(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, own in names.items():
        value = state[name]
        is_plain = value.is_floating_point() and value.layout == torch.strided and not value.is_meta
        if tuple(value.shape) != shapes[own] or not is_plain:
            actual = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
            remedy = FETCH_AGAIN if shadow is None else f"{FETCH_AGAIN}, or convert with --raw"
            raise ValueError(f"{name} is {actual}, expected float {shapes[own]}: {remedy}")
    model.to_empty(device="cpu").load_state_dict({own: state[name] for name, own in names.items()})
    return model.eval()


def is_lineage(path: Path) -> bool:
    """Return whether a path is a checkpoint file, or a folder in another layout than ours."""
    if path.is_file():
        return True
    content = read_json(path / "config.json", FETCH_AGAIN)
    return isinstance(content, dict) and "model_type" in content and "format" not in content


def read_lineage(path: Path) -> tuple[dict[str, Tensor], list[Tensor] | None, dict[str, Any], int]:
    """Read a checkpoint's state dict, EMA (a list in the order of the parameters), settings in our names, and step."""
    if path.is_file():
        content = found if isinstance(found := read_pickle(path), dict) else {}
        state = content.get("state_dict", content)
        ema, hyper, step = (
            content.get(name) for name in ("ema", "hyper_parameters", "global_step")
        )
        shadow = ema.get("shadow_params") if isinstance(ema, dict) else None
        if shadow is not None and not (
            isinstance(shadow, list) and all(isinstance(x, Tensor) for x in shadow)
        ):
            raise ValueError(
                f"ema.shadow_params is no list of tensors: {FETCH_AGAIN}, or convert with --raw"
            )
        config = hyper.get("config", hyper) if isinstance(hyper, dict) else {}
        settings = read_settings(config, LIGHTNING_SETTINGS)
    else:
        config = read_json(path / "config.json", FETCH_AGAIN)
        if config.get("model_type") != "mdlm":
            problem = f"model_type is {config.get('model_type')!r:.80}, supported is 'mdlm'"
            raise ValueError(f"{problem}: give a folder of adlm or MDLM, or a Lightning checkpoint")
        shadow, step, settings = None, 0, read_settings(config, HUB_SETTINGS)
        file = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
        if file is None:
            raise ValueError(f"no weights: expected {' or '.join(WEIGHT_FILES)}; {FETCH_AGAIN}")
        try:
            state = load_file(file) if file.suffix == ".safetensors" else read_pickle(file)
        except SafetensorError as error:
            raise ValueError(
                f"{file.name} cannot be read ({str(error)[:200]}): {FETCH_AGAIN}"
            ) from error
    is_state = isinstance(state, dict) and all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()
    )
    if not is_state or not state:
        raise ValueError("it holds no state_dict: give a checkpoint that Lightning wrote")
    return state, shadow, settings, step if is_whole(step) and step >= 0 else 0


def read_settings(config: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Read settings by their dotted names, under ours; interpolations, which would run code, are left out."""
    settings = {}
    for dotted, own in names.items():
        value = config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict | StoredObject) else None
        if isinstance(value, int | float) or (
            isinstance(value, str) and "${" not in value and value != "???"
        ):
            settings[own] = value
    return settings


def load_lineage(
    path: Path, *, weights: str | None = None, tokenizer: str | None = None
) -> tuple[LoadedModel, str]:
    """Load a model with `ema` or `raw` weights, by default ema if there is one, and return which (docs/convert.md)."""
    try:
        state, shadow, settings, step = read_lineage(path)
        if shadow is None and weights == "ema":
            raise ValueError("there is no EMA: convert with --raw")
        weights = weights or ("raw" if shadow is None else "ema")
        vocab_size, _ = read_embedding_shape(state)
        words = choose_tokenizer(path, settings.get("tokenizer"), vocab_size, tokenizer)
        names = ("heads", "time_conditioning", "length", "dropout")
        options: dict[str, Any] = {name: settings[name] for name in names if name in settings}
        options |= {"mask_id": vocab_size - 1 if words is None else words.mask_id}
        model = from_state_dict(state, shadow=shadow if weights == "ema" else None, **options)
        config = model.config
        actual: dict[str, Any] = {
            "dim": config.dim,
            "layers": config.anchor_layers or config.denoiser_layers,
        }
        actual |= {
            "vocab_size": vocab_size,
            "parameterization": "ar" if config.is_causal else "subs",
        }
        actual |= (
            {} if config.is_causal else {"cond_dim": config.cond_dim}
        )  # in causal models without weights
        for name, value in actual.items():  # settings that contradict the weights
            if settings.get(name, value) != value:
                raise ValueError(
                    f"{name} is {settings[name]!r:.80}, but the weights are of {value!r}: {FETCH_AGAIN}"
                )
        method = "ar" if config.is_causal else "adlm" if config.anchor_layers else "mdlm"
        rows = WRAPPED if settings.get("wrap", True) else DOCUMENTS
        return LoadedModel(model, words, method, step, rows), weights
    except (
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: torch's for sizes that no memory holds
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def choose_tokenizer(
    path: Path, stored: object, vocab_size: int, given: str | None
) -> Tokenizer | None:
    """Load the given tokenizer, that of the folder, or the bundled one by the stored name or the vocabulary's size."""
    name = given or ("characters" if stored == "text8" else stored) or TOKENIZERS.get(vocab_size)
    if not given and (path / "tokenizer.json").is_file():
        name = str(path)
    elif not given and name is not None and name not in TOKENIZERS.values():
        raise ValueError(
            f"the tokenizer {name!r:.80} is not bundled: `adlm convert --tokenizer NAME` sets one"
        )
    tokenizer = None if name is None else load_tokenizer(str(name))
    if tokenizer is not None and tokenizer.vocab_size != vocab_size:
        problem = f"{name} has {tokenizer.vocab_size} tokens with the mask, the model {vocab_size}"
        raise ValueError(
            f"{problem}: `adlm convert --tokenizer NAME` sets the one it was trained with"
        )
    return tokenizer


def write_lightning(loaded: LoadedModel, path: Path) -> Path:
    """Write a checkpoint that the lineage's code loads; its EMA is the weights themselves, without optimizer."""
    require_transformer(loaded.network, "a Lightning checkpoint")
    config, is_causal = loaded.model.config, loaded.model.config.is_causal
    required: dict[str, Any] = {
        "positions": "rotary",
        "norm_bias": False,
        "attention_bias": False,
        "tied": False,
    }
    required |= {"anchor_layers": 0, "cond_dim": None} if is_causal else {}
    required |= {"bridge": "factored"} if config.anchor_layers else {}
    required |= {name: ModelConfig.model_fields[name].default for name in EXTENSIONS}
    wrong = [name for name, value in required.items() if getattr(config, name) != value]
    wrong += [
        name for name in ("mask_id", "cond_dim")[: 2 - is_causal] if getattr(config, name) is None
    ]
    if wrong:
        listed = ", ".join(f"{name} = {getattr(config, name)!r}" for name in wrong)
        raise ValueError(
            f"the lineage's code has no model with {listed}: train one with its settings (recipes owt-*)"
        )
    weights, state = loaded.model.state_dict(), dict[str, Tensor]()
    frequencies = rotary_frequencies(config.dim // config.heads)
    for name, own in map_names(config).items():
        if name.endswith(".blocks.0.norm1.weight"):
            state[f"{name.partition('.')[0]}.{FREQUENCIES}"] = frequencies
        state[name] = weights[own].detach().cpu().contiguous()
    values = vars(config) | {"layers": config.anchor_layers or config.denoiser_layers}
    values["parameterization"] = "ar" if is_causal else "subs"
    tokenizer = getattr(loaded.tokenizer, "name", None)
    values |= {
        "wrap": loaded.rows == WRAPPED,
        "tokenizer": tokenizer if tokenizer in TOKENIZERS.values() else None,
    }
    settings: dict[str, Any] = {"model": {}, "data": {}}
    for dotted, own in LIGHTNING_SETTINGS.items():
        *group, key = dotted.split(".")
        (settings[group[0]] if group else settings)[key] = values[own]
    shadow = [value for name, value in state.items() if not name.endswith(FREQUENCIES)]
    content = {
        "state_dict": state,
        "hyper_parameters": {"config": settings},
        "global_step": loaded.step,
        "epoch": 0,
    }
    content["ema"] = {"decay": 0.9999, "num_updates": loaded.step, "shadow_params": shadow}
    progress = {"current": {"completed": 0}}  # which its loader reads
    content["loops"] = {
        "fit_loop": {"epoch_progress": progress, "epoch_loop.batch_progress": progress}
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.partial_file(path) as part:
            # The lineage's version; Lightning migrates it.
            torch.save(content | {"pytorch-lightning_version": "2.2.1"}, part)
    except (RuntimeError, OSError) as error:  # RuntimeError: torch's for a full disk
        raise OSError(
            f"{path} could not be written ({error}): make room, then run the same command"
        ) from error
    return path


def read_pickle(path: Path) -> Any:
    """Read what torch.save wrote: tensors and plain values; other objects become StoredObject, or are refused."""
    try:
        with zipfile.ZipFile(path) as file:  # a plain pickle, as before torch 1.6, is none
            if damaged := file.testzip():  # torch does not compare checksums
                raise ValueError(f"{damaged} is damaged")
        names = get_unsafe_globals_in_checkpoint(path)
        refused = [
            name
            for name in names
            if name not in STORED_TYPES and name.split(".")[0] not in STORED_PACKAGES
        ]
        if not refused:
            # The reader of torch sets the items of a defaultdict in plain dicts only.
            stand_ins: dict[str, Any] = {"collections.defaultdict": lambda *_: {}}
            with safe_globals([(stand_ins.get(name, StoredObject), name) for name in names]):
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's readers raise errors of every kind at a damaged file
        reason = " ".join(str(error).rpartition("WeightsUnpickler error: ")[2].split())[:200]
        problem = (
            type(error).__name__ if not reason or "weights_only" in reason else reason
        )  # that advice runs code
        raise ValueError(f"{path.name} cannot be read ({problem}): {FETCH_AGAIN}") from error
    problem = f"{path.name} holds {format_names(sorted(refused))}, which could run code: nothing of the file was loaded"
    raise ValueError(f"{problem}; have it saved with tensors and plain values only")
