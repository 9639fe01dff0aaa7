"""Loops as public code has them see the same with both classes, and go on from the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import orbax_utils
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cairn import CheckpointManager
from tests.storage.states import assert_same

args = ocp.args
Options = ocp.CheckpointManagerOptions
Loop = Callable[[Any, Path], list[Any]]

MOMENTUM = optax.sgd(0.1, momentum=0.9)


def split(count: int = 8) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ("x",)), PartitionSpec("x"))


def described(found: Any) -> Any:
    """Of each leaf its class, and on how many devices it is."""
    return jax.tree.map(
        lambda leaf: len(leaf.sharding.device_set) if isinstance(leaf, jax.Array) else type(leaf),
        found,
    )


class Net(nnx.Module):
    """Layers in a list, statistics, and a stream of keys."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def flax_guide_before_args(manager: Any, folder: Path) -> list[Any]:
    """A TrainState among arrays, saved with `save_args_from_target`."""

    def checkpoint(fill: float) -> Any:
        params = {"w": jnp.full((4, 2), fill)}
        state = TrainState.create(apply_fn=None, params=params, tx=MOMENTUM)
        config = {"dimensions": np.array([5, 3]), "rate": np.array([fill])}
        return {"model": state, "config": config, "data": [jnp.full(3, fill)]}

    with manager(folder, ocp.PyTreeCheckpointer(), Options(max_to_keep=2)) as one:
        for step in range(4):
            given = checkpoint(step)
            save_args = orbax_utils.save_args_from_target(given)
            one.save(step, given, save_kwargs={"save_args": save_args})
    with manager(folder, ocp.PyTreeCheckpointer(), Options(max_to_keep=2)) as again:
        target = checkpoint(-1)
        restore_args = orbax_utils.restore_args_from_target(target)
        raw = again.restore(3)
        return [
            again.all_steps(),
            raw["config"],
            raw["model"]["params"],
            again.restore(3, items=target),
            again.restore(3, items=target, restore_kwargs={"restore_args": restore_args}),
        ]


def t5x_state_and_dataset(manager: Any, folder: Path) -> list[Any]:
    """A tree and JSON, each by a checkpointer of its own, restored onto another mesh."""
    checkpointers = {
        "state": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
        "dataset": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    state = {"p": jax.device_put(jnp.arange(8.0), split())}
    options = Options(max_to_keep=3, keep_period=2)
    with manager(folder, checkpointers, options) as one:
        for step in range(5):
            save_args = {"save_args": jax.tree.map(lambda _: ocp.SaveArgs(), state)}
            items = {"state": state, "dataset": {"at": step}}
            one.save(step, items, save_kwargs={"state": save_args})
    with manager(folder, checkpointers, options) as again:
        onto = ocp.checkpoint_utils.construct_restore_args(state, {"p": split(4)})
        found = again.restore(
            again.latest_step(),
            items={"state": state, "dataset": None},
            restore_kwargs={"state": {"restore_args": onto}},
        )
        only = again.restore(4, items={"dataset": None})
        return [again.all_steps(), found["state"], found["dataset"], dict(only)]


def nnx_guide(manager: Any, folder: Path) -> list[Any]:
    """The state of a module, restored into that of an abstract one."""
    state = nnx.state(Net(0))
    with manager(folder) as one:
        one.save(1, args=args.StandardSave(state))
        one.wait_until_finished()
        abstract = nnx.state(nnx.eval_shape(lambda: Net(1)))
        return [one.restore(1, args=args.StandardRestore(abstract))]


def nnx_model_and_optimizer(manager: Any, folder: Path) -> list[Any]:
    """Three items, of which two are asked for."""

    def states(seed: int) -> tuple[Any, Any, Any]:
        net = Net(seed)
        optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
        return nnx.state(net, nnx.Param), nnx.state(optimizer), nnx.state(net, nnx.BatchStat)

    with manager(folder) as one:
        items = zip(("model", "optimizer", "stats"), states(0), strict=True)
        given = {name: args.StandardSave(state) for name, state in items}
        one.save(1, args=args.Composite(**given))
    with manager(folder) as again:
        model, optimizer, _ = map(args.StandardRestore, states(1))
        found = again.restore(None, args=args.Composite(model=model, optimizer=optimizer))
        return [dict(found)]


def nnx_pure_dicts(manager: Any, folder: Path) -> list[Any]:
    """Plain dicts, whose lists have numbers for keys, read back without a target."""
    pure = nnx.to_pure_dict(nnx.state(Net(0), nnx.Param))
    with manager(folder) as one:
        one.save(1, args=args.StandardSave(pure))
        one.wait_until_finished()
        return [one.restore(1), one.restore(1, args=args.StandardRestore(pure))]


def equinox_arrays(manager: Any, folder: Path) -> list[Any]:
    """A module without what is no array."""

    def arrays(seed: int) -> Any:
        return eqx.filter(eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(seed)), eqx.is_array)

    with manager(folder) as one:
        one.save(1, args=args.StandardSave(arrays(0)))
        one.wait_until_finished()
        return [one.restore(1, args=args.StandardRestore(arrays(1)))]


def handlers_for_each_item(manager: Any, folder: Path) -> list[Any]:
    """Restored without arguments, as the handlers say, and then onto another mesh."""
    handlers = {"state": ocp.StandardCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()}
    names = ("state", "extra")
    with manager(folder, item_names=names, item_handlers=handlers) as one:
        state = args.StandardSave({"p": jax.device_put(jnp.arange(8.0), split())})
        one.save(3, args=args.Composite(state=state, extra=args.JsonSave([1, 2])))
    with manager(folder, item_names=names, item_handlers=handlers) as again:
        onto = {"p": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split(4))}
        wanted = args.Composite(state=args.StandardRestore(onto))
        return [dict(again.restore(3)), dict(again.restore(3, args=wanted))]


def on_the_host_before_args(manager: Any, folder: Path) -> list[Any]:
    """One tree, read as NumPy arrays, and onto a mesh in another dtype."""
    with manager(folder, ocp.PyTreeCheckpointer()) as one:
        one.save(1, {"p": jax.device_put(jnp.arange(8.0), split())})
        one.wait_until_finished()
        placed = {"p": ocp.ArrayRestoreArgs(sharding=split(4), dtype=jnp.bfloat16)}
        return [
            one.restore(1, restore_kwargs={"restore_args": restore_args})
            for restore_args in ({"p": ocp.RestoreArgs(restore_type=np.ndarray)}, placed)
        ]


def restored_while_the_next_is_saved(manager: Any, folder: Path) -> list[Any]:
    """An evaluation in the loop, of the step before."""
    found = []
    with manager(folder, options=Options(max_to_keep=2)) as one:
        for step in range(1, 5):
            one.save(step, args=args.StandardSave({"x": jnp.full(2, step)}))
            if step > 1:
                target = args.StandardRestore({"x": jnp.zeros(2, int)})
                found.append(one.restore(step - 1, args=target))
    return found


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize(
    "loop",
    [
        flax_guide_before_args,
        t5x_state_and_dataset,
        nnx_guide,
        nnx_model_and_optimizer,
        nnx_pure_dicts,
        equinox_arrays,
        handlers_for_each_item,
        on_the_host_before_args,
        restored_while_the_next_is_saved,
    ],
)
def test_a_loop_goes_on_with_what_it_goes_on_with_under_orbax(loop: Loop, tmp_path: Path) -> None:
    theirs = loop(ocp.CheckpointManager, tmp_path / "orbax")
    ours = loop(CheckpointManager, tmp_path / "cairn")
    assert_same(ours, theirs)
    assert described(ours) == described(theirs)
