"""What every evaluation returns: estimates with standard errors, tables that any renderer can draw, one JSON form."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adlm.files import write_atomically


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error and, where one was computed, its 95% interval."""

    value: float
    stderr: float | None = None
    interval: tuple[float, float] | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any], name: str) -> "Estimate":
        """The value NAME of a flat row, NaN where there is none, with its standard error NAME_se."""
        return cls(math.nan if row[name] is None else row[name], row[f"{name}_se"])

    def as_dict(self) -> dict[str, Any]:
        """`{"value": …, "stderr": …}`, with `"interval"` where there is one."""
        fields: dict[str, Any] = {"value": self.value, "stderr": self.stderr}
        return fields if self.interval is None else fields | {"interval": list(self.interval)}

    def format(self, digits: int = 3, prefix: str = "") -> str:
        """`1.234 ± 0.056`, or `1.234 (1.10–1.40)` where there is an interval."""
        text = f"{prefix}{self.value:,.{digits}f}"
        if self.interval is not None:
            low, high = self.interval
            return f"{text} ({low:,.{digits}f}–{high:,.{digits}f})"
        is_known = self.stderr is not None and not math.isnan(self.stderr)
        return f"{text} ± {self.stderr:,.{digits}f}" if is_known else text


Cell = str | int | float | Estimate | None


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: its name, the digits of its numbers."""

    name: str
    digits: int = 3
    is_text: bool = False
    is_optional: bool = False  # it is left out where a terminal is too narrow

    def format(self, cell: Cell) -> str:
        """A cell as text; a missing value is a dash."""
        value = cell.value if isinstance(cell, Estimate) else cell
        if cell is None or (isinstance(value, float) and math.isnan(value)):
            return "–"
        if isinstance(cell, Estimate):
            return cell.format(self.digits)
        if isinstance(cell, float):
            return f"{cell:,.{self.digits}f}"
        return f"{cell:,}" if isinstance(cell, int) else cell


@dataclass(frozen=True)
class Table:
    """A table as data; `adlm.cli.output` prints it, the report renders it as HTML and Markdown."""

    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()  # how to read it

    def format_rows(self) -> list[list[str]]:
        """All cells as text."""
        return [
            [column.format(cell) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]


@dataclass(frozen=True)
class EvalResult:
    """Metrics as plain data, the settings they depend on, the machine and code that computed them, and tables."""

    task: str  # perplexity, zero_shot, samples, frontier, anchors, code or report
    metrics: dict[str, Any]
    settings: dict[str, Any]
    provenance: dict[str, Any]
    tables: Sequence[Table] = ()
    warnings: Sequence[str] = ()
    figures: dict[str, Any] = field(
        default_factory=dict
    )  # name -> what adlm.evaluate.plots draws it from

    def __getitem__(self, metric: str) -> Any:
        return self.metrics[metric]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: the metrics with task, settings, provenance and warnings."""
        about = {"task": self.task, "settings": self.settings, "provenance": self.provenance}
        return {**self.metrics, **about, "warnings": list(self.warnings)}

    def __str__(self) -> str:
        parts = [
            (table.title and f"**{table.title}**", render_markdown(table), *table.notes)
            for table in self.tables
        ]
        return "\n\n".join(part for table in parts for part in table if part)


def render_markdown(table: Table) -> str:
    """A table in Markdown, its cells escaped."""

    def line(cells: Sequence[str]) -> str:
        marks = str.maketrans({"|": r"\|", "<": r"\<", "\\": r"\\", "\n": " "})
        return f"| {' | '.join(cell.translate(marks) for cell in cells)} |"

    rule = ["---" if column.is_text else "---:" for column in table.columns]
    return "\n".join(
        map(line, [[column.name for column in table.columns], rule, *table.format_rows()])
    )


def to_json(value: Any) -> Any:
    """The value as JSON can hold it: estimates and paths as plain data, numbers that are not finite as null."""
    if isinstance(value, Estimate):
        return to_json(value.as_dict())
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # a number of numpy
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_json(path: Path, value: Any) -> Path:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        path, (json.dumps(to_json(value), indent=1, ensure_ascii=False) + "\n").encode("utf-8")
    )
    return path


def shorten_names(names: Sequence[str]) -> dict[str, str]:
    """Names of models or texts for tables: the last part of a path, where that does not make two names equal."""
    short = {name: Path(name).name or name for name in names}
    repeated = {each for each in short.values() if list(short.values()).count(each) > 1}
    return {name: name if each in repeated else each for name, each in short.items()}
