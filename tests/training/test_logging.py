"""metrics.jsonl is read as it was written and repaired after a kill; trackers show the same numbers."""

import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adlm.training.logging import (
    append_record,
    cut_metrics,
    format_record,
    open_tracker,
    read_metrics,
)
from tests.evaluate.scorers import needs
from tests.training.runs import ROOT


def record(step: int) -> dict[str, Any]:
    return {"step": step, "train/nll": 5.0 - step / 10, "time": {"seconds": 1.5 * step}}


def write(path: Path, *steps: int) -> list[dict[str, Any]]:
    records = [record(step) for step in steps]
    for each in records:
        append_record(path, each)
    return records


def test_metrics_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = write(path, 1, 2, 3)
    records.append({"step": 4, "a": math.inf, "time": {"c": -math.inf}})
    append_record(path, records[-1])
    assert read_metrics(path) == records
    append_record(path, {"step": 5, "a": math.nan})
    lines = path.read_text("utf-8").splitlines()
    assert lines[3:] == [
        '{"step": 4, "a": Infinity, "time": {"c": -Infinity}}',
        '{"step": 5, "a": NaN}',
    ]
    assert math.isnan(read_metrics(path)[-1]["a"])


def test_keys_have_one_order() -> None:
    forth = {"step": 3, "a": 1, "val/nll": 2.0, "zebra": 1, "time": {"a": 2, "b": 1}}
    back = dict(reversed(forth.items()))
    line = '{"step": 3, "a": 1, "val/nll": 2.0, "zebra": 1, "time": {"a": 2, "b": 1}}\n'
    assert format_record(forth) == format_record(back) == line


def test_a_resumed_file_equals_that_of_a_run_without_interruption(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    write(whole, 1, 2, 3, 4, 5)
    write(cut, 1, 2, 3, 4)
    cut_metrics(cut, 2)  # the checkpoint's step
    write(cut, 3, 4, 5)
    assert cut.read_bytes() == whole.read_bytes()
    assert set(tmp_path.iterdir()) == {whole, cut}
    before = whole.stat().st_ino
    cut_metrics(whole, 5)  # nothing to cut: not written again
    assert whole.stat().st_ino == before


def test_an_incomplete_last_line_is_left_out_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    records = write(path, 1, 2, 3)
    whole = path.read_bytes()
    for lost in range(1, len(format_record(records[2]))):
        path.write_bytes(whole[:-lost])
        assert read_metrics(path) == records[:2]
        cut_metrics(path, 3)
        write(path, 3)
        assert path.read_bytes() == whole


def test_an_interrupted_cut_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    records = write(path, 1, 2, 3)

    def fail(*names: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        cut_metrics(path, 1)
    assert read_metrics(path) == records


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"a": 1}', "\x00\x00"])
@pytest.mark.parametrize("after", ["", format_record(record(3))], ids=["last", "middle"])
def test_a_damaged_line_is_an_error_with_its_number(
    tmp_path: Path, damage: str, after: str
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f"{format_record(record(1))}{damage}\n{after}", "utf-8")
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2 is no object with a step: "):
        cut_metrics(path, 5)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_tracker_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"tracker '{name}'.*pip install .*\[track\]"
    with pytest.raises(ImportError, match=message), open_tracker(name, tmp_path, {}):
        pass


def test_tensorboard_shows_what_the_checkpoint_has_seen(tmp_path: Path) -> None:
    needs("tensorboard")
    for resumed, steps, level in ((0, (1, 2, 3, 4), 0.0), (2, (3, 4, 5), 100.0)):
        with open_tracker("tensorboard", tmp_path, {"lr": 3e-4}, resumed) as write:
            for step in steps:
                write(record(step) | {"train/nll": level + step, "text": "x", "none": None})

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/nll", "time/seconds"}
    values = {event.step: event.value for event in events.Scalars("train/nll")}
    assert len(events.Scalars("train/nll")) == 5  # steps 3 and 4 of the first part are withdrawn
    assert values == pytest.approx({1: 1.0, 2: 2.0, 3: 103.0, 4: 104.0, 5: 105.0})
    assert [event.value for event in events.Scalars("time/seconds")] == [1.5, 3.0, 4.5, 6.0, 7.5]


TRACKED = """
import sys
from pathlib import Path
from adlm.training.logging import open_tracker
for resumed, steps in ((0, (1, 2)), (2, (3,))):
    with open_tracker(sys.argv[1], Path(sys.argv[2]), {"lr": 0.1}, resumed) as write:
        for step in steps:
            write({"step": step, "val/nll": step + 0.25, "time": {"seconds": 1.0}})
"""


def track(name: str, folder: Path, **environment: str) -> None:
    """In a process of its own: these keep threads, servers and global state."""
    needs(name)
    command = [sys.executable, "-c", TRACKED, name, str(folder)]
    env = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT), **environment}
    ran = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_wandb_offline_keeps_one_run(tmp_path: Path) -> None:
    track("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    name = (tmp_path / "wandb_id").read_text("utf-8").strip()
    files = list(tmp_path.glob(f"wandb/offline-run-*/run-{name}.wandb"))
    assert files and len(files) == len(
        list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    )  # the resumed part as well
    written = b"".join(file.read_bytes() for file in files)
    assert all(
        part.encode() in written for part in ("val/nll", "time/seconds", "1.25", "2.25", "3.25")
    )


@pytest.mark.slow
def test_trackio_keeps_one_run_in_its_folder(tmp_path: Path) -> None:
    track("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    with sqlite3.connect(tmp_path / "trackio" / "adlm.db") as database:
        rows = database.execute(
            "select run_id, run_name, step, metrics from metrics order by step"
        ).fetchall()
    assert len({row[0] for row in rows}) == 1 and {row[1] for row in rows} == {tmp_path.name}
    metrics = [(step, {"val/nll": step + 0.25, "time/seconds": 1.0}) for step in (1, 2, 3)]
    assert [(row[2], json.loads(row[3])) for row in rows] == metrics
