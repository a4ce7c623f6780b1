"""Run one probe in this process: python -m bench.freeze.probes NAME OUT --tree TREE.

The current folder holds the fixtures. A probe yields cases, a name and a value, through public
names, the command line and HTTP alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.freeze import commands, libraries, sampling, server, training
from bench.freeze.cases import Case

PROBES: dict[str, Callable[..., Iterator[Case]]] = {
    "frames": sampling.probe_frames,
    "batches": sampling.probe_batches,
    "long_plans": sampling.probe_long_plans,
    "causal": sampling.probe_causal,
    "holes": sampling.probe_holes,
    "recorded": sampling.probe_recorded,
    "bundled": sampling.probe_bundled,
    "scores": sampling.probe_scores,
    "training": training.probe_training,
    "resume": training.probe_resume,
    "prepare": training.probe_prepare,
    "reasoning": training.probe_reasoning,
    "ppl": commands.probe_ppl,
    "commands": commands.probe_commands,
    "recipes": commands.probe_recipes,
    "server": server.probe_server,
    "transformers": libraries.probe_transformers,
    "diffusers": libraries.probe_diffusers,
}


def write_cases(cases: Iterator[Case], folder: Path) -> int:
    """Write cases into a folder: JSON, and arrays by a number; return how many there are."""
    values: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, value in cases:
        if name in values:
            raise ValueError(f"two cases are named {name!r}")
        if isinstance(value, np.ndarray):
            key = str(len(arrays))
            arrays[key] = value
            values[name] = {"array": key}
        else:
            values[name] = value
    np.savez(folder / "arrays.npz", **arrays)  # type: ignore[arg-type]
    (folder / "cases.json").write_text(json.dumps(values), "utf-8")
    return len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tree", type=Path, required=True, help="where the package must come from")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    import adlm

    if not Path(adlm.__file__).is_relative_to(args.tree):
        place = Path(adlm.__file__).parent
        raise RuntimeError(f"adlm comes from {place}, not from {args.tree}: set PYTHONPATH")
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    count = write_cases(PROBES[args.probe](args.out, is_quick=args.quick), args.out)
    print(f"{args.probe}: {count} cases")


if __name__ == "__main__":
    main()
