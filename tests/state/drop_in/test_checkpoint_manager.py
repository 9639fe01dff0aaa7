"""A loop that calls Orbax's `CheckpointManager` does the same on a Cairn run.

`CAIRN_FAULTS=long` has it keep steps in more ways.
"""

import datetime
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from cairn import (
    Checkpointer,
    CheckpointManager,
    InvalidURIError,
    LeaseHeldError,
    PolicyError,
    Run,
    SaveError,
    StepExistsError,
    TreeMismatchError,
    UnsupportedFormatError,
    adopt,
    check_run,
    load,
    promote_step,
    verify_step,
)
from tests.devices import xla_flags
from tests.faults.report import is_long
from tests.programs.program import run as run_program
from tests.storage.states import assert_same, mesh

args = ocp.args
Options = ocp.CheckpointManagerOptions
Seen = list[Any]
Script = Callable[[Any, Path], Seen]

TREE = {
    "w": jnp.arange(8.0),
    "b": {"c": jnp.ones((2, 3), jnp.bfloat16), "d": np.arange(3, dtype=np.int32)},
}


@functools.cache
def train_state() -> TrainState:
    module = nn.Dense(8)
    params = module.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    return TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(1e-2))


def sharded(state: Any) -> tuple[Any, Any]:
    """The state over eight devices, and its abstract form."""
    over = mesh(8, 1)

    def place(leaf: Any) -> jax.Array:
        axes = jax.sharding.PartitionSpec(*([None] * (jnp.ndim(leaf) - 1)), over.axis_names[0])
        spec = axes if jnp.ndim(leaf) else jax.sharding.PartitionSpec()
        return jax.device_put(leaf, jax.sharding.NamedSharding(over, spec))

    placed = jax.tree.map(place, state)
    return placed, jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), placed
    )


def named_items_of_a_train_state(manager: Any, folder: Path) -> Seen:
    state, abstract = sharded(train_state())
    options = Options(create=True, save_interval_steps=2, enable_async_checkpointing=True)
    with manager(folder, item_names=("items",), options=options) as first:
        saved = [
            first.save(step, args=args.Composite(items=args.PyTreeSave(item=state)))
            for step in range(5)
        ]
    with manager(folder, item_names=("items",), options=options) as second:
        latest = second.latest_step()
        restore_args = jax.tree.map(
            lambda leaf: ocp.type_handlers.ArrayRestoreArgs(
                mesh=leaf.sharding.mesh, mesh_axes=leaf.sharding.spec
            ),
            abstract,
        )
        found = second.restore(
            latest,
            args=args.Composite(items=args.PyTreeRestore(abstract, restore_args=restore_args)),
        )
        as_saved = second.restore(latest, args=args.Composite(items=args.PyTreeRestore(abstract)))
    assert isinstance(found["items"], TrainState)
    return [saved, latest, found["items"], as_saved["items"], [*second.all_steps()]]


def one_item_without_a_name(manager: Any, folder: Path) -> Seen:
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, TREE))
    with manager(folder) as one:
        empty = [one.latest_step(), one.best_step(), [*one.all_steps()]]
        one.save(3, args=args.StandardSave(TREE))
        during = [one.latest_step(), [*one.all_steps()]]
        one.wait_until_finished()
        found = [
            one.restore(None, args=args.StandardRestore(abstract)),
            one.restore(3),
            one.restore(3, args=args.StandardRestore({**TREE, "w": np.zeros(8, np.float32)})),
        ]
    with manager(folder) as again:
        return [empty, during, found, again.restore(None), again.restore(3)]


def json_and_numbers_beside_a_tree(manager: Any, folder: Path) -> Seen:
    items = {"config": {"name": "mlp", "sizes": [1, 2]}, "more": {"at": 7}}
    with manager(folder, options=Options(best_fn=lambda found: found["loss"])) as one:
        one.save(
            1,
            args=args.Composite(
                state=args.StandardSave(TREE), **{k: args.JsonSave(v) for k, v in items.items()}
            ),
            metrics={"loss": 0.5},
            custom_metadata={"by": "me"},
        )
    with manager(folder, options=Options(best_fn=lambda found: found["loss"])) as again:
        wanted = args.Composite(
            config=args.JsonRestore(), more=args.JsonRestore(), state=args.StandardRestore(TREE)
        )
        found = again.restore(1, args=wanted)
        about = again.metadata(1)
        return [
            dict(found),
            again.metrics(1),
            about.metrics,
            about.custom_metadata.get("by"),
            {k: (v.shape, v.dtype) for k, v in again.item_metadata(1).state["b"].items()},
        ]


def steps_that_are_due(manager: Any, folder: Path) -> Seen:
    seen: Seen = []
    choices: list[Any] = [
        Options(save_interval_steps=3),
        Options(save_interval_steps=4, save_on_steps=[2, 7]),
        Options(should_save_fn=lambda step, latest: step - (latest or 0) >= 4),
        Options(
            save_decision_policy=policies.AnySavePolicy(
                [policies.FixedIntervalPolicy(4), policies.SpecificStepsPolicy([6])]
            )
        ),
        Options(read_only=True),
    ]
    for number, options in enumerate(choices):
        with manager(folder / str(number), options=options) as one:
            due = [one.should_save(step) for step in range(5)]
            saved = [one.save(step, args=args.StandardSave(TREE)) for step in range(1, 11)]
            forced = None
            if not options.read_only:
                forced = one.save(12, args=args.StandardSave(TREE), force=True)
            seen.append([due, saved, forced, [*one.all_steps()], one.should_save(12)])
    return seen


def steps_that_are_kept(manager: Any, folder: Path) -> Seen:
    seen: Seen = []
    losses = [0.9, 0.4, 0.6, 0.3, 0.5, 0.35]

    def loss(metrics: Any) -> float:
        return float(metrics["loss"])

    choices: list[Any] = [
        Options(max_to_keep=2),
        Options(max_to_keep=2, keep_period=3),
        Options(max_to_keep=2, keep_time_interval=datetime.timedelta(hours=1)),
        Options(max_to_keep=2, best_fn=loss, best_mode="min"),
        Options(max_to_keep=3, best_fn=lambda metrics: -loss(metrics)),
        Options(
            preservation_policy=policies.AnyPreservationPolicy(
                [policies.LatestN(1), policies.EveryNSteps(2)]
            )
        ),
        Options(best_fn=loss, best_mode="min"),
    ]
    for number, options in enumerate(choices if is_long() else choices[1::2]):
        place = folder / str(number)
        with manager(place, options=options) as one:
            for step, value in enumerate(losses, 1):
                metrics = {"loss": value} if options.best_fn else None
                one.save(step, args=args.StandardSave({"x": jnp.float32(step)}), metrics=metrics)
            one.wait_until_finished()
            seen.append([[*one.all_steps()], one.best_step(), one.latest_step()])
        with manager(place, options=options) as again:
            again.save(9, args=args.StandardSave({"x": jnp.float32(9)}), metrics={"loss": 0.1})
            again.wait_until_finished()
            again.reload()
            seen.append([[*again.all_steps()], again.best_step()])
            again.delete(again.all_steps()[0])
            seen.append([*again.all_steps()])
    return seen


def calls_from_before_args(manager: Any, folder: Path) -> Seen:
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(), TREE)
    with manager(folder / "one", ocp.PyTreeCheckpointer(), Options(max_to_keep=2)) as one:
        one.save(1, TREE, save_kwargs={"save_args": save_args}, metrics={"loss": 1.0})
        seen: Seen = [one.restore(1), one.restore(1, items=TREE)]
    handlers = {
        "tree": ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
        "text": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    with manager(folder / "two", handlers) as two:
        two.save(5, {"tree": TREE, "text": {"a": 1}})
        two.wait_until_finished()
        found = two.restore(5, {"tree": TREE, "text": None})
        return [*seen, dict(found)]


def a_cast_that_was_asked_for(manager: Any, folder: Path) -> Seen:
    half = jax.tree.map(lambda _: ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16)), {"w": TREE["w"]})
    target = {"w": jax.ShapeDtypeStruct((8,), jnp.float16)}
    with manager(folder / "standard") as standard:
        standard.save(1, args=args.StandardSave({"w": TREE["w"]}))
        standard.wait_until_finished()
        found = standard.restore(1, args=args.StandardRestore(target))
    with manager(folder / "tree") as one:
        one.save(1, args=args.PyTreeSave({"w": TREE["w"]}, save_args=half))
        one.wait_until_finished()
        restore_args = {"w": ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype("float32"))}
        return [
            found,
            one.restore(1),
            one.restore(1, args=args.PyTreeRestore(restore_args=restore_args)),
        ]


@pytest.mark.parametrize(
    "script",
    [
        named_items_of_a_train_state,
        one_item_without_a_name,
        json_and_numbers_beside_a_tree,
        steps_that_are_due,
        steps_that_are_kept,
        calls_from_before_args,
        a_cast_that_was_asked_for,
    ],
)
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_a_loop_sees_what_it_sees_with_orbax(script: Script, tmp_path: Path) -> None:
    theirs = script(ocp.CheckpointManager, tmp_path / "orbax")
    ours = script(CheckpointManager, tmp_path / "cairn")
    assert_same(ours, theirs)


def test_what_was_saved_so_is_a_run_like_any_other(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", options=Options(max_to_keep=3)) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=args.StandardSave(TREE), metrics={"loss": 1 / step})
        manager.wait_until_finished()
    run = Run.open(tmp_path / "run")
    assert [info.step for info in run.steps()] == [1, 2, 3]
    assert not check_run(run).problems
    assert not verify_step(run, 2).problems
    assert_same(load(f"{run.uri}", TREE, step="best:loss:min"), TREE)
    with Checkpointer(run.uri) as checkpointer:
        checkpointer.save(4, TREE)
    with CheckpointManager(run.uri) as again:
        assert again.latest_step() == 4
        assert_same(again.restore(4, args=args.StandardRestore(TREE)), TREE)


def test_a_promoted_step_is_not_deleted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", options=Options(max_to_keep=1)) as manager:
        manager.save(1, args=args.StandardSave(TREE))
        manager.wait_until_finished()
        run = Run.open(tmp_path / "run")
        promote_step(run, 1, alias="production", by="me", expect=None)
        for step in (2, 3):
            manager.save(step, args=args.StandardSave(TREE))
        manager.wait_until_finished()
        assert [*manager.all_steps()] == [1, 3]
        assert_same(manager.restore(1, args=args.StandardRestore(TREE)), TREE)


def test_the_latest_step_stays_though_others_are_better(tmp_path: Path) -> None:
    options = Options(max_to_keep=1, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with CheckpointManager(tmp_path / "run", options=options) as manager:
        for step, loss in enumerate([0.1, 0.5, 0.3], 1):
            manager.save(step, args=args.StandardSave(TREE), metrics={"loss": loss})
        manager.wait_until_finished()
        assert [*manager.all_steps()] == [1, 3]


def test_deleted_steps_can_be_had_back_within_the_grace_time(tmp_path: Path) -> None:
    options = Options(max_to_keep=1)
    for grace in (0.0, 3600.0):
        place = tmp_path / str(grace)
        with CheckpointManager(place, options=options, grace_seconds=grace) as manager:
            for step in (1, 2):
                manager.save(step, args=args.StandardSave(TREE))
            manager.wait_until_finished()
            assert [*manager.all_steps()] == [2]
            assert (place / "attempts/1/1").exists() is (grace > 0)


def test_the_best_step_is_not_deleted_for_one_that_is_no_number(tmp_path: Path) -> None:
    options = Options(max_to_keep=1, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with CheckpointManager(tmp_path / "run", options=options) as manager:
        for step, loss in enumerate([0.5, float("nan"), 0.1, float("nan"), 0.3], 1):
            manager.save(step, args=args.StandardSave(TREE), metrics={"loss": loss})
        manager.wait_until_finished()
        assert manager.best_step() == 3
        assert 3 in manager.all_steps()


def test_a_metric_that_best_fn_does_not_find_refuses_the_save_and_deletes_nothing(
    tmp_path: Path,
) -> None:
    options = Options(max_to_keep=1, best_fn=lambda metrics: metrics["los"])
    with CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(1, args=args.StandardSave(TREE), metrics={"loss": 1.0})
        with pytest.raises(KeyError, match="los"):
            manager.save(2, args=args.StandardSave(TREE), metrics={"loss": 0.5})
        assert [*manager.all_steps()] == [1]


def test_options_that_can_not_be_honoured_are_refused_together(tmp_path: Path) -> None:
    options = Options(
        todelete_subdir="old",
        multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=None),
        file_options=ocp.options.FileOptions(path_permission_mode=0o700),
    )
    with pytest.raises(PolicyError) as caught:
        CheckpointManager(tmp_path / "run", options=options)
    text = str(caught.value)
    assert all(name in text for name in ("todelete_subdir", "primary_host", "path_permission_mode"))
    with pytest.raises(PolicyError, match="handler_registry"):
        CheckpointManager(tmp_path, handler_registry=ocp.handlers.create_default_handler_registry())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {
                "options": Options(
                    max_to_keep=2, keep_period=5, preservation_policy=policies.LatestN(3)
                )
            },
            "not also max_to_keep, keep_period",
        ),
        ({"options": Options(save_interval_steps=0)}, "save_interval_steps: no step"),
        (
            {"checkpointers": ocp.PyTreeCheckpointer(), "item_names": ("a",)},
            "checkpointers, item_names",
        ),
        (
            {
                "checkpointers": ocp.PyTreeCheckpointer(),
                "item_handlers": {"a": ocp.StandardCheckpointHandler()},
            },
            "checkpointers, item_handlers",
        ),
        (
            {"item_names": ("a",), "item_handlers": ocp.StandardCheckpointHandler()},
            "item_names, item_handlers",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, given: Any, named: str
) -> None:
    with pytest.raises(PolicyError, match=re.escape(named)):
        CheckpointManager(tmp_path / "run", **given)


def test_names_and_handlers_by_name_may_be_given_together(tmp_path: Path) -> None:
    handlers = {"a": ocp.JsonCheckpointHandler()}
    with CheckpointManager(tmp_path / "run", item_names=("a",), item_handlers=handlers) as manager:
        manager.save(1, {"a": {"text": "x"}})
        assert manager.restore(1).a == {"text": "x"}


def test_args_in_the_place_of_items_are_told_apart(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(UnsupportedFormatError, match="expected args=StandardSave"):
            manager.save(1, args.StandardSave(TREE))
        manager.save(1, args=args.StandardSave(TREE))
        with pytest.raises(UnsupportedFormatError, match="expected args=StandardRestore"):
            manager.restore(1, args.StandardRestore(TREE))


def test_a_step_without_items_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(UnsupportedFormatError, match="Composite of nothing"):
            manager.save(1, args=args.Composite())
        assert manager.latest_step() is None


def test_steps_may_be_given_as_arrays(tmp_path: Path) -> None:
    options = Options(save_interval_steps=2)
    with CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in range(5):
            manager.save(jnp.int32(step), args=args.StandardSave(TREE), metrics={"at": step})
        two = np.int64(2)
        assert manager.metrics(jnp.int32(2)) == manager.metrics(two) == {"at": 2}
        assert manager.metadata(jnp.int32(2)).metrics == {"at": 2}
        manager.delete(jnp.int32(2))
        assert [*manager.all_steps()] == [0, 4]


def test_a_step_that_was_saved_elsewhere_since_has_its_metadata(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        with Checkpointer(tmp_path / "run") as other:
            other.save(7, {"model": TREE}, metrics={"loss": 0.5})
        assert manager.latest_step() is None
        assert manager.metadata(7).metrics == {"loss": 0.5}


def test_options_without_a_meaning_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CheckpointManager(tmp_path / "run", options=Options(step_prefix="checkpoint")).close()
    assert "step_prefix" in caplog.text
    caplog.clear()
    CheckpointManager(tmp_path / "run", options=Options(max_to_keep=2)).close()
    assert "meaning" not in caplog.text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda: args.ProtoSave(None), "state: ProtoSaveArgs"),
        (
            lambda: args.Composite(a=args.JaxRandomKeySave(np.ones(2))),
            "a: ndarray is no key of JAX",
        ),
        (lambda: args.NumpyRandomKeySave([1]), "state: list is no state of NumPy's generator"),
        (lambda: args.StandardSave(jnp.ones(3)), "put it into a dict"),
    ],
)
def test_items_of_other_kinds_are_refused_by_name(tmp_path: Path, given: Any, named: str) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(UnsupportedFormatError, match=re.escape(named)):
            manager.save(1, args=given())
        assert manager.latest_step() is None


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (
            lambda: args.Composite(stat=args.StandardRestore(TREE)),
            "stat: no such item; there are 'state'",
        ),
        (lambda: args.Composite(state=args.JsonRestore()), "state: JsonRestoreArgs for a tree"),
        (lambda: args.PyTreeRestore(TREE, transforms={}), "transforms"),
    ],
)
def test_restores_that_a_run_can_not_follow_are_refused_by_name(
    tmp_path: Path, asked: Any, named: str
) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=args.StandardSave(TREE))
        with pytest.raises(UnsupportedFormatError, match=re.escape(named)):
            manager.restore(1, args=asked())


def test_shapes_and_dtypes_that_differ_are_listed_and_never_cut_or_cast_unasked(
    tmp_path: Path,
) -> None:
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(), TREE)
    short = ocp.ArrayRestoreArgs(global_shape=(4,), strict=False)
    asked = {
        "shape": args.StandardRestore({**TREE, "w": jax.ShapeDtypeStruct((4,), jnp.float32)}),
        "shape of an item": args.PyTreeRestore({**TREE, "w": jnp.ones(4)}),
        "dtype of an item": args.PyTreeRestore({**TREE, "w": jnp.ones(8, jnp.float16)}),
        "cut": args.PyTreeRestore(TREE, restore_args={**plain, "w": short}),
        "integers": args.StandardRestore({**TREE, "w": jax.ShapeDtypeStruct((8,), jnp.int32)}),
        "missing": args.StandardRestore({"w": TREE["w"]}),
        "unexpected": args.StandardRestore({**TREE, "z": jnp.ones(1)}),
    }  # fmt: skip
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=args.StandardSave(TREE))
        for one in asked.values():
            with pytest.raises(TreeMismatchError):
                manager.restore(1, args=one)


@pytest.mark.parametrize("manager_of", [CheckpointManager, ocp.CheckpointManager])
@pytest.mark.parametrize(
    ("save", "restore"),
    [
        (args.StandardSave, lambda wanted, _: args.StandardRestore(wanted)),
        (args.PyTreeSave, lambda _, by_dtype: args.PyTreeRestore(restore_args=by_dtype)),
    ],
)
def test_a_counter_of_int32_is_restored_as_uint32_where_the_target_names_it(
    tmp_path: Path,
    manager_of: Callable[..., Any],
    save: Callable[[Any], Any],
    restore: Callable[[Any, Any], Any],
) -> None:
    counters = {"step": jnp.int32(7), "seen": jnp.arange(4, dtype=jnp.int32), "host": np.int64([5])}
    wanted = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.uint32), counters)
    wanted["host"] = np.zeros(1, np.uint8)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    by_dtype = dict.fromkeys(counters, ocp.ArrayRestoreArgs(dtype=jnp.uint32, sharding=place))
    with manager_of(tmp_path / "run") as manager:
        manager.save(1, args=save(counters))
        manager.wait_until_finished()
        restored = manager.restore(1, args=restore(wanted, by_dtype))
    assert {restored[name].dtype.kind for name in counters} == {"u"}
    assert [int(restored["step"]), int(restored["host"][0])] == [7, 5]
    assert restored["seen"].tolist() == [0, 1, 2, 3]


def test_integers_that_the_dtype_of_the_target_does_not_have_are_never_wrapped(
    tmp_path: Path,
) -> None:
    below, above = jnp.array([3, -1, 4], jnp.int32), np.array([0, 300], np.int64)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=args.StandardSave({"x": below}))
        with pytest.raises(TreeMismatchError, match=r"x.*uint32, from 0 to.*int32, from -1 to 4"):
            manager.restore(1, args=args.StandardRestore({"x": below.astype(jnp.uint32)}))
        manager.save(2, args=args.StandardSave({"x": above}))
        with pytest.raises(TreeMismatchError, match=r"uint8, from 0 to 255.*int64, from 0 to 300"):
            manager.restore(2, args=args.StandardRestore({"x": above.astype(np.uint8)}))
        with pytest.raises(TreeMismatchError, match="expected dtype int32, stored dtype int64"):
            load(tmp_path / "run", {"x": above.astype(np.int32)})
        restored = load(tmp_path / "run", {"x": above.astype(np.int32)}, cast=True)
        assert restored["x"].tolist() == [0, 300]


def test_a_step_that_exists_is_refused_as_orbax_does(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.save(2, args=args.StandardSave(TREE))
        assert not manager.save(2, args=args.StandardSave(TREE))
        with pytest.raises(StepAlreadyExistsError):
            manager.save(2, args=args.StandardSave(TREE), force=True)
        with pytest.raises(StepExistsError):
            manager.save(1, args=args.StandardSave(TREE), force=True)
        assert [*manager.all_steps()] == [2]


def test_without_steps_and_without_this_one_a_restore_finds_no_file(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(FileNotFoundError, match="no steps"):
            manager.restore(None)
        manager.save(1, args=args.StandardSave(TREE))
        with pytest.raises(FileNotFoundError):
            manager.restore(5)
        with pytest.raises(FileNotFoundError):
            manager.delete(5)


def test_a_save_that_fails_is_told_once_and_its_step_is_not_listed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", options=Options(max_to_keep=1)) as manager:
        manager.save(1, args=args.StandardSave(TREE))
        manager.wait_until_finished()
        (tmp_path / "run/attempts/1/2").mkdir()  # somebody else's
        manager.save(2, args=args.StandardSave(TREE))
        with pytest.raises(SaveError):
            manager.wait_until_finished()
        manager.check_for_errors()
        assert [*manager.all_steps()] == [1]
        assert manager.save(3, args=args.StandardSave(TREE))


def test_a_second_job_is_refused_and_may_read(tmp_path: Path, monkeypatch: Any) -> None:
    with CheckpointManager(tmp_path / "run") as first:
        first.save(1, args=args.StandardSave(TREE))
        first.wait_until_finished()
        monkeypatch.setenv("CAIRN_WRITER_ID", "another")
        with CheckpointManager(tmp_path / "run") as second:
            assert_same(second.restore(None, args=args.StandardRestore(TREE)), TREE)
            with pytest.raises(LeaseHeldError):
                second.save(2, args=args.StandardSave(TREE))


def test_a_folder_of_plain_orbax_steps_is_not_taken_for_an_empty_run(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "old") as theirs:
        theirs.save(7, args=args.StandardSave(TREE))
    with pytest.raises(InvalidURIError, match="old"):
        CheckpointManager(tmp_path / "old")


def test_a_loop_goes_on_from_what_was_adopted(tmp_path: Path) -> None:
    named = args.Composite(params=args.StandardSave(TREE), config=args.JsonSave({"layers": 2}))
    for name, given in [("single", args.StandardSave(TREE)), ("named", named)]:
        with ocp.CheckpointManager(tmp_path / name) as theirs:
            for step in (1, 2):
                theirs.save(step, args=given)
            theirs.wait_until_finished()
            expected = theirs.restore(2)
        run = adopt(tmp_path / name).run
        with CheckpointManager(run, options=Options(max_to_keep=2)) as manager:
            assert_same(raws_of(manager.restore(2)), raws_of(expected))
            leaf = manager.item_metadata(2)
            leaf = leaf["w"] if name == "single" else leaf["params"]["w"]
            assert leaf.shape == (8,)
            assert manager.save(5, args=given)
            manager.wait_until_finished()
            assert [*manager.all_steps()] == [2, 5]
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["1", "2"]


def test_text_of_an_adopted_step_is_read_as_orbax_reads_it(tmp_path: Path) -> None:
    tree = {"w": np.arange(4.0), "names": {"first": "a", "second": ""}}
    target = {"w": ocp.RestoreArgs(), "names": {"first": 1, "second": ...}}
    with ocp.CheckpointManager(tmp_path / "old") as theirs:
        theirs.save(1, args=args.PyTreeSave(tree))
        theirs.wait_until_finished()
        asked = [args.PyTreeRestore(), args.PyTreeRestore(tree), args.PyTreeRestore(target)]
        expected = [theirs.restore(1, args=one) for one in asked]
    with CheckpointManager(adopt(tmp_path / "old").run) as manager:
        found = [manager.restore(1, args=one) for one in asked]
        assert [one["names"] for one in found] == [one["names"] for one in expected]
        assert manager.restore(1)["names"] == tree["names"]
        described = args.PyTreeRestore(manager.item_metadata(1))
        assert manager.restore(1, args=described)["names"] == tree["names"]


def test_what_orbax_kept_about_adopted_steps_and_their_folder_is_read(tmp_path: Path) -> None:
    about, custom = {"project": "x", "sizes": [1, None]}, {"by": "me", "nested": {"n": 1.5}}
    options = Options(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path / "old", options=options, metadata=about) as theirs:
        for step, metadata in ((1, custom), (2, None)):
            given = {"metrics": {"loss": 0.5}, "custom_metadata": metadata}
            theirs.save(step, args=args.StandardSave(TREE), **given)
        theirs.wait_until_finished()
        expected = [theirs.metadata().custom_metadata]
        expected += [theirs.metadata(step).custom_metadata for step in (1, 2)]
        whole = theirs.restore(1)
    run = adopt(tmp_path / "old").run
    with CheckpointManager(run, options=options, metadata={"other": 1}) as manager:
        found = [manager.metadata().custom_metadata]
        found += [manager.metadata(step).custom_metadata for step in (1, 2)]
        assert found == expected == [about, custom, {}]
        assert_same(manager.restore(1), whole)
        manager.save(3, args=args.StandardSave(TREE), metrics={"loss": 0.4})
    with CheckpointManager(run) as again:
        assert again.metadata().custom_metadata == about


def test_what_older_releases_kept_about_a_folder_is_read(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "old") as theirs:
        theirs.save(1, args=args.StandardSave(TREE))
    (tmp_path / "old/metadata").mkdir(exist_ok=True)
    (tmp_path / "old/metadata/_ROOT_METADATA").unlink(missing_ok=True)
    (tmp_path / "old/metadata/metadata").write_text('{"project": "x"}')
    with ocp.CheckpointManager(tmp_path / "old") as theirs:
        expected = theirs.metadata().custom_metadata
    with CheckpointManager(adopt(tmp_path / "old").run) as manager:
        assert manager.metadata().custom_metadata == expected == {"project": "x"}


def raws_of(found: Any) -> Any:
    """Leaves of an item or of items, with JSON as it is."""
    return jax.tree.map(np.asarray, dict(found))


def test_another_runs_steps_are_restored_by_its_folder(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "old") as old:
        old.save(7, args=args.StandardSave(TREE))
    with CheckpointManager(tmp_path / "new") as new:
        found = new.restore(None, directory=tmp_path / "old", args=args.StandardRestore(TREE))
        assert_same(found, TREE)


def test_what_lay_on_devices_that_are_not_here_asks_for_a_sharding(tmp_path: Path) -> None:
    state, _ = sharded({"w": jnp.arange(8.0), "n": jnp.float32(1)})
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=args.StandardSave(state))
    code = f"""
import jax, numpy as np, orbax.checkpoint as ocp
from cairn import CheckpointManager, TreeMismatchError
args = ocp.args
with CheckpointManager({str(tmp_path / "run")!r}) as manager:
    shapes = {{"w": (8,), "n": ()}}
    target = {{name: jax.ShapeDtypeStruct(one, "float32") for name, one in shapes.items()}}
    for one in (None, args.StandardRestore(target), args.PyTreeRestore()):
        try:
            manager.restore(1, args=one)
        except TreeMismatchError as error:
            assert "w: no sharding" in str(error) and "n: no sharding" in str(error), error
        else:
            raise SystemExit("expected a refusal")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(lambda leaf: leaf.update(sharding=one), target)
    found = manager.restore(1, args=args.StandardRestore(placed))
    assert np.array_equal(found["w"], np.arange(8)), found
"""
    done = run_program(["-c", code], env={**os.environ, "XLA_FLAGS": xla_flags(4)})
    assert done.returncode == 0, done.stderr


def test_plain_orbax_reads_the_trees(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        given = args.Composite(items=args.StandardSave(TREE), more=args.JsonSave({"a": 1}))
        manager.save(1, args=given)
    with ocp.CheckpointManager(tmp_path / "run/attempts/1") as theirs:
        found = theirs.restore(1, args=args.Composite(items=args.StandardRestore(TREE)))
    assert_same(found["items"], TREE)


class Net(nnx.Module):
    """A list of layers, and keys."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"optax": optax.adamw(1e-3).init(TREE["b"]), "step": 3},
        train_state,
        lambda: nnx.state(Net()),
        lambda: nnx.state(nnx.Optimizer(Net(), optax.adam(1e-3), wrt=nnx.Param)),
        lambda: {"list": [jnp.ones(2), (jnp.zeros(3), None)], "empty": {}, "none": None},
    ],
    ids=["optax", "train state", "nnx", "nnx optimizer", "lists"],
)
def test_plain_orbax_fills_any_target_by_paths(tmp_path: Path, make: Callable[[], Any]) -> None:
    state = make()
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=args.StandardSave(state))
    restore_args = ocp.checkpoint_utils.construct_restore_args(state)
    wanted = args.PyTreeRestore(state, restore_args=restore_args, transforms={})
    folder = tmp_path / "run/attempts/1"
    found = ocp.PyTreeCheckpointer().restore(folder / "1/state", args=wanted)
    with ocp.CheckpointManager(folder) as theirs:
        by_manager = theirs.restore(1, args=args.Composite(state=wanted)).state
    for one in (found, by_manager):
        assert jax.tree.structure(one) == jax.tree.structure(state)
        assert_same(jax.tree.leaves(one), jax.tree.leaves(state))
