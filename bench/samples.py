"""Samples per second with the paper's sampler (loop, p = 0.9); a step skips the rows that it does not change."""

from __future__ import annotations

import argparse
import time

import torch

from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.plans import remask_loop
from adlm.diffusion.sampling import Row, fill_rows
from adlm.models.evaluator import build_evaluator
from bench import setting


def main(args: argparse.Namespace) -> None:
    size, device = setting.choose_size(args), args.device
    length = setting.SIZES[size][1]
    model = setting.build_model(size, args.bridge, dropout=0.0)
    evaluator = build_evaluator(model, device, is_compiled=device.startswith("cuda"))
    sampling = SamplingParams(top_p=0.9)

    def build_rows(steps: int, seed: int) -> list[Row]:
        plan = remask_loop(steps)
        hidden = torch.full((length,), setting.MASK)
        return [
            Row(hidden, plan, seed=seed, number=number, sampling=sampling)
            for number in range(args.batch)
        ]

    fill_rows(evaluator, build_rows(64, 0))  # warm-up: compiles for the numbers of rows that occur
    rows = build_rows(args.steps, 1)
    start = time.perf_counter()
    tokens = torch.stack(fill_rows(evaluator, rows)).cpu()
    seconds = time.perf_counter() - start
    assert not (tokens == setting.MASK).any()
    evaluated = sum(row.nfe for row in rows) / args.batch / args.steps
    record = {
        **setting.describe_machine("samples", device),
        "samples_per_s": round(args.batch / seconds, 4),
        "ms_per_step": round(1e3 * seconds / args.steps, 3),
        "rows_evaluated": round(evaluated, 4),
        "hours_for_5000": round(5000 / args.batch * seconds / 3600, 3),
        "steps": args.steps,
        "batch": args.batch,
        "size": size,
        "length": length,
    }
    row = [
        str(args.steps), str(args.batch), f"{seconds:.1f}", f"{1e3 * seconds / args.steps:.2f}",
        f"{100 * evaluated:.0f}%", f"{record['hours_for_5000']}",
    ]  # fmt: skip
    columns = [
        "steps",
        "batch",
        "seconds",
        "ms per step",
        "row-steps evaluated",
        "hours for 5,000 samples",
    ]
    setting.print_report(f"Samples, {size}, length {length}", columns, [row], record)


if __name__ == "__main__":
    parser = setting.build_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    main(parser.parse_args())
