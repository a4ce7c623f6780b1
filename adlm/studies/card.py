"""The evaluation card: what the other commands found, as sections of plain data that one renderer draws.

A section is a function from answers (the JSON of `adlm eval …`) to tables, pictures and words. What was not measured is
a section too, and says why. Everything that a page shows is in the card's data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adlm.evaluate.ngrams import count_bigrams, held_out_nll
from adlm.evaluate.reading import Reading
from adlm.evaluate.reading import read as read_rows
from adlm.evaluate.zeroshot import weights_hash
from adlm.text.lm import LM

FORMAT = 1
Answer = Mapping[str, Any]
Cell = str | dict[str, Any] | None
PATH = re.compile(r"(?<![\w./])/(?:[^\s/:'\"]+/)+[^\s/:'\"]+")
WRITTEN = ("text", "completion", "written", "before", "removed", "after")  # what is not searched for paths
FIRST = ("ppl", "samples")  # sections that the summary is of
BASELINES = ("unigram", "bigram")


def figure(value: float | None, se: float | None = None, digits: int = 3, sign: str = "") -> Cell:
    """A number in a table, with its standard error."""
    return None if value is None else {"value": value, "se": se, "digits": digits, "sign": sign}


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = "") -> dict[str, Any]:
    """A table; its first columns hold words."""
    assert all(len(row) == len(columns) for row in rows)
    return {"caption": caption, "columns": list(columns), "rows": [list(row) for row in rows]}


def metric(model: str, kind: str, name: str, shown: Cell, data: str) -> dict[str, Any]:
    """A figure for the model page's index, from how it stands in a table."""
    assert isinstance(shown, dict)
    return {"model": model, "type": kind, "name": name, "value": shown["value"], "data": data, "shown": shown}


def section(
    name: str,
    title: str,
    *,
    tables: Sequence[dict[str, Any]] = (),
    pictures: Sequence[dict[str, str]] = (),
    texts: Sequence[dict[str, Any]] = (),
    metrics: Sequence[dict[str, Any]] = (),
    read: str = "",
    why: str | None = None,
) -> dict[str, Any]:
    """A part of the card; with `why` it is one that was not measured."""
    found: dict[str, Any] = {"name": name, "title": title, "is_measured": why is None, "why": why, "read": read}
    return found | {"tables": [*tables], "pictures": [*pictures], "texts": [*texts], "metrics": [*metrics]}


def likelihood(answers: Sequence[Answer]) -> dict[str, Any]:
    """Held-out likelihood of each model, and what knows only counts beside it."""
    rows: list[list[Cell]] = []
    metrics = []
    for each in answers:
        if "baselines" in each:
            continue
        settings = each["settings"]
        model, data = str(settings["model"]), str(settings["data"]["source"])
        for found in (each, *([each["unmasking"]] if each.get("unmasking") else [])):
            sign = "≤ " if found["is_bound"] else ""
            rows.append([model, kind_of(found), *_figures(found, sign), figure(each["rows"], digits=0)])
        _, ppl, bits, _ = _figures(each, sign := "≤ " if each["is_bound"] else "")
        metrics += [
            metric(model, "perplexity", f"Perplexity{' (upper bound)' if sign else ''}", ppl, data),
            metric(model, "bits_per_byte", "Bits per byte", bits, data),
        ]
    for each in answers:
        for name, found in each.get("baselines", {}).items():
            rows.append([name, "counts, exact", *_figures(found, ""), None])
    columns = ["model", "figure", "nats/token", "perplexity", "bits/byte", "tokens", "rows"]
    data = "; ".join(dict.fromkeys(data_of(each) for each in answers if "baselines" not in each))
    return section(
        "ppl",
        "Held-out likelihood",
        tables=[table(columns, rows, data)],
        metrics=metrics,
        read="Lower is better. ≤ is a bound from above: the model may be better, not worse. ± is a standard error over "
        "documents (over rows where there is one); it contains the noise. Bits per byte compare between tokenizers.",
    )


def kind_of(found: Answer) -> str:
    """What kind of likelihood a figure is."""
    words = {"exact": "exact", "nelbo": "NELBO", "discrete_nelbo": "NELBO, discrete time"}
    words |= {"unmasking_exact": f"exact, {found.get('order')} order", "unmasking_bound": "NELBO, random order"}
    return words.get(found["figure"], str(found["figure"]))


def data_of(answer: Answer) -> str:
    """The rows that an answer is about, in words."""
    data = answer["settings"]["data"]
    return f"{data['source']}, {data['rows']} rows of {data['length']} tokens, sha256 {answer['rows_hash'][:16]}"


def _figures(found: Answer, sign: str) -> list[Cell]:
    figures = [figure(found["nll"], found["se"], 4, sign), figure(found["ppl"], None, 2, sign)]
    return [*figures, figure(found["bits_per_byte"], None, 4, sign), figure(found["tokens"], digits=0)]


def samples(answers: Sequence[Answer]) -> dict[str, Any]:
    """Gen-PPL, MAUVE and entropy of each model's texts together, and of as much real text beside them."""
    columns = ["texts", "Gen-PPL", "MAUVE", "from", "to", "entropy", "distinct-2", "repetition-4", "self-BLEU"]
    tables, metrics, warnings = [], [], []
    for each in answers:
        settings = each["settings"]
        written, judge = settings.get("samples", {}), settings["judge"]["name"]
        model = str(written.get("model") or written.get("texts"))
        rows: list[list[Cell]] = []
        for name, found in ((model, each["samples"]), ("real text", each["reference"])):
            mauve, ppl = found["mauve"], found["gen_ppl"]
            figures = [figure(ppl["value"], ppl["stderr"], 1)]
            figures += [figure(mauve[key]) for key in ("value", "low", "high")]
            kinds = ("entropy", "distinct_2", "repetition_4", "self_bleu")
            rows.append([name, *figures, *(figure(found[kind]["value"], found[kind]["stderr"]) for kind in kinds)])
        said = f"{settings['texts']} texts of each kind, {settings['tokens']} tokens; judge {judge}"
        known = [key for key in ("sampler", "steps", "temperature", "top_p") if key in written]
        how = ", ".join(f"{key} {written[key]}" for key in known)
        tables.append(table(columns, rows, f"{said}; {how}" if how else said))
        found, data = each["samples"], str(settings["reference"]["name"])
        kept = {"gen_ppl": f"Gen-PPL ({judge})", "mauve": "MAUVE", "entropy": "Unigram entropy"}
        for kind, name in kept.items():
            error = None if kind == "mauve" else found[kind]["stderr"]  # it has an interval, below
            shown = figure(found[kind]["value"], error, 1 if kind == "gen_ppl" else 3)
            metrics.append(metric(model, kind, name, shown, data))
        warnings += each.get("warnings", [])
    return section(
        "samples",
        "Sample quality",
        tables=tables,
        metrics=metrics,
        read=" ".join(
            [
                "Samples are good where all their figures are near those of real text: a Gen-PPL below it with less "
                "entropy is repetition. ± is a standard error over texts, MAUVE has a 95% interval. Figures compare "
                "with the same judge, and equally many texts of one length.",
                *dict.fromkeys(warnings),
            ]
        ),
    )


def frontier(answers: Sequence[Answer]) -> dict[str, Any]:
    """Ways of writing against evaluations, time and entropy."""
    tables, pictures = [], []
    columns = ["model", "sampler", "steps", "T", "p", "best", "NFE", "ms/text"]
    columns += ["tokens", "Gen-PPL", "entropy", "repeated-4"]
    for number, each in enumerate(answers, 1):
        rows: list[list[Cell]] = []
        for point in each["points"]:
            words: list[Cell] = [point["model"], point["sampler"], figure(point["steps"], digits=0)]
            words += [figure(point["temperature"], digits=2), figure(point["top_p"], digits=2)]
            words += ["★" if point["is_pareto"] else ""]
            time = figure(1000 * point["seconds"], 1000 * point["seconds_sd"], 2)
            rows.append([*words, figure(point["nfe"], digits=1), time, *_quality(point)])
        if each.get("reference"):
            rows.append(["held-out text", *[None] * 4, "", None, None, *_quality(each["reference"])])
        settings = each["settings"]
        tables.append(table(columns, rows, f"{settings['n']} texts of {settings['length']} tokens each"))
        pictures.append({"name": f"frontier-{number}", "kind": "frontier", "alt": "Quality against NFE, time, entropy"})
    return section(
        "frontier",
        "Quality against cost",
        tables=tables,
        pictures=pictures,
        read="★: no other point has as few evaluations (NFE), as low a Gen-PPL, as high an entropy, and is better in "
        "one. A low Gen-PPL at a low entropy is repetition. ± is a standard error over texts; of times, the standard "
        "deviation between timings on this machine.",
    )


def _quality(found: Answer) -> list[Cell]:
    judged = figure(found["gen_ppl"], found["gen_ppl_se"], 1)
    told = [figure(found["tokens"], digits=1), judged]
    return [*told, *(figure(found[name], found[f"{name}_se"]) for name in ("entropy", "repetition_4"))]


def anchors(answers: Sequence[Answer]) -> dict[str, Any]:
    """What the anchor network knows, what the model is without it, and when anchors are revealed."""
    tables: list[dict[str, Any]] = []
    pictures: list[dict[str, str]] = []
    for study in (study for each in answers for study in each["models"]):
        guesses: list[list[Cell]] = []
        for each in study["guesses"]:
            if tuple(each["mask_rate"]) == (0.0, 1.0):
                words = [{"anchor": "anchor network", "final": "denoiser"}.get(each["head"], each["head"])]
                words += [f"{each['state']} {each['kind']}"]
                known = [figure(each[name], each[f"{name}_se"]) for name in ("accuracy", "nll", "calibration_error")]
                guesses.append([*words, figure(each["tokens"], digits=0), *known])
        columns = ["head", "tokens that are", "tokens", "accuracy", "nll", "calibration error"]
        tables.append(table(columns, guesses, f"{study['model']}: guesses"))
        losses: list[list[Cell]] = [
            [each["change"], figure(each["nll"], each["nll_se"], 4), figure(each["cost"], each["cost_se"], 4)]
            for each in study["losses"]
        ]
        tables.append(table(["anchor features", "nll", "cost"], losses, f"{study['model']}: the bound without them"))
        if study["reveals"]:
            reveals: list[list[Cell]] = [
                [each["sampler"], *(figure(each[name], each[f"{name}_se"]) for name in ("anchors", "others", "gap"))]
                for each in study["reveals"]
            ]
            columns = ["sampler", "anchors' rank", "others' rank", "difference"]
            tables.append(table(columns, reveals, f"{study['model']}: when anchors are revealed"))
        name = f"anchors-{len(pictures) + 1}"
        pictures.append({"name": name, "kind": "anchors", "alt": f"{study['model']}: anchors"})
    return section(
        "anchors",
        "The anchor network",
        tables=tables,
        pictures=pictures,
        read="A cost is against the model as it is, on the same noise: how much worse the bound gets when the anchor "
        "features are noisy, from another place or row, or out of date. Ranks are 0 for what is revealed first, 1 for "
        "last. ± is a standard error over rows or texts.",
    )


def zeroshot(answers: Sequence[Answer]) -> dict[str, Any]:
    """Perplexity on the sets of the lineage, a set's models below each other."""
    rows: dict[str, list[list[Cell]]] = {}
    metrics, reasons = [], dict[str, None]()
    for each in answers:
        for row in each["sets"]:
            model, said = str(row["model"]), f" ({row['label']})" if row["label"] else ""
            figures = _figures(row, "≤ " if row["is_bound"] else "")
            rows.setdefault(row["set"], []).append([row["set"] + said, model, *figures, row["rows_hash"][:8]])
            metrics.append(metric(model, "perplexity", "Perplexity", figures[1], row["set"]))
            reasons |= dict.fromkeys(row["differs"])
    columns = ["set", "model", "nats/token", "perplexity", "bits/byte", "tokens", "rows"]
    read = "Text that the models were not trained on. ≤ is a bound from above; rows is the beginning of their hash. "
    read += f"Not comparable with published figures: {'; '.join(reasons)}." if reasons else ""
    lines = [line for each in rows.values() for line in each]
    return section("zeroshot", "Zero-shot likelihood", tables=[table(columns, lines)], metrics=metrics, read=read)


def domains(answers: Sequence[Answer]) -> dict[str, Any]:
    """Bits per byte on kinds of text, a kind's models below each other."""
    rows: dict[str, list[list[Cell]]] = {}
    for each in answers:
        for row in each["domains"]:
            bits = figure(row["bits_per_byte"], row["bits_per_byte_se"], 4, sign := "≤ " if row["is_bound"] else "")
            line = [row["domain"], str(row["model"]), bits]
            line += [figure(row["nll"], row["se"], 4, sign), figure(row["tokens"], digits=0), row["rows_hash"][:8]]
            rows.setdefault(row["domain"], []).append(line)
    columns = ["domain", "model", "bits/byte", "nats/token", "tokens", "rows"]
    lines = [line for each in rows.values() for line in each]
    read = "Bits per byte compare between domains, nats per token do not. rows is the beginning of their hash."
    return section("domains", "Kinds of text", tables=[table(columns, lines)], read=read)


def code(answers: Sequence[Answer]) -> dict[str, Any]:
    """Python that parses, and problems that are solved, a share's models below each other."""
    rows: dict[str, list[list[Cell]]] = {}
    for each in answers:
        shares = {f"written: {name}": one for name, one in (each.get("written") or {}).items()}
        for kind, filled in (each.get("filled_in") or {}).items():
            shares |= {f"filled in, {kind}: {name}": one for name, one in filled["shares"].items()}
        for name, one in (shares | (each.get("pass") or {})).items():
            known = [figure(one[key]) for key in ("value", "low", "high")]
            line = [name, str(each["settings"]["model"] or ""), *known, figure(one["count"], digits=0)]
            rows.setdefault(name, []).append(line)
    lines = [line for each in rows.values() for line in each]
    read = "Shares with 95% intervals; docs/code.md says what they count."
    return section("code", "Python", tables=[table(["what", "model", "share", "from", "to", "of"], lines)], read=read)


def examples(answers: Sequence[Answer]) -> dict[str, Any]:
    """A few texts as they came, none chosen."""
    texts = [
        {"model": each["settings"]["model"], "text": text, "settings": each["settings"]}
        for each in answers
        for text in each["texts"]
    ]
    return section("examples", "Texts", texts=texts, read="The first texts of the seed, none chosen.")


def baselines(lm: LM, train: str | Path, data: str | Path, **how: Any) -> dict[str, Any]:
    """What a unigram and a bigram model of the training text are worth on the rows that the model is measured on."""
    given: Reading = read_rows(train, lm.tokenizer, lm.model.config.length, split="train", rows=how.get("rows"))
    held: Reading = read_rows(data, lm.tokenizer, lm.model.config.length, **how)
    counted = count_bigrams(given.rows, lm.model.config.vocab_size)
    found = {}
    for name, nll in zip(BASELINES, (counted.unigram_nll, counted.nll), strict=True):
        bound = held_out_nll(nll, held.rows)
        found[name] = {"nll": bound.nll, "se": bound.stderr, "ppl": bound.ppl, "tokens": bound.tokens}
        found[name]["bits_per_byte"] = bound.bits_per_byte(held.bytes)
    settings = {"train": given.settings, "train_rows_hash": given.rows_hash, "data": held.settings}
    return {"baselines": found, "rows_hash": held.rows_hash, "settings": settings}


SECTIONS: dict[str, tuple[str, Callable[[Sequence[Answer]], dict[str, Any]]]] = {
    "ppl": ("Held-out likelihood", likelihood),
    "samples": ("Sample quality", samples),
    "frontier": ("Quality against cost", frontier),
    "anchors": ("The anchor network", anchors),
    "zeroshot": ("Zero-shot likelihood", zeroshot),
    "domains": ("Kinds of text", domains),
    "code": ("Python", code),
    "examples": ("Texts", examples),
}


def facts_of(lm: LM) -> dict[str, Any]:
    """What a model is."""
    config = lm.model.config
    return {
        "name": lm.name,
        "method": lm.method,
        "step": lm.step,
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "length": config.length,
        "vocab_size": config.vocab_size,
        "is_causal": config.is_causal,
        "is_two_stage": lm.model.anchor is not None,
        "tokenizer": lm.tokenizer.name,
        "tokenizer_sha256": lm.tokenizer.sha256,
        "weights_sha256": weights_hash(lm.model),
    }


def summary(models: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A line for each model with what people ask for first."""
    heads = {"perplexity": "perplexity", "bits_per_byte": "bits/byte"}
    heads |= {"gen_ppl": "Gen-PPL", "mauve": "MAUVE", "entropy": "entropy"}
    known = {(each["model"], each["type"]): each["shown"] for each in metrics}
    kinds = [kind for kind in heads if any(each["type"] == kind for each in metrics)]
    rows = [[each["name"], *(known.get((each["name"], kind)) for kind in kinds)] for each in models]
    return table(["model", *(heads[kind] for kind in kinds)], rows)


def make_card(
    models: Sequence[dict[str, Any]],
    answers: Mapping[str, Sequence[Answer]],
    missing: Mapping[str, str],
    commands: Mapping[str, Sequence[str]],
    **about: Any,
) -> dict[str, Any]:
    """The card's data: every section, measured or with the reason why it is not."""
    parts = []
    for name, (title, made) in SECTIONS.items():
        given = list(answers.get(name, ()))
        if given:
            part = made(given)
        else:
            part = section(name, title, why=missing.get(name, "nobody asked for it"))
        told = [each["provenance"] for each in given if "provenance" in each]
        origins = dict.fromkeys(origin(each) for each in told)
        parts.append(part | {"commands": list(commands.get(name, ())), "origins": list(origins), "answers": given})
    first = summary(models, [each for part in parts if part["name"] in FIRST for each in part["metrics"]])
    metrics = [each for part in parts for each in part.pop("metrics")]
    found = {"format": FORMAT, "models": list(models), "summary": first, "sections": parts, "metrics": metrics}
    return found | about


def origin(found: Mapping[str, Any]) -> str:
    """What computed a figure: commit, hardware and torch."""
    return f"commit {found['commit']}, {found['device']}, torch {found['versions']['torch']}"


def scrubbed(value: Any, names: Mapping[str, str]) -> Any:
    """The same data with paths of this machine replaced by what `names` calls them, others by their last part.

    What a model wrote stays as it is.
    """
    if isinstance(value, Mapping):
        kept = {key: each for key, each in value.items() if key != "files"}
        return {key: each if _is_written(key, each) else scrubbed(each, names) for key, each in kept.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(each, names) for each in value]
    if isinstance(value, str):
        for path, name in sorted(names.items(), key=lambda pair: -len(pair[0])):
            value = value.replace(path, name)
        return PATH.sub(lambda found: found[0].rpartition("/")[2], value)
    return value


def _is_written(key: str, value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return is_list if key == "texts" else key in WRITTEN and isinstance(value, str)
