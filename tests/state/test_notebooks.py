"""What a notebook shows of a state and of its sharding; no array is read for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as Spec

from cairn import EasyDeLState, TrainState, make_mesh, make_optimizer
from tests.storage.test_notebooks import HOSTILE, seen


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 16, rngs=rngs)


@pytest.fixture(scope="module")
def state():
    tx, tx_init = make_optimizer("adam", learning_rate=1e-3)
    model = Model(nnx.Rngs(0))
    made = EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)
    rules = [("kernel", Spec("fsdp", "tp")), (".*", Spec())]
    return made.shard_model(rules, make_mesh((1, 4, 2, 1)))


@pytest.fixture
def no_reads(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an array was read")

    monkeypatch.setattr(type(jnp.zeros(1)), "__array__", refuse)
    monkeypatch.setattr(type(jnp.zeros(1)), "_value", property(refuse))


def test_a_state_is_its_parts_and_where_their_leaves_are(state, no_reads):
    text = seen(state._repr_html_())
    assert "EasyDeLState" in text
    assert "adam" in text
    assert "2 leaves, 576 B" in text
    assert "dense/kernel float32 (8, 16) 512 B ('fsdp', 'tp') 64 B" in " ".join(text.split())


def test_a_state_whose_arrays_were_donated_or_are_traced_is_shown(state, no_reads):
    gone = jax.tree.map(jnp.copy, state)
    jax.tree.map(lambda leaf: leaf.delete(), gone)
    assert "dense/kernel" in seen(gone._repr_html_())
    shown = []
    jax.eval_shape(lambda traced: shown.append(traced._repr_html_()), state)
    assert "dense/kernel float32 (8, 16) 512 B" in " ".join(seen(shown[0]).split())
    abstract = jax.eval_shape(lambda: state)
    assert "dense/kernel" in seen(abstract._repr_html_())


def test_names_in_a_train_state_are_text(no_reads):
    class Mine(TrainState):
        epoch: int = 0
        notes: Any = None

    state = Mine.create(
        params={HOSTILE: jnp.zeros(3), "b": np.ones(2)}, tx=optax.sgd(1.0), epoch=3, notes={}
    )
    text = seen(state._repr_html_())
    assert "Mine" in text
    assert "<script>" in text
    assert "epoch" in text


def test_a_sharding_report_shows_first_what_does_not_fit(state):
    odd = state.explain_sharding([("kernel", Spec(None, "tp", "fsdp")), (".*", Spec())])
    told = seen(odd._repr_html_())
    assert "Sharding on mesh" in told
    assert "does not fit" in told
    assert told.index("dense/kernel") < told.index("dense/bias")
    object.__setattr__(odd, "mesh", None)
    assert "AttributeError" in seen(odd._repr_html_())
