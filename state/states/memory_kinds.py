"""Memory kinds of arrays, so that a load restores offloaded arrays (moments) to host memory.

JAX's memory kinds are "device" for accelerators; "pinned_host" and "unpinned_host" for the host.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
from jax.sharding import Sharding

from cairn.state.checkpointing.modules import FlatTrees
from cairn.state.paths import arrays_among, leaves_by_item

__all__ = ["in_memory", "offloaded_leaves"]

_SHARDING: Final = operator.attrgetter("sharding")


def offloaded_leaves(items: Mapping[str, Any], leaves: Sequence[Any]) -> dict[str, dict[str, str]]:
    """Return the memory kind of each array outside its device's default memory, by item and path.

    A checkpoint stores the result as `memory_kinds` in its meta.

    Args:
        items: trees by name, or their leaves by path.
        leaves: all leaves of these trees. They are checked first, since computing paths takes long
            and most states have no offloaded array.
    """
    places = {id(place): place for place in map(_SHARDING, arrays_among(leaves))}
    if not any(map(_kind, places.values())):
        return {}
    flat = items if isinstance(items, FlatTrees) else leaves_by_item(items)
    kinds = {
        item: {
            path: kind
            for path, leaf in arrays.items()
            if isinstance(leaf, jax.Array) and (kind := _kind(leaf.sharding)) is not None
        }
        for item, arrays in flat.items()
    }
    return {item: paths for item, paths in kinds.items() if paths}


def in_memory(place: Sharding, kind: str | None) -> Sharding:
    """Return the sharding with a memory kind; with the default kind if None or not available."""
    device: Any = next(iter(place.device_set))
    own: str = device.default_memory().kind
    if kind is None or kind not in {memory.kind for memory in device.addressable_memories()}:
        kind = own
    return place if place.memory_kind == kind else place.with_memory_kind(kind)


def _kind(place: Sharding) -> str | None:
    """Return the memory kind of a sharding; None if it is the devices' default."""
    device: Any = next(iter(place.device_set))
    own = device.default_memory().kind
    return None if place.memory_kind in (None, own) else place.memory_kind
