"""Draw the pictures of the README: `python docs/draw_screens.py` (needs Pillow, selenium and Chromium).

docs/denoising.gif   one text being generated     docs/terminal.svg   two samplers in a terminal
docs/player.png      the same two in the HTML player
"""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import adlm
from adlm.view.terminal import DenoisingView

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # for tests.browser

PROMPT, LENGTH, STEPS, TOP_P, SEED = "The old man ", 64, 96, 0.8, 1
MOMENT = 0.4  # of all steps: the frame of the still pictures


def main() -> None:
    lm = adlm.load(device="cpu")
    trajectories = [
        lm.record(
            PROMPT, length=LENGTH, steps=STEPS, top_p=TOP_P, seed=SEED, sampler=sampler, title=f"{lm.name} · {sampler}"
        )
        for sampler in ("remask_loop", "ancestral")
    ]
    adlm.write_gif(trajectories[:1], HERE / "denoising.gif")
    draw_terminal(trajectories, HERE / "terminal.svg")
    draw_page(trajectories, HERE / "player.png")


def draw_terminal(trajectories: list[adlm.Trajectory], path: Path) -> None:
    """Draw one frame of the live view."""
    console = Console(record=True, width=110, force_terminal=True, file=StringIO(), color_system="truecolor")
    frames = [trajectory.frames[int(MOMENT * len(trajectory.frames))] for trajectory in trajectories]
    titles = [trajectory.title for trajectory in trajectories]
    console.print(DenoisingView(frames, titles, [STEPS, STEPS]))
    console.save_svg(str(path), title="adlm sample --compare ancestral")


def draw_page(trajectories: list[adlm.Trajectory], path: Path) -> None:
    """Take a screenshot of the player at that frame, with the predictions of one token open."""
    from selenium.webdriver import ActionChains

    from tests.browser import emulate_media, open_browser

    with TemporaryDirectory() as folder, open_browser(Path(folder)) as driver:
        page = adlm.write_player(trajectories, Path(folder) / "page.html", title="Two samplers on one seed")
        driver.set_window_size(1180, 860)
        emulate_media(driver, prefers_reduced_motion="reduce")
        driver.get(page.as_uri())
        driver.execute_script(f"scrub.value = {int(MOMENT * STEPS)}; scrub.dispatchEvent(new Event('input'))")
        tokens = driver.find_elements("css selector", ".text .token[data-state=hidden]")
        ActionChains(driver).move_to_element(tokens[3]).perform()
        driver.save_screenshot(str(path))


if __name__ == "__main__":
    main()
