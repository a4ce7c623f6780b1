"""Writes trajectories as an animated GIF, laid out by the final text so that no word moves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from adlm.view import look
from adlm.view.player import check_trajectories
from adlm.view.terminal import count_hidden, escape_controls
from adlm.view.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE, TokenState, Trajectory

MAX_FPS, HOLD_SECONDS, MARK_SECONDS = 20, 2.0, 0.2  # hold: of the last frame; mark: of a change
MARGIN, GUTTER, MIN_PANEL_WIDTH = 28, 36, 200  # pixels
SIZES, LINE_HEIGHT, TEXT_TOP = range(18, 11, -1), 30, 96  # TEXT_TOP is below title, counts and bar
LEGEND = (
    (TokenState("", HIDDEN), "hidden"),
    (TokenState("", HIDDEN, (("guess", 0.6),)), "the warmer, the surer"),
    (TokenState("", HIDDEN, (("anchor", 0.6),), is_anchor=True), "rare, guessed"),
    (TokenState("new", REVEALED), "just revealed"),
    (TokenState("", REMASKED), "hidden again"),
    (TokenState("text", GIVEN), "given"),
)
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
    check_trajectories(trajectories)
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
    fonts = [ImageFont.truetype(str(font), size) if font else ImageFont.load_default(size) for size in SIZES]
    panel_width = (width - 2 * MARGIN + GUTTER) // count - GUTTER
    panels = [
        GifPanel(each, MARGIN + i * (panel_width + GUTTER), panel_width, fonts, show_guesses)
        for i, each in enumerate(trajectories)
    ]
    legend_top = TEXT_TOP + max(panel.rows for panel in panels) * LINE_HEIGHT + 12
    height = draw_legend(ImageDraw.Draw(Image.new("RGB", (1, 1))), legend_top, width, fonts) + MARGIN
    picks, durations = plan_frames(max(len(each.frames) for each in trajectories), seconds)
    marked = max(1, round(MARK_SECONDS * len(picks) / seconds))  # images that a change is marked in
    images = []
    for before, pick in zip([*[-1] * marked, *picks], picks):
        image = Image.new("RGB", (width, height), look.PAPER)
        draw = ImageDraw.Draw(image)
        for panel in panels:
            panel.draw(draw, before, pick, is_last=pick == picks[-1])
        draw_legend(draw, legend_top, width, fonts)
        images.append(image)
    palette = Image.new("P", (1, 1))
    palette.putpalette(build_palette())
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


def build_palette() -> bytes:
    """Return the colors of a GIF: grounds, marks, inks and the colors between an ink and its ground."""
    marks = (look.ANCHOR_MARK, look.REVEALED_MARK, look.REMASKED_MARK, look.LINE, look.BLOCK)
    pairs = [(look.PAPER, ink) for ink in (look.INK, look.QUIET, look.ACCENT, look.GIVEN_INK, *marks)]
    pairs += [(look.REVEALED_GROUND, look.INK), *((look.REMASKED_GROUND, ink) for ink in look.GUESS_INKS)]
    pairs += zip(look.GUESS_BLOCKS, look.GUESS_INKS)
    return b"".join(bytes.fromhex(look.mix_colors(*pair, i / 12)[1:]) for pair in pairs for i in range(13))


class TokenBox(NamedTuple):
    """The place of a token in its panel."""

    left: int
    row: int
    width: int


def lay_out_tokens(texts: Sequence[str], widths: Sequence[float], space: float, width: int) -> list[TokenBox]:
    """Break tokens of these widths into lines at spaces, and inside a word only where it is longer than a line."""
    parts = [PARTS.fullmatch(text).groups() for text in texts]  # type: ignore[union-attr]
    widths = [min(each, width) for each in widths]
    to_word_end = list(widths)  # the width from a token to the end of its word
    for i in reversed(range(len(parts) - 1)):
        if not parts[i][2] and not parts[i + 1][0]:
            to_word_end[i] += to_word_end[i + 1]
    boxes: list[TokenBox] = []
    left, row = 0.0, 0

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


def draw_token(draw: Any, box: tuple[float, float, float], token: TokenState, fonts: Sequence[Any]) -> None:
    """Draw a token at (left, top, width): a block with its likeliest guess if that fits, or its text."""
    left, top, width = box
    right, mark = left + max(2, width - 1), None
    text, ink = clean_text(token.text), look.GIVEN_INK if token.state == GIVEN else look.INK
    if token.is_masked:
        text, probability = token.guesses[0] if token.guesses else ("", 0.0)
        text, level = clean_text(text), look.find_level(probability)
        ground, ink = look.GUESS_BLOCKS[level] if text else look.BLOCK, look.GUESS_INKS[level]
        mark = look.ANCHOR_MARK if token.is_anchor and text else None
        if token.state == REMASKED:
            ground, mark = look.REMASKED_GROUND, look.REMASKED_MARK
        draw.rounded_rectangle((left, top, right, top + 24), 4, ground)
    elif token.state == REVEALED:
        draw.rounded_rectangle((left, top, right, top + 24), 4, look.REVEALED_GROUND)
        mark = look.REVEALED_MARK
    if font := next((each for each in fonts if each.getlength(text) <= width + 1), None):
        indent = (width - font.getlength(text)) / 2 if token.is_masked else 0
        draw.text((round(left + indent), top + 18), text, ink, font, anchor="ls")
    if mark:
        draw.rectangle((left, top + 23, right, top + 24), mark)


def draw_legend(draw: Any, top: int, width: int, fonts: Sequence[Any]) -> int:
    """Draw an example of every look with its name, and return where the legend ends."""
    left, (font, small) = MARGIN, (fonts[0], fonts[4])
    for token, name in LEGEND:
        room = round(font.getlength(token.text or (token.guesses[0][0] if token.guesses else "---"))) + 2
        entry_width = room + 6 + round(small.getlength(name))
        if left + entry_width > width - MARGIN:
            left, top = MARGIN, top + LINE_HEIGHT
        draw_token(draw, (left, top, room), token, fonts)
        draw.text((left + room + 6, top + 18), name, look.QUIET, small, anchor="ls")
        left += entry_width + 20
    return top + LINE_HEIGHT


class GifPanel:
    """Draws the frames of one trajectory into a column of the image."""

    def __init__(self, trajectory: Trajectory, left: int, width: int, fonts: Sequence[Any], show_guesses: bool) -> None:
        self.trajectory, self.left, self.width = trajectory, left, width
        self.fonts, self.show_guesses = fonts, show_guesses
        final = trajectory.frames[-1].tokens
        texts = [(token.guesses or ((" ---", 0),))[0][0] if token.is_masked else token.text for token in final]
        # Wide enough for the final text, and in the smallest font for every text that was visible there.
        widths = [fonts[0].getlength(clean_text(text)) for text in texts]
        for frame in trajectory.frames:
            visible = [fonts[-1].getlength(clean_text(token.text)) for token in frame.tokens]
            widths = list(map(max, widths, visible))
        self.boxes = lay_out_tokens(texts, widths, fonts[0].getlength(" "), width)
        self.rows = 1 + max((box.row for box in self.boxes), default=0)

    def draw(self, draw: Any, before: int, pick: int, *, is_last: bool) -> None:
        """Draw frame `pick`; changes since frame `before` are marked, except in the last image."""
        frames = self.trajectory.frames
        frame, last = frames[min(pick, len(frames) - 1)], frames[-1].step
        changed = () if is_last else frames[before + 1 : pick + 1]
        title = clean_text(self.trajectory.title)
        while self.fonts[0].getlength(title) > self.width:
            title = title[:-1]
        draw.text((self.left, 42), title, look.INK, self.fonts[0], anchor="ls")
        counts = f"step {frame.step} of {last}     NFE {frame.nfe}     {count_hidden(frame)} hidden"
        draw.text((self.left, 66), counts, look.QUIET, self.fonts[4], anchor="ls")
        draw.rectangle((self.left, 76, self.left + self.width - 1, 78), look.LINE)
        draw.rectangle((self.left, 76, self.left + self.width * frame.step // max(1, last), 78), look.ACCENT)
        for i, (token, box) in enumerate(zip(frame.tokens, self.boxes)):
            states, state = {each.tokens[i].state for each in changed}, token.state
            if token.is_masked:
                state = REMASKED if REMASKED in states else HIDDEN
            elif state != GIVEN:
                state = REVEALED if REVEALED in states else VISIBLE
            shown = replace(token, state=state, guesses=token.guesses if self.show_guesses else ())
            place = (self.left + box.left, TEXT_TOP + box.row * LINE_HEIGHT, box.width)
            draw_token(draw, place, shown, self.fonts)
