"""Verdicts are the same however they came: at once, after a kill, from several processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from adlm.evaluate.archive import ALL
from adlm.evaluate.judges import load_judge
from adlm.evaluate.passages import passages
from adlm.evaluate.quality import Plan, figures_of, planned
from adlm.studies.judging import judge_together
from adlm.training.distributed import DistributedContext, init_distributed
from tests.cli.terminal import env_of
from tests.evaluate.small_judges import causal_folder, documents, needs
from tests.training.runs import ROOT, torchrun

N = 12
ALONE = DistributedContext(torch.device("cpu"))


def plan_of(folder: Path) -> Plan:
    texts = passages(documents(), 3 * N, 150)
    return planned(texts[:N], texts[N:], load_judge(folder))


def main(folder: str, judge: str, pause: str) -> None:
    """What other processes of these tests run: text by text, slowly."""
    with init_distributed("cpu") as world:
        how = {"batch": 1, "every": 0.0, "on_texts": lambda done, total: time.sleep(float(pause))}
        judge_together(plan_of(Path(judge)).requests, world, Path(folder), **how)


def figures(plan: Plan, folder: Path | None) -> dict[str, float]:
    needs("mauve")
    found = figures_of(plan, judge_together(plan.requests, ALONE, folder), seeds=(0, 1)).as_dict()
    sides = [found["samples"], found["reference"]]
    return {f"{side} {name} {key}": value for side, each in enumerate(sides) for name, figure in each.items()
            for key, value in figure.items() if isinstance(value, float)}  # fmt: skip


def test_a_kill_changes_nothing(tmp_path: Path) -> None:
    needs("transformers")
    judge, folder = causal_folder(positions=256), tmp_path / "torn"
    words = [sys.executable, "-m", "tests.studies.test_judging", str(folder), str(judge)]
    with subprocess.Popen([*words, "0.2"], cwd=ROOT, env=env_of()) as process:
        while process.poll() is None and len(list(folder.glob("0-*.safetensors"))) < 4:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    assert 4 <= len(list(folder.glob("0-*.safetensors"))) < 3 * N, "it was not killed on the way: the test is void"
    plan, told = plan_of(judge), []
    judge_together(plan.requests, ALONE, folder, on_texts=lambda *each: told.append(each))
    assert told[0][0] >= 4 and told[-1] == (3 * N, 3 * N), "what was there was judged again"
    assert figures(plan, folder) == pytest.approx(figures(plan, None), abs=1e-5, rel=1e-6)
    assert [path.name for path in folder.iterdir()] == [ALL]


def test_two_processes_find_what_one_does(tmp_path: Path) -> None:
    needs("transformers")
    judge, folder = causal_folder(positions=256), tmp_path / "two"
    done = torchrun(2, "-m", "tests.studies.test_judging", str(folder), str(judge), "0")
    assert done.returncode == 0, done.stderr[-3000:]
    plan, told = plan_of(judge), []
    judge_together(plan.requests, ALONE, folder, on_texts=lambda *each: told.append(each))
    assert told == [(3 * N, 3 * N)], "the processes did not judge all"
    assert figures(plan, folder) == pytest.approx(figures(plan, None), abs=1e-5, rel=1e-6)
    assert [path.name for path in folder.iterdir()] == [ALL]


def test_several_processes_need_a_folder() -> None:
    with pytest.raises(ValueError, match="2 processes give each other their verdicts in a folder"):
        judge_together([], DistributedContext(torch.device("cpu"), 0, 2))


if __name__ == "__main__":
    main(*sys.argv[1:])
