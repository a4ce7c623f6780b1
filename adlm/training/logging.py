"""Logs a run's metrics to metrics.jsonl, trackers and the terminal, and measures throughput."""

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, PositiveInt
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from adlm.data.batches import Batch
from adlm.devices import get_device_name
from adlm.distributed import DistributedContext
from adlm.errors import import_extra
from adlm.files import append_line, sync_path, write_atomically
from adlm.models.costs import peak_flops
from adlm.registry import Registry
from adlm.settings import Settings
from adlm.training.guard import GuardSettings, LossGuard
from adlm.training.state import RunState
from adlm.view.console import SafeConsole

Record = dict[
    str, Any
]  # "step", metrics ("train/loss", …) and "time"; only what is in "time" depends on the clock
WriteRecord = Callable[[Record], None]

STEP_METRICS = ("train/loss", "train/nll", "train/anchor", "train/grad_norm")
PROJECT = "adlm"
SECONDS_BETWEEN_LINES = 10.0  # without a terminal


class LogSettings(Settings):
    """Logging."""

    every: PositiveInt = 10
    """Steps between two records of metrics."""
    track: list[str] = Field(default_factory=list)
    """Trackers: tensorboard, wandb, trackio."""
    show: bool = True
    """Print progress."""


@dataclass(frozen=True)
class LoggedRun:
    """What the log of a run is about."""

    folder: Path
    settings: Record  # all of them, for trackers
    steps: int
    tokens_per_step: int
    flops_per_token: float | None  # None: unknown
    lr: float  # the peak of the learning rate


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one training step; reading them waits for the device."""

    step: int  # from 1
    values: Tensor  # (4,) on the device, in the order of STEP_METRICS: this rank's share of the losses, the norm
    lr_multiplier: float  # of the peak learning rates
    anchor_weight: float
    batch: Batch
    stall: float  # seconds spent waiting for its batch, read and corrupted


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record to a file as one line."""
    append_line(path, format_record(record))


def format_record(record: Mapping[str, Any]) -> str:
    """Format a record as one line of JSON: "step" first, "time" last, the other keys sorted."""
    keys = sorted(record, key=lambda key: (key != "step", key == "time", key))
    return json.dumps({key: record[key] for key in keys}) + "\n"


def cut_metrics(path: Path, step: int) -> None:
    """Remove the records after a checkpoint's step, and a line whose write was interrupted."""
    records = [record for record in read_metrics(path) if record["step"] <= step]
    content = "".join(map(format_record, records)).encode("utf-8")
    if content != path.read_bytes():
        write_atomically(path, content)


def read_metrics(path: Path | str) -> list[Record]:
    """Read all records of a file; a last line without a line end was being written at a kill and is left out."""
    content, records = Path(path).read_bytes(), []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            records.append({"step": int(record["step"])} | record)
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{path}, line {number} is no object with a step: {line[:80]!r} ({error})"
            raise ValueError(f"{problem}; delete this line, or restore the file") from error
    return records


def flatten_record(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by name ("time/seconds", …), without the step."""
    flat = {**record, **{f"time/{name}": value for name, value in record.get("time", {}).items()}}
    return {
        name: value
        for name, value in flat.items()
        if name != "step" and isinstance(value, int | float)
    }


def open_tracker(
    name: str, folder: Path, config: Record, step: int = 0
) -> AbstractContextManager[WriteRecord]:
    """A context with a function that writes a record to a tracker; `step` is the checkpoint's that the run resumes."""
    open_by_name = {"tensorboard": open_tensorboard, "wandb": open_wandb, "trackio": open_trackio}
    opened = Registry("tracker", open_by_name).resolve(name)(folder, config, step)
    import_extra(name, f"tracker {name!r} is not installed", "track")
    return opened


@contextmanager
def open_tensorboard(folder: Path, config: Record, step: int) -> Iterator[WriteRecord]:
    """Event files under folder/tensorboard; resuming removes the steps after the checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(
        log_dir=str(folder / "tensorboard"), purge_step=step + 1 if step else None
    ) as writer:
        writer.add_text("config", f"**{folder.name}**\n\n```\n{json.dumps(config, indent=2)}\n```")

        def write(record: Record) -> None:
            for name, value in flatten_record(record).items():
                writer.add_scalar(name, value, record["step"])
            writer.flush()

        yield write


@contextmanager
def open_wandb(folder: Path, config: Record, step: int) -> Iterator[WriteRecord]:
    """Weights & Biases; folder/wandb_id has the run's id. WANDB_MODE, WANDB_PROJECT and so on apply."""
    import wandb

    id_file = folder / "wandb_id"
    if not id_file.exists():
        write_atomically(id_file, f"{uuid.uuid4().hex[:12]}\n".encode())
    project, run_id = os.environ.get("WANDB_PROJECT", PROJECT), id_file.read_text("utf-8").strip()
    options: dict[str, Any] = {"resume": "allow", "dir": str(folder), "config": config}
    with wandb.init(project=project, name=folder.name, id=run_id, **options) as opened:
        # wandb's own step only increases and would drop the steps that a resumed run repeats.
        opened.define_metric("*", step_metric="step")
        yield lambda record: opened.log({"step": record["step"], **flatten_record(record)})


@contextmanager
def open_trackio(folder: Path, config: Record, step: int) -> Iterator[WriteRecord]:
    """trackio's local database (TRACKIO_DIR); steps that a resumed run repeats appear twice."""
    import trackio

    options: dict[str, Any] = {
        "resume": "allow",
        "embed": False,
        "auto_log_gpu": False,
        "auto_log_cpu": False,
    }
    opened = trackio.init(project=PROJECT, name=folder.name, config=config, **options)
    try:
        yield lambda record: opened.log(flatten_record(record), step=record["step"])
    finally:
        opened.finish()


class RunLogger:
    """Logs a run to metrics.jsonl, trackers and the terminal; every rank has one, only rank 0 writes. `state` is
    that of the checkpoint that the run resumes from; `exit_stack` closes what is opened here."""

    def __init__(
        self,
        run: LoggedRun,
        settings: LogSettings,
        guard: GuardSettings,
        state: RunState,
        context: DistributedContext,
        exit_stack: ExitStack,
    ) -> None:
        self.run = run
        self.context = context
        self.seconds_before = state.seconds
        self.peak_flops = peak_flops(get_device_name(context.device))
        self.start = self.last_log = time.perf_counter()
        self.first_step = self.last_step = state.step  # the last logged step
        self.paused = 0.0  # seconds since then that were not spent training
        self.stall = 0.0  # seconds since then that were spent waiting for data
        self.unread: list[StepMetrics] = []
        # What is not logged yet is saved in checkpoints, so that a resumed run logs the same means.
        self.values: list[list[float]] = list(state.window)
        self.guard = LossGuard(guard.spike, guard.window)
        self.guard.recent.extend(state.recent)
        self.trackers: list[WriteRecord] = []
        self.path = run.folder / "metrics.jsonl"
        if context.is_main:
            append_line(self.path, "")  # creates it
            cut_metrics(self.path, state.step)
            trackers = [
                open_tracker(name, run.folder, run.settings, state.step) for name in settings.track
            ]
            self.trackers = [exit_stack.enter_context(tracker) for tracker in trackers]
        self.console = SafeConsole(quiet=not (context.is_main and settings.show))
        self.has_bar = self.console.is_terminal and not self.console.quiet
        self.last_line = -math.inf  # when it was printed
        columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")]
        columns += [TimeElapsedColumn(), TimeRemainingColumn()]
        self.bar = exit_stack.enter_context(
            Progress(*columns, console=self.console, disable=not self.has_bar)
        )
        self.task = self.bar.add_task("starting", total=run.steps, completed=state.step)

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def seconds(self) -> float:
        """The duration of the run, including its earlier processes."""
        return self.seconds_before + time.perf_counter() - self.start

    @contextmanager
    def pause_timer(self) -> Iterator[None]:
        """Leave the time spent in this context out of the training speed."""
        start = time.perf_counter()
        yield
        self.paused += time.perf_counter() - start

    def log(self, record: Record) -> None:
        """Write a record to metrics.jsonl and the trackers."""
        if self.context.is_main:
            append_record(self.path, record)
            for write in self.trackers:
                write(record)

    def add(self, metrics: StepMetrics) -> None:
        """Add a step without waiting for the device."""
        self.unread.append(metrics)
        self.stall += metrics.stall
        self.bar.update(self.task, completed=metrics.step)

    def read(self) -> None:
        """Wait for the device, average over ranks, and raise Diverged if the loss or the gradient did."""
        if not self.unread:
            return
        values = torch.stack([metrics.values for metrics in self.unread]).cpu().double()
        values = self.context.all_reduce_sum(values) / self.context.world_size
        for metrics, row in zip(self.unread, values.tolist(), strict=True):
            self.guard.check(row[0], row[3], metrics.step, metrics.batch)
            self.values.append(row)
        self.unread.clear()

    def log_step(self, metrics: StepMetrics) -> None:
        """Log the means since the last call, and the speed."""
        self.read()
        columns = zip(*self.values, strict=True)
        means = {
            name: sum(column) / len(column)
            for name, column in zip(STEP_METRICS, columns, strict=True)
        }
        now = time.perf_counter()
        seconds = max(now - self.last_log - self.paused, 1e-9)
        speed = (metrics.step - self.last_step) * self.run.tokens_per_step / seconds
        stall = self.stall / seconds
        self.values = []
        self.stall = 0.0
        self.paused = 0.0
        self.last_log = now
        self.last_step = metrics.step
        peak = self.peak_flops
        mfu = None
        if peak is not None and self.run.flops_per_token is not None:
            mfu = speed * self.run.flops_per_token / (peak * self.context.world_size)
        record = {
            "step": metrics.step,
            **means,
            "lr": self.run.lr * metrics.lr_multiplier,
            "anchor_weight": metrics.anchor_weight,
            "tokens": metrics.step * self.run.tokens_per_step,
            "epoch": metrics.batch.state["epoch"],
            "time": {
                "seconds": self.seconds,
                "tokens_per_second": speed,
                "mfu": mfu,
                "stall": stall,
            },
        }
        self.log(record)
        # The latest means are in the bar or, without a terminal, on a line every few seconds.
        text = f"loss {means['train/loss']:.3f}  {speed:,.0f} tokens/s" + (
            "" if mfu is None else f", MFU {mfu:.0%}"
        )
        self.bar.update(self.task, description=text)
        step, steps = metrics.step, self.run.steps
        if not self.has_bar and (now - self.last_line >= SECONDS_BETWEEN_LINES or step >= steps):
            self.last_line = now
            left = timedelta(
                seconds=round((now - self.start) / (step - self.first_step) * (steps - step))
            )
            self.print(f"step {step:>7,} of {steps:,}  {text}  {left} left")

    def sync(self) -> None:
        """Wait until metrics.jsonl is on the disk."""
        if self.context.is_main:
            sync_path(self.path)
