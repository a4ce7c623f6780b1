"""Training to reason with the project's loop, and the problems that a run solves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adlm import checkpoint
from adlm.bundled import MODELS, find_bundled_model
from adlm.checkpoint import LoadedModel
from adlm.config import Config, load_config
from adlm.data.shards import hash_file
from adlm.data.tokenizers import Tokenizer, load_tokenizer, read_json
from adlm.generate import pick_device
from adlm.interop import gpt2
from adlm.methods import METHODS, look_up
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.models.vocabulary import extend_vocabulary
from adlm.reasoning.arms import ARMS, ReasoningObjective, lay_out
from adlm.reasoning.datasets import DATASETS
from adlm.reasoning.decoding import Decoded, decode_greedily, decode_in_batches
from adlm.reasoning.diffusion import HoleObjective, fill_holes
from adlm.reasoning.items import Item
from adlm.reasoning.losses import CAPTURED_LENGTHS, CapturedFeatures, StepDecoder, compute_features, reasoning_loss
from adlm.reasoning.tasks import GENERATED, ItemBatches, Task, open_task
from adlm.training import setup
from adlm.training.distributed import DistributedContext, LossModule, ParallelModel
from adlm.training.loop import Run, run_training

EXTRA_TOKENS = 8  # that a model may write more than the longest solution before it is cut off


def train(task: str, arm: str, recipe: str = "reason", *changes: str, **settings: Any) -> Run:
    """Train a model on a task by an arm; the same call resumes an interrupted run."""
    names = f"reasoning.task={task}", f"reasoning.arm={arm}"
    return run_training(load_config(recipe, *names, *changes, **settings), open_run)


def open_run(config: Config, context: DistributedContext) -> setup.TrainingTask:
    """Open the task of a run, with the arm's model and objective."""
    name = config.reasoning.arm
    arm, is_cuda = look_up(ARMS, name, "arm"), context.device.type == "cuda"
    if config.parallel.kind in ("fsdp", "hsdp"):
        raise ValueError(f"parallel.kind={config.parallel.kind} shards weights, and one process decodes: use ddp")
    if arm.labels == "foreign" and config.batch < 2:
        raise ValueError(f"batch={config.batch} has no other problem's labels for {name}: give 2")
    task, init = open_task_and_init(config)
    config = replace(config, method=arm.method if init is None else init.method)
    objective = build_reasoning_objective(config, task, multiple=CAPTURED_LENGTHS if is_cuda else 1)
    longest = max(map(objective.count_tokens, task.load_sample()))
    shape = build_shape(config, task, init, longest)
    if longest > shape.length:
        size = f"a problem of {task.name} has {longest} tokens in the layout of {name}"
        raise ValueError(f"{size}, and the model takes {shape.length}: choose another model or fewer hops")
    can_capture = is_cuda and context.world_size == 1 and shape.dropout == 0 and not shape.time_conditioning
    modules = {"decoder": StepDecoder(shape, seed=config.seed)} if arm.auxiliary == "simcot" else None
    run = CapturedFeatures() if can_capture else compute_features
    valid = task.load_valid(config.valid.rows or 1024)

    def validate(parallel: ParallelModel, batch: int) -> dict[str, float]:
        results = context.run_on_rank0(lambda: solve(parallel.model, task, objective, valid))
        right = sum(result.answer == item.answer for result, item in zip(results, valid, strict=True))
        return {"val/accuracy": right / len(valid), "val/error": 1 - right / len(valid)}

    def sample(model: LanguageModel) -> str:
        items = valid[: config.samples.rows]
        results = solve(model, task, objective, items)
        return "\n".join(format_solution(task, item, result) for item, result in zip(items, results, strict=True))

    data_hash = task.hash_problems()
    problems = "generated problems" if data_hash.startswith(GENERATED) else "problems"
    return setup.TrainingTask(
        config,
        shape,
        init,
        objective,
        ItemBatches(task, config.batch, seed=config.seed, rank=context.rank, size=context.world_size),
        build_loss=partial(LossModule, loss_fn=reasoning_loss, modules=modules, run=run),
        validate=validate,
        format_metrics=lambda metrics: f"accuracy {metrics['val/accuracy']:.1%} of the validation problems",
        sample=sample,
        data_hash=data_hash,
        description=f"{task.name}, arm {name}; {config.steps:,} steps of {config.batch} {problems} of at most "
        f"{longest} tokens, vocabulary {shape.vocab_size:,}",
        length=longest,
        tokenizer=task.tokenizer,
        best_metric="val/error",
    )


def open_task_and_init(config: Config) -> tuple[Task, setup.InitModel | None]:
    """Open the task and the model of `init`, whose vocabulary the markers of the task and then the mask follow."""
    if config.init is None:
        name = config.reasoning.tokenizer or "gpt2"
        return open_task(config.reasoning, load_tokenizer(name) if config.reasoning.task in DATASETS else None), None
    resumed = setup.find_checkpoint(config)
    if resumed is not None and resumed.is_dir():
        content, shape = checkpoint.read_config_json(resumed)
        return open_task(config.reasoning, Tokenizer.load(resumed)), setup.InitModel(content["method"], shape)
    path = find_bundled_model(config.init) if config.init in MODELS else Path(config.init)
    settings = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    sha256 = None
    if isinstance(settings, dict) and "model_type" in settings:  # of transformers
        loaded = LoadedModel(gpt2.load(path), load_tokenizer(path), "ar", 0, checkpoint.WRAPPED)
    else:
        folder = checkpoint.find_model_folder(path)
        loaded, sha256 = checkpoint.load_model(folder), hash_file(checkpoint.find_weights_file(folder))
    model, tokenizer, method = loaded.model, loaded.tokenizer, loaded.method
    if not model.config.is_causal:
        raise ValueError(f"init={config.init} is a masked model ({method}): arms train a causal one (ar, a2r)")
    arm = ARMS[config.reasoning.arm]
    if method != arm.method and (arm.anchors is not None or arm.auxiliary == "codi"):
        names = f"init={config.init} is {method}, and arm {config.reasoning.arm} trains {arm.method}"
        raise ValueError(f"{names}: choose another model")
    task = open_task(config.reasoning, tokenizer or load_tokenizer(config.reasoning.tokenizer or "gpt2"))
    words, own = {} if tokenizer is None else tokenizer.bpe.get_vocab(), task.tokenizer
    count = own.vocab_size - model.config.vocab_size
    if count < 0 or not words.items() <= own.bpe.get_vocab().items():
        sizes = f"the model of init has {model.config.vocab_size:,} tokens, which are not those of {own.name}"
        raise ValueError(f"{sizes}: train on a text task, whose vocabulary is the model's, or without init")
    model = extend_vocabulary(model, count) if count else model
    shape = replace(model.config, mask_id=own.mask_id)
    return task, setup.InitModel(method, shape, model.state_dict(), sha256)


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
    # Room for the steps beyond those that the stages remove one by one, which a model may still write.
    rows = [lay_out(item, objective.arm, objective.curriculum.stages, 0, objective.markers) for item in items]
    most = max(len(row.tokens) - row.prompt for row in rows) + EXTRA_TOKENS

    def decode(part: list[int]) -> list[Decoded]:
        own = [layouts[number] for number in part]
        room = max(1, min(most, model.config.length - max(layout.prompt for layout in own)))
        with torch.compiler.set_stance("force_eager"):  # every length of the cache would be compiled
            return decode_greedily(model, own, task.markers, feedback=objective.arm.feedback, max_new_tokens=room)

    return decode_in_batches([layout.prompt for layout in layouts], decode)


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
    folder: Path  # of its weights
    device: torch.device


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
    objective = build_reasoning_objective(config, task)
    return LoadedRun(config, loaded.model.to(place).eval(), task, objective, loaded.step, source, place)
