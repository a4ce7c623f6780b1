"""Training, in plain sight: `train_steps` takes the steps, `train` is a whole run around them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from adlm.checkpoint import LATEST, CheckpointWriter
from adlm.config import Config, load_config, save_config
from adlm.data.batches import Batch
from adlm.diffusion.masking import NoisyBatch
from adlm.evaluate.likelihood import held_out_bound
from adlm.methods import METHODS
from adlm.models.language_model import LanguageModel
from adlm.training.distributed import DistributedContext, LossModule, ParallelModel, init_distributed, parallelize
from adlm.training.ema import EMA
from adlm.training.guard import SIGNALS, Diverged, LossGuard, Preempted, save_batch, stoppable
from adlm.training.notes import opening, sampler_of, unigram_ppl, validation_line, write_samples
from adlm.training.objective import Objective
from adlm.training.optim import build_optimizers, rate_at, set_rate, update
from adlm.training.records import MetricWindow, StepMetrics
from adlm.training.saving import restore, snapshot, usable_weights
from adlm.training.setup import (
    build_dataloader,
    build_objective,
    check_memory,
    data_key,
    find_resume_checkpoint,
    held_out_rows,
    lock_run_folder,
    model_config,
    open_data_on_all_ranks,
    open_stream,
    restore_data_state,
)
from adlm.training.teller import RunLogger


def train_steps(
    shared: ParallelModel,
    task: Objective,
    batches: Iterator[Batch],
    optimizers: Sequence[Optimizer],
    *,
    steps: int,
    first: int = 1,
    rate: Callable[[int], float] = lambda step: 1.0,
    clip: float = 1.0,
    ema: EMA | None = None,
    seed: int = 0,
    micro_batch: int | None = None,
    precision: torch.dtype = torch.float32,
    world: DistributedContext | None = None,
) -> Iterator[StepMetrics]:
    """Train in place from step `first` to `steps` and yield a record a step; stopping is not asking for the next.

    Everything random follows from (seed, row, step). The mean is over the tokens of the global batch, however it is
    cut into processes and micro-batches, so they change nothing but rounding (and where dropout falls).
    """
    world = world or DistributedContext(shared.model.embed.weight.device)
    device, on_gpu = world.device, world.device.type == "cuda"
    shared.model.train()

    def prepare(step: int) -> tuple[Batch, list[Batch], list[NoisyBatch], float]:
        """The noise of a step, made on the host while the device is busy with the step before."""
        began = time.perf_counter()
        batch = next(batches)
        stall = time.perf_counter() - began
        tokens = task.counted(batch)
        if batch.lengths is not None:  # elsewhere every process has as many
            tokens = world.sum(tokens.clone()) / world.size
        pieces = batch.split(micro_batch or len(batch.tokens))
        noised = [task.corrupt(piece, seed, step, tokens) for piece in pieces]
        return batch, pieces, [piece.pin().to(device) if on_gpu else piece for piece in noised], stall

    upcoming = prepare(first) if first <= steps else None
    for step in range(first, steps + 1):
        assert upcoming is not None
        batch, pieces, noised, stall = upcoming
        weight, height = task.anchor_weight(step, steps), rate(step)
        gamma = None if weight is None else torch.tensor(weight, device=device)
        set_rate(optimizers, height)
        figures = torch.zeros(4, device=device)
        for number, (piece, rows) in enumerate(zip(noised, pieces, strict=True)):
            is_last = number == len(noised) - 1
            together = nullcontext() if is_last else shared.without_sync()
            with together, dropout_of(seed, step, world.rank, number, device):
                with torch.autocast(device.type, precision, enabled=precision != torch.float32):
                    loss = shared.module(piece, gamma)
                # Before it reaches the weights; on a GPU, or with others who must stop as well, it is looked at later.
                if not on_gpu and world.size == 1:
                    try:
                        loss.check(rows.number)
                    except FloatingPointError as error:
                        raise Diverged(f"step {step}: {error}", step, batch) from error
                loss.total.backward()  # inside: checkpointed activations draw their dropout again here
            figures[:3] += torch.stack([loss.total.detach(), loss.nll.detach(), loss.anchor.detach()])
        figures[3] = update(shared.model, optimizers, clip, ema)
        upcoming = prepare(step + 1) if step < steps else None
        yield StepMetrics(step, figures, height, weight or 0.0, batch, stall)


@contextmanager
def dropout_of(seed: int, step: int, rank: int, piece: int, device: torch.device) -> Iterator[None]:
    """Dropout follows from the step as the noise does, and the caller's generators are left as they were."""
    on_gpu = device.type == "cuda"
    mixed = seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + rank * 0x8CB92BA72F3D8DD7 + piece
    with torch.random.fork_rng([device] if on_gpu else []):
        (torch.cuda.manual_seed if on_gpu else torch.default_generator.manual_seed)(mixed % 2**63)
        yield


@dataclass(frozen=True)
class Run:
    """What a run came to."""

    folder: Path
    step: int
    valid: dict[str, float]  # val/nll, val/ppl, val/stderr, unigram/ppl

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / LATEST


def train(recipe: Config | Mapping[str, Any] | str | Path | None = None, *changes: str, **settings: Any) -> Run:
    """A run from its settings to its last checkpoint; where it was stopped, it goes on.

    `train("recipes/cpu-nano.yaml", "data.path=DATA", folder="RUN", steps=1000)`: see `load_config`.
    """
    config = load_config(recipe, *changes, **settings)
    folder = Path(config.folder)
    with init_distributed(config.device) as world, stoppable() as stop, ExitStack() as exit_stack:
        # Where we run.
        on_gpu = world.device.type == "cuda"
        is_half = config.precision == "bfloat16" or (config.precision == "auto" and on_gpu)
        precision = torch.bfloat16 if is_half else torch.float32
        if config.batch % world.size:
            raise ValueError(f"batch={config.batch} rows cannot be shared evenly by {world.size} processes")
        micro_batch = min(config.micro_batch or config.batch, config.batch // world.size)

        # What we train, on what, and where it goes on from.
        data, stream = open_data_on_all_ranks(config, world), open_stream(config)
        shape, key, held = model_config(config, data), data_key(data, stream), held_out_rows(data)
        task = build_objective(config, shape, data, on_gpu=on_gpu)
        sampler_of(config, shape)  # what is wrong with it is said now, not at the first sample
        check_memory(config, shape, world, micro_batch, precision)
        exit_stack.enter_context(lock_run_folder(folder, world))
        source = world.run_on_rank0(lambda: find_resume_checkpoint(config, key))
        model = LanguageModel(shape, seed=config.seed).to(world.device)
        if config.compile if config.compile is not None else on_gpu:
            model.compile_layers()
        learner = LossModule(model, score_entropy=METHODS[config.method].score_entropy)
        shared = parallelize(learner, world, config.parallel)
        batches = build_dataloader(config, data, stream, world)
        unigram = unigram_ppl(data, held, config.valid.rows)

        # How.
        optimizers = build_optimizers(model, config.optimizer)
        ema = EMA(model, config.ema) if config.ema is not None else None
        window = MetricWindow(LossGuard(config.guard.spike, config.guard.window), world)

        # Where it stands: a plain dict, which is all that a checkpoint holds beside tensors.
        state: dict[str, Any] = {"step": 0, "batches": None, "valid": {}, "best": None, "seconds": 0.0}
        if source is not None:
            state = restore(source, shared, optimizers, ema, world)
            batches.load_state_dict(restore_data_state(state["batches"], world, is_stream=stream is not None))
            window.figures = state["window"]
            window.guard.recent.extend(state["recent"])
        state["data"] = key

        # What it tells, and what it leaves behind.
        if world.is_first:
            save_config(config, folder / "config.yaml")
        saving = CheckpointWriter(
            folder / "checkpoints",
            shape,
            config.method,
            data.tokenizer,
            rows=data.manifest["rows"],
            keep=config.checkpoint.keep,
            background=config.checkpoint.background,
            group=world.writing,
        )
        exit_stack.callback(saving.wait)  # whatever happens, what was begun is written
        teller = exit_stack.enter_context(RunLogger(config, shape, world, step=state["step"], seconds=state["seconds"]))
        teller.note(opening(config, shape, data, world, shared.kind, source))

        def validate(record: StepMetrics) -> None:
            began = time.perf_counter()
            step, averaged = record.step, ema.in_place(model) if ema is not None else nullcontext()
            try:
                with averaged, torch.autocast(world.device.type, precision, enabled=is_half):
                    bound = held_out_bound(
                        model,
                        held,
                        batch=config.valid.batch or micro_batch,
                        draws=config.valid.draws,
                        schedule=task.schedule,
                        steps=task.discrete_steps,
                        attend_padding=task.attend_padding,
                        first=config.valid.rows,
                        loss_of=shared.loss,
                        rank=world.rank,
                        size=world.size,
                        total=world.sum,
                    )
            except FloatingPointError as error:
                raise Diverged(f"after step {step} {error}", step, record.batch) from error
            figures = {"val/nll": bound.nll, "val/ppl": bound.ppl, "val/stderr": bound.stderr, "unigram/ppl": unigram}
            state["valid"] = figures | {"step": step}
            teller.write({"step": step, **figures, "time": {"seconds": time.perf_counter() - began}})
            teller.note(f"step {step:,}: {validation_line(figures, is_causal=shape.is_causal)}")

        def save(step: int, batch: Batch) -> None:
            window.read()  # nothing is saved that the guard has not seen
            is_best = state["valid"].get("step") == step and state["valid"]["val/nll"] < (state["best"] or torch.inf)
            if is_best:
                state["best"] = state["valid"]["val/nll"]
            state.update(step=step, batches=world.all_gather(batch.state), ema_updates=ema.updates if ema else 0)
            state.update(window=list(window.figures), recent=list(window.guard.recent), seconds=teller.seconds)
            teller.sync()
            saving.wait()  # one copy of the run in host memory at a time
            saving.save(snapshot(step, shared, optimizers, ema, world, dict(state), is_best=is_best))

        # The loop.
        steps = train_steps(
            shared,
            task,
            iter(batches),
            optimizers,
            steps=config.steps,
            first=state["step"] + 1,
            rate=partial(rate_at, config.optimizer, config.steps),
            clip=config.optimizer.clip,
            ema=ema,
            seed=config.seed,
            micro_batch=micro_batch,
            precision=precision,
            world=world,
        )
        try:
            for record in steps:
                step, is_last = record.step, record.step == config.steps
                window.add(record)
                teller.progress.step(step)
                is_told = step % config.log.every == 0 or is_last
                if is_told:
                    teller.means(record, window)
                with teller.aside_from_training():
                    if step % config.valid.every == 0 or is_last:
                        validate(record)
                    if config.samples.every and (step % config.samples.every == 0 or is_last):
                        weights = usable_weights(shared, ema, world)
                        if world.is_first:
                            teller.note(write_samples(config, shape, weights, data.tokenizer, step, world.device))
                        world.wait()
                    # Processes may hear a signal at different steps: they agree now and then.
                    asked = world.any(stop.signal is not None) if is_told or world.size == 1 else False
                    if step % config.checkpoint.every == 0 or is_last or asked:
                        save(step, record.batch)
                if asked and not is_last:
                    saving.wait()
                    again = "the same command" + ("" if config.resume == "auto" else " without resume=")
                    raise Preempted(
                        f"stopped after step {step:,}, which is saved; {again} goes on",
                        SIGNALS[stop.signal or signal.SIGTERM],
                    )
        except Diverged as problem:
            assert problem.batch is not None  # noqa: PT017
            kept = save_batch(folder, problem.step, world.rank, problem.batch, str(problem))
            raise Diverged(
                f"{problem}. The batch is in {kept}; the last good checkpoint is as it was. Look at those rows. A "
                "larger guard.spike, or null, goes on in this folder; another optimizer.lr or warmup is another run: "
                f"folder=NEW, and with resume={folder / 'checkpoints' / LATEST} it begins from here",
                problem.step,
            ) from problem
        saving.wait()
        valid = {name: value for name, value in state["valid"].items() if name != "step"}
        teller.note(f"step {state['step']:,} of {config.steps:,} is in {folder / 'checkpoints' / LATEST}")
        if valid:  # not of a run that is asked for fewer steps than it has
            teller.note(f"{folder}: {validation_line(valid, is_causal=shape.is_causal)}")
        return Run(folder, state["step"], valid)
