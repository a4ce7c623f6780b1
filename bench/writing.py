"""Seconds per text of a model, by sampler, through LM.generate."""

from __future__ import annotations

import argparse
import statistics

import torch

from adlm.text.lm import load
from bench.setting import compute_spread, describe_machine, print_report

SAMPLERS = ("remask_loop", "ancestral", "confidence", "entropy_bounded", "first_hitting")


def main(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    lm = load(args.model, device=args.device) if args.model else load(device=args.device)
    length = min(args.length, lm.row_format.longest)
    rows, samplers = [], {}
    for name in args.samplers:
        settings = (
            {"steps": args.steps} if name in ("remask_loop", "ancestral", "confidence") else {}
        )
        lm.generate(length=length, sampler=name, seed=0, **settings)  # warm-up
        runs = [
            lm.generate(length=length, sampler=name, seed=seed, **settings)
            for seed in range(args.repeats)
        ]
        seconds, spread = compute_spread([run.seconds for run in runs])
        nfe = statistics.mean(run.nfe for run in runs)
        each = 1e3 * seconds / nfe
        samplers[name] = {
            "seconds": round(seconds, 3),
            "nfe": round(nfe, 1),
            "ms_per_nfe": round(each, 2),
        }
        rows.append([name, f"{seconds:.2f} ± {spread:.2f}", f"{nfe:.0f}", f"{each:.1f}"])
    record = {
        **describe_machine("writing", str(lm.device)),
        "model": lm.name,
        "length": length,
        "steps": args.steps,
        "repeats": args.repeats,
        "samplers": samplers,
    }
    title = f"One text of {length} tokens, {lm.name}, {torch.get_num_threads()} threads"
    print_report(title, ["sampler", "seconds", "evaluations", "ms per evaluation"], rows, record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a bundled name or a folder [default: the bundled model]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS)
    main(parser.parse_args())
