"""Recordings as a picture that moves. The page is set from the final text, so that no word moves while it appears."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from adlm.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, TokenState, Trajectory, TrajectoryFrame
from adlm.view import colors
from adlm.view.terminal import count_hidden, tame

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

MOST_FRAMES_A_SECOND, HOLD, GLOW = 20, 2.0, 0.2  # HOLD: of the last frame; GLOW: seconds that a change stays marked
MARGIN, GUTTER, LEAST_WIDTH = 28, 36, 200  # pixels; LEAST_WIDTH of a panel
SHADES = 6  # of the edge of a letter, in the palette
LEAST_SQUEEZE = 0.55  # what would have to be narrower than this is cut
ATOMS = re.compile(r"\n|[^\S\n]+|\S+")
HATCH = colors.mix(colors.REMASKED_GROUND, colors.REMASKED_MARK, 0.45)
RULES = {"–": 0.5, "—": 1.0, "―": 1.0}  # dashes in ems: the default font has none, a line is one


@dataclass(frozen=True)
class Box:
    """The place of a token, or of a part of one, in its panel."""

    cell: int
    text: str  # that will stand there; nothing if it is a space
    left: int
    row: int
    width: int
    whole: str  # the whole token's text
    is_first: bool = True  # of its token's boxes


def write_gif(
    recordings: Sequence[Trajectory],
    path: Path,
    *,
    seconds: float = 6.0,
    width: int = 720,
    size: int = 18,
    font: Path | None = None,
    show_guesses: bool = True,
) -> Path:
    """Write the recordings side by side as a GIF that runs for `seconds`, rests and begins again; return where it is.

    `width` is the picture's, in pixels; `size` the letters'. The font is Pillow's own: it has the letters of English,
    and a small box stands for every other character. For other scripts give a `font` file that has them.
    A change stays marked for a moment, and the last frame is the plain text.
    """
    path = Path(path)
    check(recordings, path, seconds, width)
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError(f"a GIF needs Pillow ({error}): pip install 'adlm[view]'") from error
    longest = max(len(recording.stills) for recording in recordings)
    picks, durations = plan_frames(longest, seconds)
    painter = Painter(recordings, width, size, font, show_guesses)
    glow = max(1, round(GLOW * len(picks) / seconds))
    frames = list(painter.frames(picks, glow))
    content = io.BytesIO()
    # Optimized, a frame holds nothing but what is new in it.
    frames[0].save(
        content, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0, disposal=1, optimize=True
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.getvalue())
    return path


def check(recordings: Sequence[Trajectory], path: Path, seconds: float, width: int) -> None:
    """Refuse what cannot be drawn, and say why."""
    if not recordings:
        raise ValueError("there are no recordings: give at least one")
    for recording in recordings:
        if not recording.stills:
            raise ValueError(f"the recording {recording.title!r} has no stills: record at least one")
        if len({len(still.cells) for still in recording.stills}) > 1:
            raise ValueError(f"the stills of {recording.title!r} differ in their number of cells: record one text each")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file, such as {path / 'sample.gif'}")
    if path.suffix.lower() != ".gif":
        raise ValueError(f"{path.name!r} does not end in .gif: call it {path.stem or 'sample'}.gif")
    if not seconds > 0:
        raise ValueError(f"seconds {seconds} must be above 0: how long the text takes to appear")
    panels = "panel" if len(recordings) == 1 else "panels"
    least = len(recordings) * (LEAST_WIDTH + GUTTER) - GUTTER + 2 * MARGIN
    if width < least:
        raise ValueError(f"width {width} is too narrow for {len(recordings)} {panels}: give at least {least} pixels")


def plan_frames(count: int, seconds: float) -> tuple[list[int], list[int]]:
    """Which of `count` stills are shown, first and last among them, and for how many milliseconds each."""
    frames = min(count, max(2, round(seconds * MOST_FRAMES_A_SECOND)))
    picks = [round(i * (count - 1) / max(1, frames - 1)) for i in range(frames)]
    # A GIF counts in hundredths of a second: ends are rounded, not durations, so that the whole is as long as asked.
    ends = [round(100 * seconds * i / max(1, frames - 1)) for i in range(frames)]
    return picks, [*(10 * (end - start) for start, end in pairwise(ends)), round(1000 * HOLD)]


def final_texts(still: TrajectoryFrame) -> list[str]:
    """What stands at each position at the end; where a recording ends too early, something of usual width."""
    return [cell.text if not cell.is_masked else cell.guesses[0][0] if cell.guesses else " ---" for cell in still.cells]


def lay_out(texts: Sequence[str], measure: Callable[[str], float], width: int) -> list[Box]:
    """Break the tokens' text into lines as prose: at spaces, and inside a word only if it is longer than a line."""
    boxes: list[Box] = []
    word: list[tuple[int, str]] = []
    left, row = 0.0, 0

    def end_word() -> None:
        nonlocal left, row
        total = sum(measure(part) for _, part in word)
        parts = word if total <= width else [(cell, letter) for cell, part in word for letter in part]
        if left and left + total > width:
            left, row = 0.0, row + 1
        for cell, part in parts:
            wide = measure(part)
            if left and left + wide > width + 1e-6:  # sums are rounded
                left, row = 0.0, row + 1
            place = round(left), row, round(left + wide) - round(left)
            boxes.append(Box(cell, part, *place, texts[cell], is_first=not boxes or boxes[-1].cell != cell))
            left += wide
        word.clear()

    for cell, text in enumerate(texts):
        for atom in ATOMS.findall(text):
            if not atom.isspace():
                word.append((cell, tame(atom)))
                continue
            end_word()
            wide = measure(" ") * len(atom.expandtabs(4))
            if not text.strip() and left + wide <= width:  # else nobody would see that a space or line end is hidden
                boxes.append(Box(cell, "", round(left), row, max(4, round(wide)), text))
            left, row = (0.0, row + 1) if atom == "\n" else (left + wide, row)
    end_word()
    return boxes


class Painter:
    """Draws the frames of some recordings: what never changes once, then the tokens of each still."""

    def __init__(
        self, recordings: Sequence[Trajectory], width: int, size: int, font: Path | None, show_guesses: bool
    ) -> None:
        self.recordings, self.width, self.size, self.show_guesses = recordings, width, size, show_guesses
        self.font, self.small = load_font(font, size), load_font(font, round(0.78 * size))
        self.each = (width - 2 * MARGIN + GUTTER) // len(recordings) - GUTTER  # the width of a panel
        self.line = round(1.65 * size)
        self.top = MARGIN + round(3.6 * size)  # of the text
        texts = [final_texts(recording.stills[-1]) for recording in recordings]
        self.boxes = [lay_out(each, lambda text: length_of(text, self.font), self.each) for each in texts]
        rows = max((box.row + 1 for boxes in self.boxes for box in boxes), default=1)
        self.legend_top = self.top + rows * self.line + round(0.9 * size)
        self.legend = self.lay_out_legend()
        legend_rows = 1 + max((row for _, row, _, _ in self.legend), default=-1)
        height = self.legend_top + legend_rows * round(1.7 * size) + MARGIN - round(0.6 * size)
        self.ground = self.draw_ground(height)
        self.palette = make_palette()

    def frames(self, picks: Sequence[int], glow: int) -> Iterator[Image.Image]:
        """The picks as images of one palette; a change is marked for `glow` frames, in the last one no more."""
        from PIL import Image, ImageDraw

        changed_at = [[-1] * len(recording.stills[-1].cells) for recording in self.recordings]
        done = -1
        for number, pick in enumerate(picks):
            for recording, changed in zip(self.recordings, changed_at):
                for at, still in enumerate(recording.stills[done + 1 : pick + 1], done + 1):
                    for i, cell in enumerate(still.cells):
                        if cell.state in (REVEALED, REMASKED):
                            changed[i] = at
            done = pick
            since = pick if number == len(picks) - 1 else picks[number - glow] if number >= glow else -1
            image = self.ground.copy()
            draw = ImageDraw.Draw(image)
            for i, (recording, changed) in enumerate(zip(self.recordings, changed_at)):
                still = recording.stills[min(pick, len(recording.stills) - 1)]
                left = MARGIN + i * (self.each + GUTTER)
                self.draw_counts(draw, left, still, recording.stills[-1].step)
                for box in self.boxes[i]:
                    self.draw_box(draw, left, box, still.cells[box.cell], is_fresh=changed[box.cell] > since)
            yield image.quantize(palette=self.palette, dither=Image.Dither.NONE)

    def draw_ground(self, height: int) -> Image.Image:
        """Paper, titles and legend."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self.width, height), colors.PAPER)
        draw = ImageDraw.Draw(image)
        for i, recording in enumerate(self.recordings):
            left = MARGIN + i * (self.each + GUTTER)
            title = shorten(tame(" ".join(recording.title.split())), self.font, self.each)
            write(draw, left, MARGIN + round(0.8 * self.size), title, self.font, colors.INK)
        for left, row, cell, text in self.legend:
            base = self.legend_top + self.size + row * round(1.7 * self.size)
            if cell is None:
                write(draw, left, base, text, self.small, colors.QUIET)
                continue
            box = Box(0, text, 0, 0, round(length_of(text, self.font)), text)
            self.draw_box(draw, left, box, cell, is_fresh=cell.state in (REVEALED, REMASKED), base=base)
        return image

    def lay_out_legend(self) -> list[tuple[int, int, TokenState | None, str]]:
        """Left, row, a sample cell or none, and the text of every part of the legend."""
        placed: list[tuple[int, int, TokenState | None, str]] = []
        left, row = MARGIN, 0
        for cell, sample, text in explain(self.recordings, self.show_guesses):
            first = round(length_of(sample, self.font)) + round(0.4 * self.size)
            total = first + round(length_of(text, self.small))
            if left > MARGIN and left + total > self.width - MARGIN:
                left, row = MARGIN, row + 1
            placed += [(left, row, cell, sample), (left + first, row, None, text)]
            left += total + round(1.2 * self.size)
        return placed

    def draw_counts(self, draw: ImageDraw.ImageDraw, left: int, still: TrajectoryFrame, last: int) -> None:
        """Step, evaluations, what is hidden, each at its own place so that growing numbers push nothing; and a bar."""
        base, right = MARGIN + round(2.1 * self.size), left + self.each
        texts = (f"step {still.step} of {last}", f"NFE {still.nfe}", f"{count_hidden(still)} hidden")
        for i, text in enumerate(texts):
            start = left + i / 2 * (self.each - length_of(text, self.small))
            write(draw, round(start), base, text, self.small, colors.QUIET)
        bar = base + round(0.5 * self.size)
        draw.rectangle((left, bar, right - 1, bar + 2), colors.LINE)
        done = round(self.each * min(1.0, still.step / max(1, last)))
        if done:
            draw.rectangle((left, bar, left + done - 1, bar + 2), colors.ACCENT)

    def draw_box(
        self,
        draw: ImageDraw.ImageDraw,
        left: int,
        box: Box,
        cell: TokenState,
        *,
        is_fresh: bool,
        base: int | None = None,
    ) -> None:
        """A token at its place: a block with its guess, or its text."""
        start, size = left + box.left, self.size
        base = self.top + box.row * self.line + size if base is None else base
        frame = (start, base - size, start + max(2, box.width) - 1, base + round(0.34 * size))
        radius = round(0.2 * size)
        if cell.is_masked:
            guess, probability = cell.guesses[0] if self.show_guesses and cell.guesses else ("", 0.0)
            level = colors.sureness(probability)
            inset = (frame[0] + 1, frame[1], max(frame[0] + 1, frame[2] - 1), frame[3])
            if is_fresh:
                hatch(draw, inset, colors.REMASKED_GROUND, HATCH)
            else:
                draw.rounded_rectangle(inset, radius, colors.GUESS_BLOCKS[level] if guess else colors.BLOCK)
            if guess and cell.is_anchor:
                draw.rectangle((inset[0], inset[3] - 1, inset[2], inset[3]), colors.ANCHOR_MARK)
            write_inside(draw, start, base, text_in(box, guess), box.width, self.font, colors.GUESS_INKS[level])
            return
        ink, text = colors.GIVEN_INK if cell.state == GIVEN else colors.INK, text_in(box, cell.text)
        if text and is_fresh and cell.state != GIVEN:
            draw.rounded_rectangle(frame, radius, colors.REVEALED_GROUND)
            draw.rectangle((start, frame[3] - 1, frame[2], frame[3]), colors.REVEALED_MARK)
        for x in range(start, start + box.width - 1, 4) if text and cell.state == GIVEN else ():
            draw.rectangle((x, base + 4, x + 1, base + 4), ink)
        write_inside(draw, start, base, text, box.width, self.font, ink)


def text_in(box: Box, text: str) -> str:
    """What of a token's text, which need not be the final one, is written in a box."""
    if not box.text or text == box.whole:
        return box.text
    return tame(" ".join(text.split())) if box.is_first else ""


def explain(recordings: Sequence[Trajectory], show_guesses: bool) -> list[tuple[TokenState, str, str]]:
    """A sample, its text and what it means, for every look that occurs."""
    cells = [cell for recording in recordings for still in recording.stills for cell in still.cells]
    states = {cell.state for cell in cells}
    has_guesses = show_guesses and any(cell.guesses for cell in cells if cell.is_masked)
    has_anchors = has_guesses and any(cell.is_anchor for cell in cells if cell.is_masked)
    entries = [
        (HIDDEN in states, TokenState("", HIDDEN), "text", "hidden"),
        (has_guesses, TokenState("", HIDDEN, (("guess", 0.6),)), "guess", "the warmer, the surer"),
        (has_anchors, TokenState("", HIDDEN, (("anchor", 0.6),), is_anchor=True), "anchor", "a rare word, guessed"),
        (REVEALED in states, TokenState("new", REVEALED), "new", "just revealed"),
        (REMASKED in states, TokenState("", REMASKED), "text", "hidden again"),
        (GIVEN in states, TokenState("text", GIVEN), "text", "given"),
    ]
    return [(cell, sample, meaning) for occurs, cell, sample, meaning in entries if occurs]


@lru_cache(maxsize=8)
def load_font(font: Path | None, size: int) -> ImageFont.FreeTypeFont:
    """The font of this file, or Pillow's own."""
    from PIL import ImageFont

    if font is None:
        own = ImageFont.load_default(size)
        assert isinstance(own, ImageFont.FreeTypeFont)
        return own
    try:
        return ImageFont.truetype(str(font), size)
    except OSError as error:
        raise ValueError(f"{font} cannot be read as a font ({error}): give a .ttf or .otf file") from error


@lru_cache(maxsize=1 << 14)
def length_of(text: str, font: ImageFont.FreeTypeFont) -> float:
    """Pixels that a text takes."""
    rules = sum(font.size * RULES[letter] for letter in text if letter in RULES)
    return rules + sum(font.getlength(part) for part in split_rules(text) if part not in RULES)


def split_rules(text: str) -> list[str]:
    return [part for part in re.split(f"([{''.join(RULES)}])", text) if part]


def write(
    draw: ImageDraw.ImageDraw, left: float, base: float, text: str, font: ImageFont.FreeTypeFont, ink: str | int
) -> None:
    """Write on a base line."""
    for part in split_rules(text):
        wide = length_of(part, font)
        if part in RULES:
            middle = round(base - 0.27 * font.size)
            draw.rectangle((round(left), middle, round(left + wide) - 2, middle), ink)
        else:
            draw.text((left, base), part, ink, font, anchor="ls")
        left += wide


def write_inside(
    draw: ImageDraw.ImageDraw, left: int, base: int, text: str, width: int, font: ImageFont.FreeTypeFont, ink: str
) -> None:
    """Write in the middle of a place; what is wider is squeezed, and cut if that is not enough."""
    natural = length_of(text, font)
    if natural <= width + 1:
        write(draw, left + max(0, int(width - natural)) // 2, base, text, font, ink)
        return
    text = cut(text, font, width / LEAST_SQUEEZE)
    if text:
        mask = squeezed(text, font, min(width, round(length_of(text, font))))
        draw.bitmap((left + (width - mask.width) // 2, base - round(font.size)), mask, ink)


def cut(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """As much of a text as is no wider than this."""
    while text and length_of(text, font) > width:
        text = text[:-1]
    return text


def shorten(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """A text that fits, with an ellipsis where something is left out."""
    return text if length_of(text, font) <= width else cut(text, font, width - length_of("…", font)) + "…"


@lru_cache(maxsize=1 << 12)
def squeezed(text: str, font: ImageFont.FreeTypeFont, width: int) -> Image.Image:
    """The letters as a mask of this width."""
    from PIL import Image, ImageDraw

    mask = Image.new("L", (round(length_of(text, font)) + 1, round(1.4 * font.size)))
    write(ImageDraw.Draw(mask), 0, font.size, text, font, 255)
    return mask.resize((width, mask.height), Image.Resampling.BILINEAR)


def hatch(draw: ImageDraw.ImageDraw, frame: tuple[int, int, int, int], ground: str, mark: str) -> None:
    """Fill with slanted lines."""
    left, top, right, bottom = frame
    draw.rectangle(frame, ground)
    for start in range(left - (bottom - top), right + 1, 5):
        first, last = max(start, left), min(start + bottom - top, right)
        if first <= last:
            draw.line((first, bottom - (first - start), last, bottom - (last - start)), mark)


def make_palette() -> Image.Image:
    """Every ink on every ground that it is written on, with the shades between them."""
    from PIL import Image

    pairs = [(colors.PAPER, ink) for ink in (colors.INK, colors.QUIET, colors.GIVEN_INK)]
    pairs += zip(colors.GUESS_BLOCKS, colors.GUESS_INKS)
    pairs += [(colors.REVEALED_GROUND, colors.INK), (colors.REMASKED_GROUND, colors.GUESS_INKS[1])]
    flat = [colors.LINE, colors.ACCENT, colors.BLOCK, colors.REVEALED_MARK, colors.ANCHOR_MARK, HATCH]
    shades = [colors.mix(ground, ink, i / SHADES) for ground, ink in pairs for i in range(SHADES + 1)]
    palette = Image.new("P", (1, 1))
    palette.putpalette(b"".join(bytes.fromhex(color[1:]) for color in dict.fromkeys([*flat, *shades])))
    return palette
