"""What people do with the dashboard, in headless Chromium against a running control plane."""

import re

import httpx
import pytest
from playwright.sync_api import expect

from tests.service.dashboard.conftest import opened, text_of
from tests.service.planes import running_plane

STEP = "/ui/default/tiny/steps/2"


def test_newcomer_finds_a_run_and_looks_into_a_tensor(page):
    page.goto("/")
    page.get_by_role("link", name="tiny", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("tiny")
    row = page.locator("tr[data-step='2']")
    expect(row).to_contain_text("available")
    row.get_by_role("link", name="2", exact=True).click()
    page.get_by_role("link", name="Tensors").click()
    page.get_by_label("Search paths").fill("layers 0 gate")
    link = page.get_by_role("link", name="layers/0/mlp/gate_proj/kernel")
    expect(page.get_by_role("table").get_by_role("link")).to_have_count(1)
    link.click()
    expect(page.get_by_text("32 × 64", exact=True)).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("Histogram from"))).to_be_visible()
    picture = page.get_by_role("img", name=re.compile("Values of"))
    expect(picture).to_have_js_property("naturalWidth", 64)
    page.get_by_label("Mesh", exact=True).fill("fsdp=8")
    page.get_by_role("region", name="Sharding on a mesh").get_by_role("button").click()
    expect(page.get_by_text("4 × 64, 1.0 kB")).to_be_visible()


def test_text_typed_before_the_scripts_are_loaded_is_searched_for(page):
    late = []
    page.route("**/htmx.min.js", lambda script: late.append(script))
    page.goto(f"{STEP}/tensors", wait_until="commit")
    page.get_by_label("Search paths").fill("layers 0 gate")
    late.pop().continue_()
    expect(page.get_by_role("table").get_by_role("link")).to_have_count(1)


def test_place_in_the_tree_is_the_same_with_a_slash_at_its_end_and_without(page):
    for slash in ("", "/"):
        page.goto(f"{STEP}/tensors?item=model&prefix=model/layers/0{slash}")
        names = page.locator("#tensors td.title a")
        expect(names.first).to_have_text("input_layernorm/scale")
        texts = names.all_text_contents()
        assert "mlp/" in texts
        assert not any(one.startswith("/") or not one for one in texts)
        expect(page.get_by_label("Place in the tree")).to_contain_text("model / model / layers / 0")
    page.get_by_role("link", name="mlp/").click()
    expect(page.get_by_role("link", name="gate_proj/kernel")).to_be_visible()


def test_prefix_of_a_leaf_shows_its_level_and_of_nothing_says_so(page):
    page.goto(f"{STEP}/tensors?prefix=model/layers/0/mlp/gate_proj/kernel")
    expect(page.locator("#tensors td.title a")).to_have_text(["kernel"])
    page.goto(f"{STEP}/tensors?prefix=model/lay")
    expect(page.get_by_role("heading", name="Nothing here")).to_be_visible()
    page.get_by_role("link", name="Show the tree").click()
    expect(page.locator("#tensors td.title a").first).to_be_visible()


def test_runs_are_searched_while_typing_and_the_address_says_what_for(page):
    page.goto("/")
    rows = page.locator("#runs tbody tr")
    expect(rows).to_have_count(4)
    page.keyboard.press("/")
    page.keyboard.type("TINY")
    expect(rows).to_have_count(2)
    page.get_by_label("Owner").fill("ana")
    expect(rows).to_have_count(2)  # a fork has its parent's labels
    page.get_by_label("Search").fill("")
    page.get_by_label("Owner").fill("")
    page.get_by_label("State").select_option("in_flight")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("saving step 300")
    page.reload()
    expect(rows).to_have_count(1)
    page.get_by_label("Search").fill("nothing")
    expect(page.get_by_role("heading", name="No matching runs")).to_be_visible()


def test_metrics_are_drawn_and_steps_sorted_and_filtered(page):
    page.goto("/ui/default/tiny")
    charts = page.locator("[data-metric] canvas")
    expect(charts).to_have_count(2)
    steps = page.locator("#steps tbody tr td.title")
    expect(steps).to_have_text(["2", "1"])
    page.get_by_role("link", name="loss", exact=True).click()
    expect(steps).to_have_text(["1", "2"])
    page.get_by_label("Filter", exact=True).fill("metrics.loss < 1.5")
    page.get_by_role("button", name="Filter").click()
    expect(steps).to_have_text(["2"])


def test_two_steps_are_ticked_and_compared(page):
    page.goto("/ui/default/tiny")
    page.get_by_label("Compare step 1").check()
    page.get_by_label("Compare step 2").check()
    page.get_by_role("button", name="Compare selected").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare 1 with 2")
    loss = page.get_by_role("row", name=re.compile("^loss"))
    expect(loss).to_contain_text("-1")
    expect(loss).to_contain_text("better")
    layers = page.get_by_role("table", name="Layer")
    tensors = page.get_by_role("table", name="Tensor", exact=True)
    expect(layers.get_by_role("rowheader", name="model/layers/0", exact=True)).to_be_visible()
    expect(tensors).to_have_count(0)
    page.get_by_text(re.compile("^All .* tensors$")).click()
    for table in (layers, tensors):
        expect(table).to_be_visible()
        shares = table.locator("rect").evaluate_all(
            "all => all.map(one => +one.getAttribute('width'))"
        )
        assert shares[0] == 200
        assert shares == sorted(shares, reverse=True)
    assert page.get_by_role("link", name="Swap").get_attribute("href").endswith("other=1")


def test_equal_leaves_of_two_runs_are_told_from_digests(plane):
    compared = text_of(plane, "/ui/default/tiny/steps/1/compare?other_run=tiny-fork&other=1")
    assert "tensors are identical" in compared


def test_one_ticked_step_is_not_enough_and_the_other_is_asked_for(page):
    page.goto("/ui/default/tiny")
    page.get_by_label("Compare step 1").check()
    page.get_by_role("button", name="Compare selected").click()
    expect(page.get_by_role("alert")).to_contain_text("two steps or more")


def test_step_is_promoted_with_a_reason_that_its_history_keeps(page):
    page.goto(STEP)
    page.get_by_label("Alias").fill("production")
    page.get_by_label("Reason (optional)", exact=True).first.fill("best so far")
    page.get_by_role("button", name="Promote").click()
    expect(page.get_by_role("alert")).to_contain_text("production now points to step 2")
    expect(page.locator("#badges")).to_contain_text("production")
    page.get_by_role("alert").get_by_role("link", name="History").click()
    section = page.get_by_role("region", name="Alias production")
    expect(section).to_contain_text("best so far")
    expect(section).to_contain_text("loopback")


def test_steps_to_compare_are_named_by_an_alias_too(page, browser, plane):
    page.goto("/compare")
    for side, step in (("Step A", "1"), ("Step B", "production")):
        group = page.get_by_role("group", name=side)
        group.get_by_label("Run").fill("tiny")
        group.get_by_label("Step").fill(step)
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare 1 with 2")
    with opened(browser, plane, "404 (Not Found)") as lost:
        lost.goto("/compare?root=default&run=tiny&step=1&other=prodution")
        expect(lost.get_by_text("production").first).to_be_visible()  # what there is


def test_promotion_after_somebody_else_says_who_was_faster(browser, plane):
    with opened(browser, plane, "412 (Precondition Failed)") as page:
        page.goto(STEP)
        api = f"{plane}/v1/roots/default/runs/tiny"
        now = httpx.get(f"{api}/aliases/staging")
        faster = httpx.post(
            f"{api}/checkpoints/2:promote",
            json={"alias": "staging", "reason": "I am quick"},
            headers={"If-Match": now.headers["ETag"]},
        )
        assert faster.status_code == 200
        page.get_by_label("Alias").fill("staging")
        page.get_by_role("button", name="Promote").click()
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("Already changed by")
        expect(alert).to_contain_text("I am quick")
        expect(alert).to_be_focused()
        assert httpx.get(f"{api}/aliases/staging").json()["sequence"] == faster.json()["sequence"]
        page.get_by_role("button", name="Promote step 2 anyway").click()
        expect(alert).to_contain_text("staging now points to step 2")


def test_export_shows_progress_to_its_end_and_its_files_after_a_reload(page, tmp_path):
    """Which the graph of the run leads to as well."""
    page.goto(STEP)
    page.get_by_role("button", name="Export", exact=True).click()
    card = page.locator(".operation").first
    high = card.bounding_box()["height"]
    expect(card).to_have_attribute("data-state", "succeeded", timeout=30_000)
    assert card.bounding_box()["height"] == pytest.approx(high, abs=1)
    assert card.locator("progress").evaluate("bar => bar.value === bar.max && bar.max > 1000")
    page.goto(f"{STEP}/files")
    expect(page.locator("main")).to_contain_text("max shard5.0 GB")
    expect(page.locator("main")).not_to_contain_text("None")
    page.goto(STEP)
    page.locator(".operation").first.get_by_role("link", name="Files").click()
    expect(page.get_by_role("link", name="config.json")).to_be_visible()
    expect(page.locator(".label", has_text="max shard")).to_contain_text("5.0 GB")
    expect(page.get_by_text("None")).to_have_count(0)
    with page.expect_download() as download:
        page.get_by_role("link", name="model.safetensors").click()
    target = tmp_path / "model.safetensors"
    download.value.save_as(target)
    assert target.stat().st_size > 100_000
    expect(page.get_by_text("AutoModelForCausalLM.from_pretrained")).to_be_visible()
    page.goto("/ui/default/tiny/lineage")
    graph = page.get_by_role("region", name="Graph of parents, forks, exports and rollbacks")
    node = graph.locator("svg a", has_text="Hugging Face files").filter(has_text="of step 2")
    expect(node.first).to_be_visible()
    assert node.first.get_attribute("href").startswith("/artifacts/default~tiny~2~")
    listed = (
        page.get_by_role("listitem").filter(has_text="Hugging Face files").filter(has_text="step 2")
    )
    listed.first.get_by_role("link", name="Hugging Face files").click()
    expect(page.get_by_role("link", name="model.safetensors", exact=True)).to_be_visible()


def test_job_that_nobody_runs_yet_is_cancelled_and_resumed(browser, trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("idle")
    with (
        running_plane(trained, folder, {"CAIRN_WORKER": "false"}) as (url, _),
        opened(browser, url) as page,
    ):
        page.goto(STEP)
        page.get_by_label("Data type").select_option("float16")
        page.get_by_role("button", name="Export", exact=True).click()
        card = page.locator(".operation").first
        expect(card).to_have_attribute("data-state", "pending")
        page.reload()
        expect(card).to_contain_text("waiting for a worker")
        card.get_by_role("button", name="Cancel").click()
        expect(card).to_have_attribute("data-state", "cancelled")
        card.get_by_role("button", name="Retry").click()
        expect(card).to_have_attribute("data-state", "pending")


def test_labels_and_metrics_are_set_where_they_are_shown(page):
    page.goto("/ui/default/tiny-fork/steps/1")
    notes = page.locator("#notes")
    notes.get_by_text("Edit").click()
    notes.get_by_label("Name").fill("eval")
    notes.get_by_label("Value").fill("passed")
    notes.get_by_role("button", name="Save").click()
    expect(notes).to_contain_text("passed")
    notes.get_by_text("Edit").click()
    notes.get_by_label("Type").select_option("metric")
    notes.get_by_label("Name").fill("bleu")
    notes.get_by_label("Value").fill("31.5")
    notes.get_by_role("button", name="Save").click()
    expect(notes.get_by_role("row", name=re.compile("bleu"))).to_contain_text("31.5")


def test_step_goes_to_the_trash_and_comes_back(page):
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto("/ui/default/writing/steps/100")
    page.get_by_text("More actions").click()
    page.locator("form[action$='/delete']").get_by_label("Reason (optional)").fill("too old")
    page.get_by_role("button", name="Move to trash").click()
    expect(page.get_by_text("In the trash.")).to_be_visible()
    expect(page.get_by_text("too old")).to_be_visible()
    expect(page.locator("#unlisted")).to_contain_text("possibly later")
    page.get_by_role("button", name="Restore").click()
    expect(page.get_by_role("button", name="Promote")).to_be_visible()


def test_fork_is_made_and_the_graph_shows_it(page):
    page.goto(STEP)
    page.get_by_text("More actions").click()
    page.get_by_label("New run name").fill("tiny-next")
    page.get_by_role("button", name="Fork", exact=True).click()
    card = page.locator("#more-result .operation")
    expect(card).to_have_attribute("data-state", "succeeded", timeout=30_000)
    card.get_by_role("link", name="Open tiny-next").click()
    page.get_by_role("link", name="Lineage").click()
    expect(page.get_by_role("link", name="tiny", exact=True)).to_be_visible()
    page.goto("/ui/default/tiny/lineage")
    expect(page.get_by_role("link", name="tiny-next")).to_be_visible()


def test_rollback_names_the_aliases_that_it_would_strand(browser, plane):
    with opened(browser, plane, "409 (Conflict)") as page:
        page.on("dialog", lambda dialog: dialog.accept())
        page.goto("/ui/default/tiny/steps/1")
        page.get_by_text("More actions").click()
        form = page.locator("form[action$='/rollback']")
        expect(form).to_contain_text("production (step 2)")
        form.get_by_role("button", name="Roll back").click()
        expect(page.locator("#more-result").get_by_role("alert")).to_contain_text("production")


def test_retention_is_previewed_before_anything_is_deleted(plane):
    preview = text_of(plane, "/ui/default/writing/storage?keep_last=1")
    assert "This policy deletes 1 of 2 steps" in preview
    assert httpx.get(f"{plane}/v1/roots/default/runs/writing/checkpoints/100").is_success


def test_plan_for_another_mesh_says_what_a_device_holds(plane):
    path = f"{STEP}/plan?mesh=fsdp%3D4"
    plan = text_of(plane, path)
    assert "Fits this mesh." in plan
    assert "Per device" in plan
    assert 'aria-label="Python that loads it on this mesh"' in httpx.get(f"{plane}{path}").text


def test_key_is_made_shown_once_and_revoked(page):
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto("/keys")
    page.get_by_label("Name (shown in the audit log)").fill("ci")
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_role("alert")).to_contain_text("ck_")
    page.get_by_role("link", name="All keys").click()
    expect(page.locator("main")).not_to_contain_text(re.compile(r"ck_[a-z2-7]{12}_"))
    page.get_by_role("row", name=re.compile("^ci")).get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("row", name=re.compile("^ci"))).to_contain_text("revoked")


def test_what_was_done_is_in_the_audit_trail(plane):
    trail = text_of(plane, "/audit?filter=action+%3D+%22alias.promote%22")
    assert "alias.promote" in trail
    assert "tiny" in trail
    assert "run.fork" not in trail


def test_runs_are_reached_and_a_step_promoted_by_keys_alone(page):
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    _tab_to(page, page.get_by_role("link", name="tiny", exact=True))
    page.keyboard.press("Enter")
    _tab_to(page, page.locator("tr[data-step='2'] td.title a"))
    page.keyboard.press("Enter")
    _tab_to(page, page.get_by_label("Alias"))
    page.keyboard.press("Control+A")
    page.keyboard.type("candidate")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("candidate now points to step 2")
    expect(page.get_by_role("alert")).to_be_focused()


def _tab_to(page, wanted):
    expect(wanted).to_be_visible()
    for _ in range(60):
        page.keyboard.press("Tab")
        is_there, outline = wanted.evaluate(
            "one => [one === document.activeElement,"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        assert outline != "none", page.evaluate("document.activeElement.outerHTML")
        if is_there:
            return
    raise AssertionError("60 times Tab did not lead there")
