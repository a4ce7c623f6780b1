"""Shows denoising in a terminal: one text or several next to each other, drawn again after every step."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from adlm.view import look
from adlm.view.console import escape_controls
from adlm.view.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, TrajectoryFrame

# Three columns and a space are about the width of a token, so a text hardly grows while it appears.
BLOCKS = {HIDDEN: "░░░", REMASKED: "▒▒▒"}
MIN_PANEL_WIDTH, MAX_PANEL_WIDTH = 40, 104  # columns; narrower panels are stacked
PANEL_ROWS = 4  # of a panel without its text: border, counter, empty line, border
MIN_REFRESH = 1 / 60  # seconds between two drawings: a fast sampler should not wait for them


def draw_frame(frame: TrajectoryFrame, *, show_guesses: bool = True) -> Text:
    """Draw a text: hidden tokens as blocks or as their likeliest guess, the others as they read."""
    drawn = Text()
    for token in frame.tokens:
        shown, style = (
            token.text,
            look.STATE_STYLES[token.state] + (look.ANCHOR_STYLE if token.is_anchor else None),
        )
        guess, probability = token.guesses[0] if show_guesses and token.guesses else ("", 0.0)
        if token.is_masked and guess.strip(" "):
            shown = guess.replace("\n", "↵")
            style += (
                look.GUESS_STYLES[look.find_level(probability)] if token.state == HIDDEN else None
            )
        elif token.is_masked:
            shown = " " * (bool(drawn) and not drawn.plain[-1].isspace()) + BLOCKS[token.state]
        # White space is not styled: an underline would extend into it, a reversed line end fills the row.
        parts = re.fullmatch(r"(\s*)(.*?)(\s*)", escape_controls(shown), re.DOTALL)
        assert parts is not None
        before, body, after = parts.groups()
        drawn.append(before).append(body, style).append(after)
    return drawn


def _draw_legend(*, show_guesses: bool) -> Columns:
    """Draw the legend, as many entries to a line as fit."""
    entries = [
        ("░░░", HIDDEN, "hidden"),
        ("new", REVEALED, "just revealed"),
        ("▒▒▒", REMASKED, "hidden again"),
    ]
    entries.append(("text", GIVEN, "given"))
    parts = [
        Text.assemble((word, look.STATE_STYLES[state]), (f" {name}", "dim"))
        for word, state, name in entries
    ]
    parts.append(Text.assemble(("word", look.ANCHOR_STYLE), (" anchor", "dim")))
    if show_guesses:
        levels = [
            f" <{look.PROBABILITY_LEVELS[0]:.0%}",
            *(f" ≥{level:.0%}" for level in look.PROBABILITY_LEVELS),
        ]
        scale = [
            (level, look.STATE_STYLES[HIDDEN] + style)
            for level, style in zip(levels, look.GUESS_STYLES)
        ]
        parts.append(Text.assemble(("guess", "dim"), *scale))
    return Columns(parts, padding=(0, 3))


def format_step(frame: TrajectoryFrame, steps: int | None) -> str:
    """Format the step, and how many there are where that is known."""
    return f"step {frame.step}" if steps is None else f"step {frame.step} of {steps}"


def format_counts(frame: TrajectoryFrame) -> str:
    """Format the network evaluations and the number of hidden tokens."""
    return f"NFE {frame.nfe} · {frame.hidden} of {len(frame.tokens)} hidden"


@dataclass
class DenoisingView:
    """A panel for each text, in a row where the console is wide enough, and a legend."""

    frames: Sequence[TrajectoryFrame]
    titles: Sequence[str]
    steps: Sequence[int | None]
    show_guesses: bool = True
    height: int | None = None  # rows available; without it nothing is cropped

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count, width = len(self.frames), options.max_width
        is_row = (width + 1) // count > MIN_PANEL_WIDTH
        panel_width = min(MAX_PANEL_WIDTH, (width + 1) // count - 1 if is_row else width)
        legend = Padding(_draw_legend(show_guesses=self.show_guesses), (0, 2))
        texts = [
            list(
                draw_frame(frame, show_guesses=self.show_guesses).wrap(
                    console, max(1, panel_width - 4)
                )
            )
            for frame in self.frames
        ]
        if self.height is not None:
            free = self.height - len(console.render_lines(legend, options))
            room = max(1, (free if is_row else free // count) - PANEL_ROWS)
            texts = [
                lines if len(lines) <= room else [*lines[: room - 1], Text("⋯", "dim")]
                for lines in texts
            ]
        tallest = max(map(len, texts))
        panels = [
            self._draw_panel(i, lines, tallest if is_row else len(lines))
            for i, lines in enumerate(texts)
        ]
        grid = Table.grid(padding=(0, 1, 0, 0))
        for _ in panels if is_row else panels[:1]:
            grid.add_column(width=panel_width)
        for row in [panels] if is_row else [[panel] for panel in panels]:
            grid.add_row(*row)
        yield grid
        yield legend

    def _draw_panel(self, i: int, lines: list[Text], rows: int) -> Panel:
        """Draw a text with its title, step, NFE and number of hidden tokens."""
        frame, steps = self.frames[i], self.steps[i]
        counter = Table.grid(expand=True, padding=(0, 1, 0, 0))
        counter.add_column(no_wrap=True)
        counter.add_column(ratio=1)
        done = look.BAR_DONE
        bar = ProgressBar(
            steps, frame.step, style=look.BAR_REST, complete_style=done, finished_style=done
        )
        counter.add_row(format_step(frame, steps), bar if steps else "")
        counts = Text(format_counts(frame), "not dim")
        title = Text(escape_controls(self.titles[i].replace("\n", " ")), "bold not dim")
        body = Group(counter, Text(), *lines, *[Text()] * (rows - len(lines)))
        panel = Panel(body, box.ROUNDED, title=title, title_align="left", border_style="dim")
        panel.subtitle, panel.subtitle_align = counts, "right"
        return panel


def watch(
    streams: Sequence[Iterator[TrajectoryFrame]],
    titles: Sequence[str],
    console: Console,
    *,
    steps: Sequence[int | None],
    pause: float = 0.0,
    show_guesses: bool = True,
) -> list[list[TrajectoryFrame]]:
    """Draw the streams as they arrive, without a terminal only the last texts, and return the frames of each."""
    seen: list[list[TrajectoryFrame]] = [[] for _ in streams]
    is_live = console.is_terminal and not console.is_dumb_terminal
    view, drawn = DenoisingView([], titles, steps, show_guesses), -MIN_REFRESH
    live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
    try:
        with live if is_live else nullcontext():
            while any(arrived := [next(stream, None) for stream in streams]):
                for frame, frames in zip(arrived, seen):
                    if frame is not None:
                        frames.append(frame)
                if is_live and time.monotonic() - drawn >= MIN_REFRESH:
                    drawn = time.monotonic()
                    view.frames, view.height = [each[-1] for each in seen], console.height - 1
                    live.update(view, refresh=True)
                is_idle = all(len(each) > 1 and each[-1].tokens is each[-2].tokens for each in seen)
                time.sleep(pause if is_live and not is_idle else 0)
    finally:
        if all(seen) and is_live:
            console.print(
                DenoisingView([frames[-1] for frames in seen], titles, steps, show_guesses)
            )
        elif all(seen):
            for frames, title, count in zip(seen, titles, steps):
                counts = f"{format_step(frames[-1], count)}, {format_counts(frames[-1])}"
                console.print(
                    f"{escape_controls(title)}: {counts}",
                    style="bold",
                    markup=False,
                    soft_wrap=True,
                )
                console.print(draw_frame(frames[-1], show_guesses=False), soft_wrap=True)
    return seen
