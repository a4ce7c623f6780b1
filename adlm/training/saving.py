"""A run to a snapshot and back, however its weights are shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from adlm.checkpoint import Snapshot, load_training, read_state, read_weights
from adlm.training.distributed import DistributedContext, ParallelModel, host_copy, whole
from adlm.training.ema import EMA
from adlm.training.optim import optimizer_tensors


def training_tensors(shared: ParallelModel, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Everything that training changes, by name; these are the tensors themselves."""
    weights = {f"weights.{name}": p.detach() for name, p in shared.model.named_parameters()}
    return weights | {f"optimizer.{key}": t for key, t in optimizer_tensors(shared.model, optimizers).items()}


def usable_weights(shared: ParallelModel, ema: EMA | None, world: DistributedContext) -> dict[str, Tensor]:
    """The weights to use, whole, in host memory of the first process; shards are gathered, so all must ask."""
    tensors = ema.shadow if ema is not None else {name: p.detach() for name, p in shared.model.named_parameters()}
    all_gather = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if world.is_first:
            all_gather[name] = full.to("cpu", copy=True)
    return all_gather


def snapshot(
    step: int,
    shared: ParallelModel,
    optimizers: Sequence[Optimizer],
    ema: EMA | None,
    world: DistributedContext,
    state: dict[str, Any],
    *,
    is_best: bool,
) -> Snapshot:
    """A copy of the run as it stands. What is whole in every process is copied by the first alone."""

    training = {
        name: host_copy(tensor, shared.host_mesh)
        for name, tensor in training_tensors(shared, optimizers).items()
        if world.is_first or isinstance(tensor, DTensor)
    }
    return Snapshot(step, usable_weights(shared, ema, world), training, state, is_best)


@torch.no_grad()
def restore(
    path: Path, shared: ParallelModel, optimizers: Sequence[Optimizer], ema: EMA | None, world: DistributedContext
) -> dict[str, Any]:
    """Put a checkpoint into a run that was built alike, on whatever number of processes; its state."""
    load_training(path, training_tensors(shared, optimizers), world.writing)
    state = read_state(path)
    if ema is not None:
        ema.load(read_weights(path), state["ema_updates"])
    return state
