"""Arrays that stack layers: read once, whatever their chunks, and given layer by layer."""

import errno
import itertools
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.reading.item_arrays import LeafInfo
from tests.interop.seams import stacked_arrays


class Counting:
    """A reader of one array in memory, which counts how often each element is read."""

    def __init__(self, array, chunks):
        self.array, self.chunks = array, chunks
        self.times = np.zeros(array.shape, int)

    def read(self, item, path):
        self.times += 1
        return self.array

    def iter_boxes(self, item, path):
        cuts = [
            [slice(n, min(n + chunk, size)) for n in range(0, size, chunk)]
            for size, chunk in zip(self.array.shape, self.chunks, strict=True)
        ]
        for box in itertools.product(*cuts):
            self.times[box] += 1
            yield box, self.array[box]


@pytest.mark.parametrize("kept", [0, 1 << 20])
@given(data=st.data())
def test_each_element_of_a_stack_is_read_once_for_all_layers(kept, data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple))
    chunks = tuple(data.draw(st.integers(1, size)) for size in shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    reader = Counting(array, chunks)
    stacked = stacked_arrays.StackedArrays(reader, "items")
    info = LeafInfo("layers", shape, array.dtype, chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked_arrays, "KEPT_BYTES", kept)
        answers = [stacked.layers(info, axis) for _ in range(shape[axis])]
    if chunks[axis] == 1:
        assert all(layers is None for layers in answers)
        return
    for number, layers in enumerate(answers):
        np.testing.assert_array_equal(layers[number], np.take(array, number, axis))
        stacked_arrays.release(layers)
        np.testing.assert_array_equal(layers, np.moveaxis(array, axis, 0))
    assert reader.times.max() == reader.times.min() == 1


def no_room(file, start, length):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(stacked_arrays, "FREE_BYTES", 1 << 62), (os, "posix_fallocate", no_room)],
    ids=["little is free", "none is left"],
)
def test_where_temporary_files_have_no_room_each_layer_is_read_by_itself(
    owner, name, value, monkeypatch
):
    monkeypatch.setattr(stacked_arrays, "KEPT_BYTES", 0)
    monkeypatch.setattr(owner, name, value)
    array = np.zeros((4, 2), np.float32)
    stacked = stacked_arrays.StackedArrays(Counting(array, (4, 2)), "items")
    assert stacked.layers(LeafInfo("layers", (4, 2), array.dtype, (4, 2)), 1) is None
