"""Plots of runs: every logged curve, a summary with its numbers, errors that name the folder."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adlm.evaluate.plots import plot_runs, read_run, smooth_curve
from adlm.training.logging import append_record
from tests.cli.terminal import assert_error, invoke
from tests.evaluate.scorers import with_matplotlib

pytestmark = with_matplotlib


def log(folder: Path, step: int, **metrics: Any) -> None:
    append_record(folder / "metrics.jsonl", {"step": step, **metrics})


def run_in(
    folder: Path, *, steps: int = 60, gamma: float = 3e-3, level: float = 5.0, valid: bool = True
) -> Path:
    """A run that falls from 7 to `level` nats and is validated every 20 steps."""
    folder.mkdir(parents=True)
    for step in range(1, steps + 1):
        nll = level + 2 * math.exp(-step / 10) + 0.05 * math.sin(17 * step)
        clock = {
            "seconds": step / 2,
            "tokens_per_second": 1000.0 + step,
            "mfu": None,
            "stall": 0.01,
        }
        rates = {"lr": 1e-3 * min(1, step / 10), "anchor_weight": gamma, "tokens": 512 * step}
        log(folder, step, **{"train/loss": nll, "train/nll": nll}, **rates, time=clock)
        if valid and step % 20 == 0:
            metrics = {
                "val/nll": nll,
                "val/ppl": math.exp(nll),
                "val/stderr": 0.02,
                "unigram/ppl": 400.0,
            }
            log(folder, step, **metrics, time={"seconds": 1.0})
    return folder


def draw(out: Path, *runs: Path, x: str = "step") -> str:
    """The words in a figure of runs, in one line."""
    svg = plot_runs([read_run(run) for run in runs], out, x=x).read_text("utf-8")
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


def test_every_format_is_written_and_equal_data_gives_equal_files(tmp_path: Path) -> None:
    curves = [read_run(run_in(tmp_path / "a"))]
    for name, start in (("x.svg", b"<?xml"), ("x.pdf", b"%PDF"), ("x.PNG", b"\x89PNG")):
        assert plot_runs(curves, tmp_path / "new" / name).read_bytes().startswith(start)
    assert (
        plot_runs(curves, tmp_path / "y.svg").read_bytes() == (tmp_path / "new/x.svg").read_bytes()
    )


def test_runs_have_names_and_colors_and_panels_labels(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / "x" / "same"), run_in(tmp_path / "y" / "same", gamma=0, level=5.5)]
    shown, svg = (
        draw(tmp_path / "both.svg", *runs, x="tokens"),
        (tmp_path / "both.svg").read_text("utf-8"),
    )
    assert "x/same" in shown and "y/same" in shown and "#0072b2" in svg and "#d55e00" in svg
    labels = (
        "nll (nats per token)",
        "perplexity",
        "learning rate",
        "γ",
        "tokens/s",
        "stall",
        "tokens",
    )
    assert all(
        label in shown for label in (*labels, "validation ± 2 s.e.", "unigram perplexity 400")
    )


def test_a_diverged_run_and_one_without_validation_are_drawn(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a", valid=False)
    log(run, 61, **{"train/loss": math.nan}, time={})
    log(run, 62, **{"train/loss": math.inf})
    log(tmp_path, 5, **{"val/nll": 3.0, "val/ppl": math.exp(3), "val/stderr": 0.1})
    assert draw(tmp_path / "a.svg", run) and draw(tmp_path / "b.svg", tmp_path)


def test_validations_are_placed_by_their_tokens(tmp_path: Path) -> None:
    curves = read_run(run_in(tmp_path / "a"))
    assert curves.valid["tokens"].tolist() == [512 * step for step in (20, 40, 60)]


def test_curves_are_smoothed_by_a_running_mean() -> None:
    assert np.allclose(smooth_curve(np.full(500, 3.0))[9:], 3.0)
    assert np.allclose(smooth_curve(np.arange(500.0))[9:], np.arange(500.0)[9:] - 4.5)
    assert np.isnan(smooth_curve(np.full(5, math.nan))).all() and smooth_curve(
        np.empty(0)
    ).shape == (0,)


def test_the_command_draws_and_sums_up(tmp_path: Path) -> None:
    runs = [run_in(tmp_path / "long"), run_in(tmp_path / "short", steps=40, valid=False)]
    result = invoke("plot", *runs, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    long, short = printed["runs"]
    assert printed["figure"] == str(runs[0] / "plots/run.png") and Path(printed["figure"]).is_file()
    assert long["run"] == str(runs[0]) and long["last_step"] == 60 and long["unigram/ppl"] == 400
    assert (
        math.isclose(long["val/ppl"], math.exp(long["val/nll"]))
        and long["best/ppl"] <= long["val/ppl"]
    )
    assert short == {"run": str(runs[1]), "last_step": 40}
    result = invoke("plot", *runs, "--out", tmp_path / "f.png")
    assert (tmp_path / "f.png").is_file() and result.stdout.endswith(f"{tmp_path / 'f.png'}\n")
    lines = {
        line.split()[1]: line
        for line in result.stdout.splitlines()
        if " long " in line or " short " in line
    }
    for number in ("60", f"{long['val/ppl']:.2f}", f"{long['best/ppl']:.2f}", "400.00"):
        assert f" {number} " in lines["long"]
    assert " 40 " in lines["short"] and lines["short"].count("–") == 4


def test_errors_name_the_folder_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, empty = run_in(tmp_path / "a"), tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    for words, parts in (
        ([tmp_path / "nowhere"], ["nowhere is no folder: give the folder of a run"]),
        ([tmp_path], ["has no metrics.jsonl: give the folder of a run"]),
        ([empty], ["metrics.jsonl has no step yet"]),
        ([run, "--out", tmp_path / "run.jpg"], ["run.jpg", ".png, .svg, .pdf"]),
        ([run, "--x", "epoch"], ["x is 'epoch': expected one of step, tokens"]),
    ):
        assert_error(invoke("plot", *words), *parts)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_error(invoke("plot", run), "[eval]'")
