"""HTML table of a training state for notebooks: leaves, sizes and shardings. It reads no array."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from cairn.counts import count_text
from cairn.state.paths import named_leaves
from cairn.state.sharding.report import leaf_bytes
from cairn.storage.notebooks import MAX_ROWS, html_table, size_cell

__all__ = ["state_table"]


def state_table(title: str, parts: Mapping[str, Any], facts: Iterable[tuple[str, object]]) -> str:
    """Return a state as HTML.

    Args:
        title: title of the table.
        parts: the state's trees by name; trees without leaves are left out.
        facts: further rows, (name, value), for the head of the table.
    """
    leaves_of = {name: named_leaves(tree) for name, tree in parts.items()}
    leaves = [(name, leaf) for name, part in leaves_of.items() for leaf in part]
    sizes = [
        (name, sum(leaf_bytes(named.leaf) for named in part)) for name, part in leaves_of.items()
    ]
    return html_table(
        title,
        [
            *facts,
            *(
                (name, f"{count_text(len(leaves_of[name]), 'leaf')}, {size_cell(nbytes)}")
                for name, nbytes in sizes
                if leaves_of[name]
            ),
        ],
        ("part", "leaf", "dtype", "shape", "size", "sharding", "per device"),
        [(name, leaf.path, *_cells(leaf.leaf)) for name, leaf in leaves[:MAX_ROWS]],
        more=max(0, len(leaves) - MAX_ROWS),
    )


def _cells(leaf: Any) -> tuple[object, ...]:
    """Return the cells of a leaf's row. No values are read, so traced and donated leaves work."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return type(leaf).__name__, "", None, None, None
    nbytes = leaf_bytes(leaf)
    traced = isinstance(leaf, jax.core.Tracer)
    sharding = None if traced else getattr(leaf, "sharding", None)
    spec = getattr(sharding, "spec", None)
    placement = (
        str(tuple(spec)) if spec is not None else type(sharding).__name__ if sharding else None
    )
    part = leaf if sharding is None else jax.ShapeDtypeStruct(sharding.shard_shape(shape), dtype)
    return dtype, tuple(shape), size_cell(nbytes), placement, size_cell(leaf_bytes(part))
