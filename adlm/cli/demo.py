"""`adlm demo`: the bundled model generates, infills and scores; a small model is trained; a page plays the samples."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.output import check_output_files, draw_curve, json_stdout, print_json
from adlm.view.console import SafeConsole

if TYPE_CHECKING:
    from adlm.text.lm import LM

PROMPT, TEMPLATE = "The old man ", "The ___ sat by the window, and ___{4} the rain."
LENGTH, STEPS, TOP_P = 64, 128, 0.8
PAUSE = 0.04  # seconds between frames on a terminal
SENTENCE = "She opened the door and looked into the dark room."
VOCAB_SIZE, ROW_LENGTH, RECIPE = 1024, 64, "cpu-nano"
SETTINGS: dict[str, Any] = {"ema": 0.95, "device": "cpu", "valid.draws": 4, "log.every": 1}
SETTINGS |= {"checkpoint.every": 10**9, "valid.every": 10**9}  # saved and validated only at the end


def demo(
    seconds: Annotated[float, typer.Option(min=1, help="Training time; sets the number of steps.")] = 45,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. [default: by --seconds]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, data order, noise and samples.")] = 1,
    out: Annotated[Path, typer.Option(help="Output page.")] = Path("adlm-demo.html"),
    is_json: options.Json = False,
) -> dict[str, Any]:
    """Watch the bundled model generate and infill, train a small model, and write a page of it. Runs on the CPU."""
    with report_errors():
        check_output_files({"--out": out})
        with json_stdout(is_json):
            result = run_demo(seconds=seconds, steps=steps, seed=seed, out=out)
        if is_json:
            print_json(result)
        return result


def run_demo(*, seconds: float, steps: int | None, seed: int, out: Path) -> dict[str, Any]:
    """Run the demo and return its results; with `steps`, the training is the same on every machine of a kind."""
    from adlm.text.lm import load
    from adlm.view.player import write_player
    from adlm.view.terminal import draw_frame, watch

    console, began = SafeConsole(), time.perf_counter()
    lm = load(device="cpu")
    parameters = sum(p.numel() for p in lm.model.parameters())
    console.print(
        f"[bold]1 · Generate.[/] {lm.name}, an anchored diffusion model with {parameters / 1e6:.1f}M parameters, "
        "denoises all tokens of a text together, on the CPU:"
    )
    settings: dict[str, Any] = {"length": LENGTH, "seed": seed, "steps": STEPS, "top_p": TOP_P}
    request, sampling_began = lm.build_request(PROMPT, **settings), time.perf_counter()
    frames = (step.trajectory_frame() for step in lm.stream_request(request, guesses=3))
    title, pause = f"{lm.name} · {request.settings['sampler']}", PAUSE if console.is_terminal else 0
    (seen,) = watch([frames], [title], console, steps=[request.steps], pause=pause)
    trajectories = [lm.build_trajectory(seen, request, title=title, seconds=time.perf_counter() - sampling_began)]

    console.print("\n[bold]2 · Infill.[/] Given text stays the same; the length of a hole is given or inferred:")
    console.print("   " + TEMPLATE, style="dim", markup=False)
    *_, filled = lm.stream(template=TEMPLATE, n=3, seed=seed)
    for row in range(3):
        console.print("  ", draw_frame(filled.trajectory_frame(row), show_guesses=False), soft_wrap=True)

    console.print("\n[bold]3 · Score.[/] Bits per byte (upper bounds) of a sentence and of its words in reverse order:")
    reverse = " ".join(reversed(SENTENCE.rstrip(".").split())) + "."
    for text, score in zip((SENTENCE, reverse), lm.score([SENTENCE, reverse]), strict=True):
        console.print(f"  {score.bits_per_byte:.2f}  {text}", markup=False)

    with TemporaryDirectory(ignore_cleanup_errors=True) as name:  # Windows keeps files that are still mapped
        losses, valid, small = train_small_model(Path(name), console, seconds, steps, seed)
        console.print(draw_curve(losses), style="blue")
        console.print(
            f"held-out perplexity ≤ {valid['val/ppl']:.1f} "
            f"(nll {valid['val/nll']:.3f} ± {valid['val/stderr']:.3f}); unigram model: {valid['unigram/ppl']:.1f}. "
            "A sample of it:"
        )
        console.print(str(small.generate(length=40, seed=seed, steps=40)), style="italic", markup=False, soft_wrap=True)

    trajectories.append(lm.record(PROMPT, title=f"{lm.name} · ancestral", sampler="ancestral", **settings))
    page = write_player(trajectories, out, title="Two samplers on one seed")
    console.print("\n[bold]5 · Play.[/] Two samplers with the same seed; play, step, and point at tokens:")
    console.print(f"   open {page.resolve().as_uri()}", style="bold", markup=False, soft_wrap=True)
    console.print(f"Done in {time.perf_counter() - began:.0f} s. Next: adlm sample, adlm infill, adlm train --help")
    return {"text": trajectories[0].text, "filled": filled.texts, "losses": losses, "valid": valid, "page": page}


def train_small_model(
    folder: Path, console: SafeConsole, seconds: float, steps: int | None, seed: int
) -> tuple[list[float], dict[str, float], LM]:
    """Train on the opening of a novel, with its last twentieth held out; return losses, validation and model."""
    from adlm.data.prepare import prepare
    from adlm.data.sources import load_excerpt
    from adlm.text.lm import load
    from adlm.training.logging import read_metrics
    from adlm.training.loop import train

    (folder / "novel.txt").write_text(load_excerpt(), "utf-8")
    prepare(folder / "novel.txt", folder / "data", train_tokenizer=VOCAB_SIZE, length=ROW_LENGTH, valid_share=0.05)
    settings = SETTINGS | {"data.path": folder / "data", "seed": seed}
    if steps is None:  # measured on a trial run, whose first two steps warm up
        train(RECIPE, **settings | {"log.show": False}, folder=folder / "trial", steps=8)
        records = [record for record in read_metrics(folder / "trial" / "metrics.jsonl") if "lr" in record]
        step_seconds = (records[-1]["time"]["seconds"] - records[1]["time"]["seconds"]) / 6
        steps = max(1, int(seconds / step_seconds))
    console.print(
        f"\n[bold]4 · Train.[/] A tiny model of your own, on the opening of a Dickens novel: {steps} steps "
        f"(repeat with --steps {steps})"
    )
    run = train(RECIPE, **settings, folder=folder / "run", steps=steps)
    losses = [record["train/nll"] for record in read_metrics(run.folder / "metrics.jsonl") if "train/nll" in record]
    return losses, run.valid, load(run.folder, device="cpu")
