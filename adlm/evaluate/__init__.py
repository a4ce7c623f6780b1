"""Evaluation: every function takes one or several models (`adlm.load`) and returns an `EvalResult`.

result = adlm.evaluate.perplexity([adlm.load(), adlm.load("mdlm-prose")], "held-out.txt")
print(result)            # tables in Markdown
result["differences"]    # metrics as plain data
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adlm.evaluate.frontiers import frontier
    from adlm.evaluate.ppl import perplexity, zero_shot
    from adlm.evaluate.reports import report
    from adlm.evaluate.results import Estimate, EvalResult
    from adlm.evaluate.sample_metrics import samples

# Name -> the module that defines it.
_EXPORTS = {
    "Estimate": "results",
    "EvalResult": "results",
    "frontier": "frontiers",
    "perplexity": "ppl",
    "report": "reports",
    "samples": "sample_metrics",
    "zero_shot": "ppl",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
