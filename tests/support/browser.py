"""A real headless Chromium for tests of pages; skipped with the reason where there is none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1400,900 "
    "--force-prefers-reduced-motion --in-process-gpu --disable-gpu-compositing"
    " --renderer-process-limit=1 "
    "--disable-features=BackForwardCache,ProactivelySwapBrowsingInstance,SpareRendererForSitePerProcess"
).split()
"""The last two lines: one process draws all pages, instead of a new one for each, and nothing that
no test looks at."""
PHONE_WIDTH = 390
"""Pixels, as CSS counts them."""
SHELL = Path("/usr/lib/chromium/chromium-headless-shell")
"""The same browser without its window: a third less CPU time. Not Debian's script for it, which a
signal ends alone."""
PAUSE_S = 20.0
"""How long a test waits for the page at most."""


class Page:
    """One browser window, with the few moves that tests need."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, url: str) -> None:
        """Go to ``url`` anew, also when only what stands behind ``#`` differs."""
        self.driver.get("about:blank")
        self.driver.get(url)
        self.wait(lambda: self.js("return Boolean(document.getElementById('main')?.dataset.ready)"))

    def leave(self) -> None:
        """Go nowhere: the page asks its server for nothing more."""
        self.driver.get("about:blank")

    def js(self, script: str, *arguments: Any) -> Any:
        """What ``script`` returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: Callable[[], Any], timeout_s: float = PAUSE_S) -> Any:
        """What ``condition`` returns once it is true."""
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.support.ui import WebDriverWait

        def holds(_: Any) -> Any:
            try:
                return condition()
            except WebDriverException:  # an element that was just replaced
                return False

        return WebDriverWait(self.driver, timeout_s, poll_frequency=0.1).until(holds)

    def wait_text(self, text: str, where: str = "main") -> None:
        """Wait until the page shows ``text``."""
        self.wait(lambda: text in self.text(where))

    def text(self, where: str = "main") -> str:
        """What a reader sees of the first element of a CSS selector."""
        return str(self.js("return document.querySelector(arguments[0])?.innerText || ''", where))

    def texts(self, where: str) -> list[str]:
        """What a reader sees of every element of a CSS selector."""
        return list(
            self.js(
                "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", where
            )
        )

    def count(self, where: str) -> int:
        """How many elements there are."""
        return self.js("return document.querySelectorAll(arguments[0]).length", where)

    def find(self, where: str) -> Any:
        """The first element of a CSS selector, once it is there."""
        return self.wait(lambda: self.driver.find_elements("css selector", where))[0]

    def choose(self, label: str, value: str) -> None:
        """Take an option of the select box with this label."""
        from selenium.webdriver.support.ui import Select

        Select(self.find(f'select[aria-label="{label}"]')).select_by_value(value)

    def press(self, *keys: str) -> None:
        """Press keys, as a person at the page does."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        for key in keys:
            ActionChains(self.driver).send_keys(getattr(Keys, key, key)).perform()

    def picture(self, name: str) -> None:
        """Keep a picture of the window in the folder that ``VF_SCREENSHOTS`` names; without one,
        take none."""
        if folder := os.environ.get("VF_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(f"{folder}/{re.sub(r'[^a-z0-9-]', '-', name)}.png")

    def complaints(self) -> list[str]:
        """What the browser's console holds since the last look: errors and refusals
        of the policy."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
        ]


def start() -> Any:
    """A driver; the driver makes the profile. Skips where selenium or Chromium is missing."""
    selenium = pytest.importorskip("selenium", reason="selenium is not installed")
    del selenium
    from selenium import webdriver

    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver on the path")
    # a driver refuses the browser of another version
    if SHELL.is_file() and _version(str(SHELL)) == _version(driver):
        binary = str(SHELL)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=driver)
    )


def _version(program: str) -> str | None:
    """The major version that a program prints."""
    printed = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False
    ).stdout
    match = re.search(r"\d+", printed)
    return match and match[0]


def pages() -> Iterator[Page]:
    """A page, closed at the end."""
    driver = start()
    try:
        yield Page(driver)
    finally:
        driver.quit()


def too_wide(page: Page) -> list[str]:
    """Elements that reach over the edge of the screen and do not lie in one that scrolls."""
    return page.js("""
        const scrolls = (e) => e && (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(e).overflowX)
            || scrolls(e.parentElement));
        return [...document.querySelectorAll("body *")]
            .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement))
            .map((e) => `${e.tagName}.${e.getAttribute("class")} ${Math.round(e.getBoundingClientRect().right)}`);
    """)
