"""Training to reason with the project's loop; the accuracy, the costs and the answers of a trained run."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm.apps.reasoning import sudoku
from adlm.apps.reasoning.arms import (
    ARMS,
    Arm,
    Curriculum,
    ReasoningObjective,
    choose_anchors,
    collate,
    lay_out,
)
from adlm.apps.reasoning.datasets import DATASETS
from adlm.apps.reasoning.decoding import Decoded, decode_greedily, decode_in_batches
from adlm.apps.reasoning.diffusion import HoleObjective, fill_holes
from adlm.apps.reasoning.items import Item
from adlm.apps.reasoning.losses import (
    CAPTURED_LENGTHS,
    CapturedFeatures,
    StepDecoder,
    compute_features,
    reasoning_loss,
)
from adlm.apps.reasoning.settings import ReasoningConfig
from adlm.apps.reasoning.tasks import (
    GENERATED,
    GENERATORS,
    RECODED,
    ItemBatches,
    ProblemSet,
    hash_items,
    open_task,
)
from adlm.apps.reasoning.verdicts import RESULT
from adlm.bundled import MODELS, find_bundled_model
from adlm.config import Config, load_config
from adlm.data.tokenizers import Tokenizer, load_tokenizer
from adlm.devices import pick_device
from adlm.diffusion.features import FeatureModel
from adlm.distributed import DistributedContext
from adlm.evaluate.cache import ProgressCallback, ignore_progress
from adlm.evaluate.provenance import collect_provenance
from adlm.evaluate.results import save_json
from adlm.files import hash_file, read_json
from adlm.interop import gpt2
from adlm.likelihood import compute_logits
from adlm.models import folder as model_folder
from adlm.models.costs import count_parameters, flops_per_token
from adlm.models.folder import LoadedModel
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.models.methods import METHODS
from adlm.models.vocabulary import extend_vocabulary
from adlm.registry import Registry
from adlm.training import setup
from adlm.training import state as run_state
from adlm.training import task as training_task
from adlm.training.distributed import ParallelModel
from adlm.training.task import InitModel
from adlm.training.train import Run, train_task

EXTRA_TOKENS = 8  # that a model may write more than the longest solution before it is cut off
QUESTION = re.compile(r"\s*\d+ +\d+(?: *\| *\d+ +\d+)* *\? *\d+ +\d+ +\d+\s*")  # of graphs
COUNTED_ROWS = 256  # problems whose lengths the FLOPs are counted from


def train(task: str, arm: str, recipe: str = "reason", *changes: str, **settings: Any) -> Run:
    """Train a model on a task by an arm; the same call resumes an interrupted run."""
    names = f"reasoning.task={task}", f"reasoning.arm={arm}"
    return train_task(load_config(recipe, *names, *changes, **settings), ReasoningTask)


class ReasoningTask(training_task.Task):
    """The problems of a task, laid out by an arm."""

    best_metric = "val/error"

    def __init__(self, config: Config, context: DistributedContext) -> None:
        assert isinstance(config, ReasoningConfig)
        name = config.reasoning.arm
        arm = Registry("arm", ARMS).resolve(name)
        if config.parallel.kind in ("fsdp", "hsdp"):
            kind = f"parallel.kind={config.parallel.kind}"
            raise ValueError(f"{kind} shards weights, and one process decodes: use ddp")
        if arm.labels == "foreign" and config.batch < 2:
            problem = f"batch={config.batch} has no other problem's labels for {name}"
            raise ValueError(f"{problem}: give 2")
        self.context = context
        self.problems, self.init = open_task_and_init(config)
        method = arm.method if self.init is None else self.init.method
        self.config = config = config.replace(method=method)

        is_cuda = context.device.type == "cuda"
        layouts = build_reasoning_objective(
            config, self.problems, multiple=CAPTURED_LENGTHS if is_cuda else 1
        )
        self.length = max(map(layouts.count_tokens, self.problems.load_sample()))
        self.shape = build_shape(config, self.problems, self.init, self.length)
        if self.length > self.shape.length:
            size = f"a problem of {self.problems.name} has {self.length} tokens"
            room = f"the layout of {name}, and the model takes {self.shape.length}"
            raise ValueError(f"{size} in {room}: choose another model or fewer hops")
        self.objective = self.layouts = self.add_loss(layouts, arm)

        self.valid = self.problems.load_valid(config.valid.rows or 1024)
        self.tokenizer = self.problems.tokenizer
        self.data_hash = self.problems.hash_problems()
        self.row_tokens = self.length
        made = "generated " if self.data_hash.startswith(GENERATED) else ""
        self.description = (
            f"{self.problems.name}, arm {name}; {config.steps:,} steps of {config.batch} "
            f"{made}problems of at most {self.length} tokens, vocabulary {self.shape.vocab_size:,}"
        )

    def add_loss(
        self, layouts: ReasoningObjective | HoleObjective, arm: Arm
    ) -> ReasoningObjective | HoleObjective:
        """Return the objective with the loss of its arm, and the module that the loss trains."""
        shape = self.shape
        is_plain = shape.dropout == 0 and not shape.time_conditioning
        is_alone = self.context.device.type == "cuda" and self.context.world_size == 1
        run = CapturedFeatures() if is_alone and is_plain else compute_features
        decoder = None
        if arm.auxiliary == "simcot":
            decoder = StepDecoder(shape, seed=self.config.seed)
        return replace(
            layouts,
            loss_fn=partial(reasoning_loss, run=run, decoder=decoder),
            modules={} if decoder is None else {"decoder": decoder},
        )

    def open_batches(self) -> ItemBatches:
        """Open the problems of each step."""
        return ItemBatches(
            self.problems,
            self.config.batch,
            seed=self.config.seed,
            rank=self.context.rank,
            size=self.context.world_size,
        )

    def validate(self, parallel: ParallelModel, batch: int) -> dict[str, float]:
        """Compute the accuracy on held-out problems, in one process."""
        model = parallel.model
        assert isinstance(model, LanguageModel)  # arms train no other
        results = self.context.run_on_rank0(
            lambda: solve(model, self.problems, self.layouts, self.valid)
        )
        answers = [item.answer for item in self.valid]
        right = sum(
            result.answer == answer for result, answer in zip(results, answers, strict=True)
        )
        accuracy = right / len(answers)
        return {"val/accuracy": accuracy, "val/error": 1 - accuracy}

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        """Format the accuracy."""
        return f"accuracy {metrics['val/accuracy']:.1%} of the validation problems"

    def sample(self, model: FeatureModel) -> str:
        """Solve some held-out problems."""
        assert isinstance(model, LanguageModel)
        items = self.valid[: self.config.samples.rows]
        results = solve(model, self.problems, self.layouts, items)
        lines = [
            format_solution(self.problems, item, result)
            for item, result in zip(items, results, strict=True)
        ]
        return "\n".join(lines)


def open_task_and_init(config: ReasoningConfig) -> tuple[ProblemSet, InitModel | None]:
    """Open the task and the model of `init`, whose vocabulary the markers of the task and then the mask follow."""
    if config.init is None:
        name = config.reasoning.tokenizer or "gpt2"
        return open_task(
            config.reasoning, load_tokenizer(name) if config.reasoning.task in DATASETS else None
        ), None
    resumed = setup.find_checkpoint(config)
    if resumed is not None and resumed.is_dir():
        file = model_folder.read_config_json(resumed)
        init = InitModel(file.method, ModelConfig.parse("json", **file.model))
        return open_task(config.reasoning, Tokenizer.load(resumed)), init
    path = find_bundled_model(config.init) if config.init in MODELS else Path(config.init)
    settings = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    sha256 = None
    if isinstance(settings, dict) and "model_type" in settings:  # of transformers
        loaded = LoadedModel(gpt2.load(path), load_tokenizer(path), "ar", 0, model_folder.WRAPPED)
    else:
        folder = model_folder.find_model_folder(path)
        loaded, sha256 = (
            model_folder.load_model(folder),
            hash_file(model_folder.find_weights_file(folder)),
        )
    model, tokenizer, method = loaded.model, loaded.tokenizer, loaded.method
    if not model.config.is_causal:
        raise ValueError(
            f"init={config.init} is a masked model ({method}): arms train a causal one (ar, a2r)"
        )
    arm = ARMS[config.reasoning.arm]
    if method != arm.method and (arm.anchors is not None or arm.auxiliary == "codi"):
        names = (
            f"init={config.init} is {method}, and arm {config.reasoning.arm} trains {arm.method}"
        )
        raise ValueError(f"{names}: choose another model")
    task = open_task(
        config.reasoning, tokenizer or load_tokenizer(config.reasoning.tokenizer or "gpt2")
    )
    words, own = {} if tokenizer is None else tokenizer.bpe.get_vocab(), task.tokenizer
    count = own.vocab_size - model.config.vocab_size
    if count < 0 or not words.items() <= own.bpe.get_vocab().items():
        sizes = f"the model of init has {model.config.vocab_size:,} tokens, which are not those of {own.name}"
        raise ValueError(
            f"{sizes}: train on a text task, whose vocabulary is the model's, or without init"
        )
    model = extend_vocabulary(model, count) if count else model
    shape = model.config.replace(mask_id=own.mask_id)
    return task, InitModel(method, shape, model.state_dict(), sha256)


def build_shape(
    config: ReasoningConfig, task: ProblemSet, init: InitModel | None, longest: int
) -> ModelConfig:
    """Build the model config of a run: that of the base model, or the recipe's with the task's vocabulary."""
    if config.model.network is not None:
        raise ValueError(
            f"model.network={config.model.network} is for text: arms train the transformer; leave it out"
        )
    changes = config.model.list_changes()
    if init is not None:
        return init.shape.replace(dropout=changes.get("dropout", init.shape.dropout))
    method = METHODS[str(config.method)]
    layers = changes.pop("denoiser_layers", 4)
    anchor_layers = changes.pop("anchor_layers", 0)
    if method.two_stages:
        anchor_layers = layers // 2
        layers -= anchor_layers
    defaults = {"bridge": "direct", "cond_dim": None, "is_causal": method.is_causal}
    sizes = {
        "vocab_size": task.tokenizer.vocab_size,
        "mask_id": task.tokenizer.mask_id,
        "length": task.length or -(-(longest + EXTRA_TOKENS) // 64) * 64,
        "anchor_layers": anchor_layers,
        "denoiser_layers": layers,
    }
    return ModelConfig.parse("json", **(defaults | changes | sizes))


def build_reasoning_objective(
    config: ReasoningConfig, task: ProblemSet, *, multiple: int = 1
) -> ReasoningObjective | HoleObjective:
    """Build the objective of an arm: of a causal model, or of a masked one that fills holes."""
    kind = ReasoningObjective if ARMS[config.reasoning.arm].holes is None else HoleObjective
    return kind.from_config(config, task, multiple=multiple)


def solve(
    model: LanguageModel,
    task: ProblemSet,
    objective: ReasoningObjective | HoleObjective,
    items: Sequence[Item],
) -> list[Decoded]:
    """Decode the answers of problems, in batches of similar lengths."""
    if isinstance(objective, HoleObjective):
        return fill_holes(model, objective, [item.question for item in items])
    layouts = [objective.lay_out(item) for item in items]
    # Room for the steps beyond those that the stages remove one by one, which a model may still write.
    rows = [
        lay_out(item, objective.arm, objective.curriculum.stages, 0, objective.markers)
        for item in items
    ]
    most = max(len(row.tokens) - row.prompt for row in rows) + EXTRA_TOKENS

    def decode(part: list[int]) -> list[Decoded]:
        own = [layouts[number] for number in part]
        room = max(1, min(most, model.config.length - max(layout.prompt for layout in own)))
        with torch.compiler.set_stance(
            "force_eager"
        ):  # every length of the cache would be compiled
            return decode_greedily(
                model, own, task.markers, feedback=objective.arm.feedback, max_new_tokens=room
            )

    return decode_in_batches([layout.prompt for layout in layouts], decode)


def format_solution(task: ProblemSet, item: Item, result: Decoded) -> str:
    """Format a question, what the model wrote, and whether it is right."""
    verdict = (
        "right" if result.answer == item.answer else f"wrong, expected {task.decode(item.answer)}"
    )
    return f"{task.decode(item.question)} → {task.tokenizer.decode(result.tokens)} ({verdict})"


@dataclass(frozen=True)
class LoadedRun:
    """A trained run with its task and the layout of its prompts."""

    config: ReasoningConfig
    model: LanguageModel
    task: ProblemSet
    objective: ReasoningObjective | HoleObjective
    step: int
    folder: Path  # of its weights
    device: torch.device


def load_run(folder: str | Path, *changes: str, device: str = "auto", **settings: Any) -> LoadedRun:
    """Load a run of `adlm reason train` with its latest checkpoint, with changes to its config."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.yaml: give a folder that `adlm reason train` wrote"
        )
    config = load_config(path, *changes, **settings)
    if not isinstance(config, ReasoningConfig) or config.reasoning.task is None:
        raise ValueError(
            f"{folder} was trained on text, not on a reasoning task: evaluate it with `adlm eval`"
        )
    place, source = pick_device(device), model_folder.find_model_folder(folder)
    loaded = model_folder.load_model(source)
    task = open_task(config.reasoning, loaded.tokenizer)
    objective = build_reasoning_objective(config, task)
    return LoadedRun(
        config, loaded.model.to(place).eval(), task, objective, loaded.step, source, place
    )


def evaluate(
    folder: str | Path,
    *changes: str,
    data: str
    | Path
    | None = None,  # folder with published problems: of a text task, or a second test
    tests: int | None = None,
    device: str = "auto",
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Measure a run on at most `tests` problems of each test set, and write reasoning.json into its folder."""
    given = {"reasoning.path": None if data is None else str(data), "reasoning.tests": tests}
    run = load_run(
        folder,
        *changes,
        device=device,
        **{key: value for key, value in given.items() if value is not None},
    )
    config, settings, task = run.config, run.config.reasoning, run.task
    if data is not None and task.name in GENERATORS and task.name not in RECODED:
        known = ", ".join(f"{name} ({dataset})" for name, (dataset, _) in RECODED.items())
        raise ValueError(
            f"--data {data}: {task.name} has no published problems, as {known} have; leave it out"
        )

    has_samplers = isinstance(run.objective, HoleObjective)
    objectives: dict[str, Any] = {settings.arm: run.objective}
    if has_samplers:
        objectives = {
            name: HoleObjective.from_config(config, task, sampler=name)
            for name in settings.samplers
        }
    sets, measured = task.load_tests(settings.tests), dict[str, dict[str, Any]]()
    for number, (name, test) in enumerate(product(objectives, sets)):
        on_progress(f"{folder}: {test}", number, len(objectives) * len(sets))
        results = solve(run.model, task, objectives[name], sets[test])
        measured.setdefault(name, {})[test] = measure_results(task, sets[test], results)

    is_generated = task.name in GENERATORS or run_state.read_state(run.folder).data.startswith(
        GENERATED
    )
    sections = ("steps", "batch", "init", "ema", "model", "optimizer", "objective")
    kept = settings.model_dump(exclude={"task", "arm", "path"})
    content: dict[str, Any] = {
        "task": task.name,
        "arm": settings.arm,
        "seed": config.seed,
        "tests": next(iter(measured.values())),
        **({"samplers": measured} if has_samplers else {}),
        "training_problems": GENERATED if is_generated else "files",
        "parameters": count_parameters(run.model.config),
        "flops": count_training_flops(run) if task.can_train else None,
        "settings": config.model_dump(include=set(sections))
        | {"step": run.step, "reasoning": kept},
        "provenance": collect_provenance(
            run.device, weights=hash_file(run.folder / "model.safetensors")
        ),
    }
    save_json(Path(folder) / RESULT, content)
    return content


def measure_results(
    task: ProblemSet, items: Sequence[Item], results: Sequence[Decoded]
) -> dict[str, Any]:
    """Compute the accuracy on a test set and its cost; on Sudoku, the share of right cells too."""
    is_right = np.array(
        [result.answer == item.answer for result, item in zip(results, items, strict=True)]
    )
    accuracy, count = float(is_right.mean()), len(items)
    example = int(is_right.argmax())  # the first right one, or the first
    metrics: dict[str, Any] = {
        "accuracy": accuracy,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / count),
        "problems": count,
        "tokens": sum(len(result.tokens) for result in results) / count,
        "passes": sum(result.passes for result in results) / count,
        "example": format_solution(task, items[example], results[example]),
        "right": np.packbits(is_right)
        .tobytes()
        .hex(),  # the first problem in the highest bit of the first byte
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
    return (1 - curriculum.revisit) * now + curriculum.revisit * earlier


def count_training_flops(run: LoadedRun) -> float:
    """Count the training FLOPs of a run from the lengths of its rows, without padding."""
    objective, shape, items = run.objective, run.model.config, run.task.draw(0, 1, COUNTED_ROWS)

    def count_row(item: Item, stage: int) -> float:
        layout = objective.lay_out(item, stage)
        length = len(layout.tokens)
        if isinstance(objective, HoleObjective):
            return flops_per_token(shape, length=length) * length
        arm = objective.arm
        share = len(choose_anchors(layout, item, None)) / length if arm.has_anchor_term else 0
        # A slot with feedback takes a pass of its own over the positions before it.
        passes = [(shape, n) for n in (length - 1, *(layout.slots if arm.feedback else ()))]
        reader = (
            shape if arm.auxiliary == "codi" else shape.replace(anchor_layers=0, denoiser_layers=1)
        )
        passes += [
            (reader, len(row.tokens) - 1) for row in objective.lay_out_auxiliary(item, layout)
        ]
        return sum(flops_per_token(model, length=n, anchor_share=share) * n for model, n in passes)

    stages = (
        count_stages(objective.curriculum, run.step)
        if isinstance(objective, ReasoningObjective)
        else [run.step]
    )
    rows = [
        sum(count_row(item, stage) for item in items) / len(items) for stage in range(len(stages))
    ]
    return float(run.config.batch * np.dot(stages, rows))


@torch.no_grad()
def ask(
    folder: str | Path, question: str, *, device: str = "auto", plot: Path | None = None
) -> dict[str, Any]:
    """Answer a question: what the model writes, its guesses at labelled slots, and the answer; plot a graph's."""
    run = load_run(folder, device=device)
    task, objective = run.task, run.objective
    if not question.strip():
        raise ValueError("the question is empty: give its text")
    if plot is not None and (task.name != "graphs" or not QUESTION.fullmatch(question)):
        raise ValueError(
            f"--plot {plot} takes a question of graphs such as '3 5 | 0 3 ? 0 5 4': leave it out"
        )
    ids, guesses, arm = task.encode_question(question), None, run.config.reasoning.arm
    layout, length = objective.lay_out(Item(ids, [], [], [], [])), run.model.config.length
    size = (
        len(objective.task.lay_out(ids))
        if isinstance(objective, HoleObjective)
        else layout.prompt + 1
    )
    if size > length:
        numbers = (
            f"the question takes {size:,} tokens in the layout of {arm}, and the model {length:,}"
        )
        raise ValueError(f"{numbers}: shorten the question")
    if isinstance(objective, HoleObjective):
        (result,) = fill_holes(run.model, objective, [ids])
    else:
        options: dict[str, Any] = {
            "feedback": objective.arm.feedback,
            "max_new_tokens": length - layout.prompt,
        }
        (result,) = decode_greedily(run.model, [layout], task.markers, **options)
        if objective.arm.labels != "none":
            batch = collate([layout], [[]], feedback=objective.arm.feedback).to(run.device)
            logits = compute_logits(
                run.model, compute_features(run.model, batch).final[0, list(layout.slots)]
            )
            guesses = [
                task.tokenizer.decode([token]).strip() for token in logits.argmax(-1).tolist()
            ]
    answer = None if result.answer is None else task.decode(result.answer)
    text = task.tokenizer.decode(result.tokens)
    if plot is not None:
        kind, nodes = (
            ("slot", guesses) if guesses else ("step", re.findall(r"(\d+) ;", text))
        )  # a step's last node
        draw_graph(question, kind, nodes, answer, plot)
    return {
        "question": question,
        "slots": guesses,
        "text": text,
        "answer": answer,
        "passes": result.passes,
    }


def draw_graph(
    question: str, kind: str, nodes: Sequence[str], answer: str | None, file: Path
) -> None:
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
    for _, (start, end) in product(
        depth, edges
    ):  # the longest way to a node; no graph of this task has a cycle
        depth[end] = max(depth[end], min(depth[start] + 1, len(depth)))
    columns = [
        [node for node in depth if depth[node] == level] for level in sorted({*depth.values()})
    ]
    places: dict[str, tuple[float, float]] = {}
    for across, column in enumerate(columns):  # a node is about as high as those before it
        column.sort(
            key=lambda node: np.mean(
                [places[a][1] for a, b in edges if b == node and a in places] or [0]
            )
        )
        shift = 0.3 * (across % 2) - (len(column) - 1) / 2
        places |= {node: (across, up + shift) for up, node in enumerate(column)}
    numbers = dict(zip(range(1, len(nodes) + 1), nodes))

    with new_figure(file, len(columns) + 1, 0.6 * max(map(len, columns)) + 1) as figure:
        axes = figure.subplots()
        axes.axis("off")
        axes.margins(0.08, 0.15)
        for start, end in edges:
            look: dict[str, Any] = {
                "color": GRAY,
                "linewidth": 0.5,
                "arrowstyle": "-|>",
                "shrinkA": 9,
                "shrinkB": 9,
            }
            look |= {"color": COLORS[0], "linewidth": 2.5} if (start, end) in pairwise(path) else {}
            axes.annotate(
                "",
                places[end],
                places[start],
                arrowprops=look | {"connectionstyle": "arc3,rad=0.1"},
            )
        for node, place in places.items():
            own = [number for number in numbers if numbers[number] == node]
            notes = ["answer"] * (node == answer) + [f"{kind} {number}" for number in own]
            fill = COLORS[2 if path[own[-1] : own[-1] + 1] == [node] else 1] if own else LIGHT
            shape = "s" if node in options else "D" if node == root else "o"
            edge = COLORS[0] if node in path else GRAY
            axes.plot(
                *place, shape, markersize=15, color=fill, markeredgecolor=edge, markeredgewidth=1.5
            )
            axes.annotate(node, place, ha="center", va="center")
            axes.annotate(
                ", ".join(notes),
                place,
                (0, 12),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
        reply = f"{kind}s: {' '.join(nodes) or 'none'}  answer: {answer or 'none'}"
        axes.set_title(f"from {root}: {' or '.join(options)}?  {reply}")
