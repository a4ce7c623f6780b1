"""The GIF: as many frames and seconds as asked, words that stay where they are, nothing told before its time."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adlm.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE, TokenState, Trajectory, TrajectoryFrame
from adlm.view import colors
from adlm.view.gif import GLOW, HOLD, MARGIN, Painter, lay_out, length_of, load_font, plan_frames, write_gif
from adlm.view.player import asset
from tests.view.test_terminal import PARAGRAPH, record

if TYPE_CHECKING:
    from PIL import Image

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("PIL") is None and not os.environ.get("ADLM_ALL"),
    reason="Pillow is not installed: pip install 'adlm[view]'",
)


def frames_of(path: Path) -> tuple[list["Image.Image"], list[int], int | None]:
    """Every frame as it is seen, for how long in milliseconds, and how often it loops (0: for ever)."""
    from PIL import Image, ImageSequence

    with Image.open(path) as image:
        frames = [(frame.convert("RGB"), frame.info.get("duration", 0)) for frame in ImageSequence.Iterator(image)]
        return [frame for frame, _ in frames], [duration for _, duration in frames], image.info.get("loop")


def of(*states: list[TokenState]) -> Trajectory:
    """A recording of some lists of cells."""
    stills = tuple(TrajectoryFrame(step, step, tuple(cells)) for step, cells in enumerate(states))
    return Trajectory("made", stills[-1].text, stills)


@pytest.mark.parametrize(("steps", "seconds", "count"), [(9, 2.0, 10), (63, 1.5, 30), (1, 1.0, 2)])
def test_frames_seconds_and_loop_are_as_asked(tmp_path: Path, steps: int, seconds: float, count: int) -> None:
    path = write_gif([record(steps=steps)], tmp_path / "new" / "folder" / "a.gif", seconds=seconds, width=500)
    frames, durations, loop = frames_of(path)
    assert path == tmp_path / "new" / "folder" / "a.gif"
    assert len(frames) == count and {frame.width for frame in frames} == {500}
    assert sum(durations) == 1000 * (seconds + HOLD) and durations[-1] == 1000 * HOLD
    assert loop == 0
    assert frames[0].tobytes() != frames[-1].tobytes()


@given(st.integers(2, 2000), st.floats(0.3, 60))
def test_a_plan_shows_first_and_last_in_order_and_not_too_fast(count: int, seconds: float) -> None:
    picks, durations = plan_frames(count, seconds)
    assert picks[0] == 0 and picks[-1] == count - 1 and picks == sorted(set(picks))
    assert len(durations) == len(picks) and all(duration % 10 == 0 and duration >= 40 for duration in durations)
    assert abs(sum(durations) - 1000 * (seconds + HOLD)) <= 5


def test_two_panels_share_the_width(tmp_path: Path) -> None:
    one, two = record(steps=4), record(steps=2, seed=1, title="quick")
    single, _, _ = frames_of(write_gif([one], tmp_path / "one.gif", seconds=1))
    double, _, _ = frames_of(write_gif([one, two], tmp_path / "two.gif", seconds=1))
    assert single[0].width == double[0].width == 720 and double[0].height > 1.2 * single[0].height
    assert len(double) == 5  # as long as the longer
    # The short one has ended: its half stands still while the other goes on.
    right = [frame.crop((370, 0, 720, 300)).tobytes() for frame in double]
    left = [frame.crop((0, 0, 350, 300)).tobytes() for frame in double]
    assert len(set(right[-2:])) == 1 and len(set(left)) == 5


def place(painter: Painter, cell: int) -> tuple[int, int, int, int]:
    """Where in the picture a token stands, a little inside: letters of a neighbour may lean over."""
    box = next(box for box in painter.boxes[0] if box.cell == cell)
    top = painter.top + box.row * painter.line
    return MARGIN + box.left + 2, top, MARGIN + box.left + box.width - 2, top + painter.size + 3


def test_words_do_not_move(tmp_path: Path) -> None:
    recording = record(steps=12)
    seconds = GLOW * 12  # so that a change is marked in one frame
    frames, _, _ = frames_of(write_gif([recording], tmp_path / "a.gif", seconds=seconds))
    painter = Painter([recording], 720, 18, None, True)
    compared = 0
    for frame, still in zip(frames, recording.stills, strict=True):
        for i, cell in enumerate(still.cells):
            if cell.state in (GIVEN, VISIBLE) and len(cell.text.strip()) > 2:
                where = place(painter, i)
                assert frame.crop(where).tobytes() == frames[-1].crop(where).tobytes(), (still.step, cell)
                compared += 1
    assert compared > 300


def test_a_block_does_not_tell_what_is_below(tmp_path: Path) -> None:
    recording = record(steps=6, remask=0)
    frames, _, _ = frames_of(write_gif([recording], tmp_path / "a.gif", show_guesses=False))
    painter = Painter([recording], 720, 18, None, False)
    expected = {tuple(bytes.fromhex(color[1:])) for color in (colors.BLOCK, colors.PAPER)}  # corners are round
    for i, cell in enumerate(recording.stills[0].cells):
        if cell.state == HIDDEN and len(recording.stills[-1].cells[i].text.strip()) > 2:
            assert {color for _, color in frames[0].crop(place(painter, i)).getcolors() or []} <= expected


def test_a_picture_has_the_colors_of_the_page() -> None:
    """Or the same amber would mean "sure" here and "anchor" there."""
    light = asset("player.css").partition("@media")[0]
    page = dict(re.findall(r"--([\w-]+): (#\w{6});", light))
    same = {
        "paper": colors.PAPER,
        "ink": colors.INK,
        "quiet": colors.QUIET,
        "line": colors.LINE,
        "accent": colors.ACCENT,
        "block": colors.BLOCK,
        "sure": colors.SURE_BLOCK,
        "anchor-mark": colors.ANCHOR_MARK,
        "revealed": colors.REVEALED_GROUND,
        "revealed-mark": colors.REVEALED_MARK,
        "remasked": colors.REMASKED_GROUND,
        "remasked-mark": colors.REMASKED_MARK,
        "given": colors.GIVEN_INK,
    }
    assert {name: page[name] for name in same} == same


def test_every_look_differs(tmp_path: Path) -> None:
    guesses = ((" word", 0.9),)
    looks = {
        "hidden": TokenState("", HIDDEN),
        "guess": TokenState("", HIDDEN, guesses),
        "unsure": TokenState("", HIDDEN, ((" word", 0.1),)),
        "anchor": TokenState("", HIDDEN, guesses, is_anchor=True),
        "remasked": TokenState("", REMASKED, guesses),
        "revealed": TokenState(" word", REVEALED),
        "visible": TokenState(" word", VISIBLE),
        "given": TokenState(" word", GIVEN),
        "another": TokenState(" sword", VISIBLE),
    }
    final = [TokenState(" word", GIVEN if name == "given" else VISIBLE) for name in looks]
    recording = of(list(looks.values()), final)
    frames, _, _ = frames_of(write_gif([recording], tmp_path / "a.gif"))
    painter = Painter([recording], 720, 18, None, True)
    places = [place(painter, i) for i in range(len(looks))]
    cut = [frames[0].crop((*where[:3], where[3] + 4)) for where in places]  # with the line below an anchor
    seen = {name: image.tobytes() for name, image in zip(looks, cut, strict=True)}
    widths = {box.width for box in painter.boxes[0]}
    assert len(widths) <= 2  # rounding
    least = min(map(len, seen.values()))
    assert len({look[:least] for look in seen.values()}) == len(looks)


@given(st.lists(st.text(st.sampled_from("ab c\nd"), max_size=9), max_size=30), st.integers(3, 20))
def test_prose_is_set_whole_and_inside_its_width(texts: list[str], width: int) -> None:
    boxes = lay_out(texts, len, width)
    text = "".join(texts)
    assert "".join(box.text for box in boxes) == "".join(text.split())
    assert all(box.left >= 0 for box in boxes)
    assert all(box.left + box.width <= width for box in boxes if box.text)
    places = [(box.row, box.left) for box in boxes]
    assert places == sorted(places)
    # A word that fits in a line is never torn.
    at = [box.row for box in boxes for _ in box.text]
    for word in text.split():
        mine, at = at[: len(word)], at[len(word) :]
        assert len(word) > width or len(set(mine)) == 1


def test_what_the_font_lacks_is_a_box_and_a_dash_is_a_line(tmp_path: Path) -> None:
    font = load_font(None, 18)
    assert font.getmask("中").getbbox() is not None
    assert bytes(font.getmask("中")) == bytes(font.getmask("\uffff")) != bytes(font.getmask("a"))
    assert length_of("—", font) == 18 and length_of("a—b", font) == length_of("a", font) + 18 + length_of("b", font)
    recording = of([TokenState("", HIDDEN)] * 2, [TokenState("中", VISIBLE), TokenState(" —", VISIBLE)])
    frames, _, _ = frames_of(write_gif([recording], tmp_path / "a.gif"))
    painter, ink = Painter([recording], 720, 18, None, True), tuple(bytes.fromhex(colors.INK[1:]))
    for i in range(2):
        assert ink in {color for _, color in frames[-1].crop(place(painter, i)).getcolors() or []}


def test_odd_recordings_are_drawn(tmp_path: Path) -> None:
    nasty = [
        TokenState("\x1b[31m\r\x00", VISIBLE),
        TokenState("", VISIBLE),
        TokenState("\n\n", VISIBLE),
        TokenState("\ud800\u202e", GIVEN),
    ]
    hidden = [
        TokenState("", HIDDEN, (("\n\x1b", 0.3),)),
        TokenState("", REMASKED),
        TokenState("", HIDDEN, ((" of\nthe", 1.0),)),
    ]
    last = TokenState("x" * 300, VISIBLE)
    for number, recording in enumerate(
        [
            of([*hidden, TokenState("", HIDDEN)], nasty),
            of([*hidden, last]),  # one still, which has not ended
            of([]),
            of([TokenState("", HIDDEN)], [last]),
        ]
    ):
        frames, durations, _ = frames_of(write_gif([recording], tmp_path / f"{number}.gif"))
        assert len(frames) == len(recording.stills) and durations[-1] in (0, 1000 * HOLD)
    long = Trajectory(
        "a title that is far longer than the picture is wide " * 5, "x", of([TokenState("x", VISIBLE)]).stills
    )
    assert write_gif([long], tmp_path / "title.gif", width=300).is_file()


@pytest.mark.slow
def test_an_ordinary_recording_is_a_small_file(tmp_path: Path) -> None:
    recording = record(steps=127)
    path = write_gif([recording], tmp_path / "a.gif")
    assert len(frames_of(path)[0]) == 120 and path.stat().st_size < 3e6
    assert recording.text == PARAGRAPH


def test_errors_name_the_value_and_the_remedy(tmp_path: Path) -> None:
    recording = record(steps=2)
    out = tmp_path / "a.gif"
    with pytest.raises(ValueError, match="no recordings: give at least one"):
        write_gif([], out)
    with pytest.raises(ValueError, match="'empty' has no stills"):
        write_gif([Trajectory("empty", "", ())], out)
    with pytest.raises(ValueError, match="'made' differ in their number of cells"):
        write_gif([of([], [TokenState("x", VISIBLE)])], out)
    with pytest.raises(ValueError, match=r"'a\.png' does not end in \.gif: call it a\.gif"):
        write_gif([recording], tmp_path / "a.png")
    with pytest.raises(ValueError, match="is a folder"):
        write_gif([recording], tmp_path)
    with pytest.raises(ValueError, match=r"seconds 0\.0 must be above 0"):
        write_gif([recording], out, seconds=0.0)
    with pytest.raises(ValueError, match="width 400 is too narrow for 2 panels: give at least 492"):
        write_gif([recording] * 2, out, width=400)
    (tmp_path / "no.ttf").write_text("no font")
    with pytest.raises(ValueError, match=r"no\.ttf cannot be read as a font"):
        write_gif([recording], out, font=tmp_path / "no.ttf")
    assert not out.exists()


def test_missing_pillow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'adlm\[view\]'"):
        write_gif([record(steps=1)], tmp_path / "a.gif")
