import gc
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from rich.console import Console

from cairn import (
    ArgumentError,
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLState,
    PartitionAxis,
    ShardingError,
    TreeStructureError,
    make_mesh,
)
from cairn.interop.placement.rules import axis_units
from cairn.state.paths import named_leaves
from cairn.state.sharding.mesh import mesh_of, mesh_text
from cairn.state.sharding.rules import (
    check_rules,
    module_plan,
    plan,
)
from tests.state.forward import logits_of
from tests.state.my_model import my_model

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


def spec_for(path, shape, rules, mesh):
    tree = SHAPE(shape, np.uint8)
    for key in reversed(path.split("/")):
        tree = {key: tree}
    (leaf,) = plan(tree, mesh, rules=rules).raise_for_problems().leaves
    return leaf.spec


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


@pytest.mark.parametrize(
    ("dims", "rules"),
    [
        ((1, 8, 1, 1), [(".*kernel", PartitionSpec("fsdp"))]),
        ((1, 8, 1, 1), [(".*kernel", PartitionSpec(None, "fsdp"))]),
        ((2, 4, 1, 1), [(".*kernel", PartitionSpec(("dp", "fsdp")))]),
        ((1, 2, 1, 4), [(".*kernel", PartitionSpec("sp", "fsdp"))]),
        ((1, 2, 3, 1), [("o_proj", PartitionSpec(("tp", "fsdp")))]),
    ],
)
def test_axes_that_carry_no_heads_need_not_divide_them(dims, rules):
    config, tree = nine_headed_decoder()
    rules = [*rules, (".*", PartitionSpec())]
    report = module_plan(tree, config, rules, make_mesh(dims)).raise_for_problems()
    assert report.bytes_per_device < report.nbytes


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (PartitionSpec(None, "tp"), "9 attention heads do not divide by tp=2 (shape (144, 144))"),
        (
            PartitionSpec(None, ("fsdp", "tp")),
            "9 attention heads do not divide by tp=2 (shape (144, 144))",
        ),
        (
            PartitionSpec(None, "dp"),
            "a dimension of 144 does not divide by dp=5 (dimension 1 of (144, 144))",
        ),
    ],
)
def test_axes_that_carry_heads_must_divide_them_and_every_axis_its_dimension(spec, problem):
    config, tree = nine_headed_decoder()
    mesh = AbstractMesh((5, 2, 2, 1), ("dp", "fsdp", "tp", "sp"))
    report = module_plan(tree, config, [("q_proj", spec), (".*", PartitionSpec())], mesh)
    assert [f"model/layers/{layer}/self_attn/q_proj/kernel: {problem}" for layer in (0, 1)] == [
        *report.problems
    ]


def test_a_config_says_which_axes_carry_heads_and_an_unknown_axis_might():
    config, tree = nine_headed_decoder()
    by_fsdp = config.replace(partition_axis=PartitionAxis(head_axis="fsdp"))
    rules = [("q_proj", PartitionSpec("tp", "fsdp")), (".*", PartitionSpec())]
    report = module_plan(tree, by_fsdp, rules, make_mesh((1, 4, 2, 1)))
    assert "9 attention heads do not divide by fsdp=4" in report.problems[0]
    mesh = AbstractMesh((4, 2), ("data", "model"))
    rules = [("q_proj", PartitionSpec("data", "model")), (".*", PartitionSpec())]
    report = module_plan(tree, config, rules, mesh)
    assert "9 attention heads do not divide by model=2" in report.problems[0]


def test_weights_in_parts_over_fsdp_give_the_same_numbers():
    config = DecoderConfig(
        vocab_size=32,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        sharding_axis_dims=(1, 8, 1, 1),
    )
    ids = jnp.arange(24).reshape(2, 12)
    with jax.default_matmul_precision("highest"):
        whole = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
        expected = logits_of(whole, ids)
        rules = [(".*kernel", PartitionSpec("fsdp")), (".*", PartitionSpec())]
        parts = DecoderForCausalLM(config, rngs=nnx.Rngs(0)).shard_model(rules)
        kernel = parts.model.layers[0].self_attn.o_proj.kernel[...]
        assert kernel.sharding.shard_shape(kernel.shape) == (6, 48)  # a head has 16
        np.testing.assert_allclose(logits_of(parts, ids), expected, rtol=1e-5, atol=1e-5)


def test_a_mesh_that_divides_the_heads_is_accepted():
    config, tree = nine_headed_decoder()
    report = module_plan(tree, config, mesh=make_mesh((1, 2, 3, 1))).raise_for_problems()
    assert report.bytes_per_device < report.nbytes
    assert mesh_text(report.mesh) == "dp=1, fsdp=2, tp=3, sp=1"


def test_random_keys_are_placed_and_counted():
    tree = {"key": jax.random.key(0), "n": np.int32(3)}
    report = plan(tree, make_mesh((1, 8, 1, 1)))
    assert [leaf.nbytes for leaf in report.leaves] == [8, 4]


RULES = (("kernel", PartitionSpec("fsdp")), (".*", PartitionSpec()))
MIXED = {
    "kernel": SHAPE((256, 256), jnp.float32),
    "table": SHAPE((256, 256), jnp.float32),
    "bias": SHAPE((256,), jnp.float32),
    "uneven/kernel": SHAPE((255, 256), jnp.float32),
}


def test_strict_mode_lists_large_leaves_that_a_catch_all_took_with_those_that_do_not_divide():
    report = plan(MIXED, make_mesh((2, 4, 1, 1)), rules=RULES)
    with pytest.raises(ShardingError) as caught:
        report.raise_for_problems(strict=True)
    assert caught.value.problems == (
        "uneven/kernel: a dimension of 255 does not divide by fsdp=4 (dimension 0 of (255, 256))",
        "table: large, and only the catch-all rule '.*' takes it (shape (256, 256))",
    )
    with pytest.raises(ShardingError) as caught:
        report.raise_for_problems()
    assert len(caught.value.problems) == 1


def test_rules_that_take_no_leaf_are_told():
    mesh, whole = make_mesh((1, 1, 1, 8)), PartitionSpec()
    rules = (("kernal", PartitionSpec("fsdp")), ("table", whole), ("tabl", whole), *RULES)
    report = plan(MIXED, mesh, rules=rules)
    assert report.idle_rules == ("kernal", "tabl")
    assert str(report).endswith("rule 'kernal' takes no leaf\nrule 'tabl' takes no leaf")
    assert plan(MIXED, mesh).idle_rules == ()
    model = my_model()
    model.count = nnx.Variable(jnp.zeros(2))
    rules = (("count", whole), ("kernal", whole), (".*", whole))
    told = str(EasyDeLState.create(model=model).explain_sharding(rules))
    assert told.endswith("rule 'kernal' takes no leaf")
    assert "'count'" not in told


def test_a_rule_reads_a_slash_in_a_key_like_any_other():
    """Flat dicts of joined paths, as Haiku's, take the rules that nested ones do."""
    rules = (("linear/~/w$", PartitionSpec("fsdp")), (".*", PartitionSpec()))
    flat, nested = {"linear/~/w": MIXED["table"]}, {"linear": {"~": {"w": MIXED["table"]}}}
    for tree in (flat, nested):
        (leaf,) = plan(tree, make_mesh((2, 4, 1, 1)), rules=rules).leaves
        assert (leaf.path, leaf.spec) == ("linear/~/w", PartitionSpec("fsdp"))


@pytest.mark.parametrize("pattern", [".*", "", "^.*$", "(a|b)*"])
def test_a_rule_that_matches_any_path_is_a_catch_all(pattern):
    mesh = make_mesh((2, 4, 1, 1))
    large, small = SHAPE((128, 128), jnp.float32), SHAPE((127, 128), jnp.float32)
    report = plan({"w": large, "v": small}, mesh, rules=[(pattern, PartitionSpec())])
    assert [text.partition(":")[0] for text in report.unmatched] == ["w"]
    named = plan({"w": large}, mesh, rules=[("w", PartitionSpec())])
    on_purpose = plan({"w": large}, make_mesh((8, 1, 1, 1)), rules=[(pattern, PartitionSpec("tp"))])
    assert not named.unmatched
    assert not on_purpose.unmatched


def test_a_large_leaf_that_nothing_divides_is_unmatched():
    tree = {"w": SHAPE((255, 255), jnp.float32)}
    assert "fsdp=4 divides none" in plan(tree, make_mesh((2, 4, 1, 1))).unmatched[0]
    assert not plan(tree, make_mesh((8, 1, 1, 1))).unmatched


def test_specs_leave_out_axes_that_split_nothing():
    tree = {"w": SHAPE((8, 8), jnp.float32)}
    rules = [("w", PartitionSpec(("dp", "fsdp"), "tp"))]
    (leaf,) = plan(tree, make_mesh((1, 8, 1, 1)), rules=rules).leaves
    assert leaf.spec == PartitionSpec("fsdp")
    (leaf,) = plan(tree, make_mesh((2, 4, 1, 1)), rules=rules).leaves
    assert leaf.spec == PartitionSpec(("dp", "fsdp"))


def test_a_report_prints_as_a_rich_table_and_as_text(capsys):
    report = plan(
        MIXED, make_mesh((2, 4, 1, 1)), rules=[("[uk].*kernel|kernel", RULES[0][1]), RULES[1]]
    )
    console = Console(width=200, record=True, file=io.StringIO())
    report.print(console)
    shown = console.export_text()
    for text in (
        "mesh dp=2, fsdp=4, tp=1, sp=1",
        "256x256",
        "('fsdp',)",
        "65,536",
        "[uk].*kernel|kernel",  # brackets are no markup
        "255 does not divide by fsdp=4",
        "only the catch-all rule",
    ):
        assert text in shown, text
        assert text in str(report), text
    report.print()
    assert "table" in capsys.readouterr().out


class FakeDevice:
    """What a hybrid mesh looks at: kind, slice and process."""

    platform = device_kind = "fake"

    def __init__(self, number, process_index, slice_index=None):
        self.id, self.process_index = number, process_index
        if slice_index is not None:
            self.slice_index = slice_index

    def __repr__(self):
        return f"fake:{self.id}"


def across(dims, dcn_dims, devices):
    """Return the devices of a hybrid mesh, as they are arranged."""
    return make_mesh(dims, "ab"[: len(dims)], dcn_dims, devices=devices).devices


def test_a_hybrid_mesh_crosses_slices_only_where_it_is_told_to():
    devices = [FakeDevice(n, process_index=n // 2, slice_index=n // 4) for n in range(8)]
    arranged = across((1, 4), (2, 1), devices)
    assert [[device.id for device in row] for row in arranged] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    arranged = across((2, -1), (1, -1), devices)
    assert arranged.shape == (2, 4)
    for row in arranged:
        assert [device.slice_index for device in row] == [0, 0, 1, 1]


def test_without_slices_a_process_is_the_granule():
    devices = [FakeDevice(n, process_index=n // 2) for n in range(8)]
    arranged = across((2,), (-1,), devices)
    assert [device.process_index for device in arranged] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ShardingError, match=r"expected 2 processes .* found 4 processes of 2"):
        across((4,), (2,), devices)
    with pytest.raises(ShardingError, match="one for each mesh axis"):
        across((2,), (4, 1), devices)
    with pytest.raises(ShardingError, match="processes of one size"):
        across((2,), (-1,), devices[:7])


def test_eight_devices_of_one_process_are_one_granule():
    mesh = make_mesh((2, -1, 1, 1), dcn_dims=(1, 1, 1, 1))
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 4, "tp": 1, "sp": 1}
    assert mesh.axis_types == (AxisType.Auto,) * 4
    with pytest.raises(ShardingError, match=r"sharding_dcn_axis_dims \(2, 1, 1, 1\).*1 process of"):
        make_mesh((1, 4, 1, 1), dcn_dims=(2, 1, 1, 1))


# -- a module's methods ------------------------------------------------------------------------


def test_specs_shardings_and_functions_of_a_module_agree():
    model = my_model()
    mesh = make_mesh((1, 4, 2, 1))
    rules = ((r"layers/\d/kernel", PartitionSpec("fsdp", "tp")), (".*", PartitionSpec()))
    assert model._get_partition_rules() is None
    assert model._get_partition_rules(rules) == rules
    specs = {n.path: n.leaf for n in named_leaves(model._specs_sharding(rules, mesh))}
    named = {n.path: n.leaf for n in named_leaves(model._named_shardings(rules, mesh))}
    shard_fns, gather_fns = model._shard_fns(rules, mesh), model._gather_fns(rules, mesh)
    leaves = {n.path: n.leaf for n in named_leaves(nnx.state(model))}
    assert specs.keys() == named.keys() == shard_fns.keys() == gather_fns.keys() == leaves.keys()
    assert specs["layers/0/kernel"] == PartitionSpec("fsdp", "tp")
    for path in ("layers/0/kernel", "embed_tokens/embedding"):
        placed = shard_fns[path](leaves[path])
        assert placed.sharding == named[path]
        assert named[path].spec == specs[path]
        assert isinstance(gather_fns[path](placed), np.ndarray)
        np.testing.assert_array_equal(gather_fns[path](placed), leaves[path])
    tree = nnx.state(model)
    sharded = model._apply_sharding_fns(tree, rules, mesh)
    assert sharded["layers"][0]["kernel"].get_value().sharding == named["layers/0/kernel"]
    gathered = model._apply_sharding_fns(sharded, rules, mesh, is_gather=True)
    assert isinstance(gathered["layers"][0]["kernel"].get_value(), np.ndarray)


def test_a_module_fully_shards_over_every_device_and_comes_back():
    model = my_model()
    before = np.array(model.layers[0].kernel.get_value())
    assert model.fully_shard(make_mesh((2, 4, 1, 1))) is model
    kernel = model.layers[0].kernel.get_value()
    assert kernel.sharding.spec == PartitionSpec(("dp", "fsdp"))
    assert kernel.addressable_shards[0].data.nbytes * 8 == kernel.nbytes
    assert model.fully_gather() is model
    np.testing.assert_array_equal(model.layers[0].kernel.get_value(), before)


def test_gathering_puts_nothing_whole_on_any_device():
    state = my_model().fully_shard().to_state(optax.adam(1e-3))
    whole = {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim}
    gc.collect()
    # Kept, so that no new array can have the identity of an old one.
    before = {id(array): array for array in jax.live_arrays()}
    with (
        jax.transfer_guard_device_to_device("disallow"),
        jax.transfer_guard_host_to_device("disallow"),
    ):
        gathered = state.replace(graphother=nnx.State({})).gather_state()
    made = [array for array in jax.live_arrays() if id(array) not in before]
    for leaf in jax.tree.leaves((gathered.graphstate, gathered.opt_state)):
        assert isinstance(leaf, np.ndarray)
    assert whole == {(256, 64), (64, 64), (64,)}
    assert not whole & {array.shape for array in made}
    again = state.gather_state().shard_with_shape(state.shardings)
    assert jax.tree.leaves(again.shardings) == jax.tree.leaves(state.shardings)


def test_every_leaf_that_a_tree_of_placements_lacks_is_listed():
    state = my_model().shard_model().to_state(optax.sgd(1e-2, momentum=0.9))
    shapes = jax.tree.map(lambda leaf: SHAPE(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    wrong = jax.tree.map(
        lambda leaf: SHAPE((3, 3), jnp.float32) if leaf.shape == (64,) else leaf, shapes
    )
    with pytest.raises(TreeStructureError) as caught:
        state.shard_with_shape(wrong)
    assert caught.value.problems == tuple(
        f"{part}/layers/{layer}/bias: expected shape (64,), found (3, 3)"
        for part in ("graphstate", "opt_state/0/trace")
        for layer in (0, 1)
    )
    with pytest.raises(TreeStructureError) as caught:
        state.shard_with_shape(state.free_opt_state().shardings)
    assert len(caught.value.problems) == 5
    assert "opt_state/0/trace/layers/1/kernel: missing" in caught.value.problems
    with pytest.raises(TreeStructureError, match="opt_state/0/trace/layers/0/bias: unexpected"):
        state.free_opt_state().shard_with_shape(shapes)


def test_placements_from_a_state_with_another_optimizer_object_are_taken():
    state = my_model().shard_model().to_state(optax.sgd(1e-2, momentum=0.9))
    other = my_model().fully_shard().to_state(optax.sgd(1e-2, momentum=0.9))
    moved = state.shard_with_shape(other.shardings)
    assert jax.tree.leaves(moved.shardings) == jax.tree.leaves(other.shardings)
    assert moved.placement == other.placement is not None
    constrained = jax.jit(lambda s: s.shard_with_shape(other.shardings))(state)
    assert jax.tree.leaves(constrained.shardings) == jax.tree.leaves(other.shardings)
    assert constrained.placement == other.placement


def test_a_state_without_a_config_needs_a_mesh_from_somewhere():
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    state = EasyDeLState.create(model=linear)
    with pytest.raises(ArgumentError, match="mesh: expected a mesh"):
        state.shard_model()
    placed = state.shard_model(
        (("kernel", PartitionSpec("fsdp")), (".*", PartitionSpec())), make_mesh((2, 4, 1, 1))
    )
    assert placed.graphstate["kernel"].get_value().sharding.spec == PartitionSpec("fsdp")
