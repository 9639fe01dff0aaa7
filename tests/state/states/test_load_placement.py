"""The arguments of load_state that say where a state goes: each acts, or is named in an error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cairn import (
    ArgumentError,
    ConfigError,
    EasyDeLBackends,
    EasyDeLPlatforms,
    EasyDeLState,
    PartitionAxis,
    ShardingError,
    TreeMismatchError,
    make_mesh,
)
from cairn.state.paths import named_leaves
from cairn.state.sharding.mesh import mesh_of
from tests.state.my_model import my_model
from tests.tiny import make_state

EMBEDDING = "model/embed_tokens/embedding"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    state = make_state()
    run = tmp_path_factory.mktemp("store") / "tiny"
    state.save_state(run, wait=True, verbose=False)
    return str(run), state


def load(saved, **arguments):
    return EasyDeLState.load_state(saved[0], verbose=False, **arguments)


def spec_of(state, path):
    return {named.path: named.leaf.sharding.spec for named in named_leaves(state)}[path]


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_partition_axis_places_and_is_kept_in_the_config(saved):
    axis = PartitionAxis(vocab_axis="fsdp", hidden_state_axis=None)
    for given in (axis, {"vocab_axis": "fsdp", "hidden_state_axis": None}):
        loaded = load(saved, partition_axis=given, auto_shard_model=True)
        assert loaded.module_config.partition_axis == axis
        assert spec_of(loaded.graphstate, EMBEDDING) == PartitionSpec("fsdp")
        assert spec_of(loaded.opt_state, f"0/mu/{EMBEDDING}") == PartitionSpec("fsdp")
        assert loaded.placement is None
    assert_equal(loaded, saved[1])


def test_shard_attention_computation_false_reaches_the_config(saved):
    loaded = load(saved, shard_attention_computation=False, auto_shard_model=True)
    assert loaded.module_config.shard_attention_computation is False
    assert load(saved).module_config.shard_attention_computation is True


def test_shard_attention_computation_is_refused_where_no_attention_listens(tmp_path):
    my_model().to_state().save_state(tmp_path / "mine", wait=True, verbose=False)
    with pytest.raises(ArgumentError, match=r"shard_attention_computation: .*MyModelConfig"):
        load((str(tmp_path / "mine"),), shard_attention_computation=False)


def test_shard_fns_place_their_leaves_and_the_optimizer_follows(saved):
    mesh = make_mesh((2, 4, 1, 1))
    place = NamedSharding(mesh, PartitionSpec(("dp", "fsdp")))
    seen = []

    def put(leaf):
        seen.append(leaf.shape)
        return jax.device_put(leaf, place)

    keys = ("model", "layers", 0, "mlp", "up_proj", "kernel")
    loaded = load(saved, shard_fns={EMBEDDING: put, keys: put}, mesh=mesh)
    assert seen == [(128, 32), (32, 64)] or seen == [(32, 64), (128, 32)]
    for path in (EMBEDDING, "model/layers/0/mlp/up_proj/kernel"):
        assert spec_of(loaded.graphstate, path) == place.spec
        assert spec_of(loaded.opt_state, f"0/nu/{path}") == place.spec
    other = "model/layers/1/mlp/up_proj/kernel"
    assert spec_of(loaded.graphstate, other) == PartitionSpec("fsdp")
    assert loaded.placement is not None
    assert_equal(loaded, saved[1])


def test_shard_fns_of_a_model_serve_load_state(saved):
    model = saved[1].model
    rules = ((".*", PartitionSpec()),)
    loaded = load(saved, shard_fns=model._shard_fns(rules, model.mesh), auto_shard_model=True)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(loaded))


def test_shard_fns_that_cannot_act_are_all_listed(saved):
    fns = {"model/layers/9/x": jax.device_put, ("nowhere",): jax.device_put, EMBEDDING: 3}
    with pytest.raises(ArgumentError, match=f"shard_fns: .*{EMBEDDING}") as caught:
        load(saved, shard_fns=fns, auto_shard_model=True)
    assert caught.value.problems == (
        "model/embed_tokens/embedding: no function",
        "model/layers/9/x: no such leaf",
        "nowhere: no such leaf",
    )
    with pytest.raises(ArgumentError, match="did not return their leaf"):
        load(saved, shard_fns={EMBEDDING: lambda leaf: leaf[:1]}, auto_shard_model=True)
    with pytest.raises(ArgumentError, match="shard_fns: expected auto_shard_model=True or mesh="):
        load(saved, shard_fns={EMBEDDING: jax.device_put})


@pytest.mark.parametrize("name", ["backend", "platform"])
def test_backend_and_platform_select_devices_or_say_what_there_is(saved, name):
    names = {"backend": EasyDeLBackends, "platform": EasyDeLPlatforms}[name]
    for value in (names.CPU, "cpu", names.JAX):
        loaded = load(saved, **{name: value}, auto_shard_model=True)
        assert {device.platform for device in mesh_of(loaded.graphstate).devices.flat} == {"cpu"}
    single = load(saved, **{name: "cpu"}, device=jax.devices()[3])
    assert {leaf.device for leaf in jax.tree.leaves(single)} == {jax.devices()[3]}
    with pytest.raises(ArgumentError, match=f"{name}: .* devices here: 'cpu'; found 'tpu'"):
        load(saved, **{name: "tpu"})
    with pytest.raises(ArgumentError, match=f"{name}: expected one of 'jax'.*found 'abacus'"):
        load(saved, **{name: "abacus"})


def test_devices_that_contradict_each_other_are_refused(saved):
    with pytest.raises(ArgumentError, match="platform: expected 'cpu', as backend says"):
        load(saved, backend="cpu", platform="tpu")
    with pytest.raises(ArgumentError, match="device: expected one of backend='cpu'"):
        load(saved, backend="cpu", device="gpu")
    for language in ("triton", "pallas"):
        with pytest.raises(ArgumentError, match=r"platform: .*a kernel language"):
            load(saved, platform=language)


def test_one_process_is_one_granule_of_a_hybrid_mesh(saved):
    loaded = load(
        saved,
        sharding_axis_dims=(2, -1, 1, 1),
        sharding_dcn_axis_dims=(1, -1, 1, 1),
        auto_shard_model=True,
    )
    assert dict(mesh_of(loaded.graphstate).shape) == {"dp": 2, "fsdp": 4, "tp": 1, "sp": 1}
    assert loaded.module_config.sharding_dcn_axis_dims == (1, -1, 1, 1)
    assert loaded.module_config.mesh == mesh_of(loaded.graphstate)
    message = (
        r"expected 2 processes \(sharding_dcn_axis_dims \(2, 1, 1, 1\)\) of 4 devices "
        r"\(sharding_axis_dims \(1, 4, 1, 1\)\); found 1 process of 8 devices"
    )
    with pytest.raises(ShardingError, match=message):
        load(
            saved,
            sharding_axis_dims=(1, 4, 1, 1),
            sharding_dcn_axis_dims=(2, 1, 1, 1),
            auto_shard_model=True,
        )


def test_a_mesh_comes_alone_and_is_kept_in_the_config(saved):
    mesh = make_mesh((1, 2, 1, 1))
    loaded = load(saved, mesh=mesh)
    assert loaded.module_config.sharding_axis_dims == (1, 2, 1, 1)
    assert load(saved, mesh=mesh, sharding_axis_dims=(1, 2, -1, 1)).module_config.mesh == mesh
    with pytest.raises(ArgumentError, match=r"mesh: expected sharding_axis_dims \(1, 8, 1, 1\)"):
        load(saved, mesh=mesh, sharding_axis_dims=(1, 8, 1, 1))
    with pytest.raises(ArgumentError, match="sharding_dcn_axis_dims: expected either these or"):
        load(saved, mesh=mesh, sharding_dcn_axis_dims=(1, 1, 1, 1))


def test_axes_that_are_not_there_are_named(saved):
    with pytest.raises(ArgumentError, match=r"partition_axis: .*vocab_axis.*unknown: colour"):
        load(saved, partition_axis={"colour": "tp"})
    with pytest.raises(ArgumentError, match="partition_axis: expected a PartitionAxis"):
        load(saved, partition_axis="tp")
    with pytest.raises(ConfigError, match="vocab_axis names mesh axis 'model'"):
        load(saved, partition_axis=PartitionAxis(vocab_axis="model"), auto_shard_model=True)
    with pytest.raises(ShardingError, match="unknown mesh axis 'model'") as caught:
        load(saved, partition_rules=((".*", PartitionSpec("model")),), auto_shard_model=True)
    assert "the mesh has dp=1, fsdp=8, tp=1, sp=1" in str(caught.value)
    with pytest.raises(ShardingError, match="expected 16 devices; found 8 devices"):
        load(saved, sharding_axis_dims=(16, 1, 1, 1), auto_shard_model=True)


def test_hugging_face_weights_take_the_same_arguments(tmp_path, saved):
    saved[1].model.save_pretrained(tmp_path / "hf")
    axis = PartitionAxis(vocab_axis="fsdp", hidden_state_axis=None)
    loaded = EasyDeLState.load_state(
        tmp_path / "hf",
        partition_axis=axis,
        shard_attention_computation=False,
        sharding_dcn_axis_dims=(1, 1, 1, 1),
        sharding_axis_dims=(1, 8, 1, 1),
        backend="cpu",
        shard_fns={"model/norm/scale": lambda leaf: leaf + jnp.float32(0)},
        auto_shard_model=True,
        verbose=False,
    )
    assert spec_of(loaded.graphstate, EMBEDDING) == PartitionSpec("fsdp")
    assert loaded.module_config.partition_axis == axis
    assert loaded.module_config.shard_attention_computation is False
    assert loaded.module_config.sharding_dcn_axis_dims == (1, 1, 1, 1)
    assert_equal(loaded.graphstate, saved[1].graphstate)


def test_another_optimizer_than_the_stored_one_lists_every_leaf(saved):
    with pytest.raises(TreeMismatchError) as caught:
        load(saved, tx=optax.sgd(1e-2, momentum=0.9), auto_shard_model=True)
    assert f"optimizer/0/trace/{EMBEDDING}: missing from the checkpoint" in str(caught.value)
    assert f"optimizer/0/mu/{EMBEDDING}: unexpected in the checkpoint" in str(caught.value)
    parameters = len(jax.tree.leaves(saved[1].graphstate))
    assert len(caught.value.problems) == 3 * parameters + 1
