"""`adlm prepare`: turn text into the folder of packed rows that training reads."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal as format_bytes

from adlm.cli import options
from adlm.cli.output import print_json, print_table, progress_bar
from adlm.view.console import SafeConsole

SOURCE_HELP = "File, folder, named corpus, name:PATH, or owner/name[:config] of the Hugging Face Hub. [required]"
GLOB_HELP = "Pattern of the files of a folder to read, such as '*.md'; may be repeated. [default: text and tables]"
ROWS_HELP = "wrapped (one stream cut into rows) or documents (one per row). [default: wrapped]"
TOKENIZER_HELP = "gpt2, bert-base-uncased, bytes, characters, a tokenizer.json, or a Hub name. [default: gpt2]"


def prepare(
    source: Annotated[str | None, typer.Argument(help=SOURCE_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder. [required]")] = None,
    tokenizer: Annotated[str | None, typer.Option(help=TOKENIZER_HELP)] = None,
    length: Annotated[int | None, typer.Option(min=3, help="Tokens in a row. [default: 1024]")] = None,
    train_tokenizer: Annotated[int | None, typer.Option(min=258, help="Train a BPE of this size, with mask.")] = None,
    rows: Annotated[str | None, typer.Option(help=ROWS_HELP)] = None,
    valid: Annotated[str | None, typer.Option(help="Source of the valid split. [default: the end of SOURCE]")] = None,
    valid_share: Annotated[float, typer.Option(help="Share of the rows for the valid split without --valid.")] = 0.01,
    split: Annotated[str, typer.Option(help="Split of SOURCE, optionally with a slice: train[:-1000].")] = "train",
    column: Annotated[str | None, typer.Option(help="Text column of a table. [default: the only one]")] = None,
    documents: Annotated[str, typer.Option(help="In plain text: auto, file, line, blank or every-line.")] = "auto",
    detokenizer: Annotated[str | None, typer.Option(help="Detokenizer, or none. [default: the corpus's]")] = None,
    glob: Annotated[list[str] | None, typer.Option(help=GLOB_HELP)] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Tokenizing processes. [default: all cores]")] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a shard.")] = 2**25,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace data prepared before in --out.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Verify the checksums of --out.")] = False,
    is_json: options.Json = False,
) -> None:
    """Tokenize text and pack it into rows. Running the same command again resumes a stopped run."""
    settings = dict(locals())
    from adlm.data.prepare import prepare as prepare_data
    from adlm.data.shards import MANIFEST, open_data
    from adlm.data.sources import select_files

    console, began = SafeConsole(soft_wrap=True, stderr=is_json), time.perf_counter()
    if out is None:
        raise ValueError("--out is required: a folder, which may be new")
    if source is None and not check:
        raise ValueError("SOURCE is required: a file, a folder or the name of a dataset")
    if source is not None:
        own = ("source", "out", "check", "is_json", "glob")  # of this command; the others are those of the function
        settings = {name: value for name, value in settings.items() if name not in own} | {"glob": glob or ()}
        is_prepared = (out / MANIFEST).is_file() and not overwrite
        try:
            with progress_bar() as update:
                settings["on_progress"] = lambda now: update(f"{now.split}: bytes", now.consumed, now.total or 0)
                prepare_data(source, out, **settings)
        except KeyboardInterrupt:
            console.print("stopped; running the same command again resumes after the last complete shard")
            raise typer.Exit(130) from None
        done = "already prepared, nothing to do" if is_prepared else f"{time.perf_counter() - began:.1f} s"
        console.print(f"{out}: {done}", markup=False)
        if Path(source).is_dir() and (skipped := select_files(Path(source), glob=glob or ())[1]):
            names = ", ".join(skipped[:5]) + (f" and {len(skipped) - 5:,} more" if len(skipped) > 5 else "")
            console.print(f"skipped {len(skipped):,} files (--glob selects others): {names}", markup=False)
    manifest = open_data(out, verify=check).manifest
    if check:
        console.print(f"{out}: all checksums are correct", markup=False)
    print_summary(console, manifest, out)
    if is_json:
        counts = ("rows", "tokens", "documents", "bytes")
        splits = {name: {key: split[key] for key in counts} for name, split in manifest["splits"].items()}
        rest = {name: manifest[name] for name in ("tokenizer", "length", "rows", "settings_sha256")}
        print_json({"folder": out, "seconds": time.perf_counter() - began, "splits": splits} | rest)


def print_summary(console: SafeConsole, manifest: dict[str, Any], out: Path) -> None:
    """Print a table of the splits, the tokenizer and the next command."""
    from adlm.evaluate.results import Column, Table

    counts = ("rows", "tokens", "documents")
    columns = [Column("split", is_text=True), *(Column(name) for name in (*counts, "text"))]
    splits = manifest["splits"].items()
    rows = [[name, *(split[key] for key in counts), format_bytes(split["bytes"])] for name, split in splits]
    print_table(Table(columns, rows), console)
    tokenizer, trained = manifest["tokenizer"], manifest["settings"]["tokenizer"].get("trained")
    size = f"{tokenizer['vocab_size']:,}"
    if trained is not None and trained > tokenizer["vocab_size"]:
        size += f" (of {trained:,} requested: the text has no more pairs to merge)"
    described = f"tokenizer {tokenizer['name']}, vocabulary {size}, mask id {tokenizer['mask_id']:,}"
    console.print(f"{described}, rows of {manifest['length']:,} tokens", markup=False)
    if label := manifest["source"].get("stand_in"):
        console.print(f"a stand-in for the dataset of that name: {label}", markup=False)
    console.print(f"next: adlm train recipes/cpu-nano.yaml data.path={out} folder=RUN", markup=False)
