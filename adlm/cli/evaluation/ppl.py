"""`adlm eval ppl`: held-out likelihood on any text, with its errors and all that it depends on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.output import json_stdout, print_json, status_console

if TYPE_CHECKING:
    from adlm.evaluate.metrics import Bound
    from adlm.evaluate.reading import Reading
    from adlm.text.lm import LM
    from adlm.training.distributed import DistributedContext

COUNTS = ("lineage", "text")
NAMES = {
    "exact": "exact",
    "nelbo": "NELBO, continuous time",
    "discrete_nelbo": "NELBO, {steps} steps",
    "unmasking_exact": "unmasking, {order}: exact",
    "unmasking_bound": "unmasking, {order} order",
}
WIDTH = 100  # of a table that no terminal shows
FEW = 20  # documents or rows that a standard error is hardly to be had from


def ppl(
    model: options.ModelArgument = None,
    data: Annotated[
        str | None,
        typer.Option(help="What `adlm prepare` reads (a file, a folder, a named corpus, the Hub), or what it made."),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="wrapped: one stream cut into rows; documents: one a row, cut. (wrapped)")
    ] = None,
    length: Annotated[int | None, typer.Option(min=3, help="Tokens in a row. (the model's)")] = None,
    split: Annotated[str | None, typer.Option(help="Of data that has splits. (the held-out one)")] = None,
    draws: Annotated[
        int, typer.Option(min=1, help="Noises a row; with 1 their error is not known. (a causal model: none)")
    ] = 4,
    steps: Annotated[
        int | None, typer.Option(min=1, help="The bound of a process of so many steps. (continuous time)")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(help="A second figure, under an order: left_to_right, confidence, margin, entropy, random."),
    ] = None,
    tokens_a_step: Annotated[int | None, typer.Option(min=1, help="Of --order: revealed together. (1)")] = None,
    count: Annotated[
        str, typer.Option(help="lineage: all tokens but padding; text: those that begin and end a text are given.")
    ] = "lineage",
    attend_padding: Annotated[
        bool,
        typer.Option("--attend-padding", help="Padding is read and hidden like text, as the lineage does on LM1B."),
    ] = False,
    limit: Annotated[int | None, typer.Option(min=2, help="Only so many rows.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time; it changes nothing but speed.")] = 32,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same figure.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that tokenize; they change nothing but speed.")] = 1,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Measure perplexity on held-out text: nats per token with their errors, perplexity and bits per byte.

    Of a masked model it is a bound from above (≤), of a causal one the figure itself. Under torchrun the rows are
    shared out.
    """
    with report_errors():
        if data is None:
            raise ValueError("what to measure on is not said: give --data FILE, a folder or the name of a corpus")
        if count not in COUNTS:
            raise ValueError(f"--count is one of {', '.join(COUNTS)}, got {count!r}")
        if tokens_a_step is not None and order is None:
            raise ValueError(f"--tokens-a-step {tokens_a_step} says how an order goes: give --order too")
        if attend_padding and order is not None:
            raise ValueError(f"--order {order} begins with text hidden and padding not: leave --attend-padding out")
        with json_stdout(is_json):
            from adlm.bundled import DEFAULT
            from adlm.evaluate.reading import read
            from adlm.text.lm import load
            from adlm.training.distributed import init_distributed

            with init_distributed(device) as world, shown(world) as on_rows:
                lm = load(model or DEFAULT, device=str(world.device))
                most = lm.model.config.length
                if length is not None and length > most:
                    raise ValueError(f"--length {length} is more than the {most} tokens of {lm.name}")
                check_order(order, lm)
                found = read(
                    data,
                    lm.tokenizer,
                    length or most,
                    rows=manner_of(rows),
                    split=split,
                    workers=workers,
                    limit=limit,
                    on_progress=lambda progress: on_rows("reading", progress.consumed, progress.total or 0),
                )
                answer = measured(
                    lm,
                    found,
                    world,
                    draws=draws,
                    steps=steps,
                    order=order,
                    tokens_a_step=tokens_a_step or 1,
                    count=count,
                    attend_padding=attend_padding,
                    batch=batch,
                    seed=seed,
                    on_rows=on_rows,
                )
                for note in remarks(lm, found, answer) if world.is_main else ():
                    status_console().print(note, style="dim", markup=False)
                if not world.is_main:  # of many processes, one answers
                    return
        if is_json:
            print_json(answer)
            return
        show(answer)


def check_order(order: str | None, lm: LM) -> None:
    """Refuse an order that is none, or a model that has no choice, before anything is read."""
    from adlm.evaluate.unmasking import ORDERS

    if order is not None and order not in ORDERS:
        raise ValueError(f"--order is one of {', '.join(ORDERS)}, got {order!r}")
    if order is not None and lm.row_format.is_causal:
        raise ValueError(f"{lm.name} is causal: it reads from left to right, its nll is exact; leave --order out")


def manner_of(rows: str | None) -> Any:
    """What a row is, if it is told."""
    from adlm.data.prepare import ROW_LAYOUTS

    if rows is not None and rows not in ROW_LAYOUTS:
        raise ValueError(f"--rows is one of {', '.join(MANNERS)}, got {rows!r}")
    return rows


def measured(
    lm: LM,
    found: Reading,
    world: DistributedContext,
    *,
    draws: int,
    seed: int,
    count: str = "lineage",
    steps: int | None = None,
    order: str | None = None,
    tokens_a_step: int = 1,
    attend_padding: bool = False,
    batch: int = 32,
    on_rows: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """The figures of a model on rows that were read, with all that they depend on."""
    from adlm.diffusion.masking import MIN_TIME
    from adlm.evaluate.likelihood import Walk, held_out_bound
    from adlm.evaluate.provenance import provenance
    from adlm.evaluate.unmasking import RANDOM, unmasking_likelihood
    from adlm.evaluate.zeroshot import weights_hash
    from adlm.methods import METHODS

    began, is_causal = time.perf_counter(), lm.row_format.is_causal
    if len(found.rows) < 2:
        remedy = "a smaller --length" if found.settings["rows"] == "wrapped" else "leave --rows documents out"
        raise ValueError(
            f"{found.settings['source']} makes one row of {found.settings['length']} tokens, and an error takes at "
            f"least 2: give more text, or {remedy}"
        )
    score_entropy = METHODS[lm.method].score_entropy
    network, documents = lm.model.fold().to(world.device), len(found.documents.unique())
    walk = Walk(
        batch=batch,
        marks=tuple({lm.tokenizer.bos_id, lm.tokenizer.eos_id} - {None}) if count == "text" else (),  # type: ignore[arg-type]
        documents=found.documents if documents > 1 else None,
        rank=world.rank,
        size=world.world_size,
        total=world.all_reduce_sum,
    )
    try:
        bound = held_out_bound(
            network,
            found.rows,
            batch=batch,
            draws=draws,
            seed=seed,
            steps=steps,
            score_entropy=score_entropy,
            attend_padding=attend_padding,
            marks=walk.marks,
            documents=walk.documents,
            rank=walk.rank,
            size=walk.size,
            total=walk.total,
            on_rows=lambda done, total: on_rows("measuring", done, total),
        )
        kind = "exact" if is_causal else "nelbo" if steps is None else "discrete_nelbo"
        answer = figures(bound, found.bytes) | {"is_bound": not is_causal, "figure": kind}
        if order is not None:
            walk = replace(walk, on_rows=lambda done, total: on_rows("in the order", done, total))
            second = unmasking_likelihood(
                network, found.rows, order, tokens_a_step=tokens_a_step, draws=draws, seed=seed, walk=walk
            )
            is_bound = order == RANDOM
            kind = "unmasking_bound" if is_bound else "unmasking_exact"
            answer["unmasking"] = figures(second, found.bytes) | {"is_bound": is_bound, "figure": kind}
            answer["unmasking"] |= {"order": order, "tokens_a_step": tokens_a_step, "draws": second.draws}
    except FloatingPointError as error:
        raise ValueError(f"{lm.name} has no figure: {error}. Look at its weights, then at those rows") from error
    settings = {"model": lm.name, "method": lm.method, "step": lm.step, "weights_sha256": weights_hash(lm.model)}
    settings |= {"count": count, "attend_padding": attend_padding and not is_causal, "seed": seed}
    settings |= {"draws": bound.draws, "steps": None if is_causal else steps}
    settings |= {} if is_causal else {"schedule": "loglinear", "min_time": 0.0 if steps else MIN_TIME}
    settings |= {"objective": "score_entropy" if score_entropy else "cross_entropy", "precision": "float32"}
    settings |= {"error_over": "documents" if documents > 1 else "rows", "data": found.settings}
    return answer | {
        "rows": len(found.rows),
        "documents": documents,
        "bytes": found.bytes,
        "settings": settings,
        "rows_hash": found.rows_hash,
        "seconds": time.perf_counter() - began,
        "provenance": provenance(world.device) | {"processes": world.world_size},
    }


def remarks(lm: LM, found: Reading, answer: dict[str, Any]) -> Iterator[str]:
    """What a reader of the figure should know of its rows."""
    data, over = found.settings, answer["settings"]["error_over"]
    if answer[over] < FEW:
        yield f"the error is over {answer[over]} {over} only, too few to lean on"
    if lm.row_format.is_framed and data["rows"] == "wrapped" and answer["documents"] > 1:
        yield f"{lm.name} learned from rows of one document each, these are wrapped: --rows documents has such rows"
    if data.get("documents_cut") and data["rows"] == "documents":
        yield (
            f"{data['documents_cut']:,} of {data['documents']:,} documents are longer than a row: what lies behind its "
            f"end, {data['tokens_dropped']:,} tokens, is left out; --rows wrapped has them"
        )


def figures(bound: Bound, size: int) -> dict[str, Any]:
    """A figure by the names that the field has for it."""
    found = {"nll": bound.nll, "ppl": bound.ppl, "se": bound.stderr, "se_noise": bound.noise_stderr}
    return found | {"bits_per_byte": bound.bits_per_byte(size), "tokens": bound.tokens}


@contextmanager
def shown(world: DistributedContext) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the first process's terminal: called with what is done, how far it is, and the whole."""
    console = status_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = not (console.is_terminal and world.is_main)
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        tasks: dict[str, Any] = {}

        def on_rows(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total or None)
            bar.update(tasks[what], completed=done)

        yield on_rows


def show(answer: dict[str, Any]) -> None:
    """A line for each figure, and how to read them."""
    settings, console = answer["settings"], Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    table = Table(box=None, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for name in ("nats/token", "± s.e.", "noise s.e.", "perplexity", "bits/byte", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    second = answer.get("unmasking")
    for each in (answer, *([second] if second else [])):
        sign = "≤ " if each["is_bound"] else ""
        name = NAMES[each["figure"]].format(steps=settings["steps"], order=each.get("order"))
        noise = "?" if each["se_noise"] is None else f"{each['se_noise']:.4f}"
        texts = [f"{sign}{each['nll']:.4f}", f"{each['se']:.4f}", noise, f"{sign}{each['ppl']:,.2f}"]
        table.add_row(name, *texts, f"{sign}{each['bits_per_byte']:.4f}", f"{each['tokens']:,}")
    console.print(table)
    data = settings["data"]
    report_errors = status_console()
    report_errors.print(
        f"{settings['model']} on {data['source']}: {answer['rows']:,} rows of {data['length']} ({data['rows']}), "
        f"errors over {answer['documents'] if settings['error_over'] == 'documents' else answer['rows']:,} "
        f"{settings['error_over']}, rows {answer['rows_hash'][:12]}",
        style="dim",
        markup=False,
    )
    report_errors.print(explained(answer), style="dim", markup=False)


def explained(answer: dict[str, Any]) -> str:
    """How to read the figures."""
    counted = {
        "lineage": "every token but padding counts, those that begin and end a text too (as in the paper)",
        "text": "the tokens that begin and end a text are given and not counted",
    }[answer["settings"]["count"]]
    said = f"Lower is better; {counted}. Two figures compare where tokenizer, rows and this are the same; bits per byte"
    said += " also between tokenizers."
    if answer["is_bound"]:
        said += " ≤ is a bound from above: the model may be better, not worse."
    if answer.get("unmasking") and not answer["unmasking"]["is_bound"]:
        said += " The figure of an order is another model's: of the sampler that decodes so."
    return said
