"""The same tasks in MLflow's own page, as its version 3.17 has it."""

from __future__ import annotations

from typing import Final

from playwright.sync_api import Locator, Page, expect

from benchmarks.clicks.hand import Hand, Journey

RUN: Final = "tiny"
REASON: Final = "passed the evaluation"


def settle(page: Page) -> None:
    """What somebody does once: the view of model training, and away with what lies over it."""
    page.goto("/")
    page.get_by_role("button", name="Close alert").click()
    page.get_by_role("button", name="Model training").click()
    page.get_by_role("button", name="Close", exact=True).click()
    page.get_by_role("link", name="Model registry").click()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()


def find_the_latest(hand: Hand) -> None:
    _experiment(hand)
    link = hand.page.locator(f"a[href*='/models/{RUN}/versions/3']")
    with hand.page.context.expect_page() as opened:  # the version opens in a tab of its own
        hand.click(link)
    expect(opened.value.get_by_role("heading", level=2)).to_have_text("Version 3")
    opened.value.close()


def promote(hand: Hand) -> None:
    _registry(hand)
    hand.click(hand.page.get_by_role("link", name="Version 3"))
    hand.click(_main(hand).get_by_role("button", name="Add", exact=True).first)
    _type_alias(hand)
    expect(_main(hand).get_by_text("production")).to_be_visible()
    hand.click(_main(hand).get_by_role("button", name="Edit", exact=True))
    hand.type(_main(hand).locator("textarea"), REASON)
    hand.click(_main(hand).get_by_role("button", name="Save", exact=True))
    expect(_main(hand).get_by_text(REASON).first).to_be_visible()


def undo(hand: Hand) -> None:
    _registry(hand)
    hand.click(_main(hand).get_by_role("link", name=RUN, exact=True))
    row = hand.page.get_by_role("row", name="Version 1")
    hand.click(row.get_by_role("button", name="Add", exact=True).last)
    _type_alias(hand)
    # The list goes on showing what it showed before; only a page that is loaded anew tells.
    expect(hand.page.get_by_role("dialog")).to_have_count(0)
    hand.page.goto("about:blank")
    hand.page.goto("/#/models")
    expect(_main(hand).get_by_role("link", name="production : Version 1")).to_be_visible()


def compare_metrics(hand: Hand) -> None:
    _models(hand)
    for loss in ("2", "1"):
        expect(hand.page.get_by_role("gridcell", name=loss, exact=True)).to_be_attached()


def get_pytorch_files(hand: Hand) -> None:
    _models(hand)
    hand.click(_main(hand).get_by_role("link", name="step-3"))
    hand.click(_main(hand).get_by_role("link", name="Artifacts"))
    hand.click(_main(hand).get_by_text("artifacts", exact=True))
    for name in ("config.json", "model.safetensors"):
        hand.click(_main(hand).get_by_text(name, exact=True))
        found = hand.download(_download(hand))
        assert found.endswith(name), found


def delete(hand: Hand) -> None:
    _models(hand)
    hand.click(_main(hand).get_by_role("link", name="step-2"))
    hand.click(_main(hand).get_by_role("button", name="More actions"))
    hand.click(hand.page.get_by_role("menuitem", name="Delete"))
    hand.click(hand.page.get_by_role("dialog").get_by_role("button", name="Delete"))
    expect(_main(hand).get_by_role("link", name="step-3")).to_be_visible()
    expect(_main(hand).get_by_role("link", name="step-2")).to_have_count(0)


def _main(hand: Hand) -> Locator:
    return hand.page.get_by_role("main")


def _download(hand: Hand) -> Locator:
    # The button above a file has a picture alone, and no name.
    return _main(hand).locator("button[data-component-id*=artifactview]")


def _experiment(hand: Hand) -> None:
    hand.click(_main(hand).get_by_role("link", name=RUN, exact=True))


def _models(hand: Hand) -> None:
    _experiment(hand)
    hand.click(hand.page.get_by_role("navigation").get_by_role("link", name="Models"))


def _registry(hand: Hand) -> None:
    hand.click(hand.page.get_by_role("link", name="Model registry"))


def _type_alias(hand: Hand) -> None:
    dialog = hand.page.get_by_role("dialog")
    hand.type(dialog.get_by_role("combobox"), "production")
    hand.page.keyboard.press("Enter")
    hand.click(dialog.get_by_role("button", name="Save aliases"))


JOURNEYS: Final[dict[str, Journey | str]] = {
    "find the latest checkpoint of a run": find_the_latest,
    "see who promoted production, and why": "not kept",
    "promote a checkpoint, with a reason": promote,
    "undo a promotion": undo,
    "compare two checkpoints' metrics": compare_metrics,
    "compare two checkpoints' weights": "not in the page",
    "look at a tensor's histogram": "not in the page",
    "get PyTorch files: two, downloaded": get_pytorch_files,
    "see what a run's checkpoints cost": "not in the page",
    "delete a checkpoint": delete,
    "have it back": "not in the page",
}
