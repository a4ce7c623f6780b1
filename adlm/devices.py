"""Devices by name, their memory and the precision that training computes in."""

import platform
import re
from contextlib import suppress
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")  # limits of a container's memory, on Linux


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of a name; `auto` is this process's CUDA GPU if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N, mps")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {name!r}: this torch sees no Apple GPU; use device=cpu, or auto")
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(
            f"device {name!r}: this torch sees no CUDA device; use device=cpu, or auto"
        )
    if device.index is None:
        device = torch.device("cuda", local_rank)
    if device.index >= torch.cuda.device_count():
        raise ValueError(
            f"there is no {device}: this node has {torch.cuda.device_count()} GPUs; "
            "start as many processes (torchrun --nproc-per-node), or name one of them"
        )
    return device


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the type that a network computes in; `auto` is bfloat16 on a GPU, else float32."""
    is_half = name == "bfloat16" or (name == "auto" and device.type == "cuda")
    return torch.bfloat16 if is_half else torch.float32


def can_leave_padding_out() -> bool:
    """Return whether this GPU has the kernel for rows of different lengths: from Ampere on."""
    return torch.cuda.get_device_capability() >= (8, 0)


def get_device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor and its architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join(dict.fromkeys(filter(None, [*names[:1], platform.machine()])))


def describe_gpus() -> str:
    """List the devices that commands can use besides the CPU, with the version of CUDA."""
    names = []
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        names.append(f"{device.name} ({memory}), CUDA {torch.version.cuda}")
    if torch.backends.mps.is_available():
        names.append("mps (Apple GPU, for sampling and scoring)")
    return ", ".join(names) or "none: no device, no driver, or torch is built without CUDA"


def get_available_memory(device: torch.device, group: Path = CGROUP) -> float:
    """Return the free bytes of a device or, on Linux, of the host and its container; infinity if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = torch.inf
    with suppress(OSError):
        available = Path("/proc/meminfo").read_text("utf-8").split("MemAvailable:")[1].split()[0]
        free = 1024 * int(available)
        limit = (group / "memory.max").read_text("utf-8").strip()
        used = (group / "memory.current").read_text("utf-8").strip()
        if limit != "max":
            free = min(free, max(0, int(limit) - int(used)))
    return free
