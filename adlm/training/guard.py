"""Stops a run whose loss diverged, or that received a signal to stop."""

import math
import signal
import statistics
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pydantic import PositiveFloat, PositiveInt

from adlm.data.batches import Batch
from adlm.errors import Diverged, Preempted
from adlm.files import write_json, write_tensors
from adlm.models.folder import LATEST
from adlm.settings import Settings

# 75 is EX_TEMPFAIL: the run is saved, start the same command again.
EXIT_CODES: dict[int, int] = {signal.SIGTERM: 75, signal.SIGINT: 130}
EXIT_CODES |= {signal.SIGUSR1: 75} if hasattr(signal, "SIGUSR1") else {}  # Windows lacks it


class GuardSettings(Settings):
    """Protection against divergence."""

    spike: PositiveFloat | None = 20.0
    """Stop at a loss so many standard deviations above the mean; null: only if not finite."""
    window: PositiveInt = 200
    """Steps of that mean."""


class LossGuard:
    """Detects a loss that is not finite, or more than `spike` standard deviations above the recent ones."""

    def __init__(self, spike: float | None, window: int) -> None:
        self.spike = spike
        self.recent = deque[float](maxlen=window)

    def check(self, loss: float, gradient_norm: float, step: int, batch: Batch) -> None:
        """Raise Diverged if the loss or the gradient is not finite or the loss spiked; remember the loss otherwise."""
        for name, value in {"loss": loss, "gradient norm": gradient_norm}.items():
            if not math.isfinite(value):  # of the gradient: the updated weights must not be saved
                raise Diverged(f"the {name} at step {step} is {value}", step, batch)
        if self.spike is not None and len(self.recent) == self.recent.maxlen:
            mean = statistics.fmean(self.recent)
            deviation = statistics.pstdev(self.recent)
            if deviation > 0 and loss > mean + self.spike * deviation:
                limit = f"guard.spike={self.spike:g} standard deviations ({deviation:.2g})"
                above = f"more than {limit} above the mean of the last {len(self.recent)} steps ({mean:.4g})"
                raise Diverged(
                    f"the loss at step {step} is {loss:.4g}, {above}", step, batch, is_spike=True
                )
        self.recent.append(loss)


def explain_divergence(error: Diverged, folder: Path, rank: int, saved_step: int) -> Diverged:
    """Save the batch at which a run diverged; return the error with its place and the remedy."""
    saved = save_failed_batch(folder, rank, error)
    latest = folder / "checkpoints" / LATEST
    message = f"{error}. The batch is in {saved}. {suggest_remedy(error, latest, saved_step)}"
    return Diverged(message, error.step, error.batch, is_spike=error.is_spike)


def explain_stop(step: int, signals: Sequence[int], resume: str) -> Preempted:
    """Return the error of a run that received a signal, here or on another rank, and is saved."""
    command = "the same command"
    if resume != "auto":
        command += " without resume="
    message = f"stopped after step {step:,}, which is saved; {command} resumes the run"
    return Preempted(message, EXIT_CODES[signals[0] if signals else signal.SIGTERM])


def suggest_remedy(error: Diverged, latest: Path, saved_step: int) -> str:
    """Say how to continue after a divergence, by its kind and by whether there is a checkpoint (step 0: none)."""
    source = f" and resume={latest}, which is from step {saved_step}" if saved_step else ""
    new_run = f"start a new run with a smaller optimizer.lr or a longer optimizer.warmup: folder=NEW{source}"
    if not error.is_spike:
        return f"Look at these rows, or {new_run}"
    again = f"resumes this run from step {saved_step}" if saved_step else "starts this run again"
    return f"If these rows explain it, the same command with a larger guard.spike, or null, {again}; if not, {new_run}"


def save_failed_batch(folder: Path, rank: int, error: Diverged) -> Path:
    """Write the batch at which a run diverged to the run's folder."""
    batch = error.batch
    path = folder / "failures" / f"step-{error.step:08d}-process-{rank}"
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(batch, name) for name in ("tokens", "number", "place", "lengths")}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_tensors(path / "batch.safetensors", present)
    report = {"step": error.step, "error": str(error), "state": batch.state, "total": batch.total}
    write_json(path / "error.json", report)
    return path


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """A context with the list of received SIGTERM, SIGUSR1 and Ctrl-C; a second Ctrl-C stops at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may set signal handlers
        return

    def receive(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    handlers = {number: signal.signal(number, receive) for number in EXIT_CODES}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
