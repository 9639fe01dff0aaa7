"""How long a training job waits for `save_state`, beside `Checkpointer.save` of the same leaves.

Each is measured in a process of its own: the first call meets what a job meets. States are of the
decoder that Cairn ships, in f32 with Adam's moments, on one device. Every call is timed from
outside; what the handle says of it must be that.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import storage_places as places

SAVES = 6
MANY_LAYERS = 30
MANY_LAYERS_BYTES = 14e6
"""Of each of its layers: many leaves for what they weigh."""

HIDDEN_STEP = 64
TOLD_SECONDS = 0.01
"""By so much what is told may be less than what was timed from outside."""

Measured = dict[str, Any]
Save = Callable[[Any, str, int], Any]


def save_state(place: str, megabytes: float, layers: int) -> Measured:
    """Calls of `EasyDeLState.save_state`."""
    return _calls(_by_state, place, _state(megabytes * 1e6 / 3, layers))


def save_train_state(place: str, megabytes: float, layers: int) -> Measured:
    """Calls of `TrainState.save_state`."""
    return _calls(_by_state, place, _train_state(_state(megabytes * 1e6 / 3, layers)))


def save_items(place: str, megabytes: float, layers: int) -> Measured:
    """Calls of `Checkpointer.save`."""
    return _calls(_by_checkpointer(place), place, _state(megabytes * 1e6 / 3, layers))


def save_state_of_many_layers(place: str, megabytes: float, layers: int) -> Measured:
    """Calls of `EasyDeLState.save_state`, of more layers; smaller ones where less is asked for."""
    return _calls(_by_state, place, _many_layers(megabytes))


def save_items_of_many_layers(place: str, megabytes: float, layers: int) -> Measured:
    """Calls of `Checkpointer.save`, of the same."""
    return _calls(_by_checkpointer(place), place, _many_layers(megabytes))


def _many_layers(megabytes: float) -> Any:
    return _state(MANY_LAYERS * MANY_LAYERS_BYTES * min(1.0, megabytes / 2000), MANY_LAYERS)


def _state(nbytes: float, layers: int) -> Any:
    """A state whose parameters have about so many bytes."""
    import jax
    import optax
    from flax import nnx

    from cairn import DecoderConfig, DecoderForCausalLM, EasyDeLState

    hidden = math.sqrt(nbytes / 4 / layers / (4 + 3 * 2.75))
    hidden = max(HIDDEN_STEP, round(hidden / HIDDEN_STEP) * HIDDEN_STEP)
    config = DecoderConfig(
        model_type="llama",
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=int(hidden * 2.75),
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
    state = EasyDeLState.create(model=model, tx=optax.adamw(1e-3), init_opt_state=True)
    return jax.block_until_ready(state)


def _train_state(state: Any) -> Any:
    from cairn import TrainState

    return TrainState.create(params=state.params, tx=state.tx, opt_state=state.opt_state)


def _by_state(state: Any, run: str, step: int) -> Any:
    return state.save_state(run, step=step, verbose=False)


def _by_checkpointer(place: str) -> Save:
    """The call of a checkpointer, which its caller has made before."""
    from cairn import Checkpointer

    checkpointer = Checkpointer.for_run(f"{place}/run")

    def save(state: Any, _run: str, step: int) -> Any:
        items = {"model": state.graphstate, "optimizer": state.opt_state}
        return checkpointer.save(step, items, meta={})

    return save


def _calls(save: Save, place: str, state: Any) -> Measured:
    """The first call and the median of later ones; all leaves change in between."""
    import jax

    places.connect(place)
    change = jax.jit(lambda leaf: leaf * 2)
    called = []
    for step in range(1, SAVES + 1):
        os.sync()
        began = time.perf_counter()
        handle = save(state, f"{place}/run", step)
        called.append(time.perf_counter() - began)
        handle.wait()
        if handle.blocked_seconds < called[-1] - TOLD_SECONDS:
            raise RuntimeError(
                f"expected to be told of {called[-1]:.3f} s, was told {handle.blocked_seconds:.3f}"
            )
        state = jax.block_until_ready(jax.tree.map(change, state))
    return {
        "first": called[0],
        "later": statistics.median(called[1:]),
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
    }
