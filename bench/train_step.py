"""One training step (forward, backward, clip, AdamW, EMA; dropout on): the plain formula against ours, in one run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from adlm.diffusion.anchors import AnchorRule, rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, NoisyBatch, corrupt
from adlm.diffusion.objectives import training_loss
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear, loss_weight
from adlm.models.language_model import LanguageModel
from adlm.models.network import compile_network
from adlm.training.ema import EMA
from adlm.training.optim import build_optimizers, step_optimizers
from bench import setting
from bench.plain import plain_loss

GAMMA = 3e-3
RULE = rare_in_sequence(5)


def prefetch_batches(
    x0: Tensor,
    device: str,
    multiple: int,
    rule: AnchorRule | None = RULE,
    mask_id: int = setting.MASK,
) -> Callable[[], NoisyBatch]:
    """Return a function that returns the noisy batch of the next step, corrupted on the host one step ahead."""
    rng, steps = CounterRng.from_seed(0, len(x0)), count()

    def prepare() -> NoisyBatch:
        process = ForwardProcess(mask_id, anchor_rule=rule, multiple=multiple)
        return corrupt(x0, process, rng, next(steps)).to(device)

    ahead = [prepare()]

    def next_batch() -> NoisyBatch:
        batch = ahead.pop()
        ahead.append(prepare())
        return batch

    return next_batch


def build_step(
    model: LanguageModel,
    loss_fn: Callable[[NoisyBatch], Tensor],
    next_batch: Callable[[], NoisyBatch],
    device: str,
) -> Callable[[], Tensor]:
    optimizers, ema = build_optimizers(model), EMA(model)

    def step() -> Tensor:
        batch = next_batch()
        with torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda")):
            loss = loss_fn(batch)
        loss.backward()
        step_optimizers(model, optimizers, 1.0, ema)
        return loss.detach()

    return step


def main(args: argparse.Namespace) -> None:
    size, device = setting.choose_size(args), args.device
    is_cuda = device.startswith("cuda")
    batch_size = args.batch or (32 if is_cuda else 2)
    repeats = args.repeats or (30 if is_cuda else 9)
    if is_cuda:
        torch.set_float32_matmul_precision("high")
    gamma = torch.tensor(GAMMA, device=device)
    timed: dict[str, list[float]] = {}
    memory: dict[str, float | None] = {}
    for name in ("ours",) if args.no_plain else ("plain", "ours"):
        model = setting.build_model(size, args.bridge, dropout=0.1).to(device).train()
        if is_cuda:
            compile_network(model)
        x0 = setting.draw_zipf_tokens(batch_size, model.config.length, seed=1)

        def plain(batch: NoisyBatch, model: LanguageModel = model) -> Tensor:
            weight = loss_weight(LogLinear(), batch.t)
            return plain_loss(model, batch, weight, RULE(batch.x0, None), gamma)

        def ours(batch: NoisyBatch, model: LanguageModel = model) -> Tensor:
            return training_loss(model, batch, anchor_weight=gamma, check=False).total

        # The plain step finds the anchors itself, so its batches have none.
        next_batch = prefetch_batches(
            x0, device, 1024 if is_cuda else 1, None if name == "plain" else RULE
        )
        step = build_step(model, plain if name == "plain" else ours, next_batch, device)
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        timed[name] = setting.time_steps(step, 8 if is_cuda else 1, repeats, device)
        memory[name] = setting.get_peak_gib(device)
        del model, step, next_batch
        if is_cuda:
            torch.cuda.empty_cache()
    tokens = batch_size * x0.shape[1]
    middle = {name: setting.compute_spread(times) for name, times in timed.items()}
    rows = [
        [
            name,
            f"{1e3 * mid:.1f} ± {1e3 * half:.1f}",
            f"{tokens / mid:,.0f}",
            "–" if memory[name] is None else f"{memory[name]:.1f}",
            f"{middle['plain'][0] / mid:.2f}×" if "plain" in middle else "–",
        ]
        for name, (mid, half) in middle.items()
    ]
    record = {
        **setting.describe_machine("train_step", device),
        "ratio": round(middle["plain"][0] / middle["ours"][0], 3) if "plain" in middle else None,
        "tokens_per_s": round(tokens / middle["ours"][0]),
        "ms_per_step": {name: round(1e3 * mid, 3) for name, (mid, _) in middle.items()},
        "spread_ms": {name: round(1e3 * half, 3) for name, (_, half) in middle.items()},
        "peak_gib": memory,
        "size": size,
        "batch": batch_size,
        "length": x0.shape[1],
        "bridge": args.bridge,
    }
    title = f"Training step, {size}, batch {batch_size} × {x0.shape[1]}"
    setting.print_report(
        title, ["", "ms per step", "tokens/s", "peak GiB", "speed-up"], rows, record
    )


if __name__ == "__main__":
    parser = setting.build_parser(__doc__ or "")
    parser.add_argument("--batch", type=int, help="rows [default: 2 on a CPU, 32 on a GPU]")
    parser.add_argument("--repeats", type=int)
    main(parser.parse_args())
