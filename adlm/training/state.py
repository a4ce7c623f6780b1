"""The checkpoints of a run (docs/run_folder.md): written atomically, their checksums compared before resuming."""

import errno
import os
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import PositiveInt
from rich.filesize import decimal as format_bytes
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from adlm import files
from adlm.data.tokenizers import Tokenizer
from adlm.distributed import run_on_rank0
from adlm.files import read_json
from adlm.models.folder import (
    BEST,
    COPY_AGAIN,
    LATEST,
    ModelDescription,
    compute_checksums,
    find_damage,
    list_checkpoints,
    read_config_json,
)
from adlm.settings import Settings, Stored

RUN_FORMAT = 2  # of state.json and training/
# How other libraries say ENOSPC and EFBIG.
DISK_FULL = ("No space left", "file write failed", "os error 28", "os error 27")

# True of every run of one process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class CheckpointSettings(Settings):
    """Checkpoints."""

    every: PositiveInt = 5000
    """Steps between two checkpoints."""
    keep: PositiveInt = 2
    """Number of latest checkpoints to keep, besides the best."""
    background: bool = True
    """Write in a thread while training continues."""


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
    description: ModelDescription  # the content of config.json, but for the step
    tokenizer: Tokenizer | None
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
            self.description.model_copy(update={"step": snapshot.step}).model_dump(),
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


class RunState(Stored):
    """The state of a run at a step: with the tensors, all that a checkpoint holds."""

    step: int
    """The steps that were taken."""
    batches: list[dict[str, Any]]
    """The state of the batches of each process."""
    valid: dict[str, int | float]
    """The metrics of the last validation, with its step."""
    best: float | None
    """The best metric so far."""
    seconds: float
    """The duration of the run."""
    ema_updates: int
    """The updates of the average of the weights."""
    window: list[list[float]]
    """The metrics of the steps that are not logged yet."""
    recent: list[float]
    """The losses that the guard compares with."""
    data: str
    """The hash of the data."""
    init_sha256: str | None = None
    """The hash of the weights of init."""


def start_state(data: str, init_sha256: str | None) -> RunState:
    """Return the state of a new run."""
    return RunState(
        step=0,
        batches=[],
        valid={},
        best=None,
        seconds=0.0,
        ema_updates=0,
        window=[],
        recent=[],
        data=data,
        init_sha256=init_sha256,
    )


def read_state(path: Path) -> RunState:
    """Read the state of the run at a checkpoint."""
    content = read_json(path / "state.json")
    version = content.get("format", 1) if isinstance(content, dict) else None
    if version != RUN_FORMAT:
        problem = (
            f"{path} has run format {version}, and this version of adlm resumes format {RUN_FORMAT}"
        )
        remedy = "start a new run (folder=NEW), or resume with the version that wrote it; the model can be loaded"
        raise ValueError(f"{problem}: {remedy}")
    return RunState.read(content, str(path / "state.json"), COPY_AGAIN)


def restore_links(folder: Path) -> None:
    """Turn `latest` and `best` into links again where copying the run made them folders."""
    for path in (folder / LATEST, folder / BEST):
        if path.is_dir() and not path.is_symlink():
            named = folder / name_checkpoint(read_config_json(path).step)
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
