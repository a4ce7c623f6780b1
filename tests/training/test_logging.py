"""metrics.jsonl is read as it was written and repaired after a kill; trackers show the same numbers."""

import importlib.util
import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adlm.training import logging
from adlm.training.logging import MetricsFile, flatten_record, format_record, open_trackers, read_metrics

ROOT = Path(__file__).resolve().parents[2]


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "train/nll": 5.0 - step / 10, "time": {"seconds": 1.5 * step}} | more


def written(path: Path, *steps: int) -> list[dict[str, Any]]:
    records = [record(step) for step in steps]
    with MetricsFile(path) as file:
        for each in records:
            file.write(each)
    return records


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    records = written(path, 1, 2, 3)
    assert read_metrics(path) == records
    assert read_metrics(path) + [record(4)] == records + written(path, 4)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4]


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m.jsonl") as file:
        file.write(record(1))
        assert read_metrics(tmp_path / "m.jsonl") == [record(1)]


def test_a_diverged_run_is_recorded_in_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 1, "a": math.nan, "b": math.inf, "time": {"c": -math.inf}})

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    json.loads(path.read_text("utf-8"), parse_constant=refuse)
    (found,) = read_metrics(path)
    assert math.isnan(found["a"]) and found["b"] == math.inf and found["time"]["c"] == -math.inf


def test_keys_have_one_order() -> None:
    forth = {"step": 3, "a": 1, "val/nll": 2.0, "zebra": 1, "time": {"b": 1, "a": 2}}
    back = dict(reversed(forth.items())) | {"time": {"a": 2, "b": 1}}
    assert format_record(forth) == format_record(back)
    assert format_record(back) == '{"step": 3, "a": 1, "val/nll": 2.0, "zebra": 1, "time": {"a": 2, "b": 1}}'


@pytest.mark.parametrize("step", [None, "3", 3.0, True])
def test_a_record_needs_its_step(step: object) -> None:
    with pytest.raises(ValueError, match='needs "step", an int'):
        format_record({"step": step, "a": 1.0})


def test_a_resumed_file_is_that_of_a_run_without_interruption(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    written(whole, 1, 2, 3, 4, 5)
    written(cut, 1, 2, 3, 4)  # the checkpoint is of step 2; 3 and 4 were told and lost
    with MetricsFile(cut) as file:
        assert file.cut_after(2) == 2
        for step in (3, 4, 5):
            file.write(record(step))
    assert cut.read_bytes() == whole.read_bytes()
    assert not [path for path in tmp_path.iterdir() if path not in (whole, cut)]


def test_a_half_written_last_line_is_tolerated_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    records = written(path, 1, 2, 3)
    whole = path.read_bytes()
    for lost in range(1, len(format_record(records[2])) + 1):
        path.write_bytes(whole[:-lost])
        left = 3 if lost == 1 else 2  # without its line end alone the last record is whole
        assert read_metrics(path) == records[:left]
        with pytest.raises(ValueError, match="cut_after"):
            MetricsFile(path).write(record(4))
        with MetricsFile(path) as file:
            assert file.cut_after(3) == 3 - left
            for each in records[left:]:
                file.write(each)
        assert path.read_bytes() == whole


def test_cutting_leaves_a_sound_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert MetricsFile(path).cut_after(3) == 0 and not path.exists()
    path.touch()
    assert MetricsFile(path).cut_after(3) == 0 and read_metrics(path) == []
    written(path, 1, 2)
    before = path.stat().st_ino
    assert MetricsFile(path).cut_after(2) == 0
    assert path.stat().st_ino == before


def test_an_interrupted_cut_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    records = written(path, 1, 2, 3)

    def fail(*names: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        MetricsFile(path).cut_after(1)
    assert read_metrics(path) == records


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"a": 1}', '{"step": 1, "a": NaN}', "\x00\x00"])
def test_damage_elsewhere_is_an_error_with_its_place(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f"{format_record(record(1))}\n{damage}\n{format_record(record(3))}\n", "utf-8")
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2: "):
        read_metrics(path)
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2: "):
        MetricsFile(path).cut_after(5)
    path.write_text(f"{format_record(record(1))}\n{damage}\n", "utf-8")  # a last line with its end was not half-written
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2: "):
        read_metrics(path)


def test_flat_names() -> None:
    found = flatten_record({"step": 3, "a": 1, "text": "x", "none": None, "time": {"seconds": 2.5}})
    assert found == {"a": 1, "time/seconds": 2.5}


def needs(module: str) -> None:
    """Skip without an extra, unless everything is asked for."""
    if importlib.util.find_spec(module) is None and not os.environ.get("ADLM_ALL"):
        pytest.skip(f"{module} is not installed: pip install 'adlm[track]'")


@contextmanager
def open_one(name: str, folder: Path, **options: Any) -> Iterator[Any]:
    with open_trackers([name], folder=folder, run="r", config={"lr": 3e-4}, **options) as (write,):
        yield write


def test_an_unknown_tracker_is_answered_with_the_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown tracker mlflow; known: tensorboard, wandb, trackio"):
        open_one("mlflow", tmp_path).__enter__()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_tracker_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"tracker '{name}'.*pip install 'adlm\[track\]'"):
        open_one(name, tmp_path).__enter__()


def test_a_tracker_that_fails_closes_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    @contextmanager
    def good(*options: object) -> Iterator[Any]:
        try:
            yield print
        finally:
            closed.append(True)

    def broken(*options: object) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(logging, "TRACKERS", {"good": good, "bad": broken})
    with pytest.raises(RuntimeError, match="no"):
        open_trackers(["good", "bad"], folder=tmp_path, run="r", config={}).__enter__()
    assert closed == [True]


def test_tensorboard_shows_what_the_checkpoint_has_seen(tmp_path: Path) -> None:
    needs("tensorboard")
    with open_one("tensorboard", tmp_path) as write:
        for step in (1, 2, 3, 4):
            write(record(step))
    with open_one("tensorboard", tmp_path, resumed_after=2) as write:
        for step in (3, 4, 5):
            write(record(step, **{"train/nll": 100.0 + step}))

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/nll", "time/seconds"}
    found = {event.step: event.value for event in events.Scalars("train/nll")}
    assert len(events.Scalars("train/nll")) == 5  # steps 3 and 4 of the first part are withdrawn
    assert found == pytest.approx({1: 4.9, 2: 4.8, 3: 103.0, 4: 104.0, 5: 105.0})
    assert [event.value for event in events.Scalars("time/seconds")] == [1.5, 3.0, 4.5, 6.0, 7.5]


TRACKED = """
import sys
from pathlib import Path
from adlm.training.logging import open_trackers
for after, steps in ((None, (1, 2)), (2, (3,))):
    name, folder = sys.argv[1], Path(sys.argv[2])
    with open_trackers([name], folder=folder, run="r", config={"lr": 0.1}, resumed_after=after) as (write,):
        for step in steps:
            write({"step": step, "val/nll": step + 0.25, "time": {"seconds": 1.0}})
"""


def track(name: str, folder: Path, **environment: str) -> None:
    """In a process of its own: these keep threads, servers and global state."""
    ran = subprocess.run(
        [sys.executable, "-c", TRACKED, name, str(folder)],
        env={**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_wandb_offline_keeps_one_run(tmp_path: Path) -> None:
    needs("wandb")
    track("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    name = (tmp_path / "wandb_id").read_text("utf-8").strip()
    files = list(tmp_path.glob(f"wandb/offline-run-*/run-{name}.wandb"))
    assert files and len(files) == len(list(tmp_path.glob("wandb/offline-run-*/*.wandb")))  # the resumed part as well
    told = b"".join(file.read_bytes() for file in files)
    assert b"val/nll" in told and b"time/seconds" in told
    assert all(f"{step + 0.25}".encode() in told for step in (1, 2, 3))


@pytest.mark.slow
def test_trackio_keeps_one_run_in_its_folder(tmp_path: Path) -> None:
    needs("trackio")
    track("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    with sqlite3.connect(tmp_path / "trackio" / "adlm.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by step").fetchall()
    assert len({row[0] for row in rows}) == 1 and {row[1] for row in rows} == {"r"}
    assert [(row[2], json.loads(row[3])) for row in rows] == [
        (step, {"val/nll": step + 0.25, "time/seconds": 1.0}) for step in (1, 2, 3)
    ]
