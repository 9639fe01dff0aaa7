"""The dashboard of a server with several roots."""

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
