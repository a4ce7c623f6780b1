"""Perplexity on sets that a model was not trained on, in the lineage's form: the sets as a table, then their figures.

Every choice is written down in docs/zeroshot.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from adlm.data.corpora import find_corpus
from adlm.data.prepare import Progress
from adlm.data.sources import open_source
from adlm.data.splits import split_in
from adlm.data.tokenizers import Tokenizer, load_tokenizer
from adlm.evaluate.lines import Line, OnProgress, Subject, lines
from adlm.evaluate.reading import Reading, read
from adlm.models.language_model import LanguageModel

PAPER = ("ADLM", "MDLM", "AR")  # trained on 524B tokens of OpenWebText; of the first two an upper bound
PAPER_TOKENIZER, PAPER_LENGTH = "gpt2", 1024
SPLIT = "valid"  # which the lineage takes; of sets that have none, corpora.py names the Hub's test split so


@dataclass(frozen=True)
class TestSet:
    """One set of the paper: how the lineage reads it, and the perplexities that the paper gives."""

    __test__ = False  # for pytest, which collects what is called Test

    corpus: str  # its name in adlm/data/corpora.py, which knows column, detokenizer and splits
    documents: int  # of the split, as the Hub has it
    paper: tuple[float, float, float]
    places: tuple[str, ...]  # where it may lie in a folder of sets, as patterns; the first that is there
    note: str
    rows: Literal["wrapped", "documents"] = "wrapped"


WIKITEXT = (31.94, 32.83, 25.75)
SAME_ARTICLES = "validation split, a line to a document; in the raw form the same text as that of the other WikiText"
SETS: dict[str, TestSet] = {
    "lambada": TestSet(
        "lambada",
        5_153,
        (44.32, 47.52, 51.28),
        ("lambada", "lambada_test.jsonl*"),
        "OpenAI's test file; whole passages are scored, not their last words",
    ),
    "ptb": TestSet(
        "ptb",
        3_370,
        (95.37, 95.26, 82.05),
        ("ptb", "ptb.valid.txt*"),
        "validation split; <unk> becomes ?, N becomes 1; in the lineage's many processes it fills no row of 1024",
    ),
    "wikitext2": TestSet("wikitext2", 3_760, WIKITEXT, ("wikitext2", "wikitext-2", "wikitext-2-raw"), SAME_ARTICLES),
    "wikitext103": TestSet(
        "wikitext103", 3_760, WIKITEXT, ("wikitext103", "wikitext-103", "wikitext-103-raw"), SAME_ARTICLES
    ),
    "lm1b": TestSet(
        "lm1b",
        306_688,
        (64.43, 67.01, 51.25),
        ("lm1b", "1-billion-word*", "news.en.heldout*"),
        "test split, wrapped: only models that were trained on LM1B see a sentence to a row",
    ),
    "ag_news": TestSet(
        "ag_news",
        7_600,
        (55.72, 61.15, 52.09),
        ("ag_news", "ag_news*.csv*"),
        "test split; title and description joined by a blank, nothing cleaned up",
    ),
    "pubmed": TestSet(
        "scientific_papers_pubmed",
        6_633,
        (37.56, 41.89, 49.01),
        ("pubmed", "scientific_papers_pubmed"),
        "validation split; whole articles, cleaned up as WikiText and then as LM1B",
    ),
    "arxiv": TestSet(
        "scientific_papers_arxiv",
        6_436,
        (33.69, 37.37, 41.73),
        ("arxiv", "scientific_papers_arxiv"),
        "validation split; whole articles, cleaned up as WikiText and then as LM1B",
    ),
}
ALIASES = {
    "wikitext-2": "wikitext2",
    "wikitext-103": "wikitext103",
    "lm1b-gpt2": "lm1b",
    "scientific_papers_pubmed": "pubmed",
    "scientific_papers_arxiv": "arxiv",
}


class Missing(FileNotFoundError):
    """A set that is not where it was looked for."""


def find_set(name: str) -> str:
    """The name in `SETS` of a set that may be called as the lineage does."""
    known = ALIASES.get(name, name)
    if known not in SETS:
        raise ValueError(f"no set is called {name!r}; there are {', '.join(SETS)}")
    return known


def locate(name: str, *, folder: Path | None = None, given: Mapping[str, Path] | None = None) -> str:
    """What `read` takes: the place that is given for a set, else its place in the folder, else the Hub's name."""
    found = SETS[name]
    if given and name in given:
        place = given[name].expanduser()
        if not place.exists():
            raise Missing(f"{name}: no file or folder {str(place)!r}: check --set {name}=PATH")
        return f"{found.corpus}:{place}"
    if folder is None:
        try:
            open_source(found.corpus, split=SPLIT)
        except (FileNotFoundError, ImportError) as error:
            raise Missing(f"{name}: {error}; give --set {name}=PATH, or --data-dir with a folder {name!r}") from error
        return found.corpus
    if not folder.is_dir():
        raise ValueError(f"--data-dir {folder} is no folder")
    for pattern in found.places:
        places = sorted(folder.glob(pattern))
        if len(places) > 1:
            listed = ", ".join(place.name for place in places)
            raise ValueError(f"{name} may be any of {listed} in {folder}: choose one with --set {name}=PATH")
        if places:
            return f"{found.corpus}:{places[0]}"
    raise Missing(
        f"{name} is not in {folder}: put its files there as {' or '.join(found.places)}, give --set {name}=PATH, or "
        "leave --data-dir out to have it from the Hub"
    )


def located(
    names: Sequence[str], *, folder: Path | None, given: Mapping[str, Path], skip_missing: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Where each set is, and of those that are not there why; without `skip_missing` that is an error."""
    found, missing = {}, {}
    for name in names:
        try:
            found[name] = locate(name, folder=folder, given=given)
        except Missing as error:
            if not skip_missing:
                raise Missing(f"{error}; --skip-missing goes on without") from error
            missing[name] = str(error)
    return found, missing


def split_of(name: str, spec: str) -> str:
    """The split to read: the lineage's, unless the one file that is given says by its name that it is another."""
    corpus, _, place = spec.partition(":")
    said = split_in(Path(place).name) if place and Path(place).is_file() else None
    splits = find_corpus(corpus).splits
    return said if said and splits.get(said, splits[SPLIT]) != splits[SPLIT] else SPLIT


def read_set(
    name: str,
    spec: str,
    tokenizer: Tokenizer,
    length: int,
    *,
    rows: Literal["wrapped", "documents"] | None = None,
    limit: int | None = None,
    workers: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
) -> Reading:
    """The rows of a set in the lineage's form, or in another if told."""
    how: dict[str, Any] = {"rows": rows or SETS[name].rows, "split": split_of(name, spec)}
    return read(spec, tokenizer, length, **how, limit=limit, workers=workers, on_progress=on_progress)


def labelled(reading: Reading, stand_in: str | None) -> Reading:
    """The reading with what its user says that it stands in for the real set with."""
    return reading if stand_in is None else replace(reading, settings=reading.settings | {"stand_in": stand_in})


def differences(name: str, reading: Reading) -> list[str]:
    """Why a figure on these rows is not to be held against the paper's: nothing, if they are the lineage's."""
    found, said = SETS[name], reading.settings
    reasons = []
    if said["stand_in"]:
        reasons.append(f"stand-in: {said['stand_in']}")
    if said["tokenizer_sha256"] != load_tokenizer(PAPER_TOKENIZER).sha256:
        reasons.append(f"tokenizer {said['tokenizer']}, not {PAPER_TOKENIZER}: other tokens, other perplexity a token")
    if said["unk_marks"]:
        reasons.append(f"{said['unk_marks']:,} <unk> marks in the text, which the lineage reads in its raw form")
    if said["split"] != SPLIT:
        reasons.append(f"split {said['split']}, not {SPLIT}")
    if said["length"] != PAPER_LENGTH:
        reasons.append(f"rows of {said['length']} tokens, not {PAPER_LENGTH}")
    if said["rows"] != found.rows:
        reasons.append(f"rows {said['rows']}, not {found.rows}")
    if said["limit"] is not None:
        reasons.append(f"only the first {said['row_count']} rows")
    elif said["split"] == SPLIT and (count := said["documents"] + said["documents_dropped"]) != found.documents:
        reasons.append(f"{count:,} documents, where the whole split has {found.documents:,}")
    return reasons


def weights_hash(model: LanguageModel) -> str:
    """sha256 over the model's tensors: name, type, shape and bytes of each, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.dim() else repr(tensor.item()).encode())
    return digest.hexdigest()


def against_paper(name: str, reading: Reading) -> dict[str, Any]:
    """What there is to say of a set's rows whatever the model: the paper's figures, and whether ours compare."""
    label, reasons = reading.settings["stand_in"], differences(name, reading)
    return {
        "label": f"stand-in: {label}" if label else None,
        "paper": None if label else dict(zip(PAPER, SETS[name].paper, strict=True)),
        "differs": reasons,
        "is_comparable": not reasons,
        "note": SETS[name].note,
    }


def zeroshot(
    subjects: Sequence[Subject],
    specs: Mapping[str, str],
    *,
    rows: Literal["wrapped", "documents"] | None = None,
    limit: int | None = None,
    workers: int = 1,
    stand_ins: Mapping[str, str] | None = None,
    **how: Any,
) -> Iterator[tuple[Line, bool]]:
    """Set by set a line for each model, and whether it was measured now.

    `stand_ins` labels sets whose files are something else. `how`: `known`, `walk` and `on_rows`, as `lines` has them.
    """

    def read_rows(name: str, subject: Subject, on_progress: OnProgress) -> Reading:
        reading = read_set(
            name,
            specs[name],
            subject.tokenizer,
            subject.length,
            rows=rows,
            limit=limit,
            workers=workers,
            on_progress=on_progress,
        )
        return labelled(reading, (stand_ins or {}).get(name))

    return lines(subjects, specs, read_rows, kind="set", about=against_paper, **how)
