"""Judging that several processes share, and that goes on after a kill: every process reads its part of the texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adlm.evaluate.archive import EVERY, Archive, fill
from adlm.evaluate.verdicts import BATCH, Request, Told
from adlm.training.distributed import DistributedContext


def judge_together(
    requests: Sequence[Request],
    world: DistributedContext,
    folder: Path | None = None,
    *,
    batch: int = BATCH,
    every: float = EVERY,
    on_texts: Told | None = None,
) -> Archive:
    """All verdicts that are asked for; those that `folder` has already are not sought again.

    All processes of the world ask the same, each of a judge on its own device, and see the same folder. Each has all
    verdicts at the end. Every `every` seconds a process writes down what it found.
    """
    if folder is None and world.size > 1:
        raise ValueError(f"{world.size} processes give each other their verdicts in a folder: name one that all see")
    archive = Archive(folder, owner=world.rank, every=every)
    world.run_on_rank0(archive.merge)  # what a kill left
    archive.load()
    fill(archive, requests, share=(world.rank, world.size), batch=batch, on_texts=on_texts)
    world.wait()
    world.run_on_rank0(archive.merge)
    archive.load()
    return archive
