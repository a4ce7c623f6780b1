"""`adlm sample`: texts from a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.live import Live

from adlm.checkpoint import load
from adlm.cli.errors import told
from adlm.cli.screen import draw_frame
from adlm.diffusion.categorical import Draw
from adlm.diffusion.denoise import Frame
from adlm.generate import blank_rows, ready, stream_tokens
from adlm.methods import build_sampler
from adlm.train.distributed import pick_device


def sample(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint's.")],
    rows: Annotated[int, typer.Option(min=1, help="How many texts.")] = 3,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens a text; the model's length unless told.")] = None,
    sampler: Annotated[str, typer.Option(help="Of a masked model: remask_loop, ancestral, …")] = "remask_loop",
    steps: Annotated[int, typer.Option(min=1, help="Of the sampler.")] = 128,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that make up this much.")] = 0.9,
    temperature: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option()] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the texts to this file too.")] = None,
) -> list[str]:
    """Write texts with a trained model; on a terminal the first is shown as it appears."""
    with told():
        console = Console(highlight=False)
        loaded = load(run)
        if loaded.tokenizer is None:
            raise ValueError(f"{run} has no tokenizer.json: its model's tokens cannot be read as text")
        config, tokenizer = loaded.model.config, loaded.tokenizer
        plan = None if config.is_causal else build_sampler(sampler, steps=steps)
        xt, is_fixed = blank_rows(config, tokenizer, rows, length)
        predictor = ready(loaded.model, pick_device(device), is_compiled=False)
        how = Draw(top_p=top_p, temperature=temperature)
        frame: Frame | None = None
        frames = stream_tokens(predictor, xt, plan, seed=seed, how=how, is_fixed=is_fixed)
        if console.is_terminal:
            with Live(console=console, auto_refresh=False, transient=True) as live:
                for frame in frames:
                    live.update(draw_frame(frame, tokenizer), refresh=True)
        else:
            *_, frame = frames
        assert frame is not None and not torch.any(frame.is_masked)
        texts = [tokenizer.decode(row, skip_special=True) for row in frame.tokens.tolist()]
        for number, text in enumerate(texts, 1):
            console.print(f"[bold]{number}[/]")
            console.print(text + "\n", markup=False, soft_wrap=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text("\n<|endoftext|>\n".join(texts) + "\n", "utf-8")
        return texts
