"""The pictures of the README: `python docs/draw_screens.py` (Pillow, selenium and Chromium are needed).

docs/denoising.gif   a text on its way            docs/terminal.svg   two samplers in a terminal
docs/player.png      the same two on the page
"""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import adlm
from adlm.view.terminal import draw_panels

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # for the tests' browser

PROMPT, LENGTH, STEPS, TOP_P, SEED = "The old man ", 64, 96, 0.8, 1
MOMENT = 0.4  # of the way, for pictures that stand still


def main() -> None:
    lm = adlm.load(device="cpu")
    recordings = [
        lm.record(
            PROMPT, length=LENGTH, steps=STEPS, top_p=TOP_P, seed=SEED, sampler=sampler, title=f"{lm.name} · {sampler}"
        )
        for sampler in ("remask_loop", "ancestral")
    ]
    adlm.write_gif(recordings[:1], HERE / "denoising.gif")
    draw_terminal(recordings, HERE / "terminal.svg")
    draw_page(recordings, HERE / "player.png")


def draw_terminal(recordings: list[adlm.Trajectory], path: Path) -> None:
    """A moment of the live view."""
    console = Console(record=True, width=110, force_terminal=True, file=StringIO(), color_system="truecolor")
    stills = [recording.stills[int(MOMENT * len(recording.stills))] for recording in recordings]
    titles = [recording.title for recording in recordings]
    console.print(draw_panels(stills, titles, steps=[STEPS, STEPS]))
    console.save_svg(str(path), title="adlm sample --beside ancestral")


def draw_page(recordings: list[adlm.Trajectory], path: Path) -> None:
    """The page at that moment, with a card open."""
    from selenium.webdriver import ActionChains

    from tests.browser import media, open_browser

    with TemporaryDirectory() as folder, open_browser(Path(folder)) as driver:
        page = adlm.write_player(recordings, Path(folder) / "page.html", title="Two samplers on one seed")
        driver.set_window_size(1180, 860)
        media(driver, prefers_reduced_motion="reduce")
        driver.get(page.as_uri())
        driver.execute_script(f"scrub.value = {int(MOMENT * STEPS)}; scrub.dispatchEvent(new Event('input'))")
        cells = driver.find_elements("css selector", ".text .cell[data-state=hidden]")
        ActionChains(driver).move_to_element(cells[3]).perform()
        driver.save_screenshot(str(path))


if __name__ == "__main__":
    main()
