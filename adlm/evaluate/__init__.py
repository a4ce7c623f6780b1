"""Evaluation: every function takes one or several models (`adlm.load`) and returns an `EvalResult`.

result = adlm.evaluate.perplexity([adlm.load(), adlm.load("mdlm-prose")], "held-out.txt")
print(result)            # tables in Markdown
result["differences"]    # metrics as plain data
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adlm.evaluate.anchors import anchors
    from adlm.evaluate.code import code
    from adlm.evaluate.frontier import frontier
    from adlm.evaluate.perplexity import perplexity
    from adlm.evaluate.report import report
    from adlm.evaluate.results import Estimate, EvalResult
    from adlm.evaluate.sampling import samples
    from adlm.evaluate.zeroshot import zero_shot

__all__ = ["Estimate", "EvalResult", "anchors", "code", "frontier", "perplexity", "report", "samples", "zero_shot"]

_MODULES = {"Estimate": "results", "EvalResult": "results", "samples": "sampling", "zero_shot": "zeroshot"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, name)}"), name)


class _Package(ModuleType):
    """Keeps a function such as `perplexity` visible where an import binds the submodule of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_shadowing = isinstance(value, ModuleType) and name in __all__
        super().__setattr__(name, getattr(value, name) if is_shadowing else value)


sys.modules[__name__].__class__ = _Package
