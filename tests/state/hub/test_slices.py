"""Slices of our leaves: each byte that they take is read once, and little is held of it."""

import math
import tracemalloc
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import parse_uri
from cairn.interop.conversion.box_reads import covering_box, read_boxes
from cairn.interop.conversion.boxes import whole_box
from cairn.interop.conversion.ops import TRANSPOSE, Chain, Split, Stack
from cairn.interop.conversion.rules import Rule
from cairn.interop.weights.source_folder import SourceFolder
from cairn.storage.safetensors.format import encode_header
from tests.interop.conversion.operations import CASES, case
from tests.interop.seams import SafetensorsFolder, WeightFiles, box_reads
from tests.state.seams import Slice, read_slices, slice_bytes

PIECES = box_reads.READERS * box_reads.PIECE_BYTES + (1 << 20)
"""What the threads hold that read a tensor."""


class Counted:
    """Tensors in memory that count how often each number is read."""

    def __init__(self, tensors, *, whole: bool) -> None:
        self.tensors = tensors
        self.whole = whole
        self.shapes = {name: array.shape for name, array in tensors.items()}
        self.dtypes = {name: array.dtype for name, array in tensors.items()}
        self.times = {name: np.zeros(array.size, int) for name, array in tensors.items()}

    def read(self, name):
        raise AssertionError("no slice asks for a whole tensor")

    def cover(self, name, box):
        shape = self.shapes[name]
        return whole_box(shape) if self.whole else covering_box(shape, 4, box)

    def boxes(self, name, wanted: Sequence):
        def read(first, out):
            self.times[name][first : first + out.size] += 1
            out[:] = self.tensors[name].reshape(-1)[first : first + out.size]

        if self.whole:
            (values,) = read_boxes(
                self.shapes[name], self.dtypes[name], [whole_box(self.shapes[name])], read
            )
            return [values[box] for box in wanted]
        return read_boxes(self.shapes[name], self.dtypes[name], wanted, read)


def grid(shape, counts):
    """The boxes of a leaf that is divided along its axes."""
    cuts = [
        [slice(size * n // count, size * (n + 1) // count) for n in range(count)]
        for size, count in zip(shape, counts, strict=True)
    ]
    return [tuple(axis[n] for axis, n in zip(cuts, at, strict=True)) for at in np.ndindex(*counts)]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20)
@given(data=st.data(), gap=st.sampled_from([0, 16, 1 << 20]), whole=st.booleans())
def test_however_leaves_are_divided_each_number_is_read_once(name, data, gap, whole):
    op, theirs = case(data, name)
    ours = op.from_hf(theirs)
    rule = Rule(
        tuple(f"ours/{n}" for n in range(len(ours))),
        tuple(f"theirs.{n}" for n in range(len(theirs))),
        op,
    )
    source = Counted(dict(zip(rule.tensors, theirs, strict=True)), whole=whole)
    counts = [data.draw(st.tuples(*(st.integers(1, 3) for _ in one.shape))) for one in ours]
    wanted = [
        Slice(leaf, box)
        for leaf, (one, division) in enumerate(zip(ours, counts, strict=True))
        for box in grid(one.shape, division)
    ]
    with mock.patch.object(box_reads, "GAP_BYTES", gap):
        told = slice_bytes(source, rule, wanted)
        for one, values in read_slices(source, rule, wanted):
            wanted.remove(one)
            np.testing.assert_array_equal(values, ours[one.leaf][one.box])
    assert wanted == []
    assert told == 4 * sum(int(times.sum()) for times in source.times.values())
    read = {int(n) for times in source.times.values() for n in times}
    # Rows beyond the leaf need not be read.
    assert read == {1} or (name == "padded rows" and read == {0, 1})


def stored(folder, **shapes):
    """A safetensors file of zeros, which take no room on the disk."""
    header = encode_header(
        [(name, np.dtype(np.float32), shape) for name, shape in shapes.items()], {}
    )
    size = 4 * sum(math.prod(shape) for shape in shapes.values())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    return SafetensorsFolder(WeightFiles(SourceFolder(parse_uri(folder)), ("model.safetensors",)))


def peak(source, rule, wanted):
    """Most bytes that are held while slices are made and dropped."""
    tracemalloc.start()
    try:
        read = 0
        for _, values in read_slices(source, rule, wanted):
            read += values.nbytes
            del values
        return tracemalloc.get_traced_memory()[1], read
    finally:
        tracemalloc.stop()


SIDE = 4096
TENSOR = 4 * SIDE * SIDE
"""64 MiB."""


def test_rows_are_held_a_slice_at_a_time(tmp_path):
    source = stored(tmp_path, w=(SIDE, SIDE))
    wanted = [Slice(0, box) for box in grid((SIDE, SIDE), (1, 8))]
    most, read = peak(source, Rule.one("ours", "w", TRANSPOSE), wanted)
    assert read == TENSOR
    assert most < 2 * TENSOR / 8 + PIECES < TENSOR


def test_columns_are_held_with_their_rows_once(tmp_path):
    source = stored(tmp_path, w=(SIDE, SIDE))
    wanted = [Slice(0, box) for box in grid((SIDE, SIDE), (8, 1))]
    most, read = peak(source, Rule.one("ours", "w", TRANSPOSE), wanted)
    assert read == TENSOR
    assert most < TENSOR + PIECES
    some, read = peak(source, Rule.one("ours", "w", TRANSPOSE), wanted[:2])
    assert read == TENSOR / 4
    assert some < TENSOR / 4 + PIECES


def test_experts_and_fused_layers_are_held_one_at_a_time(tmp_path):
    names = tuple(f"expert.{n}" for n in range(8))
    source = stored(
        tmp_path, fused=(SIDE, SIDE // 2), **dict.fromkeys(names, (SIDE // 2, SIDE // 4))
    )
    rule = Rule(("ours",), names, Chain((TRANSPOSE, Stack(8))))
    wanted = [Slice(0, box) for box in grid((8, SIDE // 4, SIDE // 2), (8, 1, 1))]
    most, read = peak(source, rule, wanted)
    assert read == TENSOR
    assert most < 2 * TENSOR / 8 + PIECES
    fused = Rule(("a", "b"), ("fused",), Chain((Split((SIDE // 2,) * 2), TRANSPOSE)))
    halves = [Slice(leaf, whole_box((SIDE // 2, SIDE // 2))) for leaf in range(2)]
    most, read = peak(source, fused, halves)
    assert read == TENSOR / 2
    assert most < TENSOR / 2 + PIECES
