"""What the terminal shows beside texts: a curve."""

from __future__ import annotations

from collections.abc import Sequence

BARS = " ▁▂▃▄▅▆▇█"


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
