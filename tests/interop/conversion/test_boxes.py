"""Parts: a box of ours is made of boxes of theirs, whichever operation lies between."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.interop.conversion.boxes import element_count
from cairn.interop.conversion.ops import RotaryRows
from tests.interop.conversion.operations import CASES, EXACT, case, numbered
from tests.interop.seams import deepseek_gguf, gguf_names, inverses, layout_ops, ops, value_ops


def boxes(shape):
    spans = [
        st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True).map(sorted)
        for size in shape
    ]
    return st.tuples(*spans).map(lambda pairs: tuple(slice(low, high) for low, high in pairs))


def made(op, theirs, leaf, box):
    part = op.box_reads([array.shape for array in theirs], leaf, box)
    return part, part.make([theirs[number][inner] for number, inner in part.reads])


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20)
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
        for module in (ops, inverses, layout_ops, value_ops, gguf_names, deepseek_gguf)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and hasattr(kind, "tensor_shapes")
        and kind is not ops.Op
        and not kind.__name__.startswith("_")
    }
    assert used == defined


@pytest.mark.parametrize("heads", [1, 2])
def test_whole_heads_take_their_own_rows_alone(heads):
    op, theirs = RotaryRows(4), [numbered(4 * 6, 3)]
    for first in range(0, 4, heads):
        rows = slice(6 * first, 6 * (first + heads))
        part, _ = made(op, theirs, 0, (rows, slice(0, 3)))
        assert part.reads == ((0, (rows, slice(0, 3))),)
