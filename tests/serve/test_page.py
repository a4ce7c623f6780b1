"""The page: what it is sent, and a reader who generates, infills, scrubs and compares in a browser."""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import pytest

from adlm import LM
from adlm.settings import DEFAULT_SAMPLER, DEFAULT_TEMPERATURE, DEFAULT_TOP_P
from adlm.view.trajectory import Trajectory
from tests.browser import emulate_media, open_browser, read_console, read_requests
from tests.text.models import lm
from tests.view.test_player_browser import END, Page, units

if os.environ.get("ADLM_ALL") != "1":
    for extra in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
        pytest.importorskip(extra)

from fastapi.testclient import TestClient

from adlm.serve.app import PAGE_FILES, create_app
from tests.serve.servers import run_server

ALARM = "<img src=x onerror='window.broken=1'>"
TEMPLATE = "the ___{4} sat on ___{3}."
QUICK: dict[str, Any] = {"steps": 6, "seed": 3}
RUNNING = "document.body.classList.contains('running')"
CONTROL, ENTER = "\ue009", "\ue007"
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
DESK = {"width": 1000, "height": 900, "deviceScaleFactor": 1, "mobile": False}


def read_drafts(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    response = client.post(f"/v1/{path}", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
    return [event["choices"][0]["draft"] for event in events]


@pytest.mark.parametrize("sampler", ["remask_loop", "confidence"])
def test_drafts_carry_the_tokens_of_a_recorded_trajectory(sampler: str) -> None:
    settings = {"sampler": sampler, **QUICK}
    recorded = {
        "infill": lm().record(template=TEMPLATE, guesses=2, **settings),
        "completions": lm().record("the", max_new_tokens=9, guesses=2, **settings),
    }
    bodies = {"infill": {"template": TEMPLATE}, "completions": {"prompt": "the", "max_tokens": 9}}
    with TestClient(create_app(lm())) as client:
        for path, trajectory in recorded.items():
            drafts = read_drafts(client, path, guesses=2, **bodies[path], **settings)
            assert drafts[-1]["settings"] == trajectory.settings
            for draft, frame in zip(drafts, trajectory.frames[1:], strict=True):
                assert (draft["step"], draft["nfe"]) == (frame.step, frame.nfe)
                for (state, text, is_anchor, guesses), token in zip(
                    draft["tokens"], frame.tokens, strict=True
                ):
                    assert (state, text, is_anchor) == (token.state, token.text, token.is_anchor)
                    assert [guess for guess, _ in guesses] == [guess for guess, _ in token.guesses]
                    assert [p for _, p in guesses] == pytest.approx(
                        [p for _, p in token.guesses], abs=1e-3
                    )


def test_several_models_are_chosen_by_name() -> None:
    with TestClient(create_app(lm(), name="first", others=[lm("mdlm"), lm("ar")])) as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert (
            list(cards) == ["first", "small mdlm", "small ar"]
            and cards["small ar"]["samplers"] == []
        )
        assert "remask_loop" in cards["first"]["samplers"] and cards["first"]["method"] == "adlm"
        for name, model in ((None, lm()), ("small mdlm", lm("mdlm"))):
            answer = client.post(
                "/v1/infill", json={"model": name, "template": TEMPLATE, **QUICK}
            ).json()
            assert answer["choices"][0]["text"] == model.infill(TEMPLATE, **QUICK)[0]
            assert answer["model"] == (name or "first")
        drafts = read_drafts(
            client, "completions", model="small ar", prompt="a", max_tokens=4, guesses=2, seed=1
        )
        assert drafts[-1]["text"] == lm("ar").generate("a", max_new_tokens=4, seed=1)[0]
        assert not any(guesses for draft in drafts for *_, guesses in draft["tokens"])
    with pytest.raises(ValueError, match="two models have the same name"):
        create_app(lm(), others=[lm()])


def test_the_files_are_served_without_a_key_and_load_nothing_from_elsewhere() -> None:
    with TestClient(create_app(lm(), api_key="secret")) as client:
        pages = {path: client.get(path) for path in PAGE_FILES}
        assert client.get("/v1/models").status_code == 401
    for path, answer in pages.items():
        assert (
            answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        ), path
        policy = answer.headers["content-security-policy"]
        assert (
            policy.startswith("default-src 'none';")
            and "unsafe" not in policy
            and "http" not in policy
        )
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|{{", answer.text
        ), path
    assert pages["/page.js"].headers["content-type"].startswith("text/javascript")
    index = pages["/"].text
    assert not re.search(r"<style|<script>|\son\w+=|\sstyle=", index)
    values = dict(re.findall(r'<input name="(\w+)"[^>]* value="([\d.]+)"', index))
    assert (float(values["temperature"]), float(values["top_p"])) == (
        DEFAULT_TEMPERATURE,
        DEFAULT_TOP_P,
    )
    listed = re.findall(r'<input name="(\w+)"[^>]* data-setting>', index)
    assert listed == ["temperature", "top_p", "top_k", "min_p", "block"]
    assert 'max="1" step="any" value="0.82" title="Nucleus: total probability' in index
    assert set(re.findall(r'(?:src|href)="([^"#:]+)"', index)) == {
        path[1:] for path in PAGE_FILES if path not in ("/", "/docs.js")
    }


# --- In a browser. ---


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server with a model, one whose name is markup, and a causal one."""
    nasty = LM(lm("mdlm").loaded, ALARM, device="cpu")
    with run_server(create_app(lm(), name="small", others=[nasty, lm("ar")])) as address:
        yield f"{address}/"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


class ServedPage(Page):
    """The page in a browser, by what a reader does."""

    def visit(self, address: str, **fields: Any) -> None:
        """Open the page with a link that holds these settings, and wait until it knows the models."""
        self.driver.get("about:blank")
        self.driver.get(f"{address}#{urlencode(fields)}")
        self.wait("document.getElementsByName('model')[0].options.length")

    def generate(self) -> None:
        self.find("#run").click()
        self.wait(f"!{RUNNING} && scrub.max > 0", seconds=30)

    def choose(self, name: str, value: str) -> None:
        """Choose an option by its value."""
        script = "const e = document.getElementsByName(arguments[0])[0]; e.value = arguments[1]"
        self.run(f"{script}; e.dispatchEvent(new Event('input', {{ bubbles: true }}))", name, value)

    def value(self, name: str) -> Any:
        return self.run("return document.getElementsByName(arguments[0])[0].value", name)

    def link(self) -> dict[str, str]:
        return {
            name: values[0]
            for name, values in parse_qs(self.driver.current_url.partition("#")[2]).items()
        }

    def check_frames(self, *trajectories: Trajectory) -> None:
        """Compare every frame with what was recorded, going back from the last one."""
        last = max(len(each.frames) for each in trajectories) - 1
        for tick in range(last, -1, -1):
            self.scrub(tick)
            frames = [
                each.frames[round(tick * (len(each.frames) - 1) / last)] for each in trajectories
            ]
            assert self.texts() == [units(frame.text) for frame in frames]
            assert self.states() == [token.state for frame in frames for token in frame.tokens]
            assert self.content(".nfe") == [str(frame.nfe) for frame in frames]


@pytest.fixture
def page(driver: Any, address: str, tmp_path: Path) -> Iterator[ServedPage]:
    """A page; whatever a test does with it, no foreign script runs and no request leaves the server."""
    driver.get("about:blank")
    read_console(driver), read_requests(driver)
    emulate_media(driver, prefers_reduced_motion="reduce", prefers_color_scheme="light")
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", DESK)
    yield (page := ServedPage(driver, tmp_path))
    assert page.run("return window.broken") is None and not page.content("img")
    assert read_console(driver) == []
    assert [
        url for url in read_requests(driver) if not url.startswith((address, "data:", "about:"))
    ] == []


@pytest.mark.slow
def test_generate_and_scrub(page: ServedPage, address: str) -> None:
    page.visit(address, text="the cat", max_tokens=12, **QUICK)
    page.generate()
    page.check_frames(lm().record("the cat", max_new_tokens=12, **QUICK))
    assert page.content("h2") == [f"small · {DEFAULT_SAMPLER}"] and page.find("#play").is_enabled()
    page.scrub(1)
    page.point(".text .token[data-state=hidden]")
    assert "Guesses of the anchor network at step 1" in page.find("#card").text
    assert len(page.content("#card .guesses li")) == 3
    page.point("h1")
    page.press(END)  # the keyboard plays, but not while a text is typed
    assert (
        page.tick() == 6
        and page.content(".total") == [" of 6"]
        and page.content(".time")[0].endswith(" s")
    )
    page.find("#text").send_keys(" g ")
    assert (
        page.value("text") == "the cat g "
        and page.find("#guesses").is_selected()
        and page.tick() == 6
    )


@pytest.mark.slow
def test_holes_are_put_and_filled(page: ServedPage, address: str) -> None:
    page.visit(address, text="a big cat", **QUICK)
    page.run("document.getElementById('text').setSelectionRange(2, 5)")  # the second word
    page.find("#hole").click()
    assert page.value("text") == "a ___ cat" and page.content("#mirror mark") == ["___"]
    page.press("{3}")
    assert page.value("text") == "a ___{3} cat" and page.content("#hint") == ["1 hole"]
    page.wait("location.hash.includes('%7B3%7D')")
    assert page.link()["text"] == "a ___{3} cat"
    page.actions.key_down(CONTROL).send_keys(ENTER).key_up(CONTROL).perform()
    page.wait(f"!{RUNNING} && scrub.max > 0")
    page.check_frames(lm().record(template="a ___{3} cat", **QUICK))


@pytest.mark.slow
def test_two_samplers_and_two_models_on_one_seed(page: ServedPage, address: str) -> None:
    page.visit(address, text="the", max_tokens=8, **QUICK)
    page.find("[name=compare]").click()
    for name, value in (
        ("sampler", "ancestral"),
        ("model2", ALARM),
        ("sampler2", "confidence"),
        ("steps2", "4"),
    ):
        page.find(f"[name={name}]").send_keys(value) if name == "steps2" else page.choose(
            name, value
        )
    page.generate()
    assert page.content("h2") == ["small · ancestral", f"{ALARM} · confidence"]
    both = [lm().record("the", max_new_tokens=8, sampler="ancestral", **QUICK)]
    both += [lm("mdlm").record("the", max_new_tokens=8, sampler="confidence", steps=4, seed=3)]
    page.check_frames(*both)
    page.choose("model", "small ar")  # a causal model has no samplers
    assert (
        not page.find("[name=sampler]").is_enabled() and page.find("[name=sampler2]").is_enabled()
    )
    page.generate()
    page.press(END)
    assert page.texts()[0] == units(lm("ar").generate("the", max_new_tokens=8, seed=3)[0])


@pytest.mark.slow
def test_a_link_holds_the_settings(page: ServedPage, address: str) -> None:
    given = {
        "text": 'a ___{2} "b" & <c>#%\n…',
        "model": "small",
        "sampler": "margin",
        "steps": "2",
        "compare": "1",
    }
    given |= {
        "model2": ALARM,
        "sampler2": "dfm",
        "steps2": "5",
        "seed": "8",
        "max_tokens": "9",
        "temperature": "0.5",
    }
    given |= {"top_p": "0.8", "min_p": "0.1", "block": "4", "guesses": "2"}
    page.visit(address, **given)
    page.find("#link").click()
    page.wait("document.getElementById('status').textContent !== ''")
    assert page.link() == given
    page.find("#reseed").click()
    assert page.link() != given and page.link() | {"seed": "8"} == given
    page.visit(address)  # without one: an example
    assert "___{" in page.value("text") and page.value("seed") == "1"
    page.find("header a").click()  # another example
    page.wait("location.hash !== ''")
    assert page.link()["text"] == page.value("text")


@pytest.mark.slow
def test_markup_in_text_link_and_names_is_text(page: ServedPage, address: str) -> None:
    page.visit(
        address,
        **dict.fromkeys(("text", "model2", "sampler", "seed", "steps", "block"), ALARM),
        max_tokens=4,
    )
    assert ALARM in page.content("#status")[0]  # the sampler, which there is not
    assert (
        page.value("text") == page.content("#mirror")[0].strip() == ALARM
        and page.value("seed") == ""
    )
    assert all("cannot be parsed" in line for line in read_console(page.driver))  # as numbers
    page.generate()  # with a seed of its own
    assert page.value("seed") != ""
    page.visit(address, text=f"{ALARM}___{{2}}", model=ALARM, seed=1)
    page.generate()
    assert page.texts()[0].startswith(units(ALARM)) and page.content("h2")[0].startswith(ALARM)
    page.find("summary").click()
    page.point(".text .token")
    assert ALARM in page.content("dd") and not page.content(
        "h2 *, dd *, #mirror :not(mark), #status *, option *"
    )


@pytest.mark.slow
def test_errors_and_stops_are_told(page: ServedPage, address: str) -> None:
    page.visit(address, text="a ___{x} b", seed=1)
    page.find("#run").click()
    page.wait("document.querySelector('#status.error')")
    assert "is not a hole" in page.content("#status")[0]
    page.visit(address, text="the", steps=4000, max_tokens=8, sampler="ancestral", seed=1)
    page.find("#run").click()
    page.wait("scrub.max > 3")
    assert page.find("#run").text == "Stop"
    page.find("#run").click()
    page.wait(f"!{RUNNING}")
    assert page.content("#status") == ["Stopped."] and page.find("#run").text == "Generate"
    page.scrub(1)
    assert page.content(".step") == ["1"]
    assert all("400" in line for line in read_console(page.driver))  # the refused request


@pytest.mark.slow
def test_an_api_key_is_asked_for(page: ServedPage) -> None:
    with run_server(create_app(lm(), name="small", api_key="secret")) as other:
        page.driver.get(f"{other}/#text=the&seed=1&steps=4&max_tokens=4")
        page.wait("document.querySelector('#status.error')")
        assert "API key" in page.content("#status")[0]
        page.find("#key").send_keys("secret\t")
        page.wait("document.getElementsByName('model')[0].options.length")
        page.generate()
        assert "secret" not in page.driver.current_url
        page.driver.get("about:blank")
    assert all("401" in line for line in read_console(page.driver))
    read_requests(page.driver)  # to the other server


@pytest.mark.slow
def test_no_barrier_is_found(page: ServedPage, address: str) -> None:
    """axe-core finds nothing to complain about, before the first text and with two of them, wherever it is read."""
    spec = importlib.util.find_spec("axe_playwright_python")
    if spec is None or spec.submodule_search_locations is None:
        message = "this test needs axe-playwright-python, whose axe.min.js it runs: make test-all installs it"
        (pytest.fail if os.environ.get("ADLM_ALL") == "1" else pytest.skip)(message)
    axe = (Path(spec.submodule_search_locations[0]) / "axe.min.js").read_text("utf-8")

    def find_barriers() -> list[tuple[str, list[str]]]:
        page.run(axe)
        found = page.driver.execute_async_script("const done = arguments[0]; axe.run().then(done)")[
            "violations"
        ]
        return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]

    for size in (DESK, PHONE):
        page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        page.visit(address)
        assert find_barriers() == []
        page.visit(address, text=TEMPLATE, sampler="remask_loop", compare=1, **QUICK)
        page.find("#more").click()
        page.generate()
        page.scrub(2)
        page.point(".text .token[data-state=hidden]")
        for scheme in ("light", "dark"):
            emulate_media(page.driver, prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
            assert find_barriers() == []
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    page.run("document.getElementById('text').labels[0].remove()")
    assert find_barriers()[0][0] == "label"  # it can find one
