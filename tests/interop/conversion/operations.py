"""Each operation of weight rules, with tensors that it takes."""

import math

import numpy as np
from hypothesis import strategies as st

from cairn.interop.conversion.inverses import Each, Inverse
from cairn.interop.conversion.layout_ops import Merge, Pad, Permute, Unstack
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
from cairn.interop.conversion.value_ops import Plus, Times
from tests.interop.seams import deepseek_gguf, gguf_names

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
    "stack along an axis": lambda a, b, c, lengths: (Stack(a, 1), many(a, b, c)),
    "layers": lambda a, b, c, lengths: (Unstack(b, 1), [numbered(a, b, c)]),
    "axes": lambda a, b, c, lengths: (Permute((2, 0, 1)), [numbered(a, b, c), numbered(c, a, b)]),
    "heads as an axis": lambda a, b, c, lengths: (Merge((b, c), 1), [numbered(a, b, c)]),
    "rows of three axes": lambda a, b, c, lengths: (Merge((a, b, c)), [numbered(a, b, c, 2)]),
    "padded rows": lambda a, b, c, lengths: (
        Pad(a, a + b),
        [np.concatenate([numbered(a, c), np.zeros((b, c), np.float32)])],
    ),
    "times": lambda a, b, c, lengths: (Times(0.25), [numbered(a, b), numbered(c)]),
    "layers of heads that are scaled and turn in pairs": lambda a, b, c, lengths: (
        Chain(
            (
                *(Unstack(b, 1), Times(0.5), Merge((c, 2 * a), 1)),
                *(TRANSPOSE, RotaryRows(c), TRANSPOSE),
            )
        ),
        [numbered(3, b, c, 2 * a)],
    ),
    "rotary rows": lambda a, b, c, lengths: (RotaryRows(a), [numbered(2 * a * b, c)]),
    "rotary bias": lambda a, b, c, lengths: (RotaryRows(a), [numbered(2 * a * b)]),
    "rotary rows of a part": lambda a, b, c, lengths: (
        RotaryRows(a, b, 2 * c),
        [numbered(a * (b + 2 * c + 1), 2)],
    ),
    "groups": lambda a, b, c, lengths: (SplitGroups(a, lengths), [numbered(a * sum(lengths), b)]),
    "interleaved": lambda a, b, c, lengths: (Interleaved(), [numbered(a, b, 2 * c)]),
    "plus": lambda a, b, c, lengths: (gguf_names.Plus(1.0), [numbered(a, b)]),
    "column": lambda a, b, c, lengths: (gguf_names.Column(), [numbered(1, a)]),
    "keys and values": lambda a, b, c, lengths: (
        deepseek_gguf.KeysAndValues(a, b),
        [numbered(2, c, a), numbered(2, b, c, start=500)],
    ),
    "experts": lambda a, b, c, lengths: (Chain((TRANSPOSE, Stack(a))), many(a, b, c)),
    "experts, then transposed": lambda a, b, c, lengths: (
        Chain((Stack(a), TRANSPOSE)),
        many(a, b, c),
    ),
    "heads": lambda a, b, c, lengths: (Chain((RotaryRows(a), TRANSPOSE)), [numbered(2 * a * b, c)]),
    "queries, keys, values": lambda a, b, c, lengths: (
        Chain((SplitGroups(a, lengths), TRANSPOSE)),
        [numbered(a * sum(lengths), b)],
    ),
    "joined columns": lambda a, b, c, lengths: (
        Inverse(Split(lengths, 1)),
        [numbered(a, length, b, start=1000 * length) for length in lengths],
    ),
    "columns as heads": lambda a, b, c, lengths: (
        Inverse(Merge((b, c, 2), 1)),
        [numbered(a, 2 * b * c)],
    ),
    "rows of zeros": lambda a, b, c, lengths: (Inverse(Pad(a, a + b)), [numbered(a, c)]),
    "divided": lambda a, b, c, lengths: (Inverse(Times(0.25)), [numbered(a, b), numbered(c)]),
    "shifted": lambda a, b, c, lengths: (Inverse(Plus(2.0)), [numbered(a, b), numbered(c)]),
    "rows in pairs again": lambda a, b, c, lengths: (
        Inverse(RotaryRows(a)),
        [numbered(2 * a * b, c)],
    ),
    "columns in alternation": lambda a, b, c, lengths: (Inverse(Interleaved()), many(2, a, b)),
    "layers of several leaves": lambda a, b, c, lengths: (Each(Stack(a, 1), c), many(a * c, b)),
    "three in a row": lambda a, b, c, lengths: (
        Chain((TRANSPOSE, Split((a, b), 1), TRANSPOSE)),
        [numbered(a + b, c)],
    ),
}
EXACT = [
    *("rename", "transpose", "split", "split columns", "stack"),
    *("stack along an axis", "layers", "axes", "padded rows", "times"),
    *("plus", "experts", "experts, then transposed", "three in a row"),
    *("joined columns", "divided", "shifted", "layers of several leaves"),
]
"""What reads just the numbers that it makes."""


def case(data, name):
    """Return an operation, and tensors that it takes."""
    lengths = tuple(data.draw(st.lists(sizes, min_size=1, max_size=4), "lengths"))
    return CASES[name](*(data.draw(sizes) for _ in range(3)), lengths)
