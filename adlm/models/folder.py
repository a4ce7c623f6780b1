"""A model folder: config.json, weights, tokenizer and checksums, written by training, exports and `LM.save`.

A model folder never causes an import, and its weights are safetensors: whatever it holds, loading it runs none of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from adlm import files
from adlm.data.tokenizers import CONFIG_FILES, Tokenizer
from adlm.diffusion.features import FeatureModel
from adlm.diffusion.masking import ForwardProcess
from adlm.diffusion.objectives import OBJECTIVES, GivenObjective, Objective, choose_objective
from adlm.files import hash_file, read_json, read_object
from adlm.models.methods import METHODS
from adlm.models.network import (
    TRANSFORMER,
    GivenNetwork,
    NetworkClass,
    allocate_parameters,
    build_network,
    choose_network,
    find_tied,
    fold_network,
    read_config,
    read_network_config,
)
from adlm.settings import Settings

LATEST, BEST = "latest", "best"  # links to checkpoints of a run
MODEL_FORMAT = 1  # of config.json and model.safetensors
WRAPPED, DOCUMENTS = "wrapped", "documents"
REQUIRED_FILES = ("config.json", "model.safetensors")
MODEL_FILES = (*REQUIRED_FILES, "tokenizer.json", *CONFIG_FILES)  # that are loaded
# Of a folder that `adlm export` wrote.
EXPORTED_WEIGHTS = "model/model.safetensors"
EXPORTED_PREFIX = "model."
# Of stored tensors; matrices may also be int8.
FLOAT_DTYPES = ("F32", "F16", "BF16")
INT8 = "I8"
SCALE = ".scale"  # of an int8 matrix
INT8_MAX = 127
COPY_AGAIN = "copy or download the folder again"


class ModelDescription(Settings):
    """What config.json says of a model; other programs may write more."""

    format: Annotated[int, Field(ge=0, le=MODEL_FORMAT)]
    """The format of the folder, of this version of adlm or an earlier one."""
    method: str
    """The paper's name for the model, or that of its own network."""
    step: NonNegativeInt
    """Optimizer steps that the model was trained for."""
    rows: Annotated[str, Field(pattern=f"^({WRAPPED}|{DOCUMENTS})$")] = WRAPPED
    """Rows of the training data: documents are one a row, which ends with its document."""
    network: str = TRANSFORMER
    """The network: of NETWORKS, or module:object, which the caller gives."""
    objective: str | None = None
    """The objective: of OBJECTIVES, or module:object, which the caller gives; null: the method's."""
    attend_padding: bool = False
    """Whether the model was trained to read padding like text."""
    schedule: str | None = None
    """The noise schedule of training, for information alone."""
    model: dict[str, Any]
    """The settings of the network."""

    @property
    def objective_name(self) -> str:
        """The objective, also of folders that name none."""
        return self.objective or METHODS.resolve(self.method).objective


@dataclass(frozen=True)
class LoadedModel:
    """A model for inference, with its tokenizer and where it comes from."""

    model: Any  # a FeatureModel
    tokenizer: Tokenizer | None
    method: str
    step: int
    rows: str = WRAPPED  # of the training data: wrapped, or documents (one a row, which ends with its document)
    network: str = TRANSFORMER
    objective_name: str | None = None  # None: the method's
    own_objective: Objective | None = None  # the one of the caller; None: it is built in
    attend_padding: bool = False
    schedule: str | None = None

    @cached_property
    def objective(self) -> Objective:
        """The objective under which the model's text is scored."""
        if self.own_objective is not None:
            return self.own_objective
        name = self.objective_name or METHODS.resolve(self.method).objective
        process = ForwardProcess(self.model.config.mask_id, attend_padding=self.attend_padding)
        return choose_objective(name, process)

    def describe(self, model: FeatureModel) -> ModelDescription:
        """Return the content of config.json for this model, or another form of it."""
        return ModelDescription(
            format=MODEL_FORMAT,
            method=self.method,
            step=self.step,
            rows=self.rows,
            network=self.network,
            objective=self.objective_name or METHODS.resolve(self.method).objective,
            attend_padding=self.attend_padding,
            schedule=self.schedule,
            model=read_config(model),
        )


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


def load_model(
    path: str | Path,
    *,
    verify: bool | None = None,
    network: GivenNetwork | None = None,
    objective: GivenObjective | None = None,
) -> LoadedModel:
    """Load the model of a run, a checkpoint or a folder; by default checksums are compared where there are any.

    A network or an objective that is not built in is given by the caller: nothing in the folder is imported.
    """
    folder = find_model_folder(path)
    described = read_config_json(folder)
    try:
        kind = choose_network(described.network, network)
        process = ForwardProcess(
            described.model.get("mask_id"), attend_padding=described.attend_padding
        )
        chosen = choose_objective(described.objective_name, process, objective)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    model = build_network(kind, read_shape(folder, described, kind), seed=None)
    check_stored_tensors(folder, model)  # before memory is taken and a large file is read
    is_verified = (folder / "checksums.json").is_file() if verify is None else verify
    if is_verified and (problem := find_damage(folder, is_loaded=True)):
        remedy = f"{COPY_AGAIN} or, if you changed it yourself, delete checksums.json"
        raise ValueError(f"{folder} is damaged: {problem}: {remedy}")
    allocate_parameters(model)
    load_weights(model, dequantize(read_weights(folder)))
    return LoadedModel(
        model.eval(),
        Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None,
        described.method,
        described.step,
        described.rows,
        network=described.network,
        objective_name=described.objective_name,
        own_objective=None if described.objective_name in OBJECTIVES else chosen,
        attend_padding=described.attend_padding,
        schedule=described.schedule,
    )


def read_config_json(folder: Path) -> ModelDescription:
    """Read and check a model's config.json."""
    path = folder / "config.json"
    remedy = f"{COPY_AGAIN}, or update adlm"
    content = read_object(path, remedy)
    known = {
        key: content[key] for key in ModelDescription.model_fields if content.get(key) is not None
    }
    try:
        described = ModelDescription.parse("json", **known)
        if described.network == TRANSFORMER:
            METHODS.resolve(described.method)
        _ = described.objective_name
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {remedy}") from error
    return described


def require_transformer(network: str, what: str) -> None:
    """Raise ValueError for what only the built-in network can do."""
    if network != TRANSFORMER:
        raise ValueError(
            f"{what} needs the transformer, and this model has the network {network!r:.80}: "
            "keep it as a model folder (LM.save)"
        )


def read_shape(folder: Path, described: ModelDescription, network: NetworkClass | nn.Module) -> Any:
    """Return the config of the network that a folder describes."""
    try:
        return read_network_config(network, described.model)
    except (ValueError, TypeError) as error:  # TypeError: this version has no such setting
        path = folder / "config.json"
        raise ValueError(f"{path}: {error}: {COPY_AGAIN}, or update adlm") from error


def load_weights(model: FeatureModel, weights: Mapping[str, Tensor]) -> None:
    """Fill a network with its stored weights, of which tied ones are stored once."""
    assert isinstance(model, nn.Module)
    tied = {name: weights[kept] for name, kept in find_tied(model).items() if name not in weights}
    model.load_state_dict({**weights, **tied})


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
    exported = folder / EXPORTED_WEIGHTS
    return exported if exported.is_file() else folder / "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """What the header of a weights file says of a tensor."""

    shape: tuple[int, ...]
    dtype: str


def read_header(folder: Path) -> dict[str, StoredTensor]:
    """Read the header of a model's weights, and none of them."""
    path = find_weights_file(folder)
    header = {}
    try:
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                part = file.get_slice(name)
                stored = StoredTensor(tuple(part.get_shape()), part.get_dtype())
                header[name.removeprefix(EXPORTED_PREFIX)] = stored
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): {COPY_AGAIN}") from error
    return header


def count_stored_parameters(folder: Path) -> int:
    """Count the parameters of a model by its weights file, without building the network."""
    header = read_header(folder)
    quantized = {name + SCALE for name, each in header.items() if each.dtype == INT8}
    return sum(math.prod(each.shape) for name, each in header.items() if name not in quantized)


@dataclass(frozen=True)
class ExpectedTensor:
    """What a model can load a tensor from."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] | None  # None: any

    def fits(self, stored: StoredTensor | None) -> bool:
        """Return whether a tensor of the header is this one."""
        if stored is None or stored.shape != self.shape:
            return False
        return self.dtypes is None or stored.dtype in self.dtypes


def list_expected(
    model: FeatureModel, header: Mapping[str, StoredTensor]
) -> dict[str, ExpectedTensor]:
    """Return what a model is loaded from: floats and, for what the header has as int8, its scales."""
    assert isinstance(model, nn.Module)
    tied = find_tied(model)
    expected: dict[str, ExpectedTensor] = {}
    quantized: list[str] = []
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        stored = header.get(name)
        if stored is None and name in tied:
            continue
        if stored is not None and stored.dtype == INT8 and len(shape) == 2:
            expected[name] = ExpectedTensor(shape, (INT8,))
            quantized.append(name)
        elif tensor.is_floating_point():
            expected[name] = ExpectedTensor(shape, FLOAT_DTYPES)
        else:
            expected[name] = ExpectedTensor(shape, None)
    for name in sorted(quantized):
        expected[name + SCALE] = ExpectedTensor(expected[name].shape[:1], FLOAT_DTYPES)
    return expected


def check_stored_tensors(folder: Path, model: FeatureModel) -> None:
    """Raise ValueError unless the header of model.safetensors has the tensors that the model expects."""
    header = read_header(folder)
    expected = list_expected(model, header)
    for name in [*expected, *header]:
        stored = header.get(name)
        spec = expected.get(name)
        if spec is not None and spec.fits(stored):
            continue
        actual = "missing" if stored is None else f"{stored.dtype} {stored.shape}"
        expectation = "no such tensor" if spec is None else f"float {spec.shape}"
        raise ValueError(
            f"{folder}/config.json does not fit model.safetensors: {name:.80} is {actual}, "
            f"expected {expectation}: {COPY_AGAIN}, or update adlm"
        )


def list_loaded_files(folder: Path) -> set[str]:
    """Return the names of the files that a model is loaded from."""
    optional = {name for name in MODEL_FILES if (folder / name).exists()}
    return {*REQUIRED_FILES, *optional}


def list_training_files(folder: Path) -> set[str]:
    """Return the names of the files that a run resumes from, besides those of its model."""
    shards = {str(path.relative_to(folder)) for path in (folder / "training").glob("*")}
    return {"state.json", *shards}


def find_damage(folder: Path, *, is_loaded: bool = False) -> str:
    """Return how a checkpoint differs from its checksums.json; nothing if it does not.

    A model that `is_loaded` for inference needs no more than its own files.
    """
    try:
        checksums = read_json(folder / "checksums.json")
    except (ValueError, OSError) as error:
        return f"checksums.json cannot be read ({error})"
    if not isinstance(checksums, dict):
        checksums = {}

    required = list_loaded_files(folder)
    if not is_loaded:
        required |= list_training_files(folder)
    missing = sorted(required - set(checksums))
    if missing:
        return f"checksums.json does not list {missing[0]}"

    compared = set(checksums)
    if is_loaded:
        compared &= set(MODEL_FILES)
    for name in sorted(compared):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"checksums.json lists {name!r:.80}, which is outside the folder"
        if not (folder / name).is_file() or hash_file(folder / name) != checksums[name]:
            return f"{name} is missing or was changed (or checksums.json was)"
    return ""


def quantize(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Store matrices as int8 and `<name>.scale` (a float32 per row), vectors as float32; models compute in float."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not weight.is_floating_point():
            stored[name] = weight
            continue
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
        of = stored.get(name.removesuffix(SCALE))
        if name.endswith(SCALE) and of is not None and of.dtype == torch.int8:
            continue
        weights[name] = weight.float() * stored[name + SCALE][:, None] if is_quantized else weight
    return weights


def export_model(loaded: LoadedModel, folder: Path, *, is_quantized: bool = True) -> Path:
    """Write a model folder with its tokenizer, by default folded and quantized to one byte per weight."""
    model = fold_network(loaded.model) if is_quantized else loaded.model
    weights = collect_weights(model)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_tensors(
        folder / "model.safetensors", quantize(weights) if is_quantized else weights
    )
    files.write_json(folder / "config.json", loaded.describe(model).model_dump())
    if loaded.tokenizer is not None:
        loaded.tokenizer.save(folder)
    checksums = {
        name: sha for name, sha in compute_checksums(folder).items() if name in MODEL_FILES
    }  # not a README
    files.write_json(folder / "checksums.json", checksums)
    return folder


def collect_weights(model: FeatureModel) -> dict[str, Tensor]:
    """Return the weights that are stored of a network: tied ones once."""
    assert isinstance(model, nn.Module)
    stored = model.state_dict()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in stored}


def compute_checksums(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file by its relative name."""
    return {
        str(path.relative_to(folder)): hash_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
