"""The manager on a bucket does what it does on a disk."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cairn import CheckpointManager, SaveError
from tests.storage.states import assert_same

args = ocp.args


def state() -> dict[str, Any]:
    split = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    return {"w": jax.device_put(jnp.arange(8.0), split), "host": np.arange(3)}


def test_a_loop_on_a_bucket_keeps_restores_and_deletes(gcs: Any) -> None:
    folder = f"{gcs.bucket_uri}/run"
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, best_fn=lambda found: found["loss"], best_mode="min"
    )
    given = args.Composite(state=args.StandardSave(state()), text=args.JsonSave({"at": 1}))
    with CheckpointManager(folder, options=options, metadata={"version": 1}) as manager:
        for step, loss in enumerate([0.5, 0.25, 0.75], 1):
            manager.save(step, args=given, metrics={"loss": loss})
        manager.wait_until_finished()
        assert [*manager.all_steps()] == [2, 3]
    with CheckpointManager(folder, options=options) as again:
        assert ([*again.all_steps()], again.best_step()) == ([2, 3], 2)
        assert again.metadata().custom_metadata == {"version": 1}
        bare = {"w": jax.ShapeDtypeStruct((8,), jnp.float32), "host": np.zeros(3, int)}
        for wanted in (None, args.StandardRestore(bare), args.PyTreeRestore()):
            found = again.restore(again.best_step(), args=args.Composite(state=wanted, text=None))
            assert_same(found.state, state())
            assert found.state["w"].sharding == state()["w"].sharding
            assert found.text == {"at": 1}
        again.delete(2)
        again.reload()
        assert [*again.all_steps()] == [3]


@pytest.mark.timeout(60)
def test_a_save_that_the_bucket_refuses_is_told_and_the_steps_before_it_stay(gcs: Any) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with CheckpointManager(f"{gcs.bucket_uri}/run", options=options) as manager:
        manager.save(1, args=args.StandardSave(state()))
        manager.wait_until_finished()
        gcs.faults.add("status", operation="upload", name="manifests/2", status=403, count=None)
        manager.save(2, args=args.StandardSave(state()))
        with pytest.raises(SaveError):
            manager.wait_until_finished()
        gcs.faults.clear()
        assert [*manager.all_steps()] == [1]
        assert_same(manager.restore(1), state())
        manager.save(3, args=args.StandardSave(state()))
        manager.wait_until_finished()
        assert [*manager.all_steps()] == [3]


def test_a_deletion_that_the_bucket_refuses_is_logged_and_done_by_a_later_save(
    gcs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with CheckpointManager(f"{gcs.bucket_uri}/run", options=options) as manager:
        manager.save(1, args=args.StandardSave(state()))
        manager.wait_until_finished()
        gcs.faults.add("status", operation="upload", name="trash/1", status=403, count=None)
        manager.save(2, args=args.StandardSave(state()))
        assert [*manager.all_steps()] == [2]
        manager.wait_until_finished()
        assert "403" in caplog.text or "trash" in caplog.text
        assert [*manager.all_steps()] == [1, 2]
        gcs.faults.clear()
        manager.save(3, args=args.StandardSave(state()))
        manager.wait_until_finished()
        assert [*manager.all_steps()] == [3]
