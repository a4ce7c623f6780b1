"""`adlm eval zeroshot`: perplexity on sets that the model was not trained on, the paper's beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from adlm.cli import options
from adlm.cli.answers import answering, check_files, notes, plain, print_json
from adlm.cli.errors import told

FORMAT = 1  # of the file that --out writes
FEW = 20  # documents or rows that a standard error is hardly to be had from
WIDTH = 100  # of a table that no terminal shows


def zeroshot(
    model: options.ModelArgument = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(help="lambada, ptb, wikitext2, wikitext103, lm1b, ag_news, pubmed, arxiv; repeatable. (all)"),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="A folder with a folder for each set, in place of the Hugging Face Hub.")
    ] = None,
    given: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=PATH", help="Where one set lies; repeatable.")
    ] = None,
    stand_in: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=WORDS", help="Label a set whose files are something else; repeatable."),
    ] = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="List sets that are not there, and go on without them.")
    ] = False,
    length: Annotated[int | None, typer.Option(min=3, help="Tokens in a row. (the model's; the paper: 1024)")] = None,
    rows: Annotated[
        str | None, typer.Option(help="wrapped, documents (a document to a row, cut). (as the lineage: wrapped)")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Noises a row; one does not tell its error. (causal: none)")] = 2,
    limit: Annotated[int | None, typer.Option(min=2, help="Only so many rows of each set.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time; it changes nothing but speed.")] = 32,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same figures.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that tokenise; they change nothing but speed.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="A JSON file, written after every set; sets that it holds are not done again.")
    ] = None,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Measure perplexity on Lambada, PTB, WikiText, LM1B, AG News, PubMed and ArXiv, in the form of the lineage.

    Each line has its settings and a hash of its rows; where a set is not what the paper measured on, it says so.
    """
    with told():
        check_files({"--out": out})
        with answering(is_json):
            from adlm.bundled import DEFAULT
            from adlm.evaluate import zeroshot as suite
            from adlm.evaluate.provenance import provenance
            from adlm.methods import METHODS
            from adlm.text.lm import load

            manner = wanted_rows(rows)
            names = list(dict.fromkeys(suite.find_set(name) for each in sets or [] for name in each.split(",")))
            places = {name: Path(place) for name, place in pairs("--set", given or [], suite.find_set).items()}
            labels = pairs("--stand-in", stand_in or [], suite.find_set)
            names = names or (list(suite.SETS) if data_dir or not places else list(places))
            if unasked := [name for name in {**places, **labels} if name not in names]:
                raise ValueError(f"{unasked[0]} is described and not asked for: name it among --sets too")
            lm = load(model or DEFAULT, device=device)
            length = wanted_length(length, lm.model.config.length, lm.name)
            is_causal = lm.form.is_causal
            settings = suite.Settings(
                lm.name, lm.method, suite.weights_hash(lm.model), 1 if is_causal else draws, 0 if is_causal else seed
            )
            known = recalled(out, settings.as_dict())
            found, missing = suite.located(names, folder=data_dir, given=places, skip_missing=skip_missing)
            if not found:
                raise ValueError(f"none of the sets is there: {'; '.join(missing.values())}")
            answer: dict[str, Any] = {"format": FORMAT, "model": lm.name, "method": lm.method}
            answer |= {"settings": settings.as_dict() | {"length": length, "rows": rows, "limit": limit}}
            answer |= {"provenance": provenance(lm.device), "missing": missing, "sets": []}
            with shown() as (on_set, on_rows):
                for row, is_new in suite.zeroshot(
                    lm.model.to(lm.device),
                    lm.tokenizer,
                    found,
                    settings,
                    length=length,
                    rows=manner,
                    limit=limit,
                    batch=batch,
                    workers=workers,
                    score_entropy=METHODS[lm.method].score_entropy,
                    stand_ins=labels,
                    known=known,
                    on_set=on_set,
                    on_rows=on_rows,
                ):
                    answer["sets"].append(row)
                    known[row["set"]] = row
                    if out:
                        write(out, answer | {"sets": list(known.values())})
                    said = "measured" if is_new else f"known from {out}, not done again"
                    notes().print(f"{row['set']}: {said}", style="dim", markup=False)
        if is_json:
            print_json(answer)
            return
        show(answer)


@contextmanager
def shown() -> Iterator[tuple[Callable[[str, str], None], Callable[[int, int], None]]]:
    """A bar on a terminal: called with a set and what is done with it, and with the rows done and in all."""
    console = notes()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading …", total=None)
        yield (
            lambda name, what: bar.reset(task, total=None, description=f"{name}: {what}"),
            lambda done, total: bar.update(task, completed=done, total=total),
        )


def pairs(option: str, given: Sequence[str], find: Any) -> dict[str, str]:
    """NAME=VALUE as the options have them, by the sets' names."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not value:
            raise ValueError(f"{option} {each!r} is not NAME=VALUE, such as {option} ptb=…")
        if (known := find(name)) in found:
            raise ValueError(f"{option} names {known} twice: leave one of them")
        found[known] = value
    return found


def wanted_rows(rows: str | None) -> Any:
    """What a row is, if it is told."""
    if rows not in (None, "wrapped", "documents"):
        raise ValueError(f"--rows is wrapped or documents, got {rows!r}")
    return rows


def wanted_length(length: int | None, most: int, name: str) -> int:
    """The rows' length, which is the model's unless a shorter one is told."""
    if length is not None and length > most:
        raise ValueError(f"--length {length} is more than the {most} tokens of {name}: give at most {most}")
    return length or most


def recalled(out: Path | None, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The lines of an earlier run of the same model; a file of anything else is not written over."""
    if out is None or not out.exists():
        return {}
    try:
        found = json.loads(out.read_text("utf-8"))
        lines = {row["set"]: row for row in found["sets"]} if found["format"] == FORMAT else None
        said = dict(found["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--out {out} is there and is no file of this command: give another name") from error
    if lines is None:
        raise ValueError(f"--out {out} has format {found['format']!r}, this version writes {FORMAT}: give another name")
    for key, value in settings.items():
        there = said.get(key)
        if key != "model" and there != value:
            raise ValueError(
                f"--out {out} holds figures with {key} {there!r:.20}, and {value!r:.20} is asked for: give another name"
            )
    return lines


def write(out: Path, answer: Mapping[str, Any]) -> None:
    """The file, whole or as it was before."""
    from adlm.data.shards import write_safely

    out.parent.mkdir(parents=True, exist_ok=True)
    write_safely(out, (json.dumps(plain(answer), indent=1, ensure_ascii=False) + "\n").encode("utf-8"))


def show(answer: Mapping[str, Any]) -> None:
    """The table, what it says and what it does not."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(tabled(answer["sets"]))
    reasons: dict[str, list[str]] = {}
    for row in answer["sets"]:
        for reason in row["differs"]:
            reasons.setdefault(reason, []).append(row["set"])
    for reason, names in reasons.items():
        whose = "all" if len(names) == len(answer["sets"]) else ", ".join(names)
        console.print(f"{whose}: {reason}", style="dim", markup=False, soft_wrap=True)
    for row in answer["sets"]:
        if row["error_units"] < FEW:
            few = f"the error is over {row['error_units']} {row['error_over']} only, too few to lean on"
            console.print(f"{row['set']}: {few}", style="dim", markup=False, soft_wrap=True)
    for reason in answer["missing"].values():
        console.print(f"missing: {reason}", style="yellow", markup=False, soft_wrap=True)
    kind = "bounds from above" if any(row["is_bound"] for row in answer["sets"]) else "exact"
    notes().print(
        f"{answer['model']}: nats per token with their standard error, and perplexity: {kind}. The paper's models were "
        "trained on 524B tokens of OpenWebText; its figure in brackets is not comparable with ours, for the reasons "
        "given. Perplexity is per token, and tokens are the tokenizer's own: bits per byte compare across tokenizers.",
        style="dim",
        markup=False,
    )


def tabled(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each set, the paper's figures at its end."""
    from adlm.evaluate.zeroshot import PAPER

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("set", no_wrap=True)
    for name in ("tokens", "nats/token", "ppl", "bits/byte", "rows' hash", f"paper: {'/'.join(PAPER)}"):
        table.add_column(name, justify="right", no_wrap=name != "rows' hash" and not name.startswith("paper"))
    for row in rows:
        figures = [f"{row['tokens']:,}", f"{row['nll']:.3f} ± {row['se']:.3f}", f"{row['ppl']:,.2f}"]
        figures += [f"{row['bits_per_byte']:.3f}", row["rows_hash"][:8]]
        title = Text(row["set"] + ("*" if row["label"] else ""))
        table.add_row(title, *figures, theirs(row["paper"], bool(row["differs"])))
    return table


def theirs(paper: Mapping[str, float] | None, differs: bool) -> str:
    """The paper's figures, in brackets where ours is not on the same rows, and none beside a stand-in."""
    from adlm.evaluate.zeroshot import PAPER

    if paper is None:
        return "* stand-in"
    figures = "/".join(f"{paper[name]:.2f}" for name in PAPER)
    return f"({figures})" if differs else figures
