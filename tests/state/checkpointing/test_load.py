"""Whoever has a loop of his own saves what it holds, and gets the same back."""

import collections
import re
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.core import freeze

from cairn import (
    AliasNotFoundError,
    Checkpointer,
    InvalidURIError,
    LeafNotFoundError,
    PolicyError,
    Run,
    RunNotFoundError,
    StepNotFoundError,
    TreeMismatchError,
    UnsupportedFormatError,
    UnsupportedLeafError,
    load,
    promote_step,
)
from tests.storage.states import abstract, assert_same, floats, mesh, put, raws, state

X = jnp.arange(12.0).reshape(4, 3) / 10


class Net(nnx.Module):
    """Tied weights, running statistics, a stream of random numbers, and settings."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(3, 3, rngs=rngs)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = self.first
        self.rate = 0.5

    def __call__(self, x: Any) -> Any:
        for layer in (self.first, *self.blocks, self.norm, self.dropout, self.last):
            x = layer(x)
        return x


def adam(model: Any) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def train(model: Any, optimizer: nnx.Optimizer) -> None:
    with jax.numpy_dtype_promotion("standard"):
        loss = nnx.grad(lambda model: (model(X) ** 2).mean())
        optimizer.update(model, loss(model))


def trained(seed: int = 0, steps: int = 2) -> tuple[Net, nnx.Optimizer]:
    model = Net(seed)
    optimizer = adam(model)
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


@pytest.fixture
def run_uri(some_root_uri):
    return some_root_uri / "run"


@pytest.fixture
def checkpointer(run_uri):
    with Checkpointer(run_uri, writer_id="job") as made:
        yield made


def both(checkpointer: Checkpointer, saved: Any, target: Any, **options: Any) -> Any:
    """What comes back of `saved`."""
    step = 1 + (checkpointer.latest_step() or 0)
    checkpointer.save(step, saved).wait()
    return checkpointer.restore(target, **options)


def test_a_loop_of_nnx_goes_on_as_if_it_had_never_ended(checkpointer):
    """BatchNorm's statistics and Dropout's counter are restored too, and tied weights are tied."""
    model, optimizer = trained()
    other = Net(1)
    found = both(
        checkpointer,
        {"model": model, "optimizer": optimizer},
        {"model": other, "optimizer": adam(other)},
    )
    assert found["model"].last is found["model"].first
    assert raws(nnx.state(found["model"])) == raws(nnx.state(model))
    assert raws(nnx.state(other)) == raws(nnx.state(Net(1)))  # the target is as it was
    for _ in range(2):
        train(model, optimizer)
        train(found["model"], found["optimizer"])
    assert raws(nnx.state(found["model"])) == raws(nnx.state(model))
    assert raws(nnx.state(found["optimizer"])) == raws(nnx.state(optimizer))


def test_a_module_that_was_never_made_is_a_target(checkpointer):
    model, _ = trained()
    found = both(checkpointer, model, nnx.eval_shape(lambda: Net(1)))
    assert raws(nnx.state(found)) == raws(nnx.state(model))
    assert found(X).shape == (4, 3)


def test_modules_in_containers_and_in_other_items_share_what_they_shared(checkpointer):
    def made(seed: int) -> dict[str, Any]:
        one, other = Net(seed), Net(seed + 1)
        return {"models": (one, [other, one]), "best": {"of": one}, "epoch": {"number": seed}}

    saved = made(1)
    found = both(checkpointer, saved, made(5))
    one, (other, again) = found["models"]
    assert one is again is found["best"]["of"]
    assert raws(nnx.state(one)) == raws(nnx.state(saved["models"][0]))
    assert raws(nnx.state(other)) == raws(nnx.state(saved["models"][1][0]))
    assert found["epoch"] == {"number": 1}


@struct.dataclass
class Loop:
    """A state of one's own, with a module in it."""

    model: Any
    opt_state: Any
    epoch: int


def test_a_dataclass_is_one_tree_and_its_numbers_come_back_as_numbers(checkpointer):
    tx = optax.adam(1e-2)

    def made(seed: int) -> Loop:
        model = Net(seed)
        return Loop(model, tx.init(nnx.state(model, nnx.Param)), seed)

    saved = made(3)
    found = both(checkpointer, saved, made(4))
    assert type(found) is Loop
    assert found.epoch == 3
    assert type(found.epoch) is int
    assert raws(nnx.state(found.model)) == raws(nnx.state(saved.model))
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(saved.opt_state)


class Dense(nn.Module):
    """Parameters and running statistics of Linen."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))


@pytest.mark.parametrize("kind", [dict, freeze, collections.OrderedDict])
def test_variables_of_linen_come_back_in_the_same_kind_of_mapping(checkpointer, kind):
    saved = kind(Dense().init(jax.random.key(0), X))
    found = both(checkpointer, saved, jax.tree.map(jnp.zeros_like, saved))
    assert type(found) is type(saved)
    assert_same(found, saved)


class Pair(eqx.Module):
    """Arrays, a function, a number and a flag of Equinox."""

    layer: eqx.nn.MLP
    scale: float
    norm: Any = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.scale * self.layer(x)


def pair(seed: int, activation: Any = jax.nn.relu) -> Pair:
    layer = eqx.nn.MLP(3, 2, 4, 1, activation=activation, key=jax.random.key(seed))
    return Pair(layer, float(seed), "none")


def test_an_equinox_module_keeps_its_functions_and_gets_its_arrays_and_numbers(checkpointer):
    saved = pair(1)
    tx = optax.adam(1e-2)
    items = {"model": saved, "optimizer": tx.init(eqx.filter(saved, eqx.is_array))}
    target = {"model": pair(2), "optimizer": tx.init(eqx.filter(pair(2), eqx.is_array))}
    found = both(checkpointer, items, target)
    assert found["model"].scale == 1.0
    assert found["model"].layer.activation is jax.nn.relu
    assert np.array_equal(jax.vmap(found["model"])(X), jax.vmap(saved)(X))


def test_a_tree_with_numbers_right_in_it_is_one_item(checkpointer, run_uri):
    saved = {"w": jnp.arange(3.0), "step": 7, "seed": jax.random.key(4)}
    found = both(
        checkpointer, saved, {"w": np.zeros(3), "step": 0, "seed": jax.random.key(0)}, cast=True
    )
    assert found["step"] == 7
    assert found["w"].tolist() == [0.0, 1.0, 2.0]
    assert found["w"].dtype == np.float64
    assert jnp.array_equal(jax.random.key_data(found["seed"]), jax.random.key_data(saved["seed"]))
    run = Run.open(run_uri)
    assert run.manifest(run.step(1)).items == ("meta", "state")


def test_a_run_is_loaded_onto_other_devices_by_its_name_alone(checkpointer, run_uri):
    saved = state(1)
    checkpointer.save(1, saved).wait()
    found = load(str(run_uri), abstract(saved, mesh(4)))
    assert_same(found, saved)
    kernel = found["model"]["layers"]["0"]["kernel"]
    assert kernel.sharding.num_devices == 4


def test_some_leaves_are_restored_and_the_others_are_those_of_the_target(checkpointer):
    saved, target = state(1), state(2)
    checkpointer.save(1, saved).wait()
    pattern = re.compile("model/layers/.*kernel$")
    for only in (pattern.pattern, pattern, lambda path: pattern.search(path) is not None):
        found = checkpointer.restore(target, only=only)
        assert_same(found["model"]["layers"], saved["model"]["layers"])
        assert_same(found["model"]["norm"], target["model"]["norm"])
        assert_same(found["optimizer"], target["optimizer"])


def test_what_is_not_asked_for_may_differ_or_be_missing(checkpointer):
    checkpointer.save(1, {"model": {"w": floats(3), "old": floats(2)}}).wait()
    target = {"model": {"w": np.zeros(3, np.float32), "head": np.ones(4)}, "ema": {"w": np.ones(3)}}
    found = checkpointer.restore(target, only="^model/w$")
    assert found["model"]["w"].tolist() == floats(3).tolist()
    assert found["model"]["head"] is target["model"]["head"]
    with pytest.raises(TreeMismatchError) as caught:
        checkpointer.restore(target)
    assert [line.split(":")[0] for line in caught.value.problems] == [
        "model/head",
        "model/old",
        "ema",
    ]
    with pytest.raises(TreeMismatchError, match="model/head: expected by the target, not stored"):
        checkpointer.restore(target, only="model")
    with pytest.raises(LeafNotFoundError, match="'model/head', 'model/w', 'ema/w'"):
        checkpointer.restore(target, only="modle")
    with pytest.raises(PolicyError, match="regular expression"):
        checkpointer.restore(target, only="(")


def test_the_differences_of_all_items_are_told_at_once(checkpointer):
    checkpointer.save(1, {"a": {"w": floats(3)}, "b": {"w": floats(3), "v": floats(1)}}).wait()
    target = {"a": {"w": np.zeros(4, np.float32)}, "b": {"w": np.zeros(3, np.int32)}}
    with pytest.raises(TreeMismatchError) as caught:
        checkpointer.restore(target)
    assert len(caught.value.problems) == 3
    for text in (
        "a/w: expected shape (4,), stored (3,)",
        "b/v: stored",
        "b/w: expected dtype int32",
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize("options", [{"only": "model"}, {}])
def test_a_target_in_which_a_name_is_mistyped_is_refused(checkpointer, options):
    checkpointer.save(1, {"model": {"w": floats(3)}}).wait()
    with pytest.raises((TreeMismatchError, LeafNotFoundError), match="modle"):
        checkpointer.restore({"modle": {"w": np.zeros(3, np.float32)}}, **options)


def test_a_step_is_named_by_number_by_metric_and_by_alias(checkpointer, run_uri):
    for step, loss in [(1, 0.5), (2, 0.25), (3, float("nan")), (4, 0.25), (5, 0.75)]:
        metrics = {"loss": loss, "acc": loss}
        checkpointer.save(step, {"m": {"w": np.int32(step)}}, metrics=metrics).wait()
    run = Run.open(run_uri)
    promote_step(run, 2, "production", expect=None)

    def found(reference=run_uri, **options):
        return int(load(reference, {"m": {"w": np.int32(0)}}, **options)["m"]["w"])

    assert checkpointer.steps() == [1, 2, 3, 4, 5]
    assert checkpointer.latest_step() == 5
    assert [found(), found(step="latest"), found(f"{run_uri}@latest")] == [5, 5, 5]
    assert [found(step=1), found(step=np.int64(3)), found(run_uri / "steps" / "4")] == [1, 3, 4]
    assert [found(step="production"), found(f"{run_uri}@production")] == [2, 2]
    assert [found(step="best:loss:min"), found(step="best:acc:max")] == [4, 5]
    with pytest.raises(PolicyError, match="best:loss:min or best:loss:max"):
        found(step="best:loss")
    with pytest.raises(StepNotFoundError, match="Did you mean 'loss'"):
        found(step="best:los:min")
    with pytest.raises(AliasNotFoundError, match="producton"):
        found(step="producton")
    with pytest.raises(StepNotFoundError):
        found(step=9)
    for named in (f"{run_uri}@production", run_uri / "steps" / "4"):
        with pytest.raises(InvalidURIError, match="named twice"):
            found(named, step=1)


def test_a_restore_sees_the_save_that_was_begun_before_it(checkpointer):
    assert checkpointer.latest_step() is None
    checkpointer.save(1, {"m": {"w": floats(3)}})
    found = checkpointer.restore({"m": {"w": np.zeros(3, np.float32)}})
    assert found["m"]["w"].tolist() == floats(3).tolist()


def test_where_nothing_was_saved_there_is_nothing_to_restore(checkpointer, run_uri):
    assert checkpointer.steps() == []
    with pytest.raises(RunNotFoundError):
        checkpointer.restore({"m": {"w": np.zeros(3)}})
    checkpointer.begin()
    assert checkpointer.steps() == []
    with pytest.raises(StepNotFoundError):
        load(run_uri, {"m": {"w": np.zeros(3)}})


@pytest.mark.parametrize("given", [jnp.ones(3), 3, "tree", None, nnx.Param(jnp.ones(2))])
def test_what_is_no_tree_is_refused(checkpointer, given):
    with pytest.raises((UnsupportedFormatError, UnsupportedLeafError), match="expected"):
        checkpointer.save(1, given)
    checkpointer.save(1, {"m": {"w": floats(3)}}).wait()
    with pytest.raises(UnsupportedFormatError, match="no tree"):
        checkpointer.restore(given)


def test_a_sharded_module_is_restored_where_the_target_lies(checkpointer):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    target = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
    target.kernel[...] = put(np.zeros((8, 8), np.float32), "fsdp", None)
    found = both(checkpointer, model, target)
    assert raws(nnx.state(found)) == raws(nnx.state(model))
    assert found.kernel[...].sharding == target.kernel[...].sharding
