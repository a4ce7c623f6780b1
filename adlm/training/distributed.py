"""Data parallelism (DDP) and weight sharding (FSDP, HSDP), applied to a plain model from outside."""

import hashlib
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from adlm.checkpoint import run_on_rank0
from adlm.config import ParallelSettings
from adlm.diffusion.features import FeatureModel
from adlm.diffusion.masking import NoisyBatch
from adlm.diffusion.objectives import Loss, Objective
from adlm.generate import pick_device
from adlm.models.language_model import LanguageModel
from adlm.models.transformer import Layer

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # of a collective


class LossModule(nn.Module):
    """A model and the modules of its objective as one module, so that DDP and FSDP wrap them together."""

    def __init__(self, model: LanguageModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.auxiliary = nn.ModuleDict(dict(objective.modules))

    def forward(self, run: NoisyBatch | Callable[[FeatureModel], Tensor]) -> Loss | Tensor:
        """Compute the loss of a batch, or what a function computes with the model."""
        if isinstance(run, NoisyBatch):
            return self.objective.loss(self.model, run)
        return run(self.model)


@dataclass(frozen=True)
class DistributedContext:
    """This process's device and rank, and its communication with the other processes; by default there are none."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # on this node
    local_world_size: int = 1  # processes of this node
    host_group: dist.ProcessGroup | None = None  # gloo, for small values in host memory
    checkpoint_group: dist.ProcessGroup | None = (
        None  # gloo, for the thread that writes checkpoints
    )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes."""
        return self.rank == 0

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a CPU tensor over all ranks, in place."""
        if self.host_group is not None:
            dist.all_reduce(values, group=self.host_group)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.all_reduce_sum(torch.tensor(float(flag))))

    def run_on_rank0(self, function: Callable[[], T]) -> T:
        """Run a function on rank 0; all ranks return its result, or all raise its error."""
        return run_on_rank0(function, self.host_group)

    def all_gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the values of all ranks, in order."""
        if self.host_group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host_group)
        return values


def get_device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor and its architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join(dict.fromkeys(filter(None, [*names[:1], platform.machine()])))


@contextmanager
def init_distributed(device: str) -> Iterator[DistributedContext]:
    """A context manager that joins the processes that torchrun started; without torchrun, this process is alone."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = pick_device(device, local_rank)
    if not dist.is_torchelastic_launched():
        if (
            int(os.environ.get("WORLD_SIZE", 1)) > 1
        ):  # each process would write the whole run into the same folder
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but this process was not started by torchrun: start it with "
                "torchrun --nproc-per-node N -m adlm train …, or unset WORLD_SIZE for a run of one process"
            )
        yield DistributedContext(chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store = dist.PrefixStore(rendezvous_prefix(store, rank, world_size), store)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=world_size)
    try:
        host_group, checkpoint_group = (
            dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2)
        )
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        yield DistributedContext(
            chosen, rank, world_size, local_rank, local_world_size, host_group, checkpoint_group
        )
    finally:
        dist.destroy_process_group()


def rendezvous_prefix(store: dist.Store, rank: int, world_size: int) -> str:
    """Agree on a key prefix that only the processes alive now use.

    torchrun restarts dead processes with the store that holds their old addresses, and its restart count differs
    between nodes (pytorch issue 135712). So each rank sets a random id, rank 0 lists the ids, and the list is valid
    once every rank on it has confirmed it.
    """
    own_id, deadline = uuid.uuid4().hex, time.monotonic() + TIMEOUT.total_seconds()
    id_keys = [f"adlm/id/{other}" for other in range(world_size)]
    store.set(id_keys[rank], own_id)
    while time.monotonic() < deadline:
        if rank == 0 and store.check(id_keys):
            store.set("adlm/ids", " ".join(store.get(key).decode() for key in id_keys))
        ids = store.get("adlm/ids").decode().split() if store.check(["adlm/ids"]) else []
        if own_id in ids:
            prefix = hashlib.sha256(" ".join(ids).encode()).hexdigest()[:16]
            store.set(f"adlm/confirmed/{prefix}/{rank}", "")
            if store.check([f"adlm/confirmed/{prefix}/{other}" for other in range(world_size)]):
                return prefix
        time.sleep(0.02)
    raise TimeoutError(
        f"not all of {world_size} processes joined within {TIMEOUT}: look for errors of the others"
    )


@dataclass(frozen=True)
class ParallelModel:
    """A loss module wrapped for DDP or FSDP, or as it is."""

    module: nn.Module  # to call
    model: LanguageModel  # has the parameters (sharded, with fsdp)
    kind: str
    host_mesh: DeviceMesh | None = (
        None  # the mesh of sharded weights on the CPU, for copies in host memory
    )

    def evaluate(self, run: Callable[[FeatureModel], Tensor]) -> Tensor:
        """Compute something with the model that no backward follows; all ranks call it equally often."""
        result: Tensor = self.module(run)
        if isinstance(self.module, FSDPModule):
            self.module.reshard()  # as a backward would do
        return result

    def no_sync(self) -> AbstractContextManager[Any]:
        """A context for all micro-batches but the last: DDP then reduces gradients once. FSDP always reduces them,
        because unsharded gradients may not fit."""
        return (
            self.module.no_sync()
            if isinstance(self.module, DistributedDataParallel)
            else nullcontext()
        )


def parallelize(
    learner: LossModule, context: DistributedContext, settings: ParallelSettings
) -> ParallelModel:
    """Wrap a loss module for the processes of a run, and checkpoint its activations if the settings say so."""
    kind, world_size = settings.kind, context.world_size
    if kind == "auto":
        kind = "ddp" if world_size > 1 else "none"
    if kind == "none" and world_size > 1:
        raise ValueError(
            f"parallel.kind=none, but torchrun started {world_size} processes: use ddp, fsdp or hsdp"
        )
    if kind != "none" and context.host_group is None:
        raise ValueError(
            f"parallel.kind={kind} needs torchrun: torchrun --nproc-per-node N -m adlm train …"
        )
    layers = [module for module in learner.modules() if isinstance(module, Layer)]
    if settings.checkpoint_activations:
        for layer in layers:  # on the instance, so that names and parameters do not change
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    if kind == "none":
        return ParallelModel(learner, learner.model, kind)
    if kind == "ddp":
        ids = [context.device.index] if context.device.type == "cuda" else None
        wrapped = DistributedDataParallel(learner, device_ids=ids, gradient_as_bucket_view=True)
        return ParallelModel(wrapped, learner.model, kind)
    shard = settings.shard or context.local_world_size
    if kind == "hsdp" and world_size % shard:
        raise ValueError(
            f"parallel.shard={shard} does not divide the {world_size} processes: use a divisor"
        )
    sizes = (
        {"shard": world_size}
        if kind == "fsdp"
        else {"replicate": world_size // shard, "shard": shard}
    )
    build_mesh = partial(
        init_device_mesh, mesh_shape=tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )
    mesh = build_mesh(context.device.type)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # Embedding, bridge and heads are one group, the root's: the bridge multiplies parameters of two modules.
    fully_shard(learner, mesh=mesh)
    # Created once: a mesh creates process groups.
    host_mesh = mesh if mesh.device_type == "cpu" else build_mesh("cpu")
    return ParallelModel(learner, learner.model, kind, host_mesh)
