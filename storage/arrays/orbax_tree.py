"""Orbax's JSON metadata of a step, parsed and written: its items, and an item's leaves.

Orbax describes a checkpoint in two files: `_CHECKPOINT_METADATA` (the items, and the commit time)
and, in each item that is a tree, `_METADATA` (key path and array format of every leaf). The name of
a leaf's array is its keys joined by ".".

In steps that Cairn saved, the custom metadata in `_CHECKPOINT_METADATA` has the names of all items,
and the leaves that are stored in another form (see `leaf_forms`).

Source: orbax.checkpoint 0.12, `_src/metadata/{step_metadata_serialization,tree}.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cairn.storage.arrays.leaf_paths import keys_of, path_of
from cairn.storage.errors import CorruptionError, UnsupportedFormatError
from cairn.storage.store.bounds import check_json_size

STEP_METADATA = "_CHECKPOINT_METADATA"
ROOT_METADATA = "metadata/_ROOT_METADATA"
"""Path of Orbax's metadata of a folder of steps."""

OLD_ROOT_METADATA = "metadata/metadata"
"""Path of that metadata in older Orbax releases, which hold only the custom metadata there."""

TREE_METADATA = "_METADATA"
STRINGS_FILE = "_strings.json"
ARRAY_METADATA = "array_metadatas"
"""Folder in an item with chunking and extension data of its arrays, one file per process."""

JSON_FILES = ("data.json", "metadata")
"""File names of Orbax's JSON handler; the second is that of its older API."""

_SEQUENCE_KEY = 1
_DICT_KEY = 2
_VALUE = "value"
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": []}


CUSTOM_KEY = "cairn"
"""Key of Cairn's part of Orbax's custom metadata: items, and leaves stored in another form."""

META_ITEM = "meta"
"""Name of the JSON item; all others are trees."""


class StoredForm(NamedTuple):
    """Stored form of a leaf that is not stored in its own dtype and shape.

    Attributes:
        kind: "empty" (not stored: it has no elements), "widened" (uint8 of equal value), "bits"
            (uint8 of equal bits), "packed" (uint8 of two elements each, along the axis that is half
            as long; see `four_bits`) or "key" (uint32 words of a typed PRNG key).
        shape: logical shape.
        dtype: logical dtype by name; for a key the name of its implementation.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StepMetadata:
    """Content of `_CHECKPOINT_METADATA`.

    Attributes:
        items: names of the step's items; None if it has no such list (older Orbax).
        committed: whether Orbax recorded the time of the commit.
        cairn_items: items that Cairn saved; those without a stored leaf have no files.
        forms: stored forms of leaves that are not stored as they are, by item and path.
        meta_digest: digest of the JSON item's canonical form; None if it was not recorded.
    """

    items: tuple[str, ...] | None
    committed: bool
    cairn_items: frozenset[str] = frozenset()
    forms: Mapping[str, Mapping[str, StoredForm]] = field(default_factory=dict)
    meta_digest: str | None = None


@dataclass(frozen=True)
class StoredTree:
    """Content of an item's `_METADATA`.

    Attributes:
        arrays: path of each leaf that is an array -> the array's name.
        strings: path of each leaf that is text -> its key in `_strings.json`.
        empties: path of each empty container or None -> that value.
        sequences: paths of the containers that are lists or tuples.
        zarr3: whether the arrays are zarr version 3; if not, version 2.
        ocdbt: whether the arrays are in an OCDBT database; if not, each has a folder.
        sparse: whether chunks equal to the fill value may be absent.
        variables: new path of a leaf that `without_variables` moved -> its path before.
        renamed: path of a leaf in old manifests, which joined keys without escapes -> its path now,
            where the two differ.
    """

    arrays: Mapping[str, str] = field(default_factory=dict)
    strings: Mapping[str, str] = field(default_factory=dict)
    empties: Mapping[str, Any] = field(default_factory=dict)
    sequences: frozenset[str] = frozenset()
    zarr3: bool = True
    ocdbt: bool = True
    sparse: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def current(self, path: str) -> str:
        """Return the current path of the leaf that a manifest, perhaps an old one, calls `path`."""
        return path if path in self.arrays else self.renamed.get(path, path)

    def without_variables(self) -> StoredTree:
        """Return this tree with the values of Variables at the Variables' own paths.

        Older releases of Flax saved an `nnx.State` with a single child "value" below each Variable.
        """
        nodes: set[str] = set()
        for path in (*self.arrays, *self.strings, *self.empties):
            while path and path not in nodes:
                nodes.add(path)
                path = path.rpartition("/")[0]
        children = Counter(node.rpartition("/")[0] for node in nodes)

        def shown(path: str) -> str:
            variable, _, last = path.rpartition("/")
            return variable if last == _VALUE and variable and children[variable] == 1 else path

        return replace(
            self,
            arrays={shown(path): name for path, name in self.arrays.items()},
            variables={shown(path): path for path in self.arrays if shown(path) != path},
        )


def array_name(path: str) -> str:
    """Return Orbax's name of the array of the leaf at `path`."""
    return ".".join(keys_of(path)) if "%" in path else path.replace("/", ".")


def tree_metadata(leaves: Mapping[str, tuple[int, ...] | None]) -> bytes:
    """Return the content of `_METADATA` for a tree of dicts.

    Args:
        leaves: path -> shape of the shards of a `jax.Array`; None for a NumPy array.
    """
    entries = {}
    for path, write_shape in leaves.items():
        keys = keys_of(path)
        value: dict[str, Any] = {
            "value_type": "np.ndarray" if write_shape is None else "jax.Array",
            "skip_deserialize": False,
        }
        if write_shape is not None:
            value["write_shape"] = list(write_shape)
        entries[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": value,
        }
    return json.dumps(
        {
            "tree_metadata": entries,
            "use_ocdbt": True,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    ).encode()


def parse_step_metadata(data: bytes, *, path: object) -> StepMetadata:
    """Return the parsed content of `_CHECKPOINT_METADATA`.

    Raises:
        CorruptionError: the file is not JSON of the expected form.
        UnsupportedFormatError: a newer Cairn wrote it.
    """
    parsed = parse_json_object(data, path=path)
    handlers = parsed.get("item_handlers")
    try:
        custom = dict((parsed.get("custom_metadata") or {}).get(CUSTOM_KEY) or {})
        version = custom.get("version", 1)
        if version != 1:
            raise UnsupportedFormatError(
                "unknown version",
                path=path,
                expected="version 1 of Cairn's part",
                found=f"version {version!r}",
                next_step="Upgrade Cairn to the release that wrote it, or a later one.",
            )
        cairn_items = frozenset(map(str, custom.get("items", ())))
        digest = custom.get("meta_digest")
        forms = {
            str(item): {
                str(leaf): StoredForm(str(kind), tuple(map(int, shape)), str(dtype))
                for leaf, (kind, shape, dtype) in by_path.items()
            }
            for item, by_path in custom.get("forms", {}).items()
        }
    except UnsupportedFormatError:
        raise
    except (TypeError, ValueError, AttributeError) as exc:
        raise _unexpected(path, "items, and forms of [kind, shape, dtype]", exc) from exc
    items = tuple(sorted({*handlers, *cairn_items})) if isinstance(handlers, dict) else None
    committed = parsed.get("commit_timestamp_nsecs") is not None
    return StepMetadata(
        items, committed, cairn_items, forms, None if digest is None else str(digest)
    )


def parse_custom(data: bytes, *, path: object) -> dict[str, Any]:
    """Return the `custom_metadata` of Orbax's description of a step, or of a folder of steps.

    Raises:
        CorruptionError: the file is not JSON of the expected form.
    """
    custom = parse_json_object(data, path=path).get("custom_metadata") or {}
    if not isinstance(custom, dict):
        raise _unexpected(path, "custom_metadata of names", TypeError(type(custom).__name__))
    return custom


def parse_tree_metadata(data: bytes, *, path: object) -> StoredTree:
    """Return the parsed content of an item's `_METADATA`.

    Raises:
        CorruptionError: the file is not JSON of the expected form.
        UnsupportedFormatError: two leaves have the same path, or some are in Orbax's aggregate
            file.
    """
    parsed = parse_json_object(data, path=path)
    arrays: dict[str, str] = {}
    strings: dict[str, str] = {}
    empties: dict[str, Any] = {}
    sequences: set[str] = set()
    renamed: dict[str, str] = {}
    aggregated: list[str] = []
    try:
        for entry in parsed["tree_metadata"].values():
            keys = [str(key["key"]) for key in entry["key_metadata"]]
            kinds = [key["key_type"] for key in entry["key_metadata"]]
            leaf = path_of(keys)
            if (joined := "/".join(keys)) != leaf:
                renamed[joined] = leaf
            if leaf in arrays or leaf in strings or leaf in empties:
                raise UnsupportedFormatError(
                    "ambiguous tree",
                    path=path,
                    expected="one leaf per path",
                    found=f"two leaves at {leaf!r}",
                    next_step="Save again with keys that are not empty, each a text of its own.",
                )
            if _SEQUENCE_KEY in kinds:
                sequences.update(
                    path_of(keys[:depth])
                    for depth, kind in enumerate(kinds)
                    if kind == _SEQUENCE_KEY
                )
            value = entry["value_metadata"]
            name = ".".join(keys)
            if value.get("value_type") == "string":
                strings[leaf] = name
            elif value.get("skip_deserialize"):
                if value.get("value_type") in _ARRAYS:
                    aggregated.append(leaf)
                empties[leaf] = _EMPTY.get(value.get("value_type"))
            else:
                arrays[leaf] = name
        if aggregated:
            raise UnsupportedFormatError(
                "aggregated leaves",
                path=path,
                expected="an array for each leaf",
                found=f"{len(aggregated)} that SaveArgs(aggregate=True) of an older Orbax or Flax "
                f"put into one msgpack file: {', '.join(map(repr, sorted(aggregated)[:5]))}",
                next_step="Restore the step with Orbax, and save it again by a new release.",
            )
        return StoredTree(
            arrays,
            strings,
            empties,
            frozenset(sequences),
            zarr3=bool(parsed.get("use_zarr3", False)),
            ocdbt=bool(parsed.get("use_ocdbt", True)),
            sparse=not parsed.get("store_array_data_equal_to_fill_value", False),
            renamed=renamed,
        )
    except (KeyError, TypeError, AttributeError) as exc:
        expected = "tree_metadata with key_metadata and value_metadata per leaf"
        raise _unexpected(path, expected, exc) from exc


def parse_key_kinds(data: bytes, *, path: object) -> dict[str, str]:
    """Return the PRNG implementation of each array of typed keys, by the array's name.

    Args:
        data: a file of the item's folder `ARRAY_METADATA`.
        path: the file, for errors.

    Raises:
        CorruptionError: the file is not JSON of the expected form.
    """
    parsed = parse_json_object(data, path=path)
    kinds: dict[str, str] = {}
    try:
        for entry in parsed["array_metadatas"]:
            metadata = entry["array_metadata"]
            kind = (metadata.get("ext_metadata") or {}).get("random_key_impl")
            if kind is not None:
                kinds[str(metadata["param_name"])] = str(kind)
    except (KeyError, TypeError, AttributeError) as exc:
        raise _unexpected(path, "array_metadatas with the name of each array", exc) from exc
    return kinds


def nest(leaves: Mapping[str, Any], sequences: frozenset[str]) -> Any:
    """Return the nested containers of a tree, rebuilt from its leaves.

    Args:
        leaves: values by path; the path "" alone is a tree that is one leaf.
        sequences: paths of the containers that are lists; all others are dicts.
    """
    if set(leaves) == {""}:
        return leaves[""]
    groups: dict[str, dict[str, Any]] = {}
    for path, value in leaves.items():
        head, _, rest = path.partition("/")
        groups.setdefault(head, {})[rest] = value
    inner = {
        head: nest(
            group,
            frozenset(path[len(head) + 1 :] for path in sequences if path.startswith(f"{head}/"))
            | (frozenset({""}) if head in sequences else frozenset()),
        )
        for head, group in groups.items()
    }
    if "" in sequences:
        return [inner[head] for head in sorted(inner, key=int)]
    return {head and keys_of(head)[0]: value for head, value in inner.items()}


def parse_json_object(data: bytes, *, path: object) -> dict[str, Any]:
    """Return a parsed JSON object.

    Raises:
        CorruptionError: the bytes are no JSON object, or are nested too deep or too large.
    """
    check_json_size(data, path)
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise _unexpected(path, "JSON", exc) from exc
    if not isinstance(parsed, dict):
        raise _unexpected(path, "a JSON object", TypeError(type(parsed).__name__))
    return parsed


def _unexpected(path: object, expected: str, exc: Exception) -> CorruptionError:
    return CorruptionError(
        "unreadable metadata",
        path=path,
        expected=expected,
        found=f"{type(exc).__name__}: {exc}",
        next_step="Restore the file, or use another step.",
    )
