"""Items of a step that the manager restores: trees, JSON and iterators by name. Imports JAX."""

from collections.abc import Collection, Mapping
from typing import Any, Final

import jax
import orbax.checkpoint as ocp
from etils import epath
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from cairn.state.checkpointing.modules import open_modules
from cairn.state.checkpointing.restore import check_meta, open_step, read_meta, stored_tree
from cairn.state.checkpointing.trees import flatten
from cairn.state.drop_in.containers import Containers, ContainersJson
from cairn.state.drop_in.item_args import SINGLE_ITEM, Kind, SaveItems
from cairn.state.drop_in.single_values import VALUE, SingleValue
from cairn.storage.arrays.orbax_tree import (
    META_ITEM,
    OLD_ROOT_METADATA,
    ROOT_METADATA,
    StoredTree,
    parse_custom,
    parse_json_object,
)
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.store.objects import ObjectStore

__all__ = ["StoredItems", "as_meta"]

_META_KEY: Final = "checkpoint_manager"
"""Key of a step's JSON item under which the manager stores everything except trees."""

_UNNAMED: Final = ("default", "")
"""Folders in which Orbax stores an item without a name."""


class _OwnJson(TypedDict, total=False):
    """JSON that the manager stores with a step; see `as_meta`."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    json: dict[str, Any]
    single: bool
    custom_metadata: dict[str, Any]
    metadata: dict[str, Any]
    values: dict[str, SingleValue]
    item_metadata: dict[str, Any]
    containers: dict[str, ContainersJson]


_OWN_FIELDS: Final = TypeAdapter(_OwnJson)


def as_meta(
    items: SaveItems, *, custom_metadata: Mapping[str, Any], metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON to save with a step, from which `StoredItems` restores.

    Args:
        items: the items of the save.
        custom_metadata: JSON of the caller about the step.
        metadata: JSON about the run.
    """
    opened = open_modules(items.trees).trees
    containers = {name: Containers.of(tree).to_json() for name, tree in opened.items()}
    own = {
        "json": items.json,
        "single": items.single,
        "custom_metadata": custom_metadata,
        "metadata": metadata,
    }
    parts = {
        "values": items.values,
        "item_metadata": items.custom_metadata,
        "containers": {name: part for name, part in containers.items() if part},
    }
    return {_META_KEY: own | {name: part for name, part in parts.items() if part}}


class StoredItems:
    """Items of a step, whether the manager, another part of Cairn or plain Orbax saved it.

    Attributes:
        kinds: kind of each item, by name.
        json: the items that are JSON, by name.
        single: True if the step was saved as one item without a name.
    """

    def __init__(self, run: Run, info: StepInfo) -> None:
        """Open a step.

        Raises:
            StorageError: the step does not exist any more, or its metadata can't be read.
            CorruptionError: the manager's JSON in it has fields of other types.
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
            **own.get("values", {}),
        }

    def _own(self) -> dict[str, Any]:
        if self._plain is None:
            own: dict[str, Any] = read_meta(self._reader).get(_META_KEY, {})
            check_meta(own, _OWN_FIELDS, path=self._reader.uri)
            return own
        meta = self._reader.meta()  # by item, unless "meta" is the only one
        named = {META_ITEM: meta} if {*self._plain.json_files} == {META_ITEM} else meta
        single = (
            self._plain.trees.get(SINGLE_ITEM) in _UNNAMED and not self._plain.arrays
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
        """Return the JSON about the run; for an imported step, Orbax's metadata of its folder."""
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
        """Name of the item that arguments without a name are for; None if that is ambiguous."""
        for name in (SINGLE_ITEM, "default"):
            if name in self.kinds:
                return name
        return next(iter(self.kinds)) if len(self.kinds) == 1 else None

    @property
    def iterators(self) -> list[str]:
        """Names of the iterators whose position the step has."""
        return sorted(self._reader.iterators)

    def leaves(self, tree: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype that every leaf of a tree had when it was saved, by path."""
        return stored_tree(self._reader, tree)

    def texts(self, tree: str) -> Collection[str]:
        """Return the paths of the leaves of a tree that are text."""
        return self._reader.texts(tree).keys()

    def array_names(self, tree: str) -> Mapping[str, str]:
        """Return Orbax's name of each array of an imported tree, by path; {} for others."""
        return {} if self._plain is None else self._stored(tree).arrays

    def variables(self, tree: str) -> Mapping[str, str]:
        """Return the path at which Orbax has the value of a Variable, by the Variable's path."""
        return {} if self._plain is None else self._stored(tree).variables

    def _stored(self, tree: str) -> StoredTree:
        arrays = self._reader.arrays(tree)
        assert arrays is not None, "only trees are asked for"
        return arrays.tree

    def containers(self, tree: str) -> Containers:
        """Return the containers in which a tree was saved."""
        if self._plain is not None:
            if tree in self._plain.arrays:  # its paths are not those of Orbax
                return Containers([], {}, {})
            return Containers.of(self.placements(tree).tree)
        return Containers.from_json(self._kept.get("containers", {}).get(tree, {}))

    def metadata(self, tree: str) -> Any:
        """Return Orbax's metadata of an item: shape, dtype and sharding of each leaf as stored.

        For an item that is a single array or key, it is the metadata of that leaf.
        """
        metadata = self.placements(tree)
        if tree in self._kept.get("values", {}):
            return metadata.tree[VALUE]
        if self._plain is not None:
            return metadata
        leaves = flatten(metadata.tree)
        containers = self.containers(tree)
        for path in containers.numbers_in(leaves):
            leaf = leaves[path]
            leaves[path] = ocp.metadata.value.ScalarMetadata(
                name=leaf.name, directory=leaf.directory, dtype=leaf.dtype
            )
        return type(metadata).build(
            containers.nest(leaves),
            custom_metadata=self._kept.get("item_metadata", {}).get(tree),
            use_zarr3=metadata.use_zarr3,
        )

    def placements(self, tree: str) -> Any:
        """Return Orbax's metadata of a tree, read from its files; it has the leaves' shardings."""
        name = tree if self._plain is None else self._plain.trees[tree]
        folder = self._folder / name if name else self._folder
        return ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder.orbax_path()))
