"""`adlm doctor`: it reports what is there and what is broken, with a remedy, and does not crash."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import adlm
from adlm.bundled import MODELS, find_bundled_model
from adlm.cli import doctor
from tests.cli.terminal import invoke, process


def test_everything_required_works_here() -> None:
    done = process("doctor", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.count(b"\n") == 1
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ok"] is True and report["problems"] == []
    assert report["packages"]["adlm"]["text"] == adlm.__version__
    assert report["packages"]["torch"]["text"].startswith(torch.__version__.split("+")[0])
    assert "1 threads" in report["devices"]["cpu"]["text"]  # OMP_NUM_THREADS
    assert set(report["models"]) == set(MODELS) and {"bwrap", "chromium", "c++"} <= report["tools"].keys()
    assert {"pillow", "datasets", "matplotlib"} <= report["packages"].keys()


def test_the_screen_marks_everything() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("  ✓ torch ") for line in lines)
    assert all(line[2] in "✓–" for line in lines if line.startswith("  "))
    assert lines[-1] == "everything required works"
    for name, finding in doctor.check_packages().items():
        assert finding.is_ok or f"→ {finding.remedy}" in result.stdout, name


def test_extras_are_not_imported() -> None:
    line = (
        "import sys; from adlm.cli import doctor; doctor.check_packages();"
        "print(sorted({'datasets', 'transformers', 'wandb', 'matplotlib', 'PIL', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_a_broken_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata", None)
    finding = doctor.check_packages()["torchdata"]
    assert finding.is_ok is False and finding.remedy == "pip install --force-reinstall torchdata"
    result = invoke("doctor", "--json")
    assert result.exit_code == 1 and "torchdata" in json.loads(result.stdout)["problems"]


def test_a_section_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, doctor.Finding]:
        raise RuntimeError("no driver\nsecond line")

    monkeypatch.setattr(doctor, "SECTIONS", {"devices": fail})
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "✗ devices  RuntimeError: no driver → fix" in result.stdout and "broken: devices" in result.stdout


def test_a_damaged_model_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "model"
    shutil.copytree(find_bundled_model(MODELS[0]), damaged)
    weights = damaged / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:1000])
    monkeypatch.setattr(doctor, "MODELS", (str(damaged), str(tmp_path / "gone")))
    assert [finding.is_ok for finding in doctor.check_models().values()] == [False, False]
