"""What pages say of what they show: mistakes beside their form, states, axes, placements."""

import re

import httpx
from playwright.sync_api import expect

from cairn import Client
from tests.service.dashboard.conftest import opened

RUN = "/ui/default/tiny"
STEP = f"{RUN}/steps/2"
TENSOR = f"{STEP}/tensor?item=model&path=model/layers/0/mlp/gate_proj/kernel"
UNPROCESSABLE = "422 (Unprocessable"


FORMS = (
    (RUN, "Filter", "Filter", "#steps", "tr[data-step='2']"),
    ("/audit", "Filter", "Filter", "#audit", "table, .empty"),
    (f"{STEP}/plan", "Mesh", "Check", "#plan", "dl.figures"),
)
"""A page, the field and the button of its form, the part that answers, and what that has then."""
MISTAKES = (
    ("metrics.loss <", "expected", "step = 2"),
    ("action", "expected", "action:alias"),
    ("fsdp", "each axis once", "fsdp=2"),
)
"""What is wrong in each of these forms, what is said of it, and what is right."""


def test_mistake_is_said_below_its_form_which_can_be_sent_again(browser, plane):
    with opened(browser, plane, UNPROCESSABLE) as page:
        for form, mistake in zip(FORMS, MISTAKES, strict=True):
            (path, field, button, part, shown), (wrong, told, right) = form, mistake
            page.goto(path)
            page.get_by_label(field, exact=True).fill(wrong)
            page.get_by_role("button", name=button, exact=True).click()
            expect(page.locator(part).get_by_role("alert")).to_contain_text(told)
            expect(page.get_by_label(field, exact=True)).to_have_value(wrong)
            page.get_by_label(field, exact=True).fill(right)
            page.get_by_role("button", name=button, exact=True).click()
            expect(page.locator(part).locator(shown).first).to_be_visible()
            expect(page.locator(part).get_by_role("alert")).to_have_count(0)


def test_address_with_a_mistake_leads_to_the_page_without_it(browser, plane):
    with opened(browser, plane, UNPROCESSABLE) as page:
        page.goto(f"{RUN}?filter=metrics.loss+%3C")
        expect(page.get_by_text("at character 15")).to_have_count(1)
        page.get_by_role("link", name="Reset").click()
        expect(page.locator("tr[data-step='2']")).to_be_visible()


def test_part_of_a_tensor_that_it_does_not_have_is_said_instead_of_shown(page):
    page.goto(f"{TENSOR}&slice=0:4,0:9,0")
    expect(page.get_by_role("alert")).to_contain_text("expected")
    expect(page.get_by_role("img", name=re.compile("Values of"))).to_have_count(0)
    expect(page.get_by_role("img", name=re.compile("Histogram from"))).to_be_visible()


def test_tensor_is_split_on_a_mesh_as_a_load_would_split_it(page):
    page.goto(f"{TENSOR}&mesh=fsdp%3D2,tp%3D4")
    panel = page.get_by_role("region", name="Sharding on a mesh")
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
    page.goto(STEP)
    expect(page.locator("#badges .state")).to_have_text("verified")
    for part in ("/tensors", "/config", "/files", "/plan"):
        shown = httpx.get(f"{plane}{STEP}{part}").text
        badges = shown.partition('id="badges"')[2].partition('id="step-facts"')[0]
        assert "verified" in badges, part
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
        expect(section.get_by_text("Revert to step")).to_have_count(1)
        faster = client.promote("tiny", 2, "candidate", reason="again", expect=now.sequence)
        section.get_by_text("Revert to step 1").click()
        section.get_by_label("Reason (optional)").fill("step 2 repeats itself")
        section.get_by_role("button", name="Revert candidate").click()
        expect(page.get_by_role("alert")).to_contain_text("Already changed by")
        page.reload()
        section.get_by_text("Revert to step 1").click()
        section.get_by_label("Reason (optional)").fill("step 2 repeats itself")
        section.get_by_role("button", name="Revert candidate").click()
        expect(page.get_by_role("alert")).to_contain_text("candidate now points to step 1")
        page.get_by_role("alert").get_by_role("link", name="History").click()
        expect(section.get_by_role("row").nth(1)).to_contain_text("step 2 repeats itself")
        assert client.alias_history("tiny", "candidate").events[0].sequence == faster.sequence + 1


def test_theme_that_was_chosen_is_that_of_every_page(browser, plane):
    """That of the API too, which is shown by a viewer of our own."""
    with opened(browser, plane) as page:
        page.emulate_media(color_scheme="light")
        page.goto(RUN)
        paper = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(paper)
        page.get_by_label("Theme").select_option("Dark")
        dark = page.evaluate(paper)
        assert dark != light
        page.get_by_role("link", name="API", exact=True).click()
        # A megabyte and a half of script, on a machine that may have much else to do.
        operations = page.get_by_role("link", name="checkpoints", exact=True)
        expect(operations).to_be_visible()
        assert page.evaluate(paper) == dark
        expect(page.locator("html.dark-mode")).to_have_count(1)
        page.get_by_label("Theme").select_option("System")
        page.reload()
        assert page.evaluate(paper) == light


def test_time_is_told_in_utc_and_by_the_clock_of_the_reader(browser, plane):
    with opened(browser, plane) as page:
        reader = page.context.new_cdp_session(page)
        reader.send("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Tokyo"})
        page.goto(STEP)
        saved = page.locator("#step-facts time").first
        saved.hover()
        utc, local = saved.get_attribute("title").split("\n")
        assert utc.endswith(" UTC")
        assert "GMT+9" in local


def test_alias_in_production_is_moved_only_after_a_confirmation(browser, plane):
    with opened(browser, plane) as page, Client(plane) as client:
        client.promote("tiny", 1, "production", expect=None)
        questions = []
        page.once("dialog", lambda dialog: (questions.append(dialog.message), dialog.dismiss()))
        page.goto(STEP)
        page.get_by_role("button", name="Promote").click()
        assert questions == ["Move production from step 1 to step 2?"]
        assert client.alias("tiny", "production").step == 1
        page.get_by_label("Alias").fill("candidate-2")
        page.get_by_role("button", name="Promote").click()  # no other alias is asked for
        expect(page.get_by_role("alert")).to_contain_text("candidate-2 now points to step 2")
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_label("Alias").fill("production")
        page.get_by_role("button", name="Promote").click()
        expect(page.get_by_role("alert")).to_contain_text("production now points to step 2")


def test_footer_leads_to_the_words_that_pages_use(plane):
    page = httpx.get(f"{plane}{RUN}").text
    (path,) = re.findall(r'<a [^>]*href="([^"#]*)[^"]*"[^>]*>Help and glossary</a>', page)
    assert 'id="lease"' in httpx.get(f"{plane}{path}").text
