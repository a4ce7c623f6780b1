"""Models on several kinds of text: a line of figures each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from adlm.evaluate.lines import SCHEDULE, Line, OnProgress, Settings, Subject, lines
from adlm.evaluate.reading import Reading, read
from adlm.evaluate.zeroshot import weights_hash
from adlm.text.lm import LM


def subject_of(lm: LM, *, draws: int = 4, seed: int = 0, length: int | None = None) -> Subject:
    """A model ready to be measured, on rows of its own length unless told; a causal one needs no noise."""
    most, is_causal = lm.model.config.length, lm.row_format.is_causal
    if length is not None and length > most:
        raise ValueError(f"--length {length} is more than the {most} tokens of {lm.name}: give at most {most}")
    settings = Settings(
        lm.name,
        lm.method,
        weights_hash(lm.model),
        1 if is_causal else draws,
        0 if is_causal else seed,
        None if is_causal else SCHEDULE,
    )
    return Subject(lm.model.fold().to(lm.device), lm.tokenizer, settings, length or most, lm.step)


def domain_bounds(
    subjects: Sequence[Subject],
    sources: Mapping[str, str],
    *,
    rows: Literal["wrapped", "documents"] | None = None,
    limit: int | None = None,
    workers: int = 1,
    **how: Any,
) -> Iterator[tuple[Line, bool]]:
    """Of each named source a line for each model, and whether it was measured now.

    Bits per byte compare between domains; nats per token do not, because a token is more or less text in each. `how`:
    `known`, `walk` and `on_rows`, as `lines` has them.
    """

    def read_rows(name: str, subject: Subject, on_progress: OnProgress) -> Reading:
        return read(
            sources[name],
            subject.tokenizer,
            subject.length,
            rows=rows,
            limit=limit,
            workers=workers,
            on_progress=on_progress,
        )

    return lines(subjects, sources, read_rows, kind="domain", **how)
