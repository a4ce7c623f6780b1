"""One model on several kinds of text: a line of figures each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from adlm.evaluate.likelihood import held_out_bound
from adlm.evaluate.reading import read
from adlm.methods import METHODS
from adlm.text.lm import LM


def domain_bounds(
    lm: LM,
    sources: Mapping[str, str],
    *,
    draws: int = 4,
    seed: int = 0,
    rows: Literal["wrapped", "documents"] | None = None,
    limit: int | None = None,
    batch: int = 32,
    on_rows: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Iterator[dict[str, Any]]:
    """Of each named source: nll, ppl, bits_per_byte with their standard error, tokens, and what the rows are.

    Bits per byte compare between domains; nats per token do not, because a token is more or less text in each. The
    standard error of bits per byte is that of nats per token in proportion: bytes a token are taken as they are.
    """
    model = lm.model.fold().to(lm.device)
    for name, source in sources.items():
        found = read(source, lm.tokenizer, lm.model.config.length, rows=rows, limit=limit)
        documents = len(found.documents.unique())
        if len(found.rows) < 2:
            raise ValueError(
                f"{name} ({source}) makes one row, and an error takes at least 2: give more text, or wrapped rows"
            )
        bound = held_out_bound(
            model,
            found.rows,
            batch=batch,
            draws=draws,
            seed=seed,
            score_entropy=METHODS[lm.method].score_entropy,
            documents=found.documents if documents > 1 else None,
            on_rows=lambda done, total, name=name: on_rows(name, done, total),  # type: ignore[misc]
        )
        bits = bound.bits_per_byte(found.bytes)
        yield {
            "domain": name,
            "nll": bound.nll,
            "se": bound.stderr,
            "ppl": bound.ppl,
            "bits_per_byte": bits,
            "bits_per_byte_se": bits * bound.stderr / bound.nll,
            "is_bound": not lm.form.is_causal,
            "tokens": bound.tokens,
            "rows": len(found.rows),
            "error_over": "documents" if documents > 1 else "rows",
            "rows_hash": found.rows_hash,
            "data": found.settings,
        }
