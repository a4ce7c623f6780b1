"""The accuracy and the costs of a trained run, and its answers to questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm.checkpoint import read_state
from adlm.data.shards import hash_file
from adlm.evaluate.provenance import collect_provenance
from adlm.evaluate.results import (
    Cell,
    Column,
    Estimate,
    EvalResult,
    ProgressCallback,
    Table,
    ignore_progress,
    save_json,
)
from adlm.models.costs import count_parameters, flops_per_token
from adlm.reasoning import sudoku
from adlm.reasoning.arms import ARMS, Curriculum, ReasoningObjective, RowLayout, choose_anchors, collate, lay_out
from adlm.reasoning.decoding import Decoded, decode_greedily
from adlm.reasoning.diffusion import HoleObjective, fill_holes
from adlm.reasoning.items import Item
from adlm.reasoning.losses import compute_features
from adlm.reasoning.runs import LoadedRun, format_solution, load_run, solve
from adlm.reasoning.tasks import GENERATED, GENERATORS, RECODED, Task, hash_items
from adlm.reasoning.verdicts import RESULT

COUNTED_ROWS = 256  # problems whose lengths the FLOPs are counted from


def evaluate(
    folder: str | Path,
    *changes: str,
    data: str | Path | None = None,
    tests: int | None = None,
    device: str = "auto",
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Measure a run on at most `tests` problems of each test set, and write the result to reasoning.json in its folder.

    `data` is the folder with published problems: of a text task, or a second test of *graphs* and *chains*.
    """
    given = {"reasoning.path": data and str(data), "reasoning.tests": tests}
    given = {key: value for key, value in given.items() if value is not None}
    run = load_run(folder, *changes, device=device, **given)
    config, settings, task = run.config, run.config.reasoning, run.task
    if data is not None and task.name in GENERATORS and task.name not in RECODED:
        known = ", ".join(f"{name} ({dataset})" for name, (dataset, _) in RECODED.items())
        raise ValueError(f"--data {data}: {task.name} has no published problems, as {known} have; leave it out")

    is_masked = isinstance(run.objective, HoleObjective)
    objectives: dict[str, ReasoningObjective | HoleObjective] = {settings.arm: run.objective}
    if is_masked:
        objectives = {name: HoleObjective.from_config(config, task, sampler=name) for name in settings.samplers}
    sets = task.load_tests(settings.tests)
    measured: dict[str, dict[str, Any]] = {name: {} for name in objectives}
    for number, (name, test) in enumerate(product(objectives, sets)):
        on_progress(f"{folder}: {test}", number, len(objectives) * len(sets))
        measured[name][test] = measure_results(task, sets[test], solve(run.model, task, objectives[name], sets[test]))

    is_generated = task.name in GENERATORS or read_state(run.folder)["data"].startswith(GENERATED)
    about = {"training_problems": GENERATED if is_generated else "files", "parameters": count_parameters(run.shape)}
    about |= {"flops": count_training_flops(run) if task.can_train else None}
    names = ("steps", "batch", "init", "ema", "model", "optimizer", "objective")
    kept = {key: value for key, value in asdict(settings).items() if key not in ("task", "arm", "path")}
    content: dict[str, Any] = {
        "task": task.name,
        "arm": settings.arm,
        "seed": config.seed,
        "tests": next(iter(measured.values())),
        **({"samplers": measured} if is_masked else {}),
        **about,
        "settings": {name: asdict(config)[name] for name in names} | {"step": run.step, "reasoning": kept},
        "provenance": collect_provenance(run.device, weights=hash_file(run.folder / "model.safetensors")),
    }
    save_json(Path(folder) / RESULT, content)
    return content


def measure_results(task: Task, items: Sequence[Item], results: Sequence[Decoded]) -> dict[str, Any]:
    """Compute the accuracy on a test set and its cost; on Sudoku, the share of right cells too.

    `right` has a bit for each problem, the first one in the highest bit of the first byte.
    """
    is_right = np.array([result.answer == item.answer for result, item in zip(results, items, strict=True)])
    accuracy, count = float(is_right.mean()), len(items)
    example = int(is_right.argmax())  # the first right one, or the first
    metrics: dict[str, Any] = {
        "accuracy": accuracy,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / count),
        "problems": count,
        "tokens": sum(len(result.tokens) for result in results) / count,
        "passes": sum(result.passes for result in results) / count,
        "example": format_solution(task, items[example], results[example]),
        "right": np.packbits(is_right).tobytes().hex(),
        "sha256": hash_items(items),
    }
    if task.name == "sudoku":
        metrics["cells"] = sudoku.score_cells([result.answer for result in results], items)
    return metrics


def count_stages(curriculum: Curriculum, steps: int) -> np.ndarray:
    """Return how many of the optimizer steps are expected at each stage."""
    stages = np.minimum(np.arange(steps) // curriculum.stage_steps, curriculum.stages)
    now = np.bincount(stages, minlength=curriculum.stages + 1)
    earlier = np.cumsum((now / np.arange(1, len(now) + 1))[::-1])[::-1]
    shares: np.ndarray = (1 - curriculum.revisit) * now + curriculum.revisit * earlier
    return shares


def count_training_flops(run: LoadedRun) -> float:
    """Count the training FLOPs of a run from the lengths of its rows, without padding.

    A slot with feedback takes a pass of its own over the positions before it, SIM-CoT's decoder one layer over the step
    of each slot, and CODI's teacher a pass over the problem laid out as cot.
    """
    objective, shape, items = run.objective, run.shape, run.task.draw(0, 1, COUNTED_ROWS)
    decoder = replace(shape, anchor_layers=0, denoiser_layers=1)

    def count_row(item: Item, stage: int) -> float:
        layout = objective.lay_out(item, stage)
        length = len(layout.tokens)
        if isinstance(objective, HoleObjective):
            return flops_per_token(shape, length=length) * length
        arm = objective.arm
        share = len(choose_anchors(layout, item, None)) / length if arm.has_anchor_term else 0
        lengths = [length - 1, *(layout.slots if arm.feedback else ())]
        written: list[int] = []
        if arm.auxiliary == "codi":
            lengths.append(len(lay_out(item, ARMS["cot"], 0, 0, objective.markers).tokens) - 1)
        if arm.auxiliary == "simcot":
            written = [len(step) for step in item.steps for _ in range(objective.slots_per_stage)][: len(layout.slots)]
        flops = sum(flops_per_token(shape, length=n, anchor_share=share) * n for n in lengths)
        return flops + sum(flops_per_token(decoder, length=n) * n for n in written)

    stages = count_stages(objective.curriculum, run.step) if isinstance(objective, ReasoningObjective) else [run.step]
    rows = [sum(count_row(item, stage) for item in items) / len(items) for stage in range(len(stages))]
    return float(run.config.batch * np.dot(stages, rows))


def summarize_runs(results: Mapping[str, Mapping[str, Any]]) -> EvalResult:
    """Build the table of runs' results, by folder: one row for each test set."""
    names = ("run", "task", "arm", "seed", "test", "accuracy, %", "problems", "tokens", "passes")
    columns = [Column(name, 1, is_text=name in ("run", "task", "arm", "test")) for name in names]
    rows: list[list[Cell]] = []
    for folder, result in results.items():
        for sampler, tests in result.get("samplers", {"": result["tests"]}).items():
            for name, test in tests.items():
                accuracy = Estimate(100 * test["accuracy"], 100 * test["stderr"])
                start: list[Cell] = [folder, result["task"], result["arm"], result["seed"], f"{name} {sampler}".strip()]
                rows.append([*start, accuracy, test["problems"], test["tokens"], test["passes"]])
    metrics = {"runs": [{"run": folder, **result} for folder, result in results.items()]}
    return EvalResult("reasoning", metrics, {}, {}, [Table(columns, rows, "accuracy ± standard error")])


@torch.no_grad()
def ask(folder: str | Path, question: str, *, device: str = "auto") -> dict[str, Any]:
    """Answer a question: what the model writes, its guesses at labelled slots, and the answer."""
    run = load_run(folder, device=device)
    task, objective = run.task, run.objective
    if not question.strip():
        raise ValueError("the question is empty: give its text")
    ids = task.encode_question(question)
    guesses: list[str] | None = None
    if isinstance(objective, HoleObjective):
        check_size(run, len(objective.task.lay_out(ids)))
        (result,) = fill_holes(run.model, objective, [ids])
    else:
        layout, arm = objective.lay_out(Item(ids, [], [], [], [])), objective.arm
        check_size(run, layout.prompt + 1)
        room = run.shape.length - layout.prompt
        (result,) = decode_greedily(run.model, [layout], task.markers, feedback=arm.feedback, max_new_tokens=room)
        guesses = None if arm.labels == "none" else guess_slots(run, layout, feedback=arm.feedback)
    answer = None if result.answer is None else task.decode(result.answer)
    text = task.tokenizer.decode(result.tokens)
    return {"question": question, "slots": guesses, "text": text, "answer": answer, "passes": result.passes}


def check_size(run: LoadedRun, size: int) -> None:
    """Raise ValueError if a question is longer than the model with what follows it."""
    if size > run.shape.length:
        raise ValueError(
            f"the question takes {size:,} tokens in the layout of {run.config.reasoning.arm}, and the model "
            f"{run.shape.length:,}: shorten the question"
        )


def guess_slots(run: LoadedRun, layout: RowLayout, *, feedback: bool) -> list[str]:
    """Return the model's most likely token at each slot of a prompt."""
    features = compute_features(run.model, collate([layout], [[]], feedback=feedback).to(run.device))
    logits = run.model.head(features.final[0, list(layout.slots)])
    if run.shape.mask_id is not None:
        logits[:, run.shape.mask_id] = -torch.inf
    return [run.task.tokenizer.decode([token]).strip() for token in logits.argmax(-1).tolist()]
