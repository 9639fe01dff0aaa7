"""One server and one store of real runs for all journeys of a module, and one browser for all."""

import asyncio
import html
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, CDPSession, Page, expect, sync_playwright

from cairn import Run, annotate_run, annotate_step, fork_run, parse_uri, promote_step
from tests.service.planes import running_plane
from tests.service.stores import begin_saving, make_run
from tests.service.tiny_run import copy_tiny_run

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}

expect.set_options(timeout=60_000)  # what is heard of at once takes long beside other tests


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A trained run with metrics, its fork, one that is being written, and an empty one."""
    root = tmp_path_factory.mktemp("store")
    copy_tiny_run(root)
    run = Run.open(f"{root}/tiny")
    for step in (1, 2):
        annotate_step(
            run,
            step,
            labels={"data": "v1"},
            metrics={"loss": 2.0 / step, "eval/loss": math.exp(-step)},
            better={"loss": "min"},
            by="trainer",
        )
    annotate_run(run, {"owner": "ana"})
    promote_step(run, 1, "staging", by="ben", reason="first that learns", expect=None)
    fork_run(run, run.step(1), parse_uri(f"{root}/tiny-fork"), by="ana")
    begin_saving(make_run(root / "writing", [100, 200], labels={"owner": "chen"}), 300)
    make_run(root / "empty")
    return root


@pytest.fixture(scope="module")
def plane(trained, tmp_path_factory) -> Iterator[str]:
    with running_plane(trained, tmp_path_factory.mktemp("plane")) as (url, _):
        yield url


def launch() -> tuple[Browser, asyncio.AbstractEventLoop, Callable[[], None]]:
    """Chromium, the event loop that Playwright runs in this thread, and what ends both."""
    executable = shutil.which("chromium")
    assert executable, "chromium is not on PATH; `make test` installs it"
    playwright = sync_playwright().start()
    browser = playwright.chromium.launch(
        executable_path=executable,
        args=["--no-sandbox", "--disable-background-networking", "--disable-gpu"],
    )

    def end() -> None:
        browser.close()
        playwright.stop()

    return browser, asyncio.get_running_loop(), end


LAUNCHED = pytest.StashKey[tuple[Browser, asyncio.AbstractEventLoop]]()


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """Started once for all modules; between them, other tests run event loops of their own."""
    stash = request.config.stash
    if LAUNCHED not in stash:
        *stash[LAUNCHED], end = launch()

        def closing():
            asyncio._set_running_loop(loop)
            end()

        request.config.add_cleanup(closing)
    browser, loop = stash[LAUNCHED]
    asyncio._set_running_loop(loop)
    yield browser
    for context in browser.contexts:
        context.close()
    _contexts.clear()
    asyncio._set_running_loop(None)


def text_of(url: str, path: str) -> str:
    """What a page says, as the server has written it; for what no script does."""
    answer = httpx.get(f"{url}{path}", headers={"Accept": "text/html"})
    assert answer.status_code == 200, answer.text
    body = answer.text[answer.text.index("<main") :]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


ABORTED = ("htmx:afterRequest,", "htmx:sendAbort,")
"""Console lines of htmx for a request that a later one replaces, as one for each letter typed.

A request that fails has a line of its own beside these.
"""

_contexts: dict[str, tuple[BrowserContext, CDPSession]] = {}
"""By the address of their server. A new one takes a second of CPU."""


def _context(browser: Browser, url: str, **options) -> BrowserContext:
    return browser.new_context(base_url=url, locale="en-US", **{"viewport": DESKTOP, **options})


def _shared_context(browser: Browser, url: str) -> BrowserContext:
    """A context as new: without cookies, and whatever else pages of a server store."""
    if url not in _contexts:
        context = _context(browser, url)
        stays = context.new_page()  # and with it the process that shows pages of this server
        stays.goto("/healthz")
        _contexts[url] = context, context.new_cdp_session(stays)
    context, session = _contexts[url]
    session.send("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"})
    return context


@contextmanager
def opened(browser: Browser, url: str, *expected: str, **options) -> Iterator[Page]:
    """A page whose errors fail the test, but for console lines that have one of `expected`.

    Nothing is stored yet of what the server's other pages have stored.

    Args:
        browser: Where.
        url: Of the control plane: `goto` takes paths.
        expected: Parts of console lines that the journey is about.
        options: Of the browser's context, which then is the page's own.
    """
    context = _context(browser, url, **options) if options else _shared_context(browser, url)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: line.type == "error" and problems.append(line.text))
    page.on("requestfailed", lambda request: problems.append(_failure(request)))
    page.on("request", lambda request: _own(request.url, url) or problems.append(request.url))
    yield page
    page.close() if not options else context.close()
    fine = (*expected, *ABORTED)
    told = [one for one in problems if one and not any(part in one for part in fine)]
    assert told == []


def _own(asked: str, url: str) -> bool:
    return asked.startswith((url, "data:", "blob:"))


def _failure(request) -> str:
    """What failed, but for what a page that is left, or its last event, ends."""
    if request.failure == "net::ERR_ABORTED":
        return ""
    return f"{request.url}: {request.failure}"


@pytest.fixture
def page(browser, plane) -> Iterator[Page]:
    with opened(browser, plane) as page:
        yield page
