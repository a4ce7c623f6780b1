"""What a run shows while it goes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PAUSE = 10.0  # seconds between lines where there is no terminal


class RunProgress:
    """Loss, speed and time left of a run; silent where `console` is None (all processes but the first)."""

    def __init__(self, console: Console | None, first: int, steps: int) -> None:
        self.console, self.first, self.steps = console, first, steps
        self.began, self.last_print = time.perf_counter(), float("-inf")
        self.bar: Progress | None = None

    def __enter__(self) -> RunProgress:
        if self.console is not None and self.console.is_terminal:
            columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")]
            self.bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
            self.task = self.bar.add_task("starting", total=self.steps, completed=self.first - 1)
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, step: int) -> None:
        """One more step is done."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def figures(self, record: Mapping[str, Any]) -> None:
        """The latest means."""
        if self.console is None:
            return
        clock, mfu = record["time"], record["time"].get("mfu")
        speed = f"{clock['tokens_per_second']:,.0f} tokens/s" + ("" if mfu is None else f", MFU {100 * mfu:.0f}%")
        text = f"nll {record['train/nll']:.3f}  {speed}"
        if self.bar is not None:
            self.bar.update(self.task, description=text)
            return
        now, is_last = time.perf_counter(), record["step"] >= self.steps
        if now - self.last_print < PAUSE and not is_last:
            return
        self.last_print = now
        left = (now - self.began) / max(record["step"] - self.first + 1, 1) * (self.steps - record["step"])
        self.console.print(f"step {record['step']:>7,} of {self.steps:,}  {text}  {duration(left)} left", markup=False)

    def note(self, text: str) -> None:
        """A line that stays."""
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """1 h 02 min, 3 min 20 s, 12 s."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours:,} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"
