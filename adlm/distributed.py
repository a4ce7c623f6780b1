"""The processes that share a job: joined as torchrun started them, or in a process group that exists."""

import hashlib
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from adlm.devices import pick_device

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # of a collective


class Ranks(Protocol):
    """The processes that share rows; `DistributedContext` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def all_reduce_sum(self, values: Tensor) -> Tensor: ...


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


def run_on_rank0(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run a function on rank 0 of a group; all ranks return its result, or all raise its error."""
    if group is None:
        return function()
    result, error = None, None
    if dist.get_rank(group) == 0:
        try:
            result = function()
        except Exception as caught:  # raised below, after the broadcast
            error = caught
    message: list[Any] = [result, None if error is None else str(error)]
    dist.broadcast_object_list(message, group=group, group_src=0)
    if message[1] is not None:
        raise error or ValueError(message[1])
    return cast(T, message[0])


@contextmanager
def init_distributed(device: str) -> Iterator[DistributedContext]:
    """Context manager: join the other processes; without torchrun or a process group this one is alone.

    A process group that exists is used, and stays when the context ends.
    """
    if dist.is_initialized():
        with _join_group(device) as context:
            yield context
    elif dist.is_torchelastic_launched():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        with _create_group(pick_device(device, local_rank)), _join_group(device) as context:
            yield context
    else:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # Each process would write the whole run into the same folder.
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but this process was not started by "
                "torchrun: start it with torchrun --nproc-per-node N -m adlm train …, or unset "
                "WORLD_SIZE for a run of one process"
            )
        yield DistributedContext(pick_device(device, int(os.environ.get("LOCAL_RANK", 0))))


@contextmanager
def _create_group(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store = dist.PrefixStore(rendezvous_prefix(store, rank, world_size), store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _join_group(device: str) -> Iterator[DistributedContext]:
    """Yield the context of the existing process group, with gloo groups of its own for host memory."""
    groups = [dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2)]
    host_group, checkpoint_group = groups
    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank, local_world_size = _find_local_rank(host_group, rank, world_size)
        yield DistributedContext(
            pick_device(device, local_rank),
            rank,
            world_size,
            local_rank,
            local_world_size,
            host_group,
            checkpoint_group,
        )
    finally:
        for group in groups:
            if dist.is_initialized():  # the caller may have ended it
                dist.destroy_process_group(group)


def _find_local_rank(group: dist.ProcessGroup, rank: int, world_size: int) -> tuple[int, int]:
    """Return this process's number among those of its node, and how many they are."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    nodes: list[Any] = [None] * world_size
    dist.all_gather_object(nodes, platform.node(), group=group)
    return nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])


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
