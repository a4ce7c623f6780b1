"""The terminal view: what stands is what is read, states differ without color, every still comes back."""

import re
import unicodedata
from collections.abc import Iterator
from io import StringIO
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.segment import Segment

from adlm.view.look import PROBABILITY_LEVELS
from adlm.view.terminal import BLOCKS, DenoisingView, draw_frame, escape_controls, watch
from adlm.view.trajectory import GIVEN, HIDDEN, REMASKED, STATES, VISIBLE, TokenState, Trajectory, TrajectoryFrame
from tests.view.trajectories import PARAGRAPH, record

SGR = re.compile(r"\x1b\[[0-9;]*m")


def terminal(**how: Any) -> Console:
    settings = {"width": 100, "height": 40, "force_terminal": True, "color_system": "256", "legacy_windows": False}
    return Console(file=StringIO(), _environ={}, **settings | how)


def segments(drawn: RenderableType, console: Console) -> list[Segment]:
    """What the console would write, colors taken out where it has none."""
    with console.capture():
        found = [segment for line in console.render_lines(drawn, pad=False, new_lines=True) for segment in line]
    return list(Segment.remove_color(found)) if console.no_color else found


def lines_of(drawn: RenderableType, console: Console) -> list[str]:
    return "".join(segment.text for segment in segments(drawn, console)).rstrip("\n").split("\n")


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def only(text: str, state: str = VISIBLE, **how: Any) -> TrajectoryFrame:
    return TrajectoryFrame(0, 0, (TokenState(text, state, **how),))


def test_what_stands_is_what_is_read() -> None:
    recording = record()
    assert draw_frame(recording.frames[-1]).plain == recording.text
    assert draw_frame(recording.frames[-1], show_guesses=False).plain == PARAGRAPH


@given(st.lists(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"], include_characters="\n"))))
def test_text_of_any_script_is_not_altered(texts: list[str]) -> None:
    still = TrajectoryFrame(
        0, 0, tuple(TokenState(text, STATES[2 + i % 3], is_anchor=i % 2 == 0) for i, text in enumerate(texts))
    )
    assert draw_frame(still).plain == still.text


@given(st.text(st.characters()), st.sampled_from(STATES))
@settings(deadline=None)
def test_no_control_reaches_the_terminal(text: str, state: str) -> None:
    is_hidden = state in (HIDDEN, REMASKED)
    cell = TokenState("", state, ((text, 0.5),)) if is_hidden else TokenState(text, state)
    console = terminal()
    console.print(DenoisingView([TrajectoryFrame(1, 1, (cell,))], [text], [2]))
    left = SGR.sub("", written(console)).replace("\n", "")
    left.encode("utf-8")  # no lone surrogate either
    assert not [c for c in left if unicodedata.category(c) == "Cc"]
    assert not set(left) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2028\u2029")


def test_stand_ins_are_seen() -> None:
    assert escape_controls("a\x1b[31mb\rc\x00\x7f\td") == "a␛[31mb␍c␀␡␉d"
    assert escape_controls("\x9b31m\u202e") == "�31m�"
    assert escape_controls("naïve — 中\n") == "naïve — 中\n"


@pytest.mark.parametrize("show_guesses", [True, False])
def test_every_state_has_its_own_look_without_color(show_guesses: bool) -> None:
    console = terminal(no_color=True)
    looks = {}
    for state, is_anchor in product(STATES, (False, True)):
        text = "" if state in (HIDDEN, REMASKED) else "word"
        still = only(text, state, guesses=(("word", 0.9),), is_anchor=is_anchor)
        first = segments(draw_frame(still, show_guesses=show_guesses), console)[0]
        assert first.style is None or first.style.color is None
        looks[state, is_anchor] = str(first.style or "none")
    assert len(set(looks.values())) == 2 * len(STATES), looks


def test_states_differ_in_color_too_and_guesses_by_how_sure_they_are() -> None:
    console = terminal()
    sure = [0.0, *PROBABILITY_LEVELS]
    stills = [only("", HIDDEN, guesses=((" word", p),)) for p in sure]
    styles = [segments(draw_frame(still), console)[1].style for still in stills]
    assert len({style.color for style in styles if style}) == len(sure)
    just_below = only("", HIDDEN, guesses=((" word", PROBABILITY_LEVELS[0] - 1e-6),))
    assert segments(draw_frame(just_below), console)[1].style == styles[0]


def test_a_hidden_token_is_a_block_or_its_likeliest_guess() -> None:
    still = TrajectoryFrame(
        1, 1, (TokenState("It", GIVEN), TokenState("", HIDDEN, ((" was", 0.7), (" is", 0.2))), TokenState("", REMASKED))
    )
    assert draw_frame(still, show_guesses=False).plain == f"It {BLOCKS[HIDDEN]} {BLOCKS[REMASKED]}"
    assert draw_frame(still).plain == f"It was {BLOCKS[REMASKED]}"
    assert draw_frame(only("", HIDDEN, guesses=(("\n\n", 0.9),))).plain == "↵↵"  # a guess breaks no line
    for nothing in ("", " "):  # what could not be seen
        assert draw_frame(only("", HIDDEN, guesses=((nothing, 0.9),))).plain == BLOCKS[HIDDEN]


def test_only_letters_are_underlined() -> None:
    spans = draw_frame(only(" anchor\n", is_anchor=True)).spans
    assert [(span.start, span.end) for span in spans] == [(1, 7)]


@pytest.mark.parametrize("number", [0, 12, 40, 64])
def test_counters_are_right(number: int) -> None:
    still = record().frames[number]
    hidden = sum(cell.state in (HIDDEN, REMASKED) for cell in still.tokens)
    drawn = "\n".join(lines_of(DenoisingView([still], ["loop"], [64]), terminal()))
    assert f" step {number} of 64 " in drawn and f" NFE {number} · {hidden} of {len(still.tokens)} hidden " in drawn
    assert abs(drawn.count("━") / 80 - 1) < 0.2  # a bar, all of it
    alone = "\n".join(lines_of(DenoisingView([still], ["loop"], [None]), terminal()))
    assert f" step {number} " in alone and "of 64" not in alone and "━" not in alone


def test_two_panels_stand_side_by_side_where_there_is_room() -> None:
    stills = [record().frames[40], record(seed=1).frames[40]]
    drawn = DenoisingView(stills, ["left", "right"], [64, 64])
    wide, narrow = (lines_of(drawn, terminal(width=width)) for width in (81, 80))
    assert "left" in wide[0] and "right" in wide[0]
    assert "left" in narrow[0] and "right" not in narrow[0] and any("right" in line for line in narrow)
    for width in (30, 80, 81, 100, 300):
        assert max(map(len, lines_of(drawn, terminal(width=width)))) <= width
    assert "hidden again" in wide[-2] + wide[-1]


def test_a_legend_tears_no_entry() -> None:
    for width in (40, 60, 80, 120):
        drawn = "\n".join(lines_of(DenoisingView([only("x")], ["t"], [1]), terminal(width=width)))
        for entry in ("░░░ hidden", "new just revealed", "▒▒▒ hidden again", "text given", "word anchor", "guess <25%"):
            assert entry in drawn
    plain = DenoisingView([only("x")], ["t"], [1], show_guesses=False)
    assert "guess" not in "\n".join(lines_of(plain, terminal()))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("width", "height"), [(100, 15), (60, 24), (60, 16), (45, 20), (200, 9)])
def test_a_view_never_outgrows_the_screen_and_shows_where_things_happen(width: int, height: int, count: int) -> None:
    recordings = [record(PARAGRAPH * 3, steps=20), record(PARAGRAPH, steps=20)][:count]
    console = terminal(width=width, height=height)
    view = DenoisingView([], ["long", "short"][:count], [20, 20][:count], show_guesses=False, height=height)
    heights = []
    for stills in zip(*(recording.frames for recording in recordings)):
        view.frames = stills
        lines = lines_of(view, console)
        heights.append(len(lines))
        drawn = "\n".join(line for line in lines if "│" in line)  # the legend has blocks too
        assert re.search(r"⋯ lines \d+–\d+ of \d+", drawn)  # the long one is cropped, and says so
        if count == 1 and any(cell.is_masked for cell in stills[0].tokens):
            assert "░" in drawn or "▒" in drawn
    assert max(heights) <= height
    assert heights == sorted(heights)  # no frame is lower than the one before


def test_the_window_follows_a_text_that_is_written_from_left_to_right() -> None:
    words = [f" word{i}" for i in range(400)]
    view, console, tops = DenoisingView([], ["t"], [400], height=12), terminal(width=60), []
    for step in range(0, 400, 7):
        cells = [TokenState(word, VISIBLE) if i < step else TokenState("", HIDDEN) for i, word in enumerate(words)]
        view.frames = [TrajectoryFrame(step, step, tuple(cells))]
        drawn = "\n".join(line for line in lines_of(view, console) if "│" in line)
        assert "░" in drawn and (step == 0 or words[step - 1] in drawn)
        tops.append(view.tops[0])
    assert tops == sorted(tops) and len(set(tops)) < len(tops) / 2  # it moves on, but not with every frame


def streams() -> tuple[list[Trajectory], list[Iterator[TrajectoryFrame]]]:
    recordings = [record(steps=12), record(steps=5, seed=1, title="quick")]
    return recordings, [iter(recording.frames) for recording in recordings]


@pytest.mark.parametrize("console", [terminal(), terminal(width=50, height=10), terminal(no_color=True)])
def test_watching_returns_every_still_and_leaves_the_terminal_in_order(console: Console) -> None:
    recordings, sources = streams()
    seen = watch(sources, ["loop", "quick"], console, steps=[12, None], pause=0.001)
    assert [tuple(stills) for stills in seen] == [recording.frames for recording in recordings]
    out = written(console)
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") == 1  # the cursor is back
    rest = SGR.sub("", out[out.index("\x1b[?25h") :])
    for token in ("harbour", "lighthouse", "bay.", "step 12 of 12", "step 5 "):  # the last picture is whole
        assert token in rest


def test_a_pipe_gets_a_few_plain_stills() -> None:
    recordings, sources = streams()
    console = terminal(force_terminal=False, color_system="auto", width=40)
    seen = watch(sources, ["loop", "quick"], console, steps=[12, None], pause=9.0)  # nobody looks: no pause
    assert [tuple(stills) for stills in seen] == [recording.frames for recording in recordings]
    out = written(console)
    assert "\x1b" not in out
    heads = re.findall(r"^(loop|quick): step (\d+)(?: of 12)?, NFE (\d+), (\d+) of \d+ hidden$", out, re.M)
    for title in ("loop", "quick"):
        left = [int(hidden) for name, _, _, hidden in heads if name == title]
        at_first = sum(cell.is_masked for cell in recordings[0].frames[0].tokens)
        assert len(left) == 3 and left[0] <= 0.75 * at_first and 0 < left[1] <= 0.5 * at_first and left[2] == 0
    assert out.count(PARAGRAPH) == 2  # not folded: a pipe has no width


def test_a_dumb_terminal_is_a_pipe() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80, _environ={"TERM": "dumb"})
    watch([iter(record(steps=3).frames)], ["t"], console, steps=[3])
    assert "\x1b[?25l" not in written(console)


def test_an_interrupt_is_passed_on_after_the_cursor_is_back() -> None:
    def interrupted() -> Iterator[TrajectoryFrame]:
        yield from record().frames[:9]
        raise KeyboardInterrupt

    console = terminal()
    with pytest.raises(KeyboardInterrupt):
        watch([interrupted()], ["t"], console, steps=[64])
    out = written(console)
    assert out.count("\x1b[?25h") == 1
    assert "step 8 of 64" in SGR.sub("", out[out.index("\x1b[?25h") :])


def test_errors_say_what_is_missing() -> None:
    still = only("x")
    with pytest.raises(ValueError, match="streams: 0, titles: 0, steps: 0; give 1 or more of each"):
        watch([], [], terminal(), steps=[])
    with pytest.raises(ValueError, match="streams: 1, titles: 2, steps: 1"):
        watch([iter([still])], ["a", "b"], terminal(), steps=[1])
    with pytest.raises(ValueError, match="stream 2 of 2 ended before its first frame"):
        watch([iter([still]), iter([])], ["a", "b"], terminal(), steps=[1, 1])
