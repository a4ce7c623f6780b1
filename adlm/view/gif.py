"""Writes trajectories as an animated GIF, laid out by the final text so that no word moves."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from adlm.errors import import_extra
from adlm.view import look
from adlm.view.console import escape_controls
from adlm.view.trajectory import GIVEN, REMASKED, REVEALED, Trajectory, TrajectoryFrame

MAX_FPS, HOLD_SECONDS = 20, 2.0  # hold: of the last frame
MARGIN, LINE_HEIGHT, TEXT_TOP = 28, 30, 88  # pixels; TEXT_TOP is below title and counts
SIZES = range(18, 11, -1)  # of fonts: the first in which a text fits into its box
# Characters that Pillow's own font lacks.
ASCII = str.maketrans({"—": "--", "–": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "…": "..."})
Box = tuple[int, int, int]  # of a token: its left edge, row and width


def write_gif(trajectories: Sequence[Trajectory], path: Path, *, seconds: float = 6.0) -> Path:
    """Write the trajectories, next to each other, as a looping GIF of so many seconds; return its path."""
    path, count = Path(path), len(trajectories)
    if not trajectories:
        raise ValueError("there are 0 trajectories: give at least one")
    if path.suffix.lower() != ".gif":
        raise ValueError(f"{path.name!r} does not end in .gif: call it {path.stem or 'sample'}.gif")
    import_extra("PIL", "a GIF needs Pillow", "view")
    from PIL import Image, ImageDraw, ImageFont

    fonts = [ImageFont.load_default(size) for size in SIZES]
    width = 720 if count == 1 else 540 * count
    panel_width = (width - MARGIN) // count - MARGIN
    panels = [
        GifPanel(
            each.title,
            each.frames,
            MARGIN + i * (panel_width + MARGIN),
            TEXT_TOP,
            panel_width,
            fonts,
        )
        for i, each in enumerate(trajectories)
    ]
    picks, durations = plan_frames(max(len(each.frames) for each in trajectories), seconds)
    size = width, max(panel.bottom for panel in panels) + MARGIN
    palette, images = Image.new("P", (1, 1)), []
    palette.putpalette(build_palette())
    for before, pick in zip([-1, *picks], picks):
        image = Image.new("RGB", size, look.PAPER)
        for panel in panels:
            panel.draw(ImageDraw.Draw(image), pick, before if pick != picks[-1] else pick)
        images.append(image.quantize(palette=palette, dither=Image.Dither.NONE))
    path.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(
        path,
        "GIF",
        save_all=True,
        append_images=images[1:],
        duration=durations,
        loop=0,
        optimize=True,
    )
    return path


def plan_frames(count: int, seconds: float) -> tuple[list[int], list[int]]:
    """Choose which of `count` frames are shown, the first and last among them, and for how many milliseconds."""
    shown = min(count, max(2, round(seconds * MAX_FPS)))
    picks = [round(i * (count - 1) / max(1, shown - 1)) for i in range(shown)]
    # A GIF counts in hundredths of a second: ends are rounded, not durations, so that the sum is right.
    ends = [round(100 * seconds * i / max(1, shown - 1)) for i in range(shown)]
    return picks, [
        *(10 * (end - start) for start, end in pairwise(ends)),
        round(1000 * HOLD_SECONDS),
    ]


def build_palette() -> bytes:
    """Return the colors of a GIF: grounds, marks, inks and the colors between an ink and its ground."""
    inks = (
        look.INK,
        look.QUIET,
        look.GIVEN_INK,
        look.ANCHOR_MARK,
        look.REVEALED_MARK,
        look.REMASKED_MARK,
        look.BLOCK,
    )
    pairs = [(look.PAPER, ink) for ink in inks] + list(zip(look.GUESS_BLOCKS, look.GUESS_INKS))
    pairs += [
        (look.REVEALED_GROUND, look.INK),
        *((look.REMASKED_GROUND, ink) for ink in look.GUESS_INKS),
    ]
    return b"".join(
        bytes.fromhex(look.mix_colors(*pair, i / 12)[1:]) for pair in pairs for i in range(13)
    )


def lay_out_tokens(
    texts: Sequence[str], widths: Sequence[float], space: float, width: int
) -> list[Box]:
    """Break tokens of these widths into lines at spaces, and inside a word only where it is longer than a line."""
    widths = [min(each, width) for each in widths]
    to_word_end = list(widths)  # the width from a token to the end of its word
    for i in reversed(range(len(texts) - 1)):
        if not re.search(r"\s$", texts[i]) and not re.match(r"\s", texts[i + 1]):
            to_word_end[i] += to_word_end[i + 1]
    boxes: list[Box] = []
    left, row = 0.0, 0
    for text, token_width, word_width in zip(texts, widths, to_word_end):
        if not text.strip():
            boxes.append((round(min(left, width - 4)), row, 4))
        for part in re.findall(r"\n|[^\S\n]+|\S.*\S|\S", text, re.DOTALL):
            if part == "\n":
                left, row = 0.0, row + 1
            elif part.isspace():
                left += space * len(part)
            else:
                if left and left + (word_width if word_width <= width else token_width) > width:
                    left, row = 0.0, row + 1
                boxes.append((round(left), row, round(left + token_width) - round(left)))
                left += token_width
    return boxes


def clean_text(text: str) -> str:
    """Return a token's text on one line, in characters that can be drawn."""
    return escape_controls(" ".join(text.split())).translate(ASCII)


class GifPanel:
    """Draws frames into a column of the image; every token has the same box in all of them."""

    def __init__(
        self,
        title: str,
        frames: Sequence[TrajectoryFrame],
        left: int,
        top: int,
        width: int,
        fonts: Sequence[Any],
    ) -> None:
        self.title, self.frames, self.left, self.fonts = title, frames, left, fonts
        texts = [
            (token.guesses or ((" ---", 0),))[0][0] if token.is_masked else token.text
            for token in frames[-1].tokens
        ]
        # Wide enough for the final text, and in the smallest font for every text that was visible there.
        widths = [fonts[0].getlength(clean_text(text)) for text in texts]
        for frame in frames:
            widths = list(
                map(
                    max,
                    widths,
                    (fonts[-1].getlength(clean_text(token.text)) for token in frame.tokens),
                )
            )
        boxes = lay_out_tokens(texts, widths, fonts[0].getlength(" "), width)
        self.places = [
            (left + x, top + row * LINE_HEIGHT, box_width) for x, row, box_width in boxes
        ]
        self.bottom = max((y for _, y, _ in self.places), default=top) + LINE_HEIGHT
        while fonts[0].getlength(clean_text(self.title)) > width:
            self.title = self.title[:-1]

    def draw(self, draw: Any, pick: int, before: int) -> None:
        """Draw the title, the counts and the tokens of frame `pick`, with marks at changes since frame `before`."""
        frame = self.frames[min(pick, len(self.frames) - 1)]
        counts = f"step {frame.step} of {self.frames[-1].step}     NFE {frame.nfe}     {frame.hidden} hidden"
        draw.text((self.left, 42), clean_text(self.title), look.INK, self.fonts[0], anchor="ls")
        draw.text((self.left, 66), counts, look.QUIET, self.fonts[4], anchor="ls")
        changes = self.frames[before + 1 : pick + 1]
        for i, (token, (left, top, width)) in enumerate(zip(frame.tokens, self.places)):
            states = {frame.tokens[i].state for frame in changes}
            right, ground, mark = left + max(2, width - 1), None, None
            text, ink = clean_text(token.text), look.GIVEN_INK if token.state == GIVEN else look.INK
            if token.is_masked:
                text, probability = token.guesses[0] if token.guesses else ("", 0.0)
                text, level = clean_text(text), look.find_level(probability)
                ground, ink = (
                    look.GUESS_BLOCKS[level] if text else look.BLOCK,
                    look.GUESS_INKS[level],
                )
                mark = look.ANCHOR_MARK if token.is_anchor and text else None
                if REMASKED in states:
                    ground, mark = look.REMASKED_GROUND, look.REMASKED_MARK
            elif REVEALED in states and token.state != GIVEN:
                ground, mark = look.REVEALED_GROUND, look.REVEALED_MARK
            if ground:
                draw.rounded_rectangle((left, top, right, top + 24), 4, ground)
            if font := next(
                (each for each in self.fonts if each.getlength(text) <= width + 1), None
            ):
                indent = (width - font.getlength(text)) / 2 if token.is_masked else 0
                draw.text((round(left + indent), top + 18), text, ink, font, anchor="ls")
            if mark:
                draw.rectangle((left, top + 23, right, top + 24), mark)
