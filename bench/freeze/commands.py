"""Probes of the command line and of recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from bench.freeze.cases import (
    OPEN_TEMPLATES,
    PROMPTS,
    TEXTS,
    Case,
    drop_volatile,
    iter_parts,
    run_command,
)
from bench.versions import list_settings

PPL: dict[str, list[object]] = {
    "defaults": ["models/adlm"],
    "causal": ["models/ar", "models/a2r"],
    "documents": ["models/documents", "--data", "documents"],
    "causal documents": ["models/ar-documents", "--data", "documents", "--count", "text"],
    "attend padding": ["models/documents", "--data", "documents", "--attend-padding"],
    "discrete": ["models/adlm", "--steps", 10],
    "timed": ["models/timed", "--draws", 3, "--seed", 4],
    "score entropy": ["runs/sedd"],
    "two models": ["models/adlm", "models/timed"],
    "confidence": ["models/adlm", "--order", "confidence"],
    "random order": ["models/adlm", "--order", "random"],
    "left to right": ["models/timed", "--order", "left_to_right"],
    "an old run": ["runs/adlm"],
    "an old export": ["exports/adlm"],
}
COMMANDS: dict[str, list[object]] = {
    "sample": ["sample", "models/adlm", "--prompt", PROMPTS[0], "--n", 2],
    "sampler": ["sample", "models/adlm", "--sampler", "remask_cap", "--steps", 8],
    "its option": ["sample", "models/adlm", "--sampler", "remask_cap", "--option", "eta=0.3"],
    "compat": ["sample", "models/adlm", "--steps", 6, "--option", "compat=true"],
    "blocks": ["sample", "models/timed", "--block", 5, "--steps", 6],
    "draws": ["sample", "models/adlm", "--steps", 6, "--top-p", 0.9, "--temperature", 0.8],
    "causal": ["sample", "models/ar", "--prompt", PROMPTS[1], "--top-k", 4],
    "greedy causal": ["sample", "models/ar", "--prompt", PROMPTS[1], "--temperature", 0],
    "an old run": ["sample", "runs/adlm", "--steps", 4],
    "infill": ["infill", OPEN_TEMPLATES[0], "--model", "models/adlm"],
}


def probe_ppl(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """`adlm eval ppl --json`: an entry for each text and model, its settings apart."""
    texts: list[object] = ["--data", "one=text.txt", "--data", "two=other.txt"]
    limits: list[object] = ["--limit", 12, "--batch", 5, "--device", "cpu", "--json"]
    for name, words in PPL.items():
        data = [] if "--data" in words else texts
        found = drop_volatile(run_command("eval", "ppl", *words, *data, *limits))
        entries = found.pop("models", None) or [found]
        for number, entry in enumerate(entries):
            yield from iter_parts(f"{name}, entry {number}", entry, "settings")
        if found not in entries:
            yield f"{name}: beyond the entries", found


def probe_commands(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """`adlm sample`, `infill` and `score` with --json, and what --out writes."""
    shared: list[object] = ["--device", "cpu", "--json"]
    for name, words in COMMANDS.items():
        answer = drop_volatile(run_command(*words, "--seed", 6, *shared))
        yield from iter_parts(name, answer, "texts", "settings")
    path = out / "texts.txt"
    run_command("sample", "models/adlm", "--n", 3, "--out", path, *shared)
    yield "sample --out", path.read_text("utf-8")
    for model in ("adlm", "ar"):
        answer = run_command("score", *TEXTS, "--model", f"models/{model}", *shared)
        yield f"score {model}", drop_volatile(answer)


def probe_recipes(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """All recipes as `load_config` reads them, and a saved one."""
    import adlm

    folder = Path(adlm.__file__).parents[1] / "recipes"
    for path in sorted(folder.glob("*.yaml")):
        config = adlm.load_config(str(path), "folder=run", "data.path=data", "optimizer.lr=1e-3")
        yield path.name, json.loads(json.dumps(list_settings(config), default=str))
    saved = adlm.load_config("runs/adlm/config.yaml")
    yield "config.yaml of an old run", json.loads(json.dumps(list_settings(saved), default=str))
