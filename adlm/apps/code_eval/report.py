"""The section of a report about Python code."""

from collections.abc import Sequence

from adlm.apps.code_eval.evaluation import TooFewFunctionsError, code
from adlm.evaluate.reports import ReportRequest, drop_unset
from adlm.evaluate.results import EvalResult
from adlm.text.lm import LM

MAX_TEXTS = 32  # for each metric


def measure_section(lms: Sequence[LM], request: ReportRequest) -> EvalResult | str:
    """Measure the share of generated functions that parse, or return why it was not measured."""
    if not request.has_code:
        return "it was not requested (--code)"
    texts = request.limit_texts(MAX_TEXTS)
    optional = drop_unset(steps=request.steps, sampler=request.sampler, batch=request.batch)
    try:
        return code(
            list(lms),
            texts=texts,
            infills=texts,
            seed=request.seed,
            out=request.out,
            on_progress=request.on_progress,
            **optional,
        )
    except TooFewFunctionsError as error:
        return str(error)
