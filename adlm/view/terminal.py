"""Denoising in a terminal: one text or several side by side, drawn again after every step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from adlm.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, TokenState, TrajectoryFrame
from adlm.view.colors import ANCHOR, DONE, GUESSES, REST, STYLES, SURE, sureness

# Three columns and a space: about what a token takes, so a text hardly grows while it appears.
BLOCKS = {HIDDEN: "░░░", REMASKED: "▒▒▒"}
LEAST_WIDTH, MOST_WIDTH = 40, 104  # columns of a panel; with less, panels stand one above the other
FRAME_ROWS = 4  # of a panel beside its text: border, counter, a rule below it, border
REFRESH = 1 / 60  # seconds between two drawings at least: a fast sampler should not wait for its picture

# Controls as their pictures; what has none, turns the writing direction or cannot be encoded as the replacement mark.
STAND_INS = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
STAND_INS |= dict.fromkeys([*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
STAND_INS |= dict.fromkeys([0x061C, *range(0xD800, 0xE000)], 0xFFFD)
del STAND_INS[0x0A]  # a newline is one


def tame(text: str) -> str:
    """The text with a visible stand-in for everything that would command the terminal; newlines stay."""
    return text.translate(STAND_INS)


def draw_still(still: TrajectoryFrame, *, show_guesses: bool = True) -> Text:
    """A text as it stands: hidden tokens as blocks or as the likeliest guess, everything else as it reads."""
    drawn = Text()
    for cell in still.cells:
        shown, style = look(cell, show_guesses=show_guesses)
        if cell.is_masked and shown == " " + BLOCKS[cell.state] and (not drawn or drawn.plain[-1].isspace()):
            shown = shown[1:]
        body = shown.strip()
        before, _, after = shown.partition(body) if body else (shown, "", "")
        # Spaces and line ends are not styled: an underline would run on, a reversed line end fills the row.
        drawn.append(before).append(body, style).append(after)
    return drawn


def look(cell: TokenState, *, show_guesses: bool) -> tuple[str, Style]:
    """What is written at a position, and how."""
    style = STYLES[cell.state] + ANCHOR if cell.is_anchor else STYLES[cell.state]
    if not cell.is_masked:
        return tame(cell.text), style
    if show_guesses and cell.guesses:
        guess, probability = cell.guesses[0]
        if guess.strip(" "):
            colored = style + GUESSES[sureness(probability)] if cell.state == HIDDEN else style
            return tame(guess.replace("\n", "↵")), colored
    return " " + BLOCKS[cell.state], style


def draw_legend(width: int, *, show_guesses: bool = True) -> Text:
    """What the looks mean, in as many lines of this width as it takes; no entry is torn."""
    entries = [("░░░", STYLES[HIDDEN], "hidden"), ("new", STYLES[REVEALED], "just revealed")]
    entries += [("▒▒▒", STYLES[REMASKED], "hidden again"), ("text", STYLES[GIVEN], "given"), ("word", ANCHOR, "anchor")]
    parts = [Text.assemble((sample, style), (f" {name}", "dim")) for sample, style, name in entries]
    if show_guesses:
        levels = [f" <{SURE[0]:.0%}", *(f" ≥{level:.0%}" for level in SURE)]
        scale = [(level, STYLES[HIDDEN] + style) for level, style in zip(levels, GUESSES)]
        parts.append(Text.assemble(("guess", "dim"), *scale))
    legend, column = Text(), 0
    for part in parts:
        gap = "" if not legend else "   " if column + 3 + part.cell_len <= width else "\n"
        column = part.cell_len + (column + 3 if gap == "   " else 0)
        legend.append(gap).append_text(part)
    return legend


def count_hidden(still: TrajectoryFrame) -> int:
    """Tokens that are still to come."""
    return sum(cell.is_masked for cell in still.cells)


def say_step(still: TrajectoryFrame, steps: int | None) -> str:
    return f"step {still.step}" if steps is None else f"step {still.step} of {steps}"


@dataclass
class View:
    """Panels that a console can print; between frames they keep their height and the lines they show."""

    stills: Sequence[TrajectoryFrame]
    titles: Sequence[str]
    steps: Sequence[int | None]
    show_guesses: bool = True
    height: int | None = None  # rows there are; without it nothing is cropped
    tops: dict[int, int] = field(default_factory=dict)  # the first line that a cropped panel shows
    rows: dict[int, int] = field(default_factory=dict)  # of the tallest text so far

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count, width = len(self.stills), options.max_width
        is_beside = (width + 1) // count > LEAST_WIDTH
        each = min(MOST_WIDTH, (width + 1) // count - 1 if is_beside else width)
        legend = Padding(draw_legend(width - 4, show_guesses=self.show_guesses), (0, 2))
        room = None
        if self.height is not None:
            free = self.height - len(console.render_lines(legend, options))
            room = max(1, (free if is_beside else free // count) - FRAME_ROWS)
        texts = [self.lines(i, console, max(1, each - 4), room) for i in range(count)]
        tallest = max(map(len, texts))
        panels = [self.panel(i, lines, tallest if is_beside else len(lines)) for i, lines in enumerate(texts)]
        grid = Table.grid(padding=(0, 1, 0, 0))
        for _ in panels if is_beside else panels[:1]:
            grid.add_column(width=each)
        for row in [panels] if is_beside else [[panel] for panel in panels]:
            grid.add_row(*row)
        yield grid
        yield legend

    def lines(self, i: int, console: Console, width: int, room: int | None) -> list[Text]:
        """A text in lines, as many as there is room for and no fewer than there were."""
        drawn = draw_still(self.stills[i], show_guesses=self.show_guesses)
        lines = list(drawn.wrap(console, width, overflow="fold"))
        if room is not None and len(lines) > room:
            shown = max(1, room - 1)
            top = self.tops[i] = find_top(lines, self.tops.get(i, 0), shown)
            note = Text(f"⋯ lines {top + 1}–{top + shown} of {len(lines)}", "dim", no_wrap=True, overflow="ellipsis")
            lines = [*lines[top : top + shown], *[note][: room - shown]]
        floor = self.rows[i] = min(max(len(lines), self.rows.get(i, 0)), room or len(lines) + self.rows.get(i, 0))
        return lines + [Text()] * (floor - len(lines))

    def panel(self, i: int, lines: list[Text], rows: int) -> Panel:
        """A text with its title, how far it has come and what it has cost."""
        still, steps = self.stills[i], self.steps[i]
        counter = Table.grid(expand=True, padding=(0, 1, 0, 0))
        counter.add_column(no_wrap=True)
        counter.add_column(ratio=1)
        bar = ProgressBar(steps, still.step, style=REST, complete_style=DONE, finished_style=DONE) if steps else ""
        counter.add_row(say_step(still, steps), bar)
        told = Text(f"NFE {still.nfe} · {count_hidden(still)} of {len(still.cells)} hidden", "not dim")
        title = Text(tame(self.titles[i].replace("\n", " ")), "bold not dim")
        body = Group(counter, Text(), *lines, *[Text()] * (rows - len(lines)))
        return Panel(
            body,
            box.ROUNDED,
            title=title,
            title_align="left",
            subtitle=told,
            subtitle_align="right",
            border_style="dim",
        )


def find_top(lines: Sequence[Text], top: int, room: int) -> int:
    """The first of `room` lines to show: as before while something is to come there, else where it is."""
    last = len(lines) - room
    top = min(top, last)
    busy = [i for i, line in enumerate(lines) if any(is_busy(span.style) for span in line.spans)]
    if not busy or any(top <= i < top + room for i in busy):
        return top
    nearest = next((i for i in busy if i >= top), busy[0])
    return min(max(0, nearest - 1), last)


def is_busy(style: str | Style) -> bool:
    """Whether this is the look of a token that is hidden or has just changed."""
    return isinstance(style, Style) and bool(style.dim or style.reverse or style.bold)


def draw_panels(
    stills: Sequence[TrajectoryFrame],
    titles: Sequence[str],
    *,
    steps: Sequence[int | None],
    show_guesses: bool = True,
    height: int | None = None,
) -> RenderableType:
    """A panel for each text, side by side where the terminal is wide enough, and a legend; at most `height` rows."""
    check(len(stills), "still", titles, steps)
    return View(stills, titles, steps, show_guesses, height)


def check(count: int, what: str, titles: Sequence[str], steps: Sequence[int | None]) -> None:
    if count == 0:
        raise ValueError(f"there is nothing to draw: give at least one {what}")
    if len(titles) != count or len(steps) != count:
        raise ValueError(f"{what}s: {count}, titles: {len(titles)}, steps: {len(steps)}; give as many of each")


def watch(
    streams: Sequence[Iterator[TrajectoryFrame]],
    titles: Sequence[str],
    console: Console,
    *,
    steps: Sequence[int | None],
    pause: float = 0.0,
    show_guesses: bool = True,
) -> list[list[TrajectoryFrame]]:
    """Draw the streams as they come, one still of each at a time, and return all stills of every stream.

    The last picture stays, whole. What is no terminal gets a few stills as plain lines.
    """
    check(len(streams), "stream", titles, steps)
    seen: list[list[TrajectoryFrame]] = [[] for _ in streams]
    if console.is_terminal and not console.is_dumb_terminal:
        draw_live(streams, seen, View([], titles, steps, show_guesses), console, pause)
    else:
        print_some(streams, seen, titles, steps, console)
    return seen


def advance(streams: Sequence[Iterator[TrajectoryFrame]], seen: Sequence[list[TrajectoryFrame]]) -> Iterator[list[int]]:
    """Add a still of every stream to what was seen; yields which streams had one, until none has."""
    while True:
        brought = []
        for i, stream in enumerate(streams):
            still = next(stream, None)
            if still is not None:
                seen[i].append(still)
                brought.append(i)
        if empty := [i for i, stills in enumerate(seen, 1) if not stills]:
            raise ValueError(f"stream {empty[0]} of {len(seen)} ended before its first still: is it used up?")
        if not brought:
            return
        yield brought


def draw_live(
    streams: Sequence[Iterator[TrajectoryFrame]],
    seen: Sequence[list[TrajectoryFrame]],
    view: View,
    console: Console,
    pause: float,
) -> None:
    """The live view; however it ends, the cursor is back and the last picture is there."""
    drawn = -REFRESH
    try:
        with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
            for _ in advance(streams, seen):
                if time.monotonic() - drawn >= REFRESH:
                    drawn = time.monotonic()
                    view.stills, view.height = [stills[-1] for stills in seen], console.height - 1
                    live.update(view, refresh=True)
                time.sleep(pause)
    finally:
        if all(seen):
            last = [stills[-1] for stills in seen]
            console.print(View(last, view.titles, view.steps, view.show_guesses))


def print_some(
    streams: Sequence[Iterator[TrajectoryFrame]],
    seen: Sequence[list[TrajectoryFrame]],
    titles: Sequence[str],
    steps: Sequence[int | None],
    console: Console,
) -> None:
    """Each text when a quarter of it stands, when half does, and at its end; no guesses: only a style marks them."""

    def show(i: int) -> None:
        still = seen[i][-1]
        told = f"NFE {still.nfe}, {count_hidden(still)} of {len(still.cells)} hidden"
        line = f"{tame(titles[i])}: {say_step(still, steps[i])}, {told}"
        console.print(line, style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(draw_still(still, show_guesses=False), soft_wrap=True)

    due = [[0.75, 0.5] for _ in streams]  # shares of what was hidden at first
    for brought in advance(streams, seen):
        for i in brought:
            hidden, at_first = count_hidden(seen[i][-1]), count_hidden(seen[i][0])
            reached = [share for share in due[i] if 0 < hidden <= share * at_first]
            due[i] = [share for share in due[i] if share not in reached]
            if reached:
                show(i)
    for i in range(len(streams)):
        show(i)
