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
from tests.cli.terminal import invoke


def test_everything_required_works_here_without_importing_extras() -> None:
    line = (
        "import atexit, sys; from adlm.cli.main import app;"
        "extras = {'datasets', 'transformers', 'wandb', 'matplotlib', 'PIL', 'pyarrow'};"
        "atexit.register(lambda: print('imported', sorted(extras & set(sys.modules)), file=sys.stderr));"
        "app(['doctor', '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0 and done.stderr.endswith("imported []\n"), (
        done.stdout,
        done.stderr,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ok"] is True and report["problems"] == []
    assert report["packages"]["adlm"] == adlm.__version__
    assert report["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert set(report["models"]) == set(MODELS)
    assert {"pillow", "datasets", "matplotlib"} <= report["packages"].keys() and "cores" in report[
        "devices"
    ]["cpu"]


def test_a_broken_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata", None)
    result = invoke("doctor")
    assert result.exit_code == 1 and result.stdout.splitlines()[-1] == "broken: torchdata"
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("  torchdata ")]
    assert (
        "  broken: ModuleNotFoundError: " in line
        and "→ pip install --force-reinstall torchdata" in line
    )


def test_a_damaged_model_and_a_failing_driver_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "model"
    shutil.copytree(find_bundled_model(MODELS[0]), damaged)
    weights = damaged / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:1000])
    monkeypatch.setattr(doctor, "MODELS", (str(damaged), str(tmp_path / "gone")))

    def fail() -> int:
        raise RuntimeError("no driver\nsecond line")

    monkeypatch.setattr(torch.cuda, "device_count", fail)
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["problems"] == ["gpu", *doctor.MODELS] and report["ok"] is False
    assert report["devices"]["gpu"].startswith("broken: RuntimeError: no driver → ")


@pytest.mark.parametrize("is_available", [False, True])
def test_an_apple_gpu_is_listed_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, is_available: bool
) -> None:
    monkeypatch.setattr(doctor, "MODELS", ())
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: is_available)
    report = json.loads(invoke("doctor", "--json").stdout)
    assert ("mps" in report["devices"]["gpu"]) == is_available and report["problems"] == []
