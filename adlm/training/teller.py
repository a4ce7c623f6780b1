"""Where a run's figures go: metrics.jsonl, trackers and the terminal, and the clock that they are told with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console

from adlm.config import Config
from adlm.data.shards import sync
from adlm.models.costs import flops_per_token, peak_flops
from adlm.models.language_model import ModelConfig
from adlm.training.distributed import DistributedContext
from adlm.training.metrics import MetricsFile, open_trackers
from adlm.training.progress import RunProgress
from adlm.training.records import MetricWindow, StepMetrics


class RunLogger:
    """All processes have one; only the first one's says anything."""

    def __init__(
        self, config: Config, shape: ModelConfig, world: DistributedContext, *, step: int, seconds: float
    ) -> None:
        self.config, self.is_first, self.size = config, world.is_first, world.size
        self.folder, self.seconds_before = Path(config.folder), seconds
        self.tokens = config.batch * shape.length  # of a step
        self.flops = flops_per_token(shape, length=shape.length)
        is_gpu = world.device.type == "cuda"
        self.peak = peak_flops(torch.cuda.get_device_name(world.device)) if is_gpu else None
        self.began = self.lap = time.perf_counter()
        # Since the figures were last told: from which step, and the seconds that were not training.
        self.lap_step, self.aside = step, 0.0
        self.open_things = ExitStack()
        console = Console(highlight=False) if world.is_first and config.log.show else None
        self.progress = RunProgress(console, step + 1, config.steps)
        self.metrics = MetricsFile(self.folder / "metrics.jsonl")

    def __enter__(self) -> RunLogger:
        self.trackers = []
        if self.is_first:
            self.open_things.enter_context(self.metrics).cut_after(self.lap_step)
            self.metrics.path.touch()
            self.trackers = open_trackers(
                self.config.log.track,
                folder=self.folder,
                run=self.folder.name,
                config=vars(self.config),
                resumed_after=self.lap_step or None,
            )
            for tracker in self.trackers:
                self.open_things.callback(tracker.close)
        self.open_things.enter_context(self.progress)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.open_things.__exit__(kind, error, at)

    @property
    def seconds(self) -> float:
        """That the run has taken, in all its parts."""
        return self.seconds_before + time.perf_counter() - self.began

    @contextmanager
    def aside_from_training(self) -> Iterator[None]:
        """What is done in here does not count as training when the speed is told."""
        began = time.perf_counter()
        yield
        self.aside += time.perf_counter() - began

    def write(self, record: Mapping[str, Any]) -> None:
        """To the file and the trackers."""
        if self.is_first:
            for writer in (self.metrics, *self.trackers):
                writer.write(dict(record))

    def means(self, record: StepMetrics, window: MetricWindow) -> None:
        """The means over the steps since they were last told."""
        figures, stall = window.mean()
        now = time.perf_counter()
        seconds = max(now - self.lap - self.aside, 1e-9)
        speed = (record.step - self.lap_step) * self.tokens / seconds
        self.lap, self.lap_step, self.aside = now, record.step, 0.0
        told = {
            "step": record.step,
            **figures,
            "lr": self.config.optimizer.lr * record.rate,
            "anchor_weight": record.anchor_weight,
            "tokens": record.step * self.tokens,
            "epoch": record.batch.state["epoch"],
            "time": {
                "seconds": self.seconds,
                "tokens_per_second": speed,
                "mfu": None if self.peak is None else speed * self.flops / (self.peak * self.size),
                "stall": stall / seconds,
            },
        }
        self.write(told)
        self.progress.figures(told)

    def note(self, text: str) -> None:
        """A line on the terminal."""
        self.progress.note(text)

    def sync(self) -> None:
        """Have the disk hold what was written."""
        if self.is_first:
            sync(self.metrics.path)
