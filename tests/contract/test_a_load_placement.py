"""EasyDeLState.load_state: where everything goes."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cairn import (
    ArgumentError,
    Checkpointer,
    EasyDeLBackends,
    EasyDeLPlatforms,
    EasyDeLState,
    PartitionAxis,
    ShardingError,
    make_mesh,
)
from cairn.state.sharding.mesh import mesh_of
from tests.contract.subjects import RULES, TX, assert_same_bits, make_decoder, specs
from tests.state.forward import logits_of
from tests.state.my_model import batch


def load(reference, **arguments):
    return EasyDeLState.load_state(reference, **{"verbose": False, **arguments})


@pytest.fixture(scope="module")
def decoder_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("decoder") / "run"
    config = make_decoder().config.replace(num_hidden_layers=1)
    make_decoder(config).to_state().save_state(run, wait=True, verbose=False)
    Checkpointer.for_run(run).close()
    return run


def test_auto_shard_model_shards_over_the_mesh(saved):
    run, state = saved
    loaded = load(run, auto_shard_model=True, sharding_axis_dims=(2, 4, 1, 1))
    assert jax.tree.leaves(loaded.shardings) == jax.tree.leaves(state.shardings)
    assert_same_bits(loaded, state)


def test_auto_shard_model_false_loads_onto_one_device(saved):
    run, state = saved
    loaded = load(run, auto_shard_model=False)
    assert len({leaf.device for leaf in jax.tree.leaves(loaded)}) == 1
    assert_same_bits(loaded, state)


@pytest.mark.parametrize("sharding_axis_dims", [(1, 8, 1, 1), (1, -1, 2, 1), (1, 2, 1, 1)])
def test_sharding_axis_dims_make_the_mesh(saved, sharding_axis_dims):
    run, state = saved
    loaded = load(run, auto_shard_model=True, sharding_axis_dims=sharding_axis_dims)
    sizes = tuple(4 if size == -1 else size for size in sharding_axis_dims)
    for tree in (loaded.graphstate, loaded.opt_state):
        assert tuple(mesh_of(tree).shape.values()) == sizes
    assert loaded.module_config.sharding_axis_dims == sharding_axis_dims
    assert_same_bits(loaded, state)


def test_sharding_axis_names_name_the_mesh(saved):
    run, _ = saved
    loaded = load(
        run,
        auto_shard_model=True,
        sharding_axis_dims=(2, 4),
        sharding_axis_names=("rows", "columns"),
        partition_rules=(("embedding", PartitionSpec("columns")), (".*", PartitionSpec())),
    )
    assert dict(mesh_of(loaded.graphstate).shape) == {"rows": 2, "columns": 4}
    assert specs(loaded.graphstate)["embed_tokens/embedding"] == PartitionSpec("columns")
    assert loaded.module_config.sharding_axis_names == ("rows", "columns")


class Device(SimpleNamespace):
    """What a mesh looks at of a device."""

    __hash__ = object.__hash__


def test_sharding_dcn_axis_dims_multiply_the_axes(saved):
    run, state = saved
    arguments = {"auto_shard_model": True, "sharding_axis_dims": (2, 4, 1, 1)}
    loaded = load(run, sharding_dcn_axis_dims=(1, 1, 1, 1), **arguments)  # one process, one slice
    assert jax.tree.leaves(loaded.shardings) == jax.tree.leaves(state.shardings)
    with pytest.raises(ShardingError, match="found 1 process of 8 devices"):
        load(run, sharding_dcn_axis_dims=(2, 1, 1, 1), **arguments)
    # Two slices of four devices: each row along the first axis is one slice.
    kind = {"platform": "gpu", "device_kind": "test", "process_index": 0}
    devices = [Device(id=n, slice_index=n // 4, **kind) for n in range(8)]
    arranged = make_mesh((1, 4, 1, 1), dcn_dims=(2, 1, 1, 1), devices=devices).devices
    assert arranged.shape == (2, 4, 1, 1)
    for row in arranged:
        assert len({device.slice_index for device in row.flat}) == 1


def test_partition_axis_maps_logical_axes_to_mesh_axes(decoder_run):
    arguments = {"auto_shard_model": True, "sharding_axis_dims": (1, 4, 2, 1)}
    usual = specs(load(decoder_run, **arguments).graphstate)
    given = PartitionAxis(mlp_intermediate_axis="fsdp", hidden_state_axis=None)
    loaded = load(decoder_run, partition_axis=given, **arguments)
    up_proj = next(path for path in usual if path.endswith("up_proj/kernel"))
    assert usual[up_proj] == PartitionSpec("fsdp", "tp")
    assert specs(loaded.graphstate)[up_proj] == PartitionSpec(None, "fsdp")
    assert loaded.module_config.partition_axis == given
    by_name = load(decoder_run, partition_axis=given.to_dict(), **arguments)
    assert specs(by_name.graphstate) == specs(loaded.graphstate)
    with pytest.raises(ArgumentError, match="partition_axis: expected"):
        load(decoder_run, partition_axis="tp", **arguments)


@pytest.mark.parametrize("shard_attention_computation", [True, False])
def test_shard_attention_computation_constrains_attention(decoder_run, shard_attention_computation):
    loaded = load(
        decoder_run,
        auto_shard_model=True,
        sharding_axis_dims=(1, 4, 2, 1),
        shard_attention_computation=shard_attention_computation,
    )
    ids = jax.device_put(
        batch(4, 8), NamedSharding(mesh_of(loaded.graphstate), PartitionSpec("fsdp"))
    )
    traced = jax.jit(lambda state, ids: state.model(ids).logits).trace(loaded, ids)
    # Batch, tokens, heads, head size of the queries: left to the compiler, or heads kept whole.
    placed = re.findall(r"f32\[4,8,4,16\] = sharding_constraint\[(.*?)\]", str(traced.jaxpr), re.S)
    assert bool(placed) == (not shard_attention_computation)
    assert not any("'tp'" in text.partition("spec=")[2] for text in placed)
    compiled = traced.lower().compile()
    expected = logits_of(load(decoder_run).model, batch(4, 8))
    np.testing.assert_allclose(compiled(loaded, ids), expected, rtol=1e-4, atol=1e-5)


def test_shard_fns_place_the_leaves_they_name(saved):
    run, state = saved
    arguments = {"auto_shard_model": True, "sharding_axis_dims": (2, 4, 1, 1)}
    mesh = state.model.mesh
    place = NamedSharding(mesh, PartitionSpec(None, "dp"))
    shard_fns = {("layers", 0, "kernel"): lambda leaf: jax.device_put(leaf, place)}
    loaded = load(run, shard_fns=shard_fns, **arguments)
    found = specs(loaded.graphstate)
    assert found["layers/0/kernel"] == PartitionSpec(None, "dp")
    assert found["layers/1/kernel"] == specs(state.graphstate)["layers/1/kernel"]
    assert specs(loaded.opt_state)["0/mu/layers/0/kernel"] == PartitionSpec(None, "dp")
    assert_same_bits(loaded, state)
    with pytest.raises(ArgumentError, match="no_such_leaf: no such leaf"):
        load(run, shard_fns={"no_such_leaf": lambda leaf: leaf}, **arguments)


def test_backend_chooses_the_devices(saved):
    run, state = saved
    for backend in ("cpu", EasyDeLBackends.CPU):
        assert_same_bits(load(run, backend=backend), state)
    with pytest.raises(ArgumentError, match="backend: expected a platform with devices here"):
        load(run, backend=EasyDeLBackends.TPU)
    with pytest.raises(ArgumentError, match=r"backend: .* 'gpu', 'tpu'; found 'torch'"):
        load(run, backend="torch")


def test_platform_must_be_one_that_runs_here(saved):
    run, state = saved
    for platform in ("jax", EasyDeLPlatforms.CPU):
        assert_same_bits(load(run, platform=platform), state)
    with pytest.raises(ArgumentError, match=r"platform: expected .*; found 'tpu'"):
        load(run, platform=EasyDeLPlatforms.TPU)
    with pytest.raises(ArgumentError, match=r"platform: expected .*'triton', a kernel language"):
        load(run, platform=EasyDeLPlatforms.TRITON)


def test_partition_rules_place_parameters_and_optimizer(saved):
    run, state = saved
    loaded = load(
        run, auto_shard_model=True, sharding_axis_dims=(1, 4, 2, 1), partition_rules=RULES
    )
    assert specs(loaded.graphstate)["embed_tokens/embedding"] == PartitionSpec(None, "fsdp")
    assert specs(loaded.opt_state)["0/nu/layers/0/kernel"] == PartitionSpec("fsdp")
    assert loaded.tx is TX
    assert_same_bits(loaded, state)
    with pytest.raises(ArgumentError, match="partition_rules: expected auto_shard_model=True"):
        load(run, partition_rules=RULES)
