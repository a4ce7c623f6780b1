"""What is installed, what there is to compute on, what will be used, and whether the bundled models write.

Nothing here fails because something is broken: what is broken is a finding. Extras are looked for, not imported.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adlm import __version__
from adlm.bundled import MODELS, folder_of

PYTHON = (3, 11)
TOKENS = 8  # that a bundled model writes to show that it can
IMPORTED = {"pillow": "PIL", "mauve-text": "mauve", "pytest-xdist": "xdist", "huggingface-hub": "huggingface_hub"}
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `is_good` is None where something is not there and need not be."""

    name: str
    is_good: bool | None
    said: str
    remedy: str = ""
    is_essential: bool = False
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Requirement:
    """A distribution, the version it must have at least, and the extra that asks for it."""

    name: str
    least: str
    extra: str | None


def requirements() -> list[Requirement]:
    """What the package asks for: in a checkout by its pyproject.toml, elsewhere by what was installed."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    told = tomllib.loads(project.read_text("utf-8")).get("project", {}) if project.is_file() else {}
    if told.get("name") == "adlm":  # beside an installed package there may lie another's
        extras = told["optional-dependencies"].items()
        listed: list[tuple[str, str | None]] = [(each, None) for each in told["dependencies"]]
        listed += [(each, extra) for extra, parts in extras for each in parts]
    else:
        listed = [(each, extra_of(each)) for each in metadata.requires("adlm") or []]
    return [Requirement(*name_and_least(each), extra) for each, extra in listed]


def extra_of(line: str) -> str | None:
    found = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
    return found[1] if found else None


def name_and_least(line: str) -> tuple[str, str]:
    """`torch>=2.11; …` -> torch, 2.11."""
    found = re.match(r"([\w.-]+)\s*(?:>=\s*([\w.]+))?", line)
    assert found is not None, line
    return found[1].lower().replace("_", "-"), found[2] or "0"


def numbers(version: str) -> list[int]:
    """A version as it compares; what follows a + is the build."""
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def problem_with(asked: Requirement) -> str | None:
    """What keeps a distribution from being used, without importing it."""
    module = IMPORTED.get(asked.name, asked.name.replace("-", "_"))
    try:
        version = metadata.version(asked.name)
        is_there = find_spec(module) is not None
    except metadata.PackageNotFoundError:
        return f"{asked.name} is missing"
    except Exception as error:  # a half-removed package may raise anything
        return f"{asked.name} is broken ({short(error)})"
    if not is_there:
        return f"{asked.name} is listed, but its module {module} is missing"
    if numbers(version) < numbers(asked.least):
        return f"{asked.name} {version} is older than {asked.least}"
    return None


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def installed() -> Iterator[Finding]:
    """The package, Python, and what the package cannot do without."""
    yield Finding("adlm", True, __version__, about={"version": __version__})
    python, wanted = platform.python_version(), ".".join(map(str, PYTHON))
    yield Finding(
        "python",
        sys.version_info >= PYTHON,
        f"{python}, {platform.system()} {platform.machine()}",
        f"install Python {wanted} or later",
        is_essential=True,
        about={"version": python},
    )
    for asked in requirements():
        if asked.extra is not None:
            continue
        problem = problem_with(asked)
        said = about = ""
        if problem is None:
            try:
                module = importlib.import_module(IMPORTED.get(asked.name, asked.name.replace("-", "_")))
                about = metadata.version(asked.name)
                said = build_of(module) if asked.name == "torch" else about
            except Exception as error:  # whatever a broken one raises
                problem = f"it does not import ({short(error)})"
        remedy = f"pip install --force-reinstall '{asked.name}>={asked.least}'"
        facts = {"version": about or None}
        yield Finding(asked.name, problem is None, problem or said, remedy, is_essential=True, about=facts)


def build_of(torch: Any) -> str:
    """A torch by its version and what it was built for."""
    made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    return f"{torch.__version__}, built for " + (f"ROCm {torch.version.hip}" if torch.version.hip else made_for)


def extras() -> Iterator[Finding]:
    """Every extra, what it lacks, and the command that brings it."""
    by_extra: dict[str, list[Requirement]] = {}
    for asked in requirements():
        if asked.extra is not None:
            by_extra.setdefault(asked.extra, []).append(asked)
    for extra, parts in by_extra.items():
        problems = [problem for part in parts if (problem := problem_with(part))]
        remedy = f"pip install 'adlm[{extra}]'"
        about = {"install": remedy, "needs": [part.name for part in parts], "problems": problems}
        names = ", ".join(part.name for part in parts)
        yield Finding(extra, None if problems else True, ", ".join(problems) or names, remedy, about=about)


def devices() -> Iterator[Finding]:
    """What there is to compute on."""
    import torch

    from adlm.training.setup import available_memory

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = available_memory(torch.device("cpu"))
    memory = "" if free is None else f", {free / GIB:.1f} GiB of memory free"
    about = {"cores": cores, "threads": torch.get_num_threads(), "memory_free": free}
    yield Finding("cpu", True, f"{cores} cores, {torch.get_num_threads()} threads{memory}", about=about)
    if not torch.cuda.is_available():
        why = "this torch is built without it" if torch.version.cuda is None else "no device, or its driver is missing"
        yield Finding("cuda", None, f"none: {why}")
        return
    for number in range(torch.cuda.device_count()):
        made, (left, total) = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
        has_bf16 = made.major >= 8
        said = f"{made.name}, {left / GIB:.0f} of {total / GIB:.0f} GiB free, bf16 {'yes' if has_bf16 else 'no'}"
        facts = {"name": made.name, "memory": total, "memory_free": left, "bf16": has_bf16}
        yield Finding(f"cuda:{number}", True, said, about=facts)


def used() -> Iterator[Finding]:
    """What a command will take if it is not told."""
    import torch

    from adlm.generate import pick_device
    from adlm.models.transformer import CUDA_KERNELS

    device = pick_device("auto")
    on_gpu = device.type == "cuda"
    kernels = ", ".join(kernel.name.lower().removesuffix("_attention") for kernel in CUDA_KERNELS)
    attention = "torch's scaled_dot_product_attention" + (f", the first that can of {kernels}" if on_gpu else "")
    dtype = "bfloat16" if on_gpu else "float32"
    for name, said in (
        ("device", str(device)),
        ("dtype", dtype),
        ("attention", attention),
        ("threads", str(torch.get_num_threads())),
        ("compile", "training's layers" if on_gpu else "nothing (compile=true compiles training's layers)"),
    ):
        yield Finding(name, True, said, about={"value": said})


def models() -> Iterator[Finding]:
    """The bundled models, each loaded and made to write a few tokens."""
    for name in MODELS:
        folder = folder_of(name)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        about: dict[str, Any] = {"bytes": size, "loads": False}
        remedy = "pip install --force-reinstall --no-deps adlm"
        if not size:
            yield Finding(name, False, "its files are missing", remedy, is_essential=True, about=about)
            continue
        try:
            from adlm.text.lm import load

            began = time.perf_counter()
            is_sealed = (folder / "checksums.json").is_file()
            text = load(name, verify=is_sealed).generate(length=TOKENS, steps=TOKENS).texts[0]
            seconds = time.perf_counter() - began
        except Exception as error:  # whatever a broken model raises
            said = f"does not write ({short(error)})"
            yield Finding(name, False, said, remedy, is_essential=True, about=about)
            continue
        about |= {"loads": True, "text": text, "seconds": seconds}
        said = f"{size / 1e6:.1f} MB; loaded, and {TOKENS} tokens written, in {seconds:.1f} s"
        yield Finding(name, True, said, about=about)


def tools() -> Iterator[Finding]:
    """Programs that some things use and nothing needs."""
    wanted = {
        "chromium": (("chromium", "chromium-browser", "google-chrome"), "the tests of pages"),
        "chromedriver": (("chromedriver",), "the tests of pages"),
        "c++": ((os.environ.get("CXX") or "c++", "g++", "clang++"), "compile=true on a CPU"),
    }
    for tool, (names, use) in wanted.items():
        found = next((path for name in names if (path := shutil.which(name))), None)
        said = f"{found}, for {use}" if found else f"not found; it is used by {use}"
        yield Finding(tool, True if found else None, said, "install the system's package", about={"path": found})
    problem = problem_with(Requirement("triton", "0", None))
    said = "kernels on a GPU" if problem is None else f"{problem}; CUDA builds of torch bring it"
    yield Finding("triton", True if problem is None else None, said)


SECTIONS: dict[str, Callable[[], Iterator[Finding]]] = {
    "installed": installed,
    "extras": extras,
    "devices": devices,
    "used": used,
    "models": models,
    "tools": tools,
}


def examine() -> Iterator[tuple[str, list[Finding]]]:
    """Section by section; one that cannot be looked at is a finding too."""
    for name, look in SECTIONS.items():
        found: list[Finding] = []
        try:
            found.extend(look())
        except Exception as error:  # with a broken torch, say: the first section has told what to do
            found.append(Finding(name, False, short(error), "see what is wrong above", is_essential=True))
        yield name, found
