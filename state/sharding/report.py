"""Report of a tree's sharding: spec, reason, bytes and problems of each leaf."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cairn.state.checkpointing.leaf_forms import is_key_dtype
from cairn.state.errors import ShardingError
from cairn.state.sharding.mesh import mesh_text
from cairn.storage.notebooks import MAX_ROWS, html_table, never_raises, size_cell

__all__ = ["LeafPlacement", "ShardingReport", "leaf_bytes"]

_COLUMNS = ("leaf", "shape", "dtype", "spec", "bytes/device", "rule")


def leaf_bytes(leaf: Any) -> int:
    """Return the bytes of an array, abstract or not; 0 for anything else."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return 0
    if is_key_dtype(leaf.dtype):
        keys = jax.eval_shape(jax.random.key_data, leaf)
        return int(prod(keys.shape)) * int(np.dtype(keys.dtype).itemsize)
    return int(prod(leaf.shape)) * int(np.dtype(leaf.dtype).itemsize)


@dataclass(frozen=True)
class LeafPlacement:
    """Placement of one leaf, and its reason.

    Attributes:
        path: the leaf's keys, joined by "/".
        shape: shape of the whole leaf.
        dtype: name of the leaf's dtype.
        rule: the regular expression that matched, "axes (...)", "automatic" or "scalar"; for an
            optimizer's leaf "mirrors its parameter", "factored from its parameter" or
            "replicated".
        spec: mesh axes of each dimension, without axes of size 1.
        nbytes: bytes of the whole leaf.
        bytes_per_device: bytes of the leaf on each device.
        problems: reasons why the leaf can't have this spec; empty if it can.
        unmatched: reason why a large leaf is replicated although no rule says so; None for other
            leaves. Only strict mode treats it as an error.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    spec: PartitionSpec
    nbytes: int
    bytes_per_device: int
    problems: tuple[str, ...] = ()
    unmatched: str | None = None


@dataclass(frozen=True)
class ShardingReport:
    """Placement of every leaf of a tree on a mesh, in the order of the tree's leaves.

    `print()` and Rich show it as a table; `str` gives it as plain text.

    Attributes:
        mesh: the mesh.
        leaves: placement of each leaf.
        idle_rules: rules that place no leaf, in order. They may be misspelt, meant for another
            model, or come after a rule that matches the same leaves.
    """

    mesh: Mesh | AbstractMesh
    leaves: tuple[LeafPlacement, ...] = ()
    idle_rules: tuple[str, ...] = ()

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
        """Leaves that do not fit, one line each."""
        return tuple(f"{leaf.path}: {text}" for leaf in self.leaves for text in leaf.problems)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Large leaves that are replicated although no rule says so, one line each."""
        return tuple(f"{leaf.path}: {leaf.unmatched}" for leaf in self.leaves if leaf.unmatched)

    def raise_for_problems(self, *, strict: bool = False) -> "ShardingReport":
        """Return the report itself if there are no problems.

        Args:
            strict: whether `unmatched` leaves are problems, too.

        Raises:
            ShardingError: there are problems; lists all of them.
        """
        texts = [text for leaf in self.leaves for text in leaf.problems]
        problems = self.problems
        if strict:
            texts += [leaf.unmatched for leaf in self.leaves if leaf.unmatched]
            problems += self.unmatched
        if not problems:
            return self
        causes = dict.fromkeys(text.partition(" (")[0] for text in texts)
        raise ShardingError(
            f"{len(problems)} placement problems: {'; '.join(list(causes)[:6])}",
            path=f"mesh {mesh_text(self.mesh)}",
            next_step="choose mesh axes that divide these, or other partition rules",
            problems=problems,
        )

    def shardings(self, tree: Any) -> Any:
        """Return the tree with a NamedSharding in place of each leaf."""
        places = [NamedSharding(self.mesh, leaf.spec) for leaf in self.leaves]
        return jax.tree.unflatten(jax.tree.structure(tree), places)

    def print(self, console: Console | None = None) -> None:
        """Print the table, and below it the problems.

        Args:
            console: the console to print to; None for standard output.
        """
        (console or Console()).print(self)

    def __rich__(self) -> Table:
        table = Table(title=f"mesh {mesh_text(self.mesh)}", caption="\n".join(self._footer()))
        for name in _COLUMNS:
            right = name in ("shape", "bytes/device")
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for leaf in self.leaves:
            style = "red" if leaf.problems else "yellow" if leaf.unmatched else None
            # Text, because Rich would take the brackets of a regular expression for markup.
            table.add_row(*map(Text, _row(leaf)), style=style)
        return table

    @never_raises
    def _repr_html_(self) -> str:
        odd = [leaf for leaf in self.leaves if leaf.problems or leaf.unmatched]
        others = [leaf for leaf in self.leaves if not (leaf.problems or leaf.unmatched)]
        shown = [*odd, *others][:MAX_ROWS]  # what does not fit is never left out first
        return html_table(
            f"Sharding on mesh {mesh_text(self.mesh)}",
            [
                ("in all", size_cell(self.nbytes)),
                ("each device", size_cell(self.bytes_per_device)),
                ("does not fit", len(self.problems) or None),
                ("idle rules", ", ".join(map(repr, self.idle_rules))),
            ],
            (*_COLUMNS, "problem"),
            [
                (*_row(leaf), "; ".join((*leaf.problems, *filter(None, [leaf.unmatched]))))
                for leaf in shown
            ],
            more=len(self.leaves) - len(shown),
        )

    def __str__(self) -> str:
        rows = [_COLUMNS, *map(_row, self.leaves)]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]
            )
            for row in rows
        ]
        return "\n".join([f"mesh {mesh_text(self.mesh)}", *lines, *self._footer()])

    def _footer(self) -> list[str]:
        total = f"{self.nbytes:,} bytes in all, {self.bytes_per_device:,} on each device"
        idle = [f"rule {text!r} takes no leaf" for text in self.idle_rules]
        return [total, *self.problems, *self.unmatched, *idle]


def _row(leaf: LeafPlacement) -> tuple[str, ...]:
    return (
        leaf.path,
        "x".join(map(str, leaf.shape)) or "scalar",
        leaf.dtype,
        str(tuple(leaf.spec)),
        f"{leaf.bytes_per_device:,}",
        leaf.rule,
    )
