"""What a step came to, and the figures of the steps since they were last told, read from the device all at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.data.batches import Batch
from adlm.training.distributed import DistributedContext
from adlm.training.guard import Diverged, LossGuard

FIGURES = ("train/loss", "train/nll", "train/anchor", "train/grad_norm")


@dataclass(frozen=True)
class StepMetrics:
    """One step. The figures stand on the device, and reading them waits for it."""

    step: int  # from 1
    figures: Tensor  # (4,): total, nll and anchor term of this process's share, and the norm of the gradient
    rate: float  # the share of the peak learning rate
    anchor_weight: float
    batch: Batch
    stall: float  # seconds that went by waiting for rows

    @property
    def loss(self) -> float:
        """What was optimized, the anchor term included."""
        return float(self.figures[0])

    @property
    def nll(self) -> float:
        """Nats per token, without the anchor term."""
        return float(self.figures[1])


class MetricWindow:
    """Steps whose figures wait to be told; part of a run's state, so that a resumed run tells the same means."""

    def __init__(self, guard: LossGuard, world: DistributedContext) -> None:
        self.guard, self.world = guard, world
        self.unread: list[StepMetrics] = []
        self.figures: list[list[float]] = []
        self.stall = 0.0

    def add(self, record: StepMetrics) -> None:
        self.unread.append(record)
        self.stall += record.stall

    def read(self) -> None:
        """Wait for the device, take the mean over processes, and have the guard look at every step."""
        if not self.unread:
            return
        figures = torch.stack([record.figures for record in self.unread]).double().cpu()
        figures = self.world.sum(figures) / self.world.size
        for record, row in zip(self.unread, figures.tolist(), strict=True):
            try:
                self.guard.check(record.step, row[1])
                if not math.isfinite(row[3]):  # the weights it moved must not be saved
                    raise Diverged(f"the gradient's norm at step {record.step} is {row[3]}", record.step)
            except Diverged as problem:
                problem.batch = record.batch
                raise
            self.figures.append(row)
        self.unread.clear()

    def mean(self) -> tuple[dict[str, float], float]:
        """The means over the window and the seconds it waited for rows; then it is empty."""
        self.read()
        columns, stall = list(zip(*self.figures, strict=True)), self.stall
        self.figures, self.stall = [], 0.0
        return {name: sum(column) / len(column) for name, column in zip(FIGURES, columns, strict=True)}, stall
