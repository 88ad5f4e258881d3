"""Browser: Debian's Chromium without a window, for tests and pictures of pages (`make chromium`).

Verbs: `find_chromium`, `open_browser`, `look` (width and colours of the window), `save` (a picture of the whole page),
`messages` (what the console has told).
"""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)
MISSING = "there is no Chromium: make chromium"


def find_chromium() -> tuple[str, str] | None:
    """The browser and its driver."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser that knows nothing of earlier ones.

    Raises:
        FileNotFoundError: there is none on this machine.
    """
    binaries = find_chromium()
    if binaries is None:
        raise FileNotFoundError(MISSING)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binaries[0]
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(binaries[1]))
    try:
        look(driver)
        yield driver
    finally:
        driver.quit()


def look(driver: Any, width: int = 1240, *, is_dark: bool = False) -> None:
    """How wide the window is, and which colours a reader prefers."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def save(driver: Any, path: Path) -> None:
    """The whole page as PNG of 256 colours, which a page of text and bars does not exceed to the eye."""
    from PIL import Image

    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    picture = Image.open(io.BytesIO(base64.b64decode(taken["data"])))
    picture.convert("RGB").quantize(256).save(path, optimize=True)


def messages(driver: Any) -> list[str]:
    """What the console was told since the last time, but for replies with status 40x."""
    return [entry["message"] for entry in driver.get_log("browser") if "status of 40" not in entry["message"]]
