"""Where a figure comes from: code, versions and hardware, as plain data."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("adlm", "torch", "numpy", "tokenizers", "transformers", "mauve-text", "lm_eval")


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The commit of this code where it is a checkout, the versions of what computes, and the hardware."""
    device = torch.device(device)
    hardware = {
        "device": hardware_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
        **hardware,
    }


def hardware_name(device: torch.device) -> str:
    """What computes: the GPU's name, or the processor's and its kind, as far as the system says."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    told = Path("/proc/cpuinfo")
    lines = told.read_text("utf-8", "replace").splitlines() if told.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join(dict.fromkeys(filter(None, [*names[:1], platform.machine()])))


def installed(name: str) -> str | None:
    """The version of a package, if it is there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit that this code is of, with `+` behind it if files were changed since; None where it is not known.

    A copy without `.git`, as in an image, may be told it: ADLM_COMMIT.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return os.environ.get("ADLM_COMMIT") or None
    try:
        told = [
            subprocess.run(["git", "-C", str(root), *what], capture_output=True, text=True, check=True).stdout.strip()
            for what in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the commit of this checkout is not known: {error}", file=sys.stderr)
        return None
    return told[0] + ("+" if told[1] else "")
