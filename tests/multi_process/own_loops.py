"""What the processes of a job do whose loop is its own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cairn import Checkpointer, CheckpointManager, Stored, TreeMap
from tests.multi_process.scenarios import error_of
from tests.multi_process.seams import rule_leaves


class Net(nnx.Module):
    """A kernel that all processes hold parts of, twice; and a counter that all of them hold."""

    def __init__(self, fill: float, rows: int = 8) -> None:
        on = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
        values = np.full((rows, 4), fill, np.float32) + np.arange(4, dtype=np.float32)
        split = NamedSharding(on, PartitionSpec("fsdp"))
        kernel = jax.make_array_from_callback(values.shape, split, values.__getitem__)
        self.kernel = nnx.Param(kernel)
        self.tied = self.kernel
        everywhere = NamedSharding(on, PartitionSpec())
        self.count = nnx.BatchStat(jax.device_put(jnp.int32(fill), everywhere))


def go_on(run: str) -> dict[str, Any]:
    """Save twice, and restore what is asked for; then differ in what is asked for."""
    index = jax.process_index()
    with Checkpointer(run, writer_id="job") as checkpointer:
        fresh = [checkpointer.latest_step(), checkpointer.steps()]
        for step, loss in [(1, 0.25), (2, 0.5)]:
            items = {"model": Net(step), "loop": {"epoch": step}}
            checkpointer.save(step, items, metrics={"loss": loss})
        target = {"model": Net(9), "loop": {"epoch": 0}}
        found = {
            step: checkpointer.restore(target, step=step) for step in (None, "best:loss:min", 1)
        }
        errors = [
            error_of(lambda: checkpointer.restore(target, step=1 + index)),
            error_of(lambda: checkpointer.restore({"model": Net(9)}, only=[".*", "count"][index])),
            error_of(lambda: checkpointer.restore({"model": Net(9, rows=8 + 8 * index)})),
        ]
        return {
            "fresh": fresh,
            "steps": checkpointer.steps(),
            "found": [_told(one) for one in found.values()],
            "errors": [(one["kinds"][0], one["text"]) for one in errors],
            "mapped": _mapped(f"{run}-layers"),
        }


def _mapped(run: str) -> dict[str, Any]:
    """Save layers by themselves, and restore them in one array that is split otherwise."""
    on = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    rows, columns = (
        NamedSharding(on, PartitionSpec(*spec)) for spec in [("fsdp",), (None, "fsdp")]
    )
    layers = [np.arange(64, dtype=np.float32).reshape(8, 8) + 64 * number for number in range(3)]
    items = {
        "model": {
            f"layer_{number}": jax.make_array_from_callback((8, 8), rows, values.__getitem__)
            for number, values in enumerate(layers)
        }
    }
    stack = TreeMap({"model/layers": Stored("model/layer_{n}").stack(axis=2)})
    other = TreeMap({"model/layers": Stored("model/layer_{n}").transpose().stack(axis=2)})
    sizes: list[int] = []
    boxes = rule_leaves.StoredTensors.boxes

    def counted(self: Any, name: str, parts: Any) -> Any:
        read = boxes(self, name, parts)
        sizes.append(sum(array.size for array in read))
        return read

    with Checkpointer(run, writer_id="job") as checkpointer:
        checkpointer.save(1, items)
        target = {
            "model": {"layers": jax.ShapeDtypeStruct((8, 8, 3), np.float32, sharding=columns)}
        }
        with mock.patch.object(rule_leaves.StoredTensors, "boxes", counted):
            stacked = checkpointer.restore(target, map=stack)["model"]["layers"]
        maps = [stack, other]
        error = error_of(lambda: checkpointer.restore(target, map=maps[jax.process_index()]))
    whole = np.stack(layers, 2)
    return {
        "is_whole": all(
            np.array_equal(shard.data, whole[shard.index]) for shard in stacked.addressable_shards
        ),
        "sizes": sizes,
        "error": (error["kinds"][0], error["text"]),
    }


def _told(found: dict[str, Any]) -> list[Any]:
    model = found["model"]
    parts = [np.asarray(shard.data).tolist() for shard in model.kernel[...].addressable_shards]
    return [found["loop"]["epoch"], int(model.count[...]), model.tied is model.kernel, parts]


def call_orbax_names(run: str) -> dict[str, Any]:
    """What a loop over Orbax's `CheckpointManager` does, started twice."""
    seen: dict[str, Any] = {"saved": [], "steps": [], "found": []}
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, save_interval_steps=2, best_fn=lambda found: found["loss"], best_mode="min"
    )
    state = nnx.state(Net(0))
    for start in (0, 5):
        with CheckpointManager(run, options=options, item_names=("items",)) as manager:
            latest = manager.latest_step()
            if latest is not None:
                restore_args = ocp.checkpoint_utils.construct_restore_args(state)
                args = ocp.args.PyTreeRestore(state, restore_args=restore_args)
                found = manager.restore(latest, args=ocp.args.Composite(items=args))["items"]
                seen["found"] += [int(found["count"][...]), float(found["kernel"][...].sum())]
            for step in range(start, start + 5):
                items = ocp.args.PyTreeSave(nnx.state(Net(step)))
                metrics = {"loss": 1.0 - step / 10}
                seen["saved"].append(
                    manager.save(step, args=ocp.args.Composite(items=items), metrics=metrics)
                )
            manager.wait_until_finished()
            seen["steps"].append([*manager.all_steps()])
            seen["best"] = manager.best_step()
    return seen
