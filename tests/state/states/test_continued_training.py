"""Training that was saved and loaded is the training that never stopped, and that of Flax alone.

`CAIRN_FAULTS=long` draws hundreds of each.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state as flax_states
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from cairn import (
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLBaseModule,
    EasyDeLState,
    EDPretrainedConfig,
    RopeConfig,
    TrainState,
    make_optimizer,
)
from tests.faults.report import is_long, trials
from tests.state.forward import logits_of
from tests.state.hf_models import tokens, torch_logits
from tests.state.random_optimizers import OPTIMIZERS, build, is_possible
from tests.state.seams import optax_numerics
from tests.storage.states import assert_alike, raw

DTYPES = st.sampled_from(["float32", "bfloat16"])
MESHES = st.sampled_from([None, (2, 4, 1, 1), (1, 8, 1, 1)])
MOST_MAPS = 30_000  # of a process: each compiled program takes some of the kernel's 65,530


def drawn(*, short: int, long: int) -> Any:
    """How many examples; those of the short run are the same each time, and compiled already."""

    def made(test: Any) -> Any:
        inner = test.hypothesis.inner_test

        @functools.wraps(inner)
        def with_room(*args: Any, **kwargs: Any) -> None:
            if Path("/proc/self/maps").read_bytes().count(b"\n") > MOST_MAPS:
                jax.clear_caches()
            inner(*args, **kwargs)

        test.hypothesis.inner_test = with_room
        return settings(
            deadline=None,
            database=None,
            phases=[
                Phase.explicit,
                Phase.generate,
            ],  # each example compiles: to shrink takes minutes
            max_examples=trials(short=short, long=long),
            derandomize=not is_long(),
        )(test)

    return made


def placed(mesh):
    """The arguments of a load that puts a state where `on_mesh` puts a model."""
    return {} if mesh is None else {"sharding_axis_dims": mesh, "auto_shard_model": True}


def on_mesh(model, mesh):
    if mesh is None:
        nnx.update(model, jax.device_put(nnx.state(model), jax.devices()[0]))
        return model
    return model.shard_model()


def averaged(average, params):
    return jax.tree.map(lambda old, new: old * 0.5 + new.astype(old.dtype) * 0.5, average, params)


def assert_same_bits(found, expected):
    assert [*map(raw, jax.tree.leaves(found))] == [*map(raw, jax.tree.leaves(expected))]


# -- a TrainState over a plain tree ----------------------------------------------------------------


class Fields(TrainState):
    """A user's own fields: an average of the parameters, a random key, and numbers."""

    average: Any
    rng: Any
    epoch: int = 0
    history: Any = None


class FlaxFields(flax_states.TrainState):
    """The same in Flax's own TrainState."""

    average: Any
    rng: Any
    epoch: int = 0
    history: Any = None


def by_flax(state):
    """What Flax and Optax make of the same beginning."""
    fields = {name: getattr(state, name) for name in ("average", "rng", "epoch", "history")}
    with optax_numerics():
        made = FlaxFields.create(apply_fn=None, params=state.params, tx=state.tx, **fields)
    return made.replace(step=jnp.asarray(0, "int32"))


def plain_state(optimizer, dtype, seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "dense": {
            "kernel": jnp.asarray(rng.normal(size=(4, 3)), dtype),
            "bias": jnp.ones(3, dtype),
        },
        "stack": [jnp.asarray(rng.normal(size=(2, 4, 2)), dtype), (jnp.ones((2, 2), "float32"),)],
    }
    return Fields.create(
        params=params,
        tx=optimizer,
        average=jax.tree.map(lambda leaf: leaf.astype("float32"), params),
        rng=jax.random.key(seed),
        epoch=seed,
        history={"losses": (jnp.zeros(0), 0.5), "best": None},
    )


def gradients(params, step):
    rng = np.random.default_rng(100 + step)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), params)


def plain_step(state, grads):
    with optax_numerics():
        state = state.apply_gradients(grads=grads)
    average = averaged(state.average, state.params)
    return state.replace(average=average, rng=jax.random.split(state.rng)[0])


@drawn(short=2, long=400)
@given(OPTIMIZERS, DTYPES, st.integers(0, 3), st.sampled_from(["fresh", "abstract", "saved"]))
def test_a_train_state_goes_on_as_if_never_saved_and_as_that_of_flax(
    tmp_path_factory, names, dtype, saved_after, target
):
    tx = build(names)
    assume(is_possible(tx, plain_state(optax.sgd(0.1), dtype).params))
    step = jax.jit(plain_step)

    state = start = plain_state(tx, dtype)
    theirs = by_flax(start)
    for number in range(4):
        if number == saved_after:
            saved = state
            run = tmp_path_factory.mktemp("run")
            saved.save_state(run / "r", verbose=False).wait()
        grads = gradients(start.params, number)
        state = step(state, grads)
        theirs = step(theirs, grads)
    assert_same_bits(theirs, state)

    make = functools.partial(plain_state, tx, dtype, seed=7)
    into = {"fresh": make, "abstract": lambda: jax.eval_shape(make), "saved": lambda: saved}
    loaded = Fields.load_state(run / "r", into[target]())
    if target != "fresh" or saved_after == 0:  # there, what a step made arrays is numbers again
        assert_alike(loaded, saved)
    for number in range(saved_after, 4):
        loaded = step(loaded, gradients(start.params, number))
    assert_alike(loaded, state)


# -- an EasyDeLState over a module of one's own ----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(EDPretrainedConfig):
    model_type: str = "mixture-of-the-tests"
    rate: float = 0.3
    normalized: bool = True
    shared: bool = True


class Mixture(EasyDeLBaseModule):
    """Batch statistics, dropout, a layer in three places, and a Variable of its own."""

    def __init__(self, config, dtype="float32", param_dtype="float32", precision=None, rngs=None):
        super().__init__(
            config=config, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs
        )

        def linear():
            return nnx.Linear(16, 16, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        self.first = linear()
        self.tower = self.first if config.shared else linear()
        self.layers = nnx.List([self.first, linear(), self.tower])
        self.norm = nnx.LayerNorm(16, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        if config.normalized:
            self.batch_norm = nnx.BatchNorm(16, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(config.rate, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.asarray(0))
        self.scale = nnx.Param(jnp.ones((), param_dtype))

    def __call__(self, input_ids):
        self.calls.set_value(self.calls.get_value() + 1)
        hidden = self.tower(self.first(input_ids))
        for layer in self.layers:
            hidden = jnp.tanh(layer(hidden))
        hidden = self.batch_norm(hidden) if self.config.normalized else hidden
        return self.norm(self.dropout(hidden)) * self.scale.get_value()


class WithAverage(EasyDeLState):
    """A user's own fields."""

    average: Any
    rng: Any = None
    best: float = 0.0


def loss_of(model, inputs):
    return jnp.mean(jnp.square(model(inputs).astype("float32")))


def own_step(state, inputs):
    def loss(params):
        model = state.merge(params)
        return loss_of(model, inputs), nnx.state(model, nnx.Not(nnx.Param))

    with jax.numpy_dtype_promotion("standard"):  # Flax's BatchNorm mixes them
        (value, other), grads = jax.value_and_grad(loss, has_aux=True)(state.graphstate)
    average = averaged(state.average, state.graphstate)
    state = state.apply_gradients(grads=grads)
    return state.replace(graphother=other, average=average), value


def inputs(step, dtype):
    return jnp.asarray(np.random.default_rng(step).normal(size=(8, 16)), dtype)


CONFIGS = st.fixed_dictionaries(
    {
        "rate": st.sampled_from([0.0, 0.3]),
        "normalized": st.booleans(),
        "shared": st.booleans(),
    }
)


@drawn(short=1, long=150)
@given(CONFIGS, OPTIMIZERS, DTYPES, MESHES, MESHES, st.integers(1, 2))
def test_a_module_of_ones_own_goes_on_as_if_never_saved_and_as_flax_alone(
    tmp_path_factory, options, names, dtype, mesh, other_mesh, saved_after
):
    tx = build(names)
    dims = {} if mesh is None else {"sharding_axis_dims": mesh}
    model = Mixture(MixtureConfig(**options, **dims), dtype, dtype, rngs=nnx.Rngs(0))
    assume(is_possible(tx, nnx.state(model, nnx.Param)))
    state = WithAverage.create(
        model=on_mesh(model, mesh),
        tx=tx,
        init_opt_state=True,
        average=jax.tree.map(lambda leaf: leaf.astype("float32"), nnx.state(model, nnx.Param)),
        rng=jax.random.split(jax.random.key(3), 4),
        best=-0.0,
    )
    graphdef, params, other = nnx.split(model, nnx.Param, ...)
    theirs = (state.step, params, other, state.opt_state, state.average, state.rng, state.best)

    @jax.jit
    def alone(theirs, batch):
        count, params, other, opt_state, average, rng, best = theirs

        def loss(params):
            model = nnx.merge(graphdef, params, other, copy=True)
            return loss_of(model, batch), nnx.state(model, nnx.Not(nnx.Param))

        with optax_numerics():
            (value, new_other), grads = jax.value_and_grad(loss, has_aux=True)(params)
            average = averaged(average, params)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return (count + 1, params, new_other, opt_state, average, rng, best), value

    step = jax.jit(own_step)
    losses = []
    for number in range(3):
        if number == saved_after:
            saved = state
            run = tmp_path_factory.mktemp("run")
            saved.save_state(run / "r", verbose=False).wait()
        if mesh is None:
            theirs, _ = alone(theirs, inputs(number, dtype))
        state, loss = step(state, inputs(number, dtype))
        losses.append(loss)
    if mesh is None:  # on a mesh Flax alone places its results otherwise, and sums in other orders
        assert_same_bits(theirs, state)

    given_again = {"tx": tx, "model_class": Mixture, "verbose": False}
    loaded = WithAverage.load_state(run / "r", **given_again, **placed(mesh))
    assert_alike(loaded, saved)
    for number in range(saved_after, 3):
        loaded, loss = step(loaded, inputs(number, dtype))
        np.testing.assert_array_equal(loss, losses[number])  # one that diverged is NaN again
    assert_alike(loaded, state)

    elsewhere = WithAverage.load_state(run / "r", **given_again, **placed(other_mesh))
    assert_same_bits(elsewhere, saved)
    if other_mesh is not None:
        assert {len(leaf.devices()) for leaf in jax.tree.leaves(elsewhere.params)} == {8}


# -- the decoder, in its families' options ---------------------------------------------------------

ROPES = st.sampled_from(
    [
        RopeConfig(theta=5000.0),
        RopeConfig(scaling="linear", factor=4.0),
        RopeConfig(
            scaling="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ]
)
DECODERS = st.booleans().flatmap(
    lambda biased: st.builds(  # transformers has a bias on all four projections, or on none
        DecoderConfig,
        vocab_size=st.just(96),
        hidden_size=st.just(32),
        intermediate_size=st.sampled_from([40, 48]),
        num_hidden_layers=st.just(2),
        num_attention_heads=st.just(4),
        num_key_value_heads=st.sampled_from([None, 2, 4]),
        head_dim=st.sampled_from([None, 16]),
        max_position_embeddings=st.just(64),
        hidden_act=st.sampled_from(["silu", "gelu_tanh"]),
        rope=ROPES,
        attention_bias=st.just(biased),
        attention_out_bias=st.just(biased),
        mlp_bias=st.booleans(),
        tie_word_embeddings=st.booleans(),
        initializer_range=st.just(0.3),
        scan_layers=st.booleans(),
        remat=st.booleans(),
        sharding_axis_dims=st.sampled_from([(2, 4, 1, 1), (1, 8, 1, 1), (2, 2, 2, 1)]),
    )
)


@drawn(short=1, long=60)
@given(DECODERS, st.sampled_from([(8, 1, 1, 1), (1, 4, 2, 1), (2, 4, 1, 1)]))
def test_a_decoder_of_any_options_is_loaded_as_transformers_has_it(tmp_path_factory, config, mesh):
    run = tmp_path_factory.mktemp("run") / "r"
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-2, mu_dtype="bfloat16")
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0)).shard_model()
    state = EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)
    state = state.apply_gradients(grads=state.graphstate)
    state.save_state(run, verbose=False).wait()
    same = EasyDeLState.load_state(run, verbose=False, **placed(config.sharding_axis_dims))
    assert_alike(same, state)
    loaded = EasyDeLState.load_state(run, verbose=False, **placed(mesh))
    assert_same_bits(loaded, state)
    assert loaded.model.config == config.replace(sharding_axis_dims=mesh)
    ids = tokens(2, 24)
    expected = torch_logits(state.to_pytorch(), ids)
    found = logits_of(EasyDeLState.load_state(run, verbose=False).model, ids)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


# -- what is asked of a save and a load ------------------------------------------------------------

FLOATS = st.sampled_from([None, "bfloat16", "float16", "float32"])


@functools.cache
def small_state(dtype):
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-2, max_grad_norm=1.0)
    model = Mixture(MixtureConfig(), dtype, dtype, rngs=nnx.Rngs(0))
    average = jax.tree.map(lambda leaf: leaf.astype("float32"), nnx.state(model, nnx.Param))
    state = WithAverage.create(
        model=model, tx=tx, tx_init=tx_init, init_opt_state=True, average=average, best=1.5
    )
    return state.apply_gradients(grads=state.graphstate)


@drawn(short=1, long=300)
@given(
    DTYPES,
    FLOATS,
    FLOATS,
    st.sampled_from(["require", "skip"]),
    st.booleans(),
    MESHES,
    st.sampled_from([None, "zstd"]),
)
def test_options_of_a_save_and_a_load_do_what_they_say_and_nothing_else(
    tmp_path_factory, dtype, stored, wanted, optimizer, with_optimizer, mesh, compression
):
    run = tmp_path_factory.mktemp("run") / "r"
    state = small_state(dtype)
    handle = state.save_state(
        run,
        stored,
        verbose=False,
        save_optimizer=with_optimizer,
        step=9,
        extras={"position": 3},
        compression=compression,
    )
    handle.wait()
    loaded = WithAverage.load_state(
        run,
        param_dtype=wanted,
        optimizer=optimizer,
        model_class=Mixture,
        verbose=False,
        **placed(mesh),
    )
    assert int(loaded.step) == 9
    assert loaded.extras == {"position": 3}
    expected = state.graphstate
    for cast in (stored, wanted):
        if cast is not None:
            expected = jax.tree.map(lambda leaf, cast=cast: leaf.astype(cast), expected)
    assert_same_bits(loaded.graphstate, expected)
    assert_same_bits(loaded.graphother, state.graphother)
    assert_same_bits((loaded.average, loaded.rng), (state.average, state.rng))
    assert (type(loaded.best), loaded.best) == (float, 1.5)
    if optimizer == "skip" or not with_optimizer:
        assert loaded.opt_state is None
        return
    moments = state.opt_state
    if wanted is not None:
        with optax_numerics():
            begun = state.tx.init(expected)
        moments = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), moments, begun)
    assert_same_bits(loaded.opt_state, moments)
    stepped = loaded.apply_gradients(grads=loaded.graphstate)
    assert [leaf.dtype for leaf in jax.tree.leaves(stepped.graphstate)] == [
        leaf.dtype for leaf in jax.tree.leaves(loaded.graphstate)
    ]
