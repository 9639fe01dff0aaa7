"""What a save says of its model is what it would say if nothing were kept from saves before."""

import random
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from cairn import DecoderConfig, DecoderForCausalLM, EasyDeLState, Run
from cairn.state.checkpointing.trees import flatten
from tests.state.my_model import my_model
from tests.state.seams import description


def states():
    """States of one job: by turns saved whole, in part, adapted, and in other dtypes."""
    model = my_model()
    graphdef, trained, frozen = nnx.split(model, nnx.PathContains("layers"), ...)
    _, usual, others = nnx.split(model, nnx.Param, ...)
    part = EasyDeLState.create(graphdef=graphdef, graphstate=trained, graphother=frozen)
    whole = part.replace(graphstate=usual, graphother=others)
    adapted = my_model()
    before = EasyDeLState.create(model=adapted)
    adapted.apply_lora_to_layers(2, rngs=nnx.Rngs(0))
    with_adapters = EasyDeLState.create(model=adapted)
    merged = EasyDeLState.create(model=with_adapters.model.unwrap_lora_to_layers())
    quantized = my_model()
    quantized.quantize("8bit", quantization_pattern="layers")
    return [
        part,
        whole,
        before,
        with_adapters,
        merged,
        EasyDeLState.create(model=quantized),
        EasyDeLState.create(model=my_model(dtype=jnp.bfloat16)),
        EasyDeLState.create(model=my_model(param_dtype=jnp.bfloat16)),
        EasyDeLState.create(model=my_model()),
        EasyDeLState.create(
            model=my_model(precision="highest"),
            tx_init={"lr": 0.1},
            tx=optax.adam(0.1),
            init_opt_state=True,
        ),
    ]


def test_what_is_said_of_a_model_is_what_it_is_now(monkeypatch):
    turns = random.Random(0)
    made = states()
    sizes = [64, 64, 65, 1, True]
    for _ in range(60):
        state = turns.choice(made)
        if turns.random() < 0.3:  # frozen, and yet
            object.__setattr__(state.model.config, "hidden_size", turns.choice(sizes))
        optimizer = turns.random() < 0.5
        for _ in range(2):
            said = description.describe(state, optimizer=optimizer)
        with monkeypatch.context() as patched:
            patched.setattr(description, "_kept", {})
            anew = description.describe(state, optimizer=optimizer)
        assert repr(said.description) == repr(anew.description)
        walked = description.items_of(
            state.graphstate,
            state.graphother,
            state.opt_state if optimizer else None,
            state.added_fields,
        )
        assert ids(said.items) == ids({name: flatten(tree) for name, tree in walked.items()})
        assert sorted(map(id, said.leaves)) == sorted(map(id, jax.tree.leaves(walked)))


class AddedState(EasyDeLState):
    added: Any = None


def test_a_module_in_a_field_is_stored_without_the_functions_that_it_holds(tmp_path):
    """Which leaves of it are arrays only the module itself tells, in each save."""
    module = equinox.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    state = AddedState.create(model=my_model(), added=module)
    for step in (1, 2):
        state.save_state(tmp_path / "run", step=step, verbose=False, wait=True)
        run = Run.open(tmp_path / "run")
        leaves = run.contents(run.step(step)).leaves
        layers = [f"added/layers/{n}/{name}" for n in range(3) for name in ("bias", "weight")]
        assert sorted(leaf.path for leaf in leaves if leaf.item == "fields") == layers


def ids(items):
    return {
        item: [(path, id(leaf)) for path, leaf in leaves.items()] for item, leaves in items.items()
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.hf_extra["a"].append(2),
        lambda config: config.hf_extra.update(b=1),
        lambda config: config.hf_extra.update(a=[True]),
        lambda config: object.__setattr__(config.rope, "theta", 1.0),
    ],
)
def test_what_changes_within_a_config_is_seen(change):
    config = DecoderConfig(
        vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=1, hf_extra={"a": [1]},
    )  # fmt: skip
    state = EasyDeLState.create(model=DecoderForCausalLM(config, rngs=nnx.Rngs(0)))
    before = description.describe(state, optimizer=False).description
    assert description.describe(state, optimizer=False).description is before
    change(before.config)
    after = description.describe(state, optimizer=False).description
    assert (
        repr(after.meta["config"]) == repr(before.config.to_dict()) != repr(before.meta["config"])
    )
