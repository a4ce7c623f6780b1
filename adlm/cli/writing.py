"""What `sample` and `infill` share: a request, one or two writers of it, and where their texts go."""

from __future__ import annotations

import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from rich.console import Console
from rich.text import Text

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.output import check_output_files, join_texts, json_stdout, print_bytes, print_json, status_console

if TYPE_CHECKING:
    from adlm.text.generation import GenerationRequest
    from adlm.text.lm import LM, GeneratedRow, GenerationOutput
    from adlm.trajectory import Trajectory, TrajectoryFrame

GUESSES = 3  # of every hidden token: a page shows them all, a terminal the first
WIDTHS = {1: 720, 2: 1080}  # pixels of a picture by its panels


@dataclass(frozen=True)
class Request:
    """What is asked for beside the text itself: the options that `sample` and `infill` share."""

    n: options.Count = 1
    seed: options.Seed = 0
    steps: options.Steps = None
    sampler: options.Sampler = None
    temperature: options.Temperature = 1.0
    top_p: options.TopP = 0.9
    top_k: options.TopK = None
    block: options.Block = None
    option: options.SamplerOptions = None
    batch: options.Batch = 16
    deterministic: options.Deterministic = False
    device: options.Device = "auto"
    out: options.Out = None
    html: options.Html = None
    gif: options.Gif = None
    beside: options.Beside = None
    guesses: options.Guesses = True
    pause: options.Pause = 0.05
    is_json: options.Json = False


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first argument is a request, as the command line sees it: its own options, then the request's."""
    shared, hints = get_type_hints(Request, include_extras=True), get_type_hints(command, include_extras=True)
    named = inspect.Parameter.KEYWORD_ONLY
    own = [p.replace(annotation=hints[p.name], kind=named) for p in inspect.signature(command).parameters.values()][1:]
    more = [inspect.Parameter(f.name, named, default=f.default, annotation=shared[f.name]) for f in fields(Request)]

    def run(**given: Any) -> None:
        request = Request(**{name: given.pop(name) for name in shared})
        command(request, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
    return run


class Writer:
    """One model at one job: its first text step by step where that is seen, the others at once."""

    def __init__(self, lm: LM, job: GenerationRequest, title: str) -> None:
        self.lm, self.job, self.title = lm, job, title
        self.rows: list[GeneratedRow] = []
        self.frames: list[TrajectoryFrame] = []
        self.seconds = 0.0  # spent here, not on drawing or pauses

    def first(self, guesses: int) -> Iterator[TrajectoryFrame]:
        """The first text on its way."""
        from adlm.text.lm import GeneratedRow

        alone = replace(self.job, layouts=self.job.layouts[:1], n=1)
        shots, last = self.lm.stream_request(alone, guesses), None
        while True:
            began = time.perf_counter()
            shot = next(shots, None)
            if shot is not None:
                last = shot
                self.frames.append(shot.trajectory_frame())
            self.seconds += time.perf_counter() - began
            if shot is None:
                break
            yield self.frames[-1]
        assert last is not None
        self.rows.append(GeneratedRow(alone.layouts[0], last.frame.tokens[0].tolist(), last.nfe[0]))

    def rest(self) -> None:
        """The texts that are still to be written, a batch at a time."""
        began = time.perf_counter()
        self.rows += self.lm.generate_rows(self.job, start=len(self.rows))
        self.seconds += time.perf_counter() - began

    @property
    def texts(self) -> GenerationOutput:
        """What came of it."""
        from adlm.text.lm import GenerationOutput

        return GenerationOutput.of(self.rows, self.seconds, self.job.settings)

    def fills(self) -> list[list[str]]:
        """What stands in the holes of each text: put in their places, they make the text."""
        return [[text for text, is_given in row.pieces if not is_given] for row in self.rows]

    def build_trajectory(self) -> Trajectory:
        """The first text's way."""
        return self.lm.build_trajectory(self.frames, self.job, title=self.title, seconds=self.seconds)


def answer(model: str | None, request: Request, **what: Any) -> None:
    """Write what is asked for (`what`: prompt and length, or a template) and show it where it is to be seen."""
    with report_errors():
        files = {"--out": request.out, "--html": request.html, "--gif": request.gif}
        check_output_files(files)
        check_gif(request.gif)
        with json_stdout(request.is_json):
            writers = hire(model, request, what)
            recordings = write(writers, request)
            publish(writers, recordings, request)
        if request.is_json:
            fills = "template" in what
            found, *beside = [w.texts.as_dict() | ({"fills": w.fills()} if fills else {}) for w in writers]
            given = {key: what[key] for key in ("prompt", "template") if key in what}
            written = {name.removeprefix("--"): path for name, path in files.items() if path is not None}
            print_json(found | given | ({"beside": beside[0]} if beside else {}) | written)


def check_gif(path: Path | None) -> None:
    """Refuse a picture that could not be made, before anything is computed."""
    if path is None:
        return
    if path.suffix.lower() != ".gif":
        raise ValueError(f"--gif {path} does not end in .gif: call it {path.with_suffix('.gif')}")
    if find_spec("PIL") is None:
        raise ImportError("--gif needs Pillow: pip install 'adlm[view]'; --html needs nothing")


def hire(model: str | None, request: Request, what: dict[str, Any]) -> list[Writer]:
    """Who writes: the model, and beside it a second one or the same with another sampler. All is checked here."""
    from adlm.bundled import DEFAULT
    from adlm.text.lm import load

    lm = load(model or DEFAULT, device=request.device, deterministic=request.deterministic)
    own: dict[str, Any] = {"sampler": request.sampler, "steps": request.steps, "block": request.block}
    own |= parse_sampler_options(request.option or [])
    asked = [(lm, own)]
    if request.beside is not None:
        asked = [(lm, fitting(lm, own)), second(request, lm, own)]
    names = ("n", "temperature", "top_p", "top_k", "seed", "batch")
    same = {name: getattr(request, name) for name in names}
    jobs = [each.build_request(**what, **same, **how) for each, how in asked]
    titles = [f"{Path(each.name).name} · {job.settings['sampler']}" for (each, _), job in zip(asked, jobs, strict=True)]
    if len(set(titles)) < len(titles):  # two runs in folders of one name
        titles = [f"{each.name} · {job.settings['sampler']}" for (each, _), job in zip(asked, jobs, strict=True)]
    return [Writer(each, job, title) for (each, _), job, title in zip(asked, jobs, titles, strict=True)]


def second(request: Request, lm: LM, own: dict[str, Any]) -> tuple[LM, dict[str, Any]]:
    """What `--beside` names: a sampler of the same model, or a model."""
    from adlm.bundled import MODELS
    from adlm.methods import ALIASES, SAMPLERS
    from adlm.text.lm import load

    name = request.beside or ""
    sampler = SAMPLERS.get(name) or SAMPLERS.get(ALIASES.get(name, ""))
    if sampler is not None:  # with options of its own, which are not the first one's
        takes_steps = "steps" in inspect.signature(sampler).parameters
        return lm, {"sampler": name, "steps": own["steps"] if takes_steps else None, "block": own["block"]}
    if name in MODELS or Path(name).exists():
        other = load(name, device=request.device, deterministic=request.deterministic)
        return other, fitting(other, own)
    raise ValueError(
        f"--beside {name!r} is neither a sampler ({', '.join(SAMPLERS)}) nor a model ({', '.join(MODELS)}, or a "
        "folder that is there)"
    )


def fitting(lm: LM, own: dict[str, Any]) -> dict[str, Any]:
    """Of two models, a causal one leaves the sampler and its options to the other: it goes from left to right."""
    return {} if lm.row_format.is_causal else own


def parse_sampler_options(given: Sequence[str]) -> dict[str, Any]:
    """`--option name=value` as a sampler takes it: numbers, true and false."""
    from adlm.text.lm import LM

    taken, found = inspect.signature(LM.build_request).parameters, {}
    for each in given:
        name, sign, value = each.partition("=")
        if not sign or not name.isidentifier():
            raise ValueError(f"--option {each!r}: give name=value, such as eta=0.04")
        if name in taken:
            raise ValueError(f"--option {each!r}: that is no option of a sampler; see --help for --{name}")
        try:
            found[name] = {"true": True, "false": False}[value] if value in ("true", "false") else float(value)
        except ValueError:
            raise ValueError(f"--option {each!r}: {value!r} is not a number, true or false") from None
    return found


def write(writers: Sequence[Writer], request: Request) -> list[Trajectory]:
    """Have it written; the first texts are watched on a terminal, and recorded where they are to be played."""
    is_watched = is_screen(request)
    is_recorded = request.html is not None or request.gif is not None
    streams = [writer.first(GUESSES if request.guesses else 0) for writer in writers]
    if is_watched:
        from adlm.view.terminal import watch

        shows = request.guesses and any(not writer.lm.row_format.is_causal for writer in writers)
        steps, titles = [writer.job.steps for writer in writers], [writer.title for writer in writers]
        watch(streams, titles, Console(highlight=False), steps=steps, pause=request.pause, show_guesses=shows)
    with status_console().status("writing …"):
        if is_recorded and not is_watched:
            for stream in streams:
                deque(stream, maxlen=0)  # the writer keeps what it yields
        recordings = [writer.build_trajectory() for writer in writers] if is_recorded else []
        for writer in writers:
            writer.rest()
    return recordings


def is_screen(request: Request) -> bool:
    """Whether somebody is looking. Not what the color settings say: `FORCE_COLOR=1 adlm sample > file` is a file."""
    return not request.is_json and sys.stdout.isatty()


def publish(writers: Sequence[Writer], recordings: Sequence[Trajectory], request: Request) -> None:
    """Texts to the terminal, the pipe and the file; pages and pictures; what it took."""
    texts = [row.text for writer in writers for row in writer.rows]
    if is_screen(request):
        show(writers, Console(highlight=False))
    elif not request.is_json:
        print_bytes(join_texts(texts))
    console, written = status_console(), []
    if request.out is not None:
        request.out.parent.mkdir(parents=True, exist_ok=True)
        request.out.write_bytes(join_texts(texts))
        written.append(request.out)
    if request.html is not None:
        from adlm.view.player import write_player

        written.append(write_player(recordings, request.html))
    if request.gif is not None:
        from adlm.view.gif import write_gif

        width = WIDTHS[len(recordings)]
        written.append(write_gif(recordings, request.gif, width=width, show_guesses=request.guesses))
    for writer in writers:
        console.print(line_of(writer), style="dim", markup=False)
    for path in written:
        console.print(f"written: {path}", style="dim", markup=False)


def show(writers: Sequence[Writer], console: Console) -> None:
    """Every text, given and written parts apart; numbered where there are several."""
    for writer in writers:
        if len(writers) > 1:
            console.print(f"\n{writer.title}", style="bold", markup=False)
        for number, row in enumerate(writer.rows, 1):
            console.print()
            if len(writer.rows) > 1:
                console.print(f"{number}", style="bold")
            console.print(marked(row), soft_wrap=True)


def marked(row: GeneratedRow) -> Text:
    """A text in which what was given looks given and what was written new; without anything given, plain."""
    from adlm.trajectory import GIVEN, REVEALED
    from adlm.view.look import STATE_STYLES as STYLES
    from adlm.view.terminal import escape_controls

    shown = Text()
    is_plain = not any(is_given and text for text, is_given in row.pieces)
    for text, is_given in row.pieces:
        shown.append(escape_controls(text), None if is_plain else STYLES[GIVEN if is_given else REVEALED])
    return shown


def line_of(writer: Writer) -> str:
    """What it took, in a line."""
    found = writer.texts
    count = f"{len(found.texts)} text" + "s" * (len(found.texts) > 1)
    steps = "" if writer.job.steps is None else f", {writer.job.steps} steps"
    return f"{writer.title}{steps}: {count}, NFE {found.nfe}, {found.seconds:.1f} s, seed {writer.job.seed}"
