"""Plans of steps against what JAX and a load make of them."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from cairn import (
    ArgumentError,
    Checkpointer,
    DecoderConfig,
    DecoderForCausalLM,
    EasyDeLState,
    PartitionAxis,
    load,
    make_mesh,
    resolve_checkpoint,
)
from cairn.interop.partition_axis import entry_axes
from cairn.interop.placement.process_grid import ProcessGrid
from cairn.interop.placement.rules import RuleMatch, axis_units, resolve_spec
from cairn.interop.placement.step_plan import Layout
from cairn.state.paths import named_leaves
from cairn.storage.runs.records.manifest import LeafRecord
from tests.interop.seams import decoder_axes, load_cost, plan_step, shard_shape
from tests.state.checkpointing.restores.elsewhere import devices_elsewhere
from tests.state.seams import local_shards

P = PartitionSpec
CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@st.composite
def placements(draw):
    """A mesh, a spec that uses an axis at most once, and a shape."""
    names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True))
    mesh = {name: draw(st.integers(1, 4)) for name in names}
    rank = draw(st.integers(0, 4))
    free = draw(st.permutations(names))
    entries = []
    for _ in range(draw(st.integers(0, rank + 1))):
        taken = [free.pop() for _ in range(min(draw(st.integers(0, 2)), len(free)))]
        one = taken[0] if len(taken) == 1 and draw(st.booleans()) else tuple(taken)
        entries.append(one or None)
    parts = [prod(mesh[axis] for axis in entry_axes(entry)) for entry in entries] + [1] * rank
    shape = [
        draw(st.integers(0, 6)) * (parts[axis] if draw(st.booleans()) else 1)
        for axis in range(rank)
    ]
    return mesh, tuple(entries), tuple(shape)


@given(placements())
def test_parts_are_those_of_jax_and_what_jax_refuses_does_not_fit(drawn):
    mesh, entries, shape = drawn
    sharding = NamedSharding(AbstractMesh(tuple(mesh.values()), tuple(mesh)), P(*entries))
    found = (
        resolve_spec(shape, mesh, match=RuleMatch("x", entries))
        if shape
        else resolve_spec(shape, mesh)
    )
    try:
        sharding.check_compatible_aval(shape)
        expected = sharding.shard_shape(shape)
    except ValueError:
        assert found.problems or not shape
        return
    assert not found.problems
    assert shard_shape(shape, found.entries, mesh) == expected
    kept = NamedSharding(sharding.mesh, P(*found.entries))
    assert kept.is_equivalent_to(sharding, len(shape))
    assert not any(mesh[axis] == 1 for entry in found.entries for axis in entry_axes(entry))


def made(**options):
    return DecoderForCausalLM(CONFIG.replace(**options), rngs=nnx.Rngs(0))


MODELS = {
    "plain": made,
    "biased": lambda: made(attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "tied": lambda: made(tie_word_embeddings=True),
    "lora": lambda: made().apply_lora_to_layers(4),
    "nf4": lambda: made().quantize("nf4", group_size=16),
    "8bit": lambda: made().quantize("8bit", group_size=16),
    "qlora": lambda: made().quantize("nf4").apply_lora_to_layers(4),
}


@pytest.mark.parametrize("name", MODELS)
def test_axes_of_every_leaf_of_the_decoder_are_known_from_its_path(name):
    model = MODELS[name]()
    leaves = named_leaves(nnx.state(model))
    shapes = {leaf.path: leaf.leaf.shape for leaf in leaves}
    assert {leaf.path: decoder_axes(leaf.path, shapes) for leaf in leaves} == {
        leaf.path: leaf.axes for leaf in leaves
    }


def contents(reference):
    run, info = resolve_checkpoint(str(reference))
    return run.contents(info).leaves


def decoder_layout(config, rules=None):
    axis = config.partition_axis
    more = {} if axis is None else {"axis_rules": axis.axis_rules()}
    return Layout(rules, named=True, units=axis_units(config), **more)


def loaded_bytes(state):
    """Bytes of each leaf on each device: the same on all."""
    found = {}
    for item in ("model", "optimizer"):
        tree = state.opt_state
        if item == "model":
            tree = nnx.merge_state(state.graphstate, state.graphother)
        for named in named_leaves(tree):
            leaf = named.leaf
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            (held,) = {shard.data.nbytes for shard in leaf.addressable_shards}
            (parts,) = {shard.data.shape for shard in leaf.addressable_shards}
            found[item, named.path] = held, parts[: named.leaf.ndim], str(named.leaf.dtype)
    return found


def planned_bytes(plan):
    return {
        (leaf.record.item, leaf.record.path): (leaf.bytes_per_device, leaf.shard_shape, leaf.dtype)
        for leaf in plan.leaves
    }


def saved(folder, model, tx):
    state = EasyDeLState.create(model=model, tx=tx, init_opt_state=True)
    state.save_state(str(folder), step=1, wait=True)
    return contents(folder)


TX = optax.adam(1e-3)
FACTORED = optax.adafactor(1e-3, min_dim_size_to_factor=16)


@pytest.mark.parametrize(
    ("dims", "config", "tx", "param_dtype"),
    [
        ((1, 4, 2, 1), CONFIG, TX, None),
        ((2, 2, 2, 1), CONFIG, TX, "bfloat16"),
        ((1, 8, 1, 1), CONFIG.replace(tie_word_embeddings=True), FACTORED, None),
        ((2, 2, 1, 2), CONFIG.replace(mlp_bias=True), FACTORED, "float16"),
        (
            (2, 4, 1, 1),
            CONFIG.replace(partition_axis=PartitionAxis(hidden_state_axis=("dp", "fsdp"))),
            TX,
            None,
        ),
    ],
)
def test_a_load_places_what_was_planned_to_the_byte(tmp_path, dims, config, tx, param_dtype):
    model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
    records = saved(tmp_path / "run", model, tx)
    grid = ProcessGrid(dict(zip(("dp", "fsdp", "tp", "sp"), dims, strict=True)))
    items = {"model", "optimizer"}
    layout = decoder_layout(config)
    plan = plan_step(records, grid, layout, items=items, param_dtype=param_dtype)
    state = EasyDeLState.load_state(
        str(tmp_path / "run"),
        tx=tx,
        auto_shard_model=True,
        sharding_axis_dims=dims,
        param_dtype=param_dtype,
        verbose=False,
    )
    assert not plan.problems
    assert planned_bytes(plan) == loaded_bytes(state)
    report = state.explain_sharding()
    assert plan.bytes_per_device() == report.bytes_per_device


def adapted(method):
    model = DecoderForCausalLM(CONFIG, rngs=nnx.Rngs(0)).quantize(method, group_size=16)
    return model.apply_lora_to_layers(4)


@pytest.mark.parametrize(("method", "param_dtype"), [("nf4", None), ("8bit", "bfloat16")])
def test_quantized_weights_and_adapters_are_planned_as_they_are_loaded(
    tmp_path, method, param_dtype
):
    records = saved(tmp_path / "run", adapted(method), TX)
    dims = (1, 4, 2, 1)
    grid = ProcessGrid(dict(zip(("dp", "fsdp", "tp", "sp"), dims, strict=True)))
    plan = plan_step(
        records,
        grid,
        decoder_layout(CONFIG),
        items={"model", "optimizer"},
        param_dtype=param_dtype,
    )
    state = EasyDeLState.load_state(
        str(tmp_path / "run"),
        tx=TX,
        auto_shard_model=True,
        sharding_axis_dims=dims,
        param_dtype=param_dtype,
        verbose=False,
    )
    assert not plan.problems
    assert planned_bytes(plan) == loaded_bytes(state)
    # Four bits are stored packed, and each leaf here is one chunk.
    assert plan.cost.read == sum(record.nbytes for record in records)


def test_what_does_not_divide_is_named_with_its_axes_and_refused_by_the_load_too(tmp_path):
    records = saved(tmp_path / "run", DecoderForCausalLM(CONFIG, rngs=nnx.Rngs(0)), TX)
    grid = ProcessGrid({"dp": 1, "fsdp": 2, "tp": 4, "sp": 1})
    plan = plan_step(records, grid, decoder_layout(CONFIG), items={"model"})
    problems = {leaf.record.path: leaf.problems for leaf in plan.problems}
    layers = [f"model/layers/{n}/self_attn/{name}_proj/kernel" for n in (0, 1) for name in "kv"]
    assert sorted(problems) == sorted(layers)
    ((problem,),) = {*problems.values()}
    assert (problem.dimension, problem.axes) == (1, ("tp",))
    with pytest.raises(ValueError, match="2 key/value heads do not divide by tp=4"):
        EasyDeLState.load_state(
            str(tmp_path / "run"),
            tx=TX,
            auto_shard_model=True,
            sharding_axis_dims=(1, 2, 4, 1),
            verbose=False,
        )


def test_a_model_of_which_nothing_is_known_is_whole_on_every_device():
    records = [leaf("model", "w", (512, 512)), leaf("optimizer", "0/mu/w", (512, 512))]
    plan = plan_step(records, ProcessGrid({"fsdp": 4}), Layout(), items={"model", "optimizer"})
    assert {(one.rule, one.entries) for one in plan.leaves} == {
        ("replicated", ()),
        ("mirrors its parameter", ()),
    }
    assert plan.bytes_per_device() == 2 * 512 * 512 * 4


def test_keys_four_bits_and_leaves_without_elements_have_the_bytes_of_jax_arrays():
    key = jax.random.split(jax.random.key(0), 4)
    leaves = {
        "key": (LeafRecord(item="model", path="key", shape=(4,), dtype="key<fry>"), 32),
        "four": (leaf("model", "four", (7, 3), "int4"), jnp.zeros((7, 3), jnp.int4).nbytes),
        "none": (leaf("model", "none", (0, 4)), 0),
        "one": (leaf("model", "one", (), "bfloat16"), 2),
        "half": (leaf("model", "half", (3,), "float8_e4m3fn"), 3),
    }
    assert jax.random.key_data(key).nbytes == 32
    records = [record for record, _ in leaves.values()]
    plan = plan_step(records, ProcessGrid({"fsdp": 2}), Layout(), items={"model"})
    found = {one.record.path: one.bytes_per_device for one in plan.leaves}
    assert found == {name: nbytes for name, (_, nbytes) in leaves.items()}
    assert plan.cost.read == sum(found.values())


def leaf(item, path, shape, dtype="float32", chunks=None, shards=None):
    return LeafRecord(item=item, path=path, shape=shape, dtype=dtype, chunks=chunks, shards=shards)


@pytest.mark.parametrize(
    ("sizes", "processes", "message"),
    [
        ({"fsdp": 0}, 1, "fsdp: expected a size of 1 or more, found 0"),
        ({"fsdp": -2, "tp": -2}, 1, "tp: expected a size of 1 or more, found -2"),
        ({}, 1, "at least one axis"),
        ({"fsdp": 2**11, "tp": 2**10}, 1, "at most 1048576 devices, found 2097152"),
        ({"fsdp": 8}, 3, "a number that divides 8 devices, found 3"),
        ({"dp": 3, "tp": 8}, 2, "devices that fill whole axes from the last one on"),
        ({"dp": 3, "tp": 2}, 2, "devices that fill whole axes from the last one on"),
        ({"dp": 8}, 0, "a number that divides"),
    ],
)
def test_meshes_that_cannot_be_are_refused(sizes, processes, message):
    with pytest.raises(ArgumentError, match=message):
        ProcessGrid(sizes, processes)


@st.composite
def grids(draw):
    sizes = {name: draw(st.sampled_from([1, 2, 3, 4])) for name in "abc"}
    devices = prod(sizes.values())
    processes = draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
    try:
        return ProcessGrid(sizes, processes)
    except ArgumentError:
        return ProcessGrid(sizes)


@given(grids(), st.permutations("abc"), st.data())
def test_reads_are_the_chunks_that_hold_what_each_process_has(grid, names, data):
    names = list(names)
    entries = []
    for _ in range(2):
        count = data.draw(st.integers(0, min(2, len(names))))
        entries.append(tuple(names.pop() for _ in range(count)) or None)
    parts = [prod(grid.sizes[axis] for axis in entry_axes(entry)) for entry in entries]
    shape = tuple(count * data.draw(st.integers(1, 5)) for count in parts)
    chunks = tuple(data.draw(st.integers(1, length)) for length in shape)
    found = resolve_spec(shape, grid.sizes, match=RuleMatch("x", tuple(entries)))
    records = [leaf("model", "x", shape, chunks=chunks, shards=chunks)]
    layout = Layout(lambda path: RuleMatch("x", tuple(entries)))
    plan = plan_step(records, grid, layout, items={"model"})
    assert plan.leaves[0].entries == found.entries
    expected = chunks_of_each_process(grid, entries, shape, chunks)
    nbytes = prod(chunks) * 4
    assert plan.cost.read == max(map(len, expected)) * nbytes
    assert plan.cost.read_in_all == sum(map(len, expected)) * nbytes


def chunks_of_each_process(grid, entries, shape, chunks):
    """Device by device, as JAX would place the leaf."""
    sizes = tuple(grid.sizes.values())
    each = prod(sizes) // grid.processes
    found = [set() for _ in range(grid.processes)]
    for device, at in enumerate(np.ndindex(sizes)):
        where = dict(zip(grid.sizes, at, strict=True))
        spans = []
        for length, chunk, entry in zip(shape, chunks, entries, strict=True):
            number = 0
            for axis in entry_axes(entry):
                number = number * grid.sizes[axis] + where[axis]
            count = prod(grid.sizes[axis] for axis in entry_axes(entry))
            width = length // count
            spans.append(range(number * width // chunk, (number * width + width - 1) // chunk + 1))
        found[device // each] |= {(row, column) for row in spans[0] for column in spans[1]}
    return found


def test_no_more_waits_on_the_host_than_the_window_and_the_largest_leaf():
    gib = 1 << 30
    large = [leaf("model", f"w{n}", (gib // 2,), chunks=(1 << 18,)) for n in "ab"]
    small = [leaf("model", f"s{n:03}", (1 << 24,), chunks=(1 << 18,)) for n in range(40)]
    whole = plan_step([*large, *small], ProcessGrid({"fsdp": 1}), Layout(), items={"model"})
    window = whole.cost.host - load_cost.BUDGET_BYTES  # what its reads hold
    assert window == 2 * gib  # one leaf, which is larger than the window
    rules = Layout(lambda path: RuleMatch(".", ("fsdp",), True))
    grid = ProcessGrid({"fsdp": 64}, 8)
    parts = plan_step([*large, *small], grid, rules, items={"model"})
    assert parts.cost.host - load_cost.BUDGET_BYTES == load_cost.HOST_BYTES
    assert parts.cost.read_in_all == parts.nbytes == 8 * parts.cost.read


def test_moments_with_a_dtype_of_their_own_are_not_cast(tmp_path):
    tx = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
    model = DecoderForCausalLM(CONFIG, rngs=nnx.Rngs(0))
    records = saved(tmp_path / "run", model, tx)
    plan = plan_step(
        records,
        ProcessGrid({"dp": 1, "fsdp": 8, "tp": 1, "sp": 1}),
        decoder_layout(CONFIG),
        items={"optimizer"},
        param_dtype="float16",
    )
    halves = DecoderForCausalLM(CONFIG, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    created = EasyDeLState.create(model=halves, tx=tx, init_opt_state=True)
    expected = {named.path: str(named.leaf.dtype) for named in named_leaves(created.opt_state)}
    assert {one.record.path: one.dtype for one in plan.leaves} == expected


LARGE = {f"w{n}": (512, 64 * (n + 1)) for n in range(6)}  # 128 KiB to 768 KiB


@pytest.fixture
def large(tmp_path):
    """A run of some larger leaves."""
    tree = {name: np.ones(shape, np.float32) for name, shape in LARGE.items()}
    with Checkpointer(str(tmp_path / "large")) as checkpointer:
        checkpointer.save(1, {"model": tree}, meta={}).wait()
    return tmp_path / "large"


def test_as_much_waits_on_the_host_as_was_planned(large, monkeypatch):
    window = 1 << 20
    monkeypatch.setattr(load_cost, "HOST_BYTES", window)
    mesh = make_mesh((2, 4), ("a", "b"))
    spec = PartitionSpec(None, "b")
    target = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for name, shape in LARGE.items()
    }
    with devices_elsewhere(window) as most:
        load(str(large), {"model": target})
    layout = Layout(lambda path: RuleMatch("w", (None, "b")))
    plan = plan_step(contents(large), ProcessGrid({"a": 2, "b": 4}), layout, items={"model"})
    nbytes = sum(4 * rows * columns for rows, columns in LARGE.values())
    assert window // 2 < most[0] <= window < nbytes
    assert plan.cost.host == window + nbytes  # no more can be held by reads


def test_as_much_is_read_as_was_planned(tmp_path, monkeypatch):
    tree = {"w": np.ones((2048, 3072), np.float32), "odd": np.ones((1031, 1033), np.float32)}
    with Checkpointer(str(tmp_path / "run")) as checkpointer:
        checkpointer.save(1, {"model": tree}, meta={}).wait()
    read, chunks = 0, []
    real = local_shards.read_into

    def counted(file, buffers, offset):
        nonlocal read
        chunks.extend(one for one in buffers if len(one) > 1024)
        read += sum(len(one) for one in buffers if len(one) > 1024)  # not checksums
        return real(file, buffers, offset)

    monkeypatch.setattr(local_shards, "read_into", counted)
    mesh = make_mesh((8,), ("a",))
    specs = {"w": P(None, "a"), "odd": P()}
    target = {
        name: jax.ShapeDtypeStruct(
            array.shape, np.float32, sharding=NamedSharding(mesh, specs[name])
        )
        for name, array in tree.items()
    }
    load(str(tmp_path / "run"), {"model": target})
    layout = Layout(lambda path: RuleMatch(path, tuple(specs[path])))
    plan = plan_step(contents(tmp_path / "run"), ProcessGrid({"a": 8}), layout, items={"model"})
    assert len(chunks) > len(tree)
    assert plan.cost.read == plan.cost.read_in_all == read


def test_keys_are_split_by_their_own_shape_and_hold_all_their_words():
    record = LeafRecord(
        item="model", path="k", shape=(8,), dtype="key<rbg>", chunks=(8, 4), shards=(8, 4)
    )
    layout = Layout(lambda path: RuleMatch("k", ("a",)))
    plan = plan_step([record], ProcessGrid({"a": 4}), layout, items={"model"})
    assert (plan.leaves[0].shard_shape, plan.leaves[0].bytes_per_device) == ((2,), 2 * 4 * 4)
    assert plan.cost.read == 8 * 4 * 4


def test_the_optimizer_of_a_model_that_is_whole_goes_where_a_load_puts_it():
    records = [leaf("model", "w", (4, 4)), leaf("optimizer", "history", (1024, 64))]
    plan = plan_step(records, ProcessGrid({"fsdp": 4}), Layout(), items={"model", "optimizer"})
    assert {one.record.path: (one.rule, one.shard_shape) for one in plan.leaves} == {
        "w": ("replicated", (4, 4)),
        "history": ("automatic", (256, 64)),
    }


def test_what_is_merged_has_places_of_its_own():
    records = [
        leaf("merged", "model/layers/0/mlp/up_proj/kernel", (8, 16)),
        leaf("model", "model/layers/0/mlp/up_proj/kernel/array/qvalue", (8, 16), "int4"),
        leaf("model", "model/layers/0/mlp/up_proj/kernel/array/scale", (2, 16)),
    ]
    grid = ProcessGrid({"dp": 1, "fsdp": 4, "tp": 2, "sp": 1})
    plan = plan_step(records, grid, Layout(named=True), items={"merged", "model"})
    found = [(one.record.item, one.entries, one.dtype) for one in plan.leaves]
    assert found == [
        ("merged", ("fsdp", "tp"), "float32"),
        ("model", ("fsdp", "tp"), "int4"),
        ("model", (None, "tp"), "float32"),  # two groups over four devices: whole
    ]
    assert not plan.problems
