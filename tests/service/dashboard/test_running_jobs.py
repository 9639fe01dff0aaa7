"""Jobs that run while somebody looks at them: cancelled, resumed, and taken over from the dead."""

import httpx
import pytest
from playwright.sync_api import expect

from cairn import Settings, create_app
from tests.service.dashboard.conftest import opened
from tests.service.jobs import PATIENCE, Hold, save_llama, tries, until
from tests.service.servers import serve
from tests.service.test_unknown_kinds import start_newer
from tests.service.test_workers import started, working

LONG = 60_000
"""Milliseconds that a job may take on a machine that has much else to do."""


@pytest.fixture
def store(tmp_path):
    save_llama(tmp_path / "store/llama")
    return tmp_path / "store"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A store of two runs, for tests that need no server of their own."""
    store = tmp_path_factory.mktemp("shared") / "store"
    save_llama(store / "cancelled")
    for step in (1, 2):  # by two jobs, which share no files
        save_llama(store / "damaged", (step,))
    return store


@pytest.fixture(scope="module")
def url(shared):
    with serve(create_app(Settings(root=str(shared), data_dir=shared.parent / "data"))) as url:
        yield url


def test_export_is_cancelled_while_it_runs_leaves_nothing_and_is_resumed(
    browser, shared, url, monkeypatch
):
    hold = Hold(monkeypatch)
    with opened(browser, url) as page:
        page.goto("/ui/default/cancelled/steps/1")
        page.get_by_role("button", name="Export", exact=True).click()
        card = page.locator(".operation").first
        assert hold.reached.wait(PATIENCE)
        expect(card).to_have_attribute("data-state", "running", timeout=LONG)
        assert len(tries(shared, "cancelled")) == 1
        card.get_by_role("button", name="Cancel").click()
        expect(card).to_have_attribute("data-state", "cancelled", timeout=LONG)
        expect(card).to_contain_text("partial output removed")
        expect(card.get_by_role("button", name="Cancel")).to_have_count(0)
        until(lambda: tries(shared, "cancelled") == [])
        page.reload()
        expect(card).to_have_attribute("data-state", "cancelled")
        hold.reached.clear()
        card.get_by_role("button", name="Retry").click()
        assert hold.reached.wait(PATIENCE)
        expect(card).to_have_attribute("data-state", "running", timeout=LONG)
        hold.opened.set()
        expect(card).to_have_attribute("data-state", "succeeded", timeout=LONG)
        card.get_by_role("link", name="Files").click()
        expect(page.get_by_role("link", name="model.safetensors", exact=True)).to_be_visible()
        assert len(tries(shared, "cancelled")) == 1


def test_what_a_dead_worker_had_is_given_to_another_that_ends_it(browser, store, tmp_path):
    settings = Settings(root=str(store), data_dir=tmp_path / "data", worker=False)
    reached = tmp_path / "reached"
    program = ("-m", "tests.service.stalling_worker", str(reached))
    with serve(create_app(settings)) as url, opened(browser, url) as page:
        page.on("dialog", lambda dialog: dialog.accept())
        with working(settings, "one", program) as process:
            page.goto("/ui/default/llama/steps/1")
            page.get_by_role("button", name="Export", exact=True).click()
            until(reached.exists)
            expect(page.locator(".operation .state")).to_have_text("running", timeout=LONG)
            page.goto("/operations")
            row = page.get_by_role("row").filter(has_text="one").first
            expect(row).to_contain_text("alive")
            expect(row.get_by_role("button")).to_have_count(0)  # it lives
            process.kill()
            process.wait(60)
        with working(settings, "two") as other:
            started(other)
            until(lambda: not _workers(url)["one"]["alive"])
            page.reload()
            expect(row).to_contain_text("dead")
            row.get_by_role("button", name="Reassign jobs").click()
            export = page.locator("#operations").get_by_role("row").filter(has_text="Export")
            expect(export).to_contain_text("succeeded", timeout=LONG)
            expect(page.locator(".operation")).to_have_count(0)
            assert set(_workers(url)) == {"two"}
            page.goto("/audit")
            expect(page.locator("#audit")).to_contain_text("worker.takeOver")


def _workers(url):
    return {one["name"]: one for one in httpx.get(f"{url}/v1/workers").json()["workers"]}


def test_operation_of_a_kind_that_is_not_known_here_is_shown_as_such(browser, store, tmp_path):
    settings = Settings(root=str(store), data_dir=tmp_path / "data", worker=False)
    with serve(create_app(settings)) as url, opened(browser, url) as page:
        start_newer(settings.jobs_database_url)
        page.goto("/operations")
        card = page.locator(".operation")
        expect(card.locator(".message")).to_have_text("waiting for a worker")
        page.wait_for_load_state("networkidle")  # what it tells of its progress has come
        expect(card).to_contain_text("This server does not know this kind of operation")
        expect(card.get_by_role("button")).to_have_count(0)
        card.get_by_role("link", name="distil").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("distil of llama, step 1")
        expect(page.locator(".operation")).to_contain_text("This server does not know")


def test_damage_is_shown_once_it_is_found_and_gone_once_the_step_is_repaired(browser, shared, url):
    folder = shared / "damaged" / "attempts" / "2" / "2" / "optimizer" / "d"
    values = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    saved = values.read_bytes()
    values.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    with opened(browser, url) as page:
        page.goto("/ui/default/damaged/steps/2")
        page.get_by_text("More actions").click()
        page.get_by_role("button", name="Verify", exact=True).click()
        banner = page.locator("#damage")
        expect(banner).to_contain_text("This step is damaged", timeout=LONG)
        expect(banner).to_contain_text("roll back to step 1, the newest sound step")
        expect(page.locator("#badges")).to_contain_text("damaged")
        expect(page.get_by_role("button", name="Promote")).to_be_disabled()
        expect(page.get_by_label("Reason to export despite the damage")).to_be_visible()
        expect(page.get_by_role("button", name="Retry")).to_have_count(0)
        page.get_by_label("Reason to export despite the damage").fill("the model is whole")
        page.get_by_role("button", name="Export", exact=True).click()
        expect(page.get_by_role("link", name="Files").last).to_be_visible(timeout=LONG)
        values.write_bytes(saved)
        banner.get_by_role("button", name="Verify again").click()
        expect(page.locator("#badges")).to_contain_text("verified", timeout=LONG)
        expect(banner).not_to_contain_text("damaged")
        expect(page.get_by_role("button", name="Promote")).to_be_enabled()
