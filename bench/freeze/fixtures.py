"""What the probes read: text, prepared data, finished runs, models whose predictions differ.

The first of the two trees makes it, and both read it: so the new one reads old run folders, models
and exports.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.versions import has_settings_class

LENGTH = 48
WORDS = Path(__file__).with_name("words.txt").read_text("utf-8").split()
TINY: dict[str, Any] = {
    "steps": 3,
    "batch": 8,
    "ema": 0.9,
    "device": "cpu",
    "model": {
        "preset": "nano",
        "dim": 32,
        "heads": 2,
        "denoiser_layers": 1,
        "dropout": 0.0,
    },
    "optimizer": {"lr": 3e-3, "warmup": 2},
    "valid": {"every": 3, "rows": 16},
    "checkpoint": {"every": 3},
    "log": {"every": 1, "show": False},
}
TWO_STAGES = ("adlm", "a2r")
RUNS = {  # finished runs, which both trees resume
    "adlm": ["method=adlm"],
    "adlm-muon": ["method=adlm", "optimizer.name=muon"],
    "mdlm": ["method=mdlm"],
    "sedd": ["method=sedd"],
    "ar": ["method=ar"],
    "a2r": ["method=a2r"],
    "timed": ["method=mdlm", "model.time_conditioning=true"],
    "documents": ["method=adlm", "data.path=documents"],
    "ar-documents": ["method=ar", "data.path=documents"],
}
MASKED = ("adlm", "timed", "documents")
CAUSAL = ("ar", "a2r", "ar-documents")
TAKES_OPTIONS = Path("exports", "takes-options")  # is there if the code in exports does


def write_text(path: Path, sentences: int, seed: int) -> None:
    """Write random sentences, one in a line."""
    rng = random.Random(seed)
    lines = []
    for _ in range(sentences):
        words = rng.choices(WORDS, k=rng.randint(3, 14))
        lines.append(" ".join(words).capitalize() + ".")
    path.write_text("\n".join(lines) + "\n", "utf-8")


def list_changes(method: str) -> list[str]:
    """Return the changes to the tiny recipe that a method needs."""
    return ["model.anchor_layers=1"] if method in TWO_STAGES else []


def train_tiny(folder: Path, *changes: str) -> Path:
    """Train a tiny run, by default on the wrapped rows; return its folder."""
    import adlm

    method = next(
        change.removeprefix("method=") for change in changes if change.startswith("method=")
    )
    adlm.train(
        "tiny.yaml", "data.path=wrapped", *list_changes(method), *changes, f"folder={folder}"
    )
    return folder


def sharpen(folder: Path, seed: int) -> None:
    """Replace a model's weights by random ones that make its predictions differ by context.

    Attention stays soft. Where it saturates, all hidden positions have the same features, and a
    sampler that orders them by score is left with ties that rounding decides: by the shape of a
    batch, not by the text.
    """
    path = folder / "model.safetensors"
    weights = load_file(path)
    rng = torch.Generator().manual_seed(seed)
    for name in sorted(weights):
        old = weights[name]
        noise = torch.randn(old.shape, generator=rng)
        if name.endswith("head.weight"):
            weights[name] = noise * 1.5 / old.shape[1] ** 0.5
        elif "qkv" in name:
            weights[name] = noise * 0.2
        elif name.startswith("embed") or "out" in name:
            weights[name] = noise * 0.6
        else:
            weights[name] = old + noise * 0.12
    save_file(weights, path)
    (folder / "checksums.json").unlink(missing_ok=True)


def takes_options() -> bool:
    """Return whether the code in the exports takes a sampler's own options as `options`."""
    return TAKES_OPTIONS.exists()


def make_fixtures(only: str | None) -> None:
    """Write everything into the current folder; of the models, only one if it is named."""
    import adlm

    write_text(Path("text.txt"), 800, seed=0)
    write_text(Path("other.txt"), 100, seed=1)
    shared: dict[str, Any] = {"length": LENGTH, "valid_share": 0.1, "workers": 1}
    adlm.prepare("text.txt", "wrapped", train_tokenizer=400, **shared)
    lines: dict[str, Any] = {"rows": "documents", "documents": "line", **shared}
    adlm.prepare("text.txt", "documents", tokenizer="wrapped/tokenizer.json", **lines)
    Path("tiny.yaml").write_text(json.dumps(TINY), "utf-8")
    for number, (name, changes) in enumerate(RUNS.items()):
        if only not in (None, name):
            continue
        train_tiny(Path("runs", name), *changes)
        if name in (*MASKED, *CAUSAL):
            sharpen(adlm.load(Path("runs", name), device="cpu").save(Path("models", name)), number)
    if only is None:
        export_models()


def export_models() -> None:
    """Export models with the command of the first tree."""
    if has_settings_class():
        Path("exports").mkdir()
        TAKES_OPTIONS.touch()
    for name in ("adlm", "ar"):
        words = ["export", f"models/{name}", "--out", f"exports/{name}"]
        command = [sys.executable, "-P", "-m", "adlm", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=RUNS, help="the only model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    make_fixtures(args.only)
