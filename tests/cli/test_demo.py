"""The demo's short form, as a person would type it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adlm.cli import demo
from adlm.cli.demo import TEMPLATE
from adlm.cli.main import app
from adlm.cli.output import draw_curve
from adlm.text.templates import parse_template


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter text in fewer steps: how long they are is the demo's affair, not the tests'."""
    monkeypatch.setattr(demo, "LENGTH", 24)
    monkeypatch.setattr(demo, "STEPS", 16)


def test_the_short_demo_writes_fills_learns_and_leaves_a_page(tmp_path: Path) -> None:
    page = tmp_path / "pages" / "demo.html"
    options = ["demo", "--steps", "40", "--seed", "1", "--out", str(page)]
    result = CliRunner().invoke(app, options, standalone_mode=False)
    assert result.exit_code == 0, result.output
    found = result.return_value
    assert isinstance(found, dict)

    shown = " ".join(result.output.split())
    assert " ".join(found["text"].split()) in shown
    given = [piece for piece in parse_template(TEMPLATE) if isinstance(piece, str)]
    assert len(found["filled"]) == 3
    for text in found["filled"]:
        assert text.startswith(given[0]) and text.endswith(given[-1]) and all(piece in text for piece in given)
        assert " ".join(text.split()) in shown

    assert len(found["losses"]) == 40
    assert sum(found["losses"][-10:]) < sum(found["losses"][:10]) - 1.0  # well below where it began
    assert found["valid"]["val/ppl"] < found["valid"]["unigram/ppl"] * 10
    assert found["valid"]["val/stderr"] > 0
    assert f"held-out perplexity ≤ {found['valid']['val/ppl']:.1f}" in shown

    assert found["page"] == page and "</html>" in page.read_text("utf-8")
    assert page.as_uri() in result.output
    assert "\x1b" not in result.output  # a pipe gets lines, not a screen
    assert len(result.output.splitlines()) < 90


def test_the_number_of_steps_follows_from_the_seconds(tmp_path: Path) -> None:
    options = ["demo", "--seconds", "1", "--out", str(tmp_path / "demo.html")]
    result = CliRunner().invoke(app, options, standalone_mode=False)
    assert result.exit_code == 0, result.output
    assert f"(repeat with --steps {len(result.return_value['losses'])})" in " ".join(result.output.split())


def test_with_json_there_is_one_object_and_the_show_goes_to_stderr(tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--out", str(page), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() == {"text", "filled", "losses", "valid", "page"} and found["page"] == str(page)
    assert "1 · Generate." in result.stderr and page.is_file()


def test_a_falling_curve_falls() -> None:
    lines = draw_curve([4.0, 3.0, 2.0, 1.0], width=4, height=4).splitlines()
    assert lines[0].startswith("  4.00 ┤█")
    assert lines[3].startswith("  1.00 ┤")
    heights = [sum(line[8:][column : column + 1] not in ("", " ") for line in lines[:4]) for column in range(4)]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] == 4
