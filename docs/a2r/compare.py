"""Compare runs over seeds, paired: every arm of a seed has the same data in the same order and the same held-out rows.

    python docs/a2r/compare.py measure RUNS/*-* --data held-out.txt --out results.json   # folders named ARM-SEED
    python docs/a2r/compare.py table results.json --plot curves.svg

The first writes the nats of every held-out row under every run, exactly, the second prints the tables of docs/a2r.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm.checkpoint import find_model_folder, load_model
from adlm.config import load_config
from adlm.data.batches import TensorRows
from adlm.evaluate.data import EvalDataset, load_eval_data
from adlm.evaluate.stats import estimate_ratio_difference
from adlm.likelihood import estimate_nll
from adlm.models.costs import count_parameters, flops_per_token


def select_rows(data: EvalDataset, every: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every n-th row (rows, length) and the number of the document in which it begins."""
    number = torch.arange(0, len(data.rows), every)
    tokens, lengths = data.rows.fetch(number)
    assert lengths is None, "rows are wrapped, so none has padding"
    return tokens, data.documents[number]


def measure_run(folder: Path, rows: torch.Tensor, device: str) -> dict[str, Any]:
    """Return what a run is, its learning curve, and its nats on each held-out row, in float32."""
    loaded, config = load_model(folder), load_config(folder / "config.yaml")
    shape = loaded.model.config
    assert shape.is_causal, f"{folder} is a masked model: a bound is not compared here"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    nll = estimate_nll(loaded.model.to(device), TensorRows(rows))
    (tokens_per_row,) = set(nll.row_tokens.tolist())
    arm, _, seed = folder.name.rpartition("-")
    assert int(seed) == config.seed, f"{folder} was trained with seed {config.seed}: name it {arm}-{config.seed}"
    return {
        "arm": arm,
        "seed": config.seed,
        "steps": loaded.step,
        "batch": config.batch,
        "length": shape.length,
        "layers": [shape.anchor_layers, shape.denoiser_layers],
        "parameters": count_parameters(shape),
        "flops_per_token": flops_per_token(shape, length=shape.length),
        "valid": [[each["step"], round(each["val/nll"], 5)] for each in records if "val/nll" in each],
        "train": [[each["step"], round(each["train/nll"], 4)] for each in records if "train/nll" in each],
        "tokens_per_row": int(tokens_per_row),
        "row_nats": [round(value, 2) for value in nll.row_nats.tolist()],
    }


def measure(folders: Sequence[Path], source: str, every: int, device: str) -> dict[str, Any]:
    """Measure all runs on the same rows of a text."""
    first = load_model(find_model_folder(folders[0]))
    assert first.tokenizer is not None
    data = load_eval_data(source, first.tokenizer, first.model.config.length, rows="wrapped")
    rows, documents = select_rows(data, every)
    runs = [measure_run(folder, rows, device) for folder in folders]
    return {"documents": documents.tolist(), "runs": runs}


def list_arms(results: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the runs by arm and seed; every arm must have every seed."""
    arms: dict[str, dict[int, dict[str, Any]]] = {}
    for run in results["runs"]:
        arms.setdefault(run["arm"], {})[run["seed"]] = run
    if len({tuple(sorted(runs)) for runs in arms.values()}) != 1:
        raise ValueError(f"seeds differ: { ({arm: sorted(runs) for arm, runs in arms.items()}) }; run the missing ones")
    return arms


def count_tokens(results: dict[str, Any]) -> tuple[int, int]:
    """Return the number of scored tokens in a row and in all rows."""
    (in_row,) = {run["tokens_per_row"] for run in results["runs"]}
    return in_row, in_row * len(results["documents"])


def sum_documents(results: dict[str, Any], row_nats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return nats and tokens of each document: rows of one book are not independent."""
    unit = np.unique(results["documents"], return_inverse=True)[1]
    return np.bincount(unit, row_nats), np.bincount(unit) * count_tokens(results)[0]


def compare_arms(results: dict[str, Any], first: str, second: str) -> dict[str, Any]:
    """Return nats per token of the first arm minus the second's: by seed, their mean, and two intervals.

    `interval` is Student's over the seeds (95%); `document_se` is the standard error of the mean over seeds that the
    choice of documents causes.
    """
    from scipy.stats import t

    arms = list_arms(results)
    seeds = sorted(arms[first])
    nats = {arm: np.array([arms[arm][seed]["row_nats"] for seed in seeds]) for arm in (first, second)}
    by_seed = (nats[first].sum(1) - nats[second].sum(1)) / count_tokens(results)[1]
    mean_rows = [sum_documents(results, nats[arm].mean(0)) for arm in (first, second)]
    _, document_se = estimate_ratio_difference(*mean_rows[0], *mean_rows[1])
    half = float(t.ppf(0.975, len(seeds) - 1)) * by_seed.std(ddof=1) / math.sqrt(len(seeds))
    mean = float(by_seed.mean())
    interval = (mean - half, mean + half)
    return {"by_seed": by_seed.tolist(), "mean": mean, "interval": interval, "document_se": document_se}


def print_tables(results: dict[str, Any]) -> None:
    """Print the tables of docs/a2r.md."""
    arms, (_, total) = list_arms(results), count_tokens(results)
    print("| arm | layers | parameters | training GFLOP per token | nats per token by seed | mean | perplexity |")
    print("|---|---|---|---|---|---|---|")
    for arm, runs in arms.items():
        nll = [sum(runs[seed]["row_nats"]) / total for seed in sorted(runs)]
        run, mean = next(iter(runs.values())), sum(nll) / len(nll)
        layers = " + ".join(str(count) for count in run["layers"] if count)
        sizes = f"{run['parameters']:,} | {run['flops_per_token'] / 1e9:.2f}"
        values = ", ".join(f"{value:.4f}" for value in nll)
        print(f"| `{arm}` | {layers} | {sizes} | {values} | {mean:.4f} | {math.exp(mean):.2f} |")
    print("\n| difference, nats per token | by seed | mean | 95% interval over seeds | standard error over documents |")
    print("|---|---|---|---|---|")
    for first, second in itertools.combinations(arms, 2):
        pair = compare_arms(results, first, second)
        values = ", ".join(f"{value:+.4f}" for value in pair["by_seed"])
        low, high = pair["interval"]
        print(f"| `{first}` − `{second}` | {values} | {pair['mean']:+.4f} | [{low:+.4f}, {high:+.4f}] | ", end="")
        print(f"{pair['document_se']:.4f} |")


def draw_curves(results: dict[str, Any], path: Path) -> None:
    """Draw validation during training: the mean over seeds, and their range."""
    from matplotlib import pyplot as plt

    from adlm.evaluate.plots import PLOT_STYLE
    from adlm.view.look import COLORS

    with plt.rc_context(PLOT_STYLE):
        figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
        for color, (arm, runs) in zip(COLORS, list_arms(results).items(), strict=False):
            curves = np.array([run["valid"] for run in runs.values()])
            steps, nll = curves[0, :, 0], curves[:, :, 1]
            axis.plot(steps, nll.mean(0), marker="o", color=color, label=arm)
            axis.fill_between(steps, nll.min(0), nll.max(0), color=color, alpha=0.25, linewidth=0)
        axis.set(xlabel="step", ylabel="validation, nats per token")
        axis.legend()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="Evaluate runs, in folders named ARM-SEED, on held-out text.")
    measuring.add_argument("runs", nargs="+", type=Path)
    measuring.add_argument("--data", required=True, help="Held-out text.")
    measuring.add_argument("--every", type=int, default=1, help="Use every n-th row. [default: 1]")
    measuring.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    measuring.add_argument("--out", type=Path, required=True)
    table = commands.add_parser("table", help="Print the tables, and draw the learning curves.")
    table.add_argument("results", type=Path)
    table.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        results = measure(options.runs, options.data, options.every, options.device)
        options.out.write_text(json.dumps(results) + "\n", "utf-8")
        return
    results = json.loads(options.results.read_text("utf-8"))
    print_tables(results)
    if options.plot:
        draw_curves(results, options.plot)


if __name__ == "__main__":
    main()
