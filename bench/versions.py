"""The names of two versions of the package, for scripts that compare them.

Nothing else in such a script knows that there are two.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from torch import Tensor

STEP_ENDS = "step_optimizers"  # the function that ends a training step
HIDDEN = -1  # stands for the mask in the changes of a row


@dataclass
class Change:
    """What one step changed in a row."""

    step: int
    nfe: int
    tokens: dict[int, int]  # by position; HIDDEN where a token was hidden again


@dataclass
class RowTrace:
    """The steps of a row that changed something."""

    changes: list[Change] = field(default_factory=list)

    def as_json(self, *, with_steps: bool) -> list[Any]:
        """Return the changes for JSON; of rows sampled together, a step is not the row's own."""
        rows = []
        for change in self.changes:
            about = [change.step, change.nfe] if with_steps else [change.nfe]
            rows.append([*about, sorted(change.tokens.items())])
        return rows


def has_settings_class() -> bool:
    """Return whether settings are one object, in which a sampler's own are `options`."""
    from adlm import LM

    settings = inspect.signature(LM.generate).parameters.get("settings")
    return settings is not None and settings.kind is not inspect.Parameter.VAR_KEYWORD


def name_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with a sampler's own options where this version takes them."""
    given = dict(settings)
    options = given.pop("options", None) or {}
    if has_settings_class():
        return given | ({"options": options} if options else {})
    return given | options


def trace_rows(frames: Iterator[Any]) -> list[RowTrace]:
    """Return what each row went through, from what `LM.stream` yields."""
    traces: dict[int, RowTrace] = {}
    kept: list[Any] = []  # rows that are named by their identity stay alive
    for streamed in frames:
        frame = getattr(streamed, "frame", streamed)
        tokens, changed = frame.tokens.tolist(), frame.changed.tolist()
        if hasattr(frame, "is_masked"):
            is_hidden = frame.is_masked.tolist()
            count = len(tokens)
            names, steps, nfe = list(range(count)), [frame.step] * count, as_list(frame.nfe)
        else:
            is_hidden = frame.is_hidden.tolist()
            kept.append(frame.rows)
            names = [id(row) for row in frame.rows]
            steps = as_list(frame.steps if hasattr(frame, "steps") else frame.step)
            nfe = as_list(frame.nfe)
        for place, name in enumerate(names):
            trace = traces.setdefault(name, RowTrace())
            moved = [i for i, is_changed in enumerate(changed[place]) if is_changed]
            if moved:
                values = {i: HIDDEN if is_hidden[place][i] else tokens[place][i] for i in moved}
                trace.changes.append(Change(steps[place], nfe[place], values))
    return list(traces.values())


def as_list(values: Any) -> list[int]:
    """Return a list of numbers, which may be a tensor."""
    return values.tolist() if isinstance(values, Tensor) else list(values)


def list_settings(config: Any) -> dict[str, Any]:
    """Return a recipe's settings as a dict of plain values."""
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    settings: dict[str, Any] = config.model_dump(mode="json")
    return settings
