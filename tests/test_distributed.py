"""A process group that somebody else created is used, and stays."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adlm.distributed import DistributedContext, init_distributed, run_on_rank0


def join_twice(rank: int, size: int, store: str, folder: str) -> None:
    """Create a group, use it in two contexts one after the other, and use it again afterwards."""
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    for _ in range(2):
        with init_distributed("cpu") as context:
            assert (context.rank, context.world_size, context.is_main) == (rank, size, rank == 0)
            assert (context.local_rank, context.local_world_size) == (rank, size)
            assert context.all_reduce_sum(torch.tensor(rank + 1.0)) == size * (size + 1) / 2
            assert context.any(rank == size - 1) and not context.any(False)
            assert context.all_gather({"rank": rank}) == [{"rank": each} for each in range(size)]
            assert context.run_on_rank0(lambda: rank) == 0
            with pytest.raises(ValueError, match="only here"):
                context.run_on_rank0(lambda: int("only here"))
    total = torch.tensor(1.0)
    dist.all_reduce(total)  # the group is still the caller's
    assert total == size
    Path(folder, str(rank)).touch()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_an_existing_group_is_used_and_stays(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    context = multiprocessing.get_context("spawn")
    arguments = (size, str(tmp_path / "store"), str(tmp_path))
    processes: list[Any] = [
        context.Process(target=join_twice, args=(rank, *arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * size
    assert all((tmp_path / str(rank)).exists() for rank in range(size))


def test_alone_everything_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with init_distributed("cpu") as context:
        assert context == DistributedContext(torch.device("cpu"))
        assert context.all_gather({"a": 1}) == [{"a": 1}] and context.any(True)
    assert not dist.is_initialized() and run_on_rank0(lambda: 3, None) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start it with torchrun"), init_distributed("cpu"):
        pass
