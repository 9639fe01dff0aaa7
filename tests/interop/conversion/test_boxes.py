"""Parts: a box of ours is made of boxes of theirs, whichever operation lies between."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.interop.conversion import ops
from cairn.interop.conversion.boxes import element_count
from cairn.interop.conversion.ops import (
    RENAME,
    TRANSPOSE,
    Chain,
    Interleaved,
    RotaryRows,
    Split,
    SplitGroups,
    Stack,
)
from cairn.interop.families import deepseek_gguf, gguf_names
from cairn.interop.families.deepseek_gguf import KeysAndValues
from cairn.interop.families.gguf_names import Column, Plus

sizes = st.integers(1, 5)


def numbered(*shape, start=0):
    return start + np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def many(count, *shape):
    return [numbered(*shape, start=1000 * number) for number in range(count)]


CASES = {
    "rename": lambda a, b, c, lengths: (RENAME, [numbered(a, b), numbered(c)]),
    "transpose": lambda a, b, c, lengths: (TRANSPOSE, [numbered(a, b, c), numbered(c, a)]),
    "split": lambda a, b, c, lengths: (Split(lengths), [numbered(sum(lengths), a)]),
    "split columns": lambda a, b, c, lengths: (Split(lengths, 1), [numbered(a, sum(lengths), b)]),
    "stack": lambda a, b, c, lengths: (Stack(a), many(a, b, c)),
    "rotary rows": lambda a, b, c, lengths: (RotaryRows(a), [numbered(2 * a * b, c)]),
    "rotary bias": lambda a, b, c, lengths: (RotaryRows(a), [numbered(2 * a * b)]),
    "rotary rows of a part": lambda a, b, c, lengths: (
        RotaryRows(a, b, 2 * c),
        [numbered(a * (b + 2 * c + 1), 2)],
    ),
    "groups": lambda a, b, c, lengths: (SplitGroups(a, lengths), [numbered(a * sum(lengths), b)]),
    "interleaved": lambda a, b, c, lengths: (Interleaved(), [numbered(a, b, 2 * c)]),
    "plus": lambda a, b, c, lengths: (Plus(1.0), [numbered(a, b)]),
    "column": lambda a, b, c, lengths: (Column(), [numbered(1, a)]),
    "keys and values": lambda a, b, c, lengths: (
        KeysAndValues(a, b),
        [numbered(2, c, a), numbered(2, b, c, start=500)],
    ),
    "experts": lambda a, b, c, lengths: (Chain((TRANSPOSE, Stack(a))), many(a, b, c)),
    "heads": lambda a, b, c, lengths: (Chain((RotaryRows(a), TRANSPOSE)), [numbered(2 * a * b, c)]),
    "queries, keys, values": lambda a, b, c, lengths: (
        Chain((SplitGroups(a, lengths), TRANSPOSE)),
        [numbered(a * sum(lengths), b)],
    ),
    "three in a row": lambda a, b, c, lengths: (
        Chain((TRANSPOSE, Split((a, b), 1), TRANSPOSE)),
        [numbered(a + b, c)],
    ),
}
EXACT = [
    *("rename", "transpose", "split", "split columns", "stack"),
    *("plus", "experts", "three in a row"),
]
"""What reads just the numbers that it makes."""


def boxes(shape):
    spans = [
        st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True).map(sorted)
        for size in shape
    ]
    return st.tuples(*spans).map(lambda pairs: tuple(slice(low, high) for low, high in pairs))


def case(data, name):
    lengths = tuple(data.draw(st.lists(sizes, min_size=1, max_size=4), "lengths"))
    return CASES[name](*(data.draw(sizes) for _ in range(3)), lengths)


def made(op, theirs, leaf, box):
    part = op.box_reads([array.shape for array in theirs], leaf, box)
    return part, part.make([theirs[number][inner] for number, inner in part.reads])


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_the_boxes_read_make_what_the_whole_tensors_make(name, data):
    op, theirs = case(data, name)
    ours = op.from_hf(theirs)
    leaf = data.draw(st.integers(0, len(ours) - 1), "leaf")
    box = data.draw(boxes(ours[leaf].shape), "box")
    part, found = made(op, theirs, leaf, box)
    np.testing.assert_array_equal(found, ours[leaf][box])
    if name in EXACT:
        assert sum(element_count(inner) for _, inner in part.reads) == math.prod(found.shape)


def test_the_cases_are_all_operations_that_rules_have():
    used = {type(CASES[name](1, 1, 1, (1,))[0]) for name in CASES}
    defined = {
        kind
        for module in (ops, gguf_names, deepseek_gguf)
        for kind in vars(module).values()
        if isinstance(kind, type) and hasattr(kind, "tensor_shapes") and kind is not ops.Op
    }
    assert used == defined


@pytest.mark.parametrize("heads", [1, 2])
def test_whole_heads_take_their_own_rows_alone(heads):
    op, theirs = RotaryRows(4), [numbered(4 * 6, 3)]
    for first in range(0, 4, heads):
        rows = slice(6 * first, 6 * (first + heads))
        part, _ = made(op, theirs, 0, (rows, slice(0, 3)))
        assert part.reads == ((0, (rows, slice(0, 3))),)
