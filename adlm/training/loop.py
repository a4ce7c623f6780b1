"""Training in plain sight: `train_steps` takes the steps, `train` is the whole run around them."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from adlm.config import Config, load_config, save_config
from adlm.data.batches import Batch
from adlm.devices import pick_precision
from adlm.diffusion.masking import NoisyBatch
from adlm.diffusion.objectives import Objective
from adlm.distributed import DistributedContext, init_distributed
from adlm.errors import Diverged, Preempted
from adlm.files import write_atomically
from adlm.models import folder as model_folder
from adlm.models.language_model import LanguageModel
from adlm.training import guard, setup
from adlm.training import state as run_state
from adlm.training.distributed import LossModule, ParallelModel, parallelize
from adlm.training.ema import EMA
from adlm.training.logging import RunLogger, StepMetrics, describe_run
from adlm.training.optim import (
    build_optimizers,
    get_lr_multiplier,
    get_training_tensors,
    set_lr,
    step_optimizers,
)


def train_steps(
    parallel: ParallelModel,
    objective: Objective,
    batches: Iterator[Batch],
    optimizers: Sequence[Optimizer],
    *,
    steps: int,
    first_step: int = 1,
    lr_multiplier: Callable[[int], float] = lambda step: 1.0,
    clip: float = 1.0,
    ema: EMA | None = None,
    seed: int = 0,
    micro_batch: int | None = None,
    precision: torch.dtype = torch.float32,
    context: DistributedContext | None = None,
    in_background: bool | None = None,
) -> Iterator[StepMetrics]:
    """Train from `first_step` to `steps` and yield the metrics of each step.

    All randomness follows from (seed, row, step). The loss is the mean over the tokens of the global batch, so the
    number of processes and the size of micro-batches change only rounding (and dropout). Batches are corrupted in the
    background by default if the device is a GPU.
    """
    context = context or DistributedContext(parallel.model.embed.weight.device)
    device, on_gpu = context.device, context.device.type == "cuda"
    in_background = on_gpu if in_background is None else in_background
    parallel.model.train()

    def corrupt(batch: Batch, step: int) -> tuple[Sequence[Batch], list[NoisyBatch]]:
        rows = batch.split(micro_batch or batch.total)
        return rows, [objective.corrupt(part, seed, step) for part in rows]

    def prepare(
        step: int,
    ) -> tuple[Batch, Callable[[], tuple[Sequence[Batch], list[NoisyBatch]]], float]:
        """Read a step's batch and, in the background, start to corrupt it while the step before is launched."""
        start = time.perf_counter()
        batch = next(batches)
        stall = time.perf_counter() - start
        corrupted = (
            background.submit(corrupt, batch, step).result
            if in_background
            else partial(corrupt, batch, step)
        )
        return batch, corrupted, stall

    background = ThreadPoolExecutor(1)  # its thread ends with the generator
    upcoming = prepare(first_step) if first_step <= steps else None
    for step in range(first_step, steps + 1):
        assert upcoming is not None
        batch, get_corrupted, stall = upcoming
        rows, parts = (
            get_corrupted()
        )  # before `prepare`: reading may fork workers, and the thread must be idle then
        upcoming = prepare(step + 1) if step < steps else None
        tokens = torch.stack([part.tokens for part in parts]).sum(0)  # what the mean is over
        if batch.lengths is not None:  # otherwise every rank has as many
            tokens = context.all_reduce_sum(tokens) / context.world_size
        noisy = [replace(part, tokens=tokens).to(device) for part in parts]
        multiplier = lr_multiplier(step)
        set_lr(optimizers, multiplier)
        values = torch.zeros(4, device=device)
        for number, micro in enumerate(noisy):
            sync = nullcontext() if number == len(noisy) - 1 else parallel.no_sync()
            with sync, seed_dropout(seed, step, context.rank, number, device):
                with torch.autocast(device.type, precision, enabled=precision != torch.float32):
                    loss = parallel.module(micro)
                # Checked before it reaches the weights; on a GPU or with several ranks RunLogger.read checks it.
                if not on_gpu and context.world_size == 1:
                    try:
                        loss.check(rows[number].number)
                    except FloatingPointError as error:
                        raise Diverged(f"step {step}: {error}", step, batch) from error
                loss.total.backward()  # inside seed_dropout: checkpointed activations repeat their dropout here
            values[:3] += torch.stack(
                [loss.total.detach(), loss.nll.detach(), loss.anchor.detach()]
            )
        values[3] = step_optimizers(parallel.model, optimizers, clip, ema, parallel.module)
        gamma = noisy[0].anchor_weight or 0.0
        yield StepMetrics(step, values, multiplier, gamma, batch, stall)


@contextmanager
def seed_dropout(
    seed: int, step: int, rank: int, number: int, device: torch.device
) -> Iterator[None]:
    """A context in which dropout follows from (seed, step, rank, micro-batch); the caller's generators do not move."""
    on_gpu = device.type == "cuda"
    mixed = (
        seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + rank * 0x8CB92BA72F3D8DD7 + number
    )
    with torch.random.fork_rng([device] if on_gpu else []):
        (torch.cuda.manual_seed if on_gpu else torch.default_generator.manual_seed)(mixed % 2**63)
        yield


@dataclass(frozen=True)
class Run:
    """A finished training run."""

    folder: Path
    checkpoint: Path
    step: int
    valid: dict[str, float]  # val/nll, val/ppl, val/stderr, unigram/ppl


def train(
    recipe: Config | Mapping[str, Any] | str | Path | None = None, *changes: str, **settings: Any
) -> Run:
    """Train a model by a recipe; the same call resumes an interrupted run from its latest checkpoint.

    `train("recipes/cpu-nano.yaml", "data.path=DATA", folder="RUN", steps=1000)`; arguments as for `load_config`.
    """
    return run_training(load_config(recipe, *changes, **settings), setup.open_text_task)


def run_training(
    config: Config, open_task: Callable[[Config, DistributedContext], setup.TrainingTask]
) -> Run:
    """Train on a task: text, or the problems of adlm.apps.reasoning."""
    if config.device == "mps":
        raise ValueError(
            "device 'mps' does not train: expected auto, cpu, cuda or cuda:N; use device=cpu"
        )
    folder = Path(config.folder)
    latest = folder / "checkpoints" / model_folder.LATEST
    with (
        init_distributed(config.device) as context,
        guard.catch_stop_signals() as signals,
        ExitStack() as exit_stack,
    ):
        # Where we run: the device, its precision, and the rows of this process.
        device, on_gpu = context.device, context.device.type == "cuda"
        precision = pick_precision(config.precision, device)
        if config.batch % context.world_size:
            problem = (
                f"batch={config.batch} must be a multiple of the {context.world_size} processes"
            )
            raise ValueError(
                f"{problem}: choose another batch, or start another number of processes"
            )
        micro_batch = min(config.micro_batch or config.batch, config.batch // context.world_size)

        # What we train: the data, the model and its objective.
        task = open_task(config, context)
        config, shape, init, batches = task.config, task.shape, task.init, task.batches
        setup.check_memory(config, shape, context, micro_batch, task.length, precision)
        context.run_on_rank0(lambda: setup.lock_run_folder(folder, exit_stack))
        source = context.run_on_rank0(lambda: setup.find_resume_checkpoint(config, task.data_hash))
        model = LanguageModel(shape, seed=config.seed)
        if init is not None and init.weights is not None:
            model.load_state_dict(init.weights)
        model = model.to(device)
        if on_gpu if config.compile is None else config.compile:
            model.compile_layers()
        learner = LossModule(model, task.objective).to(device)
        parallel = parallelize(learner, context, config.parallel)

        # How: optimizers, and the average of the weights.
        optimizers = build_optimizers(learner, config.optimizer)
        ema = EMA(model, config.ema) if config.ema is not None else None
        weights = ema.shadow if ema is not None else dict(model.named_parameters())  # for inference

        # From where: `state` is a plain dict, and with the tensors it is all that a checkpoint holds.
        state: dict[str, Any] = {
            "step": 0,
            "batches": None,
            "valid": {},
            "best": None,
            "seconds": 0.0,
        }
        state["init_sha256"] = init and init.sha256
        if source is not None:
            tensors = get_training_tensors(learner, optimizers)
            run_state.load_training_tensors(source, tensors, context.checkpoint_group)
            state = run_state.read_state(source).model_dump()
            if ema is not None:
                ema.load(model_folder.read_weights(source), state["ema_updates"])
            restored = setup.restore_data_state(
                state["batches"], context, is_stream=config.data.stream is not None
            )
            try:
                batches.load_state_dict(restored)
            except (TypeError, KeyError, AttributeError) as error:
                problem = f"{source / 'state.json'} has batches {restored!r:.120}"
                raise ValueError(f"{problem}: {model_folder.COPY_AGAIN}") from error
        state["data"] = task.data_hash

        # What it writes: config.yaml, checkpoints, metrics.
        if context.is_main:
            save_config(config, folder / "config.yaml")
        writer = run_state.CheckpointWriter(
            folder / "checkpoints",
            task.describe(model),
            task.tokenizer,
            keep=config.checkpoint.keep,
            background=config.checkpoint.background,
            group=context.checkpoint_group,
        )
        exit_stack.callback(
            writer.wait
        )  # after an error too, a checkpoint that was started is finished
        logger = RunLogger(task, context, exit_stack, state)
        logger.print(describe_run(task, context, parallel.kind, source))

        def validate(metrics: StepMetrics) -> None:
            start, step = time.perf_counter(), metrics.step
            averaged = ema.swap_in(model) if ema is not None else nullcontext()
            try:
                with (
                    averaged,
                    torch.autocast(device.type, precision, enabled=precision != torch.float32),
                ):
                    valid = task.validate(parallel, config.valid.batch or micro_batch)
            except FloatingPointError as error:
                raise Diverged(f"after step {step} {error}", step, metrics.batch) from error
            state["valid"] = valid | {"step": step}
            logger.log({"step": step, **valid, "time": {"seconds": time.perf_counter() - start}})
            logger.print(f"step {step:,}: {task.format_metrics(valid)}")

        def write_samples(step: int) -> None:
            gathered = run_state.copy_to_host(weights, is_main=context.is_main)

            def write() -> str:
                averaged = LanguageModel(shape)
                model_folder.load_weights(averaged, gathered)
                text, path = (
                    task.sample(averaged.to(device)),
                    folder / "samples" / f"step-{step:08d}.txt",
                )
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, f"{text}\n".encode())
                return f"step {step:,}: {path}: {' '.join(text.split())[:160]}…"

            logger.print(context.run_on_rank0(write))

        def save(metrics: StepMetrics) -> None:
            logger.read()  # raises Diverged before anything is saved
            step, valid = metrics.step, state["valid"]
            best = torch.inf if state["best"] is None else state["best"]
            is_best = valid.get("step") == step and valid[task.best_metric] < best
            if is_best:
                state["best"] = valid[task.best_metric]
            state.update(
                step=step, batches=context.all_gather(metrics.batch.state), seconds=logger.seconds
            )
            state.update(ema_updates=ema.updates if ema else 0)
            state.update(window=list(logger.values), recent=list(logger.guard.recent))
            logger.sync()
            writer.wait()  # at most one snapshot in host memory
            inference = run_state.copy_to_host(weights, is_main=context.is_main)
            training = get_training_tensors(learner, optimizers)
            training = run_state.copy_to_host(
                training, is_main=context.is_main, host_mesh=parallel.host_mesh
            )
            writer.save(run_state.Snapshot(step, inference, training, dict(state), is_best))

        # The loop.
        training = train_steps(
            parallel,
            task.objective,
            iter(batches),
            optimizers,
            steps=config.steps,
            first_step=state["step"] + 1,
            lr_multiplier=lambda step: get_lr_multiplier(step, config.steps, config.optimizer),
            clip=config.optimizer.clip,
            ema=ema,
            seed=config.seed,
            micro_batch=micro_batch,
            precision=precision,
            context=context,
        )
        try:
            for metrics in training:
                step, is_last = metrics.step, metrics.step == config.steps
                logger.add(metrics)
                is_logged = step % config.log.every == 0 or is_last
                if is_logged:
                    logger.log_step(metrics)
                with logger.pause_timer():
                    if step % config.valid.every == 0 or is_last:
                        validate(metrics)
                    if config.samples.every and (step % config.samples.every == 0 or is_last):
                        write_samples(step)
                    # Ranks may receive a signal at different steps: they agree at the steps that are logged.
                    can_stop = is_logged or context.world_size == 1
                    is_stopping = can_stop and context.any(bool(signals))
                    if step % config.checkpoint.every == 0 or is_last or is_stopping:
                        save(metrics)
                if is_stopping and not is_last:
                    writer.wait()
                    command = "the same command" + (
                        "" if config.resume == "auto" else " without resume="
                    )
                    message = (
                        f"stopped after step {step:,}, which is saved; {command} resumes the run"
                    )
                    raise Preempted(
                        message, guard.EXIT_CODES[signals[0] if signals else signal.SIGTERM]
                    )
        except Diverged as error:
            saved = guard.save_failed_batch(folder, context.rank, error)
            message = f"{error}. The batch is in {saved}. {guard.suggest_remedy(error, latest, state['step'])}"
            raise Diverged(message, error.step, error.batch, is_spike=error.is_spike) from error
        writer.wait()
        logger.print(f"step {state['step']:,} of {config.steps:,} is in {latest}")
        valid = {name: value for name, value in state["valid"].items() if name != "step"}
        if valid:  # empty if the run was already past these steps
            logger.print(f"{folder}: {task.format_metrics(valid)}")
        return Run(folder, latest, state["step"], valid)
