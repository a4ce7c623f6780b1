"""`adlm doctor`: what is there is found, what is broken is said with what to do, and nothing makes it crash."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import adlm
from adlm.bundled import MODELS, folder_of
from adlm.cli import health
from adlm.cli.health import Requirement, name_and_least, numbers, problem_with, requirements
from tests.cli.terminal import invoke, process


def examined() -> dict[str, list[health.Finding]]:
    return dict(health.examine())


def named(section: str) -> dict[str, health.Finding]:
    return {finding.name: finding for finding in examined()[section]}


def test_all_that_is_needed_works_here() -> None:
    done = process("doctor", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.count(b"\n") == 1
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is True and found["problems"] == []
    assert found["installed"]["adlm"]["version"] == adlm.__version__
    assert found["installed"]["torch"]["version"] == torch.__version__
    assert found["devices"]["cpu"]["threads"] == 1  # as OMP_NUM_THREADS says
    assert found["used"]["device"]["value"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert set(found["models"]) == set(MODELS)
    for name, model in found["models"].items():
        sizes = [path.stat().st_size for path in folder_of(name).rglob("*") if path.is_file()]
        assert model["bytes"] == sum(sizes) and model["loads"] and model["text"]
    assert {"chromium", "c++", "triton"} <= found["tools"].keys()


def test_the_screen_marks_everything() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("  ✓ torch ") for line in lines)
    assert all(line[2] in "✓–" for line in lines if line.startswith("  "))
    assert lines[-1] == "All that is needed works."
    absent = [finding for finding in named("extras").values() if not finding.is_good]
    for finding in absent:
        assert f"→ pip install 'adlm[{finding.name}]'" in result.stdout


def test_extras_are_looked_for_and_not_imported() -> None:
    line = (
        "import sys; from adlm.cli import health; list(health.extras());"
        "print(sorted({'datasets', 'transformers', 'wandb', 'matplotlib', 'PIL', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_a_core_part_that_is_gone_is_essential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata", None)
    result = invoke("doctor")
    assert result.exit_code == 1
    row = next(line for line in result.stdout.splitlines() if " torchdata " in line)
    assert row.startswith("  ✗") and "→ pip install --force-reinstall 'torchdata>=" in row
    assert result.stdout.splitlines()[-1] == "Broken: torchdata"
    told = json.loads(invoke("doctor", "--json").stdout)
    assert told["ok"] is False and [problem["name"] for problem in told["problems"]] == ["torchdata"]


def test_extras_that_are_broken_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("wandb", "0.1"), ("trackio", "9.0")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    (tmp_path / "wandb.py").write_text("raise SystemExit('imported')", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert problem_with(Requirement("wandb", "0.18", "track")) == "wandb 0.1 is older than 0.18"
    assert "its module trackio is missing" in (problem_with(Requirement("trackio", "0.5", "track")) or "")
    assert problem_with(Requirement("no-such-thing", "1", "x")) == "no-such-thing is missing"
    found = named("extras")["track"]
    assert found.is_good is None and "wandb 0.1 is older" in found.said and not found.is_essential


def test_a_damaged_model_is_essential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "model"
    shutil.copytree(folder_of(MODELS[0]), damaged)
    weights = damaged / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:1000])
    monkeypatch.setattr(health, "MODELS", (str(damaged), str(tmp_path / "gone")))
    broken, gone = examined()["models"]
    assert broken.is_good is False and broken.said.startswith("does not write (") and broken.is_essential
    assert gone.is_good is False and gone.said == "its files are missing"
    assert invoke("doctor").exit_code == 1


def test_a_checkout_and_a_wheel_ask_for_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = {asked for asked in requirements() if asked.extra is None}
    monkeypatch.setattr(health, "__file__", str(tmp_path / "adlm" / "cli" / "health.py"))
    assert {asked for asked in requirements() if asked.extra is None} == ours
    assert any(asked.extra == "data" for asked in requirements())


def test_requirements_and_versions_are_read() -> None:
    assert name_and_least("torch>=2.11") == ("torch", "2.11")
    assert name_and_least("huggingface_hub>=0.26; extra == 'x'") == ("huggingface-hub", "0.26")
    assert name_and_least("rich") == ("rich", "0")
    assert numbers("2.13.0+cu128") == [2, 13, 0] and numbers("0.4.13") > numbers("0.4.8")
