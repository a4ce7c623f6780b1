"""`adlm demo`: text to tokens, a model trained on them, its held-out bound, a sample and an infilling, start to end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from adlm.cli.screen import curve, draw_frame, draw_row
from adlm.data.packing import pack_rows
from adlm.data.sources import excerpt
from adlm.data.tokenizers import Tokenizer, train_bpe
from adlm.diffusion.categorical import Draw
from adlm.diffusion.denoise import Frame
from adlm.evaluate.likelihood import Bound, held_out_bound, unigram_nll
from adlm.generate import Predictor, ready, stream_tokens
from adlm.methods import build_config, build_sampler
from adlm.models.language_model import LanguageModel
from adlm.train.ema import EMA
from adlm.train.loop import StepRecord, train_steps

# The pick of some twenty settings tried for about a minute on two cores, one seed each: docs/LOG.md.
VOCAB, LENGTH, BATCH = 1024, 64, 16
MODEL: dict[str, Any] = {"dim": 128, "heads": 4, "anchor_layers": 3, "denoiser_layers": 1, "dropout": 0.0, "tied": True}
TRAINING: dict[str, Any] = {"lr": 3e-3, "warmup": 30, "decay": "cosine", "betas": (0.9, 0.95)}
SAMPLING_STEPS, ROWS, TOP_P = 128, 3, 0.9
PAUSE = 0.02  # seconds between frames on a terminal, so that eyes can follow
HOLE = slice(24, 40)  # of the row that is filled in


@dataclass(frozen=True)
class DemoResult:
    """What the demo found, for whoever wants more than to look."""

    tokenizer: Tokenizer
    losses: list[float]  # nats per token, step by step
    bound: Bound
    unigram_ppl: float
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

    # The text: the last twentieth is held out.
    text = excerpt()
    cut = text.index("\n\n", len(text) * 19 // 20)
    tokenizer = train_bpe([text[:cut]], VOCAB)
    train = torch.tensor(tokenizer.encode(text[:cut]))
    held = pack_rows(tokenizer.encode(text[cut:]), LENGTH)
    rows = pack_rows(train, LENGTH)

    # The model.
    config = build_config(
        "adlm", "nano", vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id, length=LENGTH, **MODEL
    )
    model = LanguageModel(config, seed=seed)
    if steps is None:
        steps = max(1, int(seconds / seconds_a_step(config, rows)))
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"\n{size / 1e6:.2f}M parameters, {train.numel():,} tokens of text in {len(rows):,} rows of {LENGTH}, "
        f"a vocabulary of {tokenizer.vocab_size:,}; {steps} steps of {BATCH} rows (repeat with --steps {steps})\n"
    )

    # Training and what it is worth on text it has not seen.
    ema = EMA(model, decay=0.95)  # a short memory: in so few steps the weights never stop improving
    losses = watch_training(model, rows, steps, ema, seed, console)
    ema.copy_to(model)
    console.print(curve(losses), style="blue")
    bound = held_out_bound(model, held, draws=4, seed=seed)
    unigram_ppl = float(torch.tensor(unigram_nll(train, held, tokenizer.vocab_size)).exp())
    console.print(
        f"\nheld-out perplexity: at most {bound.ppl:.1f} (nll {bound.nll:.3f} ± {bound.stderr:.3f}, "
        f"{bound.tokens:,} tokens); of a model that knows only how frequent tokens are: {unigram_ppl:.1f}\n"
    )

    # Writing: the paper's sampler, which hides again part of what it has written.
    folded = ready(model)
    masks = torch.full((ROWS, LENGTH), tokenizer.mask_id)
    console.print("[bold]Writing[/] from masks (░), with the loop sampler; [green]revealed[/], [red]hidden again[/]:")
    sample, note = watch_sampling(folded, masks, tokenizer, seed, console)
    for row in sample[1:]:
        console.print("\n" + tokenizer.decode(row.tolist()), markup=False)
    console.print(note, style="dim")

    # Filling a hole: what is given stays.
    question = held_out_row(text[cut:], tokenizer)[None]
    original = question[0, HOLE].clone()
    question[0, HOLE] = tokenizer.mask_id
    console.print("\n[bold]Filling[/] a hole in held-out text:")
    answer, note = watch_sampling(folded, question, tokenizer, seed, console)
    is_given = question != tokenizer.mask_id
    kept = int((answer == question)[is_given].sum())
    console.print(f"{note}; {kept} of {int(is_given.sum())} given tokens as they were", style="dim")
    console.print(f"It read: …{tokenizer.decode(original.tolist())}…", markup=False)
    console.print(f"\nDone in {time.perf_counter() - began:.0f} s.")
    return DemoResult(tokenizer, losses, bound, unigram_ppl, sample, question, answer)


def seconds_a_step(config: Any, rows: Tensor) -> float:
    """Measured on a model that is thrown away."""
    trial = list(train_steps(LanguageModel(config), rows, steps=8, batch=BATCH, **TRAINING))
    return (trial[-1].seconds - trial[1].seconds) / 6  # the first two steps warm up


def watch_training(
    model: LanguageModel, rows: Tensor, steps: int, ema: EMA, seed: int, console: Console
) -> list[float]:
    """Train, with a bar on a terminal and about ten lines elsewhere; the nats per token of every step."""
    records = train_steps(model, rows, steps=steps, batch=BATCH, ema=ema, seed=seed, **TRAINING)
    losses: list[float] = []
    if not console.is_terminal:
        for record in records:
            losses.append(record.nll)
            if record.step % max(1, steps // 10) == 0 or record.step == steps:
                console.print(progress_line(record, steps, losses))
        return losses
    columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=steps)
        for record in records:
            losses.append(record.nll)
            bar.update(task, advance=1, description=progress_line(record, steps, losses))
    return losses


def progress_line(record: StepRecord, steps: int, losses: list[float]) -> str:
    recent = losses[-50:]  # single steps are noisy: a row's weight is one over its time
    nll, speed = sum(recent) / len(recent), record.tokens_per_second
    return f"step {record.step:>5}/{steps}  nll {nll:.3f}  {speed:,.0f} tokens/s"


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


def held_out_row(text: str, tokenizer: Tokenizer) -> Tensor:
    """The beginning of the first paragraph that fills a row."""
    for paragraph in text.split("\n\n"):
        ids = tokenizer.encode(paragraph)
        if len(ids) >= LENGTH:
            return torch.tensor(ids[:LENGTH])
    raise ValueError(f"no paragraph of the held-out text has {LENGTH} tokens")
