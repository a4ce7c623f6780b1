"""The GIF: number of frames, duration and loop; words stay in place; hidden tokens do not show their text."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adlm.view import gif, look
from adlm.view.gif import HOLD_SECONDS, clean_text, lay_out_tokens, plan_frames, write_gif
from adlm.view.player import read_asset
from adlm.view.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE, TokenState, Trajectory
from tests.view.trajectories import PARAGRAPH, make_trajectory, simulate

if TYPE_CHECKING:
    from PIL import Image

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("PIL") is None and not os.environ.get("ADLM_ALL"),
    reason="Pillow is not installed: the extra view",
)


def read_frames(path: Path) -> tuple[list["Image.Image"], list[int], int | None]:
    """Every frame as it is seen, its milliseconds, and the number of loops (0: endless)."""
    from PIL import Image, ImageSequence

    with Image.open(path) as image:
        frames = [
            (frame.convert("RGB"), frame.info.get("duration", 0))
            for frame in ImageSequence.Iterator(image)
        ]
        return (
            [frame for frame, _ in frames],
            [duration for _, duration in frames],
            image.info.get("loop"),
        )


def find_places(trajectory: Trajectory) -> list[tuple[int, int, int, int]]:
    """The rectangles of the tokens in the image, a little inside: letters of a neighbor may lean over."""
    from PIL import ImageFont

    fonts = [ImageFont.load_default(size) for size in gif.SIZES]
    panel = gif.GifPanel(
        "", trajectory.frames, gif.MARGIN, gif.TEXT_TOP, 720 - 2 * gif.MARGIN, fonts
    )
    return [
        (left + 2, top, left + max(3, width - 2), top + 25) for left, top, width in panel.places
    ]


@pytest.mark.parametrize(("steps", "seconds", "count"), [(9, 2.0, 10), (63, 1.5, 30), (1, 1.0, 2)])
def test_frames_seconds_and_loop(tmp_path: Path, steps: int, seconds: float, count: int) -> None:
    path = write_gif(
        [simulate(steps=steps)], tmp_path / "new" / "folder" / "a.gif", seconds=seconds
    )
    frames, durations, loop = read_frames(path)
    assert path == tmp_path / "new" / "folder" / "a.gif"
    assert len(frames) == count and {frame.width for frame in frames} == {720}
    assert (
        sum(durations) == 1000 * (seconds + HOLD_SECONDS) and durations[-1] == 1000 * HOLD_SECONDS
    )
    assert loop == 0
    assert frames[0].tobytes() != frames[-1].tobytes()


@given(st.integers(2, 2000), st.floats(0.3, 60))
def test_first_and_last_frame_are_shown_and_none_too_briefly(count: int, seconds: float) -> None:
    picks, durations = plan_frames(count, seconds)
    assert picks[0] == 0 and picks[-1] == count - 1 and picks == sorted(set(picks))
    assert len(durations) == len(picks) and all(
        duration % 10 == 0 and duration >= 40 for duration in durations
    )
    assert abs(sum(durations) - 1000 * (seconds + HOLD_SECONDS)) <= 5


def test_two_panels(tmp_path: Path) -> None:
    trajectories = [simulate(steps=4), simulate(steps=2, seed=1, title="quick")]
    frames, _, _ = read_frames(write_gif(trajectories, tmp_path / "two.gif", seconds=1))
    assert frames[0].width == 1080 and len(frames) == 5  # as many as the longer has
    # The short one has ended: its half stays the same while the other changes.
    right = [frame.crop((550, 0, 1080, 300)).tobytes() for frame in frames]
    left = [frame.crop((0, 0, 530, 300)).tobytes() for frame in frames]
    assert len(set(right[-2:])) == 1 and len(set(left)) == 5


def test_words_do_not_move(tmp_path: Path) -> None:
    trajectory = simulate(steps=12)
    frames, _, _ = read_frames(write_gif([trajectory], tmp_path / "a.gif"))
    places, compared = find_places(trajectory), 0
    for image, frame in zip(frames, trajectory.frames, strict=True):
        for token, place in zip(frame.tokens, places, strict=True):
            if token.state in (GIVEN, VISIBLE) and len(token.text.strip()) > 2:
                assert image.crop(place).tobytes() == frames[-1].crop(place).tobytes(), (
                    frame.step,
                    token,
                )
                compared += 1
    assert compared > 300


def test_a_block_does_not_show_the_text_below(tmp_path: Path) -> None:
    trajectory = simulate(steps=6, remask=0, with_guesses=False)
    frames, _, _ = read_frames(write_gif([trajectory], tmp_path / "a.gif"))
    first, final = trajectory.frames[0].tokens, trajectory.frames[-1].tokens
    hidden = [
        p
        for p, a, b in zip(find_places(trajectory), first, final)
        if a.is_masked and len(b.text.strip()) > 2
    ]
    for left, top, right, bottom in hidden:
        assert (
            len(frames[0].crop((left + 2, top + 2, right - 2, bottom - 4)).getcolors() or []) == 1
        )
    assert len(hidden) > 50


def test_a_gif_has_the_colors_of_the_page() -> None:
    light = read_asset("player.css").partition("@media")[0]
    page = dict(re.findall(r"--([\w-]+): (#\w{6});", light))
    names = {
        "revealed": "REVEALED_GROUND",
        "remasked": "REMASKED_GROUND",
        "sure": "SURE_BLOCK",
        "given": "GIVEN_INK",
    }
    same = ("paper", "ink", "quiet", "block", "anchor-mark", "revealed-mark", "remasked-mark")
    names |= {name: name.upper().replace("-", "_") for name in same}
    assert {name: page[name] for name in names} == {
        name: getattr(look, names[name]) for name in names
    }


def test_every_look_differs(tmp_path: Path) -> None:
    guesses = ((" word", 0.9),)
    looks = [
        TokenState("", HIDDEN),
        TokenState("", HIDDEN, guesses),
        TokenState("", HIDDEN, ((" word", 0.1),)),
        TokenState("", HIDDEN, guesses, is_anchor=True),
        TokenState("", REMASKED, guesses),
        *(TokenState(" word", state) for state in (REVEALED, VISIBLE, GIVEN)),
        TokenState(" ward", VISIBLE),
    ]
    final = [TokenState(" word", GIVEN if each.state == GIVEN else VISIBLE) for each in looks]
    trajectory = make_trajectory(looks, final)
    frames, _, _ = read_frames(write_gif([trajectory], tmp_path / "a.gif"))
    cut = [
        frames[0].crop((left, top, left + 35, bottom)).tobytes()
        for left, top, _, bottom in find_places(trajectory)
    ]
    assert len(set(cut)) == len(looks)


def test_a_wide_word_in_a_narrow_place_is_drawn_in_full_and_in_green(tmp_path: Path) -> None:
    from PIL import ImageColor, ImageFont

    trajectory = make_trajectory([TokenState(" often", REVEALED)], [TokenState(" a", VISIBLE)])
    ((left, top, right, bottom),) = find_places(trajectory)
    assert right + 2 - left >= ImageFont.load_default(gif.SIZES[-1]).getlength("often") - 2
    frames, _, _ = read_frames(write_gif([trajectory], tmp_path / "a.gif"))
    colors = frames[0].crop((left, top, right, bottom - 2)).getcolors() or []
    assert max(colors)[1] == ImageColor.getrgb(look.REVEALED_GROUND) and len(colors) > 4


@given(st.lists(st.text(st.sampled_from("ab c\nd"), max_size=9), max_size=30), st.integers(9, 20))
def test_tokens_are_laid_out_in_order_inside_the_width(texts: list[str], width: int) -> None:
    boxes = lay_out_tokens(texts, [len(clean_text(text)) for text in texts], 1, width)
    assert len(boxes) == len(texts)
    drawn = [(box, clean_text(text)) for box, text in zip(boxes, texts) if text.strip()]
    assert all(
        left >= 0 and left + size <= width and size == len(text) for (left, _, size), text in drawn
    )
    places = [(row, left) for (left, row, _), _ in drawn]
    assert places == sorted(places)
    # Tokens of a word that fits in a line are in one row.
    for (one, first), (two, second) in zip(zip(boxes, texts), list(zip(boxes, texts))[1:]):
        joins = (
            first.strip() and second.strip() and not first[-1].isspace() and not second[0].isspace()
        )
        word = len(first.split()[-1]) + len(second.split()[0]) if joins else 0
        if (
            joins
            and len(" ".join(first.split())) + len(" ".join(second.split())) == word
            and one[0] + word <= width
        ):
            assert two[1] == one[1] or sum(len(text) for text in texts) > width


def test_odd_trajectories_are_drawn(tmp_path: Path) -> None:
    nasty = [
        TokenState(text, VISIBLE) for text in ("\x1b[31m\r\x00", "", "\n\n", "\ud800\u202e中—")
    ]
    hidden = [
        TokenState("", HIDDEN, (("\n\x1b", 0.3),)),
        TokenState("", REMASKED),
        TokenState("", HIDDEN, ((" of\nthe", 1.0),)),
    ]
    long = TokenState("x" * 300, VISIBLE)
    trajectories = [
        make_trajectory([*hidden, TokenState("", HIDDEN)], nasty),
        make_trajectory([*hidden, long]),  # one frame, which is not the end
        make_trajectory([]),
        make_trajectory(
            [TokenState("", HIDDEN)], [long], title="a title wider than the image " * 9
        ),
    ]
    for number, trajectory in enumerate(trajectories):
        frames, durations, _ = read_frames(write_gif([trajectory], tmp_path / f"{number}.gif"))
        assert len(frames) == len(trajectory.frames) and durations[-1] in (0, 1000 * HOLD_SECONDS)


@pytest.mark.slow
def test_an_ordinary_trajectory_is_a_small_file(tmp_path: Path) -> None:
    trajectory = simulate(steps=127)
    path = write_gif([trajectory], tmp_path / "a.gif")
    assert len(read_frames(path)[0]) == 120 and path.stat().st_size < 3e6
    assert trajectory.text == PARAGRAPH


@pytest.mark.parametrize(
    ("count", "name", "options", "message"),
    [
        (0, "a.gif", {}, "0 trajectories"),
        (1, "a.png", {}, r"'a\.png' does not end in \.gif: call it a\.gif"),
    ],
)
def test_errors(
    tmp_path: Path, count: int, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_gif([simulate(steps=2)] * count, tmp_path / name, **options)
    assert not list(tmp_path.iterdir())


def test_missing_pillow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install .*\[view\]"):
        write_gif([simulate(steps=1)], tmp_path / "a.gif")
