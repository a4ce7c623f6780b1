"""Where a result comes from: code, versions, hardware and weights, as plain data."""

import hashlib
import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adlm.devices import get_device_name

PACKAGES = ("adlm", "torch", "numpy", "tokenizers", "transformers", "mauve-text", "lm_eval")


def collect_provenance(device: torch.device | str = "cpu", **more: Any) -> dict[str, Any]:
    """The commit of this code where it is a checkout, the versions of the packages, the hardware, and `more`."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    code = {
        "commit": get_commit(),
        "python": platform.python_version(),
        "system": platform.system(),
    }
    machine = {"device": get_device_name(torch.device(device)), "cores": os.cpu_count()}
    return {**code, "versions": versions, **machine, "threads": torch.get_num_threads(), **more}


def get_commit() -> str | None:
    """The commit of this code, with `+` if files were changed since; without .git that in ADLM_COMMIT, or None."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return os.environ.get("ADLM_COMMIT") or None
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty=+",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def hash_weights(model: nn.Module) -> str:
    """sha256 over the model's tensors: name, type, shape and bytes of each, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(
            tensor.view(torch.uint8).numpy().tobytes()
            if tensor.dim()
            else repr(tensor.item()).encode()
        )
    return digest.hexdigest()
