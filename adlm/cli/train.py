"""`adlm prepare`, `adlm train` and `adlm plot`: turn text into packed rows, train with a recipe, and plot runs."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal as format_bytes

from adlm.cli import options
from adlm.cli.output import (
    check_output_files,
    json_stdout,
    print_json,
    print_table,
    progress_bar,
    status_console,
)
from adlm.view.console import SafeConsole

if TYPE_CHECKING:
    from adlm.data.shards import Manifest
    from adlm.training.train import Run

SOURCE_HELP = "File, folder, named corpus, name:PATH, or owner/name[:config] of the Hugging Face Hub. [required]"
GLOB_HELP = "Pattern of the files of a folder to read, such as '*.md'; may be repeated. [default: text and tables]"
ROWS_HELP = "wrapped (one stream cut into rows) or documents (one per row). [default: wrapped]"
TOKENIZER_HELP = (
    "gpt2, bert-base-uncased, bytes, characters, a tokenizer.json, or a Hub name. [default: gpt2]"
)


def prepare(
    source: Annotated[str | None, typer.Argument(help=SOURCE_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder. [required]")] = None,
    tokenizer: Annotated[str | None, typer.Option(help=TOKENIZER_HELP)] = None,
    length: Annotated[
        int | None, typer.Option(min=3, help="Tokens in a row. [default: 1024]")
    ] = None,
    train_tokenizer: Annotated[
        int | None, typer.Option(min=258, help="Train a BPE of this size, with mask.")
    ] = None,
    rows: Annotated[str | None, typer.Option(help=ROWS_HELP)] = None,
    valid: Annotated[
        str | None, typer.Option(help="Source of the valid split. [default: the end of SOURCE]")
    ] = None,
    valid_share: Annotated[
        float, typer.Option(help="Share of the rows for the valid split without --valid.")
    ] = 0.01,
    split: Annotated[
        str, typer.Option(help="Split of SOURCE, optionally with a slice: train[:-1000].")
    ] = "train",
    column: Annotated[
        str | None, typer.Option(help="Text column of a table. [default: the only one]")
    ] = None,
    documents: Annotated[
        str, typer.Option(help="In plain text: auto, file, line, blank or every-line.")
    ] = "auto",
    detokenizer: Annotated[
        str | None, typer.Option(help="Detokenizer, or none. [default: the corpus's]")
    ] = None,
    glob: Annotated[list[str] | None, typer.Option(help=GLOB_HELP)] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Tokenizing processes. [default: all cores]")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a shard.")] = 2**25,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace data prepared before in --out.")
    ] = False,
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
        own = (
            "source",
            "out",
            "check",
            "is_json",
            "glob",
        )  # of this command; the others are those of the function
        settings = {name: value for name, value in settings.items() if name not in own} | {
            "glob": glob or ()
        }
        is_prepared = (out / MANIFEST).is_file() and not overwrite
        try:
            with progress_bar() as update:
                settings["on_progress"] = lambda now: update(
                    f"{now.split}: bytes", now.consumed, now.total or 0
                )
                prepare_data(source, out, **settings)
        except KeyboardInterrupt:
            console.print(
                "stopped; running the same command again resumes after the last complete shard"
            )
            raise typer.Exit(130) from None
        done = (
            "already prepared, nothing to do"
            if is_prepared
            else f"{time.perf_counter() - began:.1f} s"
        )
        console.print(f"{out}: {done}", markup=False)
        if Path(source).is_dir() and (skipped := select_files(Path(source), glob=glob or ())[1]):
            names = ", ".join(skipped[:5]) + (
                f" and {len(skipped) - 5:,} more" if len(skipped) > 5 else ""
            )
            console.print(
                f"skipped {len(skipped):,} files (--glob selects others): {names}", markup=False
            )
    manifest = open_data(out, verify=check).manifest
    if check:
        console.print(f"{out}: all checksums are correct", markup=False)
    print_summary(console, manifest, out)
    if is_json:
        counts = {"rows", "tokens", "documents", "bytes"}
        splits = {name: split.model_dump(include=counts) for name, split in manifest.splits.items()}
        rest = manifest.model_dump(include={"tokenizer", "length", "rows", "settings_sha256"})
        print_json({"folder": out, "seconds": time.perf_counter() - began, "splits": splits} | rest)


def print_summary(console: SafeConsole, manifest: "Manifest", out: Path) -> None:
    """Print a table of the splits, the tokenizer and the next command."""
    from adlm.evaluate.results import Table, TableColumn

    counts = ("rows", "tokens", "documents")
    columns = [
        TableColumn("split", is_text=True),
        *(TableColumn(name) for name in (*counts, "text")),
    ]
    splits = manifest.splits.items()
    rows = [
        [name, *(getattr(split, key) for key in counts), format_bytes(split.bytes)]
        for name, split in splits
    ]
    print_table(Table(columns, rows), console)
    tokenizer, trained = manifest.tokenizer, manifest.settings.tokenizer.get("trained")
    size = f"{tokenizer.vocab_size:,}"
    if trained is not None and trained > tokenizer.vocab_size:
        size += f" (of {trained:,} requested: the text has no more pairs to merge)"
    described = f"tokenizer {tokenizer.name}, vocabulary {size}, mask id {tokenizer.mask_id:,}"
    console.print(f"{described}, rows of {manifest.length:,} tokens", markup=False)
    if label := manifest.source.get("stand_in"):
        console.print(f"a stand-in for the dataset of that name: {label}", markup=False)
    console.print(
        f"next: adlm train recipes/cpu-nano.yaml data.path={out} folder=RUN", markup=False
    )


def train(
    recipe: Annotated[
        str, typer.Argument(help="YAML file, or name of a bundled recipe (cpu-nano, …).")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value: data.path=DATA folder=RUN …")
    ] = None,
    is_json: options.Json = False,
) -> None:
    """Train a model on prepared data. Running the same command again resumes a stopped run.

    Exit codes: 0 done; 75 stopped by SIGTERM or SIGUSR1 after saving, start again to resume; 2 a setting or a file is
    wrong; 1 the loss diverged.
    """
    from adlm.training.train import train as run_training

    run = run_or_exit(lambda: run_training(recipe, *(overrides or [])), is_json=is_json)
    if is_json and is_main_process():
        print_json(asdict(run))


def run_or_exit(start: Callable[[], "Run"], *, is_json: bool) -> "Run":
    """Train; where a signal stops the run, print that it is saved and exit with the signal's code."""
    from adlm.errors import Preempted

    try:
        with json_stdout(is_json):
            return start()
    except Preempted as stopped:
        status_console().print(str(stopped), markup=False)
        raise typer.Exit(stopped.exit_code) from stopped


def is_main_process() -> bool:
    """Return whether this is the one of torchrun's processes that prints results."""
    return os.environ.get("RANK", "0") == "0"


def plot(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; several are drawn into one figure.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Output .png, .svg or .pdf. [default: RUN/plots/run.png]")
    ] = None,
    x: Annotated[str, typer.Option(help="Horizontal axis: step or tokens.")] = "step",
    is_json: options.Json = False,
) -> None:
    """Plot runs: likelihood, learning rate and γ, throughput."""
    from adlm.evaluate.plots import build_runs_table, plot_runs, read_run

    check_output_files({"--out": out})
    with json_stdout(is_json):
        curves = [read_run(folder) for folder in runs]
        path = out or runs[0] / "plots" / "run.png"
        is_new = not path.parent.is_dir()
        plot_runs(curves, path, x=x)
        if is_new:
            status_console().print(f"created folder {path.parent}", style="dim", markup=False)
    if is_json:
        print_json(
            {"figure": path, "runs": [{"run": run.folder} | run.summarize() for run in curves]}
        )
    else:
        print_table(build_runs_table(curves))
        SafeConsole(soft_wrap=True).print(str(path), markup=False)
