"""A run that cannot start raises an error before it writes anything."""

import fcntl
import sys
from pathlib import Path

import pytest
import torch

from adlm import devices
from adlm.data.prepare import prepare
from adlm.models.folder import find_latest_checkpoint
from adlm.training import setup
from adlm.training.train import train
from tests.training.runs import TEXT, arguments, assert_same, run, tiny_recipe


def test_a_folder_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process trains in"):
            run(tmp_path, "steps=2")
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}
    assert run(tmp_path, "steps=2").step == 2


def test_processes_of_another_launcher_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="not started by torchrun"):
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_apple_gpu_does_not_train(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'mps' does not train: .*use device=cpu"):
        run(tmp_path / "run", "device=mps")
    assert not (tmp_path / "run").exists()


def test_a_recipe_for_reasoning_does_not_train_on_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use `adlm reason train`"):
        train(
            "reason-quick",
            f"data.path={tmp_path / 'data'}",
            folder=tmp_path / "run",
            steps=1,
            device="cpu",
        )


def test_data_without_held_out_rows(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    prepare(
        tmp_path / "text.txt",
        tmp_path / "data",
        train_tokenizer=300,
        length=32,
        valid_share=0,
        workers=1,
    )
    with pytest.raises(ValueError, match="0 valid rows"):
        train(tiny_recipe(), f"data.path={tmp_path / 'data'}", folder=tmp_path / "run")


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{2**20}\n", "utf-8")
    (tmp_path / "memory.current").write_text(f"{2**19}\n", "utf-8")
    free = devices.get_available_memory(torch.device("cpu"), tmp_path)
    monkeypatch.setattr(setup, "get_available_memory", lambda device: free)
    with pytest.raises(MemoryError, match=r"524.3 kB are free.*micro_batch"):
        run(tmp_path / "run")
    assert run(tmp_path / "run", "memory_check=false", "steps=1").step == 1


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe, data, _ = arguments(tmp_path)
    assert train(recipe, data, "folder=~/run", steps=1).folder == tmp_path / "run"


USER_FILE = """
from dataclasses import dataclass

from adlm.diffusion.samplers import build_sampler
from adlm.diffusion.sampling import Move, Sampler


class Square:
    def __init__(self, power=2.0):
        self.power = power

    def alpha(self, t):
        return 1 - t**self.power

    def dalpha(self, t):
        return -self.power * t ** (self.power - 1)


def long_ids(vocab_size):
    return lambda tokens, valid: tokens > vocab_size // 2


def half(steps):
    return build_sampler("remask_cap", steps=steps, eta=0.5)


class Whole(Sampler):
    def move(self, view):
        return Move(view.is_hidden)


class Stuck(Sampler):
    def move(self, view):
        raise RuntimeError("this sampler is stuck")


@dataclass
class Remasking:
    eta: float

    def __call__(self, steps):
        return build_sampler("remask_cap", steps=steps, eta=self.eta)


without_a_hash = Remasking(0.5)
"""


def test_a_recipe_names_a_schedule_a_rule_and_a_sampler_of_a_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    Path("users_parts.py").write_text(USER_FILE, "utf-8")
    done = run(
        tmp_path / "run",
        "steps=2",
        "objective.schedule=users_parts:Square",
        "objective.schedule_options.power=3.0",
        "objective.anchor_rule=users_parts:long_ids",
        "samples.sampler=users_parts:half",
        "samples.every=2",
    )
    assert done.step == 2 and list((done.folder / "samples").glob("*.txt"))
    run(tmp_path / "whole", "steps=2", "samples.sampler=users_parts:Whole", "samples.every=2")
    assert list((tmp_path / "whole" / "samples").glob("*.txt"))
    sampler = "samples.sampler=users_parts:without_a_hash"
    run(tmp_path / "unhashed", "steps=2", sampler, "samples.every=2")
    (samples,) = (tmp_path / "unhashed" / "samples").glob("*.txt")
    assert samples.read_text("utf-8")
    with pytest.raises(ValueError, match="unknown users_parts:Square option 'powr'"):
        run(
            tmp_path / "other",
            "objective.schedule=users_parts:Square",
            "objective.schedule_options.powr=3.0",
        )
    with pytest.raises(ValueError, match="users_parts has no 'Squared'"):
        run(tmp_path / "other", "objective.schedule=users_parts:Squared")


def test_a_samplers_error_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    Path("users_stuck_sampler.py").write_text(USER_FILE, "utf-8")
    changes = ["steps=8", "checkpoint.every=4", "samples.every=4"]
    with pytest.raises(RuntimeError, match="this sampler is stuck"):
        run(tmp_path / "run", *changes, "samples.sampler=users_stuck_sampler:Stuck")
    latest = find_latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert latest is not None and latest.name == "step-00000004"

    run(tmp_path / "run", *changes)
    run(tmp_path / "whole", *changes)
    assert_same(tmp_path / "run", tmp_path / "whole")
