"""Pages that stay open: what changes is shown without a reload; what somebody fills in stays."""

import re
import shutil

import httpx
import pytest
from playwright.sync_api import expect

from cairn import Client, Run, Settings, annotate_step, create_app
from tests.service.dashboard.conftest import opened
from tests.service.jobs import PATIENCE, Hold, save_llama
from tests.service.servers import serve
from tests.service.stores import begin_saving, make_run, publish

EVERY = 10_000
"""Milliseconds after which an open page asks whether something has changed."""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("live") / "store"


@pytest.fixture(scope="module")
def url(store):
    store.mkdir()
    settings = Settings(root=str(store), data_dir=store.parent / "data", scan_seconds=0)
    with serve(create_app(settings)) as url:
        yield url


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_llama(folder / "llama", (1, 2, 3))
    return folder / "llama"


@pytest.fixture
def name(request, saved, store, url):
    """The name of a run of steps 1, 2 and 3 that is the test's own."""
    name = "-".join(request.node.name.split("_")[1:5])
    shutil.copytree(saved, store / name)
    look(url, name)
    return name


@pytest.fixture
def place(name):
    """Its pages."""
    return f"/ui/default/{name}"


@pytest.fixture
def page(browser, url):
    with opened(browser, url) as page:
        page.on("dialog", lambda dialog: dialog.accept())
        yield page


def look(url, run, *pages):
    """Have the server look at the store now, and pages ask for themselves, as they do in time.

    On a busy machine a server's own looks are far apart. The clock of the pages must be ours.
    """
    answer = httpx.get(f"{url}/v1/roots/default/runs/{run}", params={"refresh": True}, timeout=60)
    assert answer.is_success
    for page in pages:
        page.clock.fast_forward(EVERY)


def test_run_and_steps_appear_on_pages_that_are_open(browser, url, store):
    with opened(browser, url) as runs, opened(browser, url) as steps:
        for page in (runs, steps):
            page.clock.install()
        runs.goto("/")
        run = make_run(store / "later")
        look(url, "later", runs)
        row = runs.get_by_role("row").filter(has_text="later")
        expect(row).to_contain_text("no steps yet")
        steps.goto("/ui/default/later")
        expect(steps.get_by_text("No steps yet")).to_be_visible()
        attempt = begin_saving(run, 7)
        look(url, "later", runs, steps)
        expect(row).to_contain_text("saving step 7")
        expect(steps.locator("#run-badges")).to_contain_text("saving step 7")
        expect(steps.locator("tr[data-step='7']")).to_contain_text("saving")
        publish(run, attempt.number, 7)
        annotate_step(run, 7, metrics={"loss": 0.5}, by="trainer")
        look(url, "later", runs, steps)
        expect(steps.locator("tr[data-step='7'] .state")).to_have_text("available")
        expect(steps.locator("#figures")).to_contain_text("trainer")
        expect(steps.locator("[data-metric='loss'] canvas")).to_have_count(1)
        expect(row).not_to_contain_text("saving")
        expect(row.locator("[data-name='Latest step']")).to_contain_text("7")


def test_page_of_a_step_that_is_being_written_becomes_that_of_a_saved_one(
    page, url, store, name, place
):
    run = Run.open(store / name)
    attempt = begin_saving(run, 9)
    page.clock.install()
    page.goto(f"{place}/steps/9")
    expect(page.get_by_text("Saving.")).to_be_visible()
    publish(run, attempt.number, 9)
    look(url, name, page)
    expect(page.get_by_role("button", name="Promote")).to_be_visible()
    expect(page.locator("#badges")).to_contain_text("available")


def test_what_is_ticked_or_typed_stays_until_it_is_done_with(page, url, name, place):
    page.goto(place)
    tick = page.get_by_label("Compare step 3")
    tick.check()
    with Client(url) as client:
        client.annotate(name, 3, labels={"eval": "passed"})
    page.evaluate("renew()")
    expect(tick).to_be_checked()
    tick.uncheck()
    page.evaluate("renew()")
    expect(page.locator("tr[data-step='3']")).to_contain_text("passed")
    expect(tick).to_be_focused()


def test_promotion_is_told_alike_in_all_of_the_page(page, place):
    page.on("dialog", lambda dialog: dialog.accept())  # whether production is to move
    page.goto(f"{place}/steps/3")
    for step in (3, 2):
        page.goto(f"{place}/steps/{step}")
        page.get_by_role("button", name="Promote").click()
        expect(page.get_by_role("alert")).to_contain_text(f"production now points to step {step}")
        expect(page.locator("#pointing")).to_contain_text(f"production → step {step}")
    page.get_by_text("More actions").click()
    expect(page.locator("#rollback .notice")).to_have_count(0)
    page.goto(f"{place}/aliases")
    section = page.get_by_role("region", name="Alias production")
    section.get_by_text("Revert to step 3").click()
    section.get_by_label("Reason (optional)").fill("better after all")
    section.get_by_role("button", name="Revert production").click()
    expect(section.locator(".head")).to_contain_text("step 3")
    expect(section.get_by_role("row").nth(1)).to_contain_text("better after all")
    expect(page.get_by_role("alert")).to_contain_text("production now points to step 3")


def test_end_of_a_job_is_told_by_what_it_has_changed(page, place):
    page.goto(f"{place}/steps/2")
    page.get_by_text("More actions").click()
    page.get_by_role("button", name="Roll back to step 2").click()
    expect(page.locator(".operation[data-name=Rollback]")).to_contain_text("succeeded")
    expect(page.get_by_role("button", name="Roll back to step 2")).to_have_count(0)
    page.goto(f"{place}/storage?keep_last=1")
    page.get_by_role("button", name="Delete 1 step").click()
    expect(page.locator("#kept")).to_contain_text("This policy keeps 1 step")
    expect(page.locator("#by-step .state")).to_have_text(["superseded", "available", "in trash"])


def test_page_of_a_job_tells_that_it_runs_and_what_came_of_it(page, monkeypatch, url, name):
    hold = Hold(monkeypatch)
    with Client(url) as client:
        operation = client.convert(name, 1)
    page.goto(f"/operations/{operation.id}")
    assert hold.reached.wait(PATIENCE)
    expect(page.locator(".operation .state")).to_have_text("running")
    expect(page.get_by_role("heading", name="Result")).to_have_count(0)
    hold.opened.set()
    expect(page.locator("#result-title + pre")).to_contain_text("artifact_id")


def test_job_that_was_started_elsewhere_appears_among_the_operations(page, url, name):
    page.clock.install()
    page.goto("/operations")
    rows = page.locator("#operations").get_by_role("row")
    verification = rows.filter(has_text="Verification").filter(has_text=name)
    expect(verification).to_have_count(0)
    with Client(url) as client:
        client.wait(client.verify(name, 2).id)
    page.clock.fast_forward(EVERY)
    expect(verification).to_contain_text("succeeded")


def test_operations_are_found_by_tabs_and_fields_whose_address_can_be_kept(browser, url, name):
    with Client(url) as client:
        verified = client.wait(client.verify(name, 1).id)
        exported = client.wait(client.convert(name, 2, dtype="bfloat16").id)
    with opened(browser, url) as page:
        page.goto("/operations")
        page.get_by_role("link", name="Exports", exact=True).click()
        page.wait_for_load_state()  # scripts listen to the form from then on
        page.get_by_role("searchbox", name="Run").fill(name.upper())
        page.get_by_role("searchbox", name="Started by").fill("loop")
        page.get_by_label("Since (UTC)").fill(f"{exported.created:%Y-%m-%d}")
        row = page.locator("#operations tbody tr")
        expect(row).to_have_count(1)
        expect(row).to_have_text(
            re.compile(rf"Export\s*{name}\s*2\s*loopback.*huggingface\s*bfloat16\s*succeeded")
        )
        expect(page).to_have_url(re.compile("kind=exports.*since=20"))
        kept = page.url
        page.get_by_role("link", name="Verifications").click()
        page.wait_for_load_state()
        expect(row.get_by_role("link", name="Verification")).to_have_attribute(
            "href", f"/operations/{verified.id}"
        )
        page.get_by_label("State").select_option("failed")
        expect(page.get_by_text("No matching operations")).to_be_visible()
    answer = httpx.get(kept).text  # as a browser without JavaScript sees it
    assert f"/operations/{exported.id}" in answer
    assert f"/operations/{verified.id}" not in answer
    assert f'value="{exported.created:%Y-%m-%d}"' in answer


def test_open_page_goes_on_to_tell_how_long_ago_something_was(page, place):
    page.clock.install()
    page.goto(place)
    saved = page.locator("tr[data-step='3'] time")
    expect(saved).to_have_text(re.compile(r"^(just now|[\d.]+ (s|min) ago)$"))
    page.clock.run_for("03:00:00")
    expect(saved).to_have_text(re.compile(r"^3 h ago$"))


def test_page_that_cannot_be_had_anew_says_how_old_it_is(browser, url):
    with opened(browser, url, "ERR_INTERNET_DISCONNECTED") as page:
        page.goto("/")
        note = page.get_by_text("Connection lost")
        expect(note).to_be_hidden()
        page.context.set_offline(True)
        page.evaluate("renew()")
        expect(note).to_have_text(re.compile(r"Showing data from (just now|.* ago)\.$"))
        page.context.set_offline(False)
        page.evaluate("renew()")
        expect(note).to_be_hidden()


def test_browser_asks_whether_it_has_the_scripts_of_this_version(url):
    with httpx.Client(base_url=url) as http:
        script = http.get("/static/live.js")
        assert script.headers["Cache-Control"] == "no-cache"
        seen = {"If-None-Match": script.headers["ETag"]}
        again = http.get("/static/live.js", headers=seen)
        assert (again.status_code, again.headers["Cache-Control"]) == (304, "no-cache")


def test_button_that_is_pressed_is_there_when_it_is_let_go(page, url, name, place):
    with Client(url) as client:
        client.promote(name, 1, "staging", expect=None)
        page.goto(f"{place}/aliases")
        button = page.get_by_role("button", name="Delete")
        button.hover()
        page.mouse.down()
        client.promote(name, 2, "production", expect=None)
        page.evaluate("renew()")
        expect(page.get_by_role("region", name="Alias production")).to_have_count(0)
        page.mouse.up()
        expect(page.get_by_role("region", name="Alias staging")).to_have_count(0)
        expect(page.get_by_role("region", name="Alias production")).to_be_visible()
        assert [one.alias for one in client.aliases(name)] == ["production"]
