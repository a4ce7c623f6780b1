"""The benchmarks run: their short form prints a table and one JSON line with what readers of it rely on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def record_of(name, *options):
    command = [sys.executable, "-m", f"bench.{name}", "--device", "cpu", "--size", "nano", "--threads", "1", *options]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    *table, line = found.stdout.strip().splitlines()
    assert len(table) > 4
    return json.loads(line)


@pytest.mark.parametrize("bridge", ["factored", "direct"])
def test_train_step(bridge):
    record = record_of("train_step", "--repeats", "1", "--batch", "1", "--bridge", bridge)
    assert record["bench"] == "train_step" and record["bridge"] == bridge
    assert record["ratio"] > 0 and record["tokens_per_s"] > 0 and record["device"].endswith("CPU")
    assert set(record["ms_per_step"]) == {"plain", "ours"}


def test_sample_step():
    record = record_of("sample_step", "--repeats", "1", "--batch", "1", "2")
    assert record["ratio"] > 0 and record["ms_per_step"] > 0 and record["device"].endswith("CPU")
    assert [each["batch"] for each in record["batches"]] == [1, 2]


def test_samples():
    record = record_of("samples", "--steps", "8", "--batch", "2")
    assert record["samples_per_s"] > 0 and 0 < record["rows_evaluated"] <= 1


def test_loop():
    often = ["--steps", "12", "--valid-every", "4", "--log-every", "2"]
    record = record_of("loop", *often, "--batch", "2", "--repeats", "2")
    assert record["ratio"] > 0 and 0 <= record["stall"] < 1 and len(record["validation_s"]) == 2


def test_prepare():
    command = [sys.executable, "-m", "bench.prepare", "--mb", "1", "--repeats", "1"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    record = json.loads(found.stdout.strip().splitlines()[-1])
    assert record["bench"] == "prepare" and record["ratio"] > 0


def test_writing():
    short = ["--length", "12", "--steps", "4", "--repeats", "1", "--device", "cpu", "--threads", "1"]
    command = [sys.executable, "-m", "bench.writing", *short]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    record = json.loads(found.stdout.strip().splitlines()[-1])
    assert record["length"] == 12 and all(each["seconds"] > 0 for each in record["samplers"].values())


def test_costs():
    found = subprocess.run([sys.executable, "-m", "bench.costs"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.count("| OWT") == 8 and not found.stderr
