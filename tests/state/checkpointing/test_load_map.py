"""Leaves that are renamed, stacked, split and joined while they are loaded."""

from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cairn import (
    ArgumentError,
    Checkpointer,
    PolicyError,
    Stored,
    TreeMap,
    TreeMismatchError,
    adopt,
    load,
)
from tests.faults.report import trials
from tests.state.seams import rule_leaves
from tests.trainers.kept import kept, store

LAYERS = 4


def numbers(*shape, start=0, dtype=np.float32):
    return (start + np.arange(np.prod(shape, dtype=int))).reshape(shape).astype(dtype)


def layer(number):
    return {
        "up": numbers(8, 16, start=1000 * number),
        "qkv": numbers(8, 24, start=2000 * number),
        "norm": numbers(8, start=3000 * number),
    }


TREE = {
    "model": {
        **{f"layers_{number}": layer(number) for number in range(LAYERS)},
        "embed": numbers(10, 8),
        "scanned": numbers(LAYERS, 8, 16),
        "left": numbers(8, 4),
        "right": numbers(8, 12, start=500),
        "heads": numbers(8, 2, 8),
        "half": numbers(8, 8, dtype=ml_dtypes.bfloat16),
        "count": np.int32(7),
    },
    "old": {"scale": numbers(8)},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with `TREE`."""
    uri = tmp_path_factory.mktemp("map") / "run"
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(1, TREE)
    return uri


def stacked(name, axis=0):
    return np.stack([TREE["model"][f"layers_{number}"][name] for number in range(LAYERS)], axis)


MAP = TreeMap(
    {
        "model/layers/{name}/in_front": Stored("model/layers_{layer}/{name}").stack(),
        ("model/all/q", "model/all/kv"): Stored("old/scale").split(2, 6),
        "model/blocks_{block}/kernel": Stored("model/scanned").transpose(0, 2, 1).unstack(),
        "model/joined": Stored("model/left", "model/right").concatenate(axis=1),
        "model/wte": Stored("model/embed").pad(12).scale(0.5),
        "model/o": Stored("model/heads").reshape(8, -1).transpose(),
        "model/small": Stored("model/half").cut(4, axis=-1).add(1.0).cast(),
        "model/steps": "model/count",
    },
    new={"model/head/{path:path}": lambda path, leaf: np.full(leaf.shape, len(path), np.float32)},
)
MADE = {
    "layers": {name: {"in_front": stacked(name)} for name in ("up", "qkv", "norm")},
    "all": {"q": TREE["old"]["scale"][:2], "kv": TREE["old"]["scale"][2:]},
    **{
        f"blocks_{number}": {"kernel": TREE["model"]["scanned"][number].T}
        for number in range(LAYERS)
    },
    "joined": np.concatenate([TREE["model"]["left"], TREE["model"]["right"]], axis=1),
    "wte": np.concatenate([TREE["model"]["embed"], np.zeros((2, 8), np.float32)]) / 2,
    "o": TREE["model"]["heads"].reshape(8, 16).T,
    "small": TREE["model"]["half"][:, :4].astype(np.float32) + 1,
    "steps": 7,
    "head": {"kernel": np.full((8, 2), 17, np.float32), "bias": np.full((2,), 15, np.float32)},
}


def sharded(array):
    """Return an abstract leaf whose axes are sharded over 2 by 4 devices where these divide it."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    free, spec = ["a", "b"], []
    for size in reversed(array.shape):
        axis = next((name for name in free if size % mesh.shape[name] == 0), None)
        spec.insert(0, axis)
        free = [name for name in free if name != axis]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def assert_made(loaded, expected):
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for leaf, array in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert np.asarray(leaf).dtype == np.asarray(array).dtype
        np.testing.assert_array_equal(leaf, array)


@pytest.mark.parametrize("pass_bytes", [64, rule_leaves.PASS_BYTES])
def test_leaves_are_made_of_stored_ones_sharded_and_not(run, pass_bytes):
    target = jax.tree.map(
        lambda leaf: sharded(leaf) if isinstance(leaf, np.ndarray) else leaf, MADE
    )
    with mock.patch.object(rule_leaves, "PASS_BYTES", pass_bytes):
        loaded = load(run, {"model": target}, map=MAP)["model"]
        assert_made(load(run, {"model": MADE}, map=MAP)["model"], MADE)
    assert_made(loaded, MADE)
    assert type(loaded["steps"]) is int
    for leaf, described in zip(jax.tree.leaves(loaded), jax.tree.leaves(target), strict=True):
        if isinstance(leaf, jax.Array):
            assert leaf.sharding == described.sharding


REST = [f"model/{name}" for name in ("scanned", "embed", "left", "right", "heads", "half", "count")]


def test_layers_are_taken_away_and_added_by_name(run):
    fewer = load(
        run,
        {"model": {"up": numbers(8, 3, 16)}},
        map=TreeMap(
            {"model/up": Stored("model/layers_{layer}/up").stack(axis=1)},
            left_out=[
                *("model/layers_2/up", "model/layers_{layer}/qkv", "model/layers_{layer}/norm"),
                *REST,
            ],
        ),
    )
    np.testing.assert_array_equal(fewer["model"]["up"], stacked("up", 1)[:, [0, 1, 3]])
    fresh = {"norm": np.ones(8, np.float32), "up": np.zeros((8, 16), np.float32)}
    more = load(
        run,
        {"model": {f"layers_{number}": fresh for number in range(LAYERS + 1)}},
        map=TreeMap(
            new={f"model/layers_{LAYERS}/{{name}}": lambda path, leaf: leaf},
            left_out=["model/layers_{layer}/qkv", *REST],
        ),
    )
    for number in range(LAYERS):
        for name in fresh:
            expected = TREE["model"][f"layers_{number}"][name]
            np.testing.assert_array_equal(more["model"][f"layers_{number}"][name], expected)
    assert_made(more["model"][f"layers_{LAYERS}"], fresh)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(nn.Dense(6)(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs, use_running_average=True)
        self.dropout = nnx.Dropout(0.5, rngs=rngs, deterministic=True)
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.first(x))))


def test_variables_of_linen_become_a_module_of_nnx(tmp_path):
    x = jnp.arange(8.0).reshape(2, 4)
    described = jax.eval_shape(LinenNet().init, jax.random.key(0), x)
    leaves, structure = jax.tree.flatten(described)
    values = [numbers(*leaf.shape, start=at + 1) / 8 for at, leaf in enumerate(leaves)]
    variables = jax.tree.unflatten(structure, values)
    linen_to_nnx = TreeMap(
        {
            "model/first/{name}": "params/Dense_1/{name}",
            "model/norm/{name}": "params/BatchNorm_0/{name}",
            "model/norm/mean": "batch_stats/BatchNorm_0/mean",
            "model/norm/var": "batch_stats/BatchNorm_0/var",
            "model/last/{name}": "params/Dense_0/{name}",
        },
        new={"model/dropout/rngs/key": jax.random.key(5), "model/dropout/rngs/count": np.uint32(0)},
    )
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, variables)
        target = {"model": nnx.eval_shape(lambda: Net(nnx.Rngs(1)))}
        model = checkpointer.restore(target, map=linen_to_nnx)["model"]
    expected = jax.jit(LinenNet().apply)(variables, x)
    np.testing.assert_allclose(nnx.jit(lambda model, x: model(x))(model, x), expected, rtol=1e-6)
    assert model.dropout.rngs.key[...] == jax.random.key(5)


def stack_form(draw):
    axis, count = draw(st.integers(-3, 2)), draw(st.integers(1, 12))
    stored = {f"b_{n}": numbers(2, 5, start=10 * n) for n in range(count)}
    made = {"b": np.stack([*stored.values()], axis)}
    return {"t/b": Stored("s/b_{n}").stack(axis)}, stored, made


def unstack_form(draw):
    axis, stored = draw(st.integers(0, 2)), {"c": numbers(3, 4, 2)}
    layers = np.moveaxis(stored["c"].transpose(2, 0, 1), axis, 0)
    made = {f"c_{n}": array for n, array in enumerate(layers)}
    return {"t/c_{n}": Stored("s/c").transpose(2, 0, 1).unstack(axis)}, stored, made


def split_form(draw):
    stored = {"d": numbers(5, 7)}
    made = {f"d_{n}/q": row[:3] for n, row in enumerate(stored["d"])}
    made |= {f"d_{n}/k": row[3:] for n, row in enumerate(stored["d"])}
    return {("t/d_{n}/q", "t/d_{n}/k"): Stored("s/d").split(3, 4, axis=1).unstack()}, stored, made


def join_form(draw):
    q, k = ([numbers(3, size, start=9 * n) for n in range(3)] for size in (2, 5))
    stored = {f"e/{n}/q": q[n] for n in range(3)} | {f"e/{n}/k": k[n] for n in range(3)}
    made = {"e": np.concatenate([np.stack(q, 1), np.stack(k, 1)], -1)}
    return {"t/e": Stored("s/e/{n}/q", "s/e/{n}/k").stack(1).concatenate(-1)}, stored, made


def reshape_form(draw):
    shape, stored = draw(st.permutations([2, 3, 4, 1])), {"f": numbers(4, 6)}
    return {"t/f": Stored("s/f").reshape(*shape)}, stored, {"f": stored["f"].reshape(shape)}


def pad_form(draw):
    stored = {"g": numbers(5, 2)}
    made = {"g": np.pad(stored["g"].T, ((0, 0), (0, 4)))}
    return {"t/g": Stored("s/g").transpose().pad(9, axis=1)}, stored, made


def scale_form(draw):
    stored = {"h": numbers(6)}
    return {"t/h": Stored("s/h").scale(0.125).add(-1.0)}, stored, {"h": stored["h"] / 8 - 1}


FORMS = (stack_form, unstack_form, split_form, join_form, reshape_form, pad_form, scale_form)


def nested(leaves):
    tree = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


@settings(max_examples=trials(short=4, long=60))
@given(st.data())
def test_what_a_map_makes_is_stored_and_made_back_bit_for_bit(tmp_path_factory, data):
    entries, stored, made = {"t/other/{name}": "s/{name}"}, {"kept": np.float32(2.5)}, {}
    made["other/kept"] = stored["kept"]
    for form in data.draw(st.permutations(FORMS), "forms")[:4]:
        for all_leaves, leaves in zip((entries, stored, made), form(data.draw), strict=True):
            all_leaves |= leaves
    forth, tree, target = TreeMap(entries), {"s": nested(stored)}, {"t": nested(made)}
    folder = tmp_path_factory.mktemp("inverse")
    with Checkpointer(folder / "stored") as first, Checkpointer(folder / "made") as second:
        first.save(1, tree)
        second.save(1, first.restore(target, map=forth))
        assert_made(second.restore(target), target)
        assert_made(second.restore(tree, map=forth.inverse()), tree)


def test_names_may_be_swapped_and_keys_renamed(tmp_path):
    tree = {"s": {"a": numbers(2), "b": numbers(2, start=5), "key": jax.random.key(3)}}
    target = {"s": {"a": numbers(2), "b": numbers(2), "rng": jax.random.key(0)}}
    swap = {"s/a": "s/b", "s/b": "s/a"}
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, tree)
        loaded = checkpointer.restore(target, map=TreeMap({**swap, "s/rng": "s/key"}))["s"]
        np.testing.assert_array_equal(loaded["a"], tree["s"]["b"])
        np.testing.assert_array_equal(loaded["b"], tree["s"]["a"])
        assert loaded["rng"] == tree["s"]["key"]
        with pytest.raises(TreeMismatchError, match="found PRNG keys; rename them only"):
            checkpointer.restore(
                {"s": {**target["s"], "rng": jax.random.split(jax.random.key(0), 1)}},
                map=TreeMap({**swap, "s/rng": Stored("s/key").stack()}),
            )


def test_a_scan_of_maxtext_becomes_layers_of_a_loop(tmp_path):
    store("maxtext-llama3.1-scanned", tmp_path / "theirs")
    arrays, _ = kept("maxtext-llama3.1-scanned")
    root = "items/params/params"
    scan, width = f"{root}/decoder/layers", 32
    shapes = {"q": (width, width), "wi_0": (width, 24), "wi_1": (width, 24)}
    layer = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    to_loop = TreeMap(
        {
            "model/layer_{n}/q": Stored(f"{scan}/self_attention/query/kernel")
            .unstack(axis=1)
            .reshape(width, -1),
            "model/layer_{n}/{name}": Stored(f"{scan}/mlp/{{name}}/kernel").unstack(axis=1),
        },
        left_out=[
            *(f"{scan}/self_attention/{name}/kernel" for name in ("key", "value", "out")),
            *(f"{scan}/mlp/wo/kernel", f"{scan}/{{norm}}/scale"),
            *(f"{root}/decoder/decoder_norm/scale", f"{root}/decoder/logits_dense/kernel"),
            f"{root}/token_embedder/embedding",
        ],
    )
    run = adopt(tmp_path / "theirs", tmp_path / "run").run
    target = {"model": {f"layer_{number}": layer for number in range(3)}}
    loaded = load(run, target, map=to_loop)["model"]
    for number in range(3):
        query = arrays[f"{scan}/self_attention/query/kernel"][:, number]
        np.testing.assert_array_equal(loaded[f"layer_{number}"]["q"], query.reshape(width, -1))
        gate = arrays[f"{scan}/mlp/wi_0/kernel"][:, number]
        np.testing.assert_array_equal(loaded[f"layer_{number}"]["wi_0"], gate)


SMALL = {
    "a": numbers(4, 6),
    "b": numbers(4, 6),
    **{f"c_{number}": numbers(2) for number in (0, 1, 3)},
    "e_0": numbers(3),
    "e_1": numbers(3, dtype=ml_dtypes.bfloat16),
    "n": numbers(3, dtype=np.int32),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run with `SMALL`."""
    uri = tmp_path_factory.mktemp("wrong") / "run"
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(1, {"s": SMALL})
    return uri


def using(names, leaves, **more):
    """Return a map that leaves out all but some stored leaves."""
    left_out = [f"s/{name}" for name in SMALL if name not in names.split()]
    return TreeMap(leaves, left_out=[*left_out, *more.pop("left_out", [])], **more)


A = (4, 6)
WRONG = {
    "unused": (
        {"t/x": A},
        using("a b", {"t/x": "s/a"}),
        ["s/b: stored, neither used nor left out"],
    ),
    "two writers": (
        {"t/x": A},
        using("a b", {"t/x": "s/a", ("t/x",): "s/b"}),
        ["t/x: made of s/a, and again of s/b"],
    ),
    "used twice": (
        {"t/x": A, "t/y": A},
        using("a", {"t/{name}": "s/{name}", "t/x": "s/a", "t/y": "s/a"}),
        ["s/a: used for t/x, and again for t/y"],
    ),
    "another shape": (
        {"t/x": A},
        using("a", {"t/x": Stored("s/a").transpose()}),
        ["t/x: expected shape (4, 6), the map makes (6, 4) from s/a"],
    ),
    "a renamed leaf of another shape": (
        {"t/x": (3, 3)},
        using("n", {"t/x": "s/n"}),
        ["t/x: expected shape (3, 3), the map makes (3,) from s/n"],
    ),
    "another dtype": (
        {"t/x": (3,), "t/y": (1, 3)},
        using("n e_1", {"t/x": "s/n", "t/y": Stored("s/e_1").stack()}),
        [
            "t/x: expected dtype float32, stored dtype int32 in s/n",
            "t/y: expected dtype float32, stored dtype bfloat16 in s/e_1",
        ],
    ),
    "not initialised": (
        {"t/x": A, "t/y": A},
        using("a", {"t/x": "s/a"}),
        ["t/y: expected by the target, neither stored nor new"],
    ),
    "not stored, left out, and new": (
        {"t/x": A, "t/y": A, "t/z": A},
        using("b", {"t/x": "s/zz", "t/y": "s/a", "t/z": "s/b"}, new={"t/z": np.ones(A)}),
        [
            "t/x from s/zz: found no s/zz stored",
            "t/y from s/a: found s/a in `left_out`",
            "t/z from s/b: found t/z in `new` too",
        ],
    ),
    "stored elsewhere": (
        {"t/x": A, "s/a": A, "s/b": A},
        using("a", {"t/x": "s/a"}),
        [
            "s/a: expected by the target, its stored leaf becomes t/x",
            "s/b: expected by the target, the map leaves it out",
        ],
    ),
    "no such parts": (
        {"t/x": (1, 6), "t/y": (3, 6)},
        using("a", {("t/x", "t/y"): Stored("s/a").split(1, 2)}),
        ["t/x, t/y from s/a: expected axis 0 of (4, 6) to be 1 + 2"],
    ),
    "too many parts": (
        {"t/x": (6,)},
        using("a", {"t/x": Stored("s/a").unstack()}),
        ["t/x from s/a: expected 1 leaf as in the target, the map makes 4"],
    ),
    "no such axes": (
        {"t/x": (2, 3), "t/y": (4, 6), "t/z": (3, 3)},
        using(
            "a b n",
            {
                "t/x": Stored("s/a").reshape(5, 5),
                "t/y": Stored("s/b").cut(9),
                "t/z": Stored("s/n").transpose(1, 0),
            },
        ),
        [
            "t/x from s/a: expected a shape of 24 elements, found (5, 5) for (4, 6)",
            "t/y from s/b: expected axis 0 to cut to 9, found shape (4, 6)",
            "t/z from s/n: expected an axis below 1, found 1",
        ],
    ),
    "a layer that is missing": (
        {"t/x": (3, 2)},
        using("c_0 c_1 c_3", {"t/x": Stored("s/c_{n}").stack()}),
        ["t/x from s/c_0, s/c_1, s/c_3: expected s/c_2 between 1 and 3, found none"],
    ),
    "layers without numbers": (
        {"t/x": (2, 4, 6)},
        using("a b", {"t/x": Stored("s/{n}").stack()}),
        ["t/x from s/a, s/b: expected numbers for {n}, found a, b"],
    ),
    "several dtypes": (
        {"t/x": (2, 3)},
        using("e_0 e_1", {"t/x": Stored("s/e_{n}").stack()}),
        [
            "t/x from s/e_0, s/e_1: expected stored leaves of one dtype, or cast(), found "
            "bfloat16, float32"
        ],
    ),
    "whole numbers": (
        {"t/x": (3,)},
        using("n", {"t/x": Stored("s/n").scale(2)}),
        ["t/x from s/n: expected floating numbers, stored int32"],
    ),
    "no such paths": (
        {"s/a": A},
        using("a", {"t/{x}_w": "s/{x}_w"}, new={"t/z": 1.0}, left_out=["s/old/{path:path}"]),
        [
            "s/old/{path:path}: in `left_out`, no stored leaf has such a path",
            "t/z: in `new`, no leaf of the target has such a path",
            "t/{x}_w from Stored('s/{x}_w'): no leaf has such a path",
        ],
    ),
    "new values that do not fit": (
        {"t/x": A, "t/y": (2,)},
        using("", {}, new={"t/x": np.zeros(3), "t/y": "no array"}),
        ["t/x: expected shape (4, 6), the map has (3,)", "t/y: expected an array, the map has str"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_map_is_refused_with_all_that_does_not_fit(small, case):
    shapes, tree_map, problems = WRONG[case]
    target = nested({path: np.zeros(shape, np.float32) for path, shape in shapes.items()})
    with pytest.raises(TreeMismatchError, match="Correct the map") as caught:
        load(small, target, map=tree_map)
    assert [*caught.value.problems] == problems


def test_floating_leaves_of_several_dtypes_are_joined_where_the_map_casts(small):
    joined = Stored("s/e_{n}").stack().cast()
    for dtype in (np.float32, ml_dtypes.bfloat16):
        target = {"t": {"x": np.zeros((2, 3), dtype)}}
        loaded = load(small, target, map=using("e_0 e_1", {"t/x": joined}))
        np.testing.assert_array_equal(loaded["t"]["x"], np.asarray([[0, 1, 2]] * 2, dtype))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TreeMap({"t/{x": "s/a"}), "t/{x"),
        (lambda: TreeMap({"t/{x:int}": "s/a"}), "a placeholder {x}"),
        (lambda: TreeMap({"t/x": np.zeros(2)}), "go into `new`"),
        (lambda: TreeMap({"t/x": "s/{layer}"}), "or one more and stack"),
        (lambda: TreeMap({"t/{layer}": Stored("s/x").cut(2)}), "or one more and unstack"),
        (
            lambda: TreeMap({"t/x": Stored("s/{n}").split(1, 2).stack()}),
            "before stack; found split",
        ),
        (
            lambda: TreeMap({"t/{n}": Stored("s/x").unstack().split(1)}),
            "after unstack; found split",
        ),
        (lambda: TreeMap({("t/{a}", "t/x"): "s/{a}"}), "the same placeholders in all paths"),
        (lambda: Stored(), "at least one path"),
        (lambda: TreeMap(left_out="s/a"), "a list of paths"),
    ],
)
def test_a_map_that_says_nothing_certain_is_refused_when_it_is_made(make, words):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert words in str(caught.value)


def test_a_map_is_given_alone(small):
    for more in ({"map": {"t/x": "s/a"}}, {"map": TreeMap(), "only": "a"}):
        with pytest.raises(PolicyError, match="not what a load can do: map: expected"):
            load(small, {"s": SMALL}, **more)
