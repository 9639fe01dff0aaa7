"""What a sharding decision says of each leaf: its spec, why, its bytes, and what does not fit."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from state.errors import ShardingError
from state.mesh import mesh_text
from storage.leaf_forms import is_key_dtype

__all__ = ["LeafPlacement", "ShardingReport", "leaf_bytes"]


def leaf_bytes(leaf: Any) -> int:
    """Returns the bytes of an array, abstract or not; 0 for anything else."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return 0
    if is_key_dtype(leaf.dtype):
        keys = jax.eval_shape(jax.random.key_data, leaf)
        return int(prod(keys.shape)) * int(np.dtype(keys.dtype).itemsize)
    return int(prod(leaf.shape)) * int(np.dtype(leaf.dtype).itemsize)


@dataclass(frozen=True)
class LeafPlacement:
    """Where one leaf goes, and why.

    `rule` is the regular expression that matched, "axes (...)", "automatic" or "scalar".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    spec: PartitionSpec
    nbytes: int
    bytes_per_device: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardingReport:
    """The placement of every leaf of a tree on a mesh, in the order of the tree's leaves."""

    mesh: Mesh
    leaves: tuple[LeafPlacement, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tree."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that each device holds."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def problems(self) -> tuple[str, ...]:
        """Every leaf that does not fit, as one line each."""
        return tuple(f"{leaf.path}: {text}" for leaf in self.leaves for text in leaf.problems)

    def raise_for_problems(self) -> "ShardingReport":
        """Returns the report itself if every leaf fits.

        Raises:
            ShardingError: otherwise; lists every leaf.
        """
        if not self.problems:
            return self
        causes = dict.fromkeys(
            text.partition(" (")[0] for leaf in self.leaves for text in leaf.problems
        )
        raise ShardingError(
            f"{len(self.problems)} placement problems: {'; '.join(list(causes)[:6])}",
            path=f"mesh {mesh_text(self.mesh)}",
            next_step="choose mesh axes that divide these, or other partition rules",
            problems=self.problems,
        )

    def shardings(self, tree: Any) -> Any:
        """Returns the tree with a NamedSharding in place of each leaf."""
        places = [NamedSharding(self.mesh, leaf.spec) for leaf in self.leaves]
        return jax.tree.unflatten(jax.tree.structure(tree), places)

    def __str__(self) -> str:
        rows = [("leaf", "shape", "dtype", "spec", "bytes/device", "rule")]
        rows += [
            (
                leaf.path,
                "x".join(map(str, leaf.shape)) or "scalar",
                leaf.dtype,
                str(tuple(leaf.spec)),
                f"{leaf.bytes_per_device:,}",
                leaf.rule,
            )
            for leaf in self.leaves
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]
            )
            for row in rows
        ]
        total = f"{self.nbytes:,} bytes in all, {self.bytes_per_device:,} on each device"
        return "\n".join([f"mesh {mesh_text(self.mesh)}", *lines, total, *self.problems])
