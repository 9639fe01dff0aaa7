"""Items of a step that the manager restores: trees, JSON and iterators by name. Imports JAX."""

from collections.abc import Collection, Mapping
from typing import Any, Final

import jax
import orbax.checkpoint as ocp
from etils import epath

from cairn.state.checkpointing.restore import open_step, read_meta, stored_tree
from cairn.state.drop_in.item_args import SINGLE_ITEM, Kind
from cairn.storage.arrays.orbax_tree import (
    META_ITEM,
    OLD_ROOT_METADATA,
    ROOT_METADATA,
    parse_custom,
    parse_json_object,
)
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.store.objects import ObjectStore

__all__ = ["StoredItems", "as_meta"]

_META_KEY: Final = "checkpoint_manager"
"""Where in a step's JSON the manager keeps what is no tree."""

_UNNAMED: Final = ("default", "")
"""Folders in which Orbax has an item without a name."""


def as_meta(
    *,
    json: Mapping[str, Any],
    single: bool,
    custom_metadata: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the JSON to save with a step: all that is no tree, for `StoredItems`."""
    own = {"json": json, "single": single, "custom_metadata": custom_metadata, "metadata": metadata}
    return {_META_KEY: own}


class StoredItems:
    """Items of a step that the manager or another call saved, or that was imported.

    Attributes:
        kinds: what each item is, by name.
        json: the items of JSON, by name.
        single: the step was saved as one item without a name.
    """

    def __init__(self, run: Run, info: StepInfo) -> None:
        """Open a step.

        Raises:
            StorageError: it is gone, or what leads to its items can't be read.
        """
        self._reader = open_step(run.step_uri(info))
        self._folder = run.orbax_uri(info)
        manifest = self._reader.manifest
        self._plain = None if manifest is None else manifest.plain
        own = self._own()
        self.json: dict[str, Any] = own.get("json", {})
        self.single: bool = own.get("single", False)
        self._kept: dict[str, Any] = own
        trees = [name for name in self._reader.names() if name not in (META_ITEM, *self.json)]
        self.kinds: dict[str, Kind] = {
            **dict.fromkeys(trees, "tree"),
            **dict.fromkeys(self.json, "json"),
            **dict.fromkeys(self._reader.iterators, "iterator"),
        }

    def _own(self) -> dict[str, Any]:
        if self._plain is None:
            own: dict[str, Any] = read_meta(self._reader).get(_META_KEY, {})
            return own
        meta = self._reader.meta()  # by item, unless "meta" is the only one
        named = {META_ITEM: meta} if {*self._plain.json_files} == {META_ITEM} else meta
        single = (
            self._plain.trees.get(SINGLE_ITEM) in _UNNAMED
            if self._plain.trees
            else {*self._plain.json_files} - {"metrics"} == {"default"}
        )
        return {"json": named, "single": single}

    def custom_metadata(self) -> dict[str, Any]:
        """Return the JSON that was saved with the step."""
        if self._plain is None:
            return dict(self._kept.get("custom_metadata", {}))
        return self._reader.custom_metadata()

    def run_metadata(self) -> dict[str, Any]:
        """Return the JSON about the run; for an imported step, that about its folder."""
        if self._plain is None or self._plain.source is None:
            return dict(self._kept.get("metadata", {}))
        folder = self._reader.uri.parent
        files = ObjectStore.open(folder).read_many([ROOT_METADATA, OLD_ROOT_METADATA])
        if (present := files[ROOT_METADATA]) is not None:
            return parse_custom(present.value, path=folder / ROOT_METADATA)
        older = files[OLD_ROOT_METADATA]
        return (
            {} if older is None else parse_json_object(older.value, path=folder / OLD_ROOT_METADATA)
        )

    @property
    def unnamed(self) -> str | None:
        """Item that a call without a name means."""
        for name in (SINGLE_ITEM, "default"):
            if name in self.kinds:
                return name
        return next(iter(self.kinds)) if len(self.kinds) == 1 else None

    @property
    def iterators(self) -> list[str]:
        """Names of the iterators whose position the step has."""
        return sorted(self._reader.iterators)

    def leaves(self, tree: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the logical shape and dtype of every leaf of a tree, by path."""
        return stored_tree(self._reader, tree)

    def texts(self, tree: str) -> Collection[str]:
        """Return the paths of the leaves of a tree that are text."""
        return self._reader.texts(tree).keys()

    def metadata(self, tree: str) -> Any:
        """Return Orbax's metadata of a tree: shape, dtype and sharding of each leaf as stored."""
        name = tree if self._plain is None else self._plain.trees[tree]
        folder = self._folder / name if name else self._folder
        return ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder.orbax_path()))
