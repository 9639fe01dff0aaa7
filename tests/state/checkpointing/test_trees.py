import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from cairn import TreeMismatchError, UnsupportedLeafError
from cairn.state.checkpointing import trees
from cairn.state.checkpointing.modules import TreePlan, open_modules
from cairn.storage.arrays.leaf_paths import path_of
from tests.state.seams import as_items


class Pair(NamedTuple):
    left: object
    right: object


KEYS = st.text(
    st.characters(blacklist_characters=".\x00", blacklist_categories=("Cs",)),
    min_size=1,
    max_size=8,
)
NESTED = st.recursive(
    st.integers(0, 99),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.none(),
    ),
    max_leaves=12,
)


def test_keys_attributes_and_positions_become_the_path():
    tree = {"a": [1, (2, 3)], "b": Pair(4, {"c": 5}), "d": {7: 6}}
    assert trees.flatten(tree) == {
        "a/0": 1,
        "a/1/0": 2,
        "a/1/1": 3,
        "b/left": 4,
        "b/right/c": 5,
        "d/7": 6,
    }


def test_none_and_empty_containers_have_no_leaves():
    assert trees.flatten({"a": None, "b": {}, "c": (), "d": optax.EmptyState()}) == {}


def test_a_variable_stands_for_its_value():
    class Block(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((2, 3)), axes=("embed", "mlp"))
            self.layers = nnx.List([nnx.Linear(3, 2, rngs=nnx.Rngs(0))])

    state = nnx.state(Block())
    leaves = trees.flatten(state)
    assert sorted(leaves) == ["kernel", "layers/0/bias", "layers/0/kernel"]
    assert all(isinstance(leaf, jax.Array) for leaf in leaves.values())
    rebuilt = trees.unflatten(state, {path: leaf + 1 for path, leaf in leaves.items()})
    assert jax.tree.structure(rebuilt) == jax.tree.structure(state)
    np.testing.assert_array_equal(rebuilt["kernel"][...], np.full((2, 3), 2.0))
    assert rebuilt["kernel"].axes == ("embed", "mlp")


def test_optimizer_states_come_back_in_their_own_containers():
    params = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
    state = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
    leaves = trees.flatten(state)
    assert "1/0/mu/w" in leaves
    assert jax.tree.structure(trees.unflatten(state, leaves)) == jax.tree.structure(state)


@given(st.dictionaries(KEYS, NESTED, max_size=3))
def test_unflatten_undoes_flatten(tree):
    leaves = trees.flatten(tree)
    assert trees.unflatten(tree, leaves) == tree
    assert list(leaves) == trees.paths(tree)


@given(st.dictionaries(KEYS, NESTED, max_size=3))
def test_nest_gives_plain_dicts_of_the_same_leaves(tree):
    leaves = trees.flatten(tree)
    assert trees.flatten(trees.nest(leaves)) == leaves


@pytest.mark.parametrize("key", ["", ".", "..", "a\x00b", "\ud800"])
def test_a_key_that_cannot_be_stored_is_refused_by_name(key):
    with pytest.raises(UnsupportedLeafError, match="Rename these keys") as caught:
        trees.flatten({"fine": 1, "outer": {key: 2}, "other\0one": 3})
    assert repr(f"outer/{key}") in caught.value.path
    assert repr("other\0one") in caught.value.path


def test_slashes_and_dots_in_keys_lead_to_paths_of_their_own():
    """As flat dicts of Hugging Face names have them, and Haiku."""
    tree = {"a/b": 1, "a": {"b": 2, "b/c.d": 3}, "model.layers.0.weight": 4, "a%2Fb": 5}
    leaves = trees.flatten(tree)
    assert leaves == {
        "a/b": 2,
        "a/b%2Fc.d": 3,
        "a%2Fb": 1,
        "a%252Fb": 5,
        "model.layers.0.weight": 4,
    }
    assert trees.unflatten(tree, leaves) == tree
    assert trees.nest(leaves) == tree


def test_keys_that_orbax_could_not_tell_apart_are_refused():
    with pytest.raises(UnsupportedLeafError, match=r"'a\.b' in Orbax") as caught:
        trees.flatten({"a.b": 1, "a": {"b": 2}, "a.c": 3})
    assert "'a.b'" in caught.value.path
    assert "'a/b'" in caught.value.path
    assert "a.c" not in caught.value.path


def test_keys_that_read_alike_are_refused():
    with pytest.raises(UnsupportedLeafError, match="twice"):
        trees.flatten({"a": FlatTwice()})


class FlatTwice:
    """A node whose two children have one key."""


jax.tree_util.register_pytree_with_keys(
    FlatTwice,
    lambda node: (((jax.tree_util.DictKey(0), 1), (jax.tree_util.DictKey("0"), 2)), None),
    lambda _, children: FlatTwice(),
)


def test_a_bare_leaf_has_no_path_and_is_refused():
    with pytest.raises(UnsupportedLeafError):
        trees.flatten(jnp.ones(3))


def test_all_differences_are_listed_at_once():
    with pytest.raises(TreeMismatchError) as caught:
        trees.unflatten({"a": 0, "b": 0, "c": 0}, {"c": 1, "d": 2, "e": 3})
    assert caught.value.problems == (
        "a: expected by the target, not stored",
        "b: expected by the target, not stored",
        "d: stored, not in the target",
        "e: stored, not in the target",
    )


@jax.tree_util.register_dataclass
@dataclass
class Record:
    """A node that JAX opens, not we."""

    first: object
    second: object


class Scaled(NamedTuple):
    scale: object


ANY_TREE = st.recursive(
    st.one_of(st.integers(0, 99), st.none()),
    lambda inner: st.one_of(
        st.dictionaries(st.text("ab/.%2F", min_size=1), inner, max_size=3),
        st.dictionaries(st.integers(0, 12), inner, max_size=3),
        st.dictionaries(st.text("ab", min_size=1), inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=12),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Scaled, inner),
        st.builds(Record, inner, inner),
    ),
    max_leaves=20,
)


@given(ANY_TREE)
def test_leaves_are_named_and_ordered_as_jax_does(tree):
    named = jax.tree_util.tree_flatten_with_path(tree)[0]
    assert trees.paths(tree) == [path_of(map(text_of, keys)) for keys, _ in named]
    with contextlib.suppress(UnsupportedLeafError):
        assert list(trees.flatten(tree).values()) == jax.tree.leaves(tree)


def text_of(key):
    return str(next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)))


class NoPytree(nnx.Module, pytree=False):
    def __init__(self):
        self.weight = nnx.Param(1)


def test_a_plan_gives_what_each_tree_has_however_the_one_before_looked():
    """A job may save other trees by turns: what was seen of one is not taken for another's."""
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    turns = [
        {"model": {"a": 1, "b": (2, None)}},
        {"model": {"a": 3, "b": (4, None)}},
        {"model": {"a": 5, "c": (6, None)}},
        {"model": {"a": 7, "c": (None, 8)}},
        {"other": {"a": 7, "c": (None, 8)}},
        {"model": {"a": 9}, "other": {"c": 1}},
        {"other": {"c": 2}, "model": {"a": 3}},
        {"model": {"a": module}, "other": {"c": 4}},
        {"model": {"a": module, "b": module}, "other": {"c": 4}},
        {"model": {"a": 1}, "other": {"c": 4}},
        {"model": {"a": NoPytree()}, "other": {"c": 4}},  # a leaf for JAX, as the one before
        {"model": {"a": {"kernel": 1, "bias": 2}}, "other": {"c": 4}},
        {"model": nnx.state(module), "other": {"c": 4}},
        {"a": 1, "b": 2},
    ]
    plan = TreePlan()
    for items in turns:
        for _ in range(2):  # the second time by the plan
            opened = open_modules(as_items(items).trees).trees
            expected = {name: trees.flatten(tree) for name, tree in opened.items()}
            found = plan.flatten(items)
            assert found.keys() == expected.keys()
            for name, leaves in found.items():
                assert [*leaves] == [*expected[name]]
                assert all(leaves[path] is leaf for path, leaf in expected[name].items())
    for _ in range(2):
        with pytest.raises(UnsupportedLeafError, match="twice"):
            plan.flatten({"model": {"a": FlatTwice()}})
