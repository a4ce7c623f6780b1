"""The demo's short form, as a person would type it."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adlm.cli import demo
from adlm.cli.demo import TEMPLATE
from adlm.cli.main import app
from adlm.cli.output import draw_curve
from adlm.text.templates import parse_template
from adlm.training.logging import read_metrics
from tests.cli.terminal import assert_error, invoke


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter text in fewer steps and smaller batches."""
    monkeypatch.setattr(demo, "LENGTH", 24)
    monkeypatch.setattr(demo, "STEPS", 16)
    monkeypatch.setattr(
        demo, "FINE_TUNE", demo.FINE_TUNE | {"batch": 1, "valid.rows": 4, "valid.draws": 1}
    )


def test_the_demo_infills_learns_and_keeps_its_runs(tmp_path: Path) -> None:
    out = tmp_path / "new" / "demo"
    (out / "fine-tuned").mkdir(parents=True)  # of an earlier demo: replaced
    (out / "demo.html").touch()
    result = CliRunner().invoke(
        app, ["demo", "--steps", "20", "--out", str(out), "--overwrite"], standalone_mode=False
    )
    assert result.exit_code == 0, result.output
    found: Any = result.return_value
    shown = " ".join(result.output.split())
    assert shown.index("1 · Infill.") < shown.index("2 · Generate.")
    assert " ".join(found["text"].split()) in shown
    given = [piece for piece in parse_template(TEMPLATE) if isinstance(piece, str)]
    assert len(found["filled"]) == 3
    for text in found["filled"]:
        assert (
            text.startswith(given[0])
            and text.endswith(given[-1])
            and all(piece in text for piece in given)
        )
        assert " ".join(text.split()) in shown

    losses = [
        each["train/loss"]
        for each in read_metrics(out / "from-scratch" / "metrics.jsonl")
        if "train/loss" in each
    ]
    assert (
        len(losses) == 20 and sum(losses[-10:]) < sum(losses[:10]) - 1.0
    )  # well below where it began
    scratch, tuned = found["valid"]["from-scratch"], found["valid"]["fine-tuned"]
    assert f"from-scratch: held-out perplexity ≤ {scratch['val/ppl']:.1f}" in shown
    assert tuned["val/ppl"] < tuned["unigram/ppl"] / 2  # after one step
    assert (
        f"{tuned['val/ppl']:.1f}, of a unigram model of the same tokens {tuned['unigram/ppl']:.1f}"
        in shown
    )

    assert found["page"] == out / "demo.html" and "</html>" in found["page"].read_text("utf-8")
    assert found["page"].as_uri() in result.output and result.output.rstrip().endswith(
        found["command"]
    )
    _, *words = shlex.split(found["command"])
    sampled = CliRunner().invoke(app, [*words, "--length", "12", "--steps", "4"])
    assert sampled.exit_code == 0 and sampled.stdout.startswith("The old man ")
    assert "\x1b" not in result.output  # a pipe gets lines, not a screen


def test_json_is_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "train_models", lambda *_: {})
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() == {"text", "filled", "valid", "page", "command"}
    assert found["page"] == str(tmp_path / "demo.html") and "1 · Infill." in result.stderr


def test_the_output_folder_is_checked_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda **_: pytest.fail("it ran"))
    (tmp_path / "file").touch()
    assert_error(
        invoke("demo", "--out", tmp_path), f"--out {tmp_path} holds other files: give a new folder"
    )
    earlier = tmp_path / "earlier"
    (earlier / "fine-tuned").mkdir(parents=True)
    (earlier / "demo.html").touch()
    assert_error(
        invoke("demo", "--out", earlier),
        f"--out {earlier} has runs of an earlier demo: give a new folder",
    )
    assert (earlier / "fine-tuned").is_dir()
    assert_error(invoke("demo", "--out", tmp_path / "file"), f"--out {tmp_path / 'file'} is a file")
    assert_error(invoke("demo", "--out", "/proc/demo"), "--out /proc/demo/x cannot be written")


def test_a_falling_curve_falls() -> None:
    assert draw_curve([4.0, 3.0, 2.0, 1.0]) == "loss 4.00 █▆▃▁ 1.00 nats, 4 steps"
    assert draw_curve([2.0] * 99, width=3) == "loss 2.00 ▁▁▁ 2.00 nats, 99 steps"
