"""Modules of `cairn.state` in which jobs of several processes replace something.

A process stops, dies or fails in the middle of a save or of a restore; waits are made short.
"""

from cairn.state.checkpointing.processes import background, coordination, straggler_log
from cairn.state.checkpointing.restores import rule_leaves, shared_leaves
from cairn.state.checkpointing.saves import (
    engine,
    host_arrays,
    host_trees,
    preparation,
    tree_writer,
)

__all__ = [
    "background",
    "coordination",
    "engine",
    "host_arrays",
    "host_trees",
    "preparation",
    "rule_leaves",
    "shared_leaves",
    "straggler_log",
    "tree_writer",
]
