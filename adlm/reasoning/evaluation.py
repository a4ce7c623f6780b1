"""The accuracy and the costs of a trained run, and its answers to questions."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm.checkpoint import read_state
from adlm.data.shards import hash_file
from adlm.evaluate.cache import ProgressCallback, ignore_progress
from adlm.evaluate.provenance import collect_provenance
from adlm.evaluate.results import save_json
from adlm.models.costs import count_parameters, flops_per_token
from adlm.reasoning import sudoku
from adlm.reasoning.arms import Curriculum, ReasoningObjective, choose_anchors, collate
from adlm.reasoning.decoding import Decoded, apply_head, decode_greedily
from adlm.reasoning.diffusion import HoleObjective, fill_holes
from adlm.reasoning.items import Item
from adlm.reasoning.losses import compute_features
from adlm.reasoning.runs import LoadedRun, format_solution, load_run, solve
from adlm.reasoning.tasks import GENERATED, GENERATORS, RECODED, Task, hash_items
from adlm.reasoning.verdicts import RESULT

QUESTION = re.compile(r"\s*\d+ +\d+(?: *\| *\d+ +\d+)* *\? *\d+ +\d+ +\d+\s*")  # of graphs
COUNTED_ROWS = 256  # problems whose lengths the FLOPs are counted from


def evaluate(
    folder: str | Path,
    *changes: str,
    data: str | Path | None = None,  # folder with published problems: of a text task, or a second test
    tests: int | None = None,
    device: str = "auto",
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Measure a run on at most `tests` problems of each test set, and write reasoning.json into its folder."""
    given = {"reasoning.path": None if data is None else str(data), "reasoning.tests": tests}
    run = load_run(folder, *changes, device=device, **{key: value for key, value in given.items() if value is not None})
    config, settings, task = run.config, run.config.reasoning, run.task
    if data is not None and task.name in GENERATORS and task.name not in RECODED:
        known = ", ".join(f"{name} ({dataset})" for name, (dataset, _) in RECODED.items())
        raise ValueError(f"--data {data}: {task.name} has no published problems, as {known} have; leave it out")

    has_samplers = isinstance(run.objective, HoleObjective)
    objectives: dict[str, Any] = {settings.arm: run.objective}
    if has_samplers:
        objectives = {name: HoleObjective.from_config(config, task, sampler=name) for name in settings.samplers}
    sets, measured = task.load_tests(settings.tests), dict[str, dict[str, Any]]()
    for number, (name, test) in enumerate(product(objectives, sets)):
        on_progress(f"{folder}: {test}", number, len(objectives) * len(sets))
        results = solve(run.model, task, objectives[name], sets[test])
        measured.setdefault(name, {})[test] = measure_results(task, sets[test], results)

    is_generated = task.name in GENERATORS or read_state(run.folder)["data"].startswith(GENERATED)
    sections = ("steps", "batch", "init", "ema", "model", "optimizer", "objective")
    kept = {key: value for key, value in asdict(settings).items() if key not in ("task", "arm", "path")}
    content: dict[str, Any] = {
        "task": task.name,
        "arm": settings.arm,
        "seed": config.seed,
        "tests": next(iter(measured.values())),
        **({"samplers": measured} if has_samplers else {}),
        "training_problems": GENERATED if is_generated else "files",
        "parameters": count_parameters(run.model.config),
        "flops": count_training_flops(run) if task.can_train else None,
        "settings": {key: asdict(config)[key] for key in sections} | {"step": run.step, "reasoning": kept},
        "provenance": collect_provenance(run.device, weights=hash_file(run.folder / "model.safetensors")),
    }
    save_json(Path(folder) / RESULT, content)
    return content


def measure_results(task: Task, items: Sequence[Item], results: Sequence[Decoded]) -> dict[str, Any]:
    """Compute the accuracy on a test set and its cost; on Sudoku, the share of right cells too."""
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
        "right": np.packbits(is_right).tobytes().hex(),  # the first problem in the highest bit of the first byte
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
    """Count the training FLOPs of a run from the lengths of its rows, without padding."""
    objective, shape, items = run.objective, run.model.config, run.task.draw(0, 1, COUNTED_ROWS)
    decoder = replace(shape, anchor_layers=0, denoiser_layers=1)

    def count_row(item: Item, stage: int) -> float:
        layout = objective.lay_out(item, stage)
        length = len(layout.tokens)
        if isinstance(objective, HoleObjective):
            return flops_per_token(shape, length=length) * length
        arm = objective.arm
        share = len(choose_anchors(layout, item, None)) / length if arm.has_anchor_term else 0
        # A slot with feedback takes a pass of its own over the positions before it.
        passes = [(shape, n) for n in (length - 1, *(layout.slots if arm.feedback else ()))]
        reader = shape if arm.auxiliary == "codi" else decoder
        passes += [(reader, len(row.tokens) - 1) for row in objective.lay_out_auxiliary(item, layout)]
        return sum(flops_per_token(model, length=n, anchor_share=share) * n for model, n in passes)

    stages = count_stages(objective.curriculum, run.step) if isinstance(objective, ReasoningObjective) else [run.step]
    rows = [sum(count_row(item, stage) for item in items) / len(items) for stage in range(len(stages))]
    return float(run.config.batch * np.dot(stages, rows))


@torch.no_grad()
def ask(folder: str | Path, question: str, *, device: str = "auto", plot: Path | None = None) -> dict[str, Any]:
    """Answer a question: what the model writes, its guesses at labelled slots, and the answer; plot a graph's."""
    run = load_run(folder, device=device)
    task, objective = run.task, run.objective
    if not question.strip():
        raise ValueError("the question is empty: give its text")
    if plot is not None and (task.name != "graphs" or not QUESTION.fullmatch(question)):
        raise ValueError(f"--plot {plot} takes a question of graphs such as '3 5 | 0 3 ? 0 5 4': leave it out")
    ids, guesses, arm = task.encode_question(question), None, run.config.reasoning.arm
    layout, length = objective.lay_out(Item(ids, [], [], [], [])), run.model.config.length
    size = len(objective.task.lay_out(ids)) if isinstance(objective, HoleObjective) else layout.prompt + 1
    if size > length:
        numbers = f"the question takes {size:,} tokens in the layout of {arm}, and the model {length:,}"
        raise ValueError(f"{numbers}: shorten the question")
    if isinstance(objective, HoleObjective):
        (result,) = fill_holes(run.model, objective, [ids])
    else:
        options: dict[str, Any] = {"feedback": objective.arm.feedback, "max_new_tokens": length - layout.prompt}
        (result,) = decode_greedily(run.model, [layout], task.markers, **options)
        if objective.arm.labels != "none":
            batch = collate([layout], [[]], feedback=objective.arm.feedback).to(run.device)
            logits = apply_head(run.model, compute_features(run.model, batch).final[0, list(layout.slots)])
            guesses = [task.tokenizer.decode([token]).strip() for token in logits.argmax(-1).tolist()]
    answer = None if result.answer is None else task.decode(result.answer)
    text = task.tokenizer.decode(result.tokens)
    if plot is not None:
        kind, nodes = ("slot", guesses) if guesses else ("step", re.findall(r"(\d+) ;", text))  # a step's last node
        draw_graph(question, kind, nodes, answer, plot)
    return {"question": question, "slots": guesses, "text": text, "answer": answer, "passes": result.passes}


def draw_graph(question: str, kind: str, nodes: Sequence[str], answer: str | None, file: Path) -> None:
    """Draw a graph, the path to an option (a square), the model's nodes (right ones green) and its answer."""
    from adlm.evaluate.plots import new_figure
    from adlm.view.look import COLORS, GRAY, LIGHT

    facts, query = question.split("?")
    edges, (root, *options) = [(*fact.split(),) for fact in facts.split("|")], query.split()
    paths, queue = {root: [root]}, [root]
    for node in queue:
        for child in (end for start, end in edges if start == node and end not in paths):
            paths[child] = [*paths[node], child]
            queue.append(child)
    path = next((paths[option] for option in options if option in paths), [root])
    depth = dict.fromkeys([root, *options, *chain(*edges)], 0)
    for _, (start, end) in product(depth, edges):  # the longest way to a node; no graph of this task has a cycle
        depth[end] = max(depth[end], min(depth[start] + 1, len(depth)))
    columns = [[node for node in depth if depth[node] == level] for level in sorted({*depth.values()})]
    places: dict[str, tuple[float, float]] = {}
    for across, column in enumerate(columns):  # a node is about as high as those before it
        column.sort(key=lambda node: np.mean([places[a][1] for a, b in edges if b == node and a in places] or [0]))
        shift = 0.3 * (across % 2) - (len(column) - 1) / 2
        places |= {node: (across, up + shift) for up, node in enumerate(column)}
    numbers = dict(zip(range(1, len(nodes) + 1), nodes))

    with new_figure(file, len(columns) + 1, 0.6 * max(map(len, columns)) + 1) as figure:
        axes = figure.subplots()
        axes.axis("off")
        axes.margins(0.08, 0.15)
        for start, end in edges:
            look: dict[str, Any] = {"color": GRAY, "linewidth": 0.5, "arrowstyle": "-|>", "shrinkA": 9, "shrinkB": 9}
            look |= {"color": COLORS[0], "linewidth": 2.5} if (start, end) in pairwise(path) else {}
            axes.annotate("", places[end], places[start], arrowprops=look | {"connectionstyle": "arc3,rad=0.1"})
        for node, place in places.items():
            own = [number for number in numbers if numbers[number] == node]
            notes = ["answer"] * (node == answer) + [f"{kind} {number}" for number in own]
            fill = COLORS[2 if path[own[-1] : own[-1] + 1] == [node] else 1] if own else LIGHT
            shape = "s" if node in options else "D" if node == root else "o"
            edge = COLORS[0] if node in path else GRAY
            axes.plot(*place, shape, markersize=15, color=fill, markeredgecolor=edge, markeredgewidth=1.5)
            axes.annotate(node, place, ha="center", va="center")
            axes.annotate(", ".join(notes), place, (0, 12), textcoords="offset points", ha="center", fontsize=7)
        reply = f"{kind}s: {' '.join(nodes) or 'none'}  answer: {answer or 'none'}"
        axes.set_title(f"from {root}: {' or '.join(options)}?  {reply}")
