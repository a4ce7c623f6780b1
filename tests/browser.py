"""A browser without a window for the tests of pages; what it logged and what it asked the network for."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,900",
)


def missing() -> list[str]:
    """What a browser test needs and does not find."""
    programs = [
        f"{names[0]} (install the system's package)"
        for names in (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",))
        if program(*names) is None
    ]
    absent = importlib.util.find_spec("selenium") is None
    return programs + ["selenium (pip install 'adlm[dev]')"] * absent


def program(*names: str) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)


@contextmanager
def open_browser(folder: Path) -> Iterator[Any]:
    """A headless Chromium, its profile in `folder`; without one a test is skipped, or fails where it must be there."""
    if absent := missing():
        told = f"a browser test needs {', '.join(absent)}"
        if os.environ.get("ADLM_ALL") == "1":
            pytest.fail(told)
        pytest.skip(told)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium", "chromium-browser", "google-chrome") or ""
    for switch in (*SWITCHES, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(program("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def media(driver: Any, **features: str) -> None:
    """What the page is told about the reader's wishes: `prefers_color_scheme="dark"`."""
    wishes = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wishes})


def console(driver: Any) -> list[str]:
    """What pages wrote to the console since the last call, errors and refusals of the policy included."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver: Any) -> list[str]:
    """The addresses that pages asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
