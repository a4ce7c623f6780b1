"""Where a result comes from: code, versions, hardware and weights, as plain data."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

PACKAGES = ("adlm", "torch", "numpy", "tokenizers", "transformers", "mauve-text", "lm_eval")


def collect_provenance(device: torch.device | str = "cpu", **more: Any) -> dict[str, Any]:
    """The commit of this code where it is a checkout, the versions of the packages, the hardware, and `more`."""
    return {
        "commit": get_commit(),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": {name: found for name in PACKAGES if (found := get_version(name))},
        "device": hardware_name(torch.device(device)),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **more,
    }


def hardware_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor and its architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join(dict.fromkeys(filter(None, [*names[:1], platform.machine()])))


def get_version(package: str) -> str | None:
    """The version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def get_commit() -> str | None:
    """The commit of this code, with `+` appended if files were changed since; None where it is not known.

    A copy without `.git`, as in an image, takes it from the environment variable ADLM_COMMIT.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return os.environ.get("ADLM_COMMIT") or None

    def run_git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return run_git("rev-parse", "HEAD") + ("+" if run_git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the commit of this checkout is not known: {error}", file=sys.stderr)
        return None


def hash_weights(model: nn.Module) -> str:
    """sha256 over the model's tensors: name, type, shape and bytes of each, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.dim() else repr(tensor.item()).encode())
    return digest.hexdigest()
