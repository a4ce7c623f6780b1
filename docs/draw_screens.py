"""Draw the pictures of the README: `python docs/draw_screens.py` (needs Pillow, selenium and Chromium).

docs/denoising.gif   one text being generated     docs/terminal.svg   two samplers in a terminal
docs/player.png      the same two in the HTML player
docs/images/page*.png   the server's page: two samplers, a text with holes in the dark, on a phone
"""

from __future__ import annotations

import sys
import time
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

import adlm
from adlm.view.terminal import DenoisingView

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # for tests.browser

PROMPT, LENGTH, STEPS, TOP_P, SEED = (
    "The old man ",
    64,
    96,
    0.8,
    1,
)  # seeds chosen for readable texts
MOMENT = 0.4  # of all steps: the frame of the still pictures


def main() -> None:
    lm = adlm.load(device="cpu")
    trajectories = [
        lm.record(
            PROMPT,
            length=LENGTH,
            steps=STEPS,
            top_p=TOP_P,
            seed=SEED,
            sampler=sampler,
            title=f"{lm.name} · {sampler}",
        )
        for sampler in ("remask_loop", "ancestral")
    ]
    adlm.write_gif(trajectories[:1], HERE / "denoising.gif")
    draw_terminal(trajectories, HERE / "terminal.svg")
    draw_page(trajectories, HERE / "player.png")
    draw_served_page(lm, HERE / "images")


def draw_terminal(trajectories: list[adlm.Trajectory], path: Path) -> None:
    """Draw one frame of the live view."""
    console = Console(
        record=True, width=110, force_terminal=True, file=StringIO(), color_system="truecolor"
    )
    frames = [
        trajectory.frames[int(MOMENT * len(trajectory.frames))] for trajectory in trajectories
    ]
    titles = [trajectory.title for trajectory in trajectories]
    console.print(DenoisingView(frames, titles, [STEPS, STEPS]))
    console.save_svg(str(path), title="adlm sample --compare ancestral")


def draw_page(trajectories: list[adlm.Trajectory], path: Path) -> None:
    """Take a screenshot of the player at that frame, with the predictions of one token open."""
    from selenium.webdriver import ActionChains

    from tests.browser import emulate_media, open_browser

    with TemporaryDirectory() as folder, open_browser(Path(folder)) as driver:
        page = adlm.write_player(
            trajectories, Path(folder) / "page.html", title="Two samplers on one seed"
        )
        driver.set_window_size(1180, 860)
        emulate_media(driver, prefers_reduced_motion="reduce")
        driver.get(page.as_uri())
        driver.execute_script(
            f"scrub.value = {int(MOMENT * STEPS)}; scrub.dispatchEvent(new Event('input'))"
        )
        tokens = driver.find_elements("css selector", ".text .token[data-state=hidden]")
        ActionChains(driver).move_to_element(tokens[3]).perform()
        driver.save_screenshot(str(path))


def draw_served_page(lm: adlm.LM, folder: Path) -> None:
    """Take screenshots of the server's page while a reader scrubs."""
    from PIL import Image
    from selenium.webdriver import ActionChains

    from adlm.serve.app import create_app
    from tests.browser import emulate_media, open_browser
    from tests.serve.servers import run_server

    two = "text=The+old+man&sampler=remask_loop&steps=96&compare=1&sampler2=ancestral&steps2=96&top_p=0.8&seed=0"
    holes = "text=The+old+man+___{6}+to+the+window,+and+___{8}+the+rain.&seed=5"
    pictures = {"page": (1100, 860, "light", two), "page_dark": (760, 800, "dark", holes)}
    pictures["page_phone"] = (390, 844, "light", holes)
    folder.mkdir(exist_ok=True)
    with (
        TemporaryDirectory() as profile,
        open_browser(Path(profile)) as driver,
        run_server(create_app(lm)) as address,
    ):
        for name, (width, height, scheme, link) in pictures.items():
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            emulate_media(driver, prefers_reduced_motion="reduce", prefers_color_scheme=scheme)
            driver.get("about:blank")
            driver.get(f"{address}/#{link}")
            wait_for(driver, "document.getElementsByName('model')[0].options.length")
            driver.find_element("id", "run").click()
            wait_for(driver, "document.querySelector('.panel:last-child .total').textContent")
            driver.execute_script(
                f"scrub.value = {MOMENT} * scrub.max; scrub.dispatchEvent(new Event('input'))"
            )
            if name == "page":
                tokens = driver.find_elements(
                    "css selector", ".panel:last-child .token[data-state=hidden]"
                )
                ActionChains(driver).move_to_element(tokens[2]).perform()
            driver.execute_script("scrollTo(0, 0)")
            picture = Image.open(BytesIO(driver.get_screenshot_as_png())).convert("RGB")
            picture.quantize(256, kmeans=3).save(folder / f"{name}.png", optimize=True)


def wait_for(driver: Any, condition: str) -> None:
    """Wait until a condition of a page holds."""
    while not driver.execute_script(f"return {condition}"):
        time.sleep(0.05)


if __name__ == "__main__":
    main()
