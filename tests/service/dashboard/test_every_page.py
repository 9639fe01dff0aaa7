"""What holds of every page: everybody can read it, and it is light, ours alone and fits a phone."""

import pytest
from playwright.sync_api import Page

from cairn import Client
from tests.service.dashboard.conftest import AXE, DESKTOP, PHONE, opened

MOST_BYTES = 100_000
STEP = "/ui/default/tiny/steps/2"
PAGES = (
    "/",
    "/ui/default/tiny",
    "/ui/default/empty",
    "/ui/default/tiny/aliases",
    "/ui/default/writing/take-over",
    "/ui/default/tiny/lineage",
    "/ui/default/tiny/storage?keep_last=1",
    STEP,
    f"{STEP}/tensors",
    f"{STEP}/tensor?item=model&path=model/layers/0/mlp/gate_proj/kernel",
    f"{STEP}/config",
    f"{STEP}/files",
    f"{STEP}/plan?mesh=fsdp%3D5",
    "/ui/default/writing/steps/300",
    "/ui/default/tiny/steps/1/compare?other=2",
    "/adopt",
    "/compare",
    "/compare/runs?run=default/tiny&run=default/tiny-fork&equal=true",
    "/compare/steps?step=default/tiny/1&step=default/tiny/2&step=default/tiny-fork/1&equal=true",
    "/operations",
    "/health",
    "/audit",
    "/webhooks",
    "/policies",
    "/keys",
    "/help",
)

OTHER_STATES = (
    "/?q=nothing",
    "/?keep_last=1",
    "/ui/default/empty/aliases",
    "/ui/default/empty/take-over",
    f"{STEP}/tensors?q=kernel",
    f"{STEP}/tensors?prefix=model/lay",
)
"""Pages of the same templates; `test_every_page_whole`, which `make proofs` runs, looks at them."""
IN_THE_DARK = (
    "/",
    "/ui/default/tiny",
    "/ui/default/tiny/lineage",
    STEP,
    f"{STEP}/plan?mesh=fsdp%3D5",
    "/ui/default/tiny/steps/1/compare?other=2",
    "/operations",
    "/audit",
)
"""Of each kind of part one: colors have names, which all pages share.

`test_every_page_whole` looks at the others too.
"""

SERIOUS = """async (rules) => {
  const options = { resultTypes: ["violations"] };
  if (rules) options.runOnly = { type: "rule", values: rules };
  const { violations } = await axe.run(document, options);
  return violations
    .filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 160)).join(" | ")}`);
}"""


@pytest.fixture(scope="module")
def visitor(browser, plane):
    with Client(plane) as client:  # so that the pages have an operation to show
        client.wait(client.gather("tiny", 2, dtype="float16").id)
    with opened(browser, plane) as page:
        yield page


def look_at(visitor: Page, path: str, *, in_the_dark: bool) -> None:
    """See that a page is light, can be read by everybody, and fits a phone."""
    visitor.set_viewport_size(DESKTOP)
    visitor.emulate_media(color_scheme="light")
    answer = visitor.goto(path)
    visitor.wait_for_load_state("networkidle")
    assert answer.status == 200
    assert len(answer.body()) < MOST_BYTES
    # By the debugger: the page's own policy lets in no script that is not its own file.
    visitor.evaluate(AXE.read_text(encoding="utf-8"))
    assert visitor.evaluate(SERIOUS, None) == []
    if in_the_dark:
        visitor.emulate_media(color_scheme="dark")
        assert visitor.evaluate(SERIOUS, ["color-contrast"]) == []
    visitor.set_viewport_size(PHONE)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert visitor.evaluate(wide) <= 0


@pytest.mark.parametrize("path", PAGES)
def test_page_can_be_read_by_everybody_and_is_not_panned_sideways(visitor, path):
    look_at(visitor, path, in_the_dark=path in IN_THE_DARK)


@pytest.mark.parametrize("path", ["/", "/ui/default/tiny"])
def test_nothing_is_moved_once_it_was_shown(browser, plane, path):
    with opened(browser, plane) as page:
        page.add_init_script(
            "window.moved = 0; new PerformanceObserver((list) => { for (const one of "
            "list.getEntries()) if (!one.hadRecentInput) moved += one.value; })"
            ".observe({ type: 'layout-shift', buffered: true });"
        )
        page.goto(path)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("moved") < 0.02


def test_line_of_steps_can_be_read_on_a_phone_which_shows_the_last_step_first(page):
    page.set_viewport_size(PHONE)
    page.goto("/ui/default/tiny")
    line = page.locator(".timeline")
    last = line.locator(".mark").last.bounding_box()
    assert 0 <= last["x"] < PHONE["width"]
    assert line.get_by_text("staging").bounding_box()["height"] > 10
    assert line.evaluate("line => line.scrollWidth > 2 * line.clientWidth")
