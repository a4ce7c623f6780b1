"""The record of a run: a file of lines that survives interruption, and the trackers it can be shown in.

A record is a dict: {"step": int, "train/loss": …, "lr": …, "time": {"seconds": …}} or {"step": int, "val/nll": …}.
What depends on the clock lives under "time" alone, so that two runs of the same thing compare without it.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from adlm.data.shards import write_safely

Record = dict[str, Any]

# JSON has no such numbers, and a run that diverged must be recordable.
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
PROJECT = "adlm"


class MetricsFile:
    """Append-only lines of JSON; a resumed run first calls `cut_after` with its checkpoint's step."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a record as one line, at once: another process may be reading along."""
        line = to_line(record) + "\n"
        if self._file is None:
            self._file = self._open()
        self._file.write(line)
        self._file.flush()

    def cut_after(self, step: int) -> int:
        """Drop what a checkpoint of `step` has not seen, and a half-written last line; how many lines went."""
        self.close()
        if not self.path.exists():
            return 0
        is_whole = _ends_a_line(self.path)
        lines = self.path.read_bytes().count(b"\n") + (not is_whole)
        kept = [record for record in read_metrics(self.path) if record["step"] <= step]
        if len(kept) < lines or not is_whole:
            write_safely(self.path, "".join(to_line(record) + "\n" for record in kept).encode("utf-8"))
        return lines - len(kept)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not _ends_a_line(self.path):
            raise ValueError(
                f"{self.path} ends in the middle of a line, and a record written now would be lost with it: call "
                "cut_after(step of the checkpoint) before the first write"
            )
        return self.path.open("a", encoding="utf-8")


def to_line(record: Mapping[str, Any]) -> str:
    """One line of strict JSON: the step first, the times last, the other keys in order."""
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError(f'a record needs "step", an int; got {step!r} in a record of {", ".join(record) or "nothing"}')
    keys = sorted(record, key=lambda key: (key != "step", key == "time", key))
    return json.dumps({key: _written(key, record[key]) for key in keys}, allow_nan=False)


def read_metrics(path: Path | str) -> list[Record]:
    """All records of a file; only its very last line may be half-written, and is then left out."""
    lines = Path(path).read_bytes().split(b"\n")
    half = lines.pop()  # what follows the last line end: nothing, or a line that was being written
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_from_line(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; got {line[:80]!r}") from error
    if half:
        with suppress(ValueError):  # the process ended while writing: the one damage that is expected
            records.append(_from_line(half))
    return records


def without_times(records: Iterable[Mapping[str, Any]]) -> list[Record]:
    """The records without what the clock said: equal for two runs of the same thing."""
    return [{key: value for key, value in record.items() if key != "time"} for record in records]


def _from_line(line: bytes) -> Record:
    record = _read(json.loads(line, parse_constant=_refuse))
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError('not a record: an object with "step", an int')
    return record


def _written(key: str, value: object) -> object:
    """What JSON can hold; an error names the key."""
    if isinstance(value, Mapping):
        return {str(k): _written(f"{key}/{k}", value[k]) for k in sorted(value)}
    if isinstance(value, list | tuple):
        return [_written(key, v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, str) and value in NOT_FINITE:
        raise ValueError(f"{key} is the text {value!r}, which stands for a number here: write float({value!r})")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{key} is a {type(value).__name__}: records hold numbers and text; call float(…) or .item() first")


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _read(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_read(v) for v in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _ends_a_line(path: Path) -> bool:
    """True for an empty file too."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


class Tracker(Protocol):
    """Where records are shown."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_trackers(
    names: Sequence[str],
    *,
    folder: Path,
    run: str,
    config: Mapping[str, Any],
    resumed_after: int | None = None,
) -> list[Tracker]:
    """Trackers by name. `resumed_after` is the step of the checkpoint that a run goes on from."""
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ValueError(f"unknown tracker {', '.join(unknown)}; known: {', '.join(TRACKERS)}")
    opened: list[Tracker] = []
    try:
        for name in names:
            opened.append(TRACKERS[name](folder, run, _plain(config), resumed_after))
    except BaseException as error:
        for tracker in opened:
            tracker.close()
        if isinstance(error, ImportError):
            raise ImportError(f"tracker {name!r} is not installed ({error}): pip install 'adlm[track]'") from error
        raise
    return opened


def _plain(value: Any) -> Any:
    """Dataclasses and paths as what every tracker can show."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def flat(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, "time/seconds" and so on; without the step."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": number for name, number in flat(value).items()}
        elif key != "step" and isinstance(value, int | float):
            found[key] = value
    return found


class TensorBoard:
    """Event files under folder/tensorboard; of a resumed run, what the checkpoint has not seen is withdrawn."""

    def __init__(self, folder: Path, run: str, config: Record, resumed_after: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resumed_after is None else resumed_after + 1
        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge)
        text = json.dumps(config, indent=2)
        self._writer.add_text("config", f"**{run}**\n\n" + "\n".join("    " + line for line in text.splitlines()))

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in flat(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; a run keeps its id in folder/wandb_id. WANDB_MODE, WANDB_PROJECT and the like are its own."""

    def __init__(self, folder: Path, run: str, config: Record, resumed_after: int | None) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "wandb_id"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex[:12] + "\n", "utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run,
            id=kept.read_text("utf-8").strip(),
            resume="allow",
            dir=str(folder),
            config=config,
        )
        # Its own counter only goes up, and would drop the steps that a resumed run takes again.
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({"step": record["step"], **flat(record)})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio's local database, where TRACKIO_DIR says; of a resumed run, repeated steps stand there twice."""

    def __init__(self, folder: Path, run: str, config: Record, resumed_after: int | None) -> None:
        import trackio

        self._run = trackio.init(
            project=PROJECT,
            name=run,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(flat(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, str, Record, int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
