"""Plots of runs: every logged curve, a summary with its numbers, errors that name the folder."""

import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from adlm.cli.plot import plot_runs, read_run, smooth_curve
from adlm.cli.train import plot
from adlm.training.logging import append_record

app = typer.Typer()
app.command()(plot)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None and not os.environ.get("ADLM_ALL"),
    reason="matplotlib is not installed: pip install 'adlm[track]'",
)


def log(folder: Path, step: int, **metrics: Any) -> None:
    append_record(folder / "metrics.jsonl", {"step": step, **metrics})


def run_in(folder: Path, *, steps: int = 60, gamma: float = 3e-3, level: float = 5.0, valid: bool = True) -> Path:
    """A run that falls from 7 to `level` nats and is validated every 20 steps."""
    folder.mkdir(parents=True)
    for step in range(1, steps + 1):
        nll = level + 2 * math.exp(-step / 10) + 0.05 * math.sin(17 * step)
        clock = {"seconds": step / 2, "tokens_per_second": 1000.0 + step, "mfu": None, "stall": 0.01}
        rates = {"lr": 1e-3 * min(1, step / 10), "anchor_weight": gamma, "tokens": 512 * step}
        log(folder, step, **{"train/loss": nll, "train/nll": nll}, **rates, time=clock)
        if valid and step % 20 == 0:
            metrics = {"val/nll": nll, "val/ppl": math.exp(nll), "val/stderr": 0.02, "unigram/ppl": 400.0}
            log(folder, step, **metrics, time={"seconds": 1.0})
    return folder


def texts(svg: Path) -> str:
    """What a figure says, in one line."""
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text("utf-8")))


def test_a_run_is_drawn_into_its_folder(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a")
    out = plot_runs([run])
    assert out == run / "plots" / "run.png" and out.read_bytes().startswith(b"\x89PNG")
    for name, start in (("x.svg", b"<?xml"), ("x.pdf", b"%PDF"), ("x.PNG", b"\x89PNG")):
        assert plot_runs([run], tmp_path / "new" / name).read_bytes().startswith(start)
    assert plot_runs([run], tmp_path / "y.svg").read_bytes() == (tmp_path / "new/x.svg").read_bytes()


def test_several_runs_are_told_apart(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / "anchored"), run_in(tmp_path / "plain", gamma=0.0, level=5.5)]
    found = plot_runs(runs, tmp_path / "both.svg")
    said = texts(found)
    assert "anchored" in said and "plain" in said
    assert "#0072b2" in found.read_text("utf-8") and "#d55e00" in found.read_text("utf-8")
    twins = [run_in(tmp_path / name / "same") for name in ("x", "y")]
    said = texts(plot_runs(twins, tmp_path / "twins.svg"))
    assert "same (1)" in said and "same (2)" in said


def test_a_panel_says_what_is_in_it(tmp_path: Path) -> None:
    said = texts(plot_runs([run_in(tmp_path / "a")], tmp_path / "a.svg"))
    for label in ("nll (nats per token)", "perplexity", "learning rate", "γ (dashed)", "tokens/s", "stall", "step"):
        assert label in said
    assert "validation ± 2 s.e." in said and "unigram" in said
    said = texts(plot_runs([run_in(tmp_path / "b", gamma=0.0, level=1.0)], tmp_path / "b.svg", x="tokens"))
    assert "γ" not in said and " tokens " in said
    assert "unigram perplexity 400" in said  # a level far above the curves is in the legend


def test_a_diverged_run_and_one_without_validation_are_drawn(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a", valid=False)
    log(run, 61, **{"train/nll": math.nan}, time={})
    log(run, 62, **{"train/nll": math.inf})
    assert plot_runs([run]).is_file()
    log(tmp_path, 5, **{"val/nll": 3.0, "val/ppl": math.exp(3), "val/stderr": 0.1})
    assert plot_runs([tmp_path]).is_file()


def test_validations_are_placed_by_their_tokens(tmp_path: Path) -> None:
    curves = read_run(run_in(tmp_path / "a"))
    assert curves.valid["tokens"].tolist() == [512 * step for step in (20, 40, 60)]


def test_a_mean_of_a_constant_is_the_constant() -> None:
    assert np.allclose(smooth_curve(np.full(500, 3.0)), 3.0)
    line = np.arange(500.0)
    assert np.allclose(smooth_curve(line)[:400], line[:400])  # no lag, from the first value on
    holes = np.where(np.arange(500) % 7 == 0, math.nan, 2.0)
    assert np.allclose(smooth_curve(holes)[1:], 2.0)
    assert np.isnan(smooth_curve(np.full(5, math.nan))).all() and smooth_curve(np.empty(0)).shape == (0,)


def test_errors_name_the_folder_and_the_remedy(tmp_path: Path) -> None:
    run, empty = run_in(tmp_path / "a"), tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    wrong: list[tuple[str, list[Path], dict[str, Any]]] = [
        (r"nowhere is no folder", [tmp_path / "nowhere"], {}),
        (r"no metrics\.jsonl", [tmp_path], {}),
        (r"metrics\.jsonl has no step yet", [empty], {}),
        (r"run\.jpg.*\.png, \.svg, \.pdf", [run], {"out": tmp_path / "run.jpg"}),
        ("x is 'epoch': expected one of step, tokens", [run], {"x": "epoch"}),
        ("at least one", [], {}),
    ]
    for message, folders, options in wrong:
        with pytest.raises(ValueError, match=message):
            plot_runs(folders, **options)


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'adlm\[track\]'"):
        plot_runs([run_in(tmp_path / "a")])


def test_the_command_draws_and_sums_up(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / "long"), run_in(tmp_path / "short", steps=40, valid=False)]
    result = CliRunner().invoke(app, [*map(str, runs), "--out", str(tmp_path / "f.png")], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert (tmp_path / "f.png").is_file() and str(tmp_path / "f.png") in result.output.replace("\n", "")
    long, short = (line.split() for line in result.output.splitlines() if line.startswith(("long", "short")))
    last, best = read_run(runs[0]).valid["val/ppl"][-1], read_run(runs[0]).valid["val/ppl"].min()
    assert long[1:3] == ["60", f"{last:.2f}"] and long[4] == f"{best:.2f}" and long[-1] == "400.00"
    assert short[1:] == ["40", "–", "–", "–", "–", "–"]


def test_what_was_drawn_is_told_in_json_alone(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / "a"), run_in(tmp_path / "b", valid=False)]
    result = CliRunner().invoke(app, [*map(str, runs), "--out", str(tmp_path / "both.svg"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["figure"] == str(tmp_path / "both.svg") and Path(found["figure"]).is_file()
    first, second = found["runs"]
    assert first["run"] == str(runs[0]) and first["last_step"] == 60
    assert math.isclose(first["val/ppl"], math.exp(first["val/nll"])) and first["best/ppl"] <= first["val/ppl"]
    assert "val/ppl" not in second and second["last_step"] == 60
