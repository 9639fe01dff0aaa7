"""What pages say of what they show: mistakes beside their form, states, axes, placements."""

import re

import pytest
from playwright.sync_api import expect

from cairn import Client
from tests.service.dashboard.conftest import opened

RUN = "/ui/default/tiny"
STEP = f"{RUN}/steps/2"
TENSOR = f"{STEP}/tensor?item=model&path=model/layers/0/mlp/gate_proj/kernel"
UNPROCESSABLE = "422 (Unprocessable"


@pytest.mark.parametrize(
    ("path", "field", "button", "wrong", "right", "part", "shown"),
    [
        (RUN, "Filter", "Filter", "metrics.loss <", "step = 2", "#steps", "tr[data-step='2']"),
        ("/audit", "Filter", "Filter", "action", "action:alias", "#audit", "table, .empty"),
        (
            *(f"{STEP}/plan", "Devices along each axis of the mesh", "Plan"),
            *("fsdp", "fsdp=2", "#plan", "dl.figures"),
        ),
    ],
)
def test_mistake_is_said_below_its_form_which_can_be_sent_again(
    browser, plane, path, field, button, wrong, right, part, shown
):
    with opened(browser, plane, UNPROCESSABLE) as page:
        page.goto(path)
        page.get_by_label(field, exact=True).fill(wrong)
        page.get_by_role("button", name=button, exact=True).click()
        expect(page.locator(part).get_by_role("alert")).to_contain_text("expected")
        expect(page.get_by_label(field, exact=True)).to_have_value(wrong)
        page.get_by_label(field, exact=True).fill(right)
        page.get_by_role("button", name=button, exact=True).click()
        expect(page.locator(part).locator(shown).first).to_be_visible()
        expect(page.locator(part).get_by_role("alert")).to_have_count(0)


def test_address_with_a_mistake_leads_to_the_page_without_it(browser, plane):
    with opened(browser, plane, UNPROCESSABLE) as page:
        page.goto(f"{RUN}?filter=metrics.loss+%3C")
        expect(page.get_by_text("at character 15")).to_have_count(1)
        page.get_by_role("link", name="Ask again from the beginning").click()
        expect(page.locator("tr[data-step='2']")).to_be_visible()


def test_part_of_a_tensor_that_it_does_not_have_is_said_instead_of_shown(page):
    page.goto(f"{TENSOR}&slice=0:4,0:9,0")
    expect(page.get_by_role("alert")).to_contain_text("expected")
    expect(page.get_by_role("img", name=re.compile("Values of"))).to_have_count(0)
    expect(page.get_by_role("img", name=re.compile("Histogram from"))).to_be_visible()


def test_tensor_is_split_on_a_mesh_as_a_load_would_split_it(page):
    page.goto(f"{TENSOR}&mesh=fsdp%3D2,tp%3D4")
    panel = page.get_by_role("region", name="On a mesh")
    expect(panel).to_contain_text("16 × 16")
    expect(panel).to_contain_text("axes (embed, mlp)")
    expect(panel.get_by_role("img", name="2 × 4 parts")).to_be_visible()
    tab = page.get_by_role("link", name="Tensors", exact=True)
    expect(tab).to_have_attribute("aria-current", "true")
    page.get_by_label("Place in the tree").get_by_role("link", name="mlp").click()
    expect(page.get_by_role("link", name="gate_proj/kernel")).to_be_visible()


def test_step_that_was_verified_is_so_on_each_of_its_pages(page, plane):
    with Client(plane) as client:
        client.wait(client.verify("tiny", 2).id)
    for part in ("", "/tensors", "/config", "/files", "/plan"):
        page.goto(f"{STEP}{part}")
        expect(page.locator("#badges .state")).to_have_text("verified")
    page.goto(RUN)
    expect(page.locator("tr[data-step='2'] .state")).to_have_text("verified")
    expect(page.locator(".legend.marks")).to_have_text(re.compile(r"1 available\s+1 verified"))


def test_list_of_runs_names_aliases_and_begins_with_the_newest(page):
    page.goto("/")
    names = page.locator("#runs td.title > a:first-child")
    assert names.first.text_content() == "empty"
    page.get_by_label("Sort by").select_option("Name")
    expect(names).to_have_text(["empty", "tiny", "tiny-fork", "writing"])
    page.get_by_role("link", name="staging 1").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Step 1")


def test_marks_of_an_axis_are_told_apart(page):
    page.goto(RUN)
    expect(page.locator("[data-metric] canvas")).to_have_count(2)

    def marks(numbers):
        return page.evaluate("numbers => figures(null, numbers)", numbers)

    assert marks([0, 0.0002, 0.0004, 0.001]) == ["0", "0.0002", "0.0004", "0.0010"]
    assert marks([2.75, 3, 3.25]) == ["2.75", "3.00", "3.25"]
    assert marks([0, 5e7, 1e8, 2.5e8]) == ["0", "0.5e8", "1.0e8", "2.5e8"]
    assert marks([1e-6, 2e-6]) == ["1e-6", "2e-6"]
    assert marks([-200, 0, 200]) == ["-200", "0", "200"]
    assert marks([0]) == ["0"]


def test_alias_goes_back_from_its_history_if_nobody_was_faster(browser, plane):
    with opened(browser, plane, "412 (Precondition Failed)") as page, Client(plane) as client:
        first = client.promote("tiny", 1, "candidate", expect=None)
        now = client.promote("tiny", 2, "candidate", expect=first.sequence)
        page.goto(f"{RUN}/aliases")
        section = page.get_by_role("region", name="Alias candidate")
        expect(section.get_by_text("Back to step")).to_have_count(1)
        faster = client.promote("tiny", 2, "candidate", reason="again", expect=now.sequence)
        section.get_by_text("Back to step 1").click()
        section.get_by_label("Why").fill("step 2 repeats itself")
        section.get_by_role("button", name="Move candidate back").click()
        expect(page.get_by_role("alert")).to_contain_text("Somebody was faster")
        page.reload()
        section.get_by_text("Back to step 1").click()
        section.get_by_label("Why").fill("step 2 repeats itself")
        section.get_by_role("button", name="Move candidate back").click()
        expect(page.get_by_role("alert")).to_contain_text("candidate points at step 1 now")
        page.get_by_role("link", name="Its history").click()
        expect(section.get_by_role("row").nth(1)).to_contain_text("step 2 repeats itself")
        assert client.alias_history("tiny", "candidate").events[0].sequence == faster.sequence + 1
