"""Tables keep their numbers at any width; results and lists are printed and parsed in one place."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adlm.cli.output import parse_list, print_result, print_table
from adlm.evaluate.results import (
    Estimate,
    EvalResult,
    Table,
    TableColumn,
    render_markdown,
    save_json,
    shorten_names,
    to_json,
)
from adlm.view.console import SafeConsole

COLUMNS = [
    TableColumn("model", is_text=True),
    TableColumn("nll"),
    TableColumn("tokens", is_optional=True),
]
TABLE = Table(
    COLUMNS,
    [["a rather long name of a model", Estimate(1.23456, 0.5), 12345], ["b[i]", None, 7]],
    notes=["how"],
)


@pytest.mark.parametrize("width", [120, 36, 20])
def test_numbers_are_never_cut(width: int) -> None:
    """Optional columns are left out first, then errors go below their values."""
    screen = io.StringIO()
    print_table(
        TABLE, SafeConsole(file=screen, force_terminal=True, width=width, color_system=None)
    )
    text = screen.getvalue()
    assert ("1.235 ± 0.500" in text) == (width > 20) and "1.235 " in text and "± 0.500 " in text
    assert "b[i]" in text and "how" in text and max(map(len, text.splitlines())) <= width
    assert ("12,345" in text) == (width == 120)


@pytest.mark.parametrize("width", [80, 60])
def test_a_table_of_many_numbers_has_a_line_for_every_cell(width: int) -> None:
    """As wide as the frontier of `adlm eval`: below the width that it needs, no number is cut and no line is longer."""
    names = ["steps", "T", "p", "NFE", "Gen-PPL", "entropy", "distinct-2", "repeated-4"]
    columns = [TableColumn("model", is_text=True), *(TableColumn(name, 1) for name in names)]
    numbers = [
        1234,
        0.5,
        0.9,
        12.5,
        *(Estimate(1000.5 + place, 10.5, (900.25, 1100.75)) for place in range(4)),
    ]
    table, screen = Table(columns, [["adlm-prose", *numbers]] * 2, "Points"), io.StringIO()
    print_table(
        table, SafeConsole(file=screen, force_terminal=True, width=width, color_system=None)
    )
    text = screen.getvalue()
    assert max(map(len, text.splitlines())) <= width and "Points" in text
    assert all(text.count(f" {cell} ") == 2 for cell in table.format_rows()[0])


def test_without_a_terminal_nothing_is_left_out() -> None:
    screen = io.StringIO()
    print_table(TABLE, SafeConsole(file=screen, width=20))
    assert "a rather long name of a model │ 1.235 ± 0.500 │ 12,345 " in screen.getvalue()
    assert render_markdown(TABLE).splitlines()[1:3] == [
        "| --- | ---: | ---: |", "| a rather long name of a model | 1.235 ± 0.500 | 12,345 |"
    ]  # fmt: skip


def test_a_result_is_json_or_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = EvalResult(
        "code", {"share": Estimate(0.5, None, (0.1, float("inf")))}, {}, {}, [TABLE], ["few texts"]
    )
    print_result(result, is_json=True, out=tmp_path)
    out, err = capsys.readouterr()
    assert json.loads(out)["share"] == {"value": 0.5, "stderr": None, "interval": [0.1, None]}
    assert (
        json.loads((tmp_path / "code.json").read_text())
        == json.loads(out)
        == to_json(result.as_dict())
    )
    assert "warning: few texts" in err and f"wrote {tmp_path / 'code.json'}" in err
    print_result(result, is_json=False)
    assert "1.235 ± 0.500" in capsys.readouterr().out
    titled = replace(result, tables=[replace(TABLE, title="Two models", notes=["Short."])])
    assert str(titled) == f"**Two models**\n\n{render_markdown(TABLE)}\n\nShort."


def test_numpys_numbers_are_numbers_in_json_and_other_objects_are_refused(tmp_path: Path) -> None:
    numbers = {
        "n": np.int64(5),
        "is": np.bool_(True),
        "x": np.float32(1.5),
        "none": np.float32("inf"),
        "at": Path("a"),
    }
    assert to_json(numbers) == {"n": 5, "is": True, "x": 1.5, "none": None, "at": "a"}
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        save_json(tmp_path / "x.json", {"names": {"a"}})


def test_lists_and_names() -> None:
    assert (
        parse_list("--steps", " 16,32,,16", int) == [16, 32]
        and parse_list("--steps", "", int) == []
    )
    with pytest.raises(
        ValueError, match="--steps '1,x': 'x' is not a whole number; separate them by commas: 1,2"
    ):
        parse_list("--steps", "1,x", int)
    assert shorten_names(["runs/a", "runs/b", "prose"]) == {
        "runs/a": "a",
        "runs/b": "b",
        "prose": "prose",
    }
    assert shorten_names(["x/a", "y/a"]) == {"x/a": "x/a", "y/a": "y/a"}
