"""JSON that was saved beside a step's trees (`meta`)."""

from dataclasses import dataclass, field
from typing import Any, Final

from cairn.service.actions.caches import OpenStep
from cairn.storage.arrays.orbax_tree import JSON_FILES, META_ITEM

MAX_META_BYTES: Final = 1 << 20
"""Largest size of a step's `meta` that a page reads."""


@dataclass(frozen=True)
class StepMeta:
    """JSON of a step.

    Attributes:
        tree: The JSON object; empty if there is none, or if it is too large.
        nbytes: Size of its files and arrays.
        is_too_large: It is larger than pages read.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    is_too_large: bool = False

    def without_config(self, step: OpenStep) -> dict[str, Any]:
        """Return the object without the copy of the config that the step's manifest has too."""
        if step.manifest.model is None:
            return self.tree
        return {name: value for name, value in self.tree.items() if name != "config"}


def read_meta(step: OpenStep) -> StepMeta:
    """Read the `meta` of a step, unless it is too large for a page.

    Raises:
        CorruptionError: It is damaged.
        StoreUnavailableError: The store does not answer.
    """
    plain = step.manifest.plain
    names = () if plain is None else tuple(plain.json_files.values())
    names += tuple(f"{META_ITEM}/{name}" for name in JSON_FILES)
    sizes = [record.size for record in step.contents.objects if record.name in names]
    # Plain Orbax may have stored it as a tree of arrays.
    nbytes = sum(sizes or [leaf.nbytes for leaf in step.leaves if leaf.item == META_ITEM])
    if nbytes > MAX_META_BYTES:
        return StepMeta(nbytes=nbytes, is_too_large=True)
    return StepMeta(step.reader().meta(), nbytes)
