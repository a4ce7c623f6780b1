"""From settings to the parts of a run: the model's shape, its task, whether it fits, where it goes on from."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from adlm import checkpoint
from adlm.config import Config, differences, load_config
from adlm.data.batches import ShuffledBatches
from adlm.data.shards import PreparedData, Rows, open_data
from adlm.data.sources import Source, open_source
from adlm.data.streaming import StreamedBatches, StreamedRows
from adlm.methods import ANCHOR_RULES, METHODS, build_anchor_rule, build_config, build_schedule, named
from adlm.models.costs import memory_estimate
from adlm.models.language_model import ModelConfig
from adlm.training.distributed import DistributedContext
from adlm.training.objective import Objective


def model_config(config: Config, data: PreparedData) -> ModelConfig:
    """The method's model in the preset's size, with the changes of the recipe and the data's vocabulary and length."""
    changes = {key: value for key, value in vars(config.model).items() if key != "preset" and value is not None}
    if changes.get("cond_dim") == 0:
        changes["cond_dim"] = None
    if not named(METHODS, config.method, "method").two_stages and changes.pop("anchor_layers", 0):
        raise ValueError(f"model.anchor_layers: {config.method} has one stage; its depth is model.denoiser_layers")
    return build_config(
        config.method,
        config.model.preset,
        vocab_size=data.vocab_size,
        mask_id=data.mask_id,
        length=data.length,
        **changes,
    )


def open_data_on_all_ranks(config: Config, world: DistributedContext) -> PreparedData:
    """The prepared data, checked on every node and the same in every process."""
    found: dict[str, Any] = {"problem": None, "data": None}
    data = None
    try:
        data = open_data(config.data.path, verify=config.data.verify and world.local_rank == 0)
        found["data"] = data.manifest["settings_sha256"]
    except (ValueError, OSError) as error:  # raised below, when the others know
        found["problem"] = str(error)
    told = world.all_gather(found)
    problems = [each["problem"] for each in told if each["problem"]]
    if problems or data is None:
        raise ValueError(problems[0])
    if any(each["data"] != found["data"] for each in told):
        raise ValueError(f"the processes do not see the same data in {config.data.path}: copy it again to every node")
    return data


@contextmanager
def lock_run_folder(folder: Path, world: DistributedContext) -> Iterator[None]:
    """The run's folder, for this run alone; the lock goes with the process, however that ends."""
    with ExitStack() as held:

        def lock() -> None:
            import fcntl

            if folder.exists() and not folder.is_dir():
                raise ValueError(f"folder={folder} is a file: give the run another folder")
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((folder / ".lock").open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process trains in {folder}: wait for it, or take another folder") from None

        if os.name == "posix":
            world.run_on_rank0(lock)
        yield


def build_objective(config: Config, model: ModelConfig, data: PreparedData, *, on_gpu: bool) -> Objective:
    """What the recipe asks of the model."""
    asked = config.objective
    rule = None
    if model.anchor_layers:
        known = inspect.signature(named(ANCHOR_RULES, asked.anchor_rule, "anchor rule")).parameters
        given: dict[str, Any] = {
            "max_count": asked.max_count,
            "max_fraction": asked.max_fraction,
            "top_fraction": asked.top_fraction,
            "fraction": asked.fraction,
            "ids": asked.ids,
            "seed": config.seed,
            "vocab_size": data.vocab_size,
        }
        options = {key: value for key, value in given.items() if key in known and value is not None}
        if "counts" in known:
            options["counts"] = data.counts()
        if "document_counts" in known:
            options |= document_counts(data)
        rule = build_anchor_rule(asked.anchor_rule, **options)
    return Objective(
        is_causal=model.is_causal,
        mask_id=model.mask_id,
        anchor_rule=rule,
        schedule=build_schedule(asked.schedule, **asked.schedule_options),
        anchor_scope=asked.anchor_scope,
        peak_anchor_weight=asked.anchor_weight,
        anchor_ramp=asked.anchor_ramp,
        attend_padding=asked.attend_padding,
        discrete_steps=asked.discrete_steps,
        multiple=64 if on_gpu else 1,
    )


def open_stream(config: Config) -> Source | None:
    """The source that is trained on as it comes, if there is one."""
    if config.data.stream is None:
        return None
    known = [name for name in inspect.signature(open_source).parameters if name != "spec"]
    unknown = [name for name in config.data.stream_options if name not in known]
    if unknown:
        raise ValueError(f"data.stream_options has no {', '.join(unknown)}; it takes: {', '.join(known)}")
    return open_source(config.data.stream, **config.data.stream_options)


def data_key(data: PreparedData, stream: Source | None) -> str:
    """What the rows of a run follow from: a run goes on with the same."""
    key = str(data.manifest["settings_sha256"])
    if stream is None:
        return key
    identity = json.dumps([key, stream.identity], sort_keys=True)
    return hashlib.sha256(identity.encode("utf-8")).hexdigest()


def build_dataloader(
    config: Config, data: PreparedData, stream: Source | None, world: DistributedContext
) -> ShuffledBatches | StreamedBatches:
    """The rows to train on, in this process's share of every batch."""
    if stream is None:
        return ShuffledBatches(
            data.rows("train"),
            config.batch,
            seed=config.seed,
            rank=world.rank,
            size=world.size,
            workers=config.data.workers,
        )
    rows = StreamedRows(
        stream,
        data.tokenizer,
        data.length,
        config.batch // world.size,
        is_wrapped=not data.is_padded,
        block=config.data.shuffle,
        seed=config.seed,
        rank=world.rank,
        size=world.size,
    )
    return StreamedBatches(rows, config.batch, workers=config.data.workers)


def held_out_rows(data: PreparedData) -> Rows:
    """The rows that a run is measured on."""
    count = len(data.rows("valid")) if "valid" in data.splits else 0
    if count < 2:
        raise ValueError(
            f"{data.folder} has {count} valid rows, and validation needs 2: prepare it with --valid SOURCE, or with a "
            "--valid-share above 0"
        )
    return data.rows("valid")


def restore_data_state(states: list[dict[str, Any]], world: DistributedContext, *, is_stream: bool) -> dict[str, Any]:
    """Where this process's batches go on, from where those of all processes stood."""
    if is_stream and len(states) != world.size:
        raise ValueError(
            f"a run on a stream was begun by {len(states)} processes and cannot go on with {world.size}: every process "
            "reads its own documents"
        )
    return states[world.rank if is_stream else 0]


def document_counts(data: PreparedData, most: int = 100_000) -> dict[str, Any]:
    """In how many of the first rows each token occurs, for tf-idf: a row counts as a document."""
    rows, counts = data.rows("train"), torch.zeros(data.vocab_size, dtype=torch.int64)
    count = min(len(rows), most)
    for piece in torch.arange(count).split(1024):
        ordered = rows.fetch(piece)[0].sort(-1).values
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        counts += torch.bincount(ordered[is_first], minlength=data.vocab_size)
    return {"document_counts": counts, "documents": count}


def available_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where it does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return None
    free = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return min([max(pages, free.get("MemAvailable", 0)), *allowed_memory()])


def allowed_memory() -> list[int]:
    """What a container leaves to this process, if it says so."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used = ((group / name).read_text("utf-8").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return []
    return [] if most == "max" else [max(0, int(most) - int(used))]


def check_memory(
    config: Config, model: ModelConfig, world: DistributedContext, rows: int, precision: torch.dtype
) -> None:
    """Refuse what cannot fit before anything is built. The figure is an estimate; memory_check=false goes on anyway."""
    kind = config.parallel.kind
    shards = world.size if kind == "fsdp" else (config.parallel.shard or world.local_size) if kind == "hsdp" else 1
    needed = memory_estimate(
        model,
        rows=rows,
        length=model.length,
        bytes_per_activation=2 if precision == torch.bfloat16 else 4,
        ema=config.ema is not None,
        optimizer=config.optimizer.name,
        shards=shards,
        checkpoint_activations=config.parallel.checkpoint_activations,
        is_cuda=world.device.type == "cuda",
    )
    free = available_memory(world.device)
    here = 1 if world.device.type == "cuda" else world.local_size  # processes that share this memory
    if config.memory_check and free is not None and needed.total * here > free:
        size, passing = checkpoint.size, needed.activations + needed.head
        raise MemoryError(
            f"a step of {rows} × {model.length} tokens takes about {size(needed.total * here)} (weights, gradients, "
            f"optimizer and average {size((needed.total - passing) * here)}, activations {size(passing * here)}), and "
            f"{size(free)} are free on {world.device}. Make micro_batch smaller (now {rows}), set "
            "parallel.checkpoint_activations=true, share the weights with parallel.kind=fsdp, or take a smaller "
            "model.preset; memory_check=false goes on all the same"
        )


def find_resume_checkpoint(config: Config, key: str) -> Path | None:
    """The checkpoint to go on from, checked; None for a run that begins."""
    folder = Path(config.folder)
    kept = folder / "checkpoints"
    path = checkpoint.latest(kept) if config.resume == "auto" else Path(config.resume).resolve()
    if path is None:
        return None
    if not path.is_dir():
        raise ValueError(f"resume={config.resume} is no checkpoint; there are: {names_in(kept)}")
    saved = folder / "config.yaml"
    if saved.is_file() and (changed := differences(load_config(saved), config)):
        raise ValueError(
            f"{folder} holds a run with other settings: {'; '.join(changed)}. "
            "Give this run another folder, or its settings back"
        )
    checkpoint.verified(path)
    state = checkpoint.read_state(path)
    if state["data"] != key:
        raise ValueError(
            f"{folder} was trained on other data than {config.data.path} (another text, tokenizer or length): "
            "give it the data that it began with, or another folder"
        )
    if config.resume != "auto" and path.parent == kept.resolve():
        for later in checkpoint.complete(kept):  # they belong to a future that will not be
            if later.name > path.name:
                aside = kept / f"set-aside-{later.name}"
                if aside.exists():  # of an earlier going back
                    shutil.rmtree(aside)
                os.rename(later, aside)
        best = kept / checkpoint.BEST
        if best.is_symlink() and not best.exists():
            best.unlink()
        checkpoint.link(kept / checkpoint.LATEST, path.name)
    return path


def names_in(folder: Path) -> str:
    return ", ".join(str(path) for path in checkpoint.complete(folder)) or "none"
