"""Restores onto CPU devices that take the way of an accelerator's."""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import numpy as np

from tests.state.seams import HostMemory, local_leaves, shared_leaves, targets


@contextlib.contextmanager
def devices_elsewhere(window: int) -> Iterator[list[int]]:
    """Each device has a copy of what it is given, which passes through a window of so many bytes.

    Yields:
        The most bytes of the window that were taken at a time, in a list of one.
    """
    places, place = targets.local_boxes, targets.TargetLeaf.place
    most = [0]

    class Watched(HostMemory):
        def passing(self, shape, count, dtype):
            parts, slot = super().passing(shape, count, dtype)
            most[0] = max(most[0], sum(one.stop - one.start for one in self._slots))
            for part in parts:
                part.reshape(-1).view(np.uint8)[...] = 0xA5  # of a leaf before
            return parts, slot

    def copied(self, shape, dtype, part):
        return place(self, shape, dtype, lambda index: part(index).copy())

    def found(*asked):
        return places(*asked)._replace(on_cpu=False)

    with contextlib.ExitStack() as stack:
        for owner, name, changed in (
            (targets, "local_boxes", found),
            (targets.TargetLeaf, "place", copied),
            (local_leaves, "HostMemory", functools.partial(Watched, window)),
            (shared_leaves, "HostMemory", functools.partial(Watched, window)),
        ):
            stack.enter_context(mock.patch.object(owner, name, changed))
        yield most
