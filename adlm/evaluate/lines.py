"""A line of figures for every model on every named text; a line that is known is not measured again.

What is a table of such lines (`zeroshot`, `adlm.studies.domains`) says how a text becomes rows, and what else there is
to say of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from adlm.data.prepare import Progress
from adlm.data.tokenizers import Tokenizer
from adlm.evaluate.likelihood import Walk, held_out_bound
from adlm.evaluate.reading import Reading
from adlm.methods import METHODS
from adlm.models.language_model import LanguageModel

SCHEDULE = "log-linear, continuous time"
COUNTED = "every token of a row, BOS and EOS too, as in the lineage"
ELSEWHERE = ("model", "source", "identity", "tokenizer")  # what something is called, where it lies: no figure's matter
Line = dict[str, Any]  # as JSON has it
OnRows = Callable[[str, int, int], None]  # what is done, how far it is, and the whole (0: not known)
OnProgress = Callable[[Progress], None]  # of the reading of a text


@dataclass(frozen=True)
class Settings:
    """What a figure depends on beside its rows."""

    model: str
    method: str
    weights_sha256: str  # of the model's tensors
    draws: int
    seed: int
    schedule: str | None = SCHEDULE  # None: a causal model has none
    counted: str = COUNTED

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Subject:
    """A model that is measured, on rows of `length` tokens."""

    network: LanguageModel
    tokenizer: Tokenizer
    settings: Settings
    length: int
    step: int = 0

    def as_dict(self) -> dict[str, Any]:
        """What it is, for JSON."""
        return self.settings.as_dict() | {"step": self.step, "length": self.length}


def figures(subject: Subject, reading: Reading, walk: Walk | None = None) -> Line:
    """What a model makes of rows; of `walk` the batch, the sharing between processes and who hears of it.

    The error of bits per byte is that of nats per token in proportion: bytes a token are taken as they are.
    """
    walk, settings = walk or Walk(), subject.settings
    # One long document is no sample of documents: its rows are what there is.
    documents = len(reading.documents.unique())
    is_many = documents > 1
    bound = held_out_bound(
        subject.network,
        reading.rows,
        batch=walk.batch,
        draws=settings.draws,
        seed=settings.seed,
        score_entropy=METHODS[settings.method].score_entropy,
        documents=reading.documents if is_many else None,
        rank=walk.rank,
        size=walk.size,
        total=walk.total,
        on_rows=walk.on_rows,
    )
    bits = bound.bits_per_byte(reading.bytes)
    return {
        "nll": bound.nll,
        "se": bound.stderr,
        "se_noise": bound.noise_stderr,
        "error_over": "documents" if is_many else "rows",
        "error_units": documents if is_many else len(reading.rows),
        "ppl": bound.ppl,
        "bits_per_byte": bits,
        "bits_per_byte_se": bits * bound.stderr / bound.nll,
        "tokens": bound.tokens,
        "rows": len(reading.rows),
        "bytes": reading.bytes,
        "is_bound": not subject.network.config.is_causal,
        "rows_hash": reading.rows_hash,
    }


def is_same(line: Mapping[str, Any], settings: Settings, reading: Reading) -> bool:
    """Whether a line of an earlier run has the figures that would be found now."""
    known, wanted = line["settings"], settings.as_dict() | reading.settings
    if line["rows_hash"] != reading.rows_hash:
        return False
    return all(known.get(key) == value for key, value in wanted.items() if key not in ELSEWHERE)


def lines(
    subjects: Sequence[Subject],
    names: Iterable[str],
    read: Callable[[str, Subject, OnProgress], Reading],
    *,
    kind: str,
    about: Callable[[str, Reading], dict[str, Any]] = lambda name, reading: {},
    known: Sequence[Mapping[str, Any]] = (),
    walk: Walk | None = None,
    on_rows: OnRows = lambda what, done, total: None,
) -> Iterator[tuple[Line, bool]]:
    """Text by text a line for each model, and whether it was measured now; what is `known` is not measured again.

    `read` makes the rows of a text for a model: those of one tokenizer and length are the same, and made once. `kind`
    is what a text is called in its line, `about` what is said of it whatever the model. A known line is what it would
    be if it were measured now: names and places are those of today.
    """
    for name in names:
        readings: dict[tuple[Any, ...], Reading] = {}
        for subject in subjects:
            settings, same = subject.settings, (*identity_of(subject.tokenizer), subject.length)
            if same not in readings:
                on_rows(f"{name}: reading", 0, 0)
                readings[same] = read(name, subject, telling(f"{name}: reading", on_rows))
                require_rows(name, readings[same])
            reading = readings[same]
            reading = replace(reading, settings=reading.settings | {"tokenizer": subject.tokenizer.name})
            told = about(name, reading) | {"settings": settings.as_dict() | reading.settings}
            head = {kind: name, "model": settings.model}
            old = next((line for line in known if line[kind] == name and is_same(line, settings, reading)), None)
            if old is not None:
                yield {**old, **head, **told}, False
                continue
            tell = partial(on_rows, f"{name}: {settings.model}")
            tell(0, len(reading.rows))
            try:
                found = figures(subject, reading, replace(walk or Walk(), on_rows=tell))
            except FloatingPointError as error:
                raise FloatingPointError(f"{settings.model} has no figure on {name}: {error}") from error
            yield head | found | told, True


def telling(what: str, on_rows: OnRows) -> OnProgress:
    """How far the reading of a text is, told as the rest is."""
    return lambda progress: on_rows(what, progress.consumed, progress.total or 0)


def identity_of(tokenizer: Tokenizer) -> tuple[Any, ...]:
    """What rows follow from: its vocabulary, and what it puts around texts, which its file need not say."""
    return tokenizer.sha256, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id


def require_rows(name: str, reading: Reading) -> None:
    """Refuse a text that no error, or no bits per byte can be had from."""
    said = reading.settings
    if reading.bytes < 1:
        raise ValueError(f"{name} ({said['source']}) has {len(reading.rows)} rows without any text: give another text")
    if len(reading.rows) < 2:
        remedy = "a smaller --length" if said["rows"] == "wrapped" else "leave --rows documents out"
        raise ValueError(
            f"{name} ({said['source']}) makes one row of {said['length']} tokens, and an error takes at least 2: give "
            f"more text, or {remedy}"
        )
