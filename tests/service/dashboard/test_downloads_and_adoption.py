"""Files of a step are kept from its page, and what plain Orbax has saved is adopted from one."""

import json
import re

import pytest
from playwright.sync_api import expect

from cairn import Client
from cairn.state.checkpointing.trees import nest
from tests.plain_orbax import manager
from tests.service.dashboard.conftest import opened
from tests.service.jobs import CONFIG, leaves_of

STEP = "/ui/default/tiny/steps/2"


def test_file_of_a_step_is_downloaded_as_it_lies_in_the_store(page, trained, tmp_path):
    page.goto(STEP)
    page.get_by_role("link", name="Files", exact=True).click()
    values = page.get_by_role("link", name="/d/").first.inner_text()
    for name in ("_CHECKPOINT_METADATA", values):
        with page.expect_download() as download:
            page.get_by_role("link", name=name, exact=True).click()
        target = tmp_path / "file"
        download.value.save_as(target)
        assert download.value.suggested_filename == name.rpartition("/")[2]
        assert target.read_bytes() == (trained / "tiny/attempts/1/2" / name).read_bytes()
    expect(page.get_by_role("heading", name="Checkpoint files")).to_be_visible()


@pytest.fixture(scope="module")
def saved_by_orbax(trained):
    manager(trained / "old-runs")
    return "old-runs"


def ask(page, folder, run):
    page.get_by_label("Orbax folder").fill(folder)
    page.get_by_label("Run name").fill(run)
    page.get_by_role("button", name="Import", exact=True).click()


def test_folder_of_plain_orbax_becomes_a_run_whose_files_are_its_owners(
    page, trained, saved_by_orbax, tmp_path
):
    page.goto("/")
    page.get_by_role("link", name="Import Orbax checkpoints…").click()
    ask(page, saved_by_orbax, "adopted")
    card = page.locator("#adopt-result .operation")
    expect(card).to_have_attribute("data-state", "succeeded", timeout=30_000)
    expect(card).to_contain_text("2 imported")
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
    expect(card).to_contain_text("0 imported, 2 unchanged", timeout=30_000)


@pytest.fixture(scope="module")
def model_of_orbax(trained):
    manager(trained / "old-model", {"params": nest(leaves_of())}, steps=(5,))
    return "old-model"


def describe(page, config, rules):
    page.get_by_label("Config: Hugging Face's config.json").fill(config)
    page.get_by_label("Map of paths, as JSON").fill(rules)


def test_folder_is_adopted_with_a_model_from_files_and_can_be_exported(
    page, model_of_orbax, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    page.goto("/adopt")
    page.get_by_label("Config from a file").set_input_files(tmp_path / "config.json")
    config = page.get_by_label("Config: Hugging Face's config.json")
    expect(config).to_have_value((tmp_path / "config.json").read_text())
    page.get_by_label("Map of paths, as JSON").fill('{"state/params/(.*)": "\\\\1"}')
    ask(page, model_of_orbax, "with-model")
    card = page.locator("#adopt-result .operation")
    expect(card).to_have_attribute("data-state", "succeeded", timeout=30_000)
    page.goto("/ui/default/with-model/steps/5")
    page.get_by_role("button", name="Export", exact=True).click()
    export = page.locator(".operation[data-name=Export]").first
    expect(export).to_have_attribute("data-state", "succeeded", timeout=30_000)


MODELS_THAT_CAN_NOT_BE = (
    ("{", "{}", "config: this is not JSON"),
    ("[]", "{}", "config: this is JSON, but no object"),
    ('{"model_type": "llama"}', "", "map: fill it in too"),
    ("", '{"a": "b"}', "config: fill it in too"),
    ('{"model_type": "none"}', '{"a": "b"}', "expected model_type to be one of"),
    (json.dumps(CONFIG.to_hf()), '{"(": "b"}', "unterminated subpattern"),
)
"""Config, map, and what is said of them."""


def test_model_that_can_not_be_is_told_where_it_was_asked(browser, plane, model_of_orbax):
    with opened(browser, plane, "422 (Unprocessable") as page:
        page.goto("/adopt")
        for config, rules, told in MODELS_THAT_CAN_NOT_BE:
            describe(page, config, rules)
            ask(page, model_of_orbax, "never")
            alert = page.locator("#adopt-result").get_by_role("alert")
            expect(alert).to_contain_text(told)
            expect(page.get_by_label("Map of paths, as JSON")).to_have_value(rules)


@pytest.fixture(scope="module")
def adopted_folder(trained, plane):
    """A folder that a run has adopted."""
    manager(trained / "first-runs")
    with Client(plane) as client:
        client.wait(client.adopt("first-runs", "first").id)
    return "first-runs"


def test_what_can_not_be_adopted_is_told_where_it_was_asked(
    browser, plane, saved_by_orbax, adopted_folder
):
    refusals = (
        ("/etc", "etc", "lie outside the root", "409 (Conflict)"),
        ("nowhere", "new", "Nothing to adopt", "404 (Not Found)"),
        ("tiny/attempts", "new", "run", "422 (Unprocessable Entity)"),
        (saved_by_orbax, "tiny", "The name is taken", "409 (Conflict)"),
        (adopted_folder, "twice", "Another run adopts the folder", "409 (Conflict)"),
    )
    with opened(browser, plane, *{status for *_, status in refusals}) as page:
        page.goto("/adopt")
        for folder, run, told, status in refusals:
            with page.expect_response(lambda answer: answer.request.method == "POST") as answer:
                ask(page, folder, run)
            assert status.startswith(str(answer.value.status))
            alert = page.locator("#adopt-result").get_by_role("alert")
            expect(alert).to_contain_text(told)
            expect(alert).to_be_focused()
            expect(page.get_by_label("Orbax folder")).to_have_value(folder)


def test_without_scripts_an_error_of_adopting_is_a_page(browser, plane, saved_by_orbax):
    with opened(browser, plane, "404 (Not Found)") as page:
        browsing = page.context.new_cdp_session(page)
        browsing.send("Emulation.setScriptExecutionDisabled", {"value": True})
        page.goto("/adopt")
        ask(page, "nowhere", "new")
        expect(page.get_by_role("heading", level=1)).to_have_text(re.compile("Not found"))
        expect(page.get_by_role("link", name="All runs")).to_be_visible()
