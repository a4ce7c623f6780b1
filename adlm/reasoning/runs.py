"""Training to reason with the project's loop, and the accuracy of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adlm import checkpoint
from adlm.bundled import MODELS, find_bundled_model
from adlm.config import Config, ReasoningSettings, load_config
from adlm.data.shards import hash_file
from adlm.data.tokenizers import Tokenizer, load_tokenizer, read_json
from adlm.diffusion.anchors import anchor_weight
from adlm.diffusion.masking import NoisyBatch
from adlm.diffusion.objectives import Loss, training_loss
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.generate import pick_device
from adlm.interop import gpt2
from adlm.methods import METHODS, look_up
from adlm.models.language_model import Features, LanguageModel, ModelConfig
from adlm.models.vocabulary import extend_vocabulary
from adlm.reasoning.arms import (
    ARMS,
    Arm,
    Curriculum,
    ReasoningBatch,
    RowLayout,
    add_auxiliary,
    choose_labels,
    collate,
    lay_out,
)
from adlm.reasoning.captures import LENGTHS, CapturedFeatures, CapturedModel
from adlm.reasoning.datasets import TEXT_TASKS
from adlm.reasoning.decoding import Decoded, decode_greedily
from adlm.reasoning.diffusion import HoleObjective, fill_holes
from adlm.reasoning.items import Item, Markers
from adlm.reasoning.losses import StepDecoder, reasoning_loss, run_with_feedback
from adlm.reasoning.tasks import ItemBatch, ItemBatches, Task, open_task
from adlm.training import setup
from adlm.training.distributed import DistributedContext, LossModule, ParallelModel
from adlm.training.loop import Run, run_training

DECODED_ROWS = 1024  # decoded at a time
EXTRA_TOKENS = 8  # that a model may write more than the longest solution before it is cut off


@dataclass(frozen=True)
class ReasoningObjective:
    """Lays problems out at their stage of the curriculum, with labels on the slots."""

    arm: Arm
    curriculum: Curriculum
    markers: Markers
    slots: int
    slots_per_stage: int = 1
    label_weight: float = 1.0
    peak_anchor_weight: float = 3e-3
    anchor_ramp: bool = True
    multiple: int = 1

    @staticmethod
    def from_config(config: Config, task: Task, *, multiple: int = 1) -> ReasoningObjective:
        """Build the objective of a run."""
        settings = config.reasoning
        arm = look_up(ARMS, settings.arm, "arm")
        stages = settings.stages or arm.stages or max(task.hops, 1)
        curriculum = Curriculum(stages, settings.stage_steps, settings.revisit)
        if arm.steps == "by_token":  # as long as the stages of whole steps
            tokens = max(sum(map(len, item.steps)) for item in task.draw(0, 1, 512))
            curriculum = Curriculum(tokens, max(1, stages * settings.stage_steps // tokens), settings.revisit)
        weights = settings.label_weight, config.objective.anchor_weight, config.objective.anchor_ramp
        slots = stages * settings.slots_per_stage
        return ReasoningObjective(arm, curriculum, task.markers, slots, settings.slots_per_stage, *weights, multiple)

    def lay_out(self, item: Item, stage: int | None = None) -> RowLayout:
        """Lay out a problem at a stage, by default the last one."""
        stage = self.curriculum.stages if stage is None else stage
        return lay_out(item, self.arm, stage, self.slots, self.markers, self.slots_per_stage)

    def corrupt(self, batch: ItemBatch, seed: int, step: int) -> ReasoningBatch:
        """Make the network's inputs and targets of an optimizer step."""
        rng, arm = CounterRng.from_seed(seed, batch.number), self.arm
        layouts = list(map(self.lay_out, batch.items, self.curriculum.find_stages(step, rng)))
        order: list[list[float]] = [[]] * len(layouts)
        if arm.labels == "shuffled":
            order = rng.uniform(step, max(1, self.slots), Purpose.LABEL).tolist()
        pairs = zip(batch.items, batch.foreign, order, strict=True)
        labels = [choose_labels(item, foreign, arm.labels, numbers) for item, foreign, numbers in pairs]
        anchors = None
        if arm.anchors not in (None, "none"):
            u = rng.uniform(step, max(len(layout.tokens) for layout in layouts), Purpose.ANCHOR).tolist()
            anchors = [
                choose_anchors(layout, item, None if arm.anchors == "trace" else own)
                for layout, item, own in zip(layouts, batch.items, u, strict=True)
            ]
        made = collate(
            layouts,
            labels,
            feedback=arm.feedback,
            label_weight=self.label_weight,
            anchors=anchors,
            multiple=self.multiple,
        )
        if arm.auxiliary is None:
            return made
        sizes = self.slots_per_stage, self.multiple
        return add_auxiliary(made, layouts, batch.items, arm.auxiliary, self.markers, *sizes)

    def anchor_weight(self, step: int, steps: int) -> float | None:
        """Gamma of A2R's anchor term at a step; None where there are no anchors."""
        if self.arm.anchors in (None, "none"):
            return None
        return anchor_weight(step, steps, self.peak_anchor_weight) if self.anchor_ramp else self.peak_anchor_weight


def choose_anchors(layout: RowLayout, item: Item, u: Sequence[float] | None) -> list[int]:
    """Return the positions of the trace's anchors or, with random numbers, as many random positions of the trace."""
    found = [position for position in layout.trace if layout.tokens[position] in item.anchors]
    if u is None:
        return found
    return sorted(layout.trace, key=u.__getitem__)[: len(found)]


def train(task: str, arm: str, recipe: str = "reason", *changes: str, **settings: Any) -> Run:
    """Train a model on a task by an arm; the same call resumes an interrupted run."""
    return run_training(
        load_config(recipe, f"reasoning.task={task}", f"reasoning.arm={arm}", *changes, **settings), open_run
    )


def open_run(config: Config, context: DistributedContext) -> setup.TrainingTask:
    """Open the task of a run, with the arm's model and objective."""
    look_up(ARMS, config.reasoning.arm, "arm")
    if config.parallel.kind in ("fsdp", "hsdp"):
        raise ValueError(f"parallel.kind={config.parallel.kind} shards weights, and one process decodes: use ddp")
    base = load_base(config)
    task = open_task(config.reasoning, find_tokenizer(config.reasoning, base))
    arm = ARMS[config.reasoning.arm]
    method = arm.method if base is None else base.method
    if method != arm.method and (arm.anchors is not None or arm.auxiliary == "codi"):
        raise ValueError(
            f"init={config.init} is {method}, and arm {config.reasoning.arm} trains {arm.method}: choose another model"
        )
    if arm.labels == "foreign" and config.batch < 2:
        raise ValueError(f"batch={config.batch} has no other problem's labels for {config.reasoning.arm}: give 2")
    config = replace(config, method=method)
    multiple = LENGTHS if context.device.type == "cuda" else 1
    objective = build_reasoning_objective(config, task, multiple=multiple)
    init = None if base is None else fit_vocabulary(base, task.tokenizer)
    sample = task.draw(0, 1, 512)
    layouts = [objective.lay_out(item, stage) for item in sample for stage in (0, None)]
    if arm.auxiliary == "codi":
        layouts += [lay_out(item, ARMS["cot"], 0, 0, task.markers) for item in sample]
    longest = max(len(layout.tokens) for layout in layouts)
    shape = build_shape(config, task, init, longest)
    check_length(config, task, shape, longest)
    valid = task.load_valid(config.valid.rows or 1024)
    is_captured = context.device.type == "cuda" and context.world_size == 1 and shape.dropout == 0
    compute = CapturedFeatures() if is_captured else run_with_feedback

    def validate(parallel: ParallelModel, batch: int) -> dict[str, float]:
        results = context.run_on_rank0(lambda: solve(parallel.model, task, objective, valid))
        right = sum(result.answer == item.answer for result, item in zip(results, valid, strict=True))
        return {"val/accuracy": right / len(valid), "val/error": 1 - right / len(valid)}

    def write_samples(weights: dict[str, Tensor], step: int, device: torch.device) -> str:
        model = LanguageModel(shape)
        model.load_state_dict(checkpoint.restore_tied_head(weights, model))
        items = valid[: config.samples.rows]
        texts = [
            format_solution(task, item, result)
            for item, result in zip(items, solve(model.to(device), task, objective, items), strict=True)
        ]
        path = Path(config.folder) / "samples" / f"step-{step:08d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(texts) + "\n", "utf-8")
        return f"step {step:,}: {path}: {texts[0]}"

    return setup.TrainingTask(
        config,
        shape,
        init,
        objective,
        ItemBatches(task, config.batch, seed=config.seed, rank=context.rank, size=context.world_size),
        build_loss=partial(
            LossModule,
            loss_fn=hole_loss if arm.holes else reasoning_loss,
            modules={"decoder": StepDecoder(shape, seed=config.seed)} if arm.auxiliary == "simcot" else None,
            compute_features=compute,
        ),
        validate=validate,
        format_metrics=format_accuracy,
        write_samples=write_samples,
        data_hash=task.sha256,
        description=f"{task.name}, arm {config.reasoning.arm}; {config.steps:,} steps of {config.batch} problems of at "
        f"most {longest} tokens, vocabulary {shape.vocab_size:,}",
        length=longest,
        tokenizer=task.tokenizer,
        best_metric="val/error",
    )


def hole_loss(
    model: LanguageModel, batch: NoisyBatch, *, compute_features: Callable[..., Features], **options: Any
) -> Loss:
    """Compute the NELBO or ANELBO of the holes."""
    is_captured = isinstance(compute_features, CapturedFeatures)
    return training_loss(CapturedModel(model, compute_features) if is_captured else model, batch, **options)


def format_accuracy(metrics: Mapping[str, float]) -> str:
    """Format the validation metrics of a reasoning run."""
    return f"accuracy {metrics['val/accuracy']:.1%} of the validation problems"


@dataclass(frozen=True)
class BaseModel:
    """The model that a run starts from; without weights if the run resumes."""

    method: str
    shape: ModelConfig
    tokenizer: Tokenizer | None
    model: LanguageModel | None = None
    sha256: str | None = None


def load_base(config: Config) -> BaseModel | None:
    """Load the model of `init`: a bundled one, a run or model folder, or a GPT-2 folder as transformers saves it."""
    if config.init is None:
        return None
    resumed = setup.find_checkpoint(config)
    if resumed is not None and resumed.is_dir():
        content, shape = checkpoint.read_config_json(resumed)
        return BaseModel(content["method"], shape, Tokenizer.load(resumed))
    path = find_bundled_model(config.init) if config.init in MODELS else Path(config.init)
    settings = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if isinstance(settings, dict) and "model_type" in settings:  # of transformers
        model = gpt2.load(path)
        base = BaseModel("ar", model.config, gpt2.load_gpt2_tokenizer(path), model)
    else:
        folder = checkpoint.find_model_folder(path)
        loaded = checkpoint.load_model(folder)
        sha256 = hash_file(folder / "model.safetensors")
        base = BaseModel(loaded.method, loaded.model.config, loaded.tokenizer, loaded.model, sha256)
    if not base.shape.is_causal:
        raise ValueError(
            f"init={config.init} is a masked model ({base.method}): reasoning arms train a causal one (ar, a2r)"
        )
    return base


def find_tokenizer(settings: ReasoningSettings, base: BaseModel | None) -> Tokenizer | None:
    """Return the tokenizer of a text task: that of the base model, by default GPT-2's; other tasks have their own."""
    if settings.task not in TEXT_TASKS:
        return None
    return (base and base.tokenizer) or load_tokenizer(settings.tokenizer or "gpt2")


def fit_vocabulary(base: BaseModel, tokenizer: Tokenizer) -> setup.InitModel:
    """Extend a base model by the markers of a task; the mask, which a causal model never reads, moves to the end."""
    if base.model is None:
        return setup.InitModel(base.method, base.shape)
    words = {} if base.tokenizer is None else base.tokenizer.bpe.get_vocab()
    count = tokenizer.vocab_size - base.shape.vocab_size
    if count < 0 or not words.items() <= tokenizer.bpe.get_vocab().items():
        raise ValueError(
            f"the model of init has {base.shape.vocab_size:,} tokens, which are not those of {tokenizer.name}: train "
            "on a text task, whose vocabulary is the model's, or without init"
        )
    model = extend_vocabulary(base.model, count) if count else base.model
    shape = replace(model.config, mask_id=tokenizer.mask_id)
    return setup.InitModel(base.method, shape, model.state_dict(), base.sha256)


def build_shape(config: Config, task: Task, init: setup.InitModel | None, longest: int) -> ModelConfig:
    """Build the model config of a run: that of the base model, or the recipe's with the task's vocabulary."""
    changes = {key: value for key, value in vars(config.model).items() if key != "preset" and value is not None}
    if init is not None:
        return replace(init.shape, dropout=changes.get("dropout", init.shape.dropout))
    layers = changes.pop("denoiser_layers", 4)
    method = METHODS[str(config.method)]
    stages = {"anchor_layers": layers // 2, "denoiser_layers": layers - layers // 2} if method.two_stages else {}
    changes = {"anchor_layers": 0, "denoiser_layers": layers, "bridge": "direct"} | changes | stages
    length = task.length or -(-(longest + EXTRA_TOKENS) // 64) * 64
    changes |= {"vocab_size": task.tokenizer.vocab_size, "mask_id": task.tokenizer.mask_id, "length": length}
    return ModelConfig(**({"cond_dim": None, "is_causal": method.is_causal} | changes))


def check_length(config: Config, task: Task, shape: ModelConfig, longest: int) -> None:
    """Raise ValueError if problems are longer than the model."""
    if longest > shape.length:
        raise ValueError(
            f"a problem of {task.name} has {longest} tokens in the layout of {config.reasoning.arm}, and the model "
            f"takes {shape.length}: choose another model or fewer hops"
        )


def build_reasoning_objective(config: Config, task: Task, *, multiple: int = 1) -> ReasoningObjective | HoleObjective:
    """Build the objective of an arm: of a causal model, or of a masked one that fills holes."""
    kind = ReasoningObjective if ARMS[config.reasoning.arm].holes is None else HoleObjective
    return kind.from_config(config, task, multiple=multiple)


def solve(
    model: LanguageModel, task: Task, objective: ReasoningObjective | HoleObjective, items: Sequence[Item]
) -> list[Decoded]:
    """Decode the answers of problems, in batches of similar lengths."""
    if isinstance(objective, HoleObjective):
        return fill_holes(model, objective, [item.question for item in items])
    layouts = [objective.lay_out(item) for item in items]
    longest = max(len(layout.tokens) - layout.prompt for layout in layouts)
    order = sorted(range(len(items)), key=lambda number: layouts[number].prompt)
    results: dict[int, Decoded] = {}
    for start in range(0, len(order), DECODED_ROWS):
        part = order[start : start + DECODED_ROWS]
        room = model.config.length - max(layouts[number].prompt for number in part)
        with torch.compiler.set_stance("force_eager"):  # every length of the cache would be compiled
            decoded = decode_greedily(
                model,
                [layouts[number] for number in part],
                task.markers,
                feedback=objective.arm.feedback,
                max_new_tokens=max(1, min(longest + EXTRA_TOKENS, room)),
            )
        results |= dict(zip(part, decoded, strict=True))
    return [results[number] for number in range(len(items))]


def format_solution(task: Task, item: Item, result: Decoded) -> str:
    """Format a question, what the model wrote, and whether it is right."""
    verdict = "right" if result.answer == item.answer else f"wrong, expected {task.decode(item.answer)}"
    return f"{task.decode(item.question)} → {task.tokenizer.decode(result.tokens)} ({verdict})"


@dataclass(frozen=True)
class LoadedRun:
    """A trained run with its task and the layout of its prompts."""

    config: Config
    model: LanguageModel
    task: Task
    objective: ReasoningObjective | HoleObjective
    step: int
    sha256: str  # of its weights


def load_run(folder: str | Path, *changes: str, device: str = "auto", **settings: Any) -> LoadedRun:
    """Load a run of `adlm reason train` with its latest checkpoint, with changes to its config."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.yaml: give a folder that `adlm reason train` wrote")
    config = load_config(path, *changes, **settings)
    if config.reasoning.task is None:
        raise ValueError(f"{folder} was trained on text, not on a reasoning task: evaluate it with `adlm eval`")
    place, source = pick_device(device), checkpoint.find_model_folder(folder)
    loaded = checkpoint.load_model(source)
    task = open_task(config.reasoning, loaded.tokenizer)
    objective, sha256 = build_reasoning_objective(config, task), hash_file(source / "model.safetensors")
    return LoadedRun(config, loaded.model.to(place).eval(), task, objective, loaded.step, sha256)
