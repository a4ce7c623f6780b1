"""The section of a report about the anchor network."""

from collections.abc import Sequence

from adlm.apps.anchor_study.study import anchors
from adlm.evaluate.reports import ReportRequest, drop_unset
from adlm.evaluate.results import EvalResult
from adlm.text.lm import LM

MAX_TEXTS = 32  # for each perturbation


def measure_section(lms: Sequence[LM], request: ReportRequest) -> EvalResult | str:
    """Study the two-stage models, or return why there is nothing to study."""
    two_stage = [lm for lm in lms if lm.model.anchor is not None]
    if not two_stage:
        return "none of the models has two stages"
    optional = drop_unset(
        limit=request.limit,
        length=request.length,
        steps=request.steps,
        sampler=request.sampler,
        batch=request.batch,
    )
    return anchors(
        two_stage,
        request.data,
        rows=request.rows,
        scorer=request.scorer,
        samples=request.limit_texts(MAX_TEXTS),
        seed=request.seed,
        out=request.out,
        on_progress=request.on_progress,
        **optional,
    )
