"""The player's page in a browser: it plays, steps and scrubs, tells a token's history, and shows text as text."""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from adlm.view.player import write_player
from adlm.view.player import write_player
from adlm.view.trajectory import TokenState, Trajectory
from tests.browser import emulate_media, open_browser, read_console, read_requests
from tests.view.test_player import NASTY, nasty, units
from tests.view.trajectories import make_trajectory, simulate

# One token that was given, one that came, went and came back, one that comes last.
STORY = (
    (("given", "The"),) * 6,
    (("hidden", ""), ("revealed", " cat"), ("remasked", ""), ("hidden", ""), ("revealed", " dog"), ("visible", " dog")),
    (("hidden", ""),) * 5 + (("revealed", "."),),
)
ODD = ["", " a", "b ", "\n", "\n\n c", " ", "\t", "é", " 冬", "😀", "\ud83d", "\ude00", "<", "\u2028", "\x00", "\r\n"]
TEXT_UNITS = "[...Array(t.textContent.length).keys()].map((i) => t.textContent.charCodeAt(i))"


def story() -> Trajectory:
    guesses = ((" dog", 0.625), ("<b>bold</b>", 0.25), (" cat", 0.125))
    stills = [
        TrajectoryFrame(
            10 * step,
            11 * step,
            tuple(TokenState(t, kind, () if t else guesses, kind == "hidden") for kind, t in cells),
        )
        for step, cells in enumerate(zip(*STORY, strict=True))
    ]
    return Trajectory("a <i>story</i>", "The dog.", tuple(stills), 0.5, {"sampler": "remask_cap", "top_p": 0.9})


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


class Page:
    """A page that was opened, by what a reader sees and does."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(self, *recordings: Trajectory, moving: bool = False, title: str = "A title") -> None:
        media(self.driver, prefers_reduced_motion="no-preference" if moving else "reduce")
        path = write_player(recordings, self.folder / "page.html", title=title)
        self.driver.get(path.as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def said(self, selector: str) -> list[str]:
        """The text of every element that the selector finds, shown or not; a lone surrogate cannot come this way."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent.toWellFormed())"
        return self.run(script, selector)

    def widths(self, selector: str) -> list[float]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.getBoundingClientRect().width)"
        return self.run(script, selector)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def point(self, selector: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver, duration=0).move_to_element(self.find(selector)).perform()

    def scrub(self, tick: int) -> None:
        script = "scrub.value = arguments[0]; scrub.dispatchEvent(new Event('input'))"
        self.run(script, tick)

    def tick(self) -> int:
        return int(self.said("#tick")[0].split(" / ")[0])

    def texts(self) -> list[bytes]:
        """The texts of the panels, whatever they hold: numbers come this way unchanged."""
        found = self.run(f"return [...document.querySelectorAll('.text')].map((t) => {TEXT_UNITS})")
        return [b"".join(unit.to_bytes(2, "little") for unit in text) for text in found]

    def states(self) -> list[str]:
        return self.run("return [...document.querySelectorAll('.text .cell')].map((c) => c.dataset.state)")

    def wait(self, condition: str, seconds: float = 8.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"return {condition}"):
            assert time.monotonic() < end, f"not within {seconds} s: {condition}"
            time.sleep(0.02)


@pytest.fixture
def page(driver: Any, tmp_path: Path) -> Iterator[Page]:
    """A page; whatever a test does with it, nothing is complained about and nothing asked from the network."""
    driver.get("about:blank")
    console(driver), requests(driver)
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    yield Page(driver, tmp_path)
    assert console(driver) == []
    asked = requests(driver)
    assert asked and all(url.startswith(("file:", "data:")) for url in asked), asked
    assert {url for url in asked if url.startswith("file:")} == {(tmp_path / "page.html").as_uri()}


PLAYING = "document.body.classList.contains('playing')"


def test_it_plays_by_itself_to_the_end_and_again_when_asked(page: Page) -> None:
    steps = 200  # many: a busy machine looks late, and must still find it playing
    page.open(record(steps=steps), moving=True)
    page.wait(PLAYING)
    page.wait("document.getElementById('scrub').value > 2")
    assert page.find("#play").get_attribute("aria-label") == "Pause"
    page.find("#speed").send_keys("8")
    page.wait(f"document.getElementById('scrub').value === '{steps}'", seconds=60)
    page.wait(f"!{PLAYING}")
    assert page.said(".step") == [str(steps)] and page.said(".nfe") == [str(steps)]
    assert page.texts() == [units(record().text)]
    page.find("#speed").send_keys("1")  # or all of it could be over before a busy machine looks
    page.find("#play").click()  # at the end: from the beginning
    page.wait(f"{PLAYING} && document.getElementById('scrub').value < {steps}")
    page.find("#play").click()
    at = page.tick()
    time.sleep(0.15)
    assert page.tick() == at < steps
    page.find("#restart").click()
    page.wait(f"{PLAYING} && document.getElementById('scrub').value < {steps // 2}")


def test_it_waits_for_a_reader_who_wants_no_motion(page: Page) -> None:
    page.open(record(steps=4))
    time.sleep(1.1)
    assert page.tick() == 0
    page.find("#play").click()
    page.wait("document.getElementById('scrub').value > 0")


def test_every_still_reads_as_it_was_recorded(page: Page) -> None:
    rng = random.Random(3)
    both = [
        record("".join(rng.choice(ODD) for _ in range(40)) + NASTY, steps=12, remask=0.1),
        record(steps=12, remask=0.05, prompt=9),
    ]
    page.open(*both)
    for tick in range(13):
        page.scrub(tick)
        shown = [recording.frames[tick] for recording in both]
        assert page.texts() == [units(still.text) for still in shown]
        assert page.states() == [cell.state for still in shown for cell in still.tokens]
    assert page.texts() == [units(recording.text) for recording in both]


def test_tokens_that_add_nothing_or_a_line_are_there(page: Page) -> None:
    texts = ["", "\n", " ", "a\n", "\n b"]
    stills = [
        TrajectoryFrame(
            step, step, tuple(TokenState(text if step else "", "revealed" if step else "hidden") for text in texts)
        )
        for step in range(2)
    ]
    page.open(Trajectory("odd", "".join(texts), tuple(stills)))
    assert min(page.widths(".text .ink")) > 2  # something to point at
    page.press("\ue010")  # End
    assert page.texts() == [units("\n a\n\n b")]


def test_steps_and_keys(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(story())
    page.find("#forward").click()
    page.find("#forward").click()
    assert page.tick() == 2 and page.states() == ["given", "remasked", "hidden"] and page.said(".step") == ["20"]
    page.find("#back").click()
    assert page.tick() == 1 and page.texts() == [units("The cat")] and page.said(".nfe") == ["11"]
    page.run("document.activeElement.blur()")
    for key, tick in [(Keys.RIGHT, 2), (Keys.LEFT, 1), (Keys.END, 5), (Keys.RIGHT, 5), (Keys.HOME, 0), (Keys.LEFT, 0)]:
        page.press(key)
        assert page.tick() == tick
    page.press(" ")
    page.wait(PLAYING)
    page.press(" ")
    page.wait(f"!{PLAYING}")
    page.find("#scrub").send_keys(Keys.HOME, Keys.RIGHT, Keys.RIGHT)
    assert page.tick() == 2  # once for each, whoever hears the key


def test_the_card_tells_history_and_guesses(page: Page) -> None:
    page.open(story())
    page.scrub(2)
    page.point(".text .cell:nth-child(2)")
    card = page.find("#card")
    assert card.is_displayed()
    assert page.said("#card .name") == ["remaskedtoken 2 of 3"]
    assert page.said("#card .guesses q") == ["␣dog", "<b>bold</b>", "␣cat"]
    assert page.said("#card .share-of") == ["62.5%", "25.0%", "12.5%"]
    bars = page.widths("#card .meter i")
    assert bars[0] == pytest.approx(2.5 * bars[1], rel=0.02) and bars[1] > bars[2] > 0
    assert "anchor network at step 20" in card.text
    told = ["hidden", "revealed as “␣cat”", "remasked", "revealed as “␣dog”"]
    assert page.said("#card .history li span:last-child") == told
    assert page.said("#card .history li span:first-child") == ["step 0", "step 10", "step 20", "step 40"]
    assert page.said("#card .history .now span:last-child") == ["remasked"]
    page.press("\ue014")  # →: the card goes with the step
    page.press("\ue014")
    assert page.said("#card .name") == ["␣dogrevealed · token 2 of 3"]
    assert "anchor network at step 30" in card.text  # the last ones it had
    page.point("h1")
    assert not card.is_displayed()


def test_the_card_follows_the_focus(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(story())
    page.press(Keys.TAB)  # the text is one stop, its first token
    assert page.said("#card .name") == ["Thegiven · token 1 of 3"]
    assert page.said("#card .history li span:last-child") == ["given: “The”"] and not page.said("#card .guesses")
    page.press(Keys.DOWN, Keys.DOWN)
    assert page.said("#card .name") == ["hiddenanchor · token 3 of 3"]
    page.press(Keys.UP)
    assert page.said("#card .name") == ["hiddenanchor · token 2 of 3"]
    described = page.run("return document.activeElement.getAttribute('aria-describedby')")
    assert described == "card" and page.find("#card").is_displayed()
    page.press(Keys.ESCAPE)
    assert not page.find("#card").is_displayed()
    page.find(".text .cell:nth-child(3)").click()
    page.point("h1")
    assert page.find("#card").is_displayed()  # a tap stays


def shades(page: Page, selector: str) -> dict[str, str]:
    names = ["backgroundColor", "backgroundImage", "color", "textDecorationLine", "textDecorationStyle", "boxShadow"]
    script = "const s = getComputedStyle(document.querySelector(arguments[0])); return arguments[1].map((n) => s[n])"
    return dict(zip(names, page.run(script, selector, names)))


def test_states_differ_by_more_than_color(page: Page) -> None:
    page.open(record(steps=24, remask=0.06, prompt=5))
    page.scrub(14)
    looks = {
        state: shades(page, f".text .cell[data-state={state}] .ink")
        for state in ("hidden", "remasked", "revealed", "visible", "given")
    }
    names = ("backgroundImage", "textDecorationLine", "textDecorationStyle")
    marks = {tuple(look[name] for name in names) for look in looks.values()}
    hidden, visible = looks["hidden"], looks["visible"]
    assert len(marks) == 4 and hidden["color"] == "rgba(0, 0, 0, 0)" != visible["color"]  # a block has no letters
    anchor = shades(page, ".text .cell.anchor[data-state=hidden] .ink")
    other = shades(page, ".text .cell[data-state=hidden]:not(.anchor) .ink")
    assert anchor["boxShadow"] != other["boxShadow"]


GUESS = "getComputedStyle(document.querySelector('.text .cell:nth-child(2) .ink'), '::after').content"


def test_guesses_can_be_hidden(page: Page) -> None:
    page.open(story())
    assert "dog" in page.run(f"return {GUESS}")
    with_guesses = shades(page, ".text .cell:nth-child(2) .ink")["backgroundColor"]
    page.press("g")
    assert "dog" not in page.run(f"return {GUESS}")
    assert shades(page, ".text .cell:nth-child(2) .ink")["backgroundColor"] != with_guesses
    page.find("#guesses").click()
    assert "dog" in page.run(f"return {GUESS}")


def test_side_by_side_on_one_timeline(page: Page) -> None:
    long, short = record(steps=30, title="long"), record(steps=10, title="short")
    page.open(long, short)
    tops = page.run("return [...document.querySelectorAll('.panel')].map((e) => e.getBoundingClientRect().top)")
    assert len(tops) == 2 and tops[0] == tops[1]
    assert page.said("h2") == ["long", "short"]
    for tick, steps in [(0, ["0", "0"]), (15, ["15", "5"]), (16, ["16", "5"]), (29, ["29", "10"]), (30, ["30", "10"])]:
        page.scrub(tick)
        assert page.said(".step") == steps and page.said(".nfe") == steps
    assert page.texts() == [units(long.text), units(short.text)]
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 340, "height": 700, "deviceScaleFactor": 1, "mobile": True}
    )
    tops = page.run("return [...document.querySelectorAll('.panel')].map((e) => e.getBoundingClientRect().top)")
    assert tops[1] > tops[0] + 100
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def places(page: Page) -> Sequence[Sequence[float]]:
    script = "return [...document.querySelectorAll('.text .cell')].map((e) => [e.offsetLeft, e.offsetTop])"
    return page.run(script)


def test_the_page_stands_still_while_its_text_appears(page: Page) -> None:
    page.open(record(steps=8))
    first = places(page)
    for tick in (3, 8):
        page.scrub(tick)
        for before, now in zip(first, places(page), strict=True):
            assert now[1] == before[1] and abs(now[0] - before[0]) < 4  # a comma moves under the letter before it


def test_settings_fold_out(page: Page) -> None:
    page.open(story())
    assert not page.find("dl").is_displayed()
    page.find("summary").click()
    assert page.find("dl").is_displayed()
    assert page.said("dt") == ["sampler", "top_p", "network evaluations", "seconds"]
    assert page.said("dd") == ["remask_cap", "0.9", "55", "0.5"]


def test_light_and_dark(page: Page) -> None:
    page.open(story())
    shade = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert min(page.run(shade)) > 200
    media(page.driver, prefers_color_scheme="dark")
    assert max(page.run(shade)) < 60


def test_markup_in_a_text_is_text(page: Page) -> None:
    alarm = "<script>window.broken=1</script><img src=x onerror='window.broken=1'>"
    cells = (TokenState(alarm, "given"), TokenState("", "hidden", ((alarm, 0.5),)))
    last = (TokenState(alarm, "given"), TokenState("</script><!--", "revealed"))
    stills = (TrajectoryFrame(0, 0, cells), TrajectoryFrame(1, 1, last))
    page.open(
        Trajectory(alarm, alarm + "</script><!--", stills, 0.0, {alarm: alarm}, alarm), nasty(), title=f"{alarm}{NASTY}"
    )
    assert page.said("h1")[0].startswith(alarm) and page.said("h2")[0] == alarm
    assert page.said("dt")[0] == page.said("dd")[0] == alarm and page.said("title")[0].startswith(alarm)
    page.point(".text .cell:nth-child(2)")
    assert page.said("#card .guesses q") == [alarm.replace(" ", "␣")]
    assert alarm in page.said("#card h3")[0]
    page.point("h1")
    page.scrub(1)
    assert page.texts() == [units(alarm + "</script><!--"), units(NASTY)]
    assert page.run("return window.broken") is None
    assert len(page.said("script")) == 2 and not page.said("img, h1 *, h2 *, dd *, .text :not(span)")


def test_the_policy_refuses_what_is_not_the_page_s_own(page: Page) -> None:
    page.open(story())
    page.run("const s = document.createElement('script'); s.textContent = 'window.broken = 1'; document.body.append(s)")
    page.run("const i = document.createElement('img'); i.src = 'missing.png'; document.body.append(i)")
    assert page.run("return window.broken") is None
    page.wait("document.querySelector('img').complete")
    refused = console(page.driver)
    assert len(refused) == 2 and all("Content Security Policy" in each for each in refused)
    requests(page.driver)  # the refused one is told as well
    page.open(story())


def test_one_still_is_a_page_without_a_timeline(page: Page) -> None:
    page.open(Trajectory("done", "x", (TrajectoryFrame(7, 9, (TokenState("x", "given"),)),)), moving=True)
    assert page.texts() == [units("x")] and page.said(".step") == ["7"] and page.said(".nfe") == ["9"]
    assert not page.find("#play").is_enabled() and not page.find("#scrub").is_enabled()
