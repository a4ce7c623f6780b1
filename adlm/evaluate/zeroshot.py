"""Zero-shot perplexity on the paper's eight sets, in the lineage's form (MDLM/SEDD code); see docs/zeroshot.md."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from adlm.data.corpora import CORPORA
from adlm.data.sources import detect_split, open_source
from adlm.data.tokenizers import Tokenizer, load_tokenizer
from adlm.evaluate.cache import lock_output
from adlm.evaluate.data import EvalDataset, RowLayout, load_eval_data
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
    patterns: tuple[str, ...]  # of its files in a folder of sets; the first that matches
    remark: str


WIKITEXT_PAPER = (31.94, 32.83, 25.75)
WIKITEXT_REMARK = "validation split, a line to a document; in the raw form the same text as that of the other WikiText"
PAPERS_REMARK = "validation split; whole articles, cleaned up as WikiText and then as LM1B"
SETS = {
    "lambada": ZeroShotSet(
        "lambada", 5_153, (44.32, 47.52, 51.28), ("lambada", "lambada_test.jsonl*"),
        "OpenAI's test file; whole passages are scored, not their last words",
    ),
    "ptb": ZeroShotSet(
        "ptb", 3_370, (95.37, 95.26, 82.05), ("ptb", "ptb.valid.txt*"),
        "validation split; <unk> becomes ?, N becomes 1; in the lineage's many processes it fills no row of 1024",
    ),
    "wikitext2": ZeroShotSet(
        "wikitext2", 3_760, WIKITEXT_PAPER, ("wikitext2", "wikitext-2", "wikitext-2-raw"), WIKITEXT_REMARK
    ),
    "wikitext103": ZeroShotSet(
        "wikitext103", 3_760, WIKITEXT_PAPER, ("wikitext103", "wikitext-103", "wikitext-103-raw"), WIKITEXT_REMARK
    ),
    "lm1b": ZeroShotSet(
        "lm1b", 306_688, (64.43, 67.01, 51.25), ("lm1b", "1-billion-word*", "news.en.heldout*"),
        "test split, wrapped: only models that were trained on LM1B see a sentence to a row",
    ),
    "ag_news": ZeroShotSet(
        "ag_news", 7_600, (55.72, 61.15, 52.09), ("ag_news", "ag_news*.csv*"),
        "test split; title and description joined by a blank, nothing cleaned up",
    ),
    "pubmed": ZeroShotSet(
        "scientific_papers_pubmed", 6_633, (37.56, 41.89, 49.01), ("pubmed", "scientific_papers_pubmed"), PAPERS_REMARK
    ),
    "arxiv": ZeroShotSet(
        "scientific_papers_arxiv", 6_436, (33.69, 37.37, 41.73), ("arxiv", "scientific_papers_arxiv"), PAPERS_REMARK
    ),
}  # fmt: skip
ALIASES = {"wikitext-2": "wikitext2", "wikitext-103": "wikitext103", "lm1b-gpt2": "lm1b"}
ALIASES |= {each.corpus: name for name, each in SETS.items()}


def find_set(name: str) -> str:
    """The name in `SETS` of a set, which may also be the lineage's name."""
    known = ALIASES.get(name, name)
    if known not in SETS:
        raise ValueError(f"unknown set {name!r}: expected one of {', '.join(SETS)}")
    return known


def locate_set(name: str, *, data_dir: Path | None = None, path: Path | None = None) -> str:
    """The source of a set for `load_eval_data`: its own path, else its place in the folder, else the Hub's name."""
    known = SETS[name]
    if path is not None:
        if not path.expanduser().exists():
            raise FileNotFoundError(f"{name}: no file or folder {str(path)!r}: check --set {name}=PATH")
        return f"{known.corpus}:{path.expanduser()}"
    if data_dir is None:
        try:
            open_source(known.corpus, split=SPLIT)
        except (FileNotFoundError, ImportError) as error:
            remedy = f"give --set {name}=PATH, or --data-dir with a folder {name!r}"
            raise FileNotFoundError(f"{name}: {error}; {remedy}") from error
        return known.corpus
    if not data_dir.is_dir():
        raise ValueError(f"--data-dir {data_dir} is not a folder: give the folder that holds the sets")
    for pattern in known.patterns:
        matches = sorted(data_dir.glob(pattern))
        if len(matches) > 1:
            listed = ", ".join(match.name for match in matches)
            raise ValueError(f"{name} may be any of {listed} in {data_dir}: choose one with --set {name}=PATH")
        if matches:
            return f"{known.corpus}:{matches[0]}"
    raise FileNotFoundError(
        f"{name} is not in {data_dir}: put its files there as {' or '.join(known.patterns)}, give --set {name}=PATH, "
        "or leave --data-dir out to load it from the Hub"
    )


def load_set(source: str, tokenizer: Tokenizer, length: int, **options: Any) -> EvalDataset:
    """Load the rows of a set in the lineage's form; `options` are those of `load_eval_data`.

    The split is the lineage's, except where a single file names another split.
    """
    corpus, _, place = source.partition(":")
    named = detect_split(Path(place).name) if place and Path(place).is_file() else None
    splits = CORPORA[corpus].splits
    split = named if named and splits.get(named, splits[SPLIT]) != splits[SPLIT] else SPLIT
    return load_eval_data(source, tokenizer, length, split=split, **options | {"rows": options.get("rows") or ROWS})


def compare_with_paper(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's perplexities on a set, and why an estimate on rows with these settings is not comparable to them."""
    label, whole = settings["stand_in"], SETS[name].documents
    is_limited, is_split = settings["limit"] is not None, settings["split"] == SPLIT
    documents = whole if is_limited or not is_split else settings["documents"] + settings["documents_dropped"]
    deviations = {
        f"stand-in: {label}": label,
        f"tokenizer {settings['tokenizer']}, not {PAPER_TOKENIZER}: perplexities per token do not compare": (
            settings["tokenizer_sha256"] != load_tokenizer(PAPER_TOKENIZER).sha256
        ),
        f"{settings['unk_marks']:,} <unk> marks in the text, where the lineage reads the raw form": settings[
            "unk_marks"
        ],
        f"split {settings['split']}, not {SPLIT}": not is_split,
        f"rows of {settings['length']} tokens, not {PAPER_LENGTH}": settings["length"] != PAPER_LENGTH,
        f"rows {settings['rows']}, not {ROWS}": settings["rows"] != ROWS,
        f"only the first {settings['row_count']} rows": is_limited,
        f"{documents:,} documents, where the whole split has {whole:,}": documents != whole,
    }
    reasons = [reason for reason, applies in deviations.items() if applies]
    paper = None if label else dict(zip(PAPER, SETS[name].paper, strict=True))
    about = {"label": f"stand-in: {label}" if label else None, "paper": paper, "remark": SETS[name].remark}
    return about | {"deviations": reasons, "is_comparable": not reasons}


@lock_output
def zero_shot(
    models: LM | Iterable[LM],
    sets: Sequence[str] | None = None,
    *,
    data_dir: str | Path | None = None,
    paths: Mapping[str, str | Path] | None = None,
    stand_ins: Mapping[str, str] | None = None,
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

    A set is read from `paths`, else from its folder in `data_dir`, else from the Hub. `stand_ins` labels sets whose
    files are something else. `out` is a folder in which the estimates are stored: the same call resumes.
    """
    lms, labels = list_models(models), {find_set(name): label for name, label in (stand_ins or {}).items()}
    places = {find_set(name): Path(path) for name, path in (paths or {}).items()}
    names = list(dict.fromkeys(map(find_set, sets or ())))
    names = names or (list(places) if places and not data_dir else list(SETS))
    if unused := [name for name in {**places, **labels} if name not in names]:
        raise ValueError(f"{unused[0]} has a path or a label and is not evaluated: add it to sets")
    context = context or DistributedContext(lms[0].device)
    folder = None if data_dir is None else Path(data_dir)
    sources, missing = dict[str, str](), dict[str, str]()
    for name in names:
        try:
            sources[name] = locate_set(name, data_dir=folder, path=places.get(name))
        except FileNotFoundError as error:
            if not skip_missing:
                raise FileNotFoundError(f"{error}; --skip-missing skips such sets") from error
            missing[name] = str(error)
    if not sources:
        raise ValueError(f"none of the sets was found, and at least one is required: {'; '.join(missing.values())}")
    # Rank 0 decides: ranks with other sets would wait for each other for ever.
    sources, missing = context.all_gather({"located": (sources, missing)})[0]["located"]

    same: dict[str, Any] = {"batch": batch, "out": out, "context": context, "on_progress": on_progress}
    load = partial(load_set, rows=rows, limit=limit, workers=workers)
    estimates = estimate_texts(lms, sources, load, NllSettings(draws, seed), length=length, **same)
    entries, dropped = [], ("data", "kind", "documents", "seconds", "settings")
    for each in estimates:
        name = each.entry["data"]
        settings = each.data.settings | {"stand_in": labels.get(name, each.data.settings["stand_in"])}
        entry = {"set": name} | {key: value for key, value in each.entry.items() if key not in dropped}
        own = {key: value for key, value in (each.entry["settings"] | settings).items() if key != "data"}
        entries.append(entry | compare_with_paper(name, settings) | {"settings": own})
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
