"""`adlm eval anchors`: what the anchor network is good for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.evaluation.lists import bar, check_folder, save_json, values_of
from adlm.cli.output import json_stdout, print_json, status_console

if TYPE_CHECKING:
    from adlm.data.batches import RowDataset
    from adlm.studies.anchors import Extent, Study
    from adlm.studies.comparison import Together
    from adlm.studies.ledger import Ledger
    from adlm.studies.writing import Assessor
    from adlm.text.lm import LM

WIDTH = 110  # of a table that no terminal shows
Made = TypeVar("Made")


def anchors(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help=options.MODEL_HELP, autocompletion=options.complete_model),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="What `adlm prepare` reads (a file, a folder, a named corpus, the Hub), or what it made."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first rows.")] = 64,
    rows: Annotated[str | None, typer.Option(help="wrapped, documents (one a row, cut). (wrapped)")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Noises a row.")] = 4,
    max_count: Annotated[
        int | None, typer.Option(min=1, help="Anchors occur at most so often in their row. (as in training, or 5)")
    ] = None,
    perturb: Annotated[
        str,
        typer.Option(
            help='Noise on the anchor features, relative to them; commas. "" here and in --stale: '
            "nothing is changed, which is all that a correlation takes."
        ),
    ] = "0.1,0.3,1.0",
    stale: Annotated[str, typer.Option(help="Levels (texts: steps) that they are out of date; commas.")] = "1,2,4,8",
    samples: Annotated[int, typer.Option(min=0, help="Texts for every change, and for the order of reveals.")] = 0,
    judge: Annotated[
        str | None, typer.Option(help="Whose Gen-PPL: a folder, a GGUF file, a package, a Hub name. (entropy alone)")
    ] = None,
    window: Annotated[int | None, typer.Option(min=2, help="Judge long texts in windows of so many tokens.")] = None,
    sampler: Annotated[str, typer.Option(help="Of the texts.", autocompletion=options.complete_sampler)] = "ancestral",
    steps: Annotated[int, typer.Option(min=1, help="Of the sampler.")] = 32,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens in a text. (as many as can be)")] = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 0.9,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Of a run's folder, every checkpoint that it has kept.")
    ] = False,
    seed: options.Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time; it changes nothing but speed.")] = 32,
    device: options.Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="A folder: every model as it is done, figures, JSON. The same command goes on.")
    ] = None,
    is_json: options.Json = False,
) -> None:
    """Measure a two-stage model's anchor network: its guesses, what the model is without them, when anchors come.

    With three models or more: how anchor accuracy goes together with the bound, and with the quality of texts, over
    all of them, within runs and at equal steps.
    """
    with report_errors():
        if data is None:
            raise ValueError("what to measure on is not said: give --data FILE, a folder or the name of a corpus")
        if judge is not None and not samples:
            raise ValueError(f"--judge {judge} judges texts, and none are written: give --samples N too")
        if window is not None and judge is None:
            raise ValueError(f"--window {window} says how a judge reads long texts, and there is none: give --judge")
        check_folder("--out", out)
        with json_stdout(is_json):
            from adlm.bundled import DEFAULT
            from adlm.evaluate.provenance import provenance
            from adlm.studies import anchors as study
            from adlm.studies.correlation import LEAST
            from adlm.studies.ledger import Ledger

            noise, late = tuple(values_of("--perturb", perturb, float)), tuple(values_of("--stale", stale, int))
            extent = study.Extent(noise, late, draws, seed, batch, samples, length, sampler, steps, temperature, top_p)
            names = list(dict.fromkeys(models or [DEFAULT]))
            if checkpoints:
                names = list(dict.fromkeys(each for name in names for each in study.checkpoints_of(name)))
                if len(names) < LEAST:
                    raise ValueError(
                        f"there are {len(names)} checkpoints, and a correlation takes at least {LEAST}: name more "
                        "runs, or leave --checkpoints out (checkpoint.keep says how many a run keeps)"
                    )
            ledger = Ledger(out / "models.jsonl" if out else None)
            read_rows = once(lambda lm: held_out_rows(lm, data, rows, limit))
            hire = once(lambda lm: assessor(lm, judge, window) if samples else None)
            told_of: list[dict[str, Any]] = []
            found = []
            for lm in writers(names, device):
                one, said = studied(lm, read_rows(lm), max_count, extent, hire(lm), ledger)
                found.append(one)
                told_of.append(said)
            together = related(found, told_of)
            answer: dict[str, Any] = {
                "models": [each.as_dict() for each in found],
                "correlations": [each.as_dict() for each in together.found],
                "no_correlation": together.unsaid,
                "settings": {"data": data, "window": window, "models": told_of, "extent": vars(extent)},
                "provenance": provenance(device if device != "auto" else told_of[0]["device"]),
            }
            answer["files"] = kept(out, found, together, answer) if out else []
        if is_json:
            print_json(answer)
            return
        show(found, together)
        for reason in together.unsaid if len(found) > 1 else ():
            status_console().print(reason, style="yellow", markup=False)
        for path in answer["files"]:
            status_console().print(f"→ {path}", style="dim", markup=False)


def writers(names: Sequence[str], device: str) -> Iterator[LM]:
    """The models one after the other, each with two stages: what is wrong with one is said before anything runs."""
    from adlm.studies.stages import require_two_stages
    from adlm.text.lm import load

    for name in names:
        require_two_stages(load(name, device=device).model, name)
    for name in names:  # again, because many of them may be more than memory holds
        yield load(name, device=device)


def once(make: Callable[[LM], Made]) -> Callable[[LM], Made]:
    """What is made for a model, and shared by all that have its tokenizer, length and device."""
    made: dict[tuple[str, int, str], Made] = {}

    def get(lm: LM) -> Made:
        key = (lm.tokenizer.sha256, lm.model.config.length, str(lm.device))
        if key not in made:
            made[key] = make(lm)
        return made[key]

    return get


def assessor(lm: LM, judge: str | None, window: int | None) -> Assessor:
    """Who looks at texts."""
    from adlm.studies.writing import load_assessor

    with status_console().status("loading the judge …"):
        return load_assessor(lm.tokenizer, judge, device=lm.device, window=window)


def studied(
    lm: LM,
    held_out: tuple[RowDataset, dict[str, Any]],
    max_count: int | None,
    extent: Extent,
    assess: Assessor | None,
    ledger: Ledger,
) -> tuple[Study, dict[str, Any]]:
    """One model's study, from the ledger if it was done before, and its settings."""
    from dataclasses import asdict

    from adlm.evaluate.zeroshot import weights_hash
    from adlm.studies.anchors import Study, rule_of, study_anchors

    (rows, reading), (rule, rule_said) = held_out, rule_of(lm, max_count)
    said: dict[str, Any] = {"model": lm.name, "method": lm.method, "step": lm.step}
    said |= {"weights_sha256": weights_hash(lm.model), "anchors": rule_said, "reading": reading}
    said |= {"device": str(lm.device), "assessor": assess.settings if assess else None}
    depends = said | {"extent": {name: value for name, value in vars(extent).items() if name != "batch"}}
    if kept_one := ledger.get(depends):
        return Study.of(kept_one), said
    with bar(f"{lm.name}: reading") as tell:
        one = study_anchors(
            lm,
            rows,
            rule,
            extent,
            assess,
            lambda what, done, total: tell(description=f"{lm.name}: {what}", completed=done, total=total),
        )
    ledger.put(depends, asdict(one))
    return one, said


def related(found: Sequence[Study], told_of: Sequence[dict[str, Any]]) -> Together:
    """How the models' figures go together, or why that cannot be said: their studies are worth keeping all the same."""
    from adlm.studies.comparison import Together, correlations

    if len({said["reading"]["rows_hash"] for said in told_of}) > 1:
        return Together([], ["the models read different rows (their tokenizers or lengths differ): no figure compares"])
    if len({str(said["anchors"]) for said in told_of}) > 1:
        return Together([], ["anchors are found by a rule of each run's own, so that accuracies do not compare: give "
                             "--max-count N, one rule for all"])  # fmt: skip
    first: dict[str, str] = {}
    for said in told_of:
        if (other := first.setdefault(said["weights_sha256"], said["model"])) != said["model"]:
            return Together([], [f"{said['model']} has the weights of {other}, and a model counts once: leave one out"])
    try:
        return correlations(found)
    except ValueError as error:
        return Together([], [str(error)])


def held_out_rows(lm: LM, data: str, rows: str | None, limit: int | None) -> tuple[RowDataset, dict[str, Any]]:
    """The rows of a source: those of `adlm eval ppl`."""
    from adlm.evaluate.reading import read

    if rows not in (None, "wrapped", "documents"):
        raise ValueError(f"--rows is wrapped or documents, got {rows!r}")
    manner: Any = rows
    reading = read(data, lm.tokenizer, lm.model.config.length, rows=manner, limit=limit)
    return reading.rows, {"rows_hash": reading.rows_hash, **reading.settings}


def kept(out: Path, found: Sequence[Study], together: Together, answer: dict[str, Any]) -> list[str]:
    """Figures, JSON and, of several models, a page in the folder; a model that was only measured has no figure."""
    from adlm.data.shards import write_atomically
    from adlm.studies.comparison import page_of
    from adlm.studies.portraits import draw_anchors, draw_correlation

    files = [save_json(out / "anchors.json", answer)]
    for number, each in enumerate(found, 1):
        if len(each.losses) > 1:
            name = "anchors.png" if len(found) == 1 else f"anchors-{number}.png"
            files.append(draw_anchors(each, out / name))
    if together.found:
        files.append(draw_correlation(found, together.found, out / "correlation.png"))
        files.append(out / "correlation.md")
        write_atomically(files[-1], page_of(found, together, "correlation.png").encode("utf-8"))
    return [str(path) for path in files]


def show(found: Sequence[Study], together: Together) -> None:
    """The tables, and how to read them."""
    from adlm.studies.comparison import NOTE, table_of_correlations, table_of_models

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    for study in found:
        if len(found) > 1 and len(study.losses) == 1:
            continue  # it has a line among the others
        console.print(study.model, style="bold", markup=False)
        for table in (guesses_of(study), losses_of(study), samples_of(study), reveals_of(study)):
            if table.row_count:
                console.print(table)
                console.print()
    if len(found) > 1:
        for lines in (table_of_models(found), table_of_correlations(together.found) if together.found else []):
            if lines:
                console.print(filled(lines, words=2))
                console.print()
    if together.found:
        status_console().print(NOTE, style="dim", markup=False)
    if len(found) == 1 or any(len(study.losses) > 1 for study in found):
        status_console().print(
            "± is a standard error over rows or texts. A cost is against the model as it is, on the same noise. Ranks "
            "are 0 for what is revealed first and 1 for last; without any order both kinds have 0.5.",
            style="dim",
            markup=False,
        )


def filled(lines: Sequence[Sequence[str]], words: int) -> Table:
    """A table of columns and lines, of which the first columns are words."""
    first, *rest = lines
    table = table_of(*first[words:], before=first[:words])
    for line in rest:
        table.add_row(*(escape(cell) for cell in line))
    return table


def guesses_of(study: Study) -> Table:
    """Accuracy, likelihood and calibration of both heads."""
    table = table_of("tokens", "accuracy", "nll", "calibration error", before=("head", "tokens that are", "and"))
    for head, state in (("anchor", "hidden"), ("final", "hidden"), ("anchor", "visible")):
        for kind in ("anchors", "others"):
            guess = study.guess(head, state, kind)
            name = {"anchor": "anchor network", "final": "denoiser"}[head]
            figures = [f"{guess.tokens:,}", pm(guess.accuracy, guess.accuracy_se), pm(guess.nll, guess.nll_se)]
            table.add_row(name, state, kind, *figures, pm(guess.calibration_error, guess.calibration_error_se))
    return table


def losses_of(study: Study) -> Table:
    """The bound with the anchor features changed."""
    table = table_of("nll", "cost", before=("anchor features",))
    for loss in study.losses:
        cost = "" if loss.kind == "none" else pm(loss.cost, loss.cost_se)
        table.add_row(loss.change, pm(loss.nll, loss.nll_se), cost)
    return table


def samples_of(study: Study) -> Table:
    """Texts that were written with them changed."""
    table = table_of("NFE", "Gen-PPL", "entropy", "distinct-2", "repeated-4", before=("texts with",))
    for sample in study.samples:
        quality = sample.quality
        judged = "–" if quality.gen_ppl is None else pm(quality.gen_ppl, quality.gen_ppl_se or 0.0, 1)
        figures = [judged, pm(quality.entropy, quality.entropy_se), pm(quality.distinct_2, quality.distinct_2_se)]
        figures.append(pm(quality.repetition_4, quality.repetition_4_se))
        table.add_row(sample.change, f"{sample.nfe:.1f}", *figures)
    return table


def reveals_of(study: Study) -> Table:
    """When anchors are revealed."""
    table = table_of("anchors", "others", "difference", "share of anchors", before=("rank of the reveal",))
    for each in study.reveals:
        figures = [pm(each.anchors, each.anchors_se), pm(each.others, each.others_se), pm(each.gap, each.gap_se)]
        table.add_row(each.sampler, *figures, f"{each.anchor_share:.3f}")
    return table


def table_of(*columns: str, before: Sequence[str]) -> Table:
    """An empty table: words on the left, figures on the right."""
    table = Table(box=None, pad_edge=False)
    for name in before:
        table.add_column(name, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def pm(value: float, error: float, digits: int = 3) -> str:
    """A figure with its error, as far as they are known."""
    if value != value:
        return "–"
    if error != error:
        return f"{value:.{digits}f} ± ?"
    return f"{value:.{digits}f} ± {error:.{digits}f}"
