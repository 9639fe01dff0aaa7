"""Files of a step are kept from its page, and what plain Orbax has saved is adopted from one."""

import re

import pytest
from playwright.sync_api import expect

from tests.plain_orbax import manager
from tests.service.dashboard.conftest import opened

STEP = "/ui/default/tiny/steps/2"


def test_file_of_a_step_is_downloaded_as_it_lies_in_the_store(page, trained, tmp_path):
    page.goto(STEP)
    page.get_by_role("link", name="Files", exact=True).click()
    names = page.get_by_role("table").last.locator("td.title a").all_text_contents()
    values = next(name for name in names if "/d/" in name)
    for name in ("_CHECKPOINT_METADATA", values):
        with page.expect_download() as download:
            page.get_by_role("link", name=name, exact=True).click()
        target = tmp_path / "file"
        download.value.save_as(target)
        assert download.value.suggested_filename == name.rpartition("/")[2]
        assert target.read_bytes() == (trained / "tiny/attempts/1/2" / name).read_bytes()
    expect(page.get_by_role("heading", name="Files of the step")).to_be_visible()


@pytest.fixture(scope="module")
def saved_by_orbax(trained):
    manager(trained / "old-runs")
    return "old-runs"


def ask(page, folder, run):
    page.get_by_label("Folder that Orbax was given").fill(folder)
    page.get_by_label("Name of the run").fill(run)
    page.get_by_role("button", name="Adopt", exact=True).click()


def test_folder_of_plain_orbax_becomes_a_run_whose_files_are_its_owners(
    page, trained, saved_by_orbax, tmp_path
):
    page.goto("/")
    page.get_by_role("link", name="Adopt…").click()
    ask(page, saved_by_orbax, "adopted")
    card = page.locator("#adopt-result .operation")
    expect(card).to_have_attribute("data-state", "succeeded", timeout=30_000)
    expect(card).to_contain_text("2 adopted")
    card.get_by_role("link", name="Open adopted").click()
    expect(page.locator("#steps tbody tr td.title")).to_have_text(["10", "5"])
    page.goto("/ui/default/adopted/steps/10/files")
    with page.expect_download() as download:
        page.get_by_role("link", name="_CHECKPOINT_METADATA", exact=True).click()
    download.value.save_as(tmp_path / "file")
    owners = trained / saved_by_orbax / "10/_CHECKPOINT_METADATA"
    assert (tmp_path / "file").read_bytes() == owners.read_bytes()
    page.goto("/ui/default/adopted/lineage")
    expect(page.locator("main")).to_contain_text(f"{trained}/{saved_by_orbax}")
    expect(page.locator("svg .node.adopted")).to_be_visible()
    expect(page.locator("main")).not_to_contain_text("It began by itself")
    page.goto("/audit")
    expect(page.locator("#audit")).to_contain_text("run.adopt")
    page.goto("/adopt")
    ask(page, saved_by_orbax, "adopted")  # again: nothing is new
    expect(card).to_contain_text("0 adopted, 2 as before", timeout=30_000)


@pytest.mark.parametrize(
    ("folder", "run", "told", "status"),
    [
        ("/etc", "etc", "The folder is in no root", "422 (Unprocessable Entity)"),
        ("nowhere", "new", "nothing to adopt", "404 (Not Found)"),
        ("tiny/attempts", "new", "run", "422 (Unprocessable Entity)"),
        ("old-runs", "tiny", "The name is taken", "409 (Conflict)"),
        ("old-runs", "twice", "Another run adopts the folder", "409 (Conflict)"),
    ],
)
def test_what_can_not_be_adopted_is_told_where_it_was_asked(
    browser, plane, saved_by_orbax, folder, run, told, status
):
    with opened(browser, plane, status) as page:
        page.goto("/adopt")
        ask(page, folder, run)
        alert = page.locator("#adopt-result").get_by_role("alert")
        expect(alert).to_contain_text(told)
        expect(alert).to_be_focused()
        expect(page.get_by_label("Folder that Orbax was given")).to_have_value(folder)


def test_without_scripts_an_error_of_adopting_is_a_page(browser, plane, saved_by_orbax):
    with opened(browser, plane, "404 (Not Found)", java_script_enabled=False) as page:
        page.goto("/adopt")
        ask(page, "nowhere", "new")
        expect(page.get_by_role("heading", level=1)).to_have_text(re.compile("Not found"))
        expect(page.get_by_role("link", name="All runs")).to_be_visible()
