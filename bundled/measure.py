"""Measure models: the bound on held-out rows beside unigram and bigram, and samples beside held-out text.

    python bundled/measure.py --data DATA MODEL [MODEL …] --samples 200 --length 128 --out figures.json

Models are compared on the same rows with the same noise, so a difference has a smaller error than either figure. Texts
are compared in equal amounts: every sample has a held-out passage that is cut to its number of tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import adlm
from adlm.data.batches import TensorRows
from adlm.data.tokenizers import Tokenizer
from adlm.evaluate.sample_metrics import (
    Tokens,
    compute_entropies,
    compute_repetitions,
    estimate_mean,
    measure_distinct,
    truncate_alike,
)
from adlm.generate import pick_device
from adlm.likelihood import NllEstimate, estimate_nll
from adlm.models.costs import count_parameters
from bundled.ngrams import count_bigrams, estimate_heldout_nll, estimate_per_token

ORDERS = (1, 2, 3, 4)
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a folder or a name that adlm.load knows")
    parser.add_argument("--data", required=True, type=Path, help="a folder that adlm prepare made")
    parser.add_argument("--out", required=True, type=Path, help="the JSON file to write")
    parser.add_argument("--device", default="auto", help="where samples and bound are computed (%(default)s)")
    parser.add_argument("--rows", type=int, help="only so many of the valid rows, the first (all)")
    parser.add_argument("--draws", type=int, default=4, help="noises a row (%(default)s)")
    parser.add_argument("--samples", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens a sample (%(default)s)")
    parser.add_argument("--batch", type=int, default=50, help="samples a call, with a seed of its own (%(default)s)")
    parser.add_argument("--sampler", default="remask_loop", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--top-p", type=float, default=0.9, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of noise, passages and the first batch (%(default)s)")
    return parser.parse_args()


def measure(asked: argparse.Namespace, bar: Progress) -> dict[str, Any]:
    """Everything, as plain data."""
    data = adlm.open_data(asked.data)
    every = data.rows("valid")
    held = TensorRows(*every.fetch(range(min(asked.rows or len(every), len(every)))))
    size = sum(len(text.encode("utf-8")) for text in decoded(held, data.tokenizer))

    train = data.rows("train")
    task = bar.add_task("count pairs", total=len(train))
    table = count_bigrams(train, data.vocab_size, on_rows=lambda done, _: bar.update(task, completed=done))
    baselines = {
        "bigram, ends free": estimate_heldout_nll(table.nll, held, ends_free=True),
        "bigram": estimate_heldout_nll(table.nll, held),
        "unigram": estimate_heldout_nll(table.unigram_nll, held),
    }

    models: list[dict[str, Any]] = []
    first: Tensor | None = None  # the first model's sums
    names = [Path(name).name for name in asked.models]
    for number, name in enumerate(asked.models):
        label = names[number] if names.count(names[number]) == 1 else f"{names[number]} ({number + 1})"
        lm = adlm.load(name, device=asked.device)
        if lm.tokenizer is None or lm.tokenizer.sha256 != data.tokenizer.sha256:
            raise ValueError(f"{name} has another tokenizer than {asked.data}: measure it on the data it was made for")
        began = time.perf_counter()
        texts = sampled(lm, label, asked, bar)
        seconds = time.perf_counter() - began
        bound, sums = bound_of(lm.model, label, held, asked, bar)
        rows = [lm.tokenizer.encode(text) for text in texts]
        models.append(
            {
                "name": label,
                "parameters": count_parameters(lm.model.config),
                "bound": told(bound, size),
                "texts": compared(rows, held, lm.tokenizer, asked.seed),
                "seconds_of_sampling": round(seconds, 1),
                "first_sample": texts[0],
            }
        )
        first = sums if first is None else first
        if torch.equal(first[1], sums[1]):  # a causal model is asked for fewer tokens
            apart = estimate_per_token((sums[0] - first[0]).numpy(), sums[1].numpy())
            models[-1]["bound"]["above_first_model"] = {"nll": apart.nll, "stderr": apart.stderr}

    chosen = {key: value for key, value in vars(asked).items() if key not in ("data", "out", "models")}
    return {
        "settings": chosen | {"seeds": [asked.seed + k for k in range(-(-asked.samples // asked.batch))]},
        "versions": {"adlm": adlm.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "device": str(pick_device(asked.device)),
        "data": {
            "name": asked.data.resolve().name,
            "settings_sha256": data.manifest["settings_sha256"],
            "tokenizer_sha256": data.tokenizer.sha256,
            "vocab_size": data.vocab_size,
            "train_tokens": int(table.tokens.sum()),
            "valid_rows": len(held),
            "valid_tokens": baselines["unigram"].tokens,
            "valid_bytes": size,
        },
        "baselines": {name: told(bound, size) for name, bound in baselines.items()},
        "models": models,
    }


def sampled(lm: Any, label: str, asked: argparse.Namespace, bar: Progress) -> list[str]:
    """Samples, a batch at a time: what a text is depends on its batch's seed and its place there."""
    texts: list[str] = []
    how = {"steps": asked.steps, "sampler": asked.sampler, "temperature": asked.temperature, "top_p": asked.top_p}
    for number in bar.track(range(-(-asked.samples // asked.batch)), description=f"{label}: sample"):
        n = min(asked.batch, asked.samples - len(texts))
        texts += lm.generate(length=asked.length, n=n, seed=asked.seed + number, **how).texts
    return texts


def bound_of(
    model: adlm.LanguageModel, label: str, held: TensorRows, asked: argparse.Namespace, bar: Progress
) -> tuple[NllEstimate, Tensor]:
    """The bound, and each row's nats and tokens."""
    task = bar.add_task(f"{label}: bound", total=len(held))
    model.to(pick_device(asked.device))
    bound = estimate_nll(
        model, held, draws=asked.draws, seed=asked.seed, on_rows=lambda done, _: bar.update(task, completed=done)
    )
    return bound, torch.stack([bound.row_nats, bound.row_tokens])


def compared(rows: list[list[int]], held: TensorRows, tokenizer: Tokenizer, seed: int) -> dict[str, Any]:
    """The figures of samples and of as many held-out passages, cut to the same lengths."""
    long = [row for row in rows if len(row) >= max(ORDERS)]  # others have no 4-gram; how many is said
    if len(long) < 2:
        raise ValueError(f"{len(rows) - len(long)} of {len(rows)} samples are shorter than {max(ORDERS)} tokens")
    passages = [tokenizer.encode(text) for text in decoded(held, tokenizer)]
    if len(passages) < len(long):
        raise ValueError(f"{len(long)} samples need as many held-out rows, and there are {len(passages)}")
    # At random among those that are long enough; where they are too few, the longest of the others.
    order = np.random.default_rng(seed).permutation(len(passages))
    enough = np.minimum([len(passages[i]) for i in order], max(map(len, long)))
    taken = order[np.argsort(-enough, kind="stable")[: len(long)]]
    samples, reference = truncate_alike(long, [passages[i] for i in taken])
    return {
        "samples_too_short": len(rows) - len(long),
        "samples": diversity(samples),
        "held_out": diversity(reference),
    }


def diversity(rows: list[Tokens]) -> dict[str, Any]:
    """All figures of a set of texts by name, and the amount."""
    figures = {"entropy": estimate_mean(compute_entropies(rows))}
    figures |= {f"distinct_{n}": measure_distinct(rows, n) for n in ORDERS}
    figures |= {f"repetition_{n}": estimate_mean(compute_repetitions(rows, n)) for n in ORDERS}
    amount = {"texts": len(rows), "tokens": sum(map(len, rows)), "shortest": min(map(len, rows))}
    return amount | {name: {k: asdict(figure)[k] for k in ("value", "stderr")} for name, figure in figures.items()}


def decoded(rows: TensorRows, tokenizer: Tokenizer) -> list[str]:
    """The text of each row."""
    lengths = [rows.tokens.shape[1]] * len(rows) if rows.lengths is None else rows.lengths.tolist()
    pairs = zip(rows.tokens.tolist(), lengths, strict=True)
    return [tokenizer.decode(row[:length], skip_special=True) for row, length in pairs]


def told(bound: NllEstimate, size: int) -> dict[str, Any]:
    """A bound with what follows from it; all its nats go to the bytes of the text."""
    bits = bound.tokens / math.log(2) / size
    return {
        "nll": bound.nll,
        "stderr": bound.stderr,
        "ppl": bound.ppl,
        "bits_per_byte": bound.nll * bits,
        "tokens": bound.tokens,
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Two tables: bounds, and samples beside held-out text."""
    about = found["data"]
    what = f"{about['valid_rows']:,} held-out rows, {about['valid_tokens']:,} tokens"
    table = Table("", "nats/token", "perplexity", "bits/byte", "above first", title=what)
    lines = {model["name"]: model["bound"] for model in found["models"]} | found["baselines"]
    for name, bound in lines.items():
        apart = bound.get("above_first_model")
        beside = "" if apart is None or apart["stderr"] == 0 else f"{apart['nll']:+.4f} ± {apart['stderr']:.4f}"
        nll = f"{bound['nll']:.4f} ± {bound['stderr']:.4f}"
        table.add_row(name, nll, f"{bound['ppl']:.2f}", f"{bound['bits_per_byte']:.4f}", beside)
    console.print(table)
    columns: list[tuple[str, dict[str, Any]]] = []
    for model in found["models"]:
        columns += [(model["name"], model["texts"]["samples"]), ("held-out text", model["texts"]["held_out"])]
    table = Table("", *(name for name, _ in columns), title="samples, each beside as much held-out text")
    for name in columns[0][1]:
        figures = [part[name] for _, part in columns]
        cells = [f"{f:,}" if isinstance(f, int) else f"{f['value']:.3f} ± {f['stderr']:.3f}" for f in figures]
        table.add_row(name.replace("_", "-"), *cells)
    console.print(table)
    for model in found["models"]:
        if short := model["texts"]["samples_too_short"]:
            console.print(f"{model['name']}: {short} samples of fewer than {max(ORDERS)} tokens are left out")


def main() -> None:
    asked = settings()
    console = Console(highlight=False)
    with Progress(*COLUMNS, TimeRemainingColumn(), console=console) as bar:
        found = measure(asked, bar)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    show(found, console)


if __name__ == "__main__":
    main()
