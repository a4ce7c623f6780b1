"""`adlm score`: the likelihood of texts."""

import time
from dataclasses import asdict
from typing import Annotated

import typer

from adlm.cli import options
from adlm.cli.generate import read_stdin
from adlm.cli.output import json_stdout, print_json, print_table, read_text_file, status_console

MAX_TEXT_WIDTH = 60  # characters of a text in the table


def score(
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; - reads stdin.")] = None,
    model: options.ModelOption = None,
    file: Annotated[list[str] | None, typer.Option(help="File with one text, - for stdin; repeatable.")] = None,
    lines: Annotated[list[str] | None, typer.Option(help="File with a text per line, - for stdin; repeatable.")] = None,
    draws: Annotated[int, typer.Option(min=2, help="Noise samples per text; 4 times as many halve the error.")] = 64,
    seed: options.Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="Rows per batch; does not change the result.")] = 64,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Compute the likelihood of texts: nats per token with their standard error, perplexity and bits per byte.

    Masked models give an upper bound (≤), causal ones the exact value.
    """
    inputs = read_stdin(texts or []) + [read_text_file(name) for name in file or []]
    every_line = [line.removesuffix("\r") for name in lines or [] for line in read_text_file(name).split("\n")]
    inputs += [line for line in every_line if line.strip()]
    if not inputs:
        raise ValueError("there is no text to score: give some, --file FILE, --lines FILE, or - to read stdin")
    if skipped := sum(not line.strip() for line in every_line):
        status_console().print(f"empty lines skipped: {skipped}", style="dim", markup=False)
    with json_stdout(is_json):
        from adlm.bundled import DEFAULT
        from adlm.text.lm import load

        lm, began = load(model or DEFAULT, device=device), time.perf_counter()
        with status_console().status("scoring …"):
            scores = lm.score(inputs, draws=draws, seed=seed, batch=batch)
    is_causal = lm.row_format.is_causal
    if is_json:
        settings = {"model": lm.name, "method": lm.method, "draws": 1 if is_causal else draws, "seed": seed}
        rows = [{"text": text, **asdict(each), "ppl": each.ppl} for text, each in zip(inputs, scores, strict=True)]
        seconds = time.perf_counter() - began
        print_json({"scores": rows, "seconds": seconds, "settings": settings | {"device": str(lm.device)}})
        return
    from adlm.evaluate.results import Cell, Column, Estimate, Table
    from adlm.likelihood import MAX_ENUMERATED

    table_rows: list[list[Cell]] = []
    for text, each in zip(inputs, scores, strict=True):
        text, sign = text.replace("\n", "↵"), "" if each.is_exact else "≤ "
        shown = text if len(text) <= MAX_TEXT_WIDTH else text[: MAX_TEXT_WIDTH - 1] + "…"
        nll = f"{each.nll:.3f} (exact)" if each.is_exact else Estimate(each.nll, each.stderr).format(prefix=sign)
        table_rows.append([shown, each.tokens, nll, f"{sign}{each.ppl:,.1f}", f"{sign}{each.bits_per_byte:.3f}"])
    columns = [Column("text", is_text=True), Column("tokens", is_optional=True)]
    columns += [Column(name) for name in ("nats/token", "perplexity", "bits/byte")]
    print_table(Table(columns, table_rows))
    which = "" if lm.model.config.time_conditioning else f" of more than {MAX_ENUMERATED} tokens"
    kind = "exact" if is_causal else f"≤: upper bound, {draws} noise samples per text{which}"
    status_console().print(f"{lm.name}: {kind}", style="dim", markup=False)
