"""Which steps are due and which stay, over options and histories, beside Orbax's class."""

import datetime
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import CheckpointManager

HISTORIES = st.lists(
    st.tuples(st.integers(1, 2), st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.0]))),
    min_size=2,
    max_size=6,
)
DUE: dict[str, st.SearchStrategy[Any]] = {
    "save_interval_steps": st.sampled_from([1, 2, 3, None]),
    "save_on_steps": st.sampled_from([None, [1, 4]]),
    "should_save_fn": st.sampled_from([None, lambda step, latest: step - (latest or 0) >= 2]),
}
KEPT: dict[str, st.SearchStrategy[Any]] = {
    "max_to_keep": st.sampled_from([None, 1, 2, 3]),
    "keep_period": st.sampled_from([None, 2, 3]),
    "keep_time_interval": st.sampled_from([None, datetime.timedelta(0), datetime.timedelta(1)]),
    "best_fn": st.sampled_from([None, lambda found: found["loss"]]),
    "best_mode": st.sampled_from(["min", "max"]),
    "keep_checkpoints_without_metrics": st.booleans(),
}


def listed(kind: Any, folder: Any, options: dict[str, Any], history: Any) -> list[Any]:
    """What is listed after each call of `save`, with a restart in the middle."""
    seen: list[Any] = []
    step = 0
    for part in (history[: len(history) // 2], history[len(history) // 2 :]):
        with kind(folder, options=ocp.CheckpointManagerOptions(**options)) as manager:
            for more, loss in part:
                step += more
                metrics = None if loss is None else {"loss": loss}
                tree = ocp.args.StandardSave({"x": jnp.int32(step)})
                manager.save(step, args=tree, metrics=metrics)
                seen.append({*manager.all_steps()})
    return seen


@settings(max_examples=4, deadline=None)
@given(st.fixed_dictionaries(DUE), HISTORIES)
def test_steps_are_due_as_with_orbax(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], history: Any
) -> None:
    folder = tmp_path_factory.mktemp("due")
    theirs = listed(ocp.CheckpointManager, folder / "orbax", options, history)
    assert listed(CheckpointManager, folder / "cairn", options, history) == theirs


@settings(max_examples=6, deadline=None)
@given(st.fixed_dictionaries(KEPT), HISTORIES)
def test_the_steps_that_orbax_keeps_stay_and_none_but_the_latest_beside_them(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], history: Any
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    theirs = listed(ocp.CheckpointManager, folder / "orbax", options, history)
    ours = listed(CheckpointManager, folder / "cairn", options, history)
    latest = 0
    for (more, _), kept, found in zip(history, theirs, ours, strict=True):
        latest += more
        assert found == kept | {latest}
