"""What a run settles before it begins: its rows, memory and folder, and the checkpoint to resume from."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal as format_bytes

from adlm.config import Config, compare_configs, load_config
from adlm.devices import get_available_memory, get_device_name
from adlm.diffusion.features import FeatureModel
from adlm.distributed import DistributedContext
from adlm.files import file_lock
from adlm.models import folder as model_folder
from adlm.models.costs import estimate_memory
from adlm.models.language_model import ModelConfig
from adlm.training import state as run_state


def choose_micro_batch(config: Config, context: DistributedContext) -> int:
    """Return the rows of a forward pass in this process."""
    if config.batch % context.world_size:
        problem = f"batch={config.batch} must be a multiple of the {context.world_size} processes"
        raise ValueError(f"{problem}: choose another batch, or start another number of processes")
    rows = config.batch // context.world_size
    return min(config.micro_batch or rows, rows)


def check_memory(
    config: Config,
    model: ModelConfig,
    context: DistributedContext,
    rows: int,
    length: int,
    precision: torch.dtype,
) -> None:
    """Raise MemoryError if a step is estimated not to fit, before anything is built."""
    if not config.memory_check:
        return
    is_cuda = context.device.type == "cuda"
    shards = 1
    if config.parallel.kind == "fsdp":
        shards = context.world_size
    elif config.parallel.kind == "hsdp":
        shards = config.parallel.shard or context.local_world_size
    needed = estimate_memory(
        model,
        rows=rows,
        length=length,
        bytes_per_activation=2 if precision == torch.bfloat16 else 4,
        ema=config.ema is not None,
        shards=shards,
        checkpoint_activations=config.parallel.checkpoint_activations,
        is_cuda=is_cuda,
    )
    if not is_cuda:
        needed *= context.local_world_size  # processes that share this memory
    available = get_available_memory(context.device)
    if needed > available:
        sizes = f"about {format_bytes(needed)}; {format_bytes(int(available))} are free"
        raise MemoryError(
            f"a step of {rows} × {length} tokens takes {sizes} on {context.device}. Reduce "
            f"micro_batch (now {rows}), set parallel.checkpoint_activations=true, shard the weights "
            "with parallel.kind=fsdp, or choose a smaller model.preset; memory_check=false skips this"
        )


def lock_run_folder(folder: Path, exit_stack: ExitStack) -> None:
    """Lock the folder, so that no other process trains in it, until the exit stack or the process ends."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={folder} is a file: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    message = f"another process trains in {folder}: wait for it, or choose another folder"
    exit_stack.enter_context(file_lock(folder / ".lock", message))


def find_checkpoint(config: Config) -> Path | None:
    """Find the checkpoint to resume from, which need not exist if `resume` names it; None for a new run."""
    if config.resume == "auto":
        return model_folder.find_latest_checkpoint(Path(config.folder) / "checkpoints")
    return Path(config.resume).resolve()


def find_resume_checkpoint(config: Config, data_hash: str) -> Path | None:
    """Find and verify the checkpoint to resume from; None for a new run."""
    folder = Path(config.folder)
    checkpoints = folder / "checkpoints"
    run_state.restore_links(checkpoints)
    path = find_checkpoint(config)
    if path is None:
        return None
    if not path.is_dir():
        names = ", ".join(map(str, model_folder.list_checkpoints(checkpoints))) or "none"
        expected = f"expected auto or one of {names}"
        raise ValueError(f"resume={config.resume} is not a checkpoint: {expected}")
    run_state.verify_checkpoint(path)
    state = run_state.read_state(path)

    saved = folder / "config.yaml"
    changes = compare_configs(load_config(saved), config) if saved.is_file() else []
    if changes:
        remedy = "Choose another folder, or restore these settings to resume"
        raise ValueError(f"{folder} has a run with other settings: {'; '.join(changes)}. {remedy}")
    if state.data != data_hash:
        raise ValueError(
            f"{folder} was trained on other data than {config.data.path} (another text, tokenizer "
            "or length): resume with the same data, or choose another folder"
        )
    if config.resume != "auto" and path.parent == checkpoints.resolve():
        run_state.set_aside_later(path)
    return path


def restore_data_state(
    states: list[dict[str, Any]], context: DistributedContext, *, is_stream: bool
) -> dict[str, Any]:
    """Choose this rank's dataloader state from those of all ranks that wrote the checkpoint."""
    if is_stream and len(states) != context.world_size:
        problem = f"{context.world_size} processes cannot resume a streamed run of {len(states)}"
        raise ValueError(f"{problem}: start {len(states)} processes")
    return states[context.rank if is_stream else 0]


def describe_run(
    config: Config,
    model: FeatureModel,
    parallel_kind: str,
    context: DistributedContext,
    data: str,
    source: Path | None,
) -> str:
    """Describe the model, the device, the data and the checkpoint that the run starts from."""
    count = sum(parameter.numel() for parameter in model.parameters())
    device = get_device_name(context.device)
    if context.world_size > 1:
        device += f" × {context.world_size} processes ({parallel_kind})"
    name = config.method or config.model.network
    lines = [f"{name}, {count / 1e6:.1f}M parameters, on {device}", data]
    if source is not None:
        lines.append(f"resuming from {source}")
    elif config.init is not None:
        lines.append(f"weights from {config.init}")
    return "\n".join(lines)
