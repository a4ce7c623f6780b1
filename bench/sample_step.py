"""One sampling step (middle of the loop plan, half of the positions masked, p = 0.9, every row evaluated):
the plain formula against ours, in one run."""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch

from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.plans import Plan, remask_loop
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.sampling import Change, Row, RunningBatch
from adlm.models.evaluator import build_evaluator
from adlm.models.network import compile_network
from bench import setting
from bench.plain import plain_step

TOP_P = 0.9


def draw_change(running: RunningBatch[Row], row: int, step: int) -> Change:
    """Return what a plan changes in a row at a step, of which something is revealed."""
    plan = running.rows[row].sampler
    assert isinstance(plan, Plan)
    is_hidden = running.is_hidden[row]
    rng = CounterRng.from_seed(0, torch.tensor([row]))
    u, u_token = (x[0, 0].numpy() for x in rng.pairs(step, 1, len(is_hidden), Purpose.SAMPLE))
    reveal = (u < float(plan.reveal_prob[step])) & is_hidden
    reveal[is_hidden.argmax()] = True
    hide = (u < float(plan.remask_prob[step])) & ~is_hidden
    return Change(
        step, reveal.nonzero()[0], hide.nonzero()[0], u_token[reveal], float(plan.noise_level[step])
    )


@torch.no_grad()
def main(args: argparse.Namespace) -> None:
    size, device = setting.choose_size(args), args.device
    is_cuda = device.startswith("cuda")
    model = setting.build_model(size, args.bridge, dropout=0.0).eval()
    fast = build_evaluator(model, device, is_compiled=is_cuda)
    model = model.to(device, torch.bfloat16 if is_cuda else torch.float32)
    if is_cuda:
        compile_network(model)
    length = model.config.length
    plan = remask_loop(1024)
    transition = plan[len(plan) // 2]
    rows, records = [], []
    for batch_size in args.batch or ([1, 8, 32] if is_cuda else [1]):
        x0 = setting.draw_zipf_tokens(batch_size, length, seed=1).to(device)
        rng = CounterRng.from_seed(0, batch_size)
        half = rng.uniform(0, length, Purpose.MASK).argsort(-1) < length // 2
        xt = torch.where(half.to(device), setting.MASK, x0)
        sampling = SamplingParams(top_p=TOP_P)
        texts = [
            Row(tokens, plan, seed=0, number=number, sampling=sampling)
            for number, tokens in enumerate(xt.cpu())
        ]
        running = RunningBatch(fast, texts)
        changes = {
            number: draw_change(running, number, len(plan) // 2) for number in range(batch_size)
        }

        def ours(
            running: RunningBatch[Row] = running,
            changes: dict[int, Change] = changes,
            start: torch.Tensor = running.tokens,
            is_hidden: np.ndarray = running.is_hidden,
        ) -> None:
            """Evaluate and draw what the plan changes in this step, from the same half-masked tokens each time."""
            running.tokens = start
            running.is_hidden = is_hidden
            features = running.evaluate(changes, {})
            running.write_tokens(changes, running.draw(changes, features))

        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        repeats = args.repeats or 50
        our_times = setting.time_steps(ours, 10 if is_cuda else 2, repeats, device)
        our_peak = setting.get_peak_gib(device)
        assert len(running.evaluated) == batch_size, "every row must be evaluated in every step"
        mid, half_range = setting.compute_spread(our_times)
        plain_mid, plain_half, plain_peak = float("nan"), 0.0, None
        if not args.no_plain:
            if is_cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            plain_repeats = args.repeats or (20 if is_cuda else 5)
            step = partial(plain_step, model, xt, transition, TOP_P)
            times = setting.time_steps(step, 1, plain_repeats, device)
            plain_mid, plain_half = setting.compute_spread(times)
            plain_peak = setting.get_peak_gib(device)
        ratio = plain_mid / mid
        rows.append(
            [
                str(batch_size),
                "–" if args.no_plain else f"{1e3 * plain_mid:.1f} ± {1e3 * plain_half:.1f}",
                f"{1e3 * mid:.2f} ± {1e3 * half_range:.2f}",
                "–" if our_peak is None else f"{plain_peak or 0:.1f} / {our_peak:.1f}",
                "–" if args.no_plain else f"{ratio:.1f}×",
            ]
        )
        records.append(
            {
                "batch": batch_size,
                "ratio": None if args.no_plain else round(ratio, 2),
                "ms_per_step": round(1e3 * mid, 3),
                "spread_ms": round(1e3 * half_range, 3),
                "plain_ms_per_step": None if args.no_plain else round(1e3 * plain_mid, 3),
            }
        )
    first = records[0]
    record = {
        **setting.describe_machine("sample_step", device),
        "ratio": first["ratio"],
        "ms_per_step": first["ms_per_step"],
        "batches": records,
        "size": size,
        "length": length,
        "bridge": args.bridge,
    }
    title = f"Sampling step, {size}, length {length}"
    setting.print_report(
        title, ["batch", "plain ms", "ours ms", "GiB plain / ours", "speed-up"], rows, record
    )


if __name__ == "__main__":
    parser = setting.build_parser(__doc__ or "")
    parser.add_argument(
        "--batch", type=int, nargs="+", help="batch sizes [default: 1 on a CPU, 1 8 32 on a GPU]"
    )
    parser.add_argument("--repeats", type=int)
    main(parser.parse_args())
