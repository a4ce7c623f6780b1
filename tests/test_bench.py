"""The benchmarks run: their short form prints a table and one JSON line with the keys that readers rely on."""

import json
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.training.runs import ROOT, data

SMALL = "--device cpu --size nano --threads 1"
Check = Callable[[dict[str, Any]], bool]
BENCHES: dict[str, tuple[str, Check]] = {
    "train_step": (
        f"{SMALL} --repeats 1 --batch 1 --bridge direct",
        lambda r: set(r["ms_per_step"]) == {"plain", "ours"} and r["bridge"] == "direct",
    ),
    "sample_step": (
        f"{SMALL} --repeats 1 --batch 1 2",
        lambda r: [each["batch"] for each in r["batches"]] == [1, 2],
    ),
    "samples": (
        f"{SMALL} --steps 8 --batch 2",
        lambda r: r["samples_per_s"] > 0 and 0 < r["rows_evaluated"] <= 1,
    ),
    "loop": (
        f"{SMALL} --steps 12 --valid-every 4 --log-every 2 --batch 2 --repeats 2",
        lambda r: 0 <= r["stall"] < 1 and len(r["validation_s"]) == 2,
    ),
    "serve": (
        "--threads 1 engine --device cpu --size nano --rows 2 --alone 1 --length 16 --steps 2",
        lambda r: r["lengths"][0]["texts_equal"] == 1 and r["lengths"][0]["ratio"] > 0,
    ),
    "speedrun": (
        f"{ROOT}/experiments/toy.yaml --set corpora.toy=DATA --steps 9 --device cpu --threads 1 --out none",
        lambda r: r["arms"]["mdlm"]["steps"] == 60 and r["arms"]["adlm"]["step_ms"] > 0,
    ),
    "prepare": ("--mb 1 --repeats 1", lambda r: r["mb_per_s"] > 0),
    "writing": (
        "--length 12 --steps 4 --repeats 1 --device cpu --threads 1",
        lambda r: r["length"] == 12 and all(each["seconds"] > 0 for each in r["samplers"].values()),
    ),
}


def run_bench(name: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    for variable in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(variable, "1")  # restored after a benchmark sets them
    monkeypatch.setattr(sys, "argv", [name, *options.split()])
    runpy.run_path(str(ROOT / f"bench/{name}.py"), run_name="__main__")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", BENCHES)
def test_a_benchmark_prints_a_table_and_a_record(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, check = BENCHES[name]
    run_bench(name, options.replace("DATA", str(data())), monkeypatch)
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert len(table) > 4 and record["bench"].split()[0] == name and record["device"]
    assert check(record) and record.get("ratio", 1) > 0


def test_costs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_bench("costs", "", monkeypatch)
    assert capsys.readouterr().out.count("| OWT") == 8
