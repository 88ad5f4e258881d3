"""Browser: Debian's Chromium without a window, for tests of pages (`make chromium`).

Verbs: `find_chromium`, `open_browser` (skips a test where there is none), `messages` (what its console has told).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)


def find_chromium() -> tuple[str, str] | None:
    """The browser and its driver."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    return found if all(found) else None  # type: ignore[return-value]


@contextmanager
def open_browser(width: int = 1240, height: int = 1500) -> Iterator[Any]:
    """A browser that knows nothing of earlier ones."""
    binaries = find_chromium()
    if binaries is None:
        pytest.skip("there is no Chromium: make chromium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binaries[0]
    for flag in (*FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(binaries[1]))
    try:
        yield driver
    finally:
        driver.quit()


def messages(driver: Any) -> list[str]:
    """What the console was told since the last time, but for replies with status 40x."""
    return [entry["message"] for entry in driver.get_log("browser") if "status of 40" not in entry["message"]]
