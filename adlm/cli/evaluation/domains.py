"""`adlm eval domains`: models on several kinds of text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.evaluation.table import Models, measured, name_of, remarks, screen, subjects_of, wanted_rows
from adlm.cli.output import check_output_files, json_stdout, print_json, status_console


def domains(
    models: Models = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=DATA", help="A kind of text and what `adlm prepare` reads; repeatable."),
    ] = None,
    rows: Annotated[str | None, typer.Option(help="wrapped, documents (one a row, cut). (wrapped)")] = None,
    length: Annotated[int | None, typer.Option(min=3, help="Tokens in a row. (the model's)")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Noises a row. (a causal model: none)")] = 4,
    limit: Annotated[int | None, typer.Option(min=2, help="Only so many rows of each.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time; it changes nothing but speed.")] = 32,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same figures.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that tokenize; they change nothing but speed.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="A JSON file, written after every line; lines that it holds are not done again.")
    ] = None,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Measure models on several kinds of text, such as prose, science, news and code, in one table.

    Give several models to compare them. Under torchrun the rows are shared out.
    """
    with report_errors():
        check_output_files({"--out": out})
        sources = named_sources(given or [])
        manner = wanted_rows(rows)
        with json_stdout(is_json):
            from adlm.studies.domains import domain_bounds
            from adlm.training.distributed import init_distributed

            with init_distributed(device) as world:
                subjects = subjects_of(models, world, draws=draws, seed=seed, length=length)
                how = {"rows": manner, "limit": limit}
                answer = measured(
                    partial(domain_bounds, subjects, sources, **how, workers=workers),
                    subjects,
                    world,
                    kind="domain",
                    batch=batch,
                    out=out,
                    settings={"draws": draws, "seed": seed, "length": length, **how},
                )
                if not world.is_main:  # of many processes, one answers
                    return
        if is_json:
            print_json(answer)
            return
        show(answer)


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


def show(answer: Mapping[str, Any]) -> None:
    """A line for each domain and model, and how to read it."""
    console, lines, has_models = screen(), answer["domains"], len(answer["models"]) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("domain", "model") if has_models else ("domain",):
        table.add_column(name, no_wrap=True)
    for name in ("bits/byte", "nats/token", "ppl", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rows' hash", justify="right", overflow="fold", min_width=4)  # folded in a narrow terminal
    for line in lines:
        sign = "≤ " if line["is_bound"] else ""
        title = [Text(line["domain"]), *([Text(name_of(line))] if has_models else [])]
        bits = f"{sign}{line['bits_per_byte']:.4f} ± {line['bits_per_byte_se']:.4f}"
        nll = f"{sign}{line['nll']:.4f} ± {line['se']:.4f}"
        table.add_row(*title, bits, nll, f"{sign}{line['ppl']:,.2f}", f"{line['tokens']:,}", line["rows_hash"][:8])
    console.print(table)
    for said in remarks(lines, "domain"):
        console.print(said, style="dim", markup=False, soft_wrap=True)
    status_console().print(
        "Bits per byte compare between domains: nats per token do not, a token is more or less text in each. ± is a "
        "standard error; ≤ is a bound from above.",
        style="dim",
        markup=False,
    )
