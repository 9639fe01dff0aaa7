import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from state.decoder import DecoderConfig, DecoderForCausalLM
from state.errors import ArgumentError, ShardingError
from state.mesh import mesh_of, mesh_text
from state.module_sharding import module_plan
from state.sharding import axis_units, check_rules, make_mesh, plan, spec_for

SHAPE = jax.ShapeDtypeStruct


def test_minus_one_takes_the_devices_that_are_left():
    mesh = make_mesh((2, -1, 1, 1))
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 4, "tp": 1, "sp": 1}
    assert mesh.axis_types == (AxisType.Auto,) * 4


def test_a_fixed_mesh_may_use_fewer_devices():
    mesh = make_mesh((1, 2, 1, 1))
    assert list(mesh.devices.flat) == jax.devices()[:2]


@pytest.mark.parametrize(
    ("dims", "names", "message"),
    [
        ((2, 8, 1, 1), ("dp", "fsdp", "tp", "sp"), "expected 16 devices; found 8 devices"),
        ((3, -1, 1, 1), ("dp", "fsdp", "tp", "sp"), "that 3 divides; found 8 devices"),
        ((-1, -1, 1, 1), ("dp", "fsdp", "tp", "sp"), "at most one -1"),
        ((0, 8, 1, 1), ("dp", "fsdp", "tp", "sp"), "sizes of 1 or more"),
        ((2, 4), ("dp", "fsdp", "tp"), "one size for each of the distinct axis names"),
        ((2, 4), ("dp", "dp"), "one size for each of the distinct axis names"),
    ],
)
def test_a_mesh_that_does_not_fit_says_why(dims, names, message):
    with pytest.raises(ShardingError, match=message):
        make_mesh(dims, names)


def test_the_first_matching_rule_wins_and_matches_anywhere_in_the_path():
    mesh = make_mesh((2, 4, 1, 1))
    rules = [("attn/.*kernel", PartitionSpec("fsdp")), ("kernel", PartitionSpec(None, "fsdp"))]
    assert spec_for("layers/0/attn/q/kernel", (8, 8), rules, mesh) == PartitionSpec("fsdp")
    assert spec_for("layers/0/mlp/kernel", (8, 8), rules, mesh) == PartitionSpec(None, "fsdp")


def test_a_leaf_that_no_rule_matches_is_an_error_not_a_replica():
    with pytest.raises(ShardingError, match=r"bias: no partition rule matches \(shape \(8,\)\)"):
        spec_for("bias", (8,), [("kernel", PartitionSpec())], make_mesh((1, 8, 1, 1)))


def test_a_rule_with_too_many_dimensions_or_an_unknown_axis_is_an_error():
    mesh = make_mesh((1, 8, 1, 1))
    with pytest.raises(ShardingError, match="names 2 dimensions"):
        spec_for("bias", (8,), [(".*", PartitionSpec(None, "fsdp"))], mesh)
    with pytest.raises(ShardingError, match="mesh axis 'model'"):
        spec_for("bias", (8,), [(".*", PartitionSpec("model"))], mesh)


@pytest.mark.parametrize("rules", [["kernel"], [("kernel", "fsdp")], [("(", PartitionSpec())]])
def test_rules_that_are_no_rules_are_named(rules):
    with pytest.raises(ArgumentError, match=r"partition_rules\[0\]"):
        check_rules(rules)


def test_every_indivisible_leaf_is_listed():
    tree = {"a": SHAPE((6, 4), jnp.float32), "b": SHAPE((4,), jnp.float32), "c": SHAPE((3,), int)}
    report = plan(tree, make_mesh((2, 4, 1, 1)), rules=[(".*", PartitionSpec("fsdp"))])
    assert len(report.problems) == 2
    with pytest.raises(ShardingError) as caught:
        report.raise_for_problems()
    assert "a: a dimension of 6 does not divide by fsdp=4" in str(caught.value)
    assert "c: a dimension of 3 does not divide by fsdp=4" in str(caught.value)


def test_a_tuple_of_axes_needs_their_product_to_divide():
    rules = [(".*", PartitionSpec(("dp", "fsdp")))]
    assert spec_for("w", (16,), rules, make_mesh((2, 4, 1, 1))) == rules[0][1]
    with pytest.raises(ShardingError, match=r"12 does not divide by dp\*fsdp=8"):
        spec_for("w", (12,), rules, make_mesh((2, 4, 1, 1)))


def test_axis_names_place_a_leaf_and_a_mesh_axis_is_used_once():
    tree = nnx.State(
        {
            "kernel": nnx.Param(SHAPE((8, 16), jnp.float32), axes=("embed", "mlp")),
            "square": nnx.Param(SHAPE((8, 8), jnp.float32), axes=("embed", "embed")),
        }
    )
    report = plan(tree, make_mesh((1, 4, 2, 1)))
    assert [leaf.spec for leaf in report.leaves] == [
        PartitionSpec("fsdp", "tp"),
        PartitionSpec("fsdp"),
    ]
    assert report.leaves[0].rule == "axes (embed, mlp)"


def test_an_unknown_axis_name_is_an_error():
    tree = nnx.State({"kernel": nnx.Param(SHAPE((8,), jnp.float32), axes=("widgets",))})
    with pytest.raises(ShardingError, match="unknown axis name 'widgets'"):
        plan(tree, make_mesh((1, 8, 1, 1))).raise_for_problems()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 3, 4, 6, 8, 64, 96, 256, 300]), min_size=0, max_size=4))
def test_automatic_placement_always_divides(shape):
    mesh = make_mesh((2, 4, 1, 1))
    (leaf,) = plan({"w": SHAPE(tuple(shape), jnp.float32)}, mesh).leaves
    assert not leaf.problems
    assert leaf.nbytes in (leaf.bytes_per_device, 4 * leaf.bytes_per_device)
    if leaf.nbytes // 4 < 16_384:
        assert leaf.spec == PartitionSpec()


def test_reported_bytes_are_what_a_device_holds():
    tree = {"w": jnp.zeros((256, 64)), "b": jnp.zeros((64,), jnp.bfloat16)}
    report = plan(tree, make_mesh((2, 4, 1, 1)))
    placed = jax.device_put(tree, report.shardings(tree))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    assert report.bytes_per_device == held
    assert report.nbytes == 256 * 64 * 4 + 128
    assert "mesh dp=2, fsdp=4, tp=1, sp=1" in str(report)
    assert "automatic" in str(report)
    assert mesh_of(placed) == report.mesh
    assert mesh_of(tree) is None


def nine_headed_decoder():
    config = DecoderConfig(
        vocab_size=96,
        hidden_size=144,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    return config, nnx.state(nnx.eval_shape(lambda: DecoderForCausalLM(config, rngs=nnx.Rngs(0))))


def test_tensor_parallelism_that_does_not_divide_the_heads_is_refused_for_every_layer():
    config, tree = nine_headed_decoder()
    assert axis_units(config) == {"heads": 9, "kv_heads": 3}
    with pytest.raises(ShardingError) as caught:
        module_plan(tree, config, mesh=make_mesh((1, 4, 2, 1))).raise_for_problems()
    message = str(caught.value)
    # 144 = 9 heads of 16 does divide by 2: the array alone would not have told.
    for layer in (0, 1):
        for name, text in (
            ("q_proj", "9 attention heads do not divide by tp=2"),
            ("k_proj", "3 key/value heads do not divide by tp=2"),
            ("v_proj", "3 key/value heads do not divide by tp=2"),
            ("o_proj", "9 attention heads do not divide by tp=2"),
        ):
            assert f"layers/{layer}/self_attn/{name}/kernel: {text}" in message


def test_a_mesh_that_divides_the_heads_is_accepted():
    config, tree = nine_headed_decoder()
    report = module_plan(tree, config, mesh=make_mesh((1, 2, 3, 1))).raise_for_problems()
    assert report.bytes_per_device < report.nbytes
    assert mesh_text(report.mesh) == "dp=1, fsdp=2, tp=3, sp=1"


def test_random_keys_are_placed_and_counted():
    tree = {"key": jax.random.key(0), "n": np.int32(3)}
    report = plan(tree, make_mesh((1, 8, 1, 1)))
    assert [leaf.nbytes for leaf in report.leaves] == [8, 4]
