"""Shared by the benchmarks: sizes, random weights, Zipf tokens, timing, the table and its JSON line."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from adlm.devices import get_device_name
from adlm.evaluate.provenance import get_commit
from adlm.models.language_model import LanguageModel
from adlm.models.methods import build_config

VOCAB, MASK = 50_258, 50_257
SIZES = {  # name -> (changes to the paper's preset, length)
    "laptop": ({"dim": 256, "heads": 4, "anchor_layers": 4, "denoiser_layers": 2}, 512),
    "small": ({}, 1024),
    "nano": ({"dim": 64, "heads": 2, "anchor_layers": 2, "denoiser_layers": 1}, 64),
}


def build_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--size", choices=SIZES, help="laptop: dim 256, 4+2 layers, length 512; small: the paper's"
    )
    parser.add_argument("--bridge", default="factored", choices=("factored", "direct"))
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--no-plain", action="store_true", help="do not time the plain formula")
    return parser


def choose_size(args: argparse.Namespace) -> str:
    if args.threads or args.device.startswith("cuda"):
        # With a GPU, the host runs many small operations, which more threads slow down.
        torch.set_num_threads(args.threads or 2)
    return args.size or ("small" if args.device.startswith("cuda") else "laptop")


def build_model(size: str, bridge: str, dropout: float, seed: int = 0) -> LanguageModel:
    """Build a model with random weights where training starts from zeros, so that no part of the step is trivial."""
    changes, length = SIZES[size]
    config = build_config(
        "adlm",
        "small",
        vocab_size=VOCAB,
        mask_id=MASK,
        length=length,
        bridge=bridge,
        dropout=dropout,
        **changes,
    )
    model, rng = LanguageModel(config, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modulation" in name:
                parameter.normal_(std=0.2, generator=rng)
            elif name.endswith("head.weight"):
                # Entropy near 3 nats: a nucleus of some hundred tokens.
                parameter.normal_(std=3.8 / config.dim**0.5, generator=rng)
    return model


def draw_zipf_tokens(rows: int, length: int, seed: int) -> Tensor:
    """Draw tokens whose frequencies fall as (rank + 2.7)^-1.15.

    The share of tokens that occur at most five times in a row is then near that of English in GPT-2's vocabulary: 0.67
    at length 512 and 0.59 at 1,024, where books have 0.64 and 0.55, Wikipedia 0.69 and 0.61, articles 0.68 and 0.57.
    """
    rng = torch.Generator().manual_seed(seed)
    weights = (torch.arange(VOCAB - 1, dtype=torch.float64) + 2.7) ** -1.15
    return torch.multinomial(weights, rows * length, replacement=True, generator=rng).view(
        rows, length
    )


def time_steps(step: Callable[[], object], warm_up: int, repeats: int, device: str) -> list[float]:
    """Return the seconds of each of `repeats` calls; on a GPU the time between the ends of consecutive steps, without
    waiting in between, as in a training or sampling loop."""
    for _ in range(warm_up):
        step()
    if not device.startswith("cuda"):
        marks = [time.perf_counter()]
        for _ in range(repeats):
            step()
            marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def describe_machine(name: str, device: str) -> dict[str, object]:
    """Return what every record says about its run."""
    about = {
        "bench": name,
        "device": get_device_name(torch.device(device)),
        "torch": torch.__version__,
    }
    return {**about, "threads": torch.get_num_threads(), "commit": get_commit()}


def get_peak_gib(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else None


def compute_spread(times: list[float]) -> tuple[float, float]:
    """Return the median and half the interquartile range."""
    if len(times) < 4:
        return statistics.median(times), (max(times) - min(times)) / 2
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / 2


def print_report(
    title: str, columns: list[str], rows: list[list[str]], record: dict[str, object]
) -> None:
    """Print a table, then the record as one line of JSON."""
    table = Table(title=f"{title}, {record['device']}")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)
    print(json.dumps(record))
