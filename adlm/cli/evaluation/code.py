"""`adlm eval code`: Python that a model writes, fills in, and completes."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.evaluation.lists import values_of
from adlm.cli.output import check_output_files, json_stdout, print_json, status_console

if TYPE_CHECKING:
    from adlm.evaluate.programs import Verdict
    from adlm.text.lm import LM

RUN = "Running programs"


def code(
    model: options.ModelArgument = None,
    problems: Annotated[
        Path | None, typer.Option(help="Problems in HumanEval's form, jsonl: their pass@k.", rich_help_panel=RUN)
    ] = None,
    candidates: Annotated[
        Path | None, typer.Option(help="jsonl of task_id and completion, in place of a model's.", rich_help_panel=RUN)
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Candidates a problem.", rich_help_panel=RUN)] = 1,
    k: Annotated[str, typer.Option("--k", help="Of pass@k: numbers with commas.", rich_help_panel=RUN)] = "1",
    is_allowed: Annotated[
        bool,
        typer.Option("--allow-code-execution", help="Run programs that nobody has read.", rich_help_panel=RUN),
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time limit of a candidate.", rich_help_panel=RUN)] = 5.0,
    memory: Annotated[int, typer.Option(help="Memory limit of a candidate, MiB.", rich_help_panel=RUN)] = 512,
    workers: Annotated[int, typer.Option(min=1, help="Candidates at a time.", rich_help_panel=RUN)] = 1,
    texts: Annotated[int, typer.Option(min=0, help="Texts to write and parse.")] = 32,
    infills: Annotated[int, typer.Option(min=0, help="Holes of each kind to fill in and parse.")] = 32,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a text. (as many as can be)")] = None,
    write_data: Annotated[
        Path | None, typer.Option(help="Write the standard library as jsonl for `adlm prepare`, and nothing else.")
    ] = None,
    sampler: options.Sampler = None,
    steps: options.Steps = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 0.9,
    seed: options.Seed = 0,
    batch: options.Batch = 16,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Measure Python: the share of written and filled-in programs that parse, and pass@k of problems.

    Without --problems it writes --texts functions and fills --infills holes in real functions of the standard library.
    With --problems it runs candidates against their tests; that takes --allow-code-execution.
    """
    with report_errors():
        check_output_files({"--write-data": write_data})
        if write_data is not None:
            data_written(write_data, is_json)
            return
        if candidates is not None and problems is None:
            raise ValueError("--candidates are solutions of problems: give --problems too")
        ks = numbers_of(k)
        if problems is not None and not is_allowed:
            from adlm.evaluate.programs import REFUSAL

            raise ValueError(REFUSAL)
        if problems is not None and candidates is None and max(ks) > n:
            raise ValueError(f"pass@{max(ks)} needs at least {max(ks)} candidates a problem, --n is {n}: raise it")
        began = time.perf_counter()
        with json_stdout(is_json):
            from adlm.evaluate.provenance import provenance

            lm = None if candidates is not None else loaded(model, device)
            how: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed, "batch": batch}
            if lm is None or not lm.row_format.is_causal:
                how |= {"sampler": sampler, "steps": steps}
            if problems is not None:
                found = pass_figures(lm, problems, candidates, n, ks, seconds, memory, workers, how)
            else:
                assert lm is not None
                found = parse_figures(lm, texts, infills, length, how)
        settings: dict[str, Any] = {"model": None, "method": None}
        if lm is not None:
            settings = {"model": lm.name, "method": lm.method, **how, "length": length, "device": str(lm.device)}
        found["settings"] = settings | found["settings"]
        found["provenance"] = provenance("cpu" if lm is None else lm.device)
        found["seconds"] = time.perf_counter() - began
        if is_json:
            print_json(found)
        else:
            shown(found)


def loaded(model: str | None, device: str) -> LM:
    """The model that is asked for."""
    from adlm.bundled import DEFAULT
    from adlm.text.lm import load

    return load(model or DEFAULT, device=device)


def numbers_of(words: str) -> list[int]:
    """The k of pass@k."""
    found = values_of("--k", words, int)
    if not found or min(found) < 1:
        raise ValueError(f"--k is whole numbers from 1 on with commas between, such as 1,5; got {words!r}")
    return found


def data_written(path: Path, is_json: bool) -> None:
    """The standard library as two files: for training, and what is held out."""
    from adlm.studies.code import standard_library, write_sources

    sources = standard_library()
    parts = {path: False, path.with_name(f"{path.stem}-heldout{path.suffix}"): True}
    said = [write_sources(file, [each for each in sources if each.is_held_out is held]) for file, held in parts.items()]
    if is_json:
        print_json({"written": said})
        return
    for each in said:
        size = f"{each['files']} files, {each['bytes'] / 1e6:.1f} MB, sha256 {each['sha256'][:16]}…"
        status_console().print(f"{each['file']}: {size}", markup=False)
    status_console().print(f"License: {said[0]['license']}. Next: adlm prepare {path}", markup=False)


def parse_figures(lm: LM, texts: int, infills: int, length: int | None, how: dict[str, Any]) -> dict[str, Any]:
    """What parses of what a model writes and fills in."""
    from adlm.studies.code import KINDS, gaps, hash_of, infilling, parse_shares, standard_library, written_code

    found: dict[str, Any] = {"written": None, "filled_in": None}
    settings: dict[str, Any] = {"texts": texts, "infills": infills, "prompt": "def "}
    if texts:
        with status_console().status(f"writing {texts} texts …"):
            written = written_code(lm, texts, length=length, **how)
        found["written"] = {name: asdict(share) for name, share in parse_shares(written).items()}
        found["texts"] = written
    if infills and lm.row_format.is_causal:
        status_console().print("a causal model sees only what is before a hole: nothing is filled in", style="dim")
    elif infills:
        sources = standard_library()
        settings["sources_sha256"] = hash_of(sources)
        found["filled_in"] = {}
        for kind in KINDS:
            with status_console().status(f"filling {infills} holes ({kind}) …"):
                chosen = gaps(sources, lm, infills, kind=kind, seed=how["seed"])
                found["filled_in"][kind] = infilling(lm, chosen, **how)
    return found | {"settings": settings}


def pass_figures(
    lm: LM | None,
    problems: Path,
    candidates: Path | None,
    n: int,
    ks: list[int],
    seconds: float,
    memory: int,
    workers: int,
    how: dict[str, Any],
) -> dict[str, Any]:
    """pass@k of candidates that are given or that a model writes."""
    import hashlib

    from rich.progress import track

    from adlm.evaluate.programs import Allowance, read_candidates, read_problems, solved_share, try_all
    from adlm.studies.code import completions

    asked, allowance = read_problems(problems), Allowance(seconds, memory * 2**20)
    if candidates is not None:
        tried = read_candidates(candidates, asked)
    else:
        assert lm is not None
        with status_console().status(f"writing {n} candidates for each of {len(asked)} problems …"):
            tried = completions(lm, asked, n, **how)
    running = try_all(asked, tried, allowance, allow_execution=True, workers=workers)
    verdicts = list(track(running, "running candidates", total=len(tried), console=status_console(), transient=True))
    shares = {f"pass@{each}": asdict(solved_share(verdicts, each)) for each in ks}
    settings = {"problems_sha256": hashlib.sha256(problems.read_bytes()).hexdigest(), "problems": len(asked)}
    if candidates is None:
        settings["n"] = n
    else:
        settings["candidates_sha256"] = hashlib.sha256(candidates.read_bytes()).hexdigest()
    settings |= {"seconds": seconds, "memory_mib": memory, "network": sorted({each.network for each in verdicts})}
    each = [
        {**asdict(verdict), "completion": candidate.completion}
        for verdict, candidate in zip(verdicts, tried, strict=True)
    ]
    return {"pass": shares, "ends": ends_of(verdicts), "candidates": each, "settings": settings}


def ends_of(verdicts: list[Verdict]) -> dict[str, int]:
    """How many candidates ended in each way."""
    kinds = ("passed", "failed", "syntax", "memory", "time", "died")
    return {kind: count for kind in kinds if (count := sum(each.status == kind for each in verdicts))}


def shown(found: dict[str, Any]) -> None:
    """The figures as a table, and how to read it."""
    table = Table(box=None, pad_edge=False)
    for name in ("what", "share", "95% interval", "of"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    rows = {f"written: {name}": each for name, each in (found.get("written") or {}).items()}
    for kind, filled in (found.get("filled_in") or {}).items():
        rows |= {f"filled in, {kind}: {name}": each for name, each in filled["shares"].items()}
    rows |= found.get("pass", {})
    for name, each in rows.items():
        table.add_row(name, f"{each['value']:.3f}", f"{each['low']:.3f} – {each['high']:.3f}", f"{each['count']}")
    Console(highlight=False).print(table)
    if "pass" in found:
        ends = ", ".join(f"{count} {kind}" for kind, count in found["ends"].items())
        said = f"pass@k: the chance that one of k candidates passes its problem's test, over problems. Ends: {ends}."
    else:
        said = (
            "parses: the parser takes it and finds a statement. equal: to the letter. parses_if_left_empty: what the "
            "text around a hole gives away; a model is worth what is above it."
        )
    status_console().print(said, style="dim", markup=False)
