"""`adlm eval zeroshot`: perplexity on sets that the model was not trained on, the paper's beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def zeroshot(
    models: Models = None,
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
    workers: Annotated[int, typer.Option(min=1, help="Processes that tokenize; they change nothing but speed.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="A JSON file, written after every set; sets that it holds are not done again.")
    ] = None,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Measure perplexity on Lambada, PTB, WikiText, LM1B, AG News, PubMed and ArXiv, in the form of the lineage.

    Each line has its settings and a hash of its rows; where a set is not what the paper measured on, it says so. Under
    torchrun the rows are shared out.
    """
    with report_errors():
        check_output_files({"--out": out})
        manner = wanted_rows(rows)
        with json_stdout(is_json):
            from adlm.evaluate import zeroshot as suite
            from adlm.training.distributed import init_distributed

            names = list(dict.fromkeys(suite.find_set(name) for each in sets or [] for name in each.split(",")))
            places = {name: Path(place) for name, place in pairs("--set", given or [], suite.find_set).items()}
            labels = pairs("--stand-in", stand_in or [], suite.find_set)
            names = names or (list(suite.SETS) if data_dir or not places else list(places))
            if unasked := [name for name in {**places, **labels} if name not in names]:
                raise ValueError(f"{unasked[0]} is described and not asked for: name it among --sets too")
            with init_distributed(device) as world:
                subjects = subjects_of(models, world, draws=draws, seed=seed, length=length)
                here = suite.located(names, folder=data_dir, given=places, skip_missing=skip_missing)
                # As the first process has it: one that has other sets would wait for the others for ever.
                found, missing = world.all_gather({"located": here})[0]["located"]
                if not found:
                    raise ValueError(f"none of the sets is there: {'; '.join(missing.values())}")
                how = {"rows": manner, "limit": limit, "workers": workers, "stand_ins": labels}
                answer = measured(
                    partial(suite.zeroshot, subjects, found, **how),
                    subjects,
                    world,
                    kind="set",
                    batch=batch,
                    out=out,
                    settings={"draws": draws, "seed": seed, "length": length, "rows": rows, "limit": limit},
                    missing=missing,
                )
                if not world.is_main:  # of many processes, one answers
                    return
        if is_json:
            print_json(answer)
            return
        show(answer)


def pairs(option: str, given: Sequence[str], find: Callable[[str], str]) -> dict[str, str]:
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


def show(answer: Mapping[str, Any]) -> None:
    """The table, what it says and what it does not."""
    console, lines = screen(), answer["sets"]
    console.print(tabled(lines, has_models=len(answer["models"]) > 1))
    for said in remarks(lines, "set"):
        console.print(said, style="dim", markup=False, soft_wrap=True)
    for reason in answer["missing"].values():
        console.print(f"missing: {reason}", style="yellow", markup=False, soft_wrap=True)
    bound = " ≤ is a bound from above." if any(line["is_bound"] for line in lines) else ""
    beside = (
        " The paper's models were trained on 524B tokens of OpenWebText; its perplexities stand in brackets where ours "
        "are not on the same rows, for the reasons given."
    )
    beside = beside if any(line["paper"] for line in lines) else ""
    status_console().print(
        f"Nats per token with their standard error, and perplexity.{bound}{beside} Perplexity is per token, and tokens "
        "are the tokenizer's own: bits per byte compare across tokenizers.",
        style="dim",
        markup=False,
    )


def tabled(lines: Sequence[Mapping[str, Any]], *, has_models: bool) -> Table:
    """A line for each set and model, the paper's figures at its end."""
    from adlm.evaluate.zeroshot import PAPER

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("set", "model") if has_models else ("set",):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "nats/token", "ppl", "bits/byte"):
        table.add_column(name, justify="right", no_wrap=True)
    # In a narrow terminal these are folded, and no figure is cut.
    table.add_column("rows' hash", justify="right", overflow="fold", min_width=4)
    table.add_column(f"paper: {'/'.join(PAPER)}", justify="right", overflow="fold", min_width=7)
    for line in lines:
        sign = "≤ " if line["is_bound"] else ""
        figures = [f"{line['tokens']:,}", f"{sign}{line['nll']:.3f} ± {line['se']:.3f}", f"{sign}{line['ppl']:,.2f}"]
        figures += [f"{sign}{line['bits_per_byte']:.3f}", line["rows_hash"][:8]]
        title = [Text(line["set"] + ("*" if line["label"] else "")), *([Text(name_of(line))] if has_models else [])]
        table.add_row(*title, *figures, theirs(line["paper"], bool(line["differs"])))
    return table


def theirs(paper: Mapping[str, float] | None, differs: bool) -> str:
    """The paper's figures, in brackets where ours is not on the same rows, and none beside a stand-in."""
    from adlm.evaluate.zeroshot import PAPER

    if paper is None:
        return "* stand-in"
    figures = "/".join(f"{paper[name]:.2f}" for name in PAPER)
    return f"({figures})" if differs else figures
