"""The dashboard, driven in headless Chromium against a running control plane."""

import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.service.planes import running_plane
from tests.tiny import make_run


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("store"))
    make_run(root)
    with running_plane(root, tmp_path_factory.mktemp("plane")) as (url, _):
        yield url


@pytest.fixture
def page(plane):
    executable = shutil.which("chromium")
    assert executable, "chromium is not on PATH; `make test` installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=["--no-sandbox", "--disable-background-networking", "--disable-gpu"],
        )
        page = browser.new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(failure_of(request)))
        page.goto(plane)
        yield page
        browser.close()
    assert [problem for problem in problems if problem] == []


def failure_of(request):
    """What failed, but for a stream that the page itself closed after its last event."""
    closed_by_page = request.failure == "net::ERR_ABORTED" and request.url.endswith("/events")
    return None if closed_by_page else f"{request.url}: {request.failure}"


def test_export_button_converts_a_checkpoint_and_shows_its_progress_to_the_end(page, tmp_path):
    page.get_by_role("link", name="tiny").click()
    row = page.locator("tr[data-step='2']")
    expect(row).to_contain_text("listed")
    row.get_by_role("button", name="Export to PyTorch").click()
    status = row.get_by_role("status")
    expect(status).to_have_attribute("data-state", "succeeded", timeout=30_000)
    assert status.locator("progress").evaluate("bar => bar.value === bar.max && bar.max > 1000")
    with page.expect_response("**/v1/artifacts/*") as answer:
        status.get_by_role("link", name="files").click()
    names = [file["name"] for file in answer.value.json()["files"]]
    assert "config.json" in names
    assert "model.safetensors" in names
