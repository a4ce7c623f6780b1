"""`adlm demo`: the bundled model infills and generates, and is fine-tuned next to a training from scratch."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adlm.cli import options
from adlm.cli.output import check_output_folder, draw_curve, json_stdout, make_folder, print_json
from adlm.files import remove_folder, write_atomically
from adlm.view.console import SafeConsole

if TYPE_CHECKING:
    from adlm.training.train import Run

PROMPT, TEMPLATE = "The old man ", "The ___ sat by the window, and ___{4} the rain."
LENGTH, STEPS, TOP_P = 64, 128, 0.8
PAUSE = 0.04  # seconds between frames on a terminal
PAGE, FOLDERS = (
    "demo.html",
    ("data", "data-init", "from-scratch", "fine-tuned"),
)  # in the output folder
SETTINGS: dict[str, Any] = {"device": "cpu", "log.every": 1}
SETTINGS |= {"checkpoint.every": 10**9, "valid.every": 10**9}  # saved and validated only at the end
# From scratch: a small vocabulary and short rows. Fine-tuned: the vocabulary and rows of the bundled model.
SCRATCH: dict[str, Any] = {"ema": 0.95, "valid.draws": 4}
FINE_TUNE: dict[str, Any] = {
    "batch": 4,
    "ema": 0.9,
    "valid.draws": 2,
    "valid.rows": 32,
    "optimizer.warmup": 5,
}
FINE_TUNE_SHARE = 20  # steps from scratch for one step of fine-tuning


def demo(
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps from scratch, 20 for each of fine-tuning.")
    ] = 600,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of weights, data order, noise and samples.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Output folder for the page and both runs.")] = Path(
        "adlm-demo"
    ),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the runs of an earlier demo.")
    ] = False,
    is_json: options.Json = False,
) -> dict[str, Any]:
    """Watch the bundled model infill and generate, train and fine-tune on a novel, and keep the runs. Uses the CPU."""
    check_output_folder("--out", out)
    if out.is_dir() and any(out.iterdir()) and not (out / PAGE).is_file():
        raise ValueError(
            f"--out {out} holds other files: give a new folder, or one of an earlier demo"
        )
    earlier = [out / name for name in FOLDERS if (out / name).exists()]
    if earlier and not overwrite:
        raise ValueError(
            f"--out {out} has runs of an earlier demo: give a new folder, or --overwrite"
        )
    for folder in earlier:
        remove_folder(folder)
    with json_stdout(is_json):
        result = run_demo(steps=steps, seed=seed, out=out)
    if is_json:
        print_json(result)
    return result


def run_demo(*, steps: int, seed: int, out: Path) -> dict[str, Any]:
    """Run the demo and return its results."""
    from adlm.text.lm import load
    from adlm.view.player import write_player
    from adlm.view.terminal import draw_frame, watch

    console, began = SafeConsole(), time.perf_counter()
    lm = load(device="cpu")
    parameters = sum(p.numel() for p in lm.model.parameters())
    console.print(
        f"[bold]1 · Infill.[/] {lm.name}, an anchored diffusion model with {parameters / 1e6:.1f}M parameters, fills "
        "holes from both sides, on the CPU. Given text stays the same; the length of a hole is given or inferred:"
    )
    console.print("   " + TEMPLATE, style="dim", markup=False)
    *_, filled = lm.stream(template=TEMPLATE, n=3, seed=seed)
    for row in range(3):
        console.print(
            "  ", draw_frame(filled.trajectory_frame(row), show_guesses=False), soft_wrap=True
        )

    console.print("\n[bold]2 · Generate.[/] All tokens of a text are denoised together:")
    settings: dict[str, Any] = {"length": LENGTH, "seed": seed, "steps": STEPS, "top_p": TOP_P}
    rows = lm.layout_rows(PROMPT, **settings)
    title = f"{lm.name} · {rows[0].settings.sampler}"
    sampling_began = time.perf_counter()
    frames = (frame.trajectory_frame() for frame in lm.stream_rows(rows, guesses=3))
    pause = PAUSE if console.is_terminal else 0
    (seen,) = watch([frames], [title], console, steps=[rows[0].planned_steps], pause=pause)
    sampling_seconds = time.perf_counter() - sampling_began
    trajectories = [lm.build_trajectory(seen, rows, title=title, seconds=sampling_seconds)]

    make_folder(out)
    trajectories.append(
        lm.record(PROMPT, title=f"{lm.name} · ancestral", sampler="ancestral", **settings)
    )
    page = write_player(trajectories, out / PAGE, title="Two samplers on one seed")
    runs = train_models(out, console, steps, seed)
    console.print(
        "\n[bold]4 · Play.[/] Two samplers with the same seed; play, step, and point at tokens:"
    )
    console.print(f"   open {page.resolve().as_uri()}", style="bold", markup=False, soft_wrap=True)
    seconds = time.perf_counter() - began
    console.print(
        f"\nDone in {seconds:.0f} s. Both runs are in {out}. Sample from one:",
        markup=False,
        soft_wrap=True,
    )
    command = f'adlm sample {shlex.quote(str(out / "fine-tuned"))} --prompt "{PROMPT}"'
    console.print(f"   {command}", style="bold", markup=False, soft_wrap=True)
    valid = {name: run.valid for name, run in runs.items()}
    return {
        "text": trajectories[0].text,
        "filled": filled.texts,
        "valid": valid,
        "page": page,
        "command": command,
    }


def train_models(out: Path, console: SafeConsole, steps: int, seed: int) -> dict[str, "Run"]:
    """Train a small model on the opening of a novel and fine-tune the bundled one on it; return both runs."""
    from adlm.bundled import DEFAULT
    from adlm.data.prepare import prepare
    from adlm.data.sources import load_excerpt
    from adlm.text.lm import load
    from adlm.training.logging import read_metrics
    from adlm.training.train import train

    novel, fine_tune_steps = out / "novel.txt", max(1, steps // FINE_TUNE_SHARE)
    write_atomically(novel, load_excerpt().encode("utf-8"))
    console.print(
        f"\n[bold]3 · Train.[/] On the opening of a Dickens novel: a tiny model from scratch, {steps} steps, then "
        f"{DEFAULT}, fine-tuned for {fine_tune_steps}. A twentieth of the text is held out."
    )
    prepare(novel, out / "data", train_tokenizer=1024, length=64, valid_share=0.05)
    prepared: dict[str, Any] = {
        "tokenizer": DEFAULT,
        "length": 256,
        "rows": "documents",
        "documents": "line",
    }
    prepare(novel, out / "data-init", valid_share=0.05, **prepared)
    shared, runs = SETTINGS | {"seed": seed}, {}
    for name, recipe, own in (
        ("from-scratch", "cpu-nano", {"data.path": out / "data", "steps": steps, **SCRATCH}),
        (
            "fine-tuned",
            "fine-tune",
            {"data.path": out / "data-init", "steps": fine_tune_steps, **FINE_TUNE},
        ),
    ):
        run = runs[name] = train(recipe, **shared, **own, folder=out / name)
        if name == "from-scratch":
            records = read_metrics(run.folder / "metrics.jsonl")
            console.print(
                draw_curve([each["train/loss"] for each in records if "train/loss" in each]),
                style="blue",
            )
        console.print(
            f"{name}: held-out perplexity ≤ {run.valid['val/ppl']:.1f}, of a unigram model of the same tokens "
            f"{run.valid['unigram/ppl']:.1f}. A sample:",
            style="bold",
            markup=False,
        )
        text = load(run.folder, device="cpu").generate(
            PROMPT, length=40, seed=seed, steps=40, top_p=TOP_P
        )
        console.print(str(text), style="italic", markup=False, soft_wrap=True)
    return runs
