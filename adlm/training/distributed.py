"""Data parallelism (DDP) and weight sharding (FSDP, HSDP), applied to a plain model from outside."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import PositiveInt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from adlm.diffusion.features import FeatureModel
from adlm.diffusion.masking import NoisyBatch
from adlm.diffusion.objectives import Loss, Objective
from adlm.distributed import DistributedContext
from adlm.models.network import list_layers
from adlm.models.transformer import Layer
from adlm.settings import Settings


class ParallelSettings(Settings):
    """Parallelism over the processes that torchrun starts."""

    kind: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """Data parallelism (ddp) or sharded weights (fsdp, hsdp); auto: ddp with several processes."""
    shard: PositiveInt | None = None
    """hsdp: processes per replica; null: those of a node."""
    checkpoint_activations: bool = False
    """Compute activations again in the backward pass, to save memory."""


class LossModule(nn.Module):
    """A model and the modules of its objective as one module, so that DDP and FSDP wrap them together."""

    def __init__(self, model: FeatureModel, objective: Objective) -> None:
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
class ParallelModel:
    """A loss module wrapped for DDP or FSDP, or as it is."""

    module: nn.Module  # to call
    model: FeatureModel  # has the parameters (sharded, with fsdp)
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
    layers = [
        *list_layers(learner.model),
        *(module for module in learner.auxiliary.modules() if isinstance(module, Layer)),
    ]
    if settings.checkpoint_activations:
        for layer in layers:  # on the instance, so that names and parameters do not change
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
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
