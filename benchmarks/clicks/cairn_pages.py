"""The ten tasks in Cairn's dashboard, and the run that they are done with."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import optax
from flax import nnx
from playwright.sync_api import Locator, expect

from benchmarks.clicks.hand import Hand, Journey
from cairn import DecoderConfig, DecoderForCausalLM, EasyDeLState, Run
from cairn.storage.runs.promotion import promote_step

RUN: Final = "tiny"
STEPS: Final = (1, 2, 3)
REASON: Final = "passed the evaluation"
CONFIG: Final = DecoderConfig(
    model_type="llama",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def make_store(root: Path) -> None:
    """A run of three steps with a loss; the first is in production, with a reason."""
    for step in STEPS:
        model = DecoderForCausalLM(CONFIG, rngs=nnx.Rngs(step))
        state = EasyDeLState.create(model=model, tx=optax.sgd(0.1), init_opt_state=True)
        save = state.save_state(
            f"{root}/{RUN}", step=step, metrics={"loss": 2.0 / step}, verbose=False
        )
        save.wait()
    promote_step(
        Run.open(f"{root}/{RUN}"),
        1,
        "production",
        by="ben",
        reason="first that learns",
        expect=None,
    )


def find_the_latest(hand: Hand) -> None:
    row = hand.page.get_by_role("row").filter(has=hand.page.get_by_role("link", name=RUN))
    hand.click(row.get_by_role("link", name="3", exact=True))
    expect(hand.page.get_by_role("heading", level=1)).to_have_text("Step 3")


def see_who_promoted(hand: Hand) -> None:
    _run(hand)
    hand.click(hand.page.get_by_role("link", name="Aliases"))
    history = hand.page.get_by_role("region", name="Alias production")
    expect(history).to_contain_text("ben")
    expect(history).to_contain_text("first that learns")


def promote(hand: Hand) -> None:
    find_the_latest(hand)
    hand.type(hand.page.get_by_label("Reason (optional)", exact=True).first, REASON)
    hand.click(hand.page.get_by_role("button", name="Promote"))
    expect(hand.page.get_by_role("alert")).to_contain_text("production now points to step 3")


def undo(hand: Hand) -> None:
    _run(hand)
    hand.click(hand.page.get_by_role("link", name="Aliases"))
    history = hand.page.get_by_role("region", name="Alias production")
    hand.click(history.get_by_role("row").get_by_role("link", name="1", exact=True))
    hand.click(hand.page.get_by_role("button", name="Promote"))
    expect(hand.page.get_by_role("alert")).to_contain_text("production now points to step 1")


def compare_metrics(hand: Hand) -> None:
    _run(hand)
    for step, loss in ((1, "2"), (2, "1")):
        expect(_step(hand, step).locator("[data-name=loss]")).to_have_text(loss)


def compare_weights(hand: Hand) -> None:
    _run(hand)
    for step in (1, 2):
        hand.click(hand.page.get_by_label(f"Compare step {step}"))
    hand.click(hand.page.get_by_role("button", name="Compare selected"))
    expect(hand.page.locator("table.bars tbody tr").first).to_be_visible()


def see_a_histogram(hand: Hand) -> None:
    find_the_latest(hand)
    hand.click(hand.page.get_by_role("link", name="Tensors"))
    hand.type(hand.page.get_by_label("Search paths"), "gate")
    hand.click(hand.page.get_by_role("link", name="mlp/gate_proj/kernel"))
    expect(hand.page.locator(".statistics svg").first).to_be_visible()


def get_pytorch_files(hand: Hand) -> None:
    find_the_latest(hand)
    hand.click(hand.page.get_by_role("button", name="Export", exact=True))
    hand.click(hand.page.locator(".operation").first.get_by_role("link", name="Files"))
    for name in ("config.json", "model.safetensors"):
        found = hand.download(hand.page.get_by_role("link", name=name, exact=True))
        assert found.endswith(name), found


def see_what_it_costs(hand: Hand) -> None:
    _run(hand)
    hand.click(hand.page.get_by_role("link", name="Storage"))
    expect(hand.page.get_by_text("Total size")).to_be_visible()
    expect(hand.page.get_by_role("columnheader", name="Freed if deleted")).to_be_visible()


def delete(hand: Hand) -> None:
    _run(hand)
    hand.click(_step(hand, 2).get_by_role("link", name="2", exact=True))
    hand.click(hand.page.get_by_text("More actions"))
    hand.click(hand.page.get_by_role("button", name="Move to trash"))
    expect(hand.page.get_by_text("In the trash.")).to_be_visible()
    assert len(hand.asked) == 1


def undelete(hand: Hand) -> None:
    _run(hand)
    hand.click(_step(hand, 2).get_by_role("link", name="2", exact=True))
    hand.click(hand.page.get_by_role("button", name="Restore"))
    expect(hand.page.get_by_role("button", name="Promote")).to_be_visible()


def _run(hand: Hand) -> None:
    hand.click(hand.page.get_by_role("link", name=RUN, exact=True))


def _step(hand: Hand, step: int) -> Locator:
    return hand.page.locator(f"tr[data-step='{step}']")


JOURNEYS: Final[dict[str, Journey | str]] = {
    "find the latest checkpoint of a run": find_the_latest,
    "see who promoted production, and why": see_who_promoted,
    "promote a checkpoint, with a reason": promote,
    "undo a promotion": undo,
    "compare two checkpoints' metrics": compare_metrics,
    "compare two checkpoints' weights": compare_weights,
    "look at a tensor's histogram": see_a_histogram,
    "get PyTorch files: two, downloaded": get_pytorch_files,
    "see what a run's checkpoints cost": see_what_it_costs,
    "delete a checkpoint": delete,
    "have it back": undelete,
}
