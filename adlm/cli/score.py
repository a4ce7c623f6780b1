"""`adlm score`: how likely texts are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.output import json_stdout, print_json, read_text_file, status_console

if TYPE_CHECKING:
    from adlm.text.scoring import Score

SHOWN = 60  # characters of a text in the table


def score(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; - reads one from stdin.")
    ] = None,
    model: options.ModelOption = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="A file that is one text (without its last line end); repeatable.")
    ] = None,
    lines: Annotated[
        list[str] | None, typer.Option(help="A file with a text in every line, - for stdin; repeatable.")
    ] = None,
    draws: Annotated[
        int, typer.Option(min=2, help="Noises a text; four times as many halve the error. (a causal model: none)")
    ] = 64,
    seed: options.Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time; it changes nothing but speed.")] = 64,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Tell how likely texts are: nats per token with their standard error, perplexity and bits per byte.

    Of a masked model it is a bound from above (≤), of a causal one the figure itself.
    """
    with report_errors():
        given, skipped = gather(texts or [], file or [], lines or [])
        if skipped:
            status_console().print(f"empty lines left out: {skipped}", style="dim", markup=False)
        with json_stdout(is_json):
            from adlm.bundled import DEFAULT
            from adlm.text.lm import load

            lm, began = load(model or DEFAULT, device=device), time.perf_counter()
            with status_console().status("scoring …"):
                scores = lm.score(given, draws=draws, seed=seed, batch=batch)
        settings = {
            "model": lm.name,
            "method": lm.method,
            "draws": 1 if lm.row_format.is_causal else draws,
            "seed": seed,
        }
        settings |= {"device": str(lm.device)}
        if is_json:
            found = [{"text": text, **asdict(each), "ppl": each.ppl} for text, each in zip(given, scores, strict=True)]
            print_json({"scores": found, "seconds": time.perf_counter() - began, "settings": settings})
            return
        Console(highlight=False).print(tabled(given, scores))
        kind = "exact" if lm.row_format.is_causal else f"≤: a bound from above, {draws} noises a text"
        status_console().print(f"{lm.name}: {kind}", style="dim", markup=False)


def gather(texts: Sequence[str], files: Sequence[Path], lines: Sequence[str]) -> tuple[list[str], int]:
    """The texts in the order of the options, and how many empty lines were left out."""
    given = [read_text_file(text) if text == "-" else text for text in texts]
    given += [read_text_file(str(path)) for path in files]
    each = [line.removesuffix("\r") for name in lines for line in read_text_file(name).split("\n")]
    kept = [line for line in each if line.strip()]
    if not given and not kept:
        raise ValueError("there is no text to score: give some, --file FILE, --lines FILE, or - to read stdin")
    return given + kept, len(each) - len(kept)


def tabled(texts: Sequence[str], scores: Sequence[Score]) -> Table:
    """A line for each text."""
    from adlm.view.terminal import tame

    table = Table(box=None, pad_edge=False)
    table.add_column("text", no_wrap=True, overflow="ellipsis", max_width=SHOWN)
    for name in ("tokens", "nats/token", "± s.e.", "perplexity", "bits/byte"):
        table.add_column(name, justify="right", no_wrap=True)
    for text, score in zip(texts, scores, strict=True):
        sign = "" if score.is_exact else "≤ "
        figures = [f"{score.tokens:,}", f"{sign}{score.nll:.3f}", "exact" if score.is_exact else f"{score.stderr:.3f}"]
        figures += [f"{sign}{score.ppl:,.1f}", f"{sign}{score.bits_per_byte:.3f}"]
        table.add_row(Text(tame(text.replace("\n", "↵"))), *figures)
    return table
