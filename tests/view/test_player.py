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
from tests.view.trajectories import record

NASTY = '</script><script>window.broken=1</script><!-- <b>&amp; "quotes" \' \u2028 {{script}} \\u003c \ud800 \x00 \r\n'


def data_in(page: str) -> Any:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def decoded(recording: dict[str, Any]) -> list[TrajectoryFrame]:
    """The stills as the page's script reads them."""
    stills, cells = [], [TokenState("", "") for _ in range(recording["cells"])]
    for step, nfe, flat in recording["stills"]:
        numbers, at = iter(flat), -1
        for gap in numbers:
            at += gap
            kind, text, count = (next(numbers) for _ in range(3))
            pairs = [(recording["strings"][next(numbers)], next(numbers) / 1000) for _ in range(count)]
            cells[at] = TokenState(recording["strings"][text], STATES[kind // 2], tuple(pairs), kind % 2 == 1)
        stills.append(TrajectoryFrame(step, nfe, tuple(cells)))
    return stills


def units(text: str) -> bytes:
    """A text as a browser holds it: JSON joins two surrogates that stand side by side."""
    return text.encode("utf-16-le", "surrogatepass")


def rounded(still: TrajectoryFrame) -> tuple[object, ...]:
    cells = [
        (units(c.text), c.state, [(units(g), round(1000 * p)) for g, p in c.guesses], c.is_anchor) for c in still.tokens
    ]
    return still.step, still.nfe, cells


TEXTS = st.text(st.characters(), max_size=5)  # surrogates and controls included
GUESSES = st.lists(st.tuples(TEXTS, st.floats(0, 1)), max_size=3).map(tuple)
CELLS = st.builds(TokenState, TEXTS, st.sampled_from(STATES), GUESSES, st.booleans())


@st.composite
def recordings(draw: st.DrawFn) -> Trajectory:
    """Stills in which most cells are as before."""
    cells = draw(st.lists(CELLS, max_size=6))
    stills = [TrajectoryFrame(0, draw(st.integers(0, 3)), tuple(cells))]
    for step in range(1, draw(st.integers(1, 5))):
        for at in draw(st.sets(st.integers(0, len(cells) - 1))) if cells else ():
            cells[at] = draw(CELLS)
        stills.append(TrajectoryFrame(step, stills[-1].nfe + draw(st.integers(0, 2)), tuple(cells)))
    return Trajectory(draw(TEXTS), stills[-1].text, tuple(stills), draw(st.floats(0, 100)), {"seed": 1}, draw(TEXTS))


@given(st.lists(recordings(), min_size=1, max_size=3), TEXTS)
@settings(deadline=None)
def test_every_still_comes_back(made: list[Trajectory], title: str) -> None:
    data = data_in(render_player(made, title))
    assert units(data["title"]) == units(title) and data["states"] == list(STATES)
    assert len(data["recordings"]) == len(made)
    for found, recording in zip(data["recordings"], made):
        assert [rounded(still) for still in decoded(found)] == [rounded(still) for still in recording.frames]
        assert units(found["title"]) == units(recording.title)
        assert units(found["guesser"]) == units(recording.guesser)
        assert found["seconds"] == pytest.approx(recording.seconds, abs=1e-3)


def test_a_still_holds_what_changed() -> None:
    same = tuple(TokenState(token, "given") for token in (" a", " b", " c"))
    changed = (same[0], TokenState(" d", "given"), same[2])
    stills = (TrajectoryFrame(0, 0, same), TrajectoryFrame(1, 1, same), TrajectoryFrame(2, 2, changed))
    found = data_in(render_player([Trajectory("t", " a d c", stills)]))["recordings"][0]
    assert [still[:2] for still in found["stills"]] == [[0, 0], [1, 1], [2, 2]]
    assert found["stills"][1][2] == [] and found["stills"][2][2][0] == 2  # the second cell: two after -1
    assert found["strings"] == [" a", " b", " c", " d"]


def test_an_ordinary_recording_is_a_small_file(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = [f" word{number}" for number in range(8000)]

    def cell(at: int, step: int) -> TokenState:
        if at < step:
            return TokenState(words[at], "visible")
        return TokenState("", "hidden", tuple((rng.choice(words), rng.random()) for _ in range(3)))

    stills = tuple(TrajectoryFrame(step, step, tuple(cell(at, step) for at in range(128))) for step in range(129))
    path = write_player([Trajectory("128 × 128", stills[-1].text, stills)], tmp_path / "a.html")
    assert path.stat().st_size < 600_000


class Elements(HTMLParser):
    """The elements of a page as a parser sees them, and the text of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"": []}
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.inside, []).append(data)


def elements(page: str) -> Elements:
    found = Elements()
    found.feed(page)
    return found


def nasty() -> Trajectory:
    cells = (TokenState(NASTY, "revealed"), TokenState("", "hidden", ((NASTY, 0.5),)))
    return Trajectory(NASTY, NASTY, (TrajectoryFrame(0, 0, cells),), 0.0, {NASTY: NASTY, "nan": float("nan")}, NASTY)


def test_no_text_breaks_out(tmp_path: Path) -> None:
    page = write_player([nasty()], tmp_path / "a.html", title=NASTY).read_text("utf-8")
    harmless = render_player([Trajectory("t", "x", (TrajectoryFrame(0, 0, (TokenState("x", "given"),)),))], "t")
    assert [tag for tag, _ in elements(page).tags] == [tag for tag, _ in elements(harmless).tags]
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data and data[1].isascii() and not set("<>&") & set(data[1])
    found = data_in(page)
    assert found["title"] == NASTY and found["recordings"][0]["settings"] == [[NASTY, NASTY], ["nan", "NaN"]]
    assert "".join(elements(page).texts["title"]).startswith("</script><script>window.broken=1")


def test_the_page_loads_nothing_and_may_run_its_own_script_only() -> None:
    found = elements(render_player([record(steps=3)]))
    for tag, attributes in found.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), tag
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "style"), (tag, name)
            assert name != "href" or (value or "").startswith("data:"), value
    policy = next(a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy") or ""
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for kind in ("style", "script"):
        content = "".join(found.texts[kind])
        if kind == "script":
            content = content[content.index("\n") :]  # the data comes first, on one line, and is not run
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    ways_in = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b"
    assert not re.search(ways_in, "".join(found.texts["script"]))


def test_title_and_parents(tmp_path: Path) -> None:
    recording = record(steps=2)
    path = write_player([recording], tmp_path / "not" / "there" / "a.html", title="Müll & <Co>")
    assert path == tmp_path / "not" / "there" / "a.html"
    page = path.read_text("utf-8")
    assert html.unescape("".join(elements(page).texts["title"])) == "Müll & <Co>"
    assert page == render_player([recording], "Müll & <Co>")  # the same recording, the same page
    assert f"<title>{TITLE}</title>" in render_player([recording])


def still(*cells: TokenState, step: int = 0) -> TrajectoryFrame:
    return TrajectoryFrame(step, step, cells)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ([], "there are 0 trajectories: give at least one"),
        ([Trajectory("empty", "", ())], "'empty' has 0 frames"),
        ([Trajectory("a", "abc", (still(TokenState("abd", "given")),))], "'abc' differs from its last frame, 'abd'"),
        (
            [Trajectory("a", "x", (still(), still(TokenState("x", "given"), step=1)))],
            "step 1 has 1 tokens and the first frame 0",
        ),
        (
            [Trajectory("a", "x", (still(TokenState("x", "seen")),))],
            "position 0: state 'seen' is unknown: expected one of hidden, remasked",
        ),
        (
            [Trajectory("a", "", (still(TokenState("", "hidden", (("x", 1.2),))),))],
            "guess 'x' has probability 1.2: expected one from 0 to 1",
        ),
        ([Trajectory("a", "", (still(TokenState("", "hidden", (("x", float("nan")),))),))], "probability nan"),
        ([Trajectory("a", "", (still(),), float("inf"))], "has inf seconds"),
    ],
)
def test_errors_name_the_value_and_the_expectation(made: list[Trajectory], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        write_player(made, tmp_path / "new" / "a.html")
    assert not list(tmp_path.iterdir())  # nothing half done


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder: give the name of a file, such as .*sample\.html"):
        write_player([record(steps=2)], tmp_path)
