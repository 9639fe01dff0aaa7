"""Signing in, exporting a checkpoint and signing out, driven in headless Chromium."""

import json

import pytest
from playwright.sync_api import expect

from tests.service.access.provider import CLIENT, SECRET, running_provider
from tests.service.commands import cairn_here
from tests.service.dashboard.conftest import browser
from tests.service.planes import running_plane
from tests.service.tiny_run import copy_tiny_run

__all__ = ["browser"]

pytestmark = pytest.mark.filterwarnings("ignore:get_jwt_config:DeprecationWarning")
PROMOTED = "production now points to step 2"


@pytest.fixture(scope="module")
def provider():
    with running_provider() as provider:
        provider.put("ana", "release")
        yield provider


@pytest.fixture(scope="module")
def server(tmp_path_factory, provider):
    """The URL of a server with keys and an identity provider, and a key."""
    folder = tmp_path_factory.mktemp("signing-in")
    root, data = folder / "store", folder / "control-plane"
    root.mkdir()
    copy_tiny_run(root)
    made = cairn_here(
        *("keys", "create", "--name", "ana", "--scope", "operate", "--data-dir", str(data)),
        CAIRN_ROOT=str(root),
    )
    assert made.returncode == 0, made.stderr
    settings = {
        "CAIRN_AUTH": "keys",
        "CAIRN_OIDC_ISSUER": provider.url,
        "CAIRN_OIDC_CLIENT_ID": CLIENT,
        "CAIRN_OIDC_CLIENT_SECRET": SECRET,
        "CAIRN_OIDC_GRANTS": json.dumps({"release": {"scope": "operate"}}),
    }
    with running_plane(root, folder, settings) as (url, _):
        yield url, made.stdout.strip()


@pytest.fixture
def page(browser, server):
    """A page whose errors fail the test, but for those of the provider's own pages."""
    problems = []

    def note(line):
        if line.type == "error" and line.location["url"].startswith(server[0]):
            problems.append(line.text)

    with browser.new_context(locale="en-US") as context:
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", note)
        yield page
        assert problems == []


def test_browser_signs_in_exports_by_button_and_signs_out(server, page):
    url, key = server
    page.goto(f"{url}/ui/default/tiny")
    expect(page).to_have_url(f"{url}/sign-in?next=%2Fui%2Fdefault%2Ftiny")
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(f"{url}/ui/default/tiny")
    page.goto(f"{url}/ui/default/tiny/steps/2")
    page.get_by_role("button", name="Export", exact=True).click()
    card = page.locator(".operation").first
    expect(card).to_have_attribute("data-state", "succeeded", timeout=30_000)
    page.get_by_role("button", name="Promote").click()
    expect(page.get_by_role("alert")).to_contain_text(PROMOTED)
    expect(page.get_by_role("link", name="Keys")).to_have_count(0)
    assert page.evaluate("document.cookie") == ""
    page.goto(f"{url}/ui/default/tiny")
    page.context.clear_cookies()  # its session is over
    page.evaluate("renew()")
    expect(page).to_have_url(f"{url}/sign-in?next=%2Fui%2Fdefault%2Ftiny")
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(f"{url}/ui/default/tiny")
    page.wait_for_load_state()  # a click before its scripts are there does nothing
    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(f"{url}/sign-in")
    page.goto(url)
    expect(page.get_by_label("Key")).to_be_visible()


def test_browser_signs_in_and_out_at_the_identity_provider(server, provider, page):
    url, _ = server
    page.goto(f"{url}/ui/default/tiny/steps/1")
    page.get_by_role("link", name="Sign in with localhost").click()
    page.get_by_placeholder("sub").fill("ana")  # the provider's page
    page.get_by_role("button", name="Authorize").click()
    expect(page).to_have_url(f"{url}/ui/default/tiny/steps/1")
    expect(page.get_by_text("oidc:ana · operate")).to_be_visible()
    page.get_by_label("Alias").fill("staging")
    page.get_by_role("button", name="Promote").click()
    expect(page.get_by_role("alert")).to_contain_text("staging now points to step 1")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("button", name="End session").click()
    expect(page).to_have_url(f"{url}/sign-in")
    page.goto(f"{url}/ui/default/tiny")
    expect(page.get_by_role("link", name="Sign in with localhost")).to_be_visible()
