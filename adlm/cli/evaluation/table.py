"""Models measured on named texts, line by line: shared out over processes, kept in a file that a run goes on from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from adlm.cli import options
from adlm.cli.evaluation.lists import bar_of_many, save_json
from adlm.cli.output import status_console

if TYPE_CHECKING:
    from adlm.evaluate.lines import Line, Subject
    from adlm.training.distributed import DistributedContext

FORMAT = 2  # of the file that --out writes
FEW = 20  # documents or rows that a standard error is hardly to be had from
WIDTH = 120  # of a table that no terminal shows
Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL]...", help=options.MODEL_HELP, autocompletion=options.complete_model),
]


def wanted_rows(rows: str | None) -> Any:
    """What a row is, if it is told."""
    if rows not in (None, "wrapped", "documents"):
        raise ValueError(f"--rows is wrapped or documents, got {rows!r}")
    return rows


def subjects_of(
    models: Sequence[str] | None, world: DistributedContext, *, draws: int, seed: int, length: int | None
) -> list[Subject]:
    """The models, each once, the bundled one if none is named."""
    from adlm.bundled import DEFAULT
    from adlm.studies.domains import subject_of
    from adlm.text.lm import load

    loaded = [load(name, device=str(world.device)) for name in models or [DEFAULT]]
    return [subject_of(lm, draws=draws, seed=seed, length=length) for lm in {lm.name: lm for lm in loaded}.values()]


def measured(
    lines: Callable[..., Iterator[tuple[Line, bool]]],
    subjects: Sequence[Subject],
    world: DistributedContext,
    *,
    kind: str,
    batch: int,
    out: Path | None,
    settings: Mapping[str, Any],
    **rest: Any,
) -> dict[str, Any]:
    """The answer, for JSON; after every line it is in the file too. Of many processes the first tells and writes.

    `lines` is asked with what is known, how rows are gone through and who hears of it; `kind` is what a text is called.
    """
    from adlm.evaluate.likelihood import Walk
    from adlm.evaluate.provenance import provenance

    models, known = recalled_by_all(out, kind, subjects, world)
    found: list[Line] = []
    kept = {(line["model"], line[kind]): line for line in known}
    rest |= {"provenance": provenance(world.device) | {"processes": world.world_size}}
    own = {subject.settings.model: subject.as_dict() for subject in subjects}
    walk = Walk(batch, rank=world.rank, size=world.world_size, total=world.all_reduce_sum)
    with bar_of_many(is_shown=world.is_main) as on_rows:
        for line, is_new in lines(known=known, walk=walk, on_rows=on_rows):
            found.append(line)
            kept[line["model"], line[kind]] = line
            if not world.is_main:
                continue
            if out is not None:
                save_json(out, composed(kind, {**models, **own}, list(kept.values()), settings, rest))
            whose = f", {line['model']}" if len(subjects) > 1 else ""
            said = "measured" if is_new else f"known from {out}, not done again"
            status_console().print(f"{line[kind]}{whose}: {said}", style="dim", markup=False)
    return composed(kind, own, found, settings, rest)


def composed(
    kind: str,
    models: Mapping[str, Mapping[str, Any]],
    lines: Sequence[Line],
    settings: Mapping[str, Any],
    rest: Mapping[str, Any],
) -> dict[str, Any]:
    """The answer: models, a flat list of lines, and what they depend on. A single model is also named at the top."""
    one = dict(next(iter(models.values()))) if len(models) == 1 else {}
    top = {name: one[name] for name in ("model", "method") if one}
    answer = {"format": FORMAT, **top, "models": list(models.values()), f"{kind}s": list(lines)}
    return answer | {"settings": {**settings, **one}, **rest}


def recalled_by_all(
    out: Path | None, kind: str, subjects: Sequence[Subject], world: DistributedContext
) -> tuple[dict[str, Any], list[Line]]:
    """What the first process finds in the file: processes that disagree on it would wait for each other for ever."""
    held: dict[str, Any] = {}

    def recall() -> None:
        held["models"], held["lines"] = recalled(out, kind, subjects)

    world.run_on_rank0(recall)
    found = world.all_gather(held)[0]
    return found["models"], found["lines"]


def recalled(out: Path | None, kind: str, subjects: Sequence[Subject]) -> tuple[dict[str, Any], list[Line]]:
    """Models and lines of an earlier run; a file of something else, or of other weights, is not written over."""
    if out is None or not out.exists():
        return {}, []
    try:
        found = json.loads(out.read_text("utf-8"))
        version = found["format"]
        if version == FORMAT:
            models = {each["model"]: dict(each) for each in found["models"]}
            lines = [dict(line) for line in found[f"{kind}s"]]
            said = [(line["model"], line[kind], line["rows_hash"], dict(line["settings"])) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--out {out} is there and is no file of this command: give another name") from error
    if version != FORMAT:
        raise ValueError(f"--out {out} has format {version!r}, this version writes {FORMAT}: give another name")
    for settings in (subject.settings.as_dict() for subject in subjects):
        for key, value in settings.items():
            for there in (known.get(key) for model, _, _, known in said if model == settings["model"]):
                if there != value:
                    raise ValueError(
                        f"--out {out} holds figures of {settings['model']} with {key} {there!s:.12}, and {value!s:.12} "
                        "is asked for: give another name"
                    )
    return models, lines


def screen() -> Console:
    """Where a table is shown: as wide as the terminal, or as wide as it needs to be."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def name_of(line: Mapping[str, Any]) -> str:
    """A line's model, as a table has room for it."""
    from adlm.studies.pictures import short

    return short(line["model"])


def remarks(lines: Sequence[Mapping[str, Any]], kind: str) -> Iterator[str]:
    """What to know of texts beside their figures, each thing once with the texts or models that it is true of."""
    reasons: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        units, over = line["error_units"], line["error_over"]
        few = [f"the error is over {units} {over} only, too few to lean on"] if units < FEW else []
        for reason in [*line.get("differs", []), *few]:
            reasons.setdefault(reason, []).append(line)
    for reason, some in reasons.items():
        yield f"{whose(some, lines, kind)}: {reason}"


def whose(some: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Some of the lines in as few words as say which: all, texts, models, or each by both."""
    texts, models = (list(dict.fromkeys(line[key] for line in some)) for key in (kind, "model"))
    every, each = ({line[key] for line in lines} for key in (kind, "model"))
    if len(some) == len(lines) and len(every) > 1:
        return "all"
    if len(some) == len(texts) * len(each):
        return ", ".join(texts)
    if len(some) == len(models) * len(every):
        return ", ".join(dict.fromkeys(map(name_of, some)))
    return ", ".join(f"{line[kind]} ({name_of(line)})" for line in some)
