"""A model folder: config.json, weights, tokenizer and checksums, written by training, exports and `LM.save`.

A model folder never causes an import, and its weights are safetensors: whatever it holds, loading it runs none of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from adlm import files
from adlm.data.tokenizers import CONFIG_FILES, Tokenizer
from adlm.files import hash_file, read_json, read_object
from adlm.models.language_model import LanguageModel, ModelConfig, build_on_meta

LATEST, BEST = "latest", "best"  # links to checkpoints of a run
MODEL_FORMAT = 1  # of config.json and model.safetensors
WRAPPED, DOCUMENTS = "wrapped", "documents"
MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    *CONFIG_FILES,
)  # that are loaded
EXPORTED_WEIGHTS, EXPORTED_PREFIX = (
    "model/model.safetensors",
    "model.",
)  # of a folder that `adlm export` wrote
FLOAT_DTYPES = ("F32", "F16", "BF16")  # of stored tensors; matrices may also be int8
SCALE = ".scale"  # of an int8 matrix
INT8_MAX = 127
COPY_AGAIN = "copy or download the folder again"

# Form of the values of config.json (`matches_form`).
CONFIG_FORM = {
    "format": range(MODEL_FORMAT + 1),
    "method": str,
    "step": range(2**62),
    "model": dict,
}
CONFIG_FORM |= {"rows": (None, WRAPPED, DOCUMENTS)}


@dataclass(frozen=True)
class LoadedModel:
    """A model for inference, with its tokenizer and where it comes from."""

    model: LanguageModel
    tokenizer: Tokenizer | None
    method: str
    step: int
    rows: str = WRAPPED  # of the training data: wrapped, or documents (one a row, which ends with its document)


def find_model_folder(path: str | Path) -> Path:
    """Find the folder of a model: the path itself, or the latest checkpoint of a run folder."""
    folder = Path(path)
    if (folder / "checkpoints").is_dir():
        latest = find_latest_checkpoint(folder / "checkpoints")
        if latest is None:
            raise FileNotFoundError(
                f"{folder} has no checkpoint yet: `adlm train` writes one at its last step"
            )
        folder = latest
    if not (folder / "config.json").is_file():
        expected = (
            "give a folder with config.json and model.safetensors, or one that `adlm train` wrote"
        )
        raise FileNotFoundError(f"{path} is neither a run folder nor a model folder: {expected}")
    return folder


def list_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def find_latest_checkpoint(folder: Path) -> Path | None:
    """Find the checkpoint that a run resumes from."""
    if (folder / LATEST).exists():
        return (folder / LATEST).resolve()
    return next(reversed(list_checkpoints(folder)), None)  # killed between the rename and the link


def load_model(path: str | Path, *, verify: bool | None = None) -> LoadedModel:
    """Load the model of a run, a checkpoint or a folder; by default checksums are compared where there are any."""
    folder = find_model_folder(path)
    content, config = read_config_json(folder)
    model = build_on_meta(config)
    check_stored_tensors(folder, model)  # before memory is taken and a large file is read
    is_verified = (folder / "checksums.json").is_file() if verify is None else verify
    if is_verified and (problem := find_damage(folder, is_loaded=True)):
        remedy = f"{COPY_AGAIN} or, if you changed it yourself, delete checksums.json"
        raise ValueError(f"{folder} is damaged: {problem}: {remedy}")
    model.to_empty(device="cpu")
    if config.tied:
        model.head.weight = model.embed.weight
    model.load_state_dict(restore_tied_head(dequantize(read_weights(folder)), model))
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    return LoadedModel(model.eval(), tokenizer, content["method"], content["step"], content["rows"])


def read_config_json(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """Read and check a model's config.json: its content and the config of the model."""
    path = folder / "config.json"
    content = {"rows": WRAPPED} | read_object(path, CONFIG_FORM, f"{COPY_AGAIN}, or update adlm")
    try:
        return content, ModelConfig.parse("json", **content["model"])
    except (
        ValueError,
        TypeError,
    ) as error:  # TypeError: a setting is missing, or this version has no such
        raise ValueError(f"{path}: {error}: {COPY_AGAIN}, or update adlm") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights for inference, by name."""
    file = find_weights_file(path)
    try:
        return {
            name.removeprefix(EXPORTED_PREFIX): weight for name, weight in load_file(file).items()
        }
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): {COPY_AGAIN}") from error


def find_weights_file(folder: Path) -> Path:
    """Return the file of a model folder's weights."""
    return folder / (
        EXPORTED_WEIGHTS if (folder / EXPORTED_WEIGHTS).is_file() else "model.safetensors"
    )


def check_stored_tensors(folder: Path, model: LanguageModel) -> None:
    """Raise ValueError unless the header of model.safetensors has the model's tensors, in float (matrices: or int8)."""
    path = find_weights_file(folder)
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            slices = {name.removeprefix(EXPORTED_PREFIX): file.get_slice(name) for name in names}
            stored = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {name: part.get_dtype() for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): {COPY_AGAIN}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tied and "head.weight" not in stored:
        del expected["head.weight"]
    quantized = {
        name for name, shape in expected.items() if len(shape) == 2 and dtypes.get(name) == "I8"
    }
    expected |= {name + SCALE: expected[name][:1] for name in sorted(quantized)}
    for name in expected | stored:
        if stored.get(name) != expected.get(name) or (
            name not in quantized and dtypes[name] not in FLOAT_DTYPES
        ):
            actual = f"{dtypes[name]} {stored[name]}" if name in stored else "missing"
            expectation = f"float {expected[name]}" if name in expected else "no such tensor"
            problem = f"config.json does not fit model.safetensors: {name:.80} is {actual}, expected {expectation}"
            raise ValueError(f"{folder}/{problem}: {COPY_AGAIN}, or update adlm")


def find_damage(folder: Path, *, is_loaded: bool = False) -> str:
    """Return how a checkpoint, or its files for inference, differs from its checksums.json; nothing if it does not."""
    try:
        expected = read_json(folder / "checksums.json")
    except (ValueError, OSError) as error:
        return f"checksums.json cannot be read ({error})"
    listed = set(expected) if isinstance(expected, dict) else set()
    required = {*MODEL_FILES[:2], *(name for name in MODEL_FILES if (folder / name).exists())}
    if not is_loaded:
        required |= {
            "state.json",
            *(str(path.relative_to(folder)) for path in (folder / "training").glob("*")),
        }
    if missing := sorted(required - listed):
        return f"checksums.json does not list {missing[0]}"
    for name in sorted(listed.intersection(MODEL_FILES) if is_loaded else listed):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"checksums.json lists {name!r:.80}, which is outside the folder"
        if not (folder / name).is_file() or hash_file(folder / name) != expected[name]:
            return f"{name} is missing or was changed (or checksums.json was)"
    return ""


def quantize(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Store matrices as int8 and `<name>.scale` (a float32 per row), vectors as float32; models compute in float."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2:
            stored[name] = weight.float().contiguous()
            continue
        scale = weight.float().abs().amax(1) / INT8_MAX
        scale = torch.where(scale == 0, 1.0, scale)  # a row of zeros
        stored[name] = (weight.float() / scale[:, None]).round().to(torch.int8).contiguous()
        stored[name + SCALE] = scale
    return stored


def dequantize(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that `quantize` stored, in float32; others stay as they are."""
    weights: dict[str, Tensor] = {}
    for name, weight in stored.items():
        is_quantized = weight.dtype == torch.int8
        if is_quantized and name + SCALE not in stored:
            raise ValueError(
                f"{name} is int8 but has no {name + SCALE}: the file is incomplete; export it again"
            )
        if not name.endswith(SCALE):
            weights[name] = (
                weight.float() * stored[name + SCALE][:, None] if is_quantized else weight
            )
    return weights


def export_model(loaded: LoadedModel, folder: Path, *, is_quantized: bool = True) -> Path:
    """Write a model folder with its tokenizer, by default folded and quantized to one byte per weight."""
    model = loaded.model.fold() if is_quantized else loaded.model
    weights = {
        name: t
        for name, t in model.state_dict().items()
        if not (model.config.tied and name == "head.weight")
    }
    folder.mkdir(parents=True, exist_ok=True)
    files.write_tensors(
        folder / "model.safetensors", quantize(weights) if is_quantized else weights
    )
    files.write_json(
        folder / "config.json",
        build_config_json(model.config, loaded.method, loaded.step, loaded.rows),
    )
    if loaded.tokenizer is not None:
        loaded.tokenizer.save(folder)
    checksums = {
        name: sha for name, sha in compute_checksums(folder).items() if name in MODEL_FILES
    }  # not a README
    files.write_json(folder / "checksums.json", checksums)
    return folder


def build_config_json(config: ModelConfig, method: str, step: int, rows: str) -> dict[str, Any]:
    """Return the content of config.json."""
    return {
        "format": MODEL_FORMAT,
        "method": method,
        "step": step,
        "rows": rows,
        "model": config.model_dump(),
    }


def restore_tied_head(weights: dict[str, Tensor], model: LanguageModel) -> dict[str, Tensor]:
    """Add the head of a tied model, which is stored once, as the embedding."""
    if model.config.tied:
        weights = {**weights, "head.weight": weights["embed.weight"]}
    return weights


def compute_checksums(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file by its relative name."""
    return {
        str(path.relative_to(folder)): hash_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
