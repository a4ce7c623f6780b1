"""`adlm demo`: the bundled model writes before your eyes and fills in, a small one is trained, a page shows it again.

The way a user goes: load, stream, infill, score; prepare, train, load, write; a page to keep.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from adlm.cli.output import draw_curve
from adlm.data.prepare import prepare
from adlm.data.sources import load_excerpt
from adlm.text.lm import LM, load
from adlm.training.loop import train
from adlm.training.metrics import read_metrics
from adlm.trajectory import Trajectory, TrajectoryFrame
from adlm.view.player import write_player
from adlm.view.terminal import draw_still, watch

PAGE = "adlm-demo.html"
PROMPT, TEMPLATE = "The old man ", "The ___ sat by the window, and ___{4} the rain."
LENGTH, STEPS, TOP_P = 64, 128, 0.8
PAUSE = 0.04  # seconds between frames on a terminal, so that eyes can follow
SENTENCE = "She opened the door and looked into the dark room."
VOCAB, ROW, RECIPE = 1024, 64, "cpu-nano"
SETTINGS: dict[str, Any] = {  # nothing but the end is saved and validated
    "ema": 0.95,
    "device": "cpu",
    "checkpoint.every": 10**9,
    "valid.every": 10**9,
    "valid.draws": 4,
    "log.every": 1,
}


@dataclass(frozen=True)
class DemoResult:
    """What the demo did, for whoever wants more than to look."""

    text: str
    filled: list[str]
    losses: list[float]  # nats per token of the small model, step by step
    valid: dict[str, float]
    page: Path


def run_demo(
    *,
    seconds: float = 45,
    steps: int | None = None,
    seed: int = 1,
    out: Path = Path(PAGE),
    console: Console | None = None,
) -> DemoResult:
    """Everything in order. With `steps` the training is the same on every machine of a kind; with `seconds` it fits."""
    console = console or Console(highlight=False)
    began = time.perf_counter()
    lm = load(device="cpu")
    parameters = sum(p.numel() for p in lm.model.parameters())
    console.print(
        f"[bold]1 · Writing.[/] {lm.name}, an anchored diffusion model of {parameters / 1e6:.1f}M parameters, "
        "on the CPU: all words at once, out of masks."
    )
    told: dict[str, Any] = {"length": LENGTH, "seed": seed, "steps": STEPS, "top_p": TOP_P}
    recordings = [filmed(lm, console, prompt=PROMPT, **told)]

    console.print("\n[bold]2 · Filling in.[/] What is given stays as it is; lengths of holes are found or told:")
    console.print("   " + TEMPLATE, style="dim", markup=False)
    *_, filled = lm.stream(template=TEMPLATE, n=3, seed=seed)
    for row in range(3):
        console.print("  ", draw_still(filled.still(row), show_guesses=False), soft_wrap=True)

    console.print("\n[bold]3 · Scoring.[/] Bits per byte, at most, of a sentence and of its words backwards:")
    backwards = " ".join(reversed(SENTENCE.rstrip(".").split())) + "."
    for text, score in zip((SENTENCE, backwards), lm.score([SENTENCE, backwards]), strict=True):
        console.print(f"  {score.bits_per_byte:.2f}  {text}", markup=False)

    with TemporaryDirectory(ignore_cleanup_errors=True) as name:  # a system may keep files that are still mapped
        losses, valid, small = trained(Path(name), console, seconds, steps, seed)
        console.print(draw_curve(losses), style="blue")
        console.print(
            f"held-out perplexity: at most {valid['val/ppl']:.1f} "
            f"(nll {valid['val/nll']:.3f} ± {valid['val/stderr']:.3f}); "
            f"of a model that knows only how frequent tokens are: {valid['unigram/ppl']:.1f}. It writes:"
        )
        console.print(str(small.generate(length=40, seed=seed, steps=40)), style="italic", markup=False, soft_wrap=True)

    recordings.append(lm.record(PROMPT, title=f"{lm.name} · ancestral", sampler="ancestral", **told))
    page = write_player(recordings, out, title="Two samplers on one seed")
    console.print("\n[bold]5 · Looking again.[/] Two samplers side by side on one seed, to play, step and point at:")
    console.print(f"   open {page.resolve().as_uri()}", style="bold", markup=False, soft_wrap=True)
    console.print(f"Done in {time.perf_counter() - began:.0f} s. Next: adlm sample, adlm infill, adlm train --help")
    return DemoResult(recordings[0].text, filled.texts, losses, valid, page)


def filmed(lm: LM, console: Console, **how: Any) -> Trajectory:
    """Write one text while it is watched."""
    job = lm.build_request(**how)
    began = time.perf_counter()
    stills: Iterator[TrajectoryFrame] = (shot.still() for shot in lm.stream_request(job, guesses=3))
    title = f"{lm.name} · {job.settings['sampler']}"
    (seen,) = watch([stills], [title], console, steps=[job.steps], pause=PAUSE if console.is_terminal else 0)
    return lm.recording(seen, job, title=title, seconds=time.perf_counter() - began)


def trained(
    place: Path, console: Console, seconds: float, steps: int | None, seed: int
) -> tuple[list[float], dict[str, float], LM]:
    """Prepare the opening of a novel (its last twentieth is held out), train on it; losses, bound and model."""
    (place / "novel.txt").write_text(load_excerpt(), "utf-8")
    prepare(place / "novel.txt", place / "data", train_tokenizer=VOCAB, length=ROW, valid_share=0.05)
    settings = SETTINGS | {"data.path": place / "data", "seed": seed}
    if steps is None:
        steps = max(1, int(seconds / seconds_a_step(place / "trial", settings)))
    console.print(
        f"\n[bold]4 · Training.[/] A tiny model of your own, on the opening of a Dickens novel: {steps} steps "
        f"(repeat with --steps {steps})"
    )
    run = train(RECIPE, **settings, folder=place / "run", steps=steps)
    losses = [record["train/nll"] for record in read_metrics(run.folder / "metrics.jsonl") if "train/nll" in record]
    return losses, run.valid, load(run.folder, device="cpu")


def seconds_a_step(folder: Path, settings: dict[str, Any]) -> float:
    """Measured on a run that is thrown away."""
    train(RECIPE, **settings | {"log.show": False}, folder=folder, steps=8)
    told = [record["time"]["seconds"] for record in read_metrics(folder / "metrics.jsonl") if "lr" in record]
    return (told[-1] - told[1]) / 6  # the first two steps warm up
