"""What operators and administrators do with the dashboard's forms, in headless Chromium."""

import re

import pytest
from playwright.sync_api import Route, TimeoutError, expect

from cairn import Run, delete_step, promote_step
from cairn.storage.runs.records.layout import step_dir
from tests.service.dashboard.conftest import opened
from tests.service.planes import running_plane
from tests.service.receivers import receiving
from tests.service.stores import make_run

ALLOWED = {"CAIRN_WEBHOOK_NETWORKS": "127.0.0.0/8"}


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Run:
    """A run that nobody writes, of four steps; two aliases, one of which has a dot in its name."""
    run = make_run(tmp_path_factory.mktemp("store") / "kept", [1, 2, 3, 4])
    for alias in ("v1.0", "staging"):
        promote_step(run, 2, alias, by="ana", reason="", expect=None)
    return run


@pytest.fixture(scope="module")
def plane(kept, tmp_path_factory):
    root = kept.uri.parent.local_path
    with running_plane(root, tmp_path_factory.mktemp("plane"), ALLOWED) as (url, _):
        yield url


@pytest.fixture
def page(browser, plane):
    with opened(browser, plane) as page:
        page.on("dialog", lambda dialog: dialog.accept())
        yield page


def test_webhook_is_made_tested_and_deleted(page):
    with receiving() as receiver:
        page.goto("/webhooks")
        page.get_by_label("URL (https)").fill(receiver.url)
        page.get_by_label("alias.moved").check()
        page.get_by_role("button", name="Create webhook").click()
        expect(page.get_by_role("alert")).to_contain_text("whsec_")
        page.goto("/webhooks")
        expect(page.locator("main")).not_to_contain_text("whsec_")
        page.get_by_role("link", name=receiver.url).click()
        page.get_by_role("button", name="Send test event").click()
        rows = page.locator("#deliveries tbody tr")
        expect(rows).to_have_count(1)
        receiver.wait(receiver.taken)
        page.reload()
        expect(rows).to_contain_text("delivered")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", name="No webhooks yet")).to_be_visible()


def add_root(page, name, run):
    """Add the root that a run lies in."""
    page.goto("/health")
    page.get_by_text("Add a root").click()
    page.get_by_label("Name").fill(name)
    page.get_by_label("Folder or bucket").fill(run.uri.parent.local_path)
    page.get_by_role("button", name="Add root").click()


def test_root_is_added_and_removed_and_its_store_stays(page, tmp_path):
    other = make_run(tmp_path / "vision" / "run", [7])
    add_root(page, "vision", other)
    row = page.get_by_role("row", name=re.compile("^vision"))
    expect(row).to_be_visible()
    page.get_by_role("button", name="Remove the root vision").click()
    expect(row).to_have_count(0)
    # That of the settings has no button that removes it.
    expect(page.get_by_role("row", name=re.compile("^default"))).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("Remove the root"))).to_have_count(0)
    assert [step.step for step in other.steps()] == [7]


def test_button_cannot_be_pressed_before_the_scripts_are_there(page, tmp_path):
    other = make_run(tmp_path / "early" / "run", [7])
    add_root(page, "early", other)
    remove = page.get_by_role("button", name="Remove the root early")
    expect(remove).to_be_visible()
    scripts: list[Route] = []
    page.route("**/htmx.min.js", lambda route: scripts.append(route))
    page.goto("/health", wait_until="commit")
    expect(remove).to_be_visible()
    with pytest.raises(TimeoutError):
        remove.click(timeout=1_000)
    scripts[0].continue_()
    remove.click()
    expect(remove).to_have_count(0)


def test_alias_is_deleted_whatever_its_name_has(page):
    page.goto("/ui/default/kept/aliases")
    for alias in ("v1.0", "staging"):
        panel = page.get_by_role("region", name=f"Alias {alias}", exact=True)
        panel.get_by_role("button", name="Delete").click()
        expect(panel).to_have_count(0)


def test_retention_is_applied_and_its_job_is_there_after_a_reload(page, kept):
    page.goto("/ui/default/kept/storage")
    page.get_by_label("Keep last N steps").fill("2")
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name=re.compile(r"Delete \d+ steps?")).click()
    card = page.locator("#retention-result .operation")
    expect(card).to_have_attribute("data-state", "succeeded", timeout=30_000)
    page.goto("/operations")
    expect(page.locator("main")).to_contain_text("Delete by policy")
    page.goto("/ui/default/kept")
    expect(page.locator("tr[data-step='4']")).to_contain_text("available")
    expect(page.locator("tr[data-step='1']")).to_contain_text("in trash")


def test_garbage_is_collected(page, kept):
    kept.objects.write(f"{step_dir(1, 3)}/model/data", b"12345")
    delete_step(kept, kept.step(3), by="ana", grace=0)
    page.goto("/ui/default/kept/storage")
    page.get_by_role("button", name="Remove garbage").click()
    card = page.locator("#care-result .operation")
    expect(card).to_have_attribute("data-state", "succeeded", timeout=30_000)
    assert kept.objects.read(f"{step_dir(1, 3)}/model/data") is None
