"""What the terminal shows: a text on its way out of the noise, and a curve."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.text import Text
from torch import Tensor

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.denoise import Frame

HIDDEN, REVEALED, REMASKED, GIVEN = "dim", "bold green", "red", "cyan"
BARS = " ▁▂▃▄▅▆▇█"


def draw_row(
    tokens: Tensor,
    is_masked: Tensor,
    tokenizer: Tokenizer,
    *,
    changed: Tensor | None = None,
    is_fixed: Tensor | None = None,
) -> Text:
    """One row (L,): hidden positions as blocks, what this step revealed or hid again in colour."""
    text = Text()
    start = 0
    marks = torch.zeros_like(is_masked) if changed is None else changed
    given = torch.zeros_like(is_masked) if is_fixed is None else is_fixed
    kinds = [style_of(*flags) for flags in zip(is_masked.tolist(), marks.tolist(), given.tolist(), strict=True)]
    ids = tokens.tolist()
    while start < len(ids):  # runs of one kind are decoded together: a character may be spread over several tokens
        end = start + 1
        while end < len(ids) and kinds[end] == kinds[start]:
            end += 1
        hidden = kinds[start] in (HIDDEN, REMASKED)
        shown = "░" * (end - start) if hidden else tokenizer.decode(ids[start:end], skip_special=True)
        text.append(shown, style=kinds[start])
        start = end
    return text


def style_of(is_masked: bool, changed: bool, is_given: bool) -> str:
    """How a position looks; a changed one was revealed, or hidden again if it is masked now."""
    if is_masked:
        return REMASKED if changed else HIDDEN
    return REVEALED if changed else GIVEN if is_given else ""


def draw_frame(frame: Frame, tokenizer: Tokenizer, is_fixed: Tensor | None = None) -> Text:
    """The first row of a frame."""
    fixed = None if is_fixed is None else is_fixed[0]
    return draw_row(frame.tokens[0], frame.is_masked[0], tokenizer, changed=frame.changed[0], is_fixed=fixed)


def curve(values: Sequence[float], *, width: int = 60, height: int = 8, unit: str = "nats") -> str:
    """A line of text blocks for each of `height` levels, the means of `width` equal parts of the values."""
    if not values:
        raise ValueError("a curve needs at least one value")
    width = min(width, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    eighths = [round((mean - low) / span * (height * 8 - 1)) + 1 for mean in means]
    lines = []
    for level in reversed(range(height)):
        label = f"{high:6.2f}" if level == height - 1 else f"{low:6.2f}" if level == 0 else " " * 6
        lines.append(f"{label} ┤" + "".join(BARS[min(max(e - level * 8, 0), 8)] for e in eighths))
    return "\n".join([*lines, " " * 7 + "└" + "─" * width + f" step {len(values)} ({unit})"])
