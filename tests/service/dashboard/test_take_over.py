"""A run is taken from the job that holds it, by who has read what that means."""

import pytest
from playwright.sync_api import expect

from cairn import Settings, Writer, create_app
from tests.service.dashboard.conftest import opened
from tests.service.servers import serve
from tests.service.stores import make_run


@pytest.fixture
def held(tmp_path):
    writer = Writer(make_run(tmp_path / "store/run", [1, 2]), writer="job-7")
    writer.begin()
    yield writer
    writer.close()


@pytest.fixture
def url(held, tmp_path):
    with serve(
        create_app(Settings(root=str(tmp_path / "store"), data_dir=tmp_path / "data"))
    ) as url:
        yield url


def test_run_is_taken_over_from_its_page_once_that_was_confirmed(browser, url):
    with opened(browser, url) as page:
        page.goto("/ui/default/run")
        writes = page.locator("dl.figures div", has_text="Writes now")
        expect(writes).to_contain_text("job-7")
        writes.get_by_role("link", name="Take over…").click()
        expect(page.get_by_role("heading", name="What this does")).to_be_visible()
        expect(page.locator("main")).to_contain_text("it can save no more")
        page.get_by_label("Why (for the audit trail)").fill("its node is gone")
        button = page.get_by_role("button", name="Take it over from job-7")
        button.click()
        expect(page.locator("#take-over-result")).to_be_empty()  # it was not confirmed
        page.get_by_label("The job of job-7 is over, or is to end").check()
        button.click()
        told = page.locator("#take-over-result").get_by_role("alert")
        expect(told).to_contain_text("Taken over from job-7.")
        expect(told).to_contain_text("goes on from step 2")
        expect(told).to_be_focused()
        told.get_by_role("link", name="Back to the run").click()
        expect(writes).to_contain_text("nobody now")
        page.goto("/audit")
        entry = page.locator("#audit tr", has_text="run.takeOver")
        expect(entry).to_contain_text("its node is gone")
        page.goto("/ui/default/run/take-over")
        expect(page.get_by_role("heading", name="Nobody holds this run")).to_be_visible()


def test_run_that_was_given_back_meanwhile_is_told_so(browser, url, held):
    with opened(browser, url, "412 (Precondition Failed)") as page:
        page.goto("/ui/default/run/take-over")
        page.get_by_label("The job of job-7 is over, or is to end").check()
        held.close()
        page.get_by_role("button", name="Take it over from job-7").click()
        told = page.locator("#take-over-result").get_by_role("alert")
        expect(told).to_contain_text("found none")
