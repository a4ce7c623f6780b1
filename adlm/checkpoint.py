"""Checkpoints (docs/run_folder.md): safetensors and JSON, written atomically, checksums compared before resuming."""

import errno
import os
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.filesize import decimal as format_bytes
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from adlm import files
from adlm.data.tokenizers import CONFIG_FILES, Tokenizer
from adlm.distributed import run_on_rank0
from adlm.files import hash_file, read_json, read_object
from adlm.models.language_model import LanguageModel, ModelConfig, build_on_meta

LATEST, BEST = "latest", "best"
MODEL_FORMAT = 1  # of config.json and model.safetensors
RUN_FORMAT = 2  # of state.json and training/
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
DISK_FULL = (
    "No space left",
    "file write failed",
    "os error 28",
    "os error 27",
)  # other libraries' ENOSPC and EFBIG

# Form of the values of config.json (`matches_form`).
CONFIG_FORM = {
    "format": range(MODEL_FORMAT + 1),
    "method": str,
    "step": range(2**62),
    "model": dict,
}
CONFIG_FORM |= {"rows": (None, WRAPPED, DOCUMENTS)}


warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled"
)  # true of every run of one process


@dataclass(frozen=True)
class Snapshot:
    """A copy of a run at one step, in host memory."""

    step: int
    weights: dict[str, Tensor]  # for inference, unsharded; empty on other ranks than 0
    training: dict[str, Tensor]  # this rank's part
    state: dict[str, Any]
    is_best: bool = False

    def count_bytes(self) -> int:
        """Return about how much disk space the checkpoint takes."""
        return sum(
            t.numel() * t.element_size() for t in (*self.weights.values(), *self.training.values())
        )


def copy_to_host(
    tensors: Mapping[str, Tensor], *, is_main: bool = True, host_mesh: DeviceMesh | None = None
) -> dict[str, Tensor]:
    """Copy tensors to the host memory of rank 0, sharded ones whole or, with a mesh, each rank's shards to its own."""
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and host_mesh is not None:
            shard = tensor.to_local().detach().to("cpu", copy=True)
            copies[name] = DTensor.from_local(
                shard,
                host_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # by all ranks
        if is_main:
            copies[name] = whole.detach().to("cpu", copy=True)
    return copies


@dataclass
class CheckpointWriter:
    """Writes snapshots, by default in a background thread, whose errors the next call raises."""

    folder: Path
    config: ModelConfig
    method: str
    tokenizer: Tokenizer | None
    rows: str = WRAPPED
    keep: int = 2
    background: bool = True
    group: dist.ProcessGroup | None = None
    pending: Future[None] | None = field(default=None, init=False)
    executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"), init=False
    )

    def save(self, snapshot: Snapshot) -> None:
        """Write a snapshot after the one before it is written."""
        self.wait()
        self.pending = self.executor.submit(self._write, snapshot)
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Wait until the last snapshot is on the disk, and raise the error if writing it failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _write(self, snapshot: Snapshot) -> None:
        final = self.folder / name_checkpoint(snapshot.step)
        partial = self.folder / f"{files.PARTIAL}{final.name}"
        try:
            run_on_rank0(lambda: self._create_partial(partial, final, snapshot), self.group)
            writer = HuggingFaceStorageWriter(str(partial / "training"), save_distributed=True)
            dcp.save(
                snapshot.training,
                storage_writer=writer,
                process_group=self.group,
                no_dist=self.group is None,
            )
            run_on_rank0(lambda: self._publish(partial, final, snapshot), self.group)
        except BaseException as error:
            if self.group is None or dist.get_rank(self.group) == 0:
                files.remove_partial_folders(self.folder)
            explained = explain_write_error(error, self.folder, snapshot.count_bytes())
            raise explained from (None if explained is error else error)

    def _create_partial(self, partial: Path, final: Path, snapshot: Snapshot) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files.remove_partial_folders(self.folder)  # of a run that was killed
        free = shutil.disk_usage(self.folder).free
        if snapshot.count_bytes() > free:
            raise OSError(errno.ENOSPC, f"{format_bytes(free)} are free")
        files.create_partial_folder(final)
        (partial / "training").mkdir()

    def _publish(self, partial: Path, final: Path, snapshot: Snapshot) -> None:
        files.write_tensors(partial / "model.safetensors", snapshot.weights)
        files.write_json(
            partial / "config.json",
            build_config_json(self.config, self.method, snapshot.step, self.rows),
        )
        files.write_json(partial / "state.json", {**snapshot.state, "format": RUN_FORMAT})
        if self.tokenizer is not None:
            self.tokenizer.save(partial)
        files.write_json(partial / "checksums.json", compute_checksums(partial))
        files.publish_folder(partial, final)  # it exists if the run went back to an earlier one
        files.replace_link(self.folder / LATEST, final.name)
        if snapshot.is_best:
            files.replace_link(self.folder / BEST, final.name)
        linked = {
            os.readlink(path)
            for name in (LATEST, BEST)
            if (path := self.folder / name).is_symlink()
        }
        for old in list_checkpoints(self.folder)[: -self.keep]:
            if old.name not in linked:
                files.remove_folder(old)


def name_checkpoint(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def find_latest_checkpoint(folder: Path) -> Path | None:
    """Find the checkpoint that a run resumes from."""
    if (folder / LATEST).exists():
        return (folder / LATEST).resolve()
    return next(reversed(list_checkpoints(folder)), None)  # killed between the rename and the link


def verify_checkpoint(path: Path) -> Path:
    """Return the path if all files of the checkpoint match their checksums; raise ValueError otherwise."""
    if problem := find_damage(path):
        earlier = [other for other in list_checkpoints(path.parent) if other.name < path.name]
        remedy = (
            f"resume={earlier[-1]} resumes from the one before"
            if earlier
            else "there is none before it"
        )
        raise ValueError(
            f"the checkpoint {path.name} is damaged: {problem}. Nothing was changed; {remedy}"
        )
    return path


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


STATE_FORM: dict[str, Any] = {
    "step": int,
    "seconds": (int, float),
    "batches": list,
    "valid": dict,
    "window": list,
}
STATE_FORM |= {"recent": list, "best": (int, float, None), "ema_updates": int, "data": str}


def read_state(path: Path) -> dict[str, Any]:
    """Read the state of the run at a checkpoint."""
    content = read_json(path / "state.json")
    version = content.get("format", 1) if isinstance(content, dict) else None
    if version != RUN_FORMAT:
        problem = (
            f"{path} has run format {version}, and this version of adlm resumes format {RUN_FORMAT}"
        )
        remedy = "start a new run (folder=NEW), or resume with the version that wrote it; the model can be loaded"
        raise ValueError(f"{problem}: {remedy}")
    return read_object(path / "state.json", STATE_FORM, COPY_AGAIN)


def restore_links(folder: Path) -> None:
    """Turn `latest` and `best` into links again where copying the run made them folders."""
    for path in (folder / LATEST, folder / BEST):
        if path.is_dir() and not path.is_symlink():
            named = folder / name_checkpoint(read_config_json(path)[0]["step"])
            if named.exists() and not find_damage(named):
                files.remove_folder(path)
            else:
                files.remove_folder(named)
                files.rename_folder(path, named)
            files.replace_link(path, named.name)


def set_aside_later(path: Path) -> None:
    """Rename the checkpoints after one, and point `latest` to it."""
    for later in list_checkpoints(path.parent):
        if later.name > path.name:
            renamed = path.with_name(f"set-aside-{later.name}")
            files.remove_folder(renamed)  # from setting it aside before
            files.rename_folder(later, renamed)
    best = path.with_name(BEST)
    if best.is_symlink() and not best.exists():
        files.remove_file(best)
    files.replace_link(path.with_name(LATEST), path.name)


def load_training_tensors(
    path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Fill tensors, whole or sharded, from a checkpoint that any number of processes wrote."""
    reader = HuggingFaceStorageReader(str(path / "training"))
    saved = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        shape = getattr(saved.get(name), "size", None)
        if shape != tensor.shape:
            problem = f"has no {name}" if shape is None else f"has {name} of shape {tuple(shape)}"
            problem = f"{path.name} {problem}, expected shape {tuple(tensor.shape)}, of another model or optimizer"
            raise ValueError(
                f"{problem}: restore those settings to resume, or start a new run (folder=NEW)"
            )
    dcp.load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)


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
        return content, ModelConfig(**content["model"])
    except (
        ValueError,
        TypeError,
    ) as error:  # TypeError: a setting is missing, or this version has no such
        raise ValueError(f"{path}: {error}: {COPY_AGAIN}, or update adlm") from error


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
        "model": asdict(config),
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


def explain_write_error(error: BaseException, folder: Path, needed: int) -> BaseException:
    """Turn a full disk or an I/O error into a message with a remedy; return other errors as they are."""
    # dcp gathers (error, traceback) of every rank into an exception that is no Exception.
    causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
    text = " ".join(map(str, causes)).strip()[:300]
    is_full = any(
        getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        for cause in causes
    )
    is_full = is_full or any(sign in text for sign in DISK_FULL)
    if not is_full and isinstance(error, Exception) and not isinstance(error, SafetensorError):
        return error
    earlier = ", ".join(path.name for path in list_checkpoints(folder)) or "none"
    return OSError(
        errno.ENOSPC if is_full else errno.EIO,
        f"the checkpoint could not be written: {text}. It takes about {format_bytes(needed)}; earlier checkpoints are "
        f"unchanged ({earlier}). Make room in {folder}, then run the same command",
    )
