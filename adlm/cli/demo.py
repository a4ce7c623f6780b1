"""`adlm demo`: text to tokens, a model trained on them, its held-out bound, a sample and an infilling, start to end.

The way a user goes: prepare, train, load, sample. Only the folder is thrown away.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from torch import Tensor

from adlm.checkpoint import load
from adlm.cli.screen import curve, draw_frame, draw_row
from adlm.data.prepare import prepare
from adlm.data.shards import open_data
from adlm.data.sources import excerpt
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.categorical import Draw
from adlm.diffusion.denoise import Frame
from adlm.generate import Predictor, ready, stream_tokens
from adlm.methods import build_sampler
from adlm.train.loop import train
from adlm.train.metrics import read_metrics

VOCAB, LENGTH, RECIPE = 1024, 64, "cpu-nano"
SETTINGS: dict[str, Any] = {  # nothing but the end is saved and validated
    "ema": 0.95,
    "checkpoint.every": 10**9,
    "valid.every": 10**9,
    "valid.draws": 4,
    "log.every": 1,
}
SAMPLING_STEPS, ROWS, TOP_P = 128, 3, 0.9
PAUSE = 0.02  # seconds between frames on a terminal, so that eyes can follow
HOLE = slice(24, 40)  # of the row that is filled in


@dataclass(frozen=True)
class DemoResult:
    """What the demo found, for whoever wants more than to look."""

    tokenizer: Tokenizer
    losses: list[float]  # nats per token, step by step
    valid: dict[str, float]
    sample: Tensor  # (ROWS, LENGTH)
    question: Tensor  # (1, LENGTH): held-out text with a hole
    answer: Tensor  # (1, LENGTH): the hole filled


def run_demo(
    *, seconds: float = 70, steps: int | None = None, seed: int = 0, console: Console | None = None
) -> DemoResult:
    """Everything in order. With `steps` the run is the same on every machine of one kind; with `seconds` it fits."""
    console = console or Console(highlight=False)
    began = time.perf_counter()
    console.print("[bold]A tiny anchored diffusion language model learns from the opening of a Dickens novel.[/]")
    console.print("First it trains, on the CPU; then it writes from nothing but masks and fills a hole in unseen text.")
    with TemporaryDirectory() as name:
        place = Path(name)

        # The text: the last twentieth is held out.
        (place / "novel.txt").write_text(excerpt(), "utf-8")
        prepare(place / "novel.txt", place / "data", train_tokenizer=VOCAB, length=LENGTH, valid_share=0.05)
        data = open_data(place / "data")

        # Training, and what it is worth on text it has not seen.
        settings = SETTINGS | {"data.path": place / "data", "seed": seed, "device": "cpu"}
        if steps is None:
            steps = max(1, int(seconds / seconds_a_step(place / "trial", settings)))
        console.print(f"\nTraining for {steps} steps (repeat with --steps {steps})")
        run = train(RECIPE, **settings, folder=place / "run", steps=steps)
        losses = [record["train/nll"] for record in read_metrics(run.folder / "metrics.jsonl") if "train/nll" in record]
        loaded = load(run.folder)
        held = data.rows("valid").fetch([1])[0][0]

    tokenizer, valid = data.tokenizer, run.valid
    console.print(curve(losses), style="blue")
    console.print(
        f"\nheld-out perplexity: at most {valid['val/ppl']:.1f} "
        f"(nll {valid['val/nll']:.3f} ± {valid['val/stderr']:.3f}); "
        f"of a model that knows only how frequent tokens are: {valid['unigram/ppl']:.1f}\n"
    )

    # Writing: the paper's sampler, which hides again part of what it has written.
    folded = ready(loaded.model)
    masks = torch.full((ROWS, LENGTH), tokenizer.mask_id)
    console.print("[bold]Writing[/] from masks (░), with the loop sampler; [green]revealed[/], [red]hidden again[/]:")
    sample, note = watch_sampling(folded, masks, tokenizer, seed, console)
    for row in sample[1:]:
        console.print("\n" + tokenizer.decode(row.tolist(), skip_special=True), markup=False)
    console.print(note, style="dim")

    # Filling a hole: what is given stays.
    question = held[None].clone()
    original = question[0, HOLE].clone()
    question[0, HOLE] = tokenizer.mask_id
    console.print("\n[bold]Filling[/] a hole in held-out text:")
    answer, note = watch_sampling(folded, question, tokenizer, seed, console)
    is_given = question != tokenizer.mask_id
    kept = int((answer == question)[is_given].sum())
    console.print(f"{note}; {kept} of {int(is_given.sum())} given tokens as they were", style="dim")
    console.print(f"It read: …{tokenizer.decode(original.tolist(), skip_special=True)}…", markup=False)
    console.print(f"\nDone in {time.perf_counter() - began:.0f} s.")
    return DemoResult(tokenizer, losses, valid, sample, question, answer)


def seconds_a_step(folder: Path, settings: dict[str, Any]) -> float:
    """Measured on a run that is thrown away."""
    train(RECIPE, **settings | {"log.show": False}, folder=folder, steps=8)
    told = [record["time"]["seconds"] for record in read_metrics(folder / "metrics.jsonl") if "lr" in record]
    return (told[-1] - told[1]) / 6  # the first two steps warm up


def watch_sampling(
    model: Predictor, xt: Tensor, tokenizer: Tokenizer, seed: int, console: Console
) -> tuple[Tensor, str]:
    """Sample with the paper's sampler, the first row shown as it changes (in a pipe: thrice); tokens and a note."""
    began, paused, is_fixed = time.perf_counter(), 0.0, xt != tokenizer.mask_id
    plan = build_sampler("remask_loop", steps=SAMPLING_STEPS)
    frames = stream_tokens(model, xt, plan, seed=seed, how=Draw(top_p=TOP_P))
    frame: Frame | None = None
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for frame in frames:
                live.update(draw_frame(frame, tokenizer, is_fixed), refresh=True)
                time.sleep(PAUSE)
                paused += PAUSE
            assert frame is not None
            live.update(draw_row(frame.tokens[0], frame.is_masked[0], tokenizer, is_fixed=is_fixed[0]), refresh=True)
    else:
        for frame in frames:
            if frame.step in (SAMPLING_STEPS // 4, SAMPLING_STEPS // 2):
                console.print(f"[step {frame.step}] ", draw_frame(frame, tokenizer, is_fixed), markup=False)
        assert frame is not None
        console.print(f"[step {frame.step}] ", draw_frame(frame, tokenizer, is_fixed), markup=False)
    seconds, nfe = time.perf_counter() - began - paused, int(frame.nfe.sum())
    rows = f"{xt.shape[0]} texts" if xt.shape[0] > 1 else "1 text"
    return frame.tokens, f"{rows}, {frame.step} steps, {nfe} network evaluations of a row, {seconds:.1f} s"
