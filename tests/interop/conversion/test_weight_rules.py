"""Weight rules: every operation undoes itself; tables are held against what is there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import ConversionError
from cairn.interop.conversion.ops import TRANSPOSE, Chain, RotaryRows, Split, Stack
from cairn.interop.conversion.rules import Rule, RuleTable, match
from cairn.interop.conversion.tensor_streams import MemoryLeaf, streams, whole
from tests.interop.conversion.operations import CASES, case, numbered
from tests.interop.seams import deepseek_gguf, gguf_names


def fetch_of(array):
    return lambda at: array if at is None else array[at]


@st.composite
def ops_with_theirs(draw):
    return case(draw(st.data()), draw(st.sampled_from(sorted(CASES))))


@given(ops_with_theirs())
def test_every_operation_undoes_itself_and_knows_its_shapes(case):
    op, theirs = case
    ours = op.from_hf(theirs)
    shapes = [array.shape for array in ours]
    assert op.leaf_shapes([array.shape for array in theirs]) == shapes
    assert op.tensor_shapes(shapes) == [array.shape for array in theirs]
    for again, first in zip(op.to_hf(ours), theirs, strict=True):
        np.testing.assert_array_equal(again, first)


@given(ops_with_theirs(), st.sampled_from([1, 7, 64, 1 << 20]))
def test_streams_give_what_the_operation_gives_whatever_the_block_size(case, max_bytes):
    op, theirs = case
    ours = op.from_hf(theirs)
    rule = Rule(
        tuple(f"ours/{i}" for i in range(len(ours))),
        tuple(f"theirs.{i}" for i in range(len(theirs))),
        op,
    )
    leaves = {
        name: MemoryLeaf(array.shape, array.dtype, fetch_of(array))
        for name, array in zip(rule.leaves, ours, strict=True)
    }
    sources = streams([rule], leaves, path="x")
    assert [source.name for source in sources] == list(rule.tensors)
    for source, expected in zip(sources, theirs, strict=True):
        assert source.shape == expected.shape
        flat = [block.reshape(-1) for block in source.blocks(max_bytes)]
        np.testing.assert_array_equal(np.concatenate(flat), expected.reshape(-1))
        np.testing.assert_array_equal(whole(source), expected)


@given(ops_with_theirs(), st.sampled_from([1, 7, 64, 1 << 20]), st.sampled_from(["f2", "f4"]))
def test_leaves_of_several_dtypes_are_cast_each_from_its_own(case, max_bytes, dtype):
    op, theirs = case
    ours = [array + 2**-10 for array in op.from_hf(theirs)]
    ours = [array.astype("f8" if at % 2 else "f4") for at, array in enumerate(ours)]
    names = tuple(f"ours/{at}" for at in range(len(ours)))
    rule = Rule(names, tuple(f"theirs.{at}" for at in range(len(theirs))), op)
    leaves = {
        name: MemoryLeaf(array.shape, array.dtype, fetch_of(array))
        for name, array in zip(names, ours, strict=True)
    }
    sources = streams([rule], leaves, dtype=np.dtype(dtype), path="x")
    expected = op.to_hf([array.astype(dtype) for array in ours])
    for source, array in zip(sources, expected, strict=True):
        assert source.dtype == dtype
        flat = [block.reshape(-1) for block in source.blocks(max_bytes)]
        np.testing.assert_array_equal(np.concatenate(flat), array.reshape(-1))
    if len(ours) > 1:
        with pytest.raises(ConversionError, match="name a floating dtype") as caught:
            streams([rule], leaves, path="x")
        told = (f"{name} {leaf.dtype}" for name, leaf in leaves.items())
        assert caught.value.problems == (f"{', '.join(rule.tensors)}: {', '.join(told)}",)


def test_rotary_rows_put_the_halves_of_each_head_together():
    interleaved = np.array([0, 10, 1, 11, 2, 12, 3, 13])
    (halved,) = RotaryRows(2).from_hf([interleaved])
    assert halved.tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


TABLE = RuleTable(
    (Rule.one("a/kernel", "a.weight", TRANSPOSE), Rule.one("b", "b")),
    tolerated=(r"old\..*",),
)


def test_a_table_that_fits_gives_its_rules():
    theirs = {"a.weight": (3, 2), "b": (4,), "old.buffer": (1,)}
    ours = {"a/kernel": (2, 3), "b": (4,)}
    assert match(TABLE, leaves=ours, tensors=theirs, path="x") == TABLE.rules
    assert match(TABLE, leaves=ours, path="x") == TABLE.rules


def test_everything_that_does_not_fit_is_in_one_error():
    with pytest.raises(ConversionError) as caught:
        match(
            TABLE,
            leaves={"a/kernel": (2, 3), "b": (4,), "c": (1,)},
            tensors={"a.weight": (2, 3), "d": (9,)},
            path="some/folder",
        )
    assert "some/folder" in str(caught.value)
    assert set(caught.value.problems) == {
        "missing tensor: b",
        "unexpected tensor: d (9,)",
        "no rule makes our leaf: c",
        "shape of a.weight: expected (2, 3) for a/kernel, found (3, 2) (from [(2, 3)])",
    }


def test_a_leaf_filled_twice_is_an_error():
    twice = RuleTable((Rule.one("a", "x"), Rule.one("a", "y")))
    with pytest.raises(ConversionError, match="filled 2 times: a"):
        match(twice, leaves={"a": (1,)}, path="x")


@pytest.mark.parametrize(
    ("op", "theirs"),
    [
        (TRANSPOSE, [(3,)]),
        (Split((1, 2)), [(4, 5)]),
        (Stack(3), [(1,), (1,)]),
        (RotaryRows(2), [(6, 1)]),
        (gguf_names.Column(), [(2, 6)]),
        (deepseek_gguf.KeysAndValues(3, 2), [(4, 6, 3), (4, 6, 2)]),
    ],
)
def test_tensors_that_an_operation_cannot_take_are_named(op, theirs):
    names = tuple(f"t{i}" for i in range(len(theirs)))
    table = RuleTable((Rule(("ours",), names, op),))
    with pytest.raises(ConversionError, match=r"t0.*: expected"):
        match(table, leaves={"ours": (1,)}, tensors=dict(zip(names, theirs, strict=True)), path="x")


def test_each_expert_is_fetched_by_itself_and_once():
    leaf, fetched = numbered(4, 3, 5), []

    def fetch(at):
        fetched.append(at)
        return leaf if at is None else leaf[at]

    rule = Rule(("ours",), tuple(f"theirs.{n}" for n in range(4)), Chain((TRANSPOSE, Stack(4))))
    sources = streams([rule], {"ours": MemoryLeaf(leaf.shape, leaf.dtype, fetch)}, path="x")
    for source, expected in zip(sources, leaf, strict=True):
        np.testing.assert_array_equal(whole(source), expected.T)
    assert fetched == [0, 1, 2, 3]
