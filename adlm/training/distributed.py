"""Many processes around a plain model: what it means to share a batch, the weights, or both."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from adlm.config import ParallelSettings
from adlm.diffusion.masking import NoisyBatch
from adlm.diffusion.objectives import Loss
from adlm.generate import pick_device
from adlm.methods import training_loss
from adlm.models.language_model import LanguageModel
from adlm.models.transformer import Layer

ALONE = ParallelSettings()
PATIENCE = timedelta(minutes=30)  # for the slowest process, in a collective


class LossModule(nn.Module):
    """A model and its loss as one module: the loss runs inside the forward that DDP and FSDP wrap."""

    def __init__(self, model: LanguageModel, *, score_entropy: bool = False) -> None:
        super().__init__()
        self.model, self.score_entropy = model, score_entropy

    def forward(self, batch: NoisyBatch, anchor_weight: Tensor | None) -> Loss:
        return training_loss(
            self.model, batch, anchor_weight=anchor_weight, score_entropy=self.score_entropy, check=False
        )


@dataclass(frozen=True)
class DistributedContext:
    """The processes of a run, and this one among them."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this node
    local_size: int = 1  # processes of this node
    host: dist.ProcessGroup | None = None  # for small things that must not wait for a device
    writing: dist.ProcessGroup | None = None  # for checkpoints, whose writing has a thread of its own

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes, of numbers on the host."""
        if self.host is not None:
            dist.all_reduce(values, group=self.host)
        return values

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(self.sum(torch.tensor(float(flag)))) if self.size > 1 else flag

    def run_on_rank0(self, act: Callable[[], Path | None] | Callable[[], None]) -> Path | None:
        """The first process acts; all have what it found, or all raise."""
        found, error = None, None
        if self.is_first:
            try:
                found = act()
            except Exception as caught:  # raised below, when the others know
                error = caught
        if self.host is not None:
            told = [None if found is None else str(found), None if error is None else str(error)]
            dist.broadcast_object_list(told, group=self.host, group_src=0)
            found = None if told[0] is None else Path(told[0])
            if told[1] is not None and error is None:
                error = ValueError(told[1])
        if error is not None:
            raise error
        return found

    def all_gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """What every process says, in order."""
        if self.host is None:
            return [value]
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, value, group=self.host)
        return told

    def wait(self) -> None:
        """For all processes."""
        if self.host is not None:
            dist.barrier(group=self.host)


@contextmanager
def init_distributed(device: str) -> Iterator[DistributedContext]:
    """The world that torchrun describes in the environment; without it, this process alone."""
    chosen = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_torchelastic_launched():
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # alone, each would write the whole run into the same folder
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but this process was not started by torchrun: start it with "
                "torchrun --nproc-per-node N -m adlm train …, or unset WORLD_SIZE for a run of one process"
            )
        yield DistributedContext(chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
    store = dist.PrefixStore(rendezvous_prefix(store, rank, size), store)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE, store=store, rank=rank, world_size=size)
    try:
        host, writing = (dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
        here, there = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        yield DistributedContext(chosen, rank, size, here, there, host, writing)
    finally:
        dist.destroy_process_group()


def rendezvous_prefix(store: dist.Store, rank: int, size: int) -> str:
    """A name that only the processes alive now know.

    torchrun starts dead processes again with the store that the dead wrote their addresses to, and its count of
    restarts differs between nodes (pytorch issue 135712). So each says a name of its own, the first lists them, and
    the list holds once all that are on it have said so.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + PATIENCE.total_seconds()
    here = [f"adlm/here/{other}" for other in range(size)]
    store.set(here[rank], mine)
    while time.monotonic() < deadline:
        if rank == 0 and store.check(here):
            store.set("adlm/listed", " ".join(store.get(key).decode() for key in here))
        listed = store.get("adlm/listed").decode().split() if store.check(["adlm/listed"]) else []
        if mine in listed:
            place = hashlib.sha256(" ".join(listed).encode()).hexdigest()[:16]
            store.set(f"adlm/agreed/{place}/{rank}", "")
            if store.check([f"adlm/agreed/{place}/{other}" for other in range(size)]):
                return place
        time.sleep(0.02)
    raise TimeoutError(f"not all of {size} processes came within {PATIENCE}")


@dataclass(frozen=True)
class ParallelModel:
    """A learner as its processes run it, and what differs between the ways to share it."""

    module: nn.Module  # to call
    model: LanguageModel  # whose parameters these are (sharded, with fsdp)
    kind: str
    host_mesh: DeviceMesh | None = None  # of sharded weights: the same processes, for copies in host memory

    def loss(self, batch: NoisyBatch) -> Loss:
        """The loss without a backward after it; sharded weights are put away again, which a backward would do."""
        loss = self.module(batch, None)
        if isinstance(self.module, FSDPModule):
            self.module.reshard()
        return loss

    def without_sync(self) -> AbstractContextManager[Any]:
        """For all micro-batches but the last: with ddp, gradients stay in their process. Sharded ones are shared out
        at once, because whole ones may not fit."""
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()


def parallelize(learner: LossModule, world: DistributedContext, how: ParallelSettings = ALONE) -> ParallelModel:
    """Apply data or weight sharding from outside; the model does not know."""
    kind = how.kind
    if kind == "auto":
        kind = "ddp" if world.size > 1 else "none"
    if kind == "none" and world.size > 1:
        raise ValueError(f"parallel.kind=none, but torchrun started {world.size} processes: use ddp, fsdp or hsdp")
    if kind != "none" and world.host is None:
        raise ValueError(f"parallel.kind={kind} needs torchrun: torchrun --nproc-per-node N -m adlm train …")
    layers = [module for module in learner.modules() if isinstance(module, Layer)]
    if how.checkpoint_activations:
        for layer in layers:  # the instance's own forward: names and parameters stay as they are
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    if kind == "none":
        return ParallelModel(learner, learner.model, kind)
    if kind == "ddp":
        ids = [world.device.index] if world.device.type == "cuda" else None
        wrapped = DistributedDataParallel(learner, device_ids=ids, gradient_as_bucket_view=True)
        return ParallelModel(wrapped, learner.model, kind)
    mesh = weight_mesh(world, kind, how.shard)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # Embedding, bridge and heads stay together in the root group: the bridge multiplies parameters of two modules.
    fully_shard(learner, mesh=mesh)
    # Made once: a mesh makes groups, and they stay.
    is_host = mesh.device_type == "cpu"
    names = mesh.mesh_dim_names
    host_mesh = mesh if is_host else init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=names)
    return ParallelModel(learner, learner.model, kind, host_mesh)


def weight_mesh(world: DistributedContext, kind: str, shard: int | None) -> DeviceMesh:
    """fsdp: one dimension; hsdp: copies × the processes that share one."""
    if kind == "fsdp":
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    shard = shard or world.local_size
    if world.size % shard:
        raise ValueError(f"parallel.shard={shard} does not divide the {world.size} processes")
    return init_device_mesh(world.device.type, (world.size // shard, shard), mesh_dim_names=("copy", "shard"))


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor; with shards, all processes must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def host_copy(tensor: Tensor, host_mesh: DeviceMesh | None) -> Tensor:
    """A copy in host memory, sharded as the tensor is."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    assert host_mesh is not None
    part = tensor.to_local().detach().to("cpu", copy=True)
    return DTensor.from_local(
        part, host_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def spread_like(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor's part that belongs where `like` has its own, without asking the others."""
    if not isinstance(like, DTensor):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def norm_of(value: Any) -> Tensor:
    """A gradient norm as a plain number on its device."""
    return whole(value)
