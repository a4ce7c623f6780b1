"""A headless browser for the tests of pages, its console and its network requests."""

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1000,900"
)


@contextmanager
def open_browser(folder: Path) -> Iterator[Any]:
    """Context manager: a headless Chromium with its profile in `folder`; skips the test where there is none."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver_path, selenium = shutil.which("chromedriver"), importlib.util.find_spec("selenium")
    if not (browser and driver_path and selenium):
        message = "a browser test needs chromium and chromedriver (system packages) and selenium (the extra dev)"
        (pytest.fail if os.environ.get("ADLM_ALL") == "1" else pytest.skip)(message)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for switch in (*SWITCHES.split(), f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(driver_path))
    try:
        yield driver
    finally:
        driver.quit()


def emulate_media(driver: Any, **features: str) -> None:
    """Set media features such as `prefers_color_scheme="dark"`."""
    values = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": values})


def read_console(driver: Any) -> list[str]:
    """What pages wrote to the console since the last call, errors and refusals of the policy included."""
    return [entry["message"] for entry in driver.get_log("browser")]


def read_requests(driver: Any) -> list[str]:
    """The addresses that pages requested since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
