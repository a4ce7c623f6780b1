"""The folder of a checkpoint: safetensors and JSON, written whole or not at all, checked before it is believed.

checkpoints/step-00001000/model.safetensors   the weights to use (the average, if there is one)
                          config.json         the model's shape, the method, the step, what a row is
                          tokenizer.json …    as in the prepared data
                          training/           weights and optimizer, by torch.distributed.checkpoint
                          state.json          where the run stands: a plain dict
                          checksums.json      sha256 of all of these
checkpoints/latest, best                      links
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from adlm.data.shards import sha256_of, sync
from adlm.data.tokenizers import Tokenizer
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.models.quantized import dequantized, quantize

LATEST, BEST, PARTIAL = "latest", "best", ".partial-"
FORMAT = 1
WRAPPED = "wrapped"
FULL = ("No space left", "file write failed", "os error 28", "os error 27")  # how other libraries say ENOSPC and EFBIG


@dataclass(frozen=True)
class Snapshot:
    """A run at one step, in host memory: what is written cannot change any more."""

    step: int
    weights: dict[str, Tensor]  # to use; on the first process only
    training: dict[str, Tensor]  # this process's part
    state: dict[str, Any]
    is_best: bool = False


class CheckpointWriter:
    """Writes snapshots, in the background if asked; an error there is raised by the next call here."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        method: str,
        tokenizer: Tokenizer | None,
        *,
        rows: str = WRAPPED,
        keep: int = 2,
        background: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder, self.config, self.method, self.tokenizer, self.rows = folder, config, method, tokenizer, rows
        self.keep, self.background, self.group = keep, background, group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Write a snapshot, after the one before it is done."""
        self.wait()
        if not self.background:
            self._write(snapshot)
            return
        self.thread = threading.Thread(target=self._guarded, args=(snapshot,), name="checkpoint")
        self.thread.start()

    def wait(self) -> None:
        """Until what was saved is on the disk, or has failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _guarded(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except BaseException as error:  # raised again by wait(), in the thread that can stop the run
            self.error = error

    def _write(self, snapshot: Snapshot) -> None:
        final = self.folder / name_of(snapshot.step)
        partial = self.folder / f"{PARTIAL}{final.name}"
        try:
            self._agree(lambda: self._begin(partial, snapshot))
            writer = HuggingFaceStorageWriter(str(partial / "training"), save_distributed=True)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(snapshot.training, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
            self._agree(lambda: self._publish(partial, final, snapshot))
        except BaseException as error:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            told = explained(error, self.folder, bytes_of(snapshot))
            raise told from (None if told is error else error)

    def _agree(self, action: Callable[[], None]) -> None:
        """The first process acts; all go on, or all raise."""
        error: Exception | None = None
        if self.rank == 0:
            try:
                action()
            except Exception as caught:  # raised below, when the others know
                error = caught
        if self.group is not None:
            told: list[str | None] = [None if error is None else str(error)]
            dist.broadcast_object_list(told, group=self.group, group_src=0)
            if told[0] is not None and error is None:
                error = OSError(f"the first process could not write: {told[0]}")
        if error is not None:
            raise error

    def _begin(self, partial: Path, snapshot: Snapshot) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"{PARTIAL}*"):  # of a run that was killed while it wrote
            shutil.rmtree(left)
        needed, free = bytes_of(snapshot), shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"{size(free)} are free")
        (partial / "training").mkdir(parents=True)

    def _publish(self, partial: Path, final: Path, snapshot: Snapshot) -> None:
        save_file({name: t.contiguous() for name, t in snapshot.weights.items()}, partial / "model.safetensors")
        write_json(partial / "config.json", described(self.config, self.method, snapshot.step, self.rows))
        write_json(partial / "state.json", snapshot.state)
        if self.tokenizer is not None:
            self.tokenizer.save(partial)
        write_json(partial / "checksums.json", checksums(partial))
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        self._remove(final)  # of a step that is taken again, from an earlier checkpoint
        os.rename(partial, final)
        sync(self.folder)
        link(self.folder / LATEST, final.name)
        if snapshot.is_best:
            link(self.folder / BEST, final.name)
        kept = {os.readlink(path) for name in (LATEST, BEST) if (path := self.folder / name).is_symlink()}
        for old in complete(self.folder)[: -self.keep]:
            if old.name not in kept:
                self._remove(old)

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint; from the first moment on, what is left of it no longer looks like one."""
        if path.exists():
            dying = path.with_name(f"{PARTIAL}old-{path.name}")
            shutil.rmtree(dying, ignore_errors=True)
            os.rename(path, dying)
            shutil.rmtree(dying)


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def complete(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; unfinished ones are not among them."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def latest(folder: Path) -> Path | None:
    """The checkpoint that a run would go on from."""
    path = folder / LATEST
    if path.exists():
        return path.resolve()
    left = complete(folder)
    return left[-1] if left else None  # killed between the rename and the link


def verified(path: Path) -> Path:
    """The same path, if every file of the checkpoint is as it was written."""
    if problem := damage(path):
        earlier = [other for other in complete(path.parent) if other.name < path.name]
        remedy = f"resume={earlier[-1]} goes on from the one before" if earlier else "there is none before it"
        raise ValueError(f"the checkpoint {path.name} is damaged: {problem}. Nothing was changed; {remedy}")
    return path


def damage(path: Path) -> str:
    """What is wrong with a checkpoint's files, or nothing."""
    if not (path / "checksums.json").is_file():
        return "checksums.json is missing"
    try:
        expected: dict[str, str] = dict(read_json(path / "checksums.json"))
    except ValueError as error:
        return f"checksums.json cannot be read ({error})"
    for name, digest in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing (or checksums.json is not as it was written)"
        if sha256_of(file) != digest:
            return f"{name} is not as it was written (or checksums.json is not)"
    return ""


def read_state(path: Path) -> dict[str, Any]:
    """Where the run stood."""
    state = read_json(path / "state.json")
    assert isinstance(state, dict)
    return state


def load_training(path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Fill tensors, whole or sharded, from a checkpoint of any number of processes."""
    reader = HuggingFaceStorageReader(str(path / "training"))
    known = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in known:
            raise ValueError(f"{path.name} has no {name}: it was made with another optimizer or another model")
        if tuple(known[name].size) != tuple(tensor.shape):  # type: ignore[union-attr]
            raise ValueError(f"{name} has shape {tuple(known[name].size)} in {path.name}, {tuple(tensor.shape)} here")  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights to use, by name."""
    file = path / "model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {file}") from None
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


@dataclass(frozen=True)
class Loaded:
    """A model to use, and what it came with."""

    model: LanguageModel
    tokenizer: Tokenizer | None
    method: str
    step: int
    rows: str = WRAPPED  # how text became rows: wrapped, or documents (one a row, which ends where its text ends)


def load(path: str | Path, *, verify: bool = False) -> Loaded:
    """A trained model from a run's folder (its latest checkpoint) or from a checkpoint's folder."""
    folder = Path(path)
    if (folder / "checkpoints").is_dir():
        found = latest(folder / "checkpoints")
        if found is None:
            raise FileNotFoundError(f"{folder} has no checkpoint yet: `adlm train` writes one at the latest at the end")
        folder = found
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{path} is neither a run's folder nor a checkpoint's: it has no config.json")
    if verify:
        verified(folder)
    about = read_json(folder / "config.json")
    if about.get("format", 0) > FORMAT:
        raise ValueError(f"{folder.name} has format {about['format']}, newer than {FORMAT}: update adlm")
    unknown = set(about["model"]) - {f.name for f in fields(ModelConfig)}
    if unknown:
        raise ValueError(f"{folder.name}/config.json has settings that this adlm does not know: {sorted(unknown)}")
    model = LanguageModel(ModelConfig(**about["model"]))
    try:
        model.load_state_dict(restored(dequantized(read_weights(folder)), model))
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"{folder}/model.safetensors is not the model of its config.json: {error}") from error
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    return Loaded(model.eval(), tokenizer, about["method"], about["step"], about.get("rows", WRAPPED))


def export(loaded: Loaded, folder: Path) -> Path:
    """A model to give away: folded, a byte a weight, with its tokenizer; `load` reads it like any other."""
    model = loaded.model.fold()
    weights = {name: t for name, t in model.state_dict().items() if not (model.config.tied and name == "head.weight")}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(quantize(weights), folder / "model.safetensors")
    write_json(folder / "config.json", described(model.config, loaded.method, loaded.step, loaded.rows))
    if loaded.tokenizer is not None:
        loaded.tokenizer.save(folder)
    parts = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")  # not a card beside them
    sums = {name: digest for name, digest in checksums(folder).items() if name in parts}
    write_json(folder / "checksums.json", sums)
    (folder / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone
    return folder


def described(config: ModelConfig, method: str, step: int, rows: str) -> dict[str, Any]:
    """What config.json says."""
    return {"format": FORMAT, "method": method, "step": step, "rows": rows, "model": asdict(config)}


def restored(weights: dict[str, Tensor], model: LanguageModel) -> dict[str, Tensor]:
    """A tied head is stored once."""
    if model.config.tied:
        weights = {**weights, "head.weight": weights["embed.weight"]}
    return weights


def checksums(folder: Path) -> dict[str, str]:
    """Relative name -> sha256 of every file."""
    return {str(path.relative_to(folder)): sha256_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{path} is not JSON ({error}): the file is damaged") from error


def link(path: Path, target: str) -> None:
    """Point a link somewhere else; at every moment it points somewhere."""
    fresh = path.with_name(f".{path.name}-link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target, target_is_directory=True)
    os.replace(fresh, path)
    sync(path.parent)


def bytes_of(snapshot: Snapshot) -> int:
    """About how much a checkpoint takes."""
    return sum(t.numel() * t.element_size() for t in (*snapshot.weights.values(), *snapshot.training.values()))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def explained(error: BaseException, folder: Path, needed: int) -> BaseException:
    """The error, said so that the user knows what is safe; others pass as they are."""
    # dcp gathers (error, traceback) of every process into an exception that is no Exception.
    failures = getattr(error, "failures", {}).values()
    causes: list[BaseException] = [part[0] if isinstance(part, tuple) else part for part in failures] or [error]
    text = " ".join(str(cause) for cause in causes)
    full = any(getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) for cause in causes)
    if not full and not any(sign in text for sign in FULL):
        if isinstance(error, Exception) and not isinstance(error, SafetensorError):  # an I/O error, as text
            return error
        return OSError(f"the checkpoint could not be written: {text}; what was there is as it was")
    kept = [path.name for path in complete(folder)]
    return OSError(
        errno.ENOSPC,
        f"the checkpoint could not be written: {text.strip()[:300]}. It takes about {size(needed)}; "
        f"what was there is as it was ({', '.join(kept) or 'none'}). Make room in {folder}, then run the same command",
    )
