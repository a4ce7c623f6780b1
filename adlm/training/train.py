"""Training: from a recipe to weights. `train_steps` takes the steps, `Trainer` is the run around them."""

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
from adlm.diffusion.features import find_device
from adlm.diffusion.masking import NoisyBatch
from adlm.diffusion.objectives import Objective
from adlm.distributed import DistributedContext, init_distributed
from adlm.errors import Diverged
from adlm.files import write_atomically
from adlm.models.costs import count_flops
from adlm.models.folder import COPY_AGAIN, LATEST, collect_weights, load_weights, read_weights
from adlm.models.language_model import ModelConfig
from adlm.models.network import compile_network
from adlm.training import setup
from adlm.training import state as checkpoints
from adlm.training.distributed import LossModule, ParallelModel, parallelize
from adlm.training.ema import EMA
from adlm.training.guard import catch_stop_signals, explain_divergence, explain_stop
from adlm.training.logging import LoggedRun, RunLogger, StepMetrics
from adlm.training.optim import (
    build_optimizers,
    get_lr_multiplier,
    get_training_tensors,
    set_lr,
    step_optimizers,
)
from adlm.training.state import CheckpointWriter, Snapshot, start_state
from adlm.training.task import Task
from adlm.training.text import TextTask


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
    """Train from `first_step` to `steps` and yield the metrics of each step; to stop, stop iterating.

    All randomness follows from (seed, row, step). The loss is the mean over the tokens of the
    global batch, so the number of processes and the size of micro-batches change only rounding (and
    dropout). Batches are corrupted in the background by default if the device is a GPU.
    """
    context = context or DistributedContext(find_device(parallel.model))
    device = context.device
    on_gpu = device.type == "cuda"
    is_half = precision != torch.float32
    # Before it reaches the weights; elsewhere RunLogger.read checks the loss later, without waiting.
    checks_loss = not on_gpu and context.world_size == 1
    parallel.model.train()

    ahead = corrupt_ahead(
        objective,
        batches,
        range(first_step, steps + 1),
        seed=seed,
        micro_batch=micro_batch,
        in_background=on_gpu if in_background is None else in_background,
    )
    for step, batch, parts, stall in ahead:
        tokens = torch.stack([part.tokens for part in parts]).sum(0)  # the loss is their mean
        if batch.lengths is not None:  # otherwise every rank has as many
            tokens = context.all_reduce_sum(tokens) / context.world_size
        # All parts are on their way to the device before the first one is needed.
        parts = [replace(part, tokens=tokens).to(device) for part in parts]
        multiplier = lr_multiplier(step)
        set_lr(optimizers, multiplier)

        values = torch.zeros(4, device=device)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            sync = nullcontext() if is_last else parallel.no_sync()
            with sync, seed_dropout(seed, step, context.rank, number, device):
                with torch.autocast(device.type, precision, enabled=is_half):
                    loss = parallel.module(part)  # objective.loss(model, part)
                if checks_loss and not torch.isfinite(loss.total):
                    rows = batch.split(micro_batch or batch.total)[number]
                    raise Diverged(f"step {step}: {loss.explain(rows.number)}", step, batch)
                loss.total.backward()  # checkpointed activations repeat their dropout here
            values[:3] += torch.stack(
                [loss.total.detach(), loss.nll.detach(), loss.anchor.detach()]
            )
        values[3] = step_optimizers(parallel.model, optimizers, clip, ema, parallel.module)
        gamma = parts[0].anchor_weight or 0.0
        yield StepMetrics(step, values, multiplier, gamma, batch, stall)


def corrupt_ahead(
    objective: Objective,
    batches: Iterator[Batch],
    steps: range,
    *,
    seed: int,
    micro_batch: int | None,
    in_background: bool,
) -> Iterator[tuple[int, Batch, list[NoisyBatch], float]]:
    """Yield each step, its batch, this batch corrupted in parts, and the seconds it was waited for.

    The next batch is read, and in the background corrupted, while a step is computed. The seconds
    are those of reading it and, in the background, those that its corruption takes longer than the
    step before; elsewhere corruption is part of the step.
    """
    background = ThreadPoolExecutor(1)  # its thread ends with the generator

    def corrupt(batch: Batch, step: int) -> list[NoisyBatch]:
        parts = batch.split(micro_batch or batch.total)
        return [objective.corrupt(part, seed, step) for part in parts]

    def start(step: int) -> tuple[Batch, Callable[[], list[NoisyBatch]], float]:
        began = time.perf_counter()
        batch = next(batches)
        stall = time.perf_counter() - began
        if in_background:
            return batch, background.submit(corrupt, batch, step).result, stall
        return batch, partial(corrupt, batch, step), stall

    upcoming = start(steps[0]) if steps else None
    for step in steps:
        assert upcoming is not None
        batch, get_parts, stall = upcoming
        began = time.perf_counter()
        parts = get_parts()  # first: reading may fork workers, and the thread must be idle then
        if in_background:
            stall += time.perf_counter() - began
        upcoming = start(step + 1) if step + 1 in steps else None
        yield step, batch, parts, stall


@contextmanager
def seed_dropout(
    seed: int, step: int, rank: int, number: int, device: torch.device
) -> Iterator[None]:
    """A context in which dropout follows from (seed, step, rank, micro-batch).

    The caller's generators do not move.
    """
    on_gpu = device.type == "cuda"
    mixed = (
        seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + rank * 0x8CB92BA72F3D8DD7 + number
    )
    with torch.random.fork_rng([device] if on_gpu else []):
        if on_gpu:
            torch.cuda.manual_seed(mixed % 2**63)
        else:
            torch.default_generator.manual_seed(mixed % 2**63)
        yield


# --------------------------------------------------------------------------------------- the run


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

    `train("recipes/cpu-nano.yaml", "data.path=DATA", folder="RUN", steps=1000)`; arguments as for
    `load_config`.
    """
    return train_task(load_config(recipe, *changes, **settings), TextTask)


def train_task(config: Config, open_task: Callable[[Config, DistributedContext], Task]) -> Run:
    """Train on a task: text, or the problems of an app."""
    if config.device == "mps":
        raise ValueError(
            "device 'mps' does not train: expected auto, cpu, cuda or cuda:N; use device=cpu"
        )
    with (
        init_distributed(config.device) as context,
        catch_stop_signals() as signals,
        ExitStack() as exit_stack,
    ):
        return Trainer(config, open_task, context, exit_stack).run(signals)


class Trainer:
    """A run: the model, its optimizers and its data, and what is written while it trains."""

    def __init__(
        self,
        config: Config,
        open_task: Callable[[Config, DistributedContext], Task],
        context: DistributedContext,
        exit_stack: ExitStack,
    ) -> None:
        # Where we run: the device, its precision, and the rows of this process.
        self.context = context
        self.precision = pick_precision(config.precision, context.device)
        self.micro_batch = setup.choose_micro_batch(config, context)

        # What we train: the data, the model and its objective.
        self.task = task = open_task(config, context)
        self.config = config = task.config
        self.batches = task.open_batches()
        self.folder = Path(config.folder)
        if isinstance(task.shape, ModelConfig):  # nothing is known of the memory of others
            setup.check_memory(
                config, task.shape, context, self.micro_batch, task.length, self.precision
            )
        context.run_on_rank0(lambda: setup.lock_run_folder(self.folder, exit_stack))
        source = context.run_on_rank0(lambda: setup.find_resume_checkpoint(config, task.data_hash))
        self.model = task.build_model().to(context.device)
        is_compiled = config.compile
        if is_compiled is None:
            is_compiled = context.device.type == "cuda"
        if is_compiled:
            compile_network(self.model)
        self.learner = LossModule(self.model, task.objective).to(context.device)
        self.parallel = parallelize(self.learner, context, config.parallel)

        # How: optimizers, and the average of the weights, which is for inference.
        self.optimizers = build_optimizers(self.learner, config.optimizer)
        self.ema = None if config.ema is None else EMA(self.model, config.ema)
        self.weights = collect_weights(self.model)
        if self.ema is not None:
            self.weights = self.weights | self.ema.shadow

        # From where: with the tensors, the state is all that a checkpoint holds.
        self.state = start_state(task.data_hash, None if task.init is None else task.init.sha256)
        if source is not None:
            self.resume(source)

        # What it writes: config.yaml, checkpoints, metrics.
        if context.is_main:
            save_config(config, self.folder / "config.yaml")
        self.writer = CheckpointWriter(
            self.folder / "checkpoints",
            task.describe(self.model),
            task.tokenizer,
            keep=config.checkpoint.keep,
            background=config.checkpoint.background,
            group=context.checkpoint_group,
        )
        exit_stack.callback(self.writer.wait)  # a checkpoint that was started is finished
        logged = LoggedRun(
            self.folder,
            config.model_dump(),
            steps=config.steps,
            tokens_per_step=round(config.batch * task.row_tokens),  # padding is not counted
            flops_per_token=count_flops(self.model, task.length),
            lr=config.optimizer.lr,
        )
        self.logger = RunLogger(logged, config.log, config.guard, self.state, context, exit_stack)
        self.logger.print(
            setup.describe_run(
                config, self.model, self.parallel.kind, context, task.description, source
            )
        )

    def run(self, signals: Sequence[int]) -> Run:
        """Train to the last step, or until a signal is received."""
        config = self.config
        latest = self.folder / "checkpoints" / LATEST
        training = train_steps(
            self.parallel,
            self.task.objective,
            iter(self.batches),
            self.optimizers,
            steps=config.steps,
            first_step=self.state.step + 1,
            lr_multiplier=partial(get_lr_multiplier, steps=config.steps, settings=config.optimizer),
            clip=config.optimizer.clip,
            ema=self.ema,
            seed=config.seed,
            micro_batch=self.micro_batch,
            precision=self.precision,
            context=self.context,
        )
        try:
            for metrics in training:
                step = metrics.step
                is_last = step == config.steps
                self.logger.add(metrics)
                is_logged = step % config.log.every == 0 or is_last
                if is_logged:
                    self.logger.log_step(metrics)
                if step % config.valid.every == 0 or is_last:
                    with self.logger.pause_timer():
                        self.validate(metrics)

                is_stopping = bool(signals)
                if self.context.world_size > 1:
                    # A signal may reach the ranks at different steps: they agree where they log.
                    is_stopping = is_logged and self.context.any(is_stopping)
                if step % config.checkpoint.every == 0 or is_last or is_stopping:
                    with self.logger.pause_timer():
                        self.save(metrics)
                # After the checkpoint, which an error in a sampler must not cost.
                if config.samples.every and (step % config.samples.every == 0 or is_last):
                    with self.logger.pause_timer():
                        self.write_samples(step)
                if is_stopping and not is_last:
                    self.writer.wait()
                    raise explain_stop(step, signals, config.resume)
        except Diverged as error:
            rank = self.context.rank
            raise explain_divergence(error, self.folder, rank, self.state.step) from error

        self.writer.wait()
        step = self.state.step
        self.logger.print(f"step {step:,} of {config.steps:,} is in {latest}")
        valid = {name: value for name, value in self.state.valid.items() if name != "step"}
        if valid:  # empty if the run was already past these steps
            self.logger.print(f"{self.folder}: {self.task.format_metrics(valid)}")
        return Run(self.folder, latest, step, valid)

    def validate(self, metrics: StepMetrics) -> None:
        """Measure the averaged weights on held-out rows."""
        start = time.perf_counter()
        step = metrics.step
        averaged = nullcontext() if self.ema is None else self.ema.swap_in(self.model)
        is_half = self.precision != torch.float32
        half = torch.autocast(self.context.device.type, self.precision, enabled=is_half)
        try:
            with averaged, half:
                batch = self.config.valid.batch or self.micro_batch
                valid = self.task.validate(self.parallel, batch)
        except FloatingPointError as error:
            raise Diverged(f"after step {step} {error}", step, metrics.batch) from error
        self.state = self.state.replace(valid=valid | {"step": step})
        seconds = time.perf_counter() - start
        self.logger.log({"step": step, **valid, "time": {"seconds": seconds}})
        self.logger.print(f"step {step:,}: {self.task.format_metrics(valid)}")

    def write_samples(self, step: int) -> None:
        """Write samples of the averaged weights."""
        weights = checkpoints.copy_to_host(self.weights, is_main=self.context.is_main)

        def write() -> str:
            averaged = self.task.build_model()
            load_weights(averaged, weights)
            text = self.task.sample(averaged.to(self.context.device))
            path = self.folder / "samples" / f"step-{step:08d}.txt"
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, f"{text}\n".encode())
            return f"step {step:,}: {path}: {' '.join(text.split())[:160]}…"

        self.logger.print(self.context.run_on_rank0(write))

    def save(self, metrics: StepMetrics) -> None:
        """Copy the run to host memory, from where it is written to a checkpoint."""
        self.logger.read()  # raises Diverged before anything is saved
        step = metrics.step
        best = self.state.best
        current = None
        if self.state.valid.get("step") == step:
            current = self.state.valid[self.task.best_metric]
        is_best = current is not None and (best is None or current < best)
        self.state = self.state.replace(
            step=step,
            best=current if is_best else best,
            batches=self.context.all_gather(metrics.batch.state),
            seconds=self.logger.seconds,
            ema_updates=0 if self.ema is None else self.ema.updates,
            window=list(self.logger.values),
            recent=list(self.logger.guard.recent),
        )
        self.logger.sync()
        self.writer.wait()  # at most one snapshot in host memory
        is_main = self.context.is_main
        weights = checkpoints.copy_to_host(self.weights, is_main=is_main)
        tensors = get_training_tensors(self.learner, self.optimizers)
        training = checkpoints.copy_to_host(
            tensors, is_main=is_main, host_mesh=self.parallel.host_mesh
        )
        self.writer.save(Snapshot(step, weights, training, self.state.model_dump(), is_best))

    def resume(self, source: Path) -> None:
        """Continue from a checkpoint: weights, optimizers, their average, and the place in the data."""
        tensors = get_training_tensors(self.learner, self.optimizers)
        checkpoints.load_training_tensors(source, tensors, self.context.checkpoint_group)
        self.state = checkpoints.read_state(source).replace(data=self.task.data_hash)
        if self.ema is not None:
            self.ema.load(read_weights(source), self.state.ema_updates)
        is_stream = self.config.data.stream is not None
        place = setup.restore_data_state(self.state.batches, self.context, is_stream=is_stream)
        try:
            self.batches.load_state_dict(place)
        except (TypeError, KeyError, AttributeError) as error:
            problem = f"{source / 'state.json'} has batches {place!r:.120}"
            raise ValueError(f"{problem}: {COPY_AGAIN}") from error
