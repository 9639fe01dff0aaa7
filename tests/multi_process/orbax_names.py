"""What the processes of a job do that call Orbax's names, and do not all do the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from cairn import CheckpointManager, Run, promote_step
from tests.multi_process.own_loops import Net
from tests.multi_process.scenarios import error_of

Options = ocp.CheckpointManagerOptions


def differ(run: str) -> dict[str, Any]:
    """Metrics, functions and arguments that are another's on process 1, and calls that it omits."""
    index = jax.process_index()
    first = index == 0

    def save(manager: CheckpointManager, step: int, metrics: Any = None, args: Any = None) -> None:
        state = ocp.args.StandardSave(nnx.state(Net(step)))  # all processes make it together
        manager.save(step, args=args or state, metrics=metrics)

    def kind_of(call: Callable[[], object]) -> str:
        return str(error_of(call)["kinds"][0])

    def look() -> list[Any]:
        return [[*manager.all_steps()], manager.latest_step(), manager.best_step()]

    best = Options(max_to_keep=2, best_fn=lambda found: found["loss"], best_mode="min")
    seen: list[Any] = []
    with CheckpointManager(f"{run}/metrics", options=best) as manager:
        for step in range(1, 5):
            save(manager, step, {"loss": step if first else -step})
            seen.append(look())
        seen.append(kind_of(lambda: save(manager, 5, {"loss" if not first else "los": 0})))
        seen.append(
            kind_of(lambda: save(manager, 5, args=None if first else ocp.args.ArraySave(1)))
        )
        save(manager, 6, {"loss" if first else "los": 0})
        manager.wait_until_finished()
        seen.append(look())
        if first:
            promote_step(Run.open(f"{run}/metrics"), 1, alias="production", by="me", expect=None)
        jax.experimental.multihost_utils.sync_global_devices("promoted")
        seen.append(kind_of(lambda: manager.delete(1)))
        target = nnx.state(Net(0))
        asked = ocp.args.StandardRestore(target) if first else ocp.args.JsonRestore()
        seen.append(kind_of(lambda: manager.restore(6, args=asked)))
        seen.append(look())

    failing: list[bool] = []

    def fail() -> None:
        if any(failing):
            raise OSError("no copy was made")

    given = ocp.options.AsyncOptions(post_finalization_callback=fail)
    options = Options(max_to_keep=1, async_options=given)
    errors = []
    with CheckpointManager(f"{run}/callback", options=options) as manager:
        for step, failing[:] in enumerate([[False], [first], [not first]], 1):
            save(manager, step)
            errors += [kind_of(manager.wait_until_finished)] if step > 1 else []
            manager.wait_until_finished()
            seen.append(look())

    with CheckpointManager(f"{run}/checks", options=Options(max_to_keep=1)) as manager:
        save(manager, 1)
        while first and manager.is_saving_in_progress():
            time.sleep(0.01)
        if first:  # the other may be saving still: Orbax's does not wait for it either
            manager.check_for_errors()
        save(manager, 2)
        manager.wait_until_finished()
        if first:
            in_the_way = Path(run) / "checks/manifests/3.1.json"
            in_the_way.mkdir()
        jax.experimental.multihost_utils.sync_global_devices("in the way")
        save(manager, 3)
        while first and manager.is_saving_in_progress():
            time.sleep(0.01)
        if first:
            errors.append(kind_of(manager.check_for_errors))
            in_the_way.rmdir()
        errors += [kind_of(manager.wait_until_finished)]
        seen.append(look())
        save(manager, 4)
        manager.wait_until_finished()
        seen.append(look())
    return {"seen": seen, "errors": errors}
