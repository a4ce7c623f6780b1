"""`adlm sample`, `adlm infill` and `adlm score`: texts of one or two models, shown and written, and likelihoods."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
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
    named = {"out": own.out, "html": own.html, "gif": own.gif}
    files = {name: path for name, path in named.items() if path is not None}
    if files:
        check_files(files)
    console = output.status_console()
    with output.json_stdout(own.is_json):
        runs = build_runs(model, settings, loading, own, texts)
        # Color settings do not count: `FORCE_COLOR=1 adlm sample > file` is a file.
        is_watched = not own.is_json and sys.stdout.isatty()
        is_streamed = is_watched or own.html is not None or own.gif is not None
        if is_streamed:
            stream_first_texts(runs, own, console, is_watched=is_watched)
        with console.status("sampling …"):
            for run in runs:
                run.finish()
        content = output.SEPARATOR.join(text for run in runs for text in run.output) + "\n"
        if is_watched:
            print_texts(runs)
        elif not own.is_json:
            output.print_bytes(content.encode("utf-8"))
        if files:
            write_files(runs, files, content)
        for run in runs:
            console.print(str(run), style="dim", markup=False)
        for path in files.values():
            console.print(f"wrote {path}", style="dim", markup=False)
    if own.is_json:
        results = []
        for run in runs:
            result = run.output.as_dict()
            if "template" in texts:  # the texts of the holes of each row, in their order
                result["fills"] = [row.fills for row in run.rows]
            results.append(result)
        compared = {"compare": results[1]} if len(results) > 1 else {}
        output.print_json({**results[0], **compared, **texts, **files})


def check_files(files: dict[str, Path]) -> None:
    """Refuse output files that cannot be written, before anything is computed."""
    output.check_output_files({f"--{name}": path for name, path in files.items()})
    gif = files.get("gif")
    if gif is None:
        return
    if gif.suffix.lower() != ".gif":
        raise ValueError(f"--gif {gif} does not end in .gif: call it {gif.with_suffix('.gif')}")
    if find_spec("PIL") is None:
        raise ImportError(f"--gif needs Pillow ({install_command('view')}); --html needs nothing")


def build_runs(
    model: str | None,
    settings: SamplingSettings,
    loading: options.LoadOptions,
    own: OutputOptions,
    texts: dict[str, Any],
) -> list[GenerationRun]:
    """Load the model, and with --compare a second one or sampler; lay out and check their rows."""
    from adlm.evaluate.results import shorten_names

    lm = loading.load_model(model, deterministic=own.deterministic)
    settings = settings.draw_seed()  # one for both
    pairs = [(lm, settings)]
    if own.compare is not None:
        pairs.append(choose_compared(own.compare, lm, settings, loading, own))
    names = shorten_names([each.name for each, _ in pairs])
    runs = []
    for each, given in pairs:
        if own.compare is not None and each.row_format.is_causal:
            # A causal model samples left to right, without the other's sampler.
            masked = dict.fromkeys(("sampler", "steps", "options", "block"))
            given = given.model_copy(update=masked)
        rows = each.layout_rows(settings=given, **texts)
        title = f"{names[each.name]} · {rows[0].settings.sampler}"
        runs.append(GenerationRun(each, rows, title))
    return runs


def choose_compared(
    name: str,
    lm: LM,
    settings: SamplingSettings,
    loading: options.LoadOptions,
    own: OutputOptions,
) -> tuple[LM, SamplingSettings]:
    """Return the second model, or the same with another sampler."""
    from adlm.bundled import MODELS
    from adlm.diffusion.samplers import SAMPLERS, takes_steps

    is_folder = Path(name).exists()
    if SAMPLERS.knows(name) or (":" in name and not is_folder):
        changes: dict[str, Any] = {"sampler": name, "options": None}  # those of the first sampler
        if not takes_steps(name, allow_import=True):
            changes["steps"] = None
        return lm, settings.model_copy(update=changes)
    if name in MODELS or is_folder:
        return loading.load_model(name, deterministic=own.deterministic), settings
    known = f"a sampler ({', '.join(SAMPLERS)}) nor a model ({', '.join(MODELS)}, or a folder)"
    raise ValueError(f"--compare {name!r} is neither {known}: check the name")


def stream_first_texts(
    runs: Sequence[GenerationRun], own: OutputOptions, console: SafeConsole, *, is_watched: bool
) -> None:
    """Generate the first text of each run step by step, on a terminal shown."""
    streams = [run.stream_first(GUESSES if own.guesses else 0) for run in runs]
    if is_watched:
        from adlm.view.terminal import watch

        is_any_masked = any(not run.lm.row_format.is_causal for run in runs)
        watch(
            streams,
            [run.title for run in runs],
            SafeConsole(),
            steps=[run.rows[0].planned_steps for run in runs],
            pause=own.pause,
            show_guesses=own.guesses and is_any_masked,
        )
        return
    with console.status("sampling …"):
        for stream in streams:
            deque(stream, maxlen=0)  # the run keeps its frames


def print_texts(runs: Sequence[GenerationRun]) -> None:
    """Print the texts on a terminal, numbered where there are several."""
    console = SafeConsole()
    for run in runs:
        if len(runs) > 1:
            console.print(f"\n{run.title}", style="bold", markup=False)
        for number, text in enumerate(run.output, 1):
            console.print(f"\n{number}" if len(run.output) > 1 else "", style="bold")
            console.print(escape_controls(text), markup=False, soft_wrap=True)


def write_files(runs: Sequence[GenerationRun], files: dict[str, Path], content: str) -> None:
    """Write --out, --html and --gif."""
    from adlm.view.gif import write_gif
    from adlm.view.player import write_player

    for name, path in files.items():
        output.make_folder(path.parent)
        if name == "out":
            path.write_bytes(content.encode("utf-8"))
            continue
        trajectories = [
            run.lm.build_trajectory(run.frames, run.rows, title=run.title, seconds=run.seconds)
            for run in runs
        ]
        if name == "html":
            write_player(trajectories, path)
        else:
            write_gif(trajectories, path)


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
