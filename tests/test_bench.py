"""The benchmarks run: their short form prints a table and one JSON line with the keys that readers rely on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ("--device", "cpu", "--size", "nano", "--threads", "1")


def run_bench(name, *options):
    command = [sys.executable, "-m", f"bench.{name}", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)


def read_record(name, *options):
    *table, line = run_bench(name, *options).stdout.strip().splitlines()
    assert len(table) > 4
    return json.loads(line)


@pytest.mark.parametrize("bridge", ["factored", "direct"])
def test_train_step(bridge):
    record = read_record("train_step", *SMALL, "--repeats", "1", "--batch", "1", "--bridge", bridge)
    assert record["bench"] == "train_step" and record["bridge"] == bridge
    assert record["ratio"] > 0 and record["tokens_per_s"] > 0 and record["device"].endswith("CPU")
    assert set(record["ms_per_step"]) == {"plain", "ours"}


def test_sample_step():
    record = read_record("sample_step", *SMALL, "--repeats", "1", "--batch", "1", "2")
    assert record["ratio"] > 0 and record["ms_per_step"] > 0 and record["device"].endswith("CPU")
    assert [each["batch"] for each in record["batches"]] == [1, 2]


def test_samples():
    record = read_record("samples", *SMALL, "--steps", "8", "--batch", "2")
    assert record["samples_per_s"] > 0 and 0 < record["rows_evaluated"] <= 1


def test_loop():
    often = ["--steps", "12", "--valid-every", "4", "--log-every", "2"]
    record = read_record("loop", *SMALL, *often, "--batch", "2", "--repeats", "2")
    assert record["ratio"] > 0 and 0 <= record["stall"] < 1 and len(record["validation_s"]) == 2


def test_prepare():
    record = read_record("prepare", "--mb", "1", "--repeats", "1")
    assert record["bench"] == "prepare" and record["ratio"] > 0


def test_writing():
    short = ["--length", "12", "--steps", "4", "--repeats", "1", "--device", "cpu", "--threads", "1"]
    record = read_record("writing", *short)
    assert record["length"] == 12 and all(each["seconds"] > 0 for each in record["samplers"].values())


def test_costs():
    done = run_bench("costs")
    assert done.stdout.count("| OWT") == 8 and not done.stderr
