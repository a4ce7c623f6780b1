"""The player's page in a browser: it plays, steps and scrubs, shows a token's history, and shows text as text."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adlm.view.player import write_player
from adlm.view.trajectory import TokenState, Trajectory, TrajectoryFrame
from tests.browser import emulate_media, open_browser, read_console, read_requests
from tests.view.test_player import NASTY, nasty, units
from tests.view.trajectories import make_trajectory, simulate

pytestmark = pytest.mark.slow  # `make test` needs no browser

# One token that is given, one that is revealed, remasked and revealed again, one that comes last.
STATES = (
    (("given", "The"),) * 6,
    (
        ("hidden", ""),
        ("revealed", " cat"),
        ("remasked", ""),
        ("hidden", ""),
        ("revealed", " dog"),
        ("visible", " dog"),
    ),
    (("hidden", ""),) * 5 + (("revealed", "."),),
)
ODD = [
    "",
    " a",
    "b ",
    "\n",
    "\n\n c",
    " ",
    "\t",
    "é",
    " 冬",
    "😀",
    "\ud83d",
    "\ude00",
    "<",
    "\u2028",
    "\x00",
    "\r\n",
]
PLAYING = "document.body.classList.contains('playing')"
SCRUB = "document.getElementById('scrub').value"
RIGHT, END = "\ue014", "\ue010"


def story() -> Trajectory:
    guesses = ((" dog", 0.625), ("<b>bold</b>", 0.25), (" cat", 0.125))
    frames = [
        TrajectoryFrame(
            10 * step,
            11 * step,
            tuple(TokenState(t, s, () if t else guesses, s == "hidden") for s, t in tokens),
        )
        for step, tokens in enumerate(zip(*STATES, strict=True))
    ]
    return Trajectory("a <i>story</i>", tuple(frames), 0.5, {"sampler": "remask_cap", "top_p": 0.9})


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


class Page:
    """An open page, by what a reader sees and does."""

    def __init__(self, driver: Any, folder: Path) -> None:
        from selenium.webdriver import ActionChains

        self.driver, self.folder = driver, folder
        self.actions = ActionChains(driver, duration=0)

    def open(self, *trajectories: Trajectory, moving: bool = False, title: str = "A title") -> None:
        emulate_media(self.driver, prefers_reduced_motion="no-preference" if moving else "reduce")
        self.driver.get(write_player(trajectories, self.folder / "page.html", title=title).as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def map(self, selector: str, expression: str) -> list[Any]:
        """An expression of every element `e` that the selector finds."""
        return self.run(
            f"return [...document.querySelectorAll(arguments[0])].map((e) => {expression})",
            selector,
        )

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def content(self, selector: str) -> list[str]:
        """The text of every element, shown or not; a lone surrogate cannot come this way."""
        return self.map(selector, "e.textContent.toWellFormed()")

    def texts(self) -> list[bytes]:
        """The texts of the panels, whatever they hold: numbers come this way unchanged."""
        texts = self.map(
            ".text",
            "[...Array(e.textContent.length).keys()].map((i) => e.textContent.charCodeAt(i))",
        )
        return [b"".join(unit.to_bytes(2, "little") for unit in text) for text in texts]

    def states(self) -> list[str]:
        return self.map(".text .token", "e.dataset.state")

    def shades(self, selector: str) -> dict[str, str]:
        names = (
            "backgroundColor backgroundImage color textDecorationLine textDecorationStyle boxShadow"
        )
        script = (
            "const s = getComputedStyle(document.querySelector(arguments[0])); "
            "return arguments[1].map((n) => s[n])"
        )
        return dict(zip(names.split(), self.run(script, selector, names.split())))

    def press(self, *keys: str) -> None:
        self.actions.send_keys(*keys).perform()

    def point(self, selector: str) -> None:
        self.actions.move_to_element(self.find(selector)).perform()

    def scrub(self, tick: int) -> None:
        self.run("scrub.value = arguments[0]; scrub.dispatchEvent(new Event('input'))", tick)

    def tick(self) -> int:
        return int(self.content("#tick")[0].split(" / ")[0])

    def wait(self, condition: str, seconds: float = 8.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"return {condition}"):
            assert time.monotonic() < end, f"not within {seconds} s: {condition}"
            time.sleep(0.02)


@pytest.fixture
def page(driver: Any, tmp_path: Path) -> Iterator[Page]:
    """A page; whatever a test does with it, the console stays empty and nothing is requested from the network."""
    driver.get("about:blank")
    read_console(driver), read_requests(driver)
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    yield Page(driver, tmp_path)
    assert read_console(driver) == []
    requests = read_requests(driver)
    assert all(url.startswith(("file:", "data:")) for url in requests), requests
    assert {url for url in requests if url.startswith("file:")} == {
        (tmp_path / "page.html").as_uri()
    }


def test_it_plays_to_the_end_and_again_on_request(page: Page) -> None:
    steps = 200  # many: a busy machine looks late, and must still find it playing
    page.open(simulate(steps=steps), moving=True)
    page.wait(PLAYING)
    page.wait(f"{SCRUB} > 2")
    assert page.find("#play").get_attribute("aria-label") == "Pause"
    page.find("#speed").send_keys("8")
    page.wait(f"{SCRUB} === '{steps}'", seconds=60)
    page.wait(f"!{PLAYING}")
    assert page.content(".step") == page.content(".nfe") == [str(steps)]
    assert page.texts() == [units(simulate().text)]
    page.find("#speed").send_keys("1")  # or all of it could be over before a busy machine looks
    page.find("#play").click()  # at the end: from the beginning
    page.wait(f"{PLAYING} && {SCRUB} < {steps}")
    page.find("#play").click()
    at = page.tick()
    time.sleep(0.15)
    assert page.tick() == at < steps
    page.find("#restart").click()
    page.wait(f"{PLAYING} && {SCRUB} < {steps // 2}")


def test_with_reduced_motion_it_waits(page: Page) -> None:
    page.open(simulate(steps=4))
    time.sleep(1.1)
    assert page.tick() == 0
    page.find("#play").click()
    page.wait(f"{SCRUB} > 0")


def test_every_frame_is_shown_as_it_was_recorded(page: Page) -> None:
    rng = random.Random(3)
    odd = "".join(rng.choice(ODD) for _ in range(40)) + NASTY
    both = [simulate(odd, steps=12, remask=0.1), simulate(steps=12, remask=0.05, prompt=9)]
    page.open(*both)
    for tick in range(13):
        page.scrub(tick)
        frames = [trajectory.frames[tick] for trajectory in both]
        assert page.texts() == [units(frame.text) for frame in frames]
        assert page.states() == [token.state for frame in frames for token in frame.tokens]


def test_a_token_of_white_space_has_a_block(page: Page) -> None:
    texts = ["", "\n", " ", "a\n", "\n b"]
    page.open(
        make_trajectory(
            [TokenState("", "hidden")] * 5, [TokenState(text, "revealed") for text in texts]
        )
    )
    assert (
        min(page.map(".text .ink", "e.getBoundingClientRect().width")) > 2
    )  # something to point at
    page.press(END)
    assert page.texts() == [units("\n a\n\n b")]


def test_steps_and_keys(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(story())
    page.find("#forward").click()
    page.find("#forward").click()
    assert (
        page.tick() == 2
        and page.states() == ["given", "remasked", "hidden"]
        and page.content(".step") == ["20"]
    )
    page.find("#back").click()
    assert (
        page.tick() == 1 and page.texts() == [units("The cat")] and page.content(".nfe") == ["11"]
    )
    page.run("document.activeElement.blur()")
    for key, tick in [
        (Keys.RIGHT, 2),
        (Keys.LEFT, 1),
        (Keys.END, 5),
        (Keys.RIGHT, 5),
        (Keys.HOME, 0),
        (Keys.LEFT, 0),
    ]:
        page.press(key)
        assert page.tick() == tick
    page.press(" ")
    page.wait(PLAYING)
    page.press(" ")
    page.wait(f"!{PLAYING}")
    page.find("#scrub").send_keys(Keys.HOME, Keys.RIGHT, Keys.RIGHT)
    assert page.tick() == 2  # once for each, whoever hears the key


def test_the_card_shows_history_and_guesses(page: Page) -> None:
    page.open(story())
    page.scrub(2)
    page.point(".text .token:nth-child(2)")
    card = page.find("#card")
    assert card.is_displayed()
    assert page.content("#card .name") == ["remaskedtoken 2 of 3"]
    assert page.content("#card .guesses q") == ["␣dog", "<b>bold</b>", "␣cat"]
    assert page.content("#card .share-of") == ["62.5%", "25.0%", "12.5%"]
    bars = page.map("#card .meter i", "e.getBoundingClientRect().width")
    assert bars[0] == pytest.approx(2.5 * bars[1], rel=0.02) and bars[1] > bars[2] > 0
    assert "anchor network at step 20" in card.text
    history = ["hidden", "revealed as “␣cat”", "remasked", "revealed as “␣dog”"]
    assert page.content("#card .history li span:last-child") == history
    assert page.content("#card .history li span:first-child") == [
        "step 0",
        "step 10",
        "step 20",
        "step 40",
    ]
    assert page.content("#card .history .now span:last-child") == ["remasked"]
    page.press(RIGHT, RIGHT)  # the card follows the step
    assert page.content("#card .name") == ["␣dogrevealed · token 2 of 3"]
    assert "anchor network at step 30" in card.text  # the last guesses that it had
    page.point("h1")
    assert not card.is_displayed()


def test_the_card_follows_the_focus(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(story())
    page.press(Keys.TAB)  # the text is one stop, its first token
    assert page.content("#card .name") == ["Thegiven · token 1 of 3"]
    assert page.content("#card .history li span:last-child") == [
        "given: “The”"
    ] and not page.content("#card .guesses")
    page.press(Keys.DOWN, Keys.DOWN)
    assert page.content("#card .name") == ["hiddenanchor · token 3 of 3"]
    page.press(Keys.UP)
    assert page.content("#card .name") == ["hiddenanchor · token 2 of 3"]
    assert page.run("return document.activeElement.getAttribute('aria-describedby')") == "card"
    assert page.find("#card").is_displayed()
    page.press(Keys.ESCAPE)
    assert not page.find("#card").is_displayed()
    page.find(".text .token:nth-child(3)").click()
    page.point("h1")
    assert page.find("#card").is_displayed()  # a tap stays


def test_states_differ_by_more_than_color(page: Page) -> None:
    page.open(simulate(steps=24, remask=0.06, prompt=5))
    page.scrub(14)
    states = ("hidden", "remasked", "revealed", "visible", "given")
    looks = {state: page.shades(f".text .token[data-state={state}] .ink") for state in states}
    names = ("backgroundImage", "textDecorationLine", "textDecorationStyle")
    assert len({tuple(look[name] for name in names) for look in looks.values()}) == 4
    assert (
        looks["hidden"]["color"] == "rgba(0, 0, 0, 0)" != looks["visible"]["color"]
    )  # a block has no letters
    anchor = page.shades(".text .token.anchor[data-state=hidden] .ink")
    assert (
        anchor["boxShadow"]
        != page.shades(".text .token[data-state=hidden]:not(.anchor) .ink")["boxShadow"]
    )


def test_guesses_can_be_hidden(page: Page) -> None:
    page.open(story())
    guess = "return getComputedStyle(document.querySelector('.text .token:nth-child(2) .ink'), '::after').content"
    assert "dog" in page.run(guess)
    with_guesses = page.shades(".text .token:nth-child(2) .ink")["backgroundColor"]
    page.press("g")
    assert "dog" not in page.run(guess)
    assert page.shades(".text .token:nth-child(2) .ink")["backgroundColor"] != with_guesses
    page.find("#guesses").click()
    assert "dog" in page.run(guess)


def test_side_by_side_on_one_timeline(page: Page) -> None:
    page.open(simulate(steps=30, title="long"), simulate(steps=10, title="short"))
    tops = page.map(".panel", "e.getBoundingClientRect().top")
    assert len(tops) == 2 and tops[0] == tops[1]
    assert page.content("h2") == ["long", "short"]
    for tick, steps in [
        (0, ["0", "0"]),
        (15, ["15", "5"]),
        (16, ["16", "5"]),
        (29, ["29", "10"]),
        (30, ["30", "10"]),
    ]:
        page.scrub(tick)
        assert page.content(".step") == page.content(".nfe") == steps
    size = {"width": 340, "height": 700, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    tops = page.map(".panel", "e.getBoundingClientRect().top")
    assert tops[1] > tops[0] + 100
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def test_words_do_not_move_while_the_text_appears(page: Page) -> None:
    page.open(simulate(steps=8))
    first = page.map(".text .token", "[e.offsetLeft, e.offsetTop]")
    for tick in (3, 8):
        page.scrub(tick)
        for before, now in zip(
            first, page.map(".text .token", "[e.offsetLeft, e.offsetTop]"), strict=True
        ):
            assert (
                now[1] == before[1] and abs(now[0] - before[0]) < 4
            )  # a comma moves under the letter before it


def test_settings_and_colors(page: Page) -> None:
    page.open(story())
    assert not page.find("dl").is_displayed()
    page.find("summary").click()
    assert page.find("dl").is_displayed()
    assert page.content("dt") == ["sampler", "top_p", "network evaluations", "seconds"]
    assert page.content("dd") == ["remask_cap", "0.9", "55", "0.5"]
    shade = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert min(page.run(shade)) > 200
    emulate_media(page.driver, prefers_color_scheme="dark")
    assert max(page.run(shade)) < 60


def test_markup_in_a_text_is_text(page: Page) -> None:
    alarm = "<script>window.broken=1</script><img src=x onerror='window.broken=1'>"
    first = (TokenState(alarm, "given"), TokenState("", "hidden", ((alarm, 0.5),)))
    last = (TokenState(alarm, "given"), TokenState("</script><!--", "revealed"))
    frames = (TrajectoryFrame(0, 0, first), TrajectoryFrame(1, 1, last))
    page.open(
        Trajectory(alarm, frames, 0.0, {alarm: alarm}, alarm), nasty(), title=f"{alarm}{NASTY}"
    )
    assert page.content("h1")[0].startswith(alarm) and page.content("h2")[0] == alarm
    assert page.content("dt")[0] == page.content("dd")[0] == alarm and page.content("title")[
        0
    ].startswith(alarm)
    page.point(".text .token:nth-child(2)")
    assert page.content("#card .guesses q") == [alarm.replace(" ", "␣")]
    assert alarm in page.content("#card h3")[0]
    page.point("h1")
    page.scrub(1)
    assert page.texts() == [units(alarm + "</script><!--"), units(NASTY)]
    assert page.run("return window.broken") is None
    assert len(page.content("script")) == 2 and not page.content(
        "img, h1 *, h2 *, dd *, .text :not(span)"
    )


def test_the_policy_refuses_other_scripts_and_images(page: Page) -> None:
    page.open(story())
    page.run(
        "const s = document.createElement('script'); s.textContent = 'window.broken = 1'; document.body.append(s)"
    )
    page.run(
        "const i = document.createElement('img'); i.src = 'missing.png'; document.body.append(i)"
    )
    assert page.run("return window.broken") is None
    page.wait("document.querySelector('img').complete")
    refusals = read_console(page.driver)
    assert len(refusals) == 2 and all("Content Security Policy" in each for each in refusals)
    read_requests(page.driver)  # the refused one is listed as well
    page.open(story())


def test_one_frame_is_a_page_without_a_timeline(page: Page) -> None:
    page.open(
        Trajectory("done", (TrajectoryFrame(7, 9, (TokenState("x", "given"),)),)), moving=True
    )
    assert (
        page.texts() == [units("x")]
        and page.content(".step") == ["7"]
        and page.content(".nfe") == ["9"]
    )
    assert not page.find("#play").is_enabled() and not page.find("#scrub").is_enabled()
