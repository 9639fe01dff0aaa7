import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import (
    ArgumentError,
    AutoEasyDeLConfig,
    ConfigError,
    DecoderForCausalLM,
    PartitionAxis,
    make_mesh,
)
from cairn.interop.placement.rules import DEFAULT_AXIS_RULES
from cairn.state.sharding.rules import module_plan, plan
from tests.state.forward import logits_of
from tests.state.seams import attention, grouped_attention
from tests.tiny import TINY, batch


def abstract(config):
    return nnx.state(nnx.eval_shape(lambda: DecoderForCausalLM(config, rngs=nnx.Rngs(0))))


def test_the_default_is_what_parameters_go_by():
    assert PartitionAxis().axis_rules() == dict(DEFAULT_AXIS_RULES)
    assert hash(PartitionAxis()) == hash(PartitionAxis())


@pytest.mark.parametrize(("field", "name"), PartitionAxis.LOGICAL_NAMES.items())
def test_each_field_of_a_parameter_axis_moves_the_dimension_with_its_name(field, name):
    everything_whole = dict.fromkeys(PartitionAxis.LOGICAL_NAMES)
    axis = PartitionAxis(**{**everything_whole, field: ("fsdp", "tp")})
    leaf = nnx.Param(jax.ShapeDtypeStruct((3, 16), jnp.float32), axes=(None, name))
    (placed,) = plan({"w": leaf}, make_mesh((2, 2, 2, 1)), axis_rules=axis.axis_rules()).leaves
    assert placed.spec == PartitionSpec(None, ("fsdp", "tp"))
    assert placed.bytes_per_device * 4 == placed.nbytes


def test_a_config_carries_it_to_the_plan_and_through_json():
    axis = PartitionAxis(hidden_state_axis=("dp", "fsdp"), vocab_axis=None)
    config = TINY.replace(partition_axis=axis, sharding_axis_dims=(2, 4, 1, 1))
    report = module_plan(abstract(config), config).raise_for_problems()
    specs = {leaf.path: leaf.spec for leaf in report.leaves}
    assert specs["model/embed_tokens/embedding"] == PartitionSpec(None, ("dp", "fsdp"))
    stored = json.loads(json.dumps(config.to_dict()))
    assert AutoEasyDeLConfig.from_dict(stored) == config
    assert AutoEasyDeLConfig.from_dict(stored).partition_axis == axis
    assert "partition_axis" not in config.to_hf()


def test_what_is_unknown_is_refused_and_the_known_is_listed():
    with pytest.raises(ArgumentError, match=r"vocab_axis, hidden_state_axis.*unknown: colour_axis"):
        PartitionAxis.from_dict({"colour_axis": "tp"})
    with pytest.raises(ArgumentError) as caught:
        PartitionAxis(head_axis=3, batch_axis=("dp", "dp"), vocab_axis=())
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "vocab_axis",
        "head_axis",
        "batch_axis",
    ]
    with pytest.raises(ConfigError, match=r"head_axis names mesh axis 'model'.*'dp', 'fsdp'"):
        TINY.replace(partition_axis=PartitionAxis(head_axis="model"))
    with pytest.raises(ConfigError, match="is no PartitionAxis"):
        TINY.replace(partition_axis="tp")
    with pytest.raises(ConfigError, match="sharding_dcn_axis_dims"):
        TINY.replace(sharding_dcn_axis_dims=(2, 1))


@pytest.fixture(scope="module")
def plain():
    """Logits of the tiny model on one device."""
    return logits_of(DecoderForCausalLM(TINY, rngs=nnx.Rngs(0)), batch(0))


@pytest.fixture
def attend(monkeypatch):
    """Runs a tiny model; returns what each device holds of queries and keys, and the logits."""
    held = {}

    def note(name, array):
        def seen(sharding):
            held[name] = sharding.shard_shape(array.shape)

        jax.debug.inspect_array_sharding(array, callback=seen)

    def watched(query, key, value, mask, **options):
        note("query", query)
        note("key", key)
        return grouped_attention(query, key, value, mask, **options)

    monkeypatch.setattr(attention, "grouped_attention", watched)

    def run(**options):
        config = TINY.replace(sharding_axis_dims=(2, 2, 2, 1), **options)
        model = DecoderForCausalLM(config, rngs=nnx.Rngs(0)).shard_model()
        graphdef, state = nnx.split(model)
        rows = jax.sharding.NamedSharding(model.mesh, PartitionSpec("dp"))
        ids = jax.device_put(jnp.asarray(batch(0)), rows)
        logits = jax.jit(lambda state, ids: nnx.merge(graphdef, state)(ids).logits)(state, ids)
        return dict(held), np.asarray(logits)

    return run


def test_attention_may_be_kept_whole_on_every_device(attend):
    held, usual = attend()
    assert held["query"][2:] == (2, 16)  # four heads over tp=2
    held, logits = attend(shard_attention_computation=False)
    assert held["query"][1:] == (16, 4, 16)
    assert held["key"][1:] == (16, 2, 16)
    np.testing.assert_allclose(logits, usual, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("axis", "query", "key"),
    [
        ({"batch_axis": "dp"}, (4, 16, 2, 16), (4, 16, 1, 16)),
        ({"batch_axis": ("dp", "fsdp")}, (2, 16, 2, 16), (2, 16, 1, 16)),
        ({"batch_axis": "dp", "sequence_axis": "fsdp"}, (4, 8, 2, 16), (4, 16, 1, 16)),
        ({"batch_axis": "dp", "key_sequence_axis": "fsdp"}, (4, 16, 2, 16), (4, 8, 1, 16)),
    ],
)
def test_attention_goes_where_its_axes_say(axis, query, key, plain, attend):
    held, logits = attend(partition_axis=PartitionAxis(**axis))
    assert (held["query"], held["key"]) == (query, key)
    np.testing.assert_allclose(logits, plain, rtol=1e-4, atol=1e-5)


def test_a_batch_that_the_axes_do_not_divide_is_left_to_the_compiler():
    config = TINY.replace(sharding_axis_dims=(2, 2, 2, 1), partition_axis=PartitionAxis())
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0)).shard_model()
    graphdef, state = nnx.split(model)
    logits = jax.jit(lambda state, ids: nnx.merge(graphdef, state)(ids).logits)(
        state, jnp.asarray(batch(0))[:1]
    )
    np.testing.assert_allclose(
        logits, model(jnp.asarray(batch(0))[:1]).logits, rtol=1e-4, atol=1e-5
    )
