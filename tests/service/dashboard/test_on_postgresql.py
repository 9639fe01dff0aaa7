"""The dashboard on PostgreSQL, in Chromium; `make proofs` does it.

Pages ask what the API asks, whose lists, jobs and audit trail `make test` has on PostgreSQL too.
"""

from playwright.sync_api import expect

from cairn import Settings, create_app
from tests.service.dashboard.conftest import opened
from tests.service.dashboard.test_other_servers import LONG, store
from tests.service.servers import serve

__all__ = ["store"]


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
