"""A run is taken from the job that holds it, by who has read what that means."""

import pytest
from playwright.sync_api import expect

from cairn import Settings, Writer, create_app
from tests.service.dashboard.conftest import opened
from tests.service.servers import serve
from tests.service.stores import make_run


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("held") / "store"


@pytest.fixture(scope="module")
def url(store):
    store.mkdir()
    with serve(create_app(Settings(root=str(store), data_dir=store.parent / "data"))) as url:
        yield url


@pytest.fixture
def held(request, store):
    """The writer of a run that is the test's own, and the run's page."""
    name = "-".join(request.node.name.split("_")[1:5])
    writer = Writer(make_run(store / name, [1, 2]), writer="job-7")
    writer.begin()
    yield writer, f"/ui/default/{name}"
    writer.close()


def test_run_is_taken_over_from_its_page_once_that_was_confirmed(browser, url, held):
    _, place = held
    with opened(browser, url) as page:
        page.goto(place)
        writes = page.locator("dl.figures div", has_text="Writer")
        expect(writes).to_contain_text("job-7")
        writes.get_by_role("link", name="Take over writer…").click()
        expect(page.get_by_role("heading", name="What happens")).to_be_visible()
        expect(page.locator("main")).to_contain_text("it can no longer save")
        page.get_by_label("Reason (for the audit log)").fill("its node is gone")
        button = page.get_by_role("button", name="Take over from job-7")
        button.click()
        expect(page.locator("#take-over-result")).to_be_empty()  # it was not confirmed
        page.get_by_label("I confirm the job of job-7 has ended or may be stopped").check()
        button.click()
        told = page.locator("#take-over-result").get_by_role("alert")
        expect(told).to_contain_text("Taken over from job-7.")
        expect(told).to_contain_text("continues from step 2")
        expect(told).to_be_focused()
        told.get_by_role("link", name="Back to the run").click()
        expect(writes).to_contain_text("none")
        page.goto("/audit")
        entry = page.locator("#audit tr", has_text="run.takeOver")
        expect(entry).to_contain_text("its node is gone")
        page.goto(f"{place}/take-over")
        expect(page.get_by_role("heading", name="This run has no writer")).to_be_visible()


def test_run_that_was_given_back_meanwhile_is_told_so(browser, url, held):
    writer, place = held
    with opened(browser, url, "412 (Precondition Failed)") as page:
        page.goto(f"{place}/take-over")
        page.get_by_label("I confirm the job of job-7 has ended or may be stopped").check()
        writer.close()
        page.get_by_role("button", name="Take over from job-7").click()
        told = page.locator("#take-over-result").get_by_role("alert")
        expect(told).to_contain_text("Look again who holds it")
