"""A whole run (`adlm.train`: loader, logging, EMA, validation) against its bare training step, in one run."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from adlm.config import load_config
from adlm.data.prepare import prepare
from adlm.data.shards import open_data
from adlm.data.sources import load_excerpt
from adlm.diffusion.objectives import training_loss
from adlm.models.language_model import LanguageModel
from adlm.models.network import compile_network
from adlm.training.logging import read_metrics
from adlm.training.text import build_model_config
from adlm.training.train import train
from bench.setting import compute_spread, describe_machine, get_peak_gib, print_report, time_steps
from bench.train_step import GAMMA, build_step, prefetch_batches

WARM_UP = 20  # steps that are not timed: torch compiles
SIZES = {  # recipe, length, changes
    "small": ("owt-adlm", 1024, ["model.preset=small"]),
    "nano": ("cpu-nano", 64, []),
}


def time_bare_steps(
    config_path: list[str], recipe: str, data: Path, device: str, repeats: int
) -> list[float]:
    """Time each bare step: one batch of rows, corrupted while the device computes, nothing logged."""
    config = load_config(recipe, *config_path)
    opened = open_data(data)
    is_cuda = device.startswith("cuda")
    model = LanguageModel(build_model_config(config, opened)).to(device).train()
    if is_cuda:
        compile_network(model)
    x0 = opened.rows("train").fetch(range(config.batch))[0]
    gamma = torch.tensor(GAMMA, device=device)
    assert opened.mask_id is not None
    next_batch = prefetch_batches(x0, device, 64 if is_cuda else 1, mask_id=opened.mask_id)
    step = build_step(
        model,
        lambda b: training_loss(model, b, anchor_weight=gamma, check=False).total,
        next_batch,
        device,
    )
    return time_steps(step, WARM_UP, repeats, device)


def main(args: argparse.Namespace) -> None:
    device = args.device
    if device.startswith("cuda"):
        torch.set_num_threads(args.threads or 2)
    elif args.threads:
        torch.set_num_threads(args.threads)
    recipe, length, changes = SIZES[args.size or ("small" if device.startswith("cuda") else "nano")]
    with TemporaryDirectory() as name:
        place = Path(name)
        (place / "text.txt").write_text(load_excerpt(), "utf-8")
        vocabulary = {"train_tokenizer": 1024} if recipe == "cpu-nano" else {"tokenizer": "gpt2"}
        prepare(place / "text.txt", place / "data", length=length, valid_share=0.3, **vocabulary)
        changes = [
            *changes,
            f"data.path={place / 'data'}",
            f"batch={args.batch}",
            "micro_batch=null",
            f"steps={args.steps}",
            f"device={device}",
            f"log.every={args.log_every}",
            f"valid.every={args.valid_every}",
            f"valid.rows={args.valid_rows}",
            "checkpoint.every=1000000",
            "log.show=false",
            "guard.spike=null",
        ]
        times = time_bare_steps(
            [*changes, f"folder={place / 'none'}"], recipe, place / "data", device, args.repeats
        )
        run = train(recipe, *changes, folder=place / "run")
        logged = read_metrics(run.folder / "metrics.jsonl")
    # From the first logged step after the first validation (until then torch compiles) to the last step, with all
    # validations between them.
    steps = [record for record in logged if "lr" in record and record["step"] > args.valid_every]
    checks = [record["time"]["seconds"] for record in logged if "val/nll" in record][1:]
    first, last = steps[0], steps[-1]
    seconds = last["time"]["seconds"] - first["time"]["seconds"]
    tokens = last["tokens"] - first["tokens"]
    step, half = compute_spread(times)
    bare_speed, loop_speed = args.batch * length / step, tokens / seconds
    without = tokens / (seconds - sum(checks[:-1]))
    stall = max(record["time"]["stall"] for record in steps)
    rows = [
        ["bare step", f"{bare_speed:,.0f}", "1", ""],
        [
            "the loop",
            f"{without:,.0f}",
            f"{without / bare_speed:.3f}",
            f"waiting for data at most {100 * stall:.2f}%",
        ],
        [
            "with its validation",
            f"{loop_speed:,.0f}",
            f"{loop_speed / bare_speed:.3f}",
            f"{checks[0]:.2f} s each",
        ],
    ]
    record = {
        **describe_machine("loop", device),
        "ratio": round(without / bare_speed, 4),
        "ratio_with_validation": round(loop_speed / bare_speed, 4),
        "tokens_per_s": {
            "step": round(bare_speed),
            "loop": round(without),
            "with_validation": round(loop_speed),
        },
        "step_ms": round(1e3 * step, 3),
        "spread_ms": round(1e3 * half, 3),
        "stall": stall,
        "validation_s": checks,
        "validation_rows": args.valid_rows,
        "validation_every": args.valid_every,
        "peak_gib": get_peak_gib(device),
        "batch": args.batch,
        "length": length,
        "steps": args.steps,
    }
    title = f"A run of {args.steps} steps, batch {args.batch} × {length}"
    print_report(title, ["", "tokens/s", "of the step", ""], rows, record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, help="small: the paper's; nano: for a CPU")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--valid-rows", type=int, default=32)
    parser.add_argument(
        "--valid-every", type=int, default=80, help="the owt recipes: 4,096 rows every 10,000 steps"
    )
    parser.add_argument("--threads", type=int)
    main(parser.parse_args())
