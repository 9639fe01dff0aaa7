"""A loop of one's own with a `RunSaver`: trees by name, saved by policy."""

import gc
import os
import signal
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cairn
from cairn import (
    ArgumentError,
    BestSteps,
    DueReason,
    RetentionPolicy,
    Run,
    RunSaver,
    SavePolicy,
    SaveState,
    StepExistsError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)
from cairn.storage.runs.retention import step_facts

TX = optax.sgd(1e-1, momentum=0.9)


@pytest.fixture
def uri(tmp_path):
    return str(tmp_path / "run")


def network():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, TX, wrt=nnx.Param)}


class Closed(nnx.Module, pytree=False):
    """A module that JAX takes for a leaf."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def closed_network():
    model = Closed()
    return {"model": model, "optimizer": nnx.Optimizer(model, TX, wrt=nnx.Param)}


def mixed():
    """Return a module and a plain tree that share nothing."""
    return {"model": network()["model"], "opt_state": plain(3)["opt_state"]}


def train(items):
    model = items["model"]
    items["optimizer"].update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))


def plain(value):
    params = {"w": jnp.full(4, float(value))}
    return {"params": params, "opt_state": TX.init(params)}


def listed(uri):
    return [info.step for info in Run.open(uri).steps()]


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def arrays(items):
    leaves = jax.tree.leaves(items)
    states = [nnx.state(leaf) if isinstance(leaf, nnx.Module) else leaf for leaf in leaves]
    return jax.tree.leaves(states)


def assert_same(items, others):
    leaves, expected = arrays(items), arrays(others)
    assert len(leaves) == len(expected) > 1
    for leaf, other in zip(leaves, expected, strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_due_steps_of_modules_are_saved_and_training_goes_on_from_there(uri):
    items = network()
    with RunSaver(uri, SavePolicy(every_steps=2)) as saver:
        for step in range(1, 6):
            train(items)
            handle = saver.step(items, step=step, labels={"stage": "a"}, extras={"epoch": step})
            assert (handle is not None) == (step % 2 == 0)
    assert listed(uri) == [2, 4]
    restored = cairn.load(uri, network())
    train(restored)
    assert_same(restored, items)
    assert step_facts(Run.open(uri))[-1].labels == {"stage": "a"}


def test_the_best_steps_of_trees_are_saved_and_kept(uri):
    policy = SavePolicy(best=BestSteps(metric="loss"))
    keep = RetentionPolicy(keep_best=[BestSteps(metric="loss")])
    with RunSaver(uri, policy, keep=keep) as saver:
        for step, loss in enumerate((3.0, 4.0, 1.0, 2.0), start=1):
            saved = saver.step(plain(loss), step=step, metrics={"loss": loss})
            if saved is not None:
                saved.wait()
    assert listed(uri) == [3]
    assert_same(cairn.load(uri, plain(0)), plain(1))


def test_numbers_count_on_from_the_first_one(uri):
    with RunSaver(uri, SavePolicy(every_steps=3)) as saver:
        saver.step(plain(4), step=4)
        saver.step(plain(5))
        handle = saver.step(plain(6))
        assert (handle.step, handle.reason) == (6, DueReason.EVERY_STEPS)
    assert listed(uri) == [6]


def test_one_tree_is_saved_as_checkpointers_save_it(uri):
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        saver.step(plain(1)["params"], step=1)
    np.testing.assert_array_equal(cairn.load(uri, plain(0)["params"])["w"], np.full(4, 1.0))


def test_after_the_signal_the_next_step_of_trees_is_durable_when_it_returns(uri):
    items = network()
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        saver.step(items, step=1)
        terminate()
        train(items)
        handle = saver.step(items, step=2)
        assert (handle.state, handle.reason) == (SaveState.DURABLE, DueReason.PREEMPTION)
        assert saver.should_stop
    assert_same(cairn.load(uri, network()), items)


@pytest.mark.parametrize("make", [network, closed_network, mixed, lambda: plain(3)])
def test_a_signal_after_the_last_step_is_answered_by_close_though_the_dict_is_gone(uri, make):
    items = make()
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        saver.step(dict(items), step=7)
        terminate()
    assert listed(uri) == [7]
    assert_same(cairn.load(uri, make()), items)


@pytest.mark.parametrize("make", [network, closed_network])
def test_a_module_that_was_trained_on_after_its_last_step_is_not_saved_as_it(uri, make, caplog):
    items = make()
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        saver.step(items, step=7)
        train(items)
        terminate()
    assert "preempted after step 7, whose state is gone: not saved" in caplog.text
    assert listed(uri) == []


def test_trees_that_are_gone_at_the_end_are_not_saved(uri, caplog):
    with RunSaver(uri, SavePolicy(every_steps=100)) as saver:
        saver.step(plain(3), step=7)
        gc.collect()
        terminate()
    assert "preempted after step 7, whose state is gone: not saved" in caplog.text
    assert listed(uri) == []


def test_the_saver_keeps_no_array_of_a_tree_alive(uri):
    items = {**plain(1), "list": [jnp.ones(3), None, 2]}
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        saver.step(items, step=1).wait()
        alive = [
            weakref.ref(leaf) for leaf in jax.tree.leaves(items) if isinstance(leaf, jax.Array)
        ]
        del items
        gc.collect()
        saver.step(plain(2), step=2).wait()
        gc.collect()
        assert [one() for one in alive] == [None] * len(alive)


@pytest.mark.parametrize("make", [network, closed_network])
def test_a_module_that_was_trained_on_since_the_save_is_another_state(uri, make):
    items = make()
    with RunSaver(uri, SavePolicy(every_steps=1)) as saver:
        first = saver.step(items, step=1)
        assert saver.save(dict(items), step=1) is first
        train(items)
        with pytest.raises(StepExistsError, match="another state"):
            saver.save(items, step=1)


@pytest.mark.parametrize(
    ("items", "options", "error", "message"),
    [
        (plain(1), {}, ArgumentError, r"call step\(items, step=n\)"),
        (jnp.ones(3), {"step": 1}, UnsupportedFormatError, "this is no tree"),
        ({"a": {"f": print}}, {"step": 1}, UnsupportedLeafError, "a?/?f: "),
        ({"a": {"": jnp.ones(2)}}, {"step": 1}, UnsupportedLeafError, "key"),
    ],
)
def test_trees_that_cannot_be_saved_are_refused_at_the_first_step(
    uri, items, options, error, message
):
    with (
        RunSaver(uri, SavePolicy(every_steps=100)) as saver,
        pytest.raises(error, match=message),
    ):
        saver.step(items, **options)


def test_options_that_a_save_of_trees_does_not_take_are_refused_at_the_first_step(uri):
    unknown = {"float_dtype": "bf16"}
    with (
        RunSaver(uri, SavePolicy(every_steps=100), save_options=unknown) as saver,
        pytest.raises(ArgumentError, match=r"arguments of Checkpointer\.save.*float_dtype"),
    ):
        saver.step(plain(1), step=1)
    options = {"compression": "zstd", "overwrite": True}
    with RunSaver(uri, SavePolicy(every_steps=1), save_options=options) as saver:
        saver.step(plain(1), step=1)
        saver.save(plain(2), step=1)
    assert_same(cairn.load(uri, plain(0)), plain(2))
