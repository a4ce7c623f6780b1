"""Shows denoising in a terminal: one text or several next to each other, drawn again after every step."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from adlm.view import look
from adlm.view.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, TrajectoryFrame

Frames = list[TrajectoryFrame]

# Three columns and a space are about the width of a token, so a text hardly grows while it appears.
BLOCKS = {HIDDEN: "░░░", REMASKED: "▒▒▒"}
MIN_PANEL_WIDTH, MAX_PANEL_WIDTH = 40, 104  # columns; narrower panels are stacked
PANEL_ROWS = 4  # of a panel without its text: border, counter, empty line, border
MIN_REFRESH = 1 / 60  # seconds between two drawings: a fast sampler should not wait for them

# Control characters become their pictures; those without one, direction marks and surrogates the replacement character.
CONTROLS = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys([*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
CONTROLS |= dict.fromkeys([0x061C, *range(0xD800, 0xE000)], 0xFFFD)
del CONTROLS[0x0A]


def escape_controls(text: str) -> str:
    """Replace characters that would control the terminal by visible ones; newlines stay."""
    return text.translate(CONTROLS)


def draw_frame(frame: TrajectoryFrame, *, show_guesses: bool = True) -> Text:
    """Draw a text: hidden tokens as blocks or as their likeliest guess, the others as they read."""
    drawn = Text()
    for token in frame.tokens:
        shown, style = token.text, look.STATE_STYLES[token.state] + (look.ANCHOR_STYLE if token.is_anchor else None)
        guess, probability = token.guesses[0] if show_guesses and token.guesses else ("", 0.0)
        if token.is_masked and guess.strip(" "):
            shown = guess.replace("\n", "↵")
            style += look.GUESS_STYLES[look.find_level(probability)] if token.state == HIDDEN else None
        elif token.is_masked:
            shown = " " * (bool(drawn) and not drawn.plain[-1].isspace()) + BLOCKS[token.state]
        # White space is not styled: an underline would extend into it, a reversed line end fills the row.
        before, body, after = re.fullmatch(r"(\s*)(.*?)(\s*)", escape_controls(shown), re.DOTALL).groups()  # type: ignore[union-attr]
        drawn.append(before).append(body, style).append(after)
    return drawn


def _draw_legend(width: int, *, show_guesses: bool) -> Text:
    """Draw the legend in lines of this width, without breaking an entry."""
    entries = [("░░░", HIDDEN, "hidden"), ("new", REVEALED, "just revealed"), ("▒▒▒", REMASKED, "hidden again")]
    entries.append(("text", GIVEN, "given"))
    parts = [Text.assemble((word, look.STATE_STYLES[state]), (f" {name}", "dim")) for word, state, name in entries]
    parts.append(Text.assemble(("word", look.ANCHOR_STYLE), (" anchor", "dim")))
    if show_guesses:
        levels = [f" <{look.PROBABILITY_LEVELS[0]:.0%}", *(f" ≥{level:.0%}" for level in look.PROBABILITY_LEVELS)]
        scale = [(level, look.STATE_STYLES[HIDDEN] + style) for level, style in zip(levels, look.GUESS_STYLES)]
        parts.append(Text.assemble(("guess", "dim"), *scale))
    legend, column = Text(), 0
    for part in parts:
        gap = "" if not legend else "   " if column + 3 + part.cell_len <= width else "\n"
        column = part.cell_len + (column + 3 if gap == "   " else 0)
        legend.append(gap).append_text(part)
    return legend


def count_hidden(frame: TrajectoryFrame) -> int:
    """Count the hidden tokens."""
    return sum(token.is_masked for token in frame.tokens)


def _format_step(frame: TrajectoryFrame, steps: int | None) -> str:
    return f"step {frame.step}" if steps is None else f"step {frame.step} of {steps}"


@dataclass
class DenoisingView:
    """A panel for each text, in a row where the console is wide enough, and a legend.

    Between frames the panels keep their height and the lines they show.
    """

    frames: Sequence[TrajectoryFrame]
    titles: Sequence[str]
    steps: Sequence[int | None]
    show_guesses: bool = True
    height: int | None = None  # rows available; without it nothing is cropped
    tops: dict[int, int] = field(default_factory=dict)  # the first line that a cropped panel shows
    rows: dict[int, int] = field(default_factory=dict)  # of the tallest text so far

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count, width = len(self.frames), options.max_width
        is_row = (width + 1) // count > MIN_PANEL_WIDTH
        panel_width = min(MAX_PANEL_WIDTH, (width + 1) // count - 1 if is_row else width)
        legend = Padding(_draw_legend(width - 4, show_guesses=self.show_guesses), (0, 2))
        room = None
        if self.height is not None:
            free = self.height - len(console.render_lines(legend, options))
            room = max(1, (free if is_row else free // count) - PANEL_ROWS)
        texts = [self._wrap_text(i, console, max(1, panel_width - 4), room) for i in range(count)]
        tallest = max(map(len, texts))
        panels = [self._draw_panel(i, lines, tallest if is_row else len(lines)) for i, lines in enumerate(texts)]
        grid = Table.grid(padding=(0, 1, 0, 0))
        for _ in panels if is_row else panels[:1]:
            grid.add_column(width=panel_width)
        for row in [panels] if is_row else [[panel] for panel in panels]:
            grid.add_row(*row)
        yield grid
        yield legend

    def _wrap_text(self, i: int, console: Console, width: int, room: int | None) -> list[Text]:
        """Break a text into lines, at most as many as there is room for and no fewer than before."""
        drawn = draw_frame(self.frames[i], show_guesses=self.show_guesses)
        lines = list(drawn.wrap(console, width, overflow="fold"))
        if room is not None and len(lines) > room:
            shown = max(1, room - 1)
            top = self.tops[i] = _find_top(lines, self.tops.get(i, 0), shown)
            note = Text(f"⋯ lines {top + 1}–{top + shown} of {len(lines)}", "dim", no_wrap=True, overflow="ellipsis")
            lines = [*lines[top : top + shown], *[note][: room - shown]]
        floor = self.rows[i] = min(max(len(lines), self.rows.get(i, 0)), room or len(lines) + self.rows.get(i, 0))
        return lines + [Text()] * (floor - len(lines))

    def _draw_panel(self, i: int, lines: list[Text], rows: int) -> Panel:
        """Draw a text with its title, step, NFE and number of hidden tokens."""
        frame, steps = self.frames[i], self.steps[i]
        counter = Table.grid(expand=True, padding=(0, 1, 0, 0))
        counter.add_column(no_wrap=True)
        counter.add_column(ratio=1)
        done = look.BAR_DONE
        bar = ProgressBar(steps, frame.step, style=look.BAR_REST, complete_style=done, finished_style=done)
        counter.add_row(_format_step(frame, steps), bar if steps else "")
        counts = Text(f"NFE {frame.nfe} · {count_hidden(frame)} of {len(frame.tokens)} hidden", "not dim")
        title = Text(escape_controls(self.titles[i].replace("\n", " ")), "bold not dim")
        body = Group(counter, Text(), *lines, *[Text()] * (rows - len(lines)))
        ends = {"title": title, "title_align": "left", "subtitle": counts, "subtitle_align": "right"}
        return Panel(body, box.ROUNDED, border_style="dim", **ends)  # type: ignore[arg-type]


def _find_top(lines: Sequence[Text], top: int, room: int) -> int:
    """Return the first of `room` lines to show: as before while a token changes there, else near the next change."""

    def is_busy(style: str | Style) -> bool:  # the style of a token that is hidden or has just changed
        return isinstance(style, Style) and bool(style.dim or style.reverse or style.bold)

    last = len(lines) - room
    top = min(top, last)
    busy = [i for i, line in enumerate(lines) if any(is_busy(span.style) for span in line.spans)]
    if not busy or any(top <= i < top + room for i in busy):
        return top
    nearest = next((i for i in busy if i >= top), busy[0])
    return min(max(0, nearest - 1), last)


def watch(
    streams: Sequence[Iterator[TrajectoryFrame]],
    titles: Sequence[str],
    console: Console,
    *,
    steps: Sequence[int | None],
    pause: float = 0.0,
    show_guesses: bool = True,
) -> list[Frames]:
    """Draw the streams as they arrive, a frame of each at a time, and return the frames of every stream.

    The last drawing stays. Without a terminal, a few frames are printed as plain text.
    """
    if not len(streams) == len(titles) == len(steps) > 0:
        raise ValueError(f"streams: {len(streams)}, titles: {len(titles)}, steps: {len(steps)}; give 1 or more of each")
    seen: list[Frames] = [[] for _ in streams]
    view = DenoisingView([], titles, steps, show_guesses)
    if console.is_terminal and not console.is_dumb_terminal:
        _draw_live(_advance(streams, seen), seen, view, console, pause)
    else:
        _print_some(_advance(streams, seen), seen, view, console)
    return seen


def _advance(streams: Sequence[Iterator[TrajectoryFrame]], seen: list[Frames]) -> Iterator[list[int]]:
    """Append a frame of every stream to `seen`; yield which streams had one, until none has."""
    while True:
        advanced = []
        for i, stream in enumerate(streams):
            frame = next(stream, None)
            if frame is not None:
                seen[i].append(frame)
                advanced.append(i)
        if empty := [i for i, frames in enumerate(seen, 1) if not frames]:
            raise ValueError(f"stream {empty[0]} of {len(seen)} ended before its first frame: give a fresh iterator")
        if not advanced:
            return
        yield advanced


def _draw_live(
    rounds: Iterator[list[int]], seen: list[Frames], view: DenoisingView, console: Console, pause: float
) -> None:
    """Draw the live view; however it ends, the cursor is restored and the last drawing stays."""
    drawn = -MIN_REFRESH
    try:
        with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
            for _ in rounds:
                if time.monotonic() - drawn >= MIN_REFRESH:
                    drawn = time.monotonic()
                    view.frames, view.height = [frames[-1] for frames in seen], console.height - 1
                    live.update(view, refresh=True)
                time.sleep(pause)
    finally:
        if all(seen):
            console.print(DenoisingView([frames[-1] for frames in seen], view.titles, view.steps, view.show_guesses))


def _print_some(rounds: Iterator[list[int]], seen: list[Frames], view: DenoisingView, console: Console) -> None:
    """Print each text when a quarter of it is visible, when half is, and at its end; without guesses."""

    def show(i: int) -> None:
        frame = seen[i][-1]
        counts = f"NFE {frame.nfe}, {count_hidden(frame)} of {len(frame.tokens)} hidden"
        line = f"{escape_controls(view.titles[i])}: {_format_step(frame, view.steps[i])}, {counts}"
        console.print(line, style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(draw_frame(frame, show_guesses=False), soft_wrap=True)

    due = [[0.75, 0.5] for _ in seen]  # shares of the tokens hidden at first
    for advanced in rounds:
        for i in advanced:
            hidden, at_first = count_hidden(seen[i][-1]), count_hidden(seen[i][0])
            rest = [share for share in due[i] if not 0 < hidden <= share * at_first]
            if rest != due[i]:
                show(i)
            due[i] = rest
    for i in range(len(seen)):
        show(i)
