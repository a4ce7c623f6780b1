"""`adlm eval domains`: one model on several kinds of text."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adlm.cli import options
from adlm.cli.answers import answering, notes, print_json
from adlm.cli.errors import told
from adlm.cli.evaluation.lists import bar


def domains(
    model: options.ModelArgument = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=DATA", help="A kind of text and what `adlm prepare` reads; repeatable."),
    ] = None,
    rows: Annotated[str | None, typer.Option(help="wrapped, documents (one a row, cut). (wrapped)")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Noises a row. (a causal model: none)")] = 4,
    limit: Annotated[int | None, typer.Option(min=2, help="Only so many rows of each.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time; it changes nothing but speed.")] = 32,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Measure one model on several kinds of text, such as prose, science, news and code, in one table."""
    with told():
        sources = named_sources(given or [])
        if rows not in (None, "wrapped", "documents"):
            raise ValueError(f"--rows is wrapped or documents, got {rows!r}")
        manner: Any = rows
        with answering(is_json):
            from adlm.bundled import DEFAULT
            from adlm.evaluate.provenance import provenance
            from adlm.evaluate.zeroshot import weights_hash
            from adlm.studies.domains import domain_bounds
            from adlm.text.lm import load

            lm = load(model or DEFAULT, device=device)
            with bar("reading") as tell:
                found = list(
                    domain_bounds(
                        lm,
                        sources,
                        draws=draws,
                        seed=seed,
                        rows=manner,
                        limit=limit,
                        batch=batch,
                        on_rows=lambda name, done, total: tell(description=name, completed=done, total=total),
                    )
                )
            settings: dict[str, Any] = {"model": lm.name, "method": lm.method, "step": lm.step, "seed": seed}
            settings |= {"weights_sha256": weights_hash(lm.model)}
            settings |= {"draws": 1 if lm.form.is_causal else draws, "limit": limit, "rows": rows}
            answer = {"domains": found, "settings": settings, "provenance": provenance(lm.device)}
        if is_json:
            print_json(answer)
            return
        show(found)


def named_sources(given: list[str]) -> dict[str, str]:
    """NAME=DATA as the options have them."""
    if not given:
        raise ValueError("there is nothing to measure on: give --set prose=FILE --set code=FILE …")
    found: dict[str, str] = {}
    for each in given:
        name, equals, source = each.partition("=")
        if not (name and equals and source):
            raise ValueError(f"--set {each!r} is not NAME=DATA, such as --set prose=FILE")
        if name in found:
            raise ValueError(f"--set names {name} twice: leave one of them")
        found[name] = source
    return found


def show(found: list[dict[str, Any]]) -> None:
    """A line for each domain, and how to read it."""
    table = Table(box=None, pad_edge=False)
    table.add_column("domain", no_wrap=True)
    for name in ("bits/byte", "nats/token", "perplexity", "tokens", "rows' hash"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        sign = "≤ " if row["is_bound"] else ""
        bits = f"{sign}{row['bits_per_byte']:.4f} ± {row['bits_per_byte_se']:.4f}"
        nll = f"{sign}{row['nll']:.4f} ± {row['se']:.4f}"
        table.add_row(
            Text(row["domain"]), bits, nll, f"{sign}{row['ppl']:,.2f}", f"{row['tokens']:,}", row["rows_hash"][:8]
        )
    Console(highlight=False, width=110).print(table)
    notes().print(
        "Bits per byte compare between domains: nats per token do not, a token is more or less text in each. ± is a "
        "standard error; ≤ is a bound from above.",
        style="dim",
        markup=False,
    )
