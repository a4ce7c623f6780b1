"""Perplexity of any number of models on any number of texts and on the paper's zero-shot sets, with differences."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adlm.data.sources import open_source
from adlm.data.tokenizers import load_tokenizer
from adlm.diffusion.features import FeatureModel
from adlm.diffusion.masking import MIN_TIME
from adlm.diffusion.objectives import OBJECTIVES, MaskedDiffusion, Objective
from adlm.distributed import DistributedContext
from adlm.errors import check_known
from adlm.evaluate.cache import (
    Cache,
    ProgressCallback,
    hash_settings,
    ignore_progress,
    lock_output,
    open_cache,
)
from adlm.evaluate.data import EvalDataset, RowLayout, count_row_bytes, load_eval_data
from adlm.evaluate.provenance import collect_provenance, hash_weights
from adlm.evaluate.results import Estimate, EvalResult, Table, TableColumn, shorten_names
from adlm.evaluate.stats import estimate_ratio_difference
from adlm.likelihood import (
    ORDERS,
    RANDOM,
    NatsSettings,
    NllEstimate,
    group_rows,
    row_nats,
    summarize_rows,
)
from adlm.models.network import NETWORKS, fold_network
from adlm.text.lm import LM

COUNTS = {"lineage": "every token but padding counts, BOS and EOS too, as in the paper"}
COUNTS |= {"text": "BOS and EOS are given and not counted"}
KINDS = {"exact": "exact", "nelbo": "NELBO", "discrete_nelbo": "NELBO, {steps} steps"}
KINDS |= {"unmasking_exact": "{order} order: exact", "unmasking_bound": "{order} order"}
MIN_UNITS = 20  # documents or rows: fewer give a poor standard error


@dataclass(frozen=True)
class NllSettings:
    """What an estimate depends on besides the model and the rows."""

    draws: int = 4
    seed: int = 0
    steps: int | None = None  # of discrete time; None: continuous time
    order: str | None = None  # of a second estimate
    count: str = "lineage"
    attend_padding: bool | None = None  # None: as the model was trained

    def __post_init__(self) -> None:
        check_known("count", self.count, COUNTS)
        if self.order is not None:
            check_known("order", self.order, ORDERS)
        if self.order is not None and self.attend_padding:
            raise ValueError(f"order {self.order} never hides padding: leave attend_padding out")


@dataclass(frozen=True)
class TextNll:
    """The estimates of one model on one text; `entry` is their JSON form."""

    entry: dict[str, Any]
    nll: NllEstimate
    data: EvalDataset
    lm: LM


@lock_output
def perplexity(
    models: LM | Iterable[LM],
    data: str | Path | Mapping[str, str | Path],
    *,
    rows: RowLayout | None = None,
    length: int | None = None,
    split: str | None = None,
    draws: int = 4,
    steps: int | None = None,
    order: str | None = None,
    count: str = "lineage",
    attend_padding: bool | None = None,
    limit: int | None = None,
    batch: int = 32,
    seed: int = 0,
    workers: int = 1,
    out: str | Path | None = None,
    context: DistributedContext | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> EvalResult:
    """Estimate the perplexity of models on one text or on named texts: an upper bound for masked models.

    `draws` is the number of noises for each row, `steps` selects discrete time, `order` adds the likelihood under an
    unmasking order. `count="text"` leaves out BOS and EOS. The same call with the folder `out` resumes.
    """
    lms, texts = list_models(models), data if isinstance(data, Mapping) else {str(data): data}
    settings = NllSettings(draws, seed, steps, order, count, attend_padding)
    selection: dict[str, Any] = {"rows": rows, "split": split, "limit": limit}

    same: dict[str, Any] = {
        "batch": batch,
        "out": out,
        "context": context,
        "on_progress": on_progress,
    }
    load = partial(load_eval_data, **selection, workers=workers)
    estimates = estimate_texts(lms, texts, load, settings, length=length, **same)
    differences, entries = pair_models(estimates), [each.entry for each in estimates]
    provenance = collect_provenance(
        lms[0].device, processes=1 if context is None else context.world_size
    )
    warnings = group_warnings([list_warnings(each) for each in estimates], entries, "data")
    tables = [tabulate(entries)] + ([tabulate_differences(differences)] if differences else [])
    if len(entries) == 1:
        own = dict(entries[0])
        return EvalResult("perplexity", own, own.pop("settings"), provenance, tables, warnings)
    metrics, shared = (
        {"models": entries, "differences": differences},
        asdict(settings) | selection | {"length": length},
    )
    return EvalResult("perplexity", metrics, shared, provenance, tables, warnings)


def list_models(models: LM | Iterable[LM]) -> list[LM]:
    """The models, each once; two models of one name would be mixed up and are refused."""
    listed = [models] if isinstance(models, LM | str) else list(models)
    by_name: dict[str, LM] = {}
    for lm in listed:
        if not isinstance(lm, LM):
            raise ValueError(
                f"models has {lm!r:.80}, which is no LM: give adlm.load({str(lm)!r:.80})"
            )
        if lm.name in by_name and hash_weights(lm.model) != hash_weights(by_name[lm.name].model):
            raise ValueError(
                f"two different models are named {lm.name!r}: give them different names (LM.name)"
            )
        by_name.setdefault(lm.name, lm)
    if not by_name:
        raise ValueError("models is empty: give at least one, for example adlm.load()")
    return list(by_name.values())


def estimate_texts(
    models: Sequence[LM],
    sources: Mapping[str, str | Path],
    load: Callable[..., EvalDataset],
    settings: NllSettings,
    *,
    length: int | None = None,
    batch: int = 32,
    out: str | Path | None = None,
    context: DistributedContext | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> list[TextNll]:
    """Estimate the nll of every model on every text that the cache lacks; models with equal tokens share rows."""
    for lm in models:
        if length is not None and length > (limit := lm.model.config.length):
            raise ValueError(
                f"length {length} is more than the {limit} tokens of {lm.name}: give at most {limit}"
            )
        if settings.order is not None and lm.row_format.is_causal:
            raise ValueError(
                f"{lm.name} is causal: its nll is exact, in its only order; leave order out"
            )
    context = context or DistributedContext(models[0].device)
    cache = open_cache(out, context)
    networks = {
        lm.name: (fold_network(lm.model).to(lm.device), hash_weights(lm.model)) for lm in models
    }
    estimates = []
    for name, source in sources.items():
        datasets: dict[tuple[Any, ...], EvalDataset] = {}
        for lm in models:
            words, size = lm.tokenizer, length or lm.model.config.length
            key = (words.sha256, words.bos_id, words.eos_id, words.pad_id, size)
            if key not in datasets:
                on_progress(f"{name}: reading", 0, 0)
                datasets[key] = load(
                    source, words, size, on_progress=partial(on_progress, f"{name}: reading")
                )
            data = replace(
                datasets[key], settings=datasets[key].settings | {"tokenizer": words.name}
            )
            running: dict[str, Any] = {"batch": batch, "ranks": context}
            running["on_rows"] = partial(on_progress, f"{name}: {lm.name}")
            try:
                estimates.append(
                    estimate_text(name, lm, *networks[lm.name], data, settings, cache, **running)
                )
            except (FloatingPointError, ValueError) as error:
                raise ValueError(f"{lm.name} cannot be evaluated on {name}: {error}") from error
    return estimates


def estimate_text(
    name: str,
    lm: LM,
    network: FeatureModel,
    weights_sha256: str,
    data: EvalDataset,
    settings: NllSettings,
    cache: Cache,
    **running: Any,
) -> TextNll:
    """Estimate the nll of one model on one text; `running` are the options that do not change the estimate."""
    started, is_causal, documents = (
        time.perf_counter(),
        lm.row_format.is_causal,
        data.document_units(),
    )
    given: list[int] = []
    if settings.count == "text":
        ends = {lm.tokenizer.bos_id, lm.tokenizer.eos_id}
        given = sorted(token for token in ends if token is not None)
    noise = (
        {"draws": 1, "seed": 0} if is_causal else {"draws": settings.draws, "seed": settings.seed}
    )
    objective = adjust_objective(lm, settings)
    is_entropy = objective.name == "score_entropy"
    form = describe_form(objective)
    if lm.loaded.network not in NETWORKS:
        form["network"] = lm.loaded.network  # the same weights may be those of other code
    order = {"order": settings.order}

    def recall(task: str, form: dict[str, Any], order: str | None = None) -> NllEstimate:
        """The cached estimate of these settings, or a new one."""
        options: dict[str, Any] = {"given_tokens": given, **noise}
        key = hash_settings(
            {
                "task": task,
                "weights_sha256": weights_sha256,
                "rows_hash": data.rows_hash,
                **options,
                **form,
            }
        )
        if key not in cache:
            group_rows(len(data.rows), documents)  # raises before anything is computed
            running["on_rows"](0, len(data.rows))
            chosen = NatsSettings(order=order, **options, **running)
            nats = row_nats(network, data.rows, objective, chosen)
            entry = {
                "row_nats": nats.nats.numpy(),
                "row_tokens": nats.tokens.numpy(),
                "noise_stderr": nats.noise_stderr,
                "draws": nats.draws,
            }
            cache.put(key, entry, is_flushed=True)
        stored = cache.get(key)
        nll = summarize_rows(
            torch.tensor(stored["row_nats"]), torch.tensor(stored["row_tokens"]), documents
        )
        return replace(nll, noise_stderr=stored["noise_stderr"], draws=stored["draws"])

    nll = recall("nll", form)
    entry = (
        {"data": name, "model": lm.name}
        | describe_estimate(nll, data.bytes)
        | {"is_bound": not is_causal}
    )
    entry["kind"] = (
        "exact" if is_causal else "nelbo" if settings.steps is None else "discrete_nelbo"
    )
    if settings.order is not None:
        second = recall("order_nll", order, settings.order)
        is_bound = settings.order == RANDOM
        entry["unmasking"] = (
            describe_estimate(second, data.bytes)
            | order
            | {"draws": second.draws, "is_bound": is_bound}
        )
        entry["unmasking"]["kind"] = "unmasking_bound" if is_bound else "unmasking_exact"
    count = len(data.documents.unique())
    entry["se_unit"], entry["se_count"] = (
        ("rows", len(data.rows)) if documents is None else ("documents", count)
    )
    entry |= {
        "rows": len(data.rows),
        "documents": count,
        "bytes": data.bytes,
        "rows_hash": data.rows_hash,
    }
    entry["seconds"] = time.perf_counter() - started
    described = {
        "model": lm.name,
        "method": lm.method,
        "step": lm.step,
        "weights_sha256": weights_sha256,
    }
    described |= {
        "count": settings.count,
        "attend_padding": form.get("attend_padding", False),
    }
    described |= {
        "seed": settings.seed,
        "draws": nll.draws,
        "steps": None if is_causal else settings.steps,
    }
    if not is_causal:
        described |= {"schedule": "loglinear", "min_time": 0.0 if settings.steps else MIN_TIME}
        described["missing"] = objective.missing  # of log(V - 1), for a uniform prediction
    described |= {
        "objective": "score_entropy" if is_entropy else "cross_entropy",
        "precision": "float32",
    }
    entry["settings"] = described | {"data": data.settings}
    return TextNll(entry, nll, data, lm)


def adjust_objective(lm: LM, settings: NllSettings) -> Objective:
    """The objective under which a model's text is scored."""
    objective = lm.objective
    if not isinstance(objective, MaskedDiffusion):
        return objective
    process = replace(objective.process, steps=settings.steps)
    if settings.attend_padding is not None:
        process = replace(process, attend_padding=settings.attend_padding)
    return replace(objective, process=process)


def describe_form(objective: Objective) -> dict[str, Any]:
    """What the key of an estimate says of its objective."""
    form: dict[str, Any] = {"score_entropy": objective.name == "score_entropy"}
    if objective.name not in OBJECTIVES:
        form["objective"] = objective.name
    if isinstance(objective, MaskedDiffusion):
        form["steps"] = objective.process.steps
        form["attend_padding"] = objective.process.attend_padding
    return form


def describe_estimate(nll: NllEstimate, size: int) -> dict[str, Any]:
    """An estimate by the names of the JSON; the error of bits per byte takes the bytes per token as fixed."""
    bits = nll.bits_per_byte(size)
    described = {
        "nll": nll.nll,
        "ppl": nll.ppl,
        "se": nll.stderr,
        "se_noise": nll.noise_stderr,
        "tokens": nll.tokens,
    }
    return described | {"bits_per_byte": bits, "bits_per_byte_se": bits * nll.stderr / nll.nll}


def pair_models(estimates: Sequence[TextNll]) -> list[dict[str, Any]]:
    """On every text, the paired difference of each further model to the first one."""
    by_text: dict[str, list[TextNll]] = {}
    for each in estimates:
        by_text.setdefault(each.entry["data"], []).append(each)
    return [compare(each, first) for first, *rest in by_text.values() for each in rest]


def compare(model: TextNll, baseline: TextNll) -> dict[str, Any]:
    """The difference model − baseline with its paired standard error.

    Two masked or two causal models on the same rows share rows and noise: nats per token over documents (or rows).
    Otherwise bits per byte over the documents that both have; rows that begin in a document which begins no row of the
    other model join the document before.
    """
    data, other = model.data, baseline.data
    is_same_rows = data.rows_hash == other.rows_hash
    documents, other_documents, se_unit = (
        data.documents.numpy(),
        other.documents.numpy(),
        "documents",
    )
    if is_same_rows and data.document_units() is None:
        documents = other_documents = np.arange(len(data.rows))
        se_unit = "rows"
    common, last = (
        np.intersect1d(documents, other_documents),
        min(documents.max(), other_documents.max()),
    )
    if is_same_rows and model.entry["is_bound"] == baseline.entry["is_bound"]:
        counts, other_counts = (each.nll.row_tokens.numpy() for each in (model, baseline))
        unit, scale = "nats/token", 1.0
    else:
        counts = count_row_bytes(data, model.lm.tokenizer)
        other_counts = counts if is_same_rows else count_row_bytes(other, baseline.lm.tokenizer)
        unit, scale = "bits/byte", 1 / math.log(2)

    def sum_by_document(values: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
        is_used = numbers <= last
        places = np.searchsorted(common, numbers[is_used], "right") - 1
        return np.bincount(places, weights=values[is_used], minlength=len(common))

    sums = []
    for each, numbers, own in (
        (model, documents, counts),
        (baseline, other_documents, other_counts),
    ):
        sums += [
            sum_by_document(values, numbers) for values in (each.nll.row_nats.numpy() * scale, own)
        ]
    difference, stderr = estimate_ratio_difference(*sums)
    names = {
        "data": model.entry["data"],
        "model": model.lm.name,
        "baseline": baseline.lm.name,
        "unit": unit,
    }
    return names | {
        "difference": difference,
        "se": stderr,
        "se_unit": se_unit,
        "se_count": len(common),
    }


def warn_few_units(entry: Mapping[str, Any]) -> list[str]:
    """A warning if the standard error of an entry rests on few documents or rows."""
    count, unit = entry["se_count"], entry["se_unit"]
    return [f"standard error estimated from only {count} {unit}"] if count < MIN_UNITS else []


def list_warnings(estimate: TextNll) -> list[str]:
    """What limits the meaning of an estimate."""
    entry, data, warnings = estimate.entry, estimate.data.settings, warn_few_units(estimate.entry)
    if estimate.lm.row_format.is_framed and data["rows"] == "wrapped" and entry["documents"] > 1:
        warnings.append(
            "the model was trained on rows of one document each, these are wrapped; rows=documents matches"
        )
    if data.get("documents_cut") and data["rows"] == "documents":
        problem = f"{data['documents_cut']:,} of {data['documents']:,} documents are longer than a row and cut"
        warnings.append(
            f"{problem}: {data['tokens_dropped']:,} tokens are left out; rows=wrapped keeps them"
        )
    return warnings


def group_warnings(
    reasons: Sequence[Sequence[str]], entries: Sequence[Mapping[str, Any]], kind: str
) -> list[str]:
    """Every warning once, with the texts (key `kind`) and models of the entries that it applies to."""
    names, grouped = shorten_names([entry["model"] for entry in entries]), dict[str, list[str]]()
    for entry, own in zip(entries, reasons, strict=True):
        label = entry[kind] if len(names) == 1 else f"{entry[kind]} ({names[entry['model']]})"
        for reason in own:
            grouped.setdefault(reason, []).append(label)
    if len(entries) == 1:
        return list(grouped)
    names = {
        reason: "all" if len(own) == len(entries) else ", ".join(own)
        for reason, own in grouped.items()
    }
    return [f"{label}: {reason}" for reason, label in names.items()]


def format_estimates(entry: Mapping[str, Any], digits: int = 4) -> list[str]:
    """nats/token, perplexity and bits/byte of an entry as text, with ≤ before an upper bound."""
    sign = "≤ " if entry["is_bound"] else ""
    estimates = (
        Estimate(entry["nll"], entry["se"]),
        Estimate(entry["bits_per_byte"], entry["bits_per_byte_se"]),
    )
    nll, bits = (each.format(digits, sign) for each in estimates)
    return [nll, f"{sign}{entry['ppl']:,.2f}", bits]


def tabulate(entries: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each estimate."""
    names = shorten_names([entry["model"] for entry in entries])
    texts = shorten_names([entry["data"] for entry in entries])
    columns = [TableColumn("data", is_text=True)] if len(texts) > 1 else []
    columns += [TableColumn("model", is_text=True), TableColumn("estimate", is_text=True)]
    columns += [TableColumn(name) for name in ("nats/token", "perplexity", "bits/byte")]
    columns += [
        TableColumn("noise s.e.", 4, is_optional=True),
        TableColumn("tokens", is_optional=True),
    ]
    columns += [TableColumn("rows' hash", is_text=True, is_optional=True)]
    rows: list[list[Any]] = []
    for entry in entries:
        for each in filter(None, (entry, entry.get("unmasking"))):
            kind = KINDS[each["kind"]].format(
                steps=entry["settings"]["steps"], order=each.get("order")
            )
            cells = [
                texts[entry["data"]],
                names[entry["model"]],
                kind,
                *format_estimates(each),
                each["se_noise"],
            ]
            rows.append([*cells[len(texts) == 1 :], each["tokens"], entry["rows_hash"][:8]])
    units, count = sorted({entry["se_unit"] for entry in entries}), entries[0]["settings"]["count"]
    notes = [f"± is a standard error over {' or '.join(units)}; {COUNTS[count]}."]
    notes.append(
        "Nats per token compare only on the same rows, bits per byte also between tokenizers and texts."
    )
    if any(entry["is_bound"] for entry in entries):
        notes.append("≤ is an upper bound: the model may be better, not worse.")
    if any("unmasking" in entry for entry in entries):
        notes.append(
            "The likelihood under an order is that of the sampler that decodes in this order."
        )
    return Table(columns, rows, title=entries[0]["data"] if len(texts) == 1 else "", notes=notes)


def tabulate_differences(differences: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each paired difference."""
    names = shorten_names([each[key] for each in differences for key in ("model", "baseline")])
    columns = [
        TableColumn("data", is_text=True),
        TableColumn("difference", is_text=True),
        TableColumn("unit", is_text=True),
    ]
    columns += [TableColumn("value", 4), TableColumn("over", is_text=True, is_optional=True)]
    rows: list[list[Any]] = []
    for each in differences:
        text, pair = (
            Path(each["data"]).name or each["data"],
            f"{names[each['model']]} − {names[each['baseline']]}",
        )
        difference, over = (
            Estimate(each["difference"], each["se"]),
            f"{each['se_count']:,} {each['se_unit']}",
        )
        rows.append([text, pair, each["unit"], difference, over])
    return Table(
        columns, rows, title="Paired differences", notes=["Below 0: better than the first model."]
    )


# Zero-shot perplexity on the paper's eight sets, in the lineage's form (MDLM/SEDD code); see docs/zeroshot.md.

PAPER = (
    "ADLM",
    "MDLM",
    "AR",
)  # trained on 524B tokens of OpenWebText; the first two are upper bounds
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
    "wikitext103": ZeroShotSet(
        "wikitext103", 3_760, (31.94, 32.83, 25.75)
    ),  # raw: the validation text of wikitext2
    "lm1b": ZeroShotSet("lm1b", 306_688, (64.43, 67.01, 51.25)),
    "ag_news": ZeroShotSet("ag_news", 7_600, (55.72, 61.15, 52.09)),
    "pubmed": ZeroShotSet("scientific_papers_pubmed", 6_633, (37.56, 41.89, 49.01)),
    "arxiv": ZeroShotSet("scientific_papers_arxiv", 6_436, (33.69, 37.37, 41.73)),
}
ALIASES = {"wikitext-2": "wikitext2", "wikitext-103": "wikitext103", "lm1b-gpt2": "lm1b"}
ALIASES |= {each.corpus: name for name, each in SETS.items()}


def find_set(name: str) -> str:
    """The name in `SETS` of a set, which may also be the lineage's name."""
    check_known("set", name, {**SETS, **ALIASES})
    return ALIASES.get(name, name)


def locate_set(name: str, data_dir: Path | None = None) -> str:
    """The source of a set for `load_eval_data`: its folder in `data_dir`, by any of its names, else the Hub's name."""
    corpus, names = (
        SETS[name].corpus,
        [name, *(alias for alias, known in ALIASES.items() if known == name)],
    )
    if data_dir is None:
        try:
            open_source(corpus, split=SPLIT)
        except (FileNotFoundError, ImportError) as error:
            raise FileNotFoundError(
                f"{name}: {error}; give --data-dir with a folder {name!r}"
            ) from error
        return corpus
    if not data_dir.is_dir():
        raise ValueError(
            f"--data-dir {data_dir} is not a folder: give the folder that holds the sets"
        )
    if not (folders := [data_dir / each for each in names if (data_dir / each).is_dir()]):
        remedy = f"put its files into a folder {name!r} there, or leave --data-dir out to load it from the Hub"
        raise FileNotFoundError(f"{name} is not in {data_dir}: {remedy}")
    return f"{corpus}:{folders[0]}"


def compare_with_paper(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's perplexities on a set, and why an estimate on rows with these settings is not comparable to them."""
    label, whole, is_limited = (
        settings["stand_in"],
        SETS[name].documents,
        settings["limit"] is not None,
    )
    documents = whole if is_limited else settings["documents"] + settings["documents_dropped"]
    marks, is_other = (
        settings["unk_marks"],
        settings["tokenizer_sha256"] != load_tokenizer(PAPER_TOKENIZER).sha256,
    )
    deviations = {
        f"stand-in: {label}": label,
        f"tokenizer {settings['tokenizer']}, not {PAPER_TOKENIZER}: perplexities per token do not compare": is_other,
        f"{marks:,} <unk> marks in the text, where the lineage reads the raw form": marks,
        f"rows of {settings['length']} tokens, not {PAPER_LENGTH}": settings["length"]
        != PAPER_LENGTH,
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

    A set is read from its folder in `data_dir`, by default from the Hub. The same call with the folder `out` resumes.
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
        raise ValueError(
            f"none of the sets was found, and at least one is required: {'; '.join(missing.values())}"
        )
    # Rank 0 decides: ranks with other sets would wait for each other for ever.
    sources, missing = context.all_gather({"located": (sources, missing)})[0]["located"]

    same: dict[str, Any] = {
        "batch": batch,
        "out": out,
        "context": context,
        "on_progress": on_progress,
    }
    load = partial(load_eval_data, split=SPLIT, rows=rows or ROWS, limit=limit, workers=workers)
    estimates = estimate_texts(lms, sources, load, NllSettings(draws, seed), length=length, **same)
    entries, dropped = [], ("data", "kind", "documents", "seconds", "settings")
    for each in estimates:
        name = each.entry["data"]
        entry = {"set": name} | {
            key: value for key, value in each.entry.items() if key not in dropped
        }
        own = {
            key: value
            for key, value in (each.entry["settings"] | each.data.settings).items()
            if key != "data"
        }
        entries.append(entry | compare_with_paper(name, each.data.settings) | {"settings": own})
    keys = ("model", "method", "step", "weights_sha256", "draws", "seed", "length")
    described = [{key: entry["settings"][key] for key in keys} for entry in entries[: len(lms)]]
    single = described[0] if len(lms) == 1 else {}
    metrics: dict[str, Any] = {name: single[name] for name in ("model", "method") if single}
    differences = pair_models(estimates)
    metrics |= {
        "models": described,
        "sets": entries,
        "missing": missing,
        "differences": differences,
    }
    warnings = group_warnings(
        [entry["deviations"] + warn_few_units(entry) for entry in entries], entries, "set"
    )
    warnings += [f"missing: {reason}" for reason in missing.values()]
    tables = [tabulate_sets(entries)] + ([tabulate_differences(differences)] if differences else [])
    shared = {"draws": draws, "seed": seed, "length": length, "rows": rows, "limit": limit}
    provenance = collect_provenance(lms[0].device, processes=context.world_size)
    return EvalResult("zero_shot", metrics, shared | single, provenance, tables, warnings)


def tabulate_sets(entries: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each set and model, with the paper's perplexities in brackets where they do not compare."""
    names = shorten_names([entry["model"] for entry in entries])
    columns = [TableColumn("set", is_text=True), TableColumn("model", is_text=True)]
    columns += [
        TableColumn(name)
        for name in ("nats/token", "ppl", "bits/byte", f"paper ({'/'.join(PAPER)})")
    ]
    columns += [
        TableColumn("tokens", is_optional=True),
        TableColumn("rows' hash", is_text=True, is_optional=True),
    ]
    rows: list[list[Any]] = []
    for entry in entries:
        paper = "stand-in"
        if entry["paper"] is not None:
            paper = "/".join(f"{entry['paper'][name]:.2f}" for name in PAPER)
            paper = paper if entry["is_comparable"] else f"({paper})"
        cells = [
            entry["set"] + ("*" if entry["label"] else ""),
            names[entry["model"]],
            *format_estimates(entry, 3),
        ]
        rows.append([*cells, paper, entry["tokens"], entry["rows_hash"][:8]])
    notes = [
        "± is a standard error, ≤ an upper bound. Bits per byte compare across tokenizers, the others do not."
    ]
    if any(entry["paper"] for entry in entries):
        notes.append(
            "The paper's models were trained on 524B tokens of OpenWebText; brackets: the rows are not the paper's."
        )
    return Table(columns, rows, notes=notes)
