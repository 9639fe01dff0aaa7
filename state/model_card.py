"""A model as Markdown: its configuration and its parameters, in two tables."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from cairn.state.paths import named_leaves
from cairn.state.placement import leaf_bytes

__all__ = ["model_markdown"]


def model_markdown(name: str, config: Mapping[str, Any], params: Any) -> str:
    """Returns a page about a model.

    Args:
        name: its title.
        config: JSON.
        params: arrays or ShapeDtypeStructs. Leaves whose paths differ only in numbers, as those of
            a decoder's layers do, and that are alike share a row.
    """
    rows: dict[tuple[str, tuple[int, ...], str], int] = {}
    elements = nbytes = 0
    for named in named_leaves(params):
        shape, dtype = tuple(np.shape(named.leaf)), str(named.leaf.dtype)
        path = "/".join("*" if part.isdigit() else part for part in named.path.split("/"))
        rows[path, shape, dtype] = rows.get((path, shape, dtype), 0) + 1
        elements += prod(shape)
        nbytes += leaf_bytes(named.leaf)
    settings = [f"| {key} | `{json.dumps(value)}` |" for key, value in config.items()]
    weights = [
        f"| `{path}` | {' x '.join(map(str, shape)) or 'scalar'} | {dtype} | {count} "
        f"| {prod(shape) * count:,} |"
        for (path, shape, dtype), count in rows.items()
    ]
    lines = [
        f"# {name}",
        "",
        f"{elements:,} parameters, {nbytes:,} bytes.",
        "",
        "## Configuration",
        "",
        "| field | value |",
        "| --- | --- |",
        *settings,
        "",
        "## Parameters",
        "",
        "| path | shape | dtype | how many | elements |",
        "| --- | --- | --- | ---: | ---: |",
        *weights,
        "",
    ]
    return "\n".join(lines)
