"""A hand that counts: what it clicks, and the fields it types into."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from playwright.sync_api import Browser, Dialog, Locator, Page, sync_playwright

WINDOW: Final = {"width": 1600, "height": 1000}
"""Of the browser, in pixels: wide enough that neither page hides a column behind another."""
WAIT_MS: Final = 30_000


@dataclass
class Hand:
    """Uses a page as somebody does who knows the way.

    A link, a button, a tick, an entry of a menu and the answer to a question are a click each.
    A field is counted apart, once, with the click into it; scrolling and reading are not counted.
    """

    page: Page
    clicks: int = 0
    fields: int = 0
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("dialog", self._answer)

    def click(self, target: Locator) -> None:
        """Clicks what is there once, or becomes so."""
        self.clicks += 1
        target.click()

    def type(self, target: Locator, text: str) -> None:
        """Types into a field."""
        self.fields += 1
        target.fill(text)

    def download(self, target: Locator) -> str:
        """Clicks what downloads; the name of the file."""
        with self.page.expect_download() as download:
            self.click(target)
        return str(download.value.suggested_filename)

    def _answer(self, dialog: Dialog) -> None:
        self.clicks += 1
        self.asked.append(dialog.message)
        dialog.accept()


Journey = Callable[[Hand], None]
"""Does a task from the front page on, and ends when what it is for can be seen."""


def count(page: Page, journeys: Mapping[str, Journey | str]) -> dict[str, dict[str, int] | str]:
    """Clicks and fields of each task in order, or why there is no way to do it.

    Raises:
        playwright.sync_api.Error: what a task clicks, or what it is for, does not appear.
    """
    counts: dict[str, dict[str, int] | str] = {}
    for task, journey in journeys.items():
        if isinstance(journey, str):
            counts[task] = journey
            continue
        page.goto("about:blank")  # nothing of the task before stays, such as an open dialog
        page.goto("/")
        hand = Hand(page)
        journey(hand)
        page.remove_listener("dialog", hand._answer)
        counts[task] = {"clicks": hand.clicks, "fields": hand.fields}
    return counts


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser.

    Raises:
        SystemExit: it is not installed.
    """
    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("the program 'chromium' is not on PATH: `make test` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """A page of a server, in a browser that has not been there yet."""
    context = browser.new_context(base_url=url, locale="en-US", viewport=WINDOW)
    context.set_default_timeout(WAIT_MS)
    yield context.new_page()
    context.close()
