import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cairn import ArgumentError, OptimizerError, make_optimizer, optimizer_from_description
from cairn.interop.config.frozen import FrozenJSON
from tests.state.seams import OPTIMIZERS

PARAMS = {"w": jnp.ones((4, 4)), "b": jnp.zeros((4,))}
GRADS = {"w": jnp.full((4, 4), 0.3), "b": jnp.full((4,), -2.0)}


def updates_of(tx, steps=2):
    state = tx.init(PARAMS)
    for _ in range(steps):
        updates, state = tx.update(GRADS, state, PARAMS)
    return updates


@pytest.fixture(autouse=True)
def _optax_promotes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_known_optimizer_is_built_and_rebuilt(name):
    tx, description = make_optimizer(name, learning_rate=1e-2)
    assert description == {"name": name, "learning_rate": 1e-2}
    assert optimizer_from_description(description) is tx
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates_of(tx)))


def test_the_optimizer_is_optax_own():
    tx, _ = make_optimizer("adamw", learning_rate=1e-2, weight_decay=0.1, b1=0.8)
    plain = optax.adamw(1e-2, weight_decay=0.1, b1=0.8)
    jax.tree.map(np.testing.assert_array_equal, updates_of(tx), updates_of(plain))


def test_schedules_clipping_and_accumulation_are_described_too():
    tx, description = make_optimizer(
        "sgd",
        learning_rate={
            "schedule": "linear",
            "init_value": 1.0,
            "end_value": 0.0,
            "transition_steps": 10,
        },
        momentum=0.9,
        max_grad_norm=1.0,
        accumulate_steps=2,
    )
    plain = optax.MultiSteps(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.sgd(optax.linear_schedule(1.0, 0.0, 10), momentum=0.9),
        ),
        2,
    ).gradient_transformation()
    rebuilt = optimizer_from_description(description)
    for steps in (1, 4):
        jax.tree.map(
            np.testing.assert_array_equal, updates_of(rebuilt, steps), updates_of(plain, steps)
        )
    assert rebuilt is tx


def test_dtypes_are_given_by_name():
    tx, _ = make_optimizer("adam", learning_rate=1e-2, mu_dtype="bfloat16")
    assert tx.init(PARAMS)[0].mu["w"].dtype == jnp.bfloat16
    with pytest.raises(OptimizerError, match="mu_dtype: expected the name of a dtype"):
        make_optimizer("adam", learning_rate=1e-2, mu_dtype="float31")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "os.system"}, "found 'os.system'"),
        ({"name": "adam"}, "missing: learning_rate"),
        ({"name": "adam", "learning_rate": 1, "colour": 2}, "unknown: colour"),
        ({"name": "adam", "learning_rate": {"schedule": "eval"}}, "found 'eval'"),
        ({"name": "adam", "learning_rate": {"schedule": "linear"}}, "schedule 'linear'"),
        ({"learning_rate": 1}, "found None"),
        ({"name": "adam", "learning_rate": "fast"}, "learning_rate: expected a number"),
        ({"name": "adamw", "learning_rate": 1, "weight_decay": "a"}, "weight_decay: expected a nu"),
        ({"name": "sgd", "learning_rate": 1, "momentum": {"schedule": "linear"}}, "momentum: exp"),
        ({"name": "adam", "learning_rate": 1, "max_grad_norm": -1.0}, "max_grad_norm: expected"),
        ({"name": "adam", "learning_rate": 1, "max_grad_norm": "x"}, "max_grad_norm: expected"),
        ({"name": "adam", "learning_rate": 1, "accumulate_steps": 0}, "1 or more; found 0"),
        ({"name": "adam", "learning_rate": 1, "accumulate_steps": 2.5}, "1 or more; found 2.5"),
        (
            {
                "name": "adam",
                "learning_rate": {
                    "schedule": "warmup_cosine_decay",
                    "init_value": 0.0,
                    "peak_value": 1.0,
                    "warmup_steps": 10,
                    "decay_steps": 5,
                },
            },
            "schedule 'warmup_cosine_decay': expected arguments that Optax takes",
        ),
    ],
)
def test_what_is_not_on_the_list_is_refused(arguments, message):
    with pytest.raises(OptimizerError, match=message):
        optimizer_from_description(arguments)


def test_a_description_must_be_json():
    with pytest.raises(ArgumentError, match="optimizer description: expected a mapping of JSON"):
        make_optimizer("adam", learning_rate=optax.constant_schedule(1.0))


def test_frozen_json_is_a_hashable_mapping_of_what_json_keeps():
    one = FrozenJSON({"b": (1, 2), "a": {"c": None}})
    other = FrozenJSON({"a": {"c": None}, "b": [1, 2]})
    assert one == other == {"a": {"c": None}, "b": [1, 2]}
    assert hash(one) == hash(other)
    assert dict(one) == one.to_dict()
    assert one != FrozenJSON({})
    for wrong in ({1: 2}, {"x": float("nan")}, {"x": object()}):
        with pytest.raises(ArgumentError):
            FrozenJSON(wrong)
