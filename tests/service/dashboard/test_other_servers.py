"""The dashboard of servers that are set up otherwise: with several roots, and on PostgreSQL."""

import pytest
from playwright.sync_api import expect

from cairn import Settings, create_app
from tests.plain_orbax import manager
from tests.service.dashboard.conftest import AXE, PHONE, opened
from tests.service.dashboard.test_every_page import SERIOUS
from tests.service.jobs import save_llama
from tests.service.servers import serve

LONG = 60_000
"""Milliseconds that a job may take on a machine that has much else to do."""


@pytest.fixture
def store(tmp_path):
    save_llama(tmp_path / "store/llama", (1, 2))
    return tmp_path / "store"


def test_adopt_page_of_several_roots_can_be_read_by_everybody_and_adopts_into_each(
    browser, store, tmp_path
):
    manager(tmp_path / "vision/old", steps=(5,))
    settings = Settings(
        root=str(store), roots={"vision": str(tmp_path / "vision")}, data_dir=tmp_path / "data"
    )
    with serve(create_app(settings)) as url, opened(browser, url) as page:
        page.goto("/adopt")
        page.evaluate(AXE.read_text(encoding="utf-8"))
        assert page.evaluate(SERIOUS, None) == []
        page.get_by_text("Root: vision").click()
        assert page.locator("details details").count() == 0
        assert page.locator("details:not([open])").count() == 0
        assert page.evaluate(SERIOUS, None) == []
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(SERIOUS, ["color-contrast"]) == []
        page.set_viewport_size(PHONE)
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wide) <= 0
        vision = page.locator("details.panel", has_text="Root: vision")
        vision.get_by_label("Orbax folder").fill("old")
        vision.get_by_label("Run name").fill("adopted")
        vision.get_by_role("button", name="Import", exact=True).click()
        card = page.locator("#adopt-result .operation")
        expect(card).to_have_attribute("data-state", "succeeded", timeout=LONG)
        card.get_by_role("link", name="Open adopted").click()
        expect(page).to_have_url(f"{url}/ui/vision/adopted")


def test_the_way_from_the_runs_to_the_audit_trail_is_the_same_on_postgresql(
    browser, store, tmp_path, postgresql
):
    settings = Settings(
        root=str(store),
        data_dir=tmp_path / "data",
        database_url=postgresql.create(),
        jobs_database_url=postgresql.create(),
        auto_upgrade=True,
    )
    with serve(create_app(settings)) as url, opened(browser, url) as page:
        page.goto("/")
        page.get_by_role("link", name="llama", exact=True).click()
        expect(page.locator("#steps tbody tr td.title")).to_have_text(["2", "1"])
        page.get_by_label("Filter").fill("step > 1")
        page.get_by_role("button", name="Filter").click()
        expect(page.locator("#steps tbody tr td.title")).to_have_text(["2"])
        page.locator("#steps").get_by_role("link", name="2", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Step 2")
        page.get_by_label("Alias").fill("production")
        page.get_by_label("Reason (optional)", exact=True).first.fill("the first")
        page.get_by_role("button", name="Promote").click()
        expect(page.locator("#promote-result").get_by_role("alert")).to_contain_text("production")
        page.get_by_text("More actions").click()
        page.get_by_role("button", name="Verify", exact=True).click()
        card = page.locator(".operation[data-name=Verification]").first
        expect(card).to_have_attribute("data-state", "succeeded", timeout=LONG)
        page.get_by_role("link", name="Operations").click()
        expect(page.locator(".operation[data-name=Verification]")).to_have_count(1)
        page.goto("/audit")
        for action in ("alias.promote", "checkpoint.verify"):
            expect(page.locator("#audit")).to_contain_text(action)
        page.goto("/health")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
