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
from adlm.text.jobs import Job
from adlm.text.lm import LM, frames
from adlm.text.templates import Layout


@dataclass(frozen=True)
class Reveals:
    """Mean normalised ranks of the steps in which tokens were revealed for good: 0 first, 1 last, 0.5 on average."""

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
    """Normalised ranks of the steps of one text; equal steps share the middle, so that their mean is ½ exactly."""
    ordered = np.sort(steps)
    before, through = np.searchsorted(ordered, steps, "left"), np.searchsorted(ordered, steps, "right")
    return np.asarray((before + through) / (2 * len(steps)), dtype=np.float64)


def reveal_steps(lm: LM, job: Job) -> tuple[list[list[int]], list[NDArray[np.int64]], list[NDArray[np.bool_]]]:
    """Of every row: its tokens, the step in which each was last revealed, and which of them are text that was written.

    What stands behind the end of a text that ended early is no part of it.
    """
    tokens, steps, written = [], [], []
    for first in range(0, len(job.rows), job.batch):
        part = job.rows[first : first + job.batch]
        last: Tensor | None = None
        final: Tensor | None = None
        for frame in frames(lm.predictor, job, part):
            revealed = (frame.changed & ~frame.is_masked).cpu()
            last = torch.zeros(revealed.shape, dtype=torch.int64) if last is None else last
            last[revealed] = frame.step
            final = frame.tokens
        assert last is not None and final is not None
        for (layout, _), ids, when in zip(part, final.tolist(), last.numpy(), strict=True):
            tokens.append(ids[: len(layout)])
            steps.append(when[: len(layout)])
            written.append(~np.array(layout.is_fixed) & is_text(layout, tokens[-1]))
    return tokens, steps, written


def is_text(layout: Layout, ids: Sequence[int]) -> NDArray[np.bool_]:
    """Which tokens of a row stand before the end that its text has."""
    found, eos_id = np.ones(len(ids), dtype=bool), layout.tokenizer.eos_id
    last = layout.spans[-1]
    for place in range(last.start, last.end):
        if layout.may_end and ids[place] == eos_id:
            found[place:] = False
            break
    return found


def measure_reveals(lm: LM, job: Job, rule: AnchorRule) -> Reveals:
    """The order in which a job's texts are revealed; anchors are those of the finished texts."""
    if job.sampler is None:
        raise ValueError("a causal model reveals from left to right: the order of reveals is a masked model's")
    if len(job.rows) < 2:
        raise ValueError(f"a standard error needs at least 2 texts, got {len(job.rows)}")
    sums = np.zeros((len(job.rows), 4))  # rank and count of anchors, of others
    different = []
    for row, (ids, when, is_written) in enumerate(zip(*reveal_steps(lm, job), strict=True)):
        is_anchor = rule(torch.tensor([ids]), None)[0].numpy()[is_written]
        rank = ranks(when[is_written])
        different.append(len(np.unique(when[is_written])))
        sums[row] = rank[is_anchor].sum(), is_anchor.sum(), rank[~is_anchor].sum(), (~is_anchor).sum()
    own, own_count, rest, rest_count = sums.T
    return Reveals(
        str(job.settings["sampler"]),
        len(sums),
        *ratio(own, own_count),
        *ratio(rest, rest_count),
        *ratio_gap(own, own_count, rest, rest_count),
        float(own_count.sum() / (own_count.sum() + rest_count.sum())),
        float(np.mean(different)),
    )
