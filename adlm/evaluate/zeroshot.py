"""Zero-shot perplexity on the paper's eight sets, in the lineage's form (MDLM/SEDD code); see docs/zeroshot.md."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from adlm.data.sources import open_source
from adlm.data.tokenizers import load_tokenizer
from adlm.evaluate.cache import lock_output
from adlm.evaluate.data import RowLayout, load_eval_data
from adlm.evaluate.ppl import (
    NllSettings,
    estimate_texts,
    format_estimates,
    group_warnings,
    list_models,
    pair_models,
    tabulate_differences,
    warn_few_units,
)
from adlm.evaluate.provenance import collect_provenance
from adlm.evaluate.results import Column, EvalResult, ProgressCallback, Table, ignore_progress, shorten_names
from adlm.text.lm import LM
from adlm.training.distributed import DistributedContext

PAPER = ("ADLM", "MDLM", "AR")  # trained on 524B tokens of OpenWebText; the first two are upper bounds
PAPER_TOKENIZER, PAPER_LENGTH = "gpt2", 1024
SPLIT = "valid"  # the lineage's; corpora.py maps it to the Hub's test split for sets without a validation split
ROWS: RowLayout = "wrapped"  # the lineage's, also for LM1B, of which only models trained on it see a sentence to a row


@dataclass(frozen=True)
class ZeroShotSet:
    """One set of the paper: how the lineage reads it, and the perplexities that the paper reports."""

    corpus: str  # its name in adlm/data/corpora.py, which knows column, detokenizer and splits
    documents: int  # of the split on the Hub
    paper: tuple[float, float, float]


SETS = {
    "lambada": ZeroShotSet("lambada", 5_153, (44.32, 47.52, 51.28)),
    "ptb": ZeroShotSet("ptb", 3_370, (95.37, 95.26, 82.05)),
    "wikitext2": ZeroShotSet("wikitext2", 3_760, (31.94, 32.83, 25.75)),
    "wikitext103": ZeroShotSet("wikitext103", 3_760, (31.94, 32.83, 25.75)),  # raw: the validation text of wikitext2
    "lm1b": ZeroShotSet("lm1b", 306_688, (64.43, 67.01, 51.25)),
    "ag_news": ZeroShotSet("ag_news", 7_600, (55.72, 61.15, 52.09)),
    "pubmed": ZeroShotSet("scientific_papers_pubmed", 6_633, (37.56, 41.89, 49.01)),
    "arxiv": ZeroShotSet("scientific_papers_arxiv", 6_436, (33.69, 37.37, 41.73)),
}
ALIASES = {"wikitext-2": "wikitext2", "wikitext-103": "wikitext103", "lm1b-gpt2": "lm1b"}
ALIASES |= {each.corpus: name for name, each in SETS.items()}


def find_set(name: str) -> str:
    """The name in `SETS` of a set, which may also be the lineage's name."""
    known = ALIASES.get(name, name)
    if known not in SETS:
        raise ValueError(f"unknown set {name!r}: expected one of {', '.join(SETS)}")
    return known


def locate_set(name: str, data_dir: Path | None = None) -> str:
    """The source of a set for `load_eval_data`: its folder in `data_dir`, by any of its names, else the Hub's name."""
    corpus, names = SETS[name].corpus, [name, *(alias for alias, known in ALIASES.items() if known == name)]
    if data_dir is None:
        try:
            open_source(corpus, split=SPLIT)
        except (FileNotFoundError, ImportError) as error:
            raise FileNotFoundError(f"{name}: {error}; give --data-dir with a folder {name!r}") from error
        return corpus
    if not data_dir.is_dir():
        raise ValueError(f"--data-dir {data_dir} is not a folder: give the folder that holds the sets")
    folders = [data_dir / each for each in names if (data_dir / each).is_dir()]
    if not folders:
        raise FileNotFoundError(
            f"{name} is not in {data_dir}: put its files into a folder {name!r} there, or leave --data-dir out to load "
            "it from the Hub"
        )
    return f"{corpus}:{folders[0]}"


def compare_with_paper(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's perplexities on a set, and why an estimate on rows with these settings is not comparable to them."""
    label, whole, is_limited = settings["stand_in"], SETS[name].documents, settings["limit"] is not None
    documents = whole if is_limited else settings["documents"] + settings["documents_dropped"]
    deviations = {
        f"stand-in: {label}": label,
        f"tokenizer {settings['tokenizer']}, not {PAPER_TOKENIZER}: perplexities per token do not compare": (
            settings["tokenizer_sha256"] != load_tokenizer(PAPER_TOKENIZER).sha256
        ),
        f"{settings['unk_marks']:,} <unk> marks in the text, where the lineage reads the raw form": settings[
            "unk_marks"
        ],
        f"rows of {settings['length']} tokens, not {PAPER_LENGTH}": settings["length"] != PAPER_LENGTH,
        f"rows {settings['rows']}, not {ROWS}": settings["rows"] != ROWS,
        f"only the first {settings['row_count']} rows": is_limited,
        f"{documents:,} documents, where the whole split has {whole:,}": documents != whole,
    }
    reasons = [reason for reason, applies in deviations.items() if applies]
    paper = None if label else dict(zip(PAPER, SETS[name].paper, strict=True))
    about = {"label": f"stand-in: {label}" if label else None, "paper": paper}
    return about | {"deviations": reasons, "is_comparable": not reasons}


@lock_output
def zero_shot(
    models: LM | Iterable[LM],
    sets: Sequence[str] | None = None,
    *,
    data_dir: str | Path | None = None,
    skip_missing: bool = False,
    length: int | None = None,
    rows: RowLayout | None = None,
    draws: int = 2,
    limit: int | None = None,
    batch: int = 32,
    seed: int = 0,
    workers: int = 1,
    out: str | Path | None = None,
    context: DistributedContext | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> EvalResult:
    """Estimate perplexity on the paper's zero-shot sets, with its numbers and the reasons why they do not compare.

    A set is read from its folder in `data_dir`, by default from the Hub. `out` is a folder in which the estimates are
    stored: the same call resumes.
    """
    lms, names = list_models(models), list(dict.fromkeys(map(find_set, sets or SETS)))
    context = context or DistributedContext(lms[0].device)
    folder = None if data_dir is None else Path(data_dir)
    sources, missing = dict[str, str](), dict[str, str]()
    for name in names:
        try:
            sources[name] = locate_set(name, folder)
        except FileNotFoundError as error:
            if not skip_missing:
                raise FileNotFoundError(f"{error}; --skip-missing skips such sets") from error
            missing[name] = str(error)
    if not sources:
        raise ValueError(f"none of the sets was found, and at least one is required: {'; '.join(missing.values())}")
    # Rank 0 decides: ranks with other sets would wait for each other for ever.
    sources, missing = context.all_gather({"located": (sources, missing)})[0]["located"]

    same: dict[str, Any] = {"batch": batch, "out": out, "context": context, "on_progress": on_progress}
    load = partial(load_eval_data, split=SPLIT, rows=rows or ROWS, limit=limit, workers=workers)
    estimates = estimate_texts(lms, sources, load, NllSettings(draws, seed), length=length, **same)
    entries, dropped = [], ("data", "kind", "documents", "seconds", "settings")
    for each in estimates:
        name = each.entry["data"]
        entry = {"set": name} | {key: value for key, value in each.entry.items() if key not in dropped}
        own = {key: value for key, value in (each.entry["settings"] | each.data.settings).items() if key != "data"}
        entries.append(entry | compare_with_paper(name, each.data.settings) | {"settings": own})
    keys = ("model", "method", "step", "weights_sha256", "draws", "seed", "length")
    described = [{key: entry["settings"][key] for key in keys} for entry in entries[: len(lms)]]
    single = described[0] if len(lms) == 1 else {}
    metrics: dict[str, Any] = {name: single[name] for name in ("model", "method") if single}
    differences = pair_models(estimates)
    metrics |= {"models": described, "sets": entries, "missing": missing, "differences": differences}
    warnings = group_warnings([entry["deviations"] + warn_few_units(entry) for entry in entries], entries, "set")
    warnings += [f"missing: {reason}" for reason in missing.values()]
    tables = [tabulate_sets(entries)] + ([tabulate_differences(differences)] if differences else [])
    shared = {"draws": draws, "seed": seed, "length": length, "rows": rows, "limit": limit}
    provenance = collect_provenance(lms[0].device, processes=context.world_size)
    return EvalResult("zero_shot", metrics, shared | single, provenance, tables, warnings)


def tabulate_sets(entries: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each set and model, with the paper's perplexities in brackets where they do not compare."""
    names = shorten_names([entry["model"] for entry in entries])
    columns = [Column("set", is_text=True), Column("model", is_text=True)]
    columns += [Column(name) for name in ("nats/token", "ppl", "bits/byte", f"paper ({'/'.join(PAPER)})")]
    columns += [Column("tokens", is_optional=True), Column("rows' hash", is_text=True, is_optional=True)]
    rows: list[list[Any]] = []
    for entry in entries:
        paper = "stand-in"
        if entry["paper"] is not None:
            paper = "/".join(f"{entry['paper'][name]:.2f}" for name in PAPER)
            paper = paper if entry["is_comparable"] else f"({paper})"
        cells = [entry["set"] + ("*" if entry["label"] else ""), names[entry["model"]], *format_estimates(entry, 3)]
        rows.append([*cells, paper, entry["tokens"], entry["rows_hash"][:8]])
    notes = ["± is a standard error, ≤ an upper bound. Bits per byte compare across tokenizers, the others do not."]
    if any(entry["paper"] for entry in entries):
        notes.append(
            "The paper's models were trained on 524B tokens of OpenWebText; its perplexities are in brackets where the "
            "rows differ from the paper's."
        )
    return Table(columns, rows, notes=notes)
