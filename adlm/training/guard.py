"""When a run must not go on: a loss that is not finite or leaps, and a signal that the machine is wanted back."""

from __future__ import annotations

import json
import math
import signal
import statistics
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from safetensors.torch import save_file

from adlm.data.batches import Batch

REQUEUE = 75  # exit code: the work is saved, start the same command again (EX_TEMPFAIL)
INTERRUPTED = 130
SIGNALS = {signal.SIGTERM: REQUEUE, signal.SIGUSR1: REQUEUE, signal.SIGINT: INTERRUPTED}


class Diverged(RuntimeError):
    """The loss is not finite, or has leapt; with the step and the batch that it happened at."""

    def __init__(self, message: str, step: int, batch: Batch | None = None) -> None:
        super().__init__(message)
        self.step, self.batch = step, batch


class Preempted(RuntimeError):
    """A signal asked for an end; the run is saved and goes on where it was with the same command."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class LossGuard:
    """Watches the loss, step by step; its memory is a list of numbers."""

    def __init__(self, spike: float | None, window: int) -> None:
        self.spike, self.recent = spike, deque[float](maxlen=window)

    def check(self, step: int, loss: float) -> None:
        """Raise Diverged if this loss is not finite or far above the recent ones."""
        if not math.isfinite(loss):
            raise Diverged(f"the loss at step {step} is {loss}", step)
        if self.spike is not None and len(self.recent) == self.recent.maxlen:
            mean, deviation = statistics.fmean(self.recent), statistics.pstdev(self.recent)
            if deviation > 0 and loss > mean + self.spike * deviation:
                raise Diverged(
                    f"the loss at step {step} is {loss:.4g}, more than guard.spike={self.spike:g} standard deviations "
                    f"({deviation:.2g}) above the mean of the last {len(self.recent)} steps ({mean:.4g})",
                    step,
                )
        self.recent.append(loss)


def save_batch(folder: Path, step: int, rank: int, batch: Batch, why: str) -> Path:
    """Keep the batch that a run stopped at."""
    place = folder / "failures" / f"step-{step:08d}-process-{rank}"
    place.mkdir(parents=True, exist_ok=True)
    tensors = {"tokens": batch.tokens, "number": batch.number, "place": batch.place}
    if batch.lengths is not None:
        tensors["lengths"] = batch.lengths
    save_file({name: t.contiguous() for name, t in tensors.items()}, place / "batch.safetensors")
    about = {"step": step, "why": why, "state": batch.state, "total": batch.total}
    (place / "why.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    return place


class Stop:
    """Whether, and by which signal, an end was asked for."""

    signal: signal.Signals | None = None


@contextmanager
def stoppable() -> Iterator[Stop]:
    """SIGTERM, SIGUSR1 and Ctrl-C ask for an end, which comes between two steps; a second Ctrl-C does not wait."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may say what a signal does
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.signal is not None:
            raise KeyboardInterrupt
        stop.signal = signal.Signals(number)

    before = {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
