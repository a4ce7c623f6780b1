"""`adlm prepare`, `adlm train` and `adlm plot`: pack text into rows, train with a recipe, plot runs."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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

SOURCE_HELP = (
    "File, folder, named corpus, name:PATH, or owner/name[:config] of the Hugging Face Hub. "
    "[required]"
)
GLOB_HELP = (
    "Pattern of the files of a folder to read, such as '*.md'; may be repeated. "
    "[default: text and tables]"
)
ROWS_HELP = "wrapped (one stream cut into rows) or documents (one per row). [default: wrapped]"
TOKENIZER_HELP = (
    "gpt2, bert-base-uncased, bytes, characters, a tokenizer.json, or a Hub name. [default: gpt2]"
)
TRAINED_HELP = "Train a BPE of this size, with mask."
LENGTH_HELP = "Tokens in a row. [default: 1024]"
VALID_HELP = "Source of the valid split. [default: the end of SOURCE]"
SHARE_HELP = "Share of the rows for the valid split without --valid."
SPLIT_HELP = "Split of SOURCE, optionally with a slice: train[:-1000]."
COLUMN_HELP = "Text column of a table. [default: the only one]"
DOCUMENTS_HELP = "In plain text: auto, file, line, blank or every-line."
DETOKENIZER_HELP = "Detokenizer, or none. [default: the corpus's]"
WORKERS_HELP = "Tokenizing processes. [default: all cores]"
OVERWRITE_HELP = "Replace data prepared before in --out."
MAX_NAMES = 5  # of skipped files that are printed


@dataclass(frozen=True)
class PrepareOptions:
    """The options that `adlm.prepare` has as keywords of the same names."""

    tokenizer: Annotated[str | None, typer.Option(help=TOKENIZER_HELP)] = None
    length: Annotated[int | None, typer.Option(min=3, help=LENGTH_HELP)] = None
    train_tokenizer: Annotated[int | None, typer.Option(min=258, help=TRAINED_HELP)] = None
    rows: Annotated[str | None, typer.Option(help=ROWS_HELP)] = None
    valid: Annotated[str | None, typer.Option(help=VALID_HELP)] = None
    valid_share: Annotated[float, typer.Option(help=SHARE_HELP)] = 0.01
    split: Annotated[str, typer.Option(help=SPLIT_HELP)] = "train"
    column: Annotated[str | None, typer.Option(help=COLUMN_HELP)] = None
    documents: Annotated[str, typer.Option(help=DOCUMENTS_HELP)] = "auto"
    detokenizer: Annotated[str | None, typer.Option(help=DETOKENIZER_HELP)] = None
    glob: Annotated[list[str] | None, typer.Option(help=GLOB_HELP)] = None
    workers: Annotated[int | None, typer.Option(min=1, help=WORKERS_HELP)] = None
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a shard.")] = 2**25
    overwrite: Annotated[bool, typer.Option("--overwrite", help=OVERWRITE_HELP)] = False


@options.add_options()
def prepare(
    source: Annotated[str | None, typer.Argument(help=SOURCE_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder. [required]")] = None,
    *,
    settings: PrepareOptions,
    check: Annotated[bool, typer.Option("--check", help="Verify the checksums of --out.")] = False,
    is_json: options.Json = False,
) -> None:
    """Tokenize text and pack it into rows. Running the same command again resumes a stopped run."""
    from adlm.data.shards import open_data

    console = SafeConsole(soft_wrap=True, stderr=is_json)
    began = time.perf_counter()
    if out is None:
        raise ValueError("--out is required: a folder, which may be new")
    if source is not None:
        prepare_source(source, out, settings, console)
    elif not check:
        raise ValueError("SOURCE is required: a file, a folder or the name of a dataset")

    manifest = open_data(out, verify=check).manifest
    if check:
        console.print(f"{out}: all checksums are correct", markup=False)
    print_summary(console, manifest, out)
    if is_json:
        counts = {"rows", "tokens", "documents", "bytes"}
        splits = {name: split.model_dump(include=counts) for name, split in manifest.splits.items()}
        rest = manifest.model_dump(include={"tokenizer", "length", "rows", "settings_sha256"})
        print_json({"folder": out, "seconds": time.perf_counter() - began, "splits": splits} | rest)


def prepare_source(source: str, out: Path, settings: PrepareOptions, console: SafeConsole) -> None:
    """Prepare a folder, and print what was done and what was skipped."""
    from adlm.data.prepare import PrepareProgress
    from adlm.data.prepare import prepare as prepare_data
    from adlm.data.shards import MANIFEST

    began = time.perf_counter()
    is_prepared = (out / MANIFEST).is_file() and not settings.overwrite
    keywords = vars(settings) | {"glob": settings.glob or ()}
    try:
        with progress_bar() as update:

            def show_progress(now: PrepareProgress) -> None:
                update(f"{now.split}: bytes", now.consumed, now.total or 0)

            prepare_data(source, out, on_progress=show_progress, **keywords)
    except KeyboardInterrupt:
        console.print(
            "stopped; running the same command again resumes after the last complete shard"
        )
        raise typer.Exit(130) from None

    seconds = time.perf_counter() - began
    done = "already prepared, nothing to do" if is_prepared else f"{seconds:.1f} s"
    console.print(f"{out}: {done}", markup=False)
    print_skipped(console, Path(source), settings.glob or ())


def print_skipped(console: SafeConsole, source: Path, glob: Sequence[str]) -> None:
    """Print the files of a folder that are not read."""
    from adlm.data.sources import select_files

    if not source.is_dir():
        return
    skipped = select_files(source, glob=glob)[1]
    if not skipped:
        return
    names = ", ".join(skipped[:MAX_NAMES])
    if len(skipped) > MAX_NAMES:
        names += f" and {len(skipped) - MAX_NAMES:,} more"
    shown = f"skipped {len(skipped):,} files (--glob selects others): {names}"
    console.print(shown, markup=False)


def print_summary(console: SafeConsole, manifest: "Manifest", out: Path) -> None:
    """Print a table of the splits, the tokenizer and the next command."""
    from adlm.evaluate.results import Table, TableColumn

    counts = ("rows", "tokens", "documents")
    columns = [TableColumn("split", is_text=True)]
    columns += [TableColumn(name) for name in (*counts, "text")]
    rows = []
    for name, split in manifest.splits.items():
        numbers = [getattr(split, key) for key in counts]
        rows.append([name, *numbers, format_bytes(split.bytes)])
    print_table(Table(columns, rows), console)

    tokenizer = manifest.tokenizer
    trained = manifest.settings.tokenizer.get("trained")
    size = f"{tokenizer.vocab_size:,}"
    if trained is not None and trained > tokenizer.vocab_size:
        size += f" (of {trained:,} requested: the text has no more pairs to merge)"
    described = f"tokenizer {tokenizer.name}, vocabulary {size}, mask id {tokenizer.mask_id:,}"
    console.print(f"{described}, rows of {manifest.length:,} tokens", markup=False)
    label = manifest.source.get("stand_in")
    if label:
        console.print(f"a stand-in for the dataset of that name: {label}", markup=False)
    following = f"next: adlm train recipes/cpu-nano.yaml data.path={out} folder=RUN"
    console.print(following, markup=False)


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

    Exit codes: 0 done; 75 stopped by SIGTERM or SIGUSR1 after saving, start again to resume; 2 a
    setting or a file is wrong; 1 the loss diverged.
    """
    from adlm.training.train import train as run_training

    run = run_or_exit(lambda: run_training(recipe, *(overrides or [])), is_json=is_json)
    if is_json and is_main_process():
        print_json(asdict(run))


def run_or_exit(start: Callable[[], "Run"], *, is_json: bool) -> "Run":
    """Train; a run that a signal stops is saved, and exits with the signal's code."""
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
