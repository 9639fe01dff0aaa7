"""One server, one browser and one store of real runs for all journeys of a module."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from cairn.storage.runs import Run, annotate_run, annotate_step, fork_run, promote_step
from cairn.storage.store import parse_uri
from tests.service.planes import running_plane
from tests.service.stores import begin_saving
from tests.service.stores import make_run as make_plain_run
from tests.tiny import make_run

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}

expect.set_options(timeout=60_000)  # what is heard of at once takes long beside other tests


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A trained run with metrics, its fork, one that is being written, and an empty one."""
    root = tmp_path_factory.mktemp("store")
    make_run(str(root))
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
    begin_saving(make_plain_run(root / "writing", [100, 200], labels={"owner": "chen"}), 300)
    make_plain_run(root / "empty")
    return root


@pytest.fixture(scope="module")
def plane(trained, tmp_path_factory) -> Iterator[str]:
    with running_plane(trained, tmp_path_factory.mktemp("plane")) as (url, _):
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium")
    assert executable, "chromium is not on PATH; `make test` installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=["--no-sandbox", "--disable-background-networking", "--disable-gpu"],
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, *expected: str, **options) -> Iterator[Page]:
    """A page whose errors fail the test, but for console lines that have one of `expected`.

    Args:
        browser: Where.
        url: Of the control plane: `goto` takes paths.
        expected: Parts of console lines that the journey is about.
        options: Of the browser's context.
    """
    context = browser.new_context(base_url=url, locale="en-US", **{"viewport": DESKTOP, **options})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: line.type == "error" and problems.append(line.text))
    page.on("requestfailed", lambda request: problems.append(_failure(request)))
    page.on("request", lambda request: _own(request.url, url) or problems.append(request.url))
    yield page
    context.close()
    told = [one for one in problems if one and not any(part in one for part in expected)]
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
