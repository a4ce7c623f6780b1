"""The terminal view: the text is drawn as it reads, states differ without color, every frame is returned."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.segment import Segment

from adlm.view.console import escape_controls
from adlm.view.look import PROBABILITY_LEVELS
from adlm.view.terminal import BLOCKS, DenoisingView, draw_frame, watch
from adlm.view.trajectory import (
    GIVEN,
    HIDDEN,
    REMASKED,
    STATES,
    VISIBLE,
    TokenState,
    Trajectory,
    TrajectoryFrame,
)
from tests.view.trajectories import PARAGRAPH, simulate

SGR = re.compile(r"\x1b\[[0-9;]*m")


def terminal(**options: Any) -> Console:
    settings = {
        "width": 100,
        "height": 40,
        "force_terminal": True,
        "color_system": "256",
        "legacy_windows": False,
    }
    return Console(file=StringIO(), _environ={}, **settings | options)


def segments(drawn: RenderableType, console: Console) -> list[Segment]:
    """What the console would write, colors taken out where it has none."""
    with console.capture():
        lines = console.render_lines(drawn, pad=False, new_lines=True)
    every = [segment for line in lines for segment in line]
    return list(Segment.remove_color(every)) if console.no_color else every


def render_lines(drawn: RenderableType, console: Console) -> list[str]:
    return "".join(segment.text for segment in segments(drawn, console)).rstrip("\n").split("\n")


def read_output(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def one_token(text: str, state: str = VISIBLE, **options: Any) -> TrajectoryFrame:
    return TrajectoryFrame(0, 0, (TokenState(text, state, **options),))


@given(
    st.lists(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"], include_characters="\n")))
)
def test_text_of_any_script_is_not_altered(texts: list[str]) -> None:
    frame = TrajectoryFrame(
        0,
        0,
        tuple(
            TokenState(text, STATES[2 + i % 3], is_anchor=i % 2 == 0)
            for i, text in enumerate(texts)
        ),
    )
    assert draw_frame(frame).plain == frame.text


@given(st.text(st.characters()), st.sampled_from(STATES))
@settings(deadline=None)
def test_no_control_reaches_the_terminal(text: str, state: str) -> None:
    is_hidden = state in (HIDDEN, REMASKED)
    token = TokenState("", state, ((text, 0.5),)) if is_hidden else TokenState(text, state)
    console = terminal()
    console.print(DenoisingView([TrajectoryFrame(1, 1, (token,))], [text], [2]))
    left = SGR.sub("", read_output(console)).replace("\n", "")
    left.encode("utf-8")  # no lone surrogate either
    assert not [c for c in left if unicodedata.category(c) == "Cc"]
    assert not set(left) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2028\u2029")


def test_controls_are_replaced_by_visible_characters() -> None:
    assert escape_controls("a\x1b[31mb\rc\x00\x7f\td") == "a␛[31mb␍c␀␡␉d"
    assert escape_controls("\x9b31m\u202e") == "�31m�"
    assert escape_controls("naïve — 中\n") == "naïve — 中\n"


@pytest.mark.parametrize("show_guesses", [True, False])
def test_every_state_has_its_own_look_without_color(show_guesses: bool) -> None:
    console = terminal(no_color=True)
    looks = {}
    for state, is_anchor in product(STATES, (False, True)):
        text = "" if state in (HIDDEN, REMASKED) else "word"
        frame = one_token(text, state, guesses=(("word", 0.9),), is_anchor=is_anchor)
        first = segments(draw_frame(frame, show_guesses=show_guesses), console)[0]
        assert first.style is None or first.style.color is None
        looks[state, is_anchor] = str(first.style or "none")
    assert len(set(looks.values())) == 2 * len(STATES), looks


def test_guesses_are_colored_by_their_probability() -> None:
    probabilities = [0.0, *PROBABILITY_LEVELS, PROBABILITY_LEVELS[0] - 1e-6]
    frames = [one_token("", HIDDEN, guesses=((" word", p),)) for p in probabilities]
    *styles, just_below = [segments(draw_frame(frame), terminal())[1].style for frame in frames]
    assert (
        len({style.color for style in styles if style}) == len(styles) and just_below == styles[0]
    )


def test_a_hidden_token_is_a_block_or_its_likeliest_guess() -> None:
    hidden = TokenState("", HIDDEN, ((" was", 0.7), (" is", 0.2)))
    frame = TrajectoryFrame(1, 1, (TokenState("It", GIVEN), hidden, TokenState("", REMASKED)))
    assert draw_frame(frame, show_guesses=False).plain == f"It {BLOCKS[HIDDEN]} {BLOCKS[REMASKED]}"
    assert draw_frame(frame).plain == f"It was {BLOCKS[REMASKED]}"
    for guess, shown in (("\n\n", "↵↵"), ("", BLOCKS[HIDDEN]), (" ", BLOCKS[HIDDEN])):
        assert draw_frame(one_token("", HIDDEN, guesses=((guess, 0.9),))).plain == shown
    underlined = draw_frame(one_token(" anchor\n", is_anchor=True)).spans
    assert [(span.start, span.end) for span in underlined] == [(1, 7)]  # only the letters


@pytest.mark.parametrize("number", [0, 12, 40, 64])
def test_counters_are_right(number: int) -> None:
    frame = simulate().frames[number]
    hidden = sum(token.is_masked for token in frame.tokens)
    drawn = "\n".join(render_lines(DenoisingView([frame], ["loop"], [64]), terminal()))
    assert (
        f" step {number} of 64 " in drawn
        and f" NFE {number} · {hidden} of {len(frame.tokens)} hidden " in drawn
    )
    assert abs(drawn.count("━") / 80 - 1) < 0.2  # a bar, all of it
    without_steps = "\n".join(render_lines(DenoisingView([frame], ["loop"], [None]), terminal()))
    assert (
        f" step {number} " in without_steps
        and "of 64" not in without_steps
        and "━" not in without_steps
    )


def test_two_panels_stand_side_by_side_where_there_is_room() -> None:
    frames = [simulate().frames[40], simulate(seed=1).frames[40]]
    drawn = DenoisingView(frames, ["left", "right"], [64, 64])
    wide, narrow = (render_lines(drawn, terminal(width=width)) for width in (81, 80))
    assert "left" in wide[0] and "right" in wide[0]
    assert (
        "left" in narrow[0] and "right" not in narrow[0] and any("right" in line for line in narrow)
    )
    for width in (30, 80, 81, 100, 300):
        assert max(map(len, render_lines(drawn, terminal(width=width)))) <= width
    assert "hidden again" in wide[-2] + wide[-1]


def test_a_legend_breaks_no_entry() -> None:
    for width in (40, 60, 80, 120):
        drawn = "\n".join(
            render_lines(DenoisingView([one_token("x")], ["t"], [1]), terminal(width=width))
        )
        for entry in (
            "░░░ hidden",
            "new just revealed",
            "▒▒▒ hidden again",
            "text given",
            "word anchor",
            "guess <25%",
        ):
            assert entry in drawn
    plain = DenoisingView([one_token("x")], ["t"], [1], show_guesses=False)
    assert "guess" not in "\n".join(render_lines(plain, terminal()))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("width", "height"), [(100, 15), (60, 24), (60, 16), (45, 20), (200, 9)])
def test_a_view_fits_the_screen(width: int, height: int, count: int) -> None:
    trajectories = [simulate(PARAGRAPH * 3, steps=20), simulate(PARAGRAPH, steps=20)][:count]
    view = DenoisingView(
        [], ["long", "short"][:count], [20, 20][:count], show_guesses=False, height=height
    )
    for frames in zip(*(trajectory.frames for trajectory in trajectories)):
        view.frames = frames
        lines = render_lines(view, terminal(width=width, height=height))
        assert len(lines) <= height and any(
            "⋯" in line for line in lines
        )  # the long one is cropped


def watch_two(console: Console, **options: Any) -> str:
    """Watch two trajectories, check that every frame is returned, and return what was written."""
    trajectories = [simulate(steps=12), simulate(steps=5, seed=1, title="quick")]
    streams = [iter(trajectory.frames) for trajectory in trajectories]
    seen = watch(streams, ["loop", "quick"], console, steps=[12, None], **options)
    assert [
        Trajectory(each.title, tuple(frames)) for each, frames in zip(trajectories, seen)
    ] == trajectories
    return read_output(console)


@pytest.mark.parametrize(
    "console", [terminal(), terminal(width=50, height=10), terminal(no_color=True)]
)
def test_watching_returns_every_frame_and_restores_the_terminal(console: Console) -> None:
    out = watch_two(console, pause=0.001)
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") == 1  # the cursor is back
    rest = SGR.sub("", out[out.index("\x1b[?25h") :])
    for token in (
        "harbour",
        "lighthouse",
        "bay.",
        "step 12 of 12",
        "step 5 ",
    ):  # the last drawing is whole
        assert token in rest


def test_there_is_no_pause_for_a_step_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = simulate(steps=12).frames
    frames, pauses = [first, *(replace(second, step=step) for step in range(1, 50))], list[float]()
    monkeypatch.setattr("adlm.view.terminal.time.sleep", pauses.append)
    watch([iter(frames)], ["loop"], terminal(), steps=[50], pause=0.5)
    assert len(pauses) == 50 and sum(pauses) == 1.0


@pytest.mark.parametrize("is_dumb", [False, True])
def test_a_pipe_and_a_dumb_terminal_get_the_last_texts(is_dumb: bool) -> None:
    console = terminal(force_terminal=False, color_system="auto", width=40)
    if is_dumb:
        console = Console(
            file=StringIO(),
            force_terminal=True,
            color_system=None,
            width=40,
            _environ={"TERM": "dumb"},
        )
    out = watch_two(console, pause=9.0)  # nobody watches: no pause
    assert "\x1b" not in out and out.count(PARAGRAPH) == 2  # not folded: a pipe has no width
    counters = re.findall(
        r"^(loop|quick): (step \d+(?: of 12)?), NFE (\d+) · 0 of \d+ hidden$", out, re.M
    )
    assert counters == [("loop", "step 12 of 12", "12"), ("quick", "step 5", "5")]


def test_an_interrupt_is_passed_on_after_the_cursor_is_back() -> None:
    def interrupted() -> Iterator[TrajectoryFrame]:
        yield from simulate().frames[:9]
        raise KeyboardInterrupt

    console = terminal()
    with pytest.raises(KeyboardInterrupt):
        watch([interrupted()], ["t"], console, steps=[64])
    out = read_output(console)
    assert out.count("\x1b[?25h") == 1
    assert "step 8 of 64" in SGR.sub("", out[out.index("\x1b[?25h") :])
