"""Writes trajectories as an animated GIF, laid out by the final text so that no word moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from adlm.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE, TokenState, Trajectory
from adlm.view import look
from adlm.view.terminal import count_hidden, escape_controls

MAX_FPS, HOLD_SECONDS = 20, 2.0  # HOLD_SECONDS: of the last frame
MARGIN, GUTTER, MIN_PANEL_WIDTH = 28, 36, 200  # pixels
SIZE, LINE_HEIGHT, TEXT_TOP = 18, 30, 96  # of the text; TEXT_TOP is below title, counts and bar
LEGEND = "gray: hidden   amber: guessed, the warmer the surer   green: just revealed   red: hidden again   blue: given"
PARTS = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)  # of a token: white space, text, white space
# Characters that Pillow's own font lacks.
ASCII = str.maketrans({"—": "--", "–": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "…": "..."})


def write_gif(
    trajectories: Sequence[Trajectory],
    path: Path,
    *,
    seconds: float = 6.0,
    width: int = 720,
    font: Path | None = None,
    show_guesses: bool = True,
) -> Path:
    """Write the trajectories, next to each other, as a looping GIF of so many seconds and pixels; return its path.

    Pillow's own font has the letters of English; give a `font` file for other scripts.
    """
    path, count = Path(path), len(trajectories)
    if not trajectories or not all(each.frames for each in trajectories):
        raise ValueError(f"{count} trajectories, not all with frames: give at least one, with at least one frame each")
    if any(len({len(frame.tokens) for frame in each.frames}) > 1 for each in trajectories):
        raise ValueError("the frames of a trajectory differ in their number of tokens: record one text each")
    if path.suffix.lower() != ".gif":
        raise ValueError(f"{path.name!r} does not end in .gif: call it {path.stem or 'sample'}.gif")
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}: expected more than 0")
    min_width = count * (MIN_PANEL_WIDTH + GUTTER) - GUTTER + 2 * MARGIN
    if width < min_width:
        raise ValueError(f"width {width} is too narrow for {count} panels: give at least {min_width} pixels")
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError(f"a GIF needs Pillow ({error}): pip install 'adlm[view]'") from error
    fonts = [ImageFont.truetype(str(font), size) if font else ImageFont.load_default(size) for size in (SIZE, 14)]
    panel_width = (width - 2 * MARGIN + GUTTER) // count - GUTTER
    panels = [
        GifPanel(each, MARGIN + i * (panel_width + GUTTER), panel_width, fonts, show_guesses)
        for i, each in enumerate(trajectories)
    ]
    height = TEXT_TOP + max(panel.rows for panel in panels) * LINE_HEIGHT + 20 + MARGIN
    picks, durations = plan_frames(max(len(each.frames) for each in trajectories), seconds)
    images = []
    for before, pick in pairwise([-1, *picks]):
        image = Image.new("RGB", (width, height), look.PAPER)
        draw = ImageDraw.Draw(image)
        for panel in panels:
            panel.draw(draw, before, pick, is_last=pick == picks[-1])
        draw.text((MARGIN, height - MARGIN), LEGEND, look.QUIET, fonts[1], anchor="ls")
        images.append(image)
    palette = Image.new("RGB", (width, 3 * height))
    for i, image in enumerate((images[0], images[len(images) // 2], images[-1])):
        palette.paste(image, (0, i * height))
    palette = palette.quantize(256)
    first, *rest = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    path.parent.mkdir(parents=True, exist_ok=True)
    first.save(path, "GIF", save_all=True, append_images=rest, duration=durations, loop=0, optimize=True)
    return path


def plan_frames(count: int, seconds: float) -> tuple[list[int], list[int]]:
    """Choose which of `count` frames are shown, the first and last among them, and for how many milliseconds."""
    shown = min(count, max(2, round(seconds * MAX_FPS)))
    picks = [round(i * (count - 1) / max(1, shown - 1)) for i in range(shown)]
    # A GIF counts in hundredths of a second: ends are rounded, not durations, so that the sum is right.
    ends = [round(100 * seconds * i / max(1, shown - 1)) for i in range(shown)]
    return picks, [*(10 * (end - start) for start, end in pairwise(ends)), round(1000 * HOLD_SECONDS)]


class TokenBox(NamedTuple):
    """The place of a token in its panel."""

    left: int
    row: int
    width: int


def lay_out_tokens(texts: Sequence[str], measure: Callable[[str], float], width: int) -> list[TokenBox]:
    """Break tokens into lines at spaces, and inside a word only where it is longer than a line."""
    parts = [PARTS.fullmatch(text).groups() for text in texts]  # type: ignore[union-attr]
    widths = [min(measure(clean_text(body)), width) for _, body, _ in parts]
    to_word_end = list(widths)  # the width from a token to the end of its word
    for i in reversed(range(len(parts) - 1)):
        if not parts[i][2] and not parts[i + 1][0]:
            to_word_end[i] += to_word_end[i + 1]
    boxes: list[TokenBox] = []
    left, row, space = 0.0, 0, measure(" ")

    def pass_white_space(text: str) -> None:
        nonlocal left, row
        left, row = (0.0, row + text.count("\n")) if "\n" in text else (left + space * len(text), row)

    for (lead, body, trail), token_width, word_width in zip(parts, widths, to_word_end):
        if not body:
            boxes.append(TokenBox(round(min(left, width - 4)), row, 4))
        pass_white_space(lead)
        if body:
            if left and left + (word_width if word_width <= width else token_width) > width:
                left, row = 0.0, row + 1
            boxes.append(TokenBox(round(left), row, round(left + token_width) - round(left)))
            left += token_width
        pass_white_space(trail)
    return boxes


def clean_text(text: str) -> str:
    """Return a token's text on one line, in characters that can be drawn."""
    return escape_controls(" ".join(text.split())).translate(ASCII)


class GifPanel:
    """Draws the frames of one trajectory into a column of the image."""

    def __init__(self, trajectory: Trajectory, left: int, width: int, fonts: Sequence[Any], show_guesses: bool) -> None:
        self.trajectory, self.left, self.width, self.show_guesses = trajectory, left, width, show_guesses
        self.font, self.small = fonts
        final = trajectory.frames[-1].tokens
        texts = [
            token.text if not token.is_masked else token.guesses[0][0] if token.guesses else " ---" for token in final
        ]
        self.boxes = lay_out_tokens(texts, self.font.getlength, width)
        self.rows = 1 + max((box.row for box in self.boxes), default=0)

    def draw(self, draw: Any, before: int, pick: int, *, is_last: bool) -> None:
        """Draw frame `pick`; changes since frame `before` are marked, except in the last image."""
        frames = self.trajectory.frames
        frame, last = frames[min(pick, len(frames) - 1)], frames[-1].step
        changed = () if is_last else frames[before + 1 : pick + 1]
        draw.text((self.left, 42), self.fit(self.trajectory.title, self.width), look.INK, self.font, anchor="ls")
        counts = f"step {frame.step} of {last}     NFE {frame.nfe}     {count_hidden(frame)} hidden"
        draw.text((self.left, 66), counts, look.QUIET, self.small, anchor="ls")
        draw.rectangle((self.left, 76, self.left + self.width - 1, 78), look.LINE)
        draw.rectangle((self.left, 76, self.left + self.width * frame.step // max(1, last), 78), look.ACCENT)
        for i, (token, box) in enumerate(zip(frame.tokens, self.boxes)):
            states, state = {each.tokens[i].state for each in changed}, token.state
            if token.is_masked:
                state = REMASKED if REMASKED in states else HIDDEN
            elif state != GIVEN:
                state = REVEALED if REVEALED in states else VISIBLE
            self.draw_token(draw, box, replace(token, state=state))

    def draw_token(self, draw: Any, box: TokenBox, token: TokenState) -> None:
        """Draw a token: a block with its likeliest guess, or its text."""
        left, top = self.left + box.left, TEXT_TOP + box.row * LINE_HEIGHT
        frame = (left, top, left + max(2, box.width - 1), top + 24)
        text, ink = token.text, look.GIVEN_INK if token.state == GIVEN else look.INK
        if token.is_masked:
            text, probability = token.guesses[0] if self.show_guesses and token.guesses else ("", 0.0)
            level = look.find_level(probability)
            block, ink = look.GUESS_BLOCKS[level] if text else look.BLOCK, look.GUESS_INKS[level]
            draw.rounded_rectangle(frame, 4, look.REMASKED_GROUND if token.state == REMASKED else block)
        elif token.state == REVEALED:
            draw.rounded_rectangle(frame, 4, look.REVEALED_GROUND)
        text = self.fit(text, box.width + 1)
        middle = left + (box.width - self.font.getlength(text)) / 2
        draw.text((round(middle), top + 18), text, ink, self.font, anchor="ls")
        if token.is_anchor and token.is_masked and text:
            draw.rectangle((left, top + 23, frame[2], top + 24), look.ANCHOR_MARK)

    def fit(self, text: str, width: float) -> str:
        """Cut a text to a width."""
        text = clean_text(text)
        while text and self.font.getlength(text) > width:
            text = text[:-1]
        return text
