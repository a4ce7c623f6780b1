"""`adlm eval frontier`: quality against evaluations, time and entropy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.evaluation.lists import bar, check_folder, save_json, values_of
from adlm.cli.output import json_stdout, print_json, status_console

if TYPE_CHECKING:
    from adlm.studies.frontier import Point
    from adlm.studies.writing import TextFigures

WIDEST = 1000  # of a table, and of one that no terminal shows
EXPENDABLE = ("distinct-2", "repeated-4", "tokens", "s/text")  # what a narrow terminal goes without, one after another
READ = (
    "★: no other point has as few evaluations (NFE), as low a Gen-PPL and as high an entropy (up to the held-out "
    "text's) and is better in one of them. A low Gen-PPL at a low entropy is repetition, no quality. ± is a standard "
    "error over texts; of seconds, the standard deviation between timings. Entropy grows with the tokens in a text: a "
    "model that ends texts early has less of it."
)


def frontier(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help=options.MODEL_HELP, autocompletion=options.complete_model),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Whose Gen-PPL: a folder, a GGUF file, a package, a Hub name. (entropy alone)")
    ] = None,
    reference: Annotated[str | None, typer.Option(help="Held-out text, measured like the samples.")] = None,
    samplers: Annotated[
        str, typer.Option(help="With commas; a causal model goes from left to right.")
    ] = "ancestral,remask_loop,confidence",
    steps: Annotated[str, typer.Option(help="Of the samplers that have any, with commas.")] = "16,32,64,128",
    temperatures: Annotated[str, typer.Option(help="With commas.")] = "1.0",
    top_p: Annotated[str, typer.Option(help="With commas.")] = "1.0,0.9",
    n: Annotated[int, typer.Option(min=2, help="Texts for every point.")] = 64,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a text.")] = 128,
    seed: options.Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="Texts at a time: time depends on it, texts do not.")] = 16,
    repeats: Annotated[int, typer.Option(min=2, help="Timings of a point at least.")] = 3,
    window: Annotated[int | None, typer.Option(min=2, help="Judge long texts in windows of so many tokens.")] = None,
    judge_batch: Annotated[int, typer.Option(min=1, help="Texts judged at once, at most; changes no figure.")] = 32,
    device: options.Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="A folder: every point as it is done, figure, JSON. The same command goes on.")
    ] = None,
    is_json: options.Json = False,
) -> None:
    """Measure ways of writing: Gen-PPL and entropy over samplers, steps, temperatures and nuclei, against NFE and time.

    Give several models to compare them on one machine in one run.
    """
    with report_errors():
        check_folder("--out", out)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("time is that of one process on one machine: start `adlm eval frontier` without torchrun")
        asked: dict[str, Any] = {
            "samplers": values_of("--samplers", samplers, str),
            "steps": values_of("--steps", steps, int),
            "temperatures": values_of("--temperatures", temperatures, float),
            "top_ps": values_of("--top-p", top_p, float),
        }
        with json_stdout(is_json):
            from adlm.bundled import DEFAULT
            from adlm.evaluate.provenance import provenance
            from adlm.studies import frontier as study
            from adlm.studies.ledger import Ledger
            from adlm.studies.writing import held_out_texts, load_assessor
            from adlm.text.lm import load

            amount = study.Amount(n, length, seed, batch, repeats)
            writers = [load(name, device=device) for name in dict.fromkeys(models or [DEFAULT])]
            grids = [study.grid(lm, length, **asked) for lm in writers]
            for lm, grid in zip(writers, grids, strict=True):  # what is wrong is said before anything runs
                for setting in grid:
                    lm.build_request(length=length, n=1, seed=seed, **setting.how())
            tokenizer = study.counted_by(writers)
            texts, said = held_out_texts(reference, tokenizer, length, n) if reference else (None, None)
            with status_console().status("loading the judge …"):
                assess = load_assessor(tokenizer, judge, device=writers[0].device, window=window, batch=judge_batch)
            held_out = assess(texts) if texts else None
            ledger = Ledger(out / "points.jsonl" if out else None)
            points: list[Point] = []
            with bar("writing", sum(map(len, grids)) * n) as tell:
                for lm, grid in zip(writers, grids, strict=True):
                    for point in study.measure_points(
                        lm, grid, amount, assess, ledger=ledger, on_texts=lambda count: tell(advance=count)
                    ):
                        points.append(point)
                        tell(description=f"{lm.name}: {point.label}")
            points = study.marked(points, held_out)
            answer: dict[str, Any] = {
                "points": [point.as_dict() for point in points],
                "reference": held_out.as_dict() if held_out else None,
                "settings": study.settings_of(writers, amount, assess) | asked | {"reference": said, "window": window},
                "provenance": provenance(writers[0].device),
            }
            answer["files"] = kept(out, points, held_out, answer) if out else []
        if is_json:
            print_json(answer)
            return
        show(
            points,
            held_out,
            f"{min(batch, n)} texts at a time on {writers[0].device}, threads: {answer['settings']['threads']}.",
        )
        for path in answer["files"]:
            status_console().print(f"→ {path}", style="dim", markup=False)


def kept(out: Path, points: Sequence[Point], reference: TextFigures | None, answer: dict[str, Any]) -> list[str]:
    """The figure and the JSON in the folder."""
    from adlm.studies.pictures import draw_frontier

    picture = draw_frontier(points, out / "frontier.png", reference)
    return [str(save_json(out / "frontier.json", answer)), str(picture)]


def show(points: Sequence[Point], reference: TextFigures | None, timed: str) -> None:
    """The table, and how to read it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDEST)
    table, missing = fitted(points, reference, console)
    console.print(table)
    room = f" For want of room not shown: {', '.join(missing)}; --json has them." if missing else ""
    first = points[0]
    judged = "" if first.quality.gen_ppl is not None else " No judge was asked: --judge NAME adds Gen-PPL."
    status_console().print(f"{READ} {timed}{judged}{room}", style="dim", markup=False)
    if short := sum(point.quality.short for point in points):
        said = f"{short} of {short + sum(point.quality.texts for point in points)} texts have fewer than four tokens"
        status_console().print(
            f"{said}: they are in NFE and time, and in no other figure.", style="yellow", markup=False
        )


def fitted(points: Sequence[Point], reference: TextFigures | None, console: Console) -> tuple[Table, Sequence[str]]:
    """The table with the columns that there is room for, and which were left out so that no figure is cut."""
    for count in range(len(EXPENDABLE) + 1):
        table = tabled(points, reference, without=EXPENDABLE[:count])
        if console.measure(table, options=console.options.update(max_width=WIDEST)).maximum <= console.width:
            break
    return table, EXPENDABLE[:count]


def tabled(points: Sequence[Point], reference: TextFigures | None, *, without: Sequence[str] = ()) -> Table:
    """A line for each point, the held-out text's last."""
    from adlm.studies.pictures import short

    names = ("steps", "T", "p", "NFE", "s/text", "tokens", "Gen-PPL", "entropy", "distinct-2", "repeated-4")
    shown = [name for name in names if name not in without]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "model", "sampler"):
        table.add_column(name, no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        steps = "" if point.steps is None else str(point.steps)
        cells = {"steps": steps, "T": f"{point.temperature:g}", "p": f"{point.top_p:g}", "NFE": f"{point.nfe:.1f}"}
        cells |= {"s/text": f"{point.seconds:.3g} ± {point.seconds_sd:.1g}", **cells_of(point.quality)}
        title = ("★" if point.is_pareto else "", Text(short(point.model)), point.sampler)
        table.add_row(*title, *(cells[name] for name in shown))
    if reference is not None:
        cells = cells_of(reference)
        table.add_row("", "held-out text", "", *(cells.get(name, "") for name in shown))
    return table


def cells_of(quality: TextFigures) -> dict[str, str]:
    """Its figures with their errors, by their columns."""
    judged = "–" if quality.gen_ppl is None else f"{quality.gen_ppl:.1f} ± {quality.gen_ppl_se:.1f}"
    return {
        "tokens": f"{quality.tokens:.1f}",
        "Gen-PPL": judged,
        "entropy": f"{quality.entropy:.3f} ± {quality.entropy_se:.3f}",
        "distinct-2": f"{quality.distinct_2:.3f} ± {quality.distinct_2_se:.3f}",
        "repeated-4": f"{quality.repetition_4:.3f} ± {quality.repetition_4_se:.3f}",
    }
