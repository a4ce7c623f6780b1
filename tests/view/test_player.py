"""The player's page without a browser: the data comes back as it was, no text breaks out, errors name the remedy."""

import base64
import hashlib
import html
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adlm.view.player import TITLE, render_player, write_player
from adlm.view.trajectory import STATES, TokenState, Trajectory, TrajectoryFrame
from tests.view.trajectories import make_trajectory, simulate

NASTY = '</script><script>window.broken=1</script><!-- <b>&amp; "quotes" \' \u2028 {{script}} \\u003c \ud800 \x00 \r\n'


def read_data(page: str) -> Any:
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    assert data.isascii() and not set("<>&") & set(data)
    return json.loads(data)


def decode_frames(trajectory: dict[str, Any], count: int) -> list[TrajectoryFrame]:
    """The frames of `count` tokens as the page's script reads them."""
    frames, tokens = [], [TokenState("", "")] * count
    for step, nfe, flat in trajectory["frames"]:
        numbers, at = iter(flat), -1
        for gap in numbers:
            at += gap
            kind, text, guesses = (next(numbers) for _ in range(3))
            pairs = [
                (trajectory["strings"][next(numbers)], next(numbers) / 1000) for _ in range(guesses)
            ]
            tokens[at] = TokenState(
                trajectory["strings"][text], STATES[kind // 2], tuple(pairs), kind % 2 == 1
            )
        frames.append(TrajectoryFrame(step, nfe, tuple(tokens)))
    return frames


def units(text: str) -> bytes:
    """A text as a browser holds it: JSON joins two surrogates that stand side by side."""
    return text.encode("utf-16-le", "surrogatepass")


def round_frame(frame: TrajectoryFrame) -> tuple[object, ...]:
    tokens = [
        (
            units(token.text),
            token.state,
            [(units(g), round(1000 * p)) for g, p in token.guesses],
            token.is_anchor,
        )
        for token in frame.tokens
    ]
    return frame.step, frame.nfe, tokens


TEXTS = st.text(st.characters(), max_size=5)  # surrogates and controls included
GUESSES = st.lists(st.tuples(TEXTS, st.floats(0, 1)), max_size=3).map(tuple)
TOKENS = st.builds(TokenState, TEXTS, st.sampled_from(STATES), GUESSES, st.booleans())


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Frames in which most tokens are as before."""
    tokens = draw(st.lists(TOKENS, max_size=6))
    frames = [TrajectoryFrame(0, draw(st.integers(0, 3)), tuple(tokens))]
    for step in range(1, draw(st.integers(1, 5))):
        for at in draw(st.sets(st.integers(0, len(tokens) - 1))) if tokens else ():
            tokens[at] = draw(TOKENS)
        frames.append(
            TrajectoryFrame(step, frames[-1].nfe + draw(st.integers(0, 2)), tuple(tokens))
        )
    return Trajectory(draw(TEXTS), tuple(frames), draw(st.floats(0, 100)), {"seed": 1}, draw(TEXTS))


@given(st.lists(trajectories(), min_size=1, max_size=3), TEXTS)
@settings(deadline=None)
def test_every_frame_comes_back(given_trajectories: list[Trajectory], title: str) -> None:
    data = read_data(render_player(given_trajectories, title))
    assert units(data["title"]) == units(title) and data["states"] == list(STATES)
    for decoded, trajectory in zip(data["trajectories"], given_trajectories, strict=True):
        frames = decode_frames(decoded, len(trajectory.frames[0].tokens))
        assert [round_frame(frame) for frame in frames] == [
            round_frame(frame) for frame in trajectory.frames
        ]
        assert units(decoded["title"]) == units(trajectory.title)
        assert units(decoded["guesser"]) == units(trajectory.guesser)
        assert decoded["seconds"] == pytest.approx(trajectory.seconds, abs=1e-3)


def test_a_frame_holds_what_changed() -> None:
    same = [TokenState(text, "given") for text in (" a", " b", " c")]
    changed = [same[0], TokenState(" d", "given"), same[2]]
    (data,) = read_data(render_player([make_trajectory(same, same, changed)]))["trajectories"]
    assert [frame[:2] for frame in data["frames"]] == [[0, 0], [1, 1], [2, 2]]
    assert (
        data["frames"][1][2] == [] and data["frames"][2][2][0] == 2
    )  # the second token: two after -1
    assert data["strings"] == [" a", " b", " c", " d"]


def test_an_ordinary_trajectory_is_a_small_file() -> None:
    rng = random.Random(0)
    words = [f" word{number}" for number in range(8000)]

    def token(at: int, step: int) -> TokenState:
        if at < step:
            return TokenState(words[at], "visible")
        return TokenState("", "hidden", tuple((rng.choice(words), rng.random()) for _ in range(3)))

    frames = ([token(at, step) for at in range(128)] for step in range(129))
    assert len(render_player([make_trajectory(*frames)])) < 600_000


class Elements(HTMLParser):
    """The elements of a page as a parser sees them, and the text of each kind."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        self.texts[self.inside] = self.texts.get(self.inside, "") + data


def nasty() -> Trajectory:
    tokens = (TokenState(NASTY, "revealed"), TokenState("", "hidden", ((NASTY, 0.5),)))
    return Trajectory(
        NASTY, (TrajectoryFrame(0, 0, tokens),), 0.0, {NASTY: NASTY, "nan": float("nan")}, NASTY
    )


def test_no_text_breaks_out(tmp_path: Path) -> None:
    page = write_player([nasty()], tmp_path / "a.html", title=NASTY).read_text("utf-8")
    harmless = render_player([make_trajectory([TokenState("x", "given")])], "t")
    assert [tag for tag, _ in Elements(page).tags] == [tag for tag, _ in Elements(harmless).tags]
    data = read_data(page)
    assert data["title"] == NASTY and data["trajectories"][0]["settings"] == [
        [NASTY, NASTY],
        ["nan", "NaN"],
    ]
    assert Elements(page).texts["title"].startswith("</script><script>window.broken=1")


def test_the_page_loads_nothing_and_may_run_its_own_script_only() -> None:
    elements = Elements(render_player([simulate(steps=3)]))
    for tag, attributes in elements.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), tag
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "style"), (tag, name)
            assert name != "href" or (value or "").startswith("data:"), value
    policy = (
        next(
            a["content"]
            for tag, a in elements.tags
            if a.get("http-equiv") == "Content-Security-Policy"
        )
        or ""
    )
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    script = elements.texts["script"]
    script = script[script.index("\n") :]  # the data comes first, on one line, and is not run
    for kind, content in (("style", elements.texts["style"]), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", script)


def test_title_and_parents(tmp_path: Path) -> None:
    trajectory, path = simulate(steps=2), tmp_path / "not" / "there" / "a.html"
    assert write_player([trajectory], path, title="Müll & <Co>") == path
    page = path.read_text("utf-8")
    assert html.unescape(Elements(page).texts["title"]) == "Müll & <Co>"
    assert page == render_player([trajectory], "Müll & <Co>")  # the same trajectory, the same page
    assert f"<title>{TITLE}</title>" in render_player([trajectory])


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are 0 trajectories: give at least one"):
        write_player([], tmp_path / "new" / "a.html")
    with pytest.raises(
        ValueError, match=r"is a folder: give the name of a file, such as .*sample\.html"
    ):
        write_player([simulate(steps=2)], tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        ValueError, match=r"'empty' has 0 frames of \[\] tokens: record at least one frame"
    ):
        make_trajectory(title="empty")
    with pytest.raises(
        ValueError, match=r"has 2 frames of \[0, 1\] tokens: .* every position in each"
    ):
        make_trajectory([], [TokenState("x", "given")])


def test_a_trajectory_prints_without_its_frames() -> None:
    assert len(repr(simulate())) < 300
