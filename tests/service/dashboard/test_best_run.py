"""The best run among many: found in the list, and compared with others."""

import math
import re
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from cairn import annotate_step
from tests.service.dashboard.conftest import AXE, PHONE, opened
from tests.service.dashboard.test_every_page import SERIOUS
from tests.service.stores import annotate, begin_attempt, make_run, publish

ODD = '<b>"odd" & name</b>'
LOSSES = {"sweep-1": (3.0, 1.5, 1.75), "sweep-2": (3.0, 1.0, 2.5), "sweep-3": (3.0, math.nan, 2.0)}


@pytest.fixture(scope="module")
def swept(trained):
    """Three runs with losses, one without, and one with more metrics than lists keep."""
    for number, (name, losses) in enumerate(LOSSES.items()):
        labels = {"owner": "ana", "lr": f"{10.0**-number:g}", "team": "nlp"}
        run = make_run(trained / name, (10, 20, 30), labels=labels)
        for step, loss in zip((10, 20, 30), losses, strict=True):
            metrics = {"train/loss": loss, ODD: -math.inf if step == 10 else number}
            annotate_step(run, step, metrics=metrics, better={"train/loss": "min"}, by="trainer")
    many = make_run(trained / "many")
    attempt = begin_attempt(many, base_step=-1)
    publish(many, attempt.number, 10, config={f"c{number:03}": number for number in range(201)})
    annotate(many, 10, metrics={f"m{number:05}": float(number) for number in range(10_000)})
    return trained


@pytest.fixture
def page(browser, swept, plane):
    with opened(browser, plane) as page:
        yield page


def test_best_run_is_found_by_a_filter_that_is_completed_and_a_column(page):
    page.goto("/")
    box = page.get_by_role("combobox", name="Filter")
    box.press_sequentially("train")
    options = page.get_by_role("listbox", name="Completions").get_by_role("option")
    expect(options).to_have_text(["best.train/loss", "metrics.train/loss"])
    box.press("ArrowDown")
    box.press("Enter")
    expect(options).to_have_count(0)
    box.press_sequentially(" < 1.75 OR best.train/loss > 1.75")
    box.press("Enter")
    rows = page.locator("#runs tbody tr td.title > a:first-child")
    expect(rows).to_have_text(["sweep-3", "sweep-2", "sweep-1"])
    page.get_by_role("combobox", name="Columns").fill("best.train/loss, labels.lr")
    page.get_by_role("combobox", name="Columns").press("Enter")
    # The metric's column stood there before; the label's tells that the new ones are shown.
    expect(page.get_by_role("link", name="lr", exact=True)).to_be_visible()
    page.get_by_role("link", name="train/loss best").click()
    expect(rows).to_have_text(["sweep-2", "sweep-1", "sweep-3"])
    first = page.locator("#runs tbody tr").first
    expect(first.get_by_role("link", name="1", exact=True)).to_have_attribute(
        "href", "/ui/default/sweep-2/steps/20"
    )
    page.get_by_role("link", name="train/loss best").click()
    expect(rows).to_have_text(["sweep-3", "sweep-1", "sweep-2"])
    page.reload()
    expect(rows).to_have_text(["sweep-3", "sweep-1", "sweep-2"])


def test_ticked_runs_are_compared_and_the_address_keeps_what_is_shown(page):
    page.goto("/?q=sweep&columns=best.train/loss")
    for name in LOSSES:
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("button", name="Compare selected (3)").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare 3 runs")
    page.get_by_label("Metric").select_option("train/loss")
    expect(page.get_by_role("img", name="train/loss").locator("canvas")).to_have_count(1)
    notes = page.locator(".curve-notes li")
    expect(notes.filter(has_text="sweep-3")).to_contain_text("1 NaN or inf not drawn")
    page.get_by_label("Horizontal axis").select_option("time")
    page.get_by_label("Log scale").check()
    expect(page).to_have_url(re.compile("metric=train%2Floss.*x=time.*log=true"))
    best = page.get_by_role("region", name="Best value").get_by_role("row", name="train/loss")
    expect(best.get_by_role("cell").nth(1)).to_have_text(re.compile("1 +best"))
    labels = page.get_by_role("region", name="Labels")
    expect(labels.get_by_role("rowheader")).to_have_text(["lr"])
    page.get_by_role("link", name="Show equal rows").click()
    expect(labels.get_by_role("rowheader")).to_have_text(["lr", "owner", "team"])
    expect(page.get_by_label("Metric")).to_have_value("train/loss")
    expect(page.get_by_label("Log scale")).to_be_checked()


def test_comparison_can_be_read_by_everybody_and_on_a_phone(page):
    runs = "&".join(f"run=default/{name}" for name in (*LOSSES, "tiny", "tiny-fork"))
    page.goto(f"/compare/runs?{runs}&equal=true")
    page.wait_for_load_state("networkidle")
    expect(page.get_by_role("region", name="Saved metadata (meta)")).to_be_visible()
    page.evaluate(AXE.read_text(encoding="utf-8"))
    assert page.evaluate(SERIOUS, None) == []
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(SERIOUS, ["color-contrast"]) == []
    page.set_viewport_size(PHONE)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) <= 0


def test_what_a_store_holds_is_text_and_bounded(page):
    columns = quote(f"metrics.'{ODD}',best.'{ODD}',config.c200")
    answer = page.goto(f"/?filter=metrics:*&columns={columns}")
    assert len(answer.body()) < 100_000
    cells = page.get_by_role("cell", name="2", exact=True)
    expect(cells.first).to_be_visible()
    expect(page.get_by_text("no step of these runs says whether")).to_contain_text(ODD)
    expect(page.get_by_text("many has more than 1,000 metrics")).to_be_visible()
    expect(page.get_by_role("cell", name="unknown")).to_have_count(3)  # of the run `many`
    expect(page.get_by_text("lists keep the first 200 entries")).to_be_visible()
    answer = page.goto("/compare/runs?run=default/many&run=default/none&run=x&equal=true")
    assert len(answer.body()) < 200_000
    expect(page.get_by_role("status").first).to_contain_text("Not found: default/none, x/.")
    expect(page.get_by_text("700 more rows are not shown")).to_be_visible()


def test_three_steps_are_ticked_and_compared_with_their_metadata(page):
    page.goto("/ui/default/sweep-1")
    for step in (10, 20, 30):
        page.get_by_label(f"Compare step {step}").check()
    page.get_by_role("button", name="Compare selected (3)").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare 3 steps")
    metrics = page.get_by_role("region", name="Metrics")
    loss = metrics.get_by_role("row", name="train/loss").get_by_role("cell")
    expect(loss).to_have_text(["3", re.compile("1.5.* best"), re.compile("^1.75")])
    expect(page.get_by_role("link", name="20 with 30")).to_have_attribute(
        "href", re.compile("/steps/20/compare.*other=30")
    )
    page.goto("/compare/steps?step=default/tiny/1&step=default/tiny/2&step=x/y/1&equal=true")
    expect(page.get_by_role("status").first).to_contain_text("Not found: x/y/1.")
    meta = page.get_by_role("region", name="Saved metadata (meta)")
    expect(meta.get_by_role("rowheader", name="step", exact=True)).to_be_visible()
    page.goto("/ui/default/tiny/steps/1/config")
    expect(page.get_by_role("region", name="Saved metadata (meta)")).to_contain_text("step")
    page.goto("/ui/default/tiny/steps/1/compare?other=2")
    expect(page.locator("#meta").get_by_role("rowheader").first).to_be_visible()
