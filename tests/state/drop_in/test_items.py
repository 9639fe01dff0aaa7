"""What a step's items are restored into: containers, kinds of leaves, and where these go."""

import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from cairn import (
    Checkpointer,
    CheckpointManager,
    CorruptionError,
    TreeMismatchError,
    UnsupportedFormatError,
    adopt,
)
from tests.devices import xla_flags
from tests.faults.report import is_long
from tests.programs.program import run as run_program
from tests.storage.states import assert_same

args = ocp.args
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

MIXED = {"device": jnp.arange(4.0), "host": np.arange(4, dtype=np.int32), "none": None}
NUMBERS = {"epoch": 3, "rate": 0.5, "done": True}


def split(*, count: int = 8) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ("x",)), PartitionSpec("x"))


def save(manager: Any, folder: Path, given: Any) -> None:
    with manager(folder) as one:
        one.save(1, args=given)


def restore(manager: Any, folder: Path, wanted: Any) -> Any:
    with manager(folder) as one:
        return one.restore(1, args=wanted)


def kinds(tree: Any) -> Any:
    """Of each leaf its class, and the devices and the sharding of an array."""

    def kind(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return type(leaf), getattr(leaf, "dtype", None)
        spec = getattr(leaf.sharding, "spec", PartitionSpec())
        return jax.Array, leaf.dtype, len(leaf.sharding.device_set), tuple(spec)

    return jax.tree.map(kind, tree)


def train_state() -> TrainState:
    params = {"w": jnp.ones((4, 2))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-2, momentum=0.9))


@pytest.mark.parametrize("wanted", [None, args.StandardRestore()])
def test_without_a_target_leaves_come_back_on_host_or_device_as_they_were_saved(
    tmp_path: Path, wanted: Any
) -> None:
    found = []
    for manager in (ocp.CheckpointManager, CheckpointManager):
        folder = tmp_path / manager.__module__
        save(manager, folder, args.StandardSave(MIXED))
        found.append(kinds(restore(manager, folder, wanted)))
    assert found[0] == found[1]


CONTAINERS = {
    "numbers": NUMBERS,
    "lists": [1, None, [], {"a/b": (jnp.ones(2), {})}, [[np.zeros(3)]]],
    "tuple": (),
    "optimizer": optax.adamw(1e-2).init({"w": jnp.ones(2)}),
    "state": train_state(),
    "ints": {1: jnp.ones(1), 0: jnp.zeros(1)},
}


@pytest.mark.parametrize("tree", [CONTAINERS, [jnp.ones(2), {"a": 1}, None]], ids=["dict", "list"])
@pytest.mark.parametrize("wanted", [None, args.PyTreeRestore()])
def test_without_a_target_containers_and_numbers_come_back_as_with_orbax(
    tmp_path: Path, wanted: Any, tree: Any
) -> None:
    trees, descriptions = [], []
    for manager in (ocp.CheckpointManager, CheckpointManager):
        with manager(tmp_path / manager.__module__) as opened:
            opened.save(1, args=args.PyTreeSave(tree))
            opened.wait_until_finished()
            trees.append(opened.restore(1, args=wanted))
            described = opened.item_metadata(1)
            descriptions.append(jax.tree.map(lambda leaf: (type(leaf), leaf.dtype), described.tree))
    assert kinds(trees[1]) == kinds(trees[0])
    assert_same(trees[1], trees[0])
    assert descriptions[1] == descriptions[0]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"json": []}, "json: Input should be a valid dictionary"),
        ({"single": "yes"}, "single: Input should be a valid boolean"),
        ({"values": {"state": "set"}}, "values/state: Input should be 'array'"),
        ({"containers": {"state": {"lists": [3]}}}, "lists/0: Input should be a valid string"),
        ({"containers": {"state": {"numbers": {"w": "set"}}}}, "numbers/w: Input should be 'bool'"),
        ({"containers": {"state": {"lists": ["w"]}}}, "a leaf, or keys that are no positions"),
        ({"containers": {"state": {"lists": ["dict"]}}}, "keys that are no positions"),
        ({"containers": {"state": {"lists": ["far"]}}}, "keys that are no positions"),
        ({"containers": {"state": {"lists": ["w/deeper"]}}}, "a leaf, or keys"),
        ({"containers": {"state": {"empties": {"w": "List"}}}}, "do not fit the leaves"),
        ({"containers": {"state": {"empties": {"": "None"}}}}, "do not fit the leaves"),
        ({"containers": {"state": {"empties": {"w/deeper": "Dict"}}}}, "do not fit the leaves"),
        (
            {"json": {"rng": {"array": [1], "dtype": "set"}}, "values": {"rng": "numpy state"}},
            "state of NumPy's generator is damaged",
        ),
    ],
)
def test_forged_json_of_the_manager_is_refused(tmp_path: Path, own: Any, message: str) -> None:
    leaf = jnp.ones(2)
    tree = {"w": leaf, "dict": {"a": leaf}, "far": {"0": leaf, "9999999999999999": leaf}}
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"state": tree}, meta={"checkpoint_manager": own})
    with pytest.raises(CorruptionError, match=message):
        restore(CheckpointManager, tmp_path / "run", None)


def test_containers_of_an_imported_step_come_back_as_with_orbax(tmp_path: Path) -> None:
    save(ocp.CheckpointManager, tmp_path / "old", args.PyTreeSave(CONTAINERS))
    imported = restore(CheckpointManager, adopt(tmp_path / "old").run, None)
    expected = restore(ocp.CheckpointManager, tmp_path / "old", args.PyTreeRestore())
    assert kinds(imported) == kinds(expected)
    assert_same(imported, expected)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"] if is_long() else ["rbg"])
def test_keys_and_values_of_variables_come_back_from_imported_and_own_steps_as_with_orbax(
    tmp_path: Path, impl: str
) -> None:
    key = jax.random.key(3, impl=impl)
    leaves = {
        "key": {"value": jax.random.split(key, (2, 3))},
        "on_mesh": {"value": jax.device_put(jnp.arange(8.0), split())},
        "list": [{"value": key}, key, {"value": np.ones(2)}],
    }
    state = nnx.state(nnx.Rngs(params=key, dropout=1))
    dicts, of_nnx = args.StandardSave({"nested": leaves}), args.StandardSave(state)
    for name, saved in (("dicts", dicts), ("nnx", of_nnx)):
        old = tmp_path / f"old-{name}"
        save(ocp.CheckpointManager, old, saved)
        expected = restore(ocp.CheckpointManager, old, args.StandardRestore())
        run = adopt(old).run
        with CheckpointManager(run) as manager:
            described = args.StandardRestore(manager.item_metadata(1))
        for wanted in (None, args.StandardRestore(), args.PyTreeRestore(), described):
            restored = restore(CheckpointManager, run, wanted)
            assert kinds(restored) == kinds(expected)
            assert_same(restored, expected)
        assert_same(restore(CheckpointManager, run, args.StandardRestore(saved.item)), saved.item)
        words = jax.tree.map(ocp.utils.to_shape_dtype_struct, saved.item)
        assert_same(restore(CheckpointManager, run, args.StandardRestore(words)), saved.item)
        save(CheckpointManager, tmp_path / f"own-{name}", saved)
        own = restore(CheckpointManager, tmp_path / f"own-{name}", None)
        assert_same(jax.tree.leaves(own), jax.tree.leaves(expected))


def test_a_placeholder_of_an_imported_variable_leaves_it_out_as_with_orbax(tmp_path: Path) -> None:
    save(ocp.CheckpointManager, tmp_path / "old", args.PyTreeSave({"a": {"value": jnp.ones(2)}}))
    run = adopt(tmp_path / "old").run
    for gap in (..., None):
        wanted = args.PyTreeRestore({"a": {"value": gap}})
        assert restore(CheckpointManager, run, wanted) == {"a": {"value": gap}}


def test_a_step_of_the_checkpointer_comes_back_in_plain_dicts(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"state": {"list": [jnp.ones(2), None, 3]}})
    restored = restore(CheckpointManager, tmp_path / "run", None)
    assert jax.tree.map(np.shape, restored.state) == {"list": {"0": (2,), "2": ()}}


def test_an_items_custom_metadata_comes_back_with_its_description(tmp_path: Path) -> None:
    items = {
        "a": args.StandardSave({"w": jnp.ones(2)}, custom_metadata={"run": "a", "n": [1, 2]}),
        "b": args.PyTreeSave({"w": jnp.ones(2)}, custom_metadata={"run": "b"}),
        "c": args.PyTreeSave({"w": jnp.ones(2)}),
    }
    for manager in (ocp.CheckpointManager, CheckpointManager):
        with manager(tmp_path / manager.__module__) as opened:
            opened.save(1, args=args.Composite(**items))
            opened.wait_until_finished()
            restored = opened.restore(
                1, args=args.Composite(a=args.StandardRestore(), b=args.PyTreeRestore())
            )
            described = opened.item_metadata(1)
        assert kinds(restored["a"]) == kinds({"w": jnp.ones(2)})
        assert described["a"].custom_metadata == {"run": "a", "n": [1, 2]}
        assert described["b"].custom_metadata == {"run": "b"}
        assert described["c"].custom_metadata is None


ROTATED = jax.random.key(4, impl="rbg")
VALUES = {
    "array": (args.ArraySave(jax.device_put(jnp.arange(8.0), split())), args.ArrayRestore()),
    "host": (args.ArraySave(np.arange(3, dtype=np.int8)), args.ArrayRestore()),
    "number": (args.ArraySave(5), args.ArrayRestore()),
    "half": (
        args.ArraySave(jnp.arange(3.0), ocp.SaveArgs(dtype=np.dtype(np.float16))),
        args.ArrayRestore(restore_args=ocp.RestoreArgs(restore_type=np.ndarray)),
    ),
    "typed": (args.JaxRandomKeySave(jax.random.key(3)), args.JaxRandomKeyRestore()),
    "untyped": (args.JaxRandomKeySave(jax.random.PRNGKey(3)), args.JaxRandomKeyRestore()),
    "tuple": (args.NumpyRandomKeySave(np.random.get_state()), args.NumpyRandomKeyRestore()),
    "dict": (
        args.NumpyRandomKeySave(np.random.get_state(legacy=False)),
        args.NumpyRandomKeyRestore(),
    ),
}


def test_items_that_are_one_value_come_back_as_with_orbax(tmp_path: Path) -> None:
    to_save = args.Composite(**{name: pair[0] for name, pair in VALUES.items()})
    to_restore = args.Composite(**{name: pair[1] for name, pair in VALUES.items()})
    trees = []
    for manager in (ocp.CheckpointManager, CheckpointManager):
        save(manager, tmp_path / manager.__module__, to_save)
        trees.append(dict(restore(manager, tmp_path / manager.__module__, to_restore).items()))
    assert kinds(trees[1]) == kinds(trees[0])
    assert_same(trees[1], trees[0])
    without_args = dict(restore(CheckpointManager, tmp_path / manager.__module__, None).items())
    assert_same(without_args, trees[1])


@pytest.mark.parametrize(
    ("handler", "item"),
    [
        (ocp.JsonCheckpointHandler, {"a": [1, None]}),
        (ocp.ArrayCheckpointHandler, np.arange(4)),
        (ocp.NumpyRandomKeyCheckpointHandler, np.random.get_state()),
    ],
)
def test_a_handler_says_what_an_item_without_args_is(
    tmp_path: Path, handler: Any, item: Any
) -> None:
    for number, (handlers, given) in enumerate(
        [(handler(), item), ({"x": handler()}, {"x": item})]
    ):
        with CheckpointManager(tmp_path / f"{number}", item_handlers=handlers) as manager:
            manager.save(1, given)
            manager.wait_until_finished()
            asked = [manager.restore(1), manager.restore(1, None if number == 0 else {"x": None})]
        for restored in asked:
            restored = restored if number == 0 else restored["x"]
            assert jax.tree.all(jax.tree.map(np.array_equal, restored, item))


@pytest.mark.parametrize("key", [ROTATED, jax.random.split(ROTATED, 3)], ids=["one", "many"])
def test_a_key_of_another_kind_keeps_it(tmp_path: Path, key: Any) -> None:
    save(CheckpointManager, tmp_path / "run", args.JaxRandomKeySave(key))
    for wanted in (None, args.JaxRandomKeyRestore()):
        restored = restore(CheckpointManager, tmp_path / "run", wanted)
        assert_same({"key": restored}, {"key": key})


def test_a_value_is_restored_by_the_arguments_of_its_kind(tmp_path: Path) -> None:
    save(CheckpointManager, tmp_path / "run", args.ArraySave(jnp.ones(2)))
    with pytest.raises(UnsupportedFormatError, match="StandardRestoreArgs for an array"):
        restore(CheckpointManager, tmp_path / "run", args.StandardRestore())
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.item_metadata(1).shape == (2,)


def test_numbers_in_the_item_come_back_as_numbers_as_with_orbax(tmp_path: Path) -> None:
    state = train_state()
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(), state)
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), state)
    for wanted in [
        args.PyTreeRestore(state),
        args.PyTreeRestore(state, restore_args=plain),
        args.PyTreeRestore(state, restore_args=on_host),
        args.PyTreeRestore(state, restore_args=ocp.checkpoint_utils.construct_restore_args(state)),
    ]:
        found = []
        for manager in (ocp.CheckpointManager, CheckpointManager):
            folder = tmp_path / manager.__module__
            if not folder.exists():
                save(manager, folder, args.PyTreeSave(state))
            found.append(kinds(restore(manager, folder, wanted)))
        assert found[0] == found[1]


def test_pytree_restore_puts_leaves_where_they_were_saved_whatever_the_item_says(
    tmp_path: Path,
) -> None:
    state = {"w": jax.device_put(jnp.arange(8.0), split())}
    elsewhere = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split(count=4))}
    for item in (elsewhere, {"w": jnp.zeros(8)}, {"w": np.zeros(8, np.float32)}):
        found = []
        for manager in (ocp.CheckpointManager, CheckpointManager):
            folder = tmp_path / manager.__module__
            if not folder.exists():
                save(manager, folder, args.PyTreeSave(state))
            found.append(kinds(restore(manager, folder, args.PyTreeRestore(item))))
        assert found[0] == found[1]
        assert found[1]["w"][2:] == (8, ("x",))


def test_where_the_saved_devices_are_not_here_the_item_or_the_fallback_says_where(
    tmp_path: Path,
) -> None:
    state = {"w": jax.device_put(jnp.arange(8.0), split())}
    save(CheckpointManager, tmp_path / "run", args.StandardSave(state))
    code = f"""
import jax, numpy as np, orbax.checkpoint as ocp
from cairn import CheckpointManager
args = ocp.args
place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
bare = {{"w": jax.ShapeDtypeStruct((8,), "float32")}}
item = {{"w": bare["w"].update(sharding=place)}}
with CheckpointManager({str(tmp_path / "run")!r}) as manager:
    for wanted in (
        args.PyTreeRestore(item),
        args.StandardRestore(bare, fallback_sharding=place),
        args.StandardRestore(fallback_sharding=place),
        args.StandardRestore(manager.item_metadata(1), fallback_sharding=place),
    ):
        found = manager.restore(1, args=wanted)["w"]
        assert found.sharding == place and np.array_equal(found, np.arange(8)), wanted
"""
    done = run_program(["-c", code], env={**os.environ, "XLA_FLAGS": xla_flags(4)})
    assert done.returncode == 0, done.stderr


def test_a_fallback_is_not_used_where_the_saved_devices_are_here(tmp_path: Path) -> None:
    save(
        CheckpointManager,
        tmp_path / "run",
        args.StandardSave({"w": jax.device_put(jnp.arange(8.0), split())}),
    )
    fallback: Sharding = SingleDeviceSharding(jax.devices()[0])
    found = restore(
        CheckpointManager, tmp_path / "run", args.StandardRestore(fallback_sharding=fallback)
    )
    assert found["w"].sharding == split()


@pytest.mark.parametrize("kind", [args.StandardRestore, args.PyTreeRestore])
def test_a_steps_metadata_is_a_target(tmp_path: Path, kind: Any) -> None:
    state = {"w": jax.device_put(jnp.arange(8.0), split()), "host": np.ones(2, np.float32)}
    state["key"] = jax.random.key(3)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=args.StandardSave(state))
        manager.wait_until_finished()
        found = manager.restore(1, args=kind(manager.item_metadata(1)))
    assert kinds(found) == kinds(state)


def test_keys_are_found_by_what_orbax_says_of_their_words(tmp_path: Path) -> None:
    state = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1), 4)}
    words = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    of_words = ocp.checkpoint_utils.construct_restore_args(state)
    save(CheckpointManager, tmp_path / "run", args.PyTreeSave(state))
    for wanted in [
        args.PyTreeRestore(words),
        args.StandardRestore(words),
        args.PyTreeRestore(state, restore_args=of_words),
        args.PyTreeRestore(restore_args=of_words),
    ]:
        assert_same(restore(CheckpointManager, tmp_path / "run", wanted), state)


def test_keys_on_a_mesh_come_back_there_as_with_orbax(tmp_path: Path) -> None:
    half = NamedSharding(split(count=4).mesh, PartitionSpec("x"))
    batch = jax.random.split(jax.random.key(1), 8)
    state = {
        "key": jax.device_put(jax.random.key(3), NamedSharding(split().mesh, PartitionSpec())),
        "keys": jax.device_put(batch, split()),
    }
    moved = {**state, "keys": jax.device_put(batch, half)}
    words = jax.tree.map(ocp.utils.to_shape_dtype_struct, moved)
    of_words = ocp.checkpoint_utils.construct_restore_args(words)
    standard = [args.StandardRestore(one) for one in (None, jax.eval_shape(lambda: state), words)]
    of_trees = [
        args.PyTreeRestore(),
        args.PyTreeRestore(state),
        args.PyTreeRestore(words),
        args.PyTreeRestore(restore_args=of_words),
    ]
    for number, (given, asked) in enumerate(
        [(args.StandardSave(state), [None, *standard]), (args.PyTreeSave(state), of_trees)]
    ):
        found = []
        for manager in (ocp.CheckpointManager, CheckpointManager):
            with manager(tmp_path / f"{manager.__module__}-{number}") as one:
                one.save(1, args=given)
                one.wait_until_finished()
                found.append([one.restore(1, args=wanted) for wanted in asked])
        assert kinds(found[1]) == kinds(found[0])
        assert_same(found[1], found[0])


def test_keys_as_arrays_of_the_host_are_refused_by_name(tmp_path: Path) -> None:
    save(CheckpointManager, tmp_path / "run", args.PyTreeSave({"key": jax.random.key(3)}))
    wanted = args.PyTreeRestore(restore_args={"key": ocp.RestoreArgs(restore_type=np.ndarray)})
    with pytest.raises(TreeMismatchError, match=re.escape("key: np.ndarray for keys")):
        restore(CheckpointManager, tmp_path / "run", wanted)


def test_restore_args_of_another_structure_are_refused_and_listed(tmp_path: Path) -> None:
    save(CheckpointManager, tmp_path / "run", args.PyTreeSave({"a": jnp.ones(2), "b": jnp.ones(2)}))
    item = {"a": jnp.ones(2), "b": jnp.ones(2)}
    on_host = ocp.RestoreArgs(restore_type=np.ndarray)
    wanted = args.PyTreeRestore(item, restore_args={"a": on_host, "z": on_host})
    with pytest.raises(TreeMismatchError, match="b: no restore_args for it") as caught:
        restore(CheckpointManager, tmp_path / "run", wanted)
    assert "z: restore_args for no leaf" in str(caught.value)


PARTS = {"a": jnp.ones(2), "b": {"c": np.ones(2, np.int32)}, "e": {}, "n": None}
PLACED = ocp.ArrayRestoreArgs(sharding=SingleDeviceSharding(jax.devices()[1]))


def test_places_of_a_target_without_a_leaf_and_leaves_of_any_kind_are_taken_as_with_orbax(
    tmp_path: Path,
) -> None:
    a, b = {"a": PLACED}, {"b": {"c": PLACED}}
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(), PARTS)
    standard = [{**PARTS, "a": None}, {**PARTS, "a": {}}, {**PARTS, "b": {"c": None}}]
    trees = [
        *standard,
        {**PARTS, "a": ..., "b": {"c": ...}},
        {**PARTS, "a": "text", "b": {"c": object()}},
        {**PARTS, **a, **b},
        {**PARTS, **a},
    ]
    beside = [
        args.PyTreeRestore(PARTS, restore_args={**plain, **a, "b": {"c": None}}),
        args.PyTreeRestore({**PARTS, "a": None}, restore_args={**plain, **b}),
        args.PyTreeRestore(PARTS, restore_args={**plain, "e": PLACED, "n": PLACED}),
        args.PyTreeRestore(same := {**a, "b": {"c": None}, "e": {}, "n": None}, restore_args=same),
    ]
    of_trees = [*map(args.PyTreeRestore, trees), *beside]
    for number, (given, asked) in enumerate(
        [
            (args.StandardSave(PARTS), [*map(args.StandardRestore, standard)]),
            (args.PyTreeSave(PARTS), of_trees),
        ]
    ):
        found = []
        for manager in (ocp.CheckpointManager, CheckpointManager):
            with manager(tmp_path / f"{manager.__module__}-{number}") as one:
                one.save(1, args=given)
                one.wait_until_finished()
                found.append([kinds(one.restore(1, args=wanted)) for wanted in asked])
        assert found[1] == found[0]


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (args.StandardRestore({**PARTS, "a": ...}), "a: ellipsis is no target of a leaf"),
        (args.StandardRestore({**PARTS, "a": PLACED}), "a: ArrayRestoreArgs is no target"),
        (args.StandardRestore({**PARTS, "a": "text"}), "a: str is no target of a leaf"),
        (args.PyTreeRestore({**PARTS, "z": "text"}), "z: not stored"),
        (args.PyTreeRestore({**PARTS, "b": ...}), "b/c: stored, not in the target"),
        (args.PyTreeRestore({**PARTS, "b": None}), "b/c: stored, not in the target"),
    ],
)
def test_targets_that_say_nothing_of_a_leaf_are_refused_by_name(
    tmp_path: Path, wanted: Any, named: str
) -> None:
    save(CheckpointManager, tmp_path / "run", args.PyTreeSave(PARTS))
    with pytest.raises(TreeMismatchError, match=re.escape(named)):
        restore(CheckpointManager, tmp_path / "run", wanted)


def test_save_args_at_places_without_a_leaf_say_nothing_as_with_orbax(tmp_path: Path) -> None:
    half = ocp.SaveArgs(dtype=np.dtype(np.float16))
    tree = {**PARTS, "l": [], "o": optax.EmptyState()}
    given = args.PyTreeSave(tree, save_args={**dict.fromkeys(tree, half), "b": {"c": None}})
    found = []
    for manager in (ocp.CheckpointManager, CheckpointManager):
        save(manager, tmp_path / manager.__module__, given)
        found.append(kinds(restore(manager, tmp_path / manager.__module__, None)))
    assert found[1] == found[0]


def test_a_partial_restore_gives_what_the_target_names_as_with_orbax(tmp_path: Path) -> None:
    state = train_state()
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(), state)
    parts = [
        {"params": state.params},
        {"opt_state": state.opt_state, "step": None},
        {"step": 0},
        {"params": {"w": PLACED}},
    ]
    found = []
    for manager in (ocp.CheckpointManager, CheckpointManager):
        with manager(tmp_path / manager.__module__) as one:
            one.save(1, args=args.PyTreeSave(state))
            one.wait_until_finished()
            asked = [args.PyTreeRestore(part, partial_restore=True) for part in parts]
            asked += [
                args.PyTreeRestore(state, partial_restore=True),
                args.PyTreeRestore(
                    parts[0], restore_args={"params": plain.params}, partial_restore=True
                ),
            ]
            found.append([one.restore(1, args=wanted) for wanted in asked])
    assert kinds(found[1]) == kinds(found[0])
    assert_same(found[1], found[0])


def test_a_partial_restore_misses_nothing_that_the_target_names(tmp_path: Path) -> None:
    save(CheckpointManager, tmp_path / "run", args.PyTreeSave(PARTS))
    there = jax.ShapeDtypeStruct((2,), jnp.float32)
    wanted = args.PyTreeRestore({"a": there, "b": {"z": there}}, partial_restore=True)
    with pytest.raises(TreeMismatchError, match="b/z: expected by the target, not stored"):
        restore(CheckpointManager, tmp_path / "run", wanted)
    assert (
        restore(CheckpointManager, tmp_path / "run", args.PyTreeRestore({}, partial_restore=True))
        == {}
    )


def test_layouts_of_a_target_are_followed_where_they_are_asked_for(tmp_path: Path) -> None:
    array = jax.device_put(jnp.arange(32.0).reshape(8, 4), split())
    layout = Format(Layout((1, 0)), array.sharding)
    abstract = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout)
    save(CheckpointManager, tmp_path / "run", args.StandardSave({"a": array, "n": None}))
    for target in (abstract, jax.device_put(array, layout)):
        for support_layout, expected in ((True, layout), (False, array.format)):
            wanted = args.StandardRestore({"a": target, "n": None}, support_layout=support_layout)
            restored = restore(CheckpointManager, tmp_path / "run", wanted)["a"]
            assert restored.format.layout.major_to_minor == expected.layout.major_to_minor
            assert np.array_equal(restored, array)


def test_a_composite_without_items_gives_all_items_as_orbax_does(tmp_path: Path) -> None:
    given = args.Composite(tree=args.StandardSave({"w": jnp.ones(2)}), text=args.JsonSave({"a": 1}))
    for manager in (ocp.CheckpointManager, CheckpointManager):
        folder = tmp_path / manager.__module__
        with manager(folder) as one:
            one.save(1, args=given)
            one.wait_until_finished()
            found = one.restore(1, args=args.Composite())
            assert sorted(found) == ["text", "tree"]
            assert found.text == {"a": 1}


def test_save_args_beside_leaves_that_are_none_are_followed(tmp_path: Path) -> None:
    tree = {"a": jnp.ones(2), "none": None, "b": [jnp.ones(2), None], "n": 0.5}
    half = ocp.SaveArgs(dtype=np.dtype(np.float16))
    save_args = {"a": half, "none": None, "b": [None, None], "n": half}
    save(CheckpointManager, tmp_path / "run", args.PyTreeSave(tree, save_args=save_args))
    found = restore(CheckpointManager, tmp_path / "run", None)
    assert (found["a"].dtype, found["b"][0].dtype, found["n"].dtype) == (
        np.float16,
        np.float32,
        np.float16,
    )


@pytest.mark.parametrize(
    "save_args",
    [
        {"b": ocp.SaveArgs(dtype=np.dtype(np.float16)), "c": ocp.SaveArgs()},
        {"a": ocp.SaveArgs(dtype=np.dtype(np.float16))},
        {"a": {"deeper": ocp.SaveArgs()}, "b": ocp.SaveArgs()},
    ],
)
def test_save_args_of_another_structure_are_refused(tmp_path: Path, save_args: Any) -> None:
    tree = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(UnsupportedFormatError, match=re.escape("save_args")):
        save(CheckpointManager, tmp_path / "run", args.PyTreeSave(tree, save_args=save_args))


@pytest.mark.parametrize("manager", [ocp.CheckpointManager, CheckpointManager])
@pytest.mark.parametrize(
    ("settings", "first", "later"),
    [
        ({}, args.StandardSave(NUMBERS), args.Composite(state=args.StandardSave(NUMBERS))),
        ({}, args.Composite(state=args.StandardSave(NUMBERS)), args.StandardSave(NUMBERS)),
        (
            {"item_names": ("state",)},
            args.Composite(state=args.StandardSave(NUMBERS)),
            args.Composite(stat=args.StandardSave(NUMBERS)),
        ),
    ],
    ids=["one item, then named", "named, then one item", "a name that the manager was not told"],
)
def test_items_that_a_manager_does_not_have_are_refused(manager, settings, first, later, tmp_path):
    with manager(tmp_path / "run", **settings) as one:
        assert one.save(1, args=first)
        one.wait_until_finished()
        with pytest.raises(ValueError, match=r"rovide|does not match|manager has"):
            one.save(2, args=later)


@pytest.mark.parametrize("manager", [ocp.CheckpointManager, CheckpointManager])
def test_a_manager_of_named_items_restores_by_name(manager, tmp_path):
    with manager(tmp_path / "run", item_names=("state",)) as one:
        assert one.save(1, args=args.Composite(state=args.StandardSave(NUMBERS)))
        with pytest.raises(ValueError, match=r"Composite|no name"):
            one.restore(1, args=args.StandardRestore())
