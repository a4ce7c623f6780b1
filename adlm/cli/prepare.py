"""`adlm prepare`: text to the folder of packed rows that training reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.output import print_json

if TYPE_CHECKING:
    from adlm.data.prepare import PrepareProgress

EVERY = 10.0  # seconds between lines where there is no terminal


def prepare(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A file, a folder, a named corpus, name:PATH, or owner/name[:config] of the Hugging Face Hub."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="gpt2, bert-base-uncased, bytes, characters, a tokenizer.json, or a Hub name. (gpt2)"),
    ] = None,
    length: Annotated[int | None, typer.Option(min=3, help="Tokens in a row. (1024)")] = None,
    train_tokenizer: Annotated[
        int | None, typer.Option(min=258, help="Learn a byte-level BPE of so many tokens, the mask included.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="wrapped: one stream cut into rows; documents: a document to a row. (wrapped)")
    ] = None,
    valid: Annotated[str | None, typer.Option(help="Where the valid split comes from. (the end of SOURCE)")] = None,
    valid_share: Annotated[float, typer.Option(help="Without --valid: the share of the rows; 0 for none.")] = 0.01,
    split: Annotated[str, typer.Option(help="Of SOURCE; perhaps a slice: train[:-1000].")] = "train",
    column: Annotated[str | None, typer.Option(help="Of a table: the column that is the text.")] = None,
    documents: Annotated[
        str, typer.Option(help="Of plain text, what a document is: auto, separator, file, line, blank, every-line.")
    ] = "auto",
    detokenizer: Annotated[str | None, typer.Option(help="A clean-up of benchmark text, or none.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that tokenize. (all cores)")] = None,
    shard_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in a file of rows. (2**25)")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run wrote to --out.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare the checksums of --out with its manifest.")] = False,
    is_json: options.Json = False,
) -> dict[str, Any]:
    """Tokenize text and pack it into rows. A run that was stopped goes on when the same command is given again."""
    console = Console(highlight=False, soft_wrap=True, stderr=is_json)
    began = time.perf_counter()
    with report_errors():
        from adlm.data.prepare import SHARD_TOKENS
        from adlm.data.prepare import prepare as prepare_data
        from adlm.data.shards import MANIFEST, open_data
        from adlm.data.sources import unread_files

        if out is None:
            raise ValueError("where to write is not said: give --out FOLDER")
        if source is None and not check:
            raise ValueError("what to prepare is not said: give a file, a folder or the name of a data set")
        if source is not None:
            is_there = (out / MANIFEST).is_file() and not overwrite
            try:
                with shown(console) as on_progress:
                    prepare_data(
                        source,
                        out,
                        tokenizer=tokenizer,
                        length=length,
                        rows=rows,
                        valid=valid,
                        valid_share=valid_share,
                        split=split,
                        column=column,
                        documents=documents,
                        detokenizer=detokenizer,
                        train_tokenizer=train_tokenizer,
                        workers=workers,
                        shard_tokens=shard_tokens or SHARD_TOKENS,
                        overwrite=overwrite,
                        on_progress=on_progress,
                    )
            except KeyboardInterrupt:
                console.print("stopped; the same command goes on behind the last complete shard")
                raise typer.Exit(130) from None
            done = "was prepared before, nothing to do" if is_there else f"{time.perf_counter() - began:.1f} s"
            console.print(f"{out}: {done}", markup=False)
            if Path(source).is_dir() and (unread := unread_files(Path(source))):
                names = ", ".join(unread[:5]) + (f" and {len(unread) - 5} more" if len(unread) > 5 else "")
                console.print(f"left out, because their names do not say that they hold text: {names}", markup=False)
        manifest = open_data(out, verify=check).manifest
        if check:
            console.print(f"{out}: every checksum is right", markup=False)
    summarize(console, manifest, out)
    if is_json:
        counts = ("rows", "tokens", "documents", "bytes")
        splits = {name: {key: found[key] for key in counts} for name, found in manifest["splits"].items()}
        rest = {name: manifest[name] for name in ("tokenizer", "length", "rows", "settings_sha256")}
        print_json({"folder": out, "seconds": time.perf_counter() - began, "splits": splits} | rest)
    return manifest


@contextmanager
def shown(console: Console) -> Iterator[Callable[[PrepareProgress], None]]:
    """A bar on a terminal, elsewhere a line now and then."""
    if not console.is_terminal:
        last = time.perf_counter()

        def line(progress: PrepareProgress) -> None:
            nonlocal last
            if time.perf_counter() - last >= EVERY:
                last = time.perf_counter()
                console.print(said(progress), markup=False)

        yield line
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import PrepareProgress as Bar

    columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    with Bar(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def draw(progress: PrepareProgress) -> None:
            if progress.split not in tasks:
                tasks[progress.split] = bar.add_task(progress.split, total=progress.total)
            bar.update(tasks[progress.split], completed=progress.consumed, description=said(progress))

        yield draw


def said(progress: PrepareProgress) -> str:
    """How far, how fast, how long still."""
    share = f"{progress.consumed / progress.total:4.0%}" if progress.total else f"{progress.bytes / 1e6:,.0f} MB"
    speed = progress.bytes / 1e6 / max(progress.seconds, 1e-9)
    left = ""
    if progress.total and progress.consumed:
        left = f", {progress.seconds * max(0, progress.total / progress.consumed - 1):.0f} s left"
    return f"{progress.split} {share}  {progress.tokens:,} tokens, {speed:.1f} MB/s{left}"


def size_of(text: int) -> str:
    return f"{text / 1e6:,.1f} MB" if text >= 1e6 else f"{text / 1e3:,.1f} KB"


def summarize(console: Console, manifest: dict[str, Any], out: Path) -> None:
    table = Table()
    for column in ("split", "rows", "tokens", "documents", "text"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name, found in manifest["splits"].items():
        numbers = [f"{found[key]:,}" for key in ("rows", "tokens", "documents")]
        table.add_row(name, *numbers, size_of(found["bytes"]))
    console.print(table)
    tokenizer = manifest["tokenizer"]
    asked = manifest["settings"]["tokenizer"].get("trained")
    short = asked is not None and asked > tokenizer["vocab_size"]
    console.print(
        f"tokenizer {tokenizer['name']}, vocabulary {tokenizer['vocab_size']:,}"
        + (f" ({asked:,} were asked for, the text has no more pairs to merge)" if short else "")
        + f", mask id {tokenizer['mask_id']:,}, rows of {manifest['length']:,} tokens",
        markup=False,
    )
    if label := manifest["source"].get("stand_in"):
        console.print(f"a stand-in for the data set of that name: {label}", markup=False)
    console.print(f"next: adlm train recipes/cpu-nano.yaml data.path={out} folder=RUN", markup=False)
