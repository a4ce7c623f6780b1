"""The training loop, in plain sight: a generator that takes a step and says how it went."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adlm.diffusion.anchors import AnchorRule, anchor_weight, rare_in_sequence
from adlm.diffusion.masking import corrupt, shifted
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear, NoiseSchedule
from adlm.methods import training_loss
from adlm.models.language_model import LanguageModel
from adlm.train.ema import EMA

DECAYS = ("constant", "cosine")
CHECK_EVERY = 50  # steps between looks at the loss on a GPU, where looking means waiting


@dataclass(frozen=True)
class StepRecord:
    """One step: what was optimised and what is reported. Reading a loss waits for the device."""

    step: int  # from 1
    total: Tensor
    mean_nll: Tensor
    lr: float
    anchor_weight: float
    tokens: int  # seen since the start
    seconds: float  # passed since the start

    @property
    def loss(self) -> float:
        """What was optimised, the anchor term included."""
        return float(self.total)

    @property
    def nll(self) -> float:
        """Nats per token, without the anchor term."""
        return float(self.mean_nll)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def learning_rate(step: int, steps: int, *, peak: float, warmup: int, decay: str = "constant") -> float:
    """Linear up to `peak` at step `warmup`, then constant (the paper) or down a cosine to a tenth. Steps from 1."""
    if decay not in DECAYS:
        raise ValueError(f"decay {decay!r} is not one of {', '.join(DECAYS)}")
    if step < warmup:
        return peak * step / warmup
    if decay == "constant":
        return peak
    progress = (step - warmup) / max(steps - warmup, 1)
    return peak * (0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0)))


def shuffled(rows: int, batch: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Row numbers, a batch at a time, for ever: every row once before any row twice."""
    if rows < 1 or batch < 1:
        raise ValueError(f"training needs at least one row and a batch of at least one, got {rows} rows, batch {batch}")
    waiting = torch.empty(0, dtype=torch.int64)
    while True:
        while waiting.numel() < batch:
            waiting = torch.cat([waiting, torch.randperm(rows, generator=rng)])
        yield waiting[:batch]
        waiting = waiting[batch:]


def update(model: LanguageModel, optimiser: torch.optim.Optimizer, clip: float, ema: EMA | None) -> None:
    """After the backward: clip, step, forget the gradients, average. Nothing here waits for the device."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    if ema is not None:
        ema.update(model)


def train_steps(
    model: LanguageModel,
    rows: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float = 3e-4,
    warmup: int = 2500,
    decay: str = "constant",
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    clip: float = 1.0,
    anchor_rule: AnchorRule | None = None,
    anchor_scope: str = "all",
    peak_anchor_weight: float = 3e-3,
    score_entropy: bool = False,
    schedule: NoiseSchedule | None = None,
    ema: EMA | None = None,
    seed: int = 0,
) -> Iterator[StepRecord]:
    """Train a model in place on rows (n, L) and yield a record a step. The defaults are the paper's.

    What the model is decides what it is asked: hidden tokens or, if causal, the next one; with two stages, anchors too.
    """
    # Where we run, and what is trained.
    config, device = model.config, model.embed.weight.device
    two_stages, on_gpu = config.anchor_layers > 0, device.type == "cuda"
    schedule = schedule or LogLinear()
    rule = (anchor_rule or rare_in_sequence(max_count=5)) if two_stages else None
    multiple = 64 if on_gpu else 1  # a GPU's products like round sizes

    # How.
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    order = shuffled(rows.shape[0], batch, torch.Generator().manual_seed(seed))
    model.train()
    if on_gpu:
        model.compile_layers()
    start = time.perf_counter()

    # The loop.
    for step in range(1, steps + 1):
        number = next(order)
        x0 = rows[number]
        if config.is_causal:
            noised = shifted(x0, anchor_rule=rule, multiple=multiple)
        else:
            assert config.mask_id is not None
            noised = corrupt(
                x0,
                schedule,
                CounterRng.of(seed, number),
                step,
                mask_id=config.mask_id,
                anchor_rule=rule,
                anchor_scope=anchor_scope,
                multiple=multiple,
            )
        noised = noised.pin().to(device) if on_gpu else noised
        weight = anchor_weight(step, steps, peak_anchor_weight) if two_stages else None
        rate = learning_rate(step, steps, peak=lr, warmup=warmup, decay=decay)
        for group in optimiser.param_groups:
            group["lr"] = rate

        # Dropout follows from (seed, step) as the noise does, and the caller's generators are left as they were.
        with torch.random.fork_rng([device] if on_gpu else []):
            reseed = torch.cuda.manual_seed if on_gpu else torch.default_generator.manual_seed
            reseed((seed * 0x9E3779B97F4A7C15 + step) % 2**63)
            gamma = torch.tensor(weight, device=device) if weight is not None else None
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                loss = training_loss(model, noised, anchor_weight=gamma, score_entropy=score_entropy, check=False)
            if not on_gpu or step % CHECK_EVERY == 0:
                loss.check(number)
            loss.total.backward()
        update(model, optimiser, clip, ema)
        yield StepRecord(
            step=step,
            total=loss.total.detach(),
            mean_nll=loss.nll.detach(),
            lr=rate,
            anchor_weight=weight or 0.0,
            tokens=step * x0.numel(),
            seconds=time.perf_counter() - start,
        )
