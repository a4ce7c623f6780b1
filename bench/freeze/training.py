"""Probes of training: steps of every method, resumed runs, prepared data, runs that reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from bench.freeze.cases import Case, drop_volatile, name_folder, run_command
from bench.freeze.fixtures import RUNS, train_tiny

TRAINED = {
    "adlm": ["method=adlm"],
    "mdlm": ["method=mdlm"],
    "sedd": ["method=sedd"],
    "ar": ["method=ar"],
    "a2r": ["method=a2r"],
    "adlm documents": ["method=adlm", "data.path=documents"],
    "adlm attend padding": ["method=adlm", "data.path=documents", "objective.attend_padding=true"],
    "ar documents": ["method=ar", "data.path=documents"],
    "adlm cosine": ["method=adlm", "objective.schedule=cosine", "objective.anchor_scope=masked"],
    "adlm geometric": ["method=adlm", "objective.schedule=geometric"],
    "mdlm discrete": ["method=mdlm", "objective.discrete_steps=10"],
    "mdlm timed": ["method=mdlm", "model.time_conditioning=true", "objective.time_std=0.2"],
    "adlm dropout": ["method=adlm", "model.dropout=0.1", "micro_batch=4", "seed=5"],
    "adlm factored": ["method=adlm", "model.bridge=factored", "model.tied=true", "ema=null"],
    "adlm rare in corpus": [
        "method=adlm",
        "objective.anchor_rule=rare_in_corpus",
        "objective.max_count=null",
        "objective.max_fraction=0.01",
    ],
    "mdlm cosine decay": ["method=mdlm", "optimizer.decay=cosine", "optimizer.warmup=1"],
    "mdlm wsd": ["method=mdlm", "optimizer.decay=wsd", "optimizer.decay_share=0.5"],
    "mdlm stream": [
        "method=mdlm",
        "data.stream=other.txt",
        "data.stream_options={documents: line}",
        "data.shuffle=8",
    ],
}
BOTH_OPTIMIZERS = ("adlm", "mdlm", "sedd", "ar", "a2r")
ADAMW = ["optimizer.weight_decay=0.1"]
MUON = ["optimizer.name=muon", "optimizer.muon_lr=0.01"]
REASONING = [
    "steps=4",
    "batch=4",
    "model.dim=32",
    "model.heads=2",
    "model.denoiser_layers=2",
    "reasoning.hops=2",
    "reasoning.tests=6",
    "reasoning.stage_steps=1",
    "valid.rows=4",
    "device=cpu",
    "log.show=false",
]


def iter_tensors(folder: Path) -> Iterator[Case]:
    """Yield all tensors below a folder, whose files may have any names."""
    for path in sorted(folder.rglob("*.safetensors")):
        part = "training" if path.parent.name == "training" else "weights"
        with safe_open(path, "pt") as opened:
            names = opened.keys()
            for name in names:
                yield f"{part}, {name}", opened.get_tensor(name).numpy()


def iter_run(title: str, folder: Path) -> Iterator[Case]:
    """Yield what a run has computed: weights, the optimizer's state, metrics."""
    for name, value in iter_tensors(folder / "checkpoints" / "latest"):
        yield f"{title}: {name}", value
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [drop_volatile(json.loads(line)) for line in lines]
    yield f"{title}: metrics of steps", [each for each in records if "lr" in each]
    yield f"{title}: metrics of validation", [each for each in records if "lr" not in each]


def probe_training(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Three steps of every method."""
    for name, changes in TRAINED.items():
        has_both = name in BOTH_OPTIMIZERS
        if has_both:
            title = f"{name}, muon"
            yield from iter_run(title, train_tiny(out / "runs" / title, *changes, *MUON))
        if has_both or not is_quick:
            title = f"{name}, adamw"
            yield from iter_run(title, train_tiny(out / "runs" / title, *changes, *ADAMW))


def probe_resume(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Runs that the first tree has written, resumed for two more steps, and one fine-tuned."""
    for name, changes in RUNS.items():
        folder = out / "runs" / name
        shutil.copytree(Path("runs", name), folder, symlinks=True)
        yield from iter_run(name, train_tiny(folder, *changes, "steps=5"))
    tuned = ["init=models/adlm", "model.preset=null", "model.dim=null", "model.heads=null"]
    tuned += ["model.denoiser_layers=null", "model.anchor_layers=null", "model.dropout=null"]
    folder = train_tiny(out / "runs" / "tuned", "method=adlm", *tuned)
    yield from iter_run("fine-tuned", folder)


def probe_prepare(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Prepared folders: every file but locks."""
    import adlm

    ways: dict[str, dict[str, Any]] = {
        "wrapped": {"rows": "wrapped"},
        "documents": {"rows": "documents", "documents": "line"},
    }
    shared: dict[str, Any] = {"tokenizer": "wrapped/tokenizer.json", "length": 24}
    for name, settings in ways.items():
        folder = out / name
        adlm.prepare("text.txt", folder, valid_share=0.2, **shared, **settings)
        for path in sorted(folder.rglob("*")):
            if path.is_dir() or path.name == ".lock":
                continue
            content = path.read_bytes()
            is_json = path.suffix == ".json"
            value = json.loads(content) if is_json else np.frombuffer(content, np.uint8)
            yield f"{name}: {path.relative_to(folder)}", value


def probe_reasoning(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Tiny runs that reason, causal and masked: weights, accuracy, answers."""
    question = "b = a - 9 | a = 13 + 4 ? b"
    for task, arm in (("arithmetic", "acot"), ("graphs", "acot_feedback"), ("arithmetic", "adlm")):
        title = f"{task} {arm}"
        folder = out / "runs" / title
        run_command("reason", "train", task, arm, *REASONING, "--out", folder, "--json")
        yield from iter_run(title, folder)
        words = ["--device", "cpu", "--json"]
        answer = run_command("reason", "eval", folder, "--tests", 4, *words)
        evaluated = name_folder(drop_volatile(answer), out)
        yield f"{title}: settings", [run.pop("settings") for run in evaluated["runs"]]
        yield f"{title}: evaluated", evaluated
        if task == "arithmetic":
            asked = run_command("reason", "ask", folder, question, *words)
            yield f"{title}: asked", drop_volatile(asked)
