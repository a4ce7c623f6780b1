"""A run that cannot start raises an error before it writes anything."""

import fcntl
from pathlib import Path

import pytest
import torch

from adlm import devices
from adlm.data.prepare import prepare
from adlm.training import setup
from adlm.training.loop import train
from tests.training.runs import TEXT, arguments, run, tiny_recipe


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
