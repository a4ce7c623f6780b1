"""When a sampler reveals the tokens that carry a text: before the others, or behind them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.diffusion.anchors import AnchorRule
from adlm.evaluate.tallies import ratio, ratio_gap
from adlm.studies.correlation import midranks
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, GeneratedRow, denoise_rows
from adlm.text.templates import Layout


@dataclass(frozen=True)
class Reveals:
    """Mean normalized ranks of the steps in which tokens were revealed for good: 0 first, 1 last, 0.5 on average."""

    sampler: str
    texts: int
    anchors: float
    anchors_se: float
    others: float
    others_se: float
    gap: float  # anchors less others: below 0 where anchors come first
    gap_se: float
    anchor_share: float
    steps: float  # different steps in which a text's tokens were revealed, on average

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def ranks(steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Normalized ranks of the steps of one text; equal steps share the middle, so that their mean is ½ exactly."""
    return (midranks(steps) - 0.5) / len(steps)


@dataclass(frozen=True)
class Watched:
    """A text, and the step in which each of its tokens was revealed for good."""

    row: GeneratedRow
    steps: NDArray[np.int64]

    @property
    def is_written(self) -> NDArray[np.bool_]:
        """Which of its tokens are text that was written; what stands behind an early end is no part of it."""
        return ~np.array(self.row.layout.is_fixed) & is_text(self.row.layout, self.row.ids)


def watched(lm: LM, job: GenerationRequest) -> list[Watched]:
    """The texts of `lm.generate_rows(job)`, with the order in which they were revealed."""
    found = []
    for first in range(0, len(job.rows), job.batch):
        part = job.rows[first : first + job.batch]
        last: Tensor | None = None
        for frame in denoise_rows(lm.predictor, job, part):
            revealed = (frame.changed & ~frame.is_masked).cpu()
            last = torch.zeros(revealed.shape, dtype=torch.int64) if last is None else last
            last[revealed] = frame.step
        assert last is not None  # at least one frame comes
        for (layout, _), ids, nfe, when in zip(
            part, frame.tokens.tolist(), frame.nfe.tolist(), last.numpy(), strict=True
        ):
            found.append(Watched(GeneratedRow(layout, ids[: len(layout)], nfe), when[: len(layout)]))
    return found


def is_text(layout: Layout, ids: Sequence[int]) -> NDArray[np.bool_]:
    """Which tokens of a row stand before the end that its text has."""
    found, eos_id = np.ones(len(ids), dtype=bool), layout.tokenizer.eos_id
    last = layout.spans[-1]
    for place in range(last.start, last.end):
        if layout.may_end and ids[place] == eos_id:
            found[place:] = False
            break
    return found


def measure_reveals(lm: LM, job: GenerationRequest, rule: AnchorRule) -> Reveals:
    """The order in which a job's texts are revealed; anchors are those of the finished texts."""
    if job.sampler is None:
        raise ValueError("a causal model reveals from left to right: the order of reveals is a masked model's")
    if len(job.rows) < 2:
        raise ValueError(f"a standard error needs at least 2 texts, got {len(job.rows)}")
    return reveals_of(str(job.settings["sampler"]), watched(lm, job), rule)


def reveals_of(sampler: str, texts: Sequence[Watched], rule: AnchorRule) -> Reveals:
    """The order in which texts were revealed that somebody watched."""
    sums = np.zeros((len(texts), 4))  # rank and count of anchors, of others
    different = []
    for number, text in enumerate(texts):
        is_anchor = rule(torch.tensor([text.row.ids]), None)[0].numpy()[text.is_written]
        when = text.steps[text.is_written]
        rank = ranks(when)
        different.append(len(np.unique(when)))
        sums[number] = rank[is_anchor].sum(), is_anchor.sum(), rank[~is_anchor].sum(), (~is_anchor).sum()
    own, own_count, rest, rest_count = sums.T
    return Reveals(
        sampler,
        len(sums),
        *ratio(own, own_count),
        *ratio(rest, rest_count),
        *ratio_gap(own, own_count, rest, rest_count),
        float(own_count.sum() / (own_count.sum() + rest_count.sum())),
        float(np.mean(different)),
    )
