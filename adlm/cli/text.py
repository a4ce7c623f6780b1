"""`adlm sample`, `adlm infill` and `adlm score`: texts of one or two models, shown and written, and likelihoods."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adlm.cli import options, output
from adlm.errors import install_command
from adlm.settings import SamplingSettings
from adlm.view.console import SafeConsole, escape_controls

if TYPE_CHECKING:
    from adlm.text.generation import TextRow
    from adlm.text.lm import LM, GenerationOutput
    from adlm.view.trajectory import TrajectoryFrame

output_option = partial(typer.Option, rich_help_panel="Output")
COMPARE_HELP = "Second sampler or second model, run with the same seed."
TEMPLATE_HELP = (
    "Text with holes: `___` of any length, `___{2}` of 2 tokens, `___{2,8}`; - reads stdin."
)
MAX_TEXT_WIDTH = 60  # characters of a text in the table of scores
GUESSES = 3  # recorded of every hidden token: the player shows all, a terminal the first


@dataclass(frozen=True)
class OutputOptions:
    """The options of `sample` and `infill` that are no settings of sampling."""

    deterministic: options.Deterministic = False
    out: Annotated[
        Path | None, output_option(help="Write the texts to this file, separated by <|endoftext|>.")
    ] = None
    html: Annotated[
        Path | None, output_option(help="Write a page that plays the sampling of the first text.")
    ] = None
    gif: Annotated[
        Path | None, output_option(help="Write the sampling of the first text as a GIF.")
    ] = None
    compare: Annotated[str | None, output_option(help=COMPARE_HELP)] = None
    guesses: Annotated[
        bool, output_option(help="Show the most likely tokens at masked positions.")
    ] = True
    pause: Annotated[float, output_option(min=0, help="Seconds between steps on a terminal.")] = (
        0.05
    )
    is_json: options.Json = False


@options.add_options()
def sample(
    settings: SamplingSettings,
    loading: options.LoadOptions,
    own: OutputOptions,
    model: options.ModelArgument = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Beginning of the text; - reads stdin; repeatable.")
    ] = None,
) -> None:
    """Generate texts. On a terminal, show the sampling of the first one; otherwise print only the texts."""
    run_generation(model, settings, loading, own, {"prompt": read_stdin(prompt or [""])})


@options.add_options("length", "max_new_tokens", "stop")
def infill(
    settings: SamplingSettings,
    loading: options.LoadOptions,
    own: OutputOptions,
    template: Annotated[list[str], typer.Argument(help=TEMPLATE_HELP)],
    model: options.ModelOption = None,
) -> None:
    """Fill the holes of a text, for example "The `___` sat on the `___{2}`." The rest stays the same, to the byte."""
    run_generation(model, settings, loading, own, {"template": read_stdin(template)})


def read_stdin(texts: Sequence[str]) -> list[str]:
    """Replace each `-` by the text of stdin."""
    return [output.read_text_file(text) if text == "-" else text for text in texts]


@dataclass
class GenerationRun:
    """Texts of one model: the first step by step where it is shown, the others in batches."""

    lm: LM
    rows: list[TextRow]
    title: str
    frames: list[TrajectoryFrame] = field(default_factory=list)
    seconds: float = 0.0  # of sampling, without drawing and pauses
    output: GenerationOutput = field(init=False)

    def stream_first(self, guesses: int) -> Iterator[TrajectoryFrame]:
        """Sample the first text and yield its frames."""
        began = time.perf_counter()
        for frame in self.lm.stream_rows(self.rows[:1], guesses):
            self.frames.append(frame.trajectory_frame())
            self.seconds += time.perf_counter() - began
            yield self.frames[-1]
            began = time.perf_counter()

    def finish(self) -> None:
        """Sample the texts that are left, in batches."""
        from adlm.text.lm import GenerationOutput

        rest = [row for row in self.rows if row.filled is None]
        if len(rest) == len(self.rows):
            self.output = self.lm.fill_rows(rest)
            return
        seconds = self.seconds + (self.lm.fill_rows(rest).seconds if rest else 0.0)
        self.output = GenerationOutput(self.rows, self.lm.describe(self.rows), seconds)

    def __str__(self) -> str:
        steps = self.rows[0].planned_steps
        parts = [self.title if steps is None else f"{self.title}, {steps} steps"]
        count = len(self.rows)
        parts.append(f"{count} text" if count == 1 else f"{count} texts")
        parts += [f"NFE {self.output.nfe}", f"{self.output.seconds:.1f} s"]
        return f"{parts[0]}: {', '.join(parts[1:])}, seed {self.rows[0].seed}"


def run_generation(
    model: str | None,
    settings: SamplingSettings,
    loading: options.LoadOptions,
    own: OutputOptions,
    texts: dict[str, Any],
) -> None:
    """Generate texts (`texts`: prompt or template), then show and write them."""
    files = {"--out": own.out, "--html": own.html, "--gif": own.gif}
    output.check_output_files(files)
    if own.gif is not None and own.gif.suffix.lower() != ".gif":
        raise ValueError(
            f"--gif {own.gif} does not end in .gif: call it {own.gif.with_suffix('.gif')}"
        )
    if own.gif is not None and find_spec("PIL") is None:
        raise ImportError(f"--gif needs Pillow ({install_command('view')}); --html needs nothing")
    with output.json_stdout(own.is_json):
        runs = build_runs(model, settings, loading, own, texts)
        # Color settings do not count: `FORCE_COLOR=1 adlm sample > file` is a file.
        is_watched = not own.is_json and sys.stdout.isatty()
        sample_runs(runs, own, is_watched)
        write_outputs(runs, own, is_watched)
    if own.is_json:
        result, *second = [run.output.as_dict() for run in runs]
        result |= {"compare": second[0]} if second else {}
        if "template" in texts:  # the texts of the holes of each row, in their order
            for each, run in zip([result, *second], runs):
                each["fills"] = [
                    [text for text, is_given in row.pieces if not is_given]
                    for row in run.output.rows
                ]
        output.print_json(
            result | texts | {name[2:]: path for name, path in files.items() if path is not None}
        )


def build_runs(
    model: str | None,
    settings: SamplingSettings,
    loading: options.LoadOptions,
    own: OutputOptions,
    texts: dict[str, Any],
) -> list[GenerationRun]:
    """Load the model, and with --compare a second one or sampler; build and check their requests."""
    from adlm.bundled import MODELS
    from adlm.diffusion.samplers import SAMPLERS, takes_steps
    from adlm.evaluate.results import shorten_names

    lm = loading.load_model(model, deterministic=own.deterministic)
    settings = settings.draw_seed()  # one for both
    pairs = [(lm, settings)]
    if (name := own.compare) is not None:
        is_folder = Path(name).exists()
        if name in SAMPLERS or (
            ":" in name and not is_folder
        ):  # without the first sampler's options
            changes: dict[str, Any] = {"sampler": name, "options": None}
            if not takes_steps(name, allow_import=True):
                changes["steps"] = None
            pairs.append((lm, settings.model_copy(update=changes)))
        elif name in MODELS or is_folder:
            other = loading.load_model(name, deterministic=own.deterministic)
            pairs.append((other, settings))
        else:
            known = (
                f"a sampler ({', '.join(SAMPLERS)}) nor a model ({', '.join(MODELS)}, or a folder)"
            )
            raise ValueError(f"--compare {name!r} is neither {known}: check the name")
        # A causal model samples left to right, without the other's sampler.
        masked = dict.fromkeys(("sampler", "steps", "options", "block"))
        pairs = [
            (each, given.model_copy(update=masked if each.row_format.is_causal else {}))
            for each, given in pairs
        ]
    names = shorten_names([each.name for each, _ in pairs])
    runs = []
    for each, given in pairs:
        rows = each.layout_rows(settings=given, **texts)
        title = f"{names[each.name]} · {rows[0].settings.sampler}"
        runs.append(GenerationRun(each, rows, title))
    return runs


def sample_runs(runs: Sequence[GenerationRun], own: OutputOptions, is_watched: bool) -> None:
    """Generate all texts; show the first ones on a terminal."""
    from adlm.view.terminal import watch

    is_streamed = is_watched or own.html is not None or own.gif is not None
    streams = (
        [run.stream_first(GUESSES if own.guesses else 0) for run in runs] if is_streamed else []
    )
    if is_watched:
        show_guesses = own.guesses and any(not run.lm.row_format.is_causal for run in runs)
        steps, titles = [run.rows[0].planned_steps for run in runs], [run.title for run in runs]
        watch(
            streams,
            titles,
            SafeConsole(),
            steps=steps,
            pause=own.pause,
            show_guesses=show_guesses,
        )
    with output.status_console().status("sampling …"):
        for stream in streams:
            deque(stream, maxlen=0)  # those that were not watched; the run keeps its frames
        for run in runs:
            run.finish()


def write_outputs(runs: Sequence[GenerationRun], own: OutputOptions, is_watched: bool) -> None:
    """Print the texts, write --out, --html and --gif, and report time and NFE on stderr."""
    from adlm.view.gif import write_gif
    from adlm.view.player import write_player

    texts = (
        output.SEPARATOR.join(text for run in runs for text in run.output.texts) + "\n"
    ).encode("utf-8")
    if not is_watched and not own.is_json:
        output.print_bytes(texts)
    console = SafeConsole()
    for run in runs if is_watched else ():  # texts are numbered where there are several
        if len(runs) > 1:
            console.print(f"\n{run.title}", style="bold", markup=False)
        for number, text in enumerate(run.output.texts, 1):
            console.print(f"\n{number}" if len(run.output) > 1 else "", style="bold")
            console.print(escape_controls(text), markup=False, soft_wrap=True)
    trajectories = [
        run.lm.build_trajectory(run.frames, run.rows, title=run.title, seconds=run.seconds)
        for run in (runs if own.html or own.gif else ())
    ]
    writers: dict[Path | None, Callable[[Path], object]] = {
        own.out: lambda path: path.write_bytes(texts)
    }
    writers |= {
        own.html: partial(write_player, trajectories),
        own.gif: partial(write_gif, trajectories),
    }
    paths = [path for path in writers if path is not None]
    for path in paths:
        output.make_folder(path.parent)
        writers[path](path)
    for line in (*runs, *(f"wrote {path}" for path in paths)):
        output.status_console().print(str(line), style="dim", markup=False)


@options.add_options()
def score(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; - reads stdin.")
    ] = None,
    model: options.ModelOption = None,
    file: Annotated[
        list[str] | None, typer.Option(help="File with one text, - for stdin; repeatable.")
    ] = None,
    lines: Annotated[
        list[str] | None, typer.Option(help="File with a text per line, - for stdin; repeatable.")
    ] = None,
    draws: Annotated[
        int, typer.Option(min=2, help="Noise samples per text; 4 times as many halve the error.")
    ] = 64,
    seed: options.Seed = 0,
    batch: Annotated[
        int, typer.Option(min=1, help="Rows per batch; does not change the result.")
    ] = 64,
    *,
    loading: options.LoadOptions,
    is_json: options.Json = False,
) -> None:
    """Compute the likelihood of texts: nats per token with their standard error, perplexity and bits per byte.

    Masked models give an upper bound (≤), causal ones the exact value.
    """
    inputs = read_stdin(texts or []) + [output.read_text_file(name) for name in file or []]
    every_line = [
        line.removesuffix("\r")
        for name in lines or []
        for line in output.read_text_file(name).split("\n")
    ]
    inputs += [line for line in every_line if line.strip()]
    if not inputs:
        raise ValueError(
            "there is no text to score: give some, --file FILE, --lines FILE, or - to read stdin"
        )
    if skipped := sum(not line.strip() for line in every_line):
        output.status_console().print(f"empty lines skipped: {skipped}", style="dim", markup=False)
    with output.json_stdout(is_json):
        lm = loading.load_model(model)
        began = time.perf_counter()
        with output.status_console().status("scoring …"):
            scores = lm.score(inputs, draws=draws, seed=seed, batch=batch)
    is_causal = lm.row_format.is_causal
    if is_json:
        settings = {
            "model": lm.name,
            "method": lm.method,
            "draws": 1 if is_causal else draws,
            "seed": seed,
        }
        rows = [
            {"text": text, **asdict(each), "ppl": each.ppl}
            for text, each in zip(inputs, scores, strict=True)
        ]
        seconds = time.perf_counter() - began
        output.print_json(
            {"scores": rows, "seconds": seconds, "settings": settings | {"device": str(lm.device)}}
        )
        return
    from adlm.evaluate.results import Cell, Estimate, Table, TableColumn
    from adlm.likelihood import MAX_ENUMERATED

    table_rows: list[list[Cell]] = []
    for text, each in zip(inputs, scores, strict=True):
        text, sign = text.replace("\n", "↵"), "" if each.is_exact else "≤ "
        shown = text if len(text) <= MAX_TEXT_WIDTH else text[: MAX_TEXT_WIDTH - 1] + "…"
        nll = (
            f"{each.nll:.3f} (exact)"
            if each.is_exact
            else Estimate(each.nll, each.stderr).format(prefix=sign)
        )
        table_rows.append(
            [shown, each.tokens, nll, f"{sign}{each.ppl:,.1f}", f"{sign}{each.bits_per_byte:.3f}"]
        )
    columns = [TableColumn("text", is_text=True), TableColumn("tokens", is_optional=True)]
    columns += [TableColumn(name) for name in ("nats/token", "perplexity", "bits/byte")]
    output.print_table(Table(columns, table_rows))
    which = "" if lm.model.config.time_conditioning else f" of more than {MAX_ENUMERATED} tokens"
    kind = "exact" if is_causal else f"≤: upper bound, {draws} noise samples per text{which}"
    output.status_console().print(f"{lm.name}: {kind}", style="dim", markup=False)
