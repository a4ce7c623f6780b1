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
from rich.console import Console
from torch.optim import Optimizer

from adlm.checkpoint import LATEST, CheckpointWriter, sync
from adlm.config import Config, load_config, save_config
from adlm.data.batches import Batch
from adlm.data.shards import open_data
from adlm.diffusion.masking import Noised
from adlm.evaluate.likelihood import held_out_bound
from adlm.methods import METHODS
from adlm.models.costs import flops_per_token, peak_flops
from adlm.models.language_model import LanguageModel
from adlm.train.distributed import Learner, Shared, World, joined, share
from adlm.train.ema import EMA
from adlm.train.guard import SIGNALS, Diverged, LossGuard, Preempted, save_batch, stoppable
from adlm.train.metrics import MetricsFile, open_trackers
from adlm.train.optim import build_optimisers, learning_rate, set_rate, update
from adlm.train.progress import RunProgress
from adlm.train.records import StepRecord, Window
from adlm.train.saving import restore, snapshot, usable_weights
from adlm.train.setup import (
    batches_of,
    check_memory,
    data_key,
    going_on,
    model_config,
    place_of,
    stream_of,
    task_of,
)
from adlm.train.task import Task
from adlm.train.telling import opening, unigram_ppl, validation_line, write_samples


def train_steps(
    shared: Shared,
    task: Task,
    batches: Iterator[Batch],
    optimisers: Sequence[Optimizer],
    *,
    steps: int,
    first: int = 1,
    rate: Callable[[int], float] = lambda step: 1.0,
    clip: float = 1.0,
    ema: EMA | None = None,
    seed: int = 0,
    micro_batch: int | None = None,
    precision: torch.dtype = torch.float32,
    world: World | None = None,
) -> Iterator[StepRecord]:
    """Train in place from step `first` to `steps` and yield a record a step; stopping is not asking for the next.

    Everything random follows from (seed, row, step). The mean is over the tokens of the global batch, however it is
    cut into processes and micro-batches, so they change nothing but rounding (and where dropout falls).
    """
    world = world or World(shared.model.embed.weight.device)
    device, on_gpu = world.device, world.device.type == "cuda"
    shared.model.train()

    def prepare(step: int) -> tuple[Batch, list[Batch], list[Noised], float]:
        """The noise of a step, made on the host while the device is busy with the step before."""
        began = time.perf_counter()
        batch = next(batches)
        stall = time.perf_counter() - began
        tokens = task.counted(batch)
        if batch.lengths is not None:  # elsewhere every process has as many
            tokens = world.sum(tokens.clone()) / world.size
        pieces = batch.split(micro_batch or len(batch.tokens))
        noised = [task.noised(piece, seed, step, tokens) for piece in pieces]
        return batch, pieces, [piece.pin().to(device) if on_gpu else piece for piece in noised], stall

    upcoming = prepare(first) if first <= steps else None
    for step in range(first, steps + 1):
        assert upcoming is not None
        batch, pieces, noised, stall = upcoming
        weight, height = task.anchor_weight(step, steps), rate(step)
        gamma = None if weight is None else torch.tensor(weight, device=device)
        set_rate(optimisers, height)
        figures = torch.zeros(4, device=device)
        for number, (piece, rows) in enumerate(zip(noised, pieces, strict=True)):
            is_last = number == len(noised) - 1
            together = nullcontext() if is_last else shared.without_sync()
            with together, dropout_of(seed, step, world.rank, number, device):
                with torch.autocast(device.type, precision, enabled=precision != torch.float32):
                    loss = shared.module(piece, gamma)
                if not on_gpu:  # before it reaches the weights; a GPU is looked at later, many steps at once
                    try:
                        loss.check(rows.number)
                    except FloatingPointError as error:
                        raise Diverged(f"step {step}: {error}", step, batch) from error
                loss.total.backward()  # inside: checkpointed activations draw their dropout again here
            figures[:3] += torch.stack([loss.total.detach(), loss.nll.detach(), loss.anchor.detach()])
        figures[3] = update(shared.model, optimisers, clip, ema)
        upcoming = prepare(step + 1) if step < steps else None
        yield StepRecord(step, figures, height, weight or 0.0, batch, stall)


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
    folder, chosen = Path(config.folder), config.optimiser
    with joined(config.device) as world, stoppable() as stop, ExitStack() as at_the_end:
        # Where we run.
        on_gpu = world.device.type == "cuda"
        is_half = config.precision == "bfloat16" or (config.precision == "auto" and on_gpu)
        precision = torch.bfloat16 if is_half else torch.float32
        if config.batch % world.size:
            raise ValueError(f"batch={config.batch} rows cannot be shared evenly by {world.size} processes")
        micro_batch = min(config.micro_batch or config.batch, config.batch // world.size)
        console = Console(highlight=False) if world.is_first and config.log.show else None

        # What we train, on what, and where it goes on from.
        world.agreed(lambda: open_data(config.data.path, verify=config.data.verify).folder)
        data = open_data(config.data.path)
        shape = model_config(config, data)
        task = task_of(config, shape, data, on_gpu=on_gpu)
        check_memory(config, shape, world, micro_batch, precision)
        stream = stream_of(config)
        key = data_key(data, stream)
        source = world.agreed(lambda: going_on(config, key))
        model = LanguageModel(shape, seed=config.seed).to(world.device)
        if config.compile if config.compile is not None else on_gpu:
            model.compile_layers()
        learner = Learner(model, score_entropy=METHODS[config.method].score_entropy)
        how = config.parallel
        shared = share(learner, world, how.kind, how.shard, checkpoint_activations=how.checkpoint_activations)
        held = data.rows("valid")
        unigram = unigram_ppl(data, held, config.valid.rows)

        # How.
        optimisers = build_optimisers(
            model,
            chosen.name,
            lr=chosen.lr,
            betas=chosen.betas,
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
            muon_lr=chosen.muon_lr,
            muon_momentum=chosen.muon_momentum,
        )
        rate = partial(
            learning_rate,
            steps=config.steps,
            peak=1.0,
            warmup=chosen.warmup,
            decay=chosen.decay,
            decay_share=chosen.decay_share,
            floor=chosen.floor,
        )
        ema = EMA(model, config.ema) if config.ema is not None else None
        window = Window(LossGuard(config.guard.spike, config.guard.window), world)
        batches = batches_of(config, data, stream, world)

        # What it stands at: a plain dict, which is all that a checkpoint holds beside tensors.
        state: dict[str, Any] = {"step": 0, "batches": None, "valid": {}, "best": None, "seconds": 0.0}
        if source is not None:
            state = restore(source, shared, optimisers, ema, world)
            batches.load_state_dict(place_of(state["batches"], world, is_stream=stream is not None))
            window.figures, earlier = state["window"], state["recent"]
            window.guard.recent.extend(earlier)
        state["data"] = key

        # What it tells, and what it leaves behind.
        flops = flops_per_token(shape, length=shape.length)
        peak = peak_flops(torch.cuda.get_device_name(world.device)) if on_gpu else None
        saving = CheckpointWriter(
            folder / "checkpoints",
            shape,
            config.method,
            data.tokenizer,
            keep=config.checkpoint.keep,
            background=config.checkpoint.background,
            group=world.writing,
        )
        at_the_end.callback(saving.wait)  # whatever happens, what was begun is written
        metrics, trackers = None, []
        if world.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            save_config(config, folder / "config.yaml")
            metrics = at_the_end.enter_context(MetricsFile(folder / "metrics.jsonl"))
            metrics.cut_after(state["step"])
            metrics.path.touch()
            since = state["step"] or None
            trackers = open_trackers(
                config.log.track, folder=folder, run=folder.name, config=vars(config), resumed_after=since
            )
            for tracker in trackers:
                at_the_end.callback(tracker.close)

        def tell(record: dict[str, Any]) -> None:
            if metrics is not None:
                for writer in (metrics, *trackers):
                    writer.write(record)

        def validate(step: int) -> None:
            began = time.perf_counter()
            averaged = ema.in_place(model) if ema is not None else nullcontext()
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
            figures = {"val/nll": bound.nll, "val/ppl": bound.ppl, "val/stderr": bound.stderr, "unigram/ppl": unigram}
            state["valid"] = figures | {"step": step}
            tell({"step": step, **figures, "time": {"seconds": time.perf_counter() - began}})
            progress.note(f"step {step:,}: {validation_line(figures, is_causal=shape.is_causal)}")

        def save(step: int, batch: Batch) -> None:
            window.read()  # nothing is saved that the guard has not seen
            is_best = state["valid"].get("step") == step and state["valid"]["val/nll"] < (state["best"] or torch.inf)
            if is_best:
                state["best"] = state["valid"]["val/nll"]
            state.update(step=step, batches=world.gathered(batch.state))
            state.update(window=list(window.figures), recent=list(window.guard.recent))
            state.update(ema_updates=ema.updates if ema else 0, seconds=seconds_before + time.perf_counter() - began)
            if metrics is not None:
                sync(metrics.path)
            saving.save(snapshot(step, shared, optimisers, ema, world, dict(state), is_best=is_best))

        # The loop.
        first, began, seconds_before = state["step"] + 1, time.perf_counter(), state["seconds"]
        # Since the figures were last told: when, at which step, and the seconds that were not training.
        lap, lap_step, aside = began, first - 1, 0.0
        progress = at_the_end.enter_context(RunProgress(console, first, config.steps))
        if console is not None:
            progress.note(opening(config, shape, data, world, source))
        steps = train_steps(
            shared,
            task,
            iter(batches),
            optimisers,
            steps=config.steps,
            first=first,
            rate=rate,
            clip=chosen.clip,
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
                progress.step(step)
                if step % config.log.every == 0 or is_last:
                    figures, stall = window.told()
                    now = time.perf_counter()
                    seconds, count = now - lap - aside, step - lap_step
                    lap, lap_step, aside = now, step, 0.0
                    speed = count * config.batch * shape.length / max(seconds, 1e-9)
                    mfu = None if peak is None else speed * flops / (peak * world.size)
                    told = {
                        "step": step,
                        **figures,
                        "lr": chosen.lr * record.rate,
                        "anchor_weight": record.anchor_weight,
                        "tokens": step * config.batch * shape.length,
                        "epoch": record.batch.state.get("epoch", 0),
                        "time": {
                            "seconds": seconds_before + now - began,
                            "tokens_per_second": speed,
                            "mfu": mfu,
                            "stall": stall / max(seconds, 1e-9),
                        },
                    }
                    tell(told)
                    progress.figures(told)
                paused = time.perf_counter()
                if step % config.valid.every == 0 or is_last:
                    try:
                        validate(step)
                    except FloatingPointError as error:
                        raise Diverged(f"after step {step} {error}", step, record.batch) from error
                if config.samples.every and (step % config.samples.every == 0 or is_last):
                    weights = usable_weights(shared, ema, world)
                    if world.is_first:
                        progress.note(write_samples(config, shape, weights, data.tokenizer, step, world.device))
                    world.wait()
                # Processes may hear a signal at different steps: they agree now and then.
                asked = stop.signal is not None
                if world.size > 1:
                    asked = step % config.log.every == 0 and world.any(asked)
                if step % config.checkpoint.every == 0 or is_last or asked:
                    save(step, record.batch)
                aside += time.perf_counter() - paused
                if asked and not is_last:
                    saving.wait()
                    code = SIGNALS[stop.signal or signal.SIGTERM]
                    again = "the same command" + ("" if config.resume == "auto" else " without resume=")
                    raise Preempted(f"stopped after step {step:,}, which is saved; {again} goes on", code)
        except Diverged as problem:
            kept = (
                ""
                if problem.batch is None
                else save_batch(folder, problem.step, world.rank, problem.batch, str(problem))
            )
            raise Diverged(
                f"{problem}. The batch is in {kept}; the last good checkpoint is as it was. Look at those rows, lower "
                "optimiser.lr or raise optimiser.warmup (guard.spike=null turns the watch for leaps off)",
                problem.step,
            ) from problem
        saving.wait()
        valid = {key: value for key, value in state["valid"].items() if key != "step"}
        progress.note(f"step {state['step']:,} of {config.steps:,} is in {folder / 'checkpoints' / LATEST}")
        if valid:  # not of a run that is asked for fewer steps than it has
            progress.note(f"{folder}: {validation_line(valid, is_causal=shape.is_causal)}")
        return Run(folder, state["step"], valid)
