"""Layouts of plain Orbax: the checkpoints in a folder, and the items of each.

Releases of Orbax differ. A step's folder is called `<n>` or `<prefix>_<n>`, perhaps padded with
zeros. It has a folder for each item, or a single tree directly. It is committed by a rename, or in
a bucket by a marker file. So the items are found by listing a step's folders.
"""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cairn.storage.arrays.orbax_tree import (
    JSON_FILES,
    STEP_METADATA,
    TREE_METADATA,
    parse_json_object,
    parse_step_metadata,
)
from cairn.storage.errors import (
    CorruptionError,
    InvalidURIError,
    NotACheckpointError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from cairn.storage.orbax_import.links import links_in, refuse_links
from cairn.storage.runs.records.layout import COMMIT_FILE, RUN_FILE
from cairn.storage.runs.records.manifest import PlainStep
from cairn.storage.store.files import FileEntry
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI, check_segment

__all__ = [
    "FolderContents",
    "PlainItems",
    "find_checkpoints",
    "is_among_checkpoints",
    "link_problem",
    "plain_items",
]

_NUMBERED: Final = re.compile(r"(?:.*[_-])?([0-9]{1,18})")
_TEMPORARY: Final = ".orbax-checkpoint-tmp"
_OLD_LEAVES: Final = "checkpoint"
"""Name of a file with all leaves of an item, which the first releases of Orbax and Flax wrote."""

_UNNAMED: Final = ("default", "pytree")
"""Orbax's names of a tree that was saved without a name."""

_ONE_TREE: Final = "state"
"""Cairn's name of such a tree."""

_TREE_HANDLERS: Final = ("PyTreeHandler", "PyTreeCheckpointHandler", "StandardCheckpointHandler")
"""Names of Orbax's handlers that save trees."""

_METRICS: Final = ("metrics", "metrics/metrics")
_COMMITTED_AT: Final = "commit_timestamp_nsecs"
_LATEST_NS: Final = 2**63 - 1
"""Latest accepted time, in nanoseconds since the epoch."""

_NAMED_IN_ERRORS: Final = 8
_OF_A_STEP: Final = {STEP_METADATA, TREE_METADATA, COMMIT_FILE}
_EASYDEL: Final = "easydel-model.parameters"
"""Name of the weights' file in a folder of an older EasyDeL, which is no Orbax checkpoint."""


@dataclass(frozen=True)
class FolderContents:
    """Checkpoints and other entries of a folder.

    Attributes:
        steps: folder of each checkpoint that can be imported, by step.
        problems: a line for each checkpoint that can't be imported; it begins with its name.
        left: a line for each entry that is no checkpoint, or an unfinished one.
        elsewhere: names of links that may be steps -> their targets outside the folder.
    """

    steps: dict[int, StoreURI]
    problems: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)


class PlainItems(NamedTuple):
    """Items of a checkpoint.

    Attributes:
        plain: folders of its trees, and its JSON files.
        others: names of folders that are neither.
        missing: items that Orbax's metadata names and that do not exist.
        committed_ns: time of the commit in nanoseconds since the epoch; None if not recorded.
    """

    plain: PlainStep
    others: tuple[str, ...]
    missing: tuple[str, ...]
    committed_ns: int | None


class _Described(NamedTuple):
    """Orbax's metadata of a whole checkpoint.

    Attributes:
        handlers: name of the handler that saved each item, by item; empty for a single tree.
        committed_ns: time of the commit in nanoseconds since the epoch; None if not recorded.
    """

    handlers: Mapping[str, str]
    committed_ns: int | None


def find_checkpoints(folder: StoreURI, step: int | None = None) -> FolderContents:
    """Return the checkpoints in a folder; or the folder itself, if it is a checkpoint.

    Args:
        folder: a folder of checkpoints, or a single checkpoint.
        step: step of a single checkpoint; None: the number in the folder's name, or 0.

    Raises:
        NotFoundError: there is no such folder.
        NotACheckpointError: there is no checkpoint in the folder; the message names what is there.
        InvalidURIError: the folder is a run or inside one; or `step` is passed for several
            checkpoints.
    """
    _refuse_runs(folder)
    entries = open_files(folder).list()
    if not entries:
        raise NotFoundError(
            "nothing to adopt",
            path=folder,
            expected="a folder with checkpoints of Orbax",
            found="nothing",
            next_step="Check the address.",
        )
    names = {entry.name for entry in entries}
    if step is not None:
        _refuse_many(folder, entries)
    if step is not None or names & {TREE_METADATA, STEP_METADATA} or _is_old_step(folder, entries):
        return _one(folder, step)
    return _many(folder, entries)


def _many(folder: StoreURI, entries: Sequence[FileEntry]) -> FolderContents:
    """Return the checkpoints in a folder that may have several."""
    steps: dict[int, list[str]] = {}
    links = links_in(folder)
    shown = {entry.name for entry in entries if entry.is_dir}
    left = [f"{name}: a link to {to}" for name, to in links.items() if name in shown]
    elsewhere = {
        name: to for name, to in links.items() if name not in shown and _NUMBERED.fullmatch(name)
    }
    others = []
    for name in _folders(entry for entry in entries if entry.name not in links):
        numbered = _NUMBERED.fullmatch(name)
        if _TEMPORARY in name:
            left.append(f"{name}: not committed")
        elif not _is_checkpoint(folder / name):
            inner = _folders(open_files(folder / name).list())
            steps_inside = filter(_NUMBERED.fullmatch, inner)
            if any(_is_checkpoint(folder / name / child) for child in steps_inside):
                others.append(f"{name}: a folder of checkpoints; adopt it by itself")
            elif numbered is not None:
                others.append(f"{name}: no checkpoint of Orbax")
        elif numbered is None:
            left.append(f"{name}: a checkpoint without a number; adopt that folder by itself")
        elif not _is_committed(folder / name):
            left.append(f"{name}: not committed")
        else:
            steps.setdefault(int(numbered[1]), []).append(name)
    folders = {number: folder / same[0] for number, same in sorted(steps.items()) if len(same) == 1}
    twice = {number: same for number, same in steps.items() if number not in folders}
    problems = [
        f"{name}: one of {len(same)} folders of step {number}: {', '.join(same)}"
        for number, same in twice.items()
        for name in same
    ]
    if not folders:
        problems += [link_problem(name, to) for name, to in elsewhere.items()]
        raise _no_checkpoints(
            folder, (child.name for child in entries), [*left, *others, *problems]
        )
    left = sorted([*left, *others])
    return FolderContents(folders, tuple(sorted(problems)), tuple(left), elsewhere)


def link_problem(name: str, leads_to: str) -> str:
    """Return the line about a step that is a link."""
    return f"{name}: a link to {leads_to}; adopt that folder by itself"


def _refuse_many(folder: StoreURI, entries: Iterable[FileEntry]) -> None:
    """Raise InvalidURIError if a folder for which a step was passed has several checkpoints."""
    names = [name for name in _folders(entries) if _NUMBERED.fullmatch(name)]
    many = [name for name in names if _is_checkpoint(folder / name)]
    if many:
        raise InvalidURIError(
            "a step is given for many",
            path=folder,
            expected="one checkpoint, to have this step",
            found=f"a folder of checkpoints: {', '.join(many[:_NAMED_IN_ERRORS])}",
            next_step="Leave the step out, or give the folder of one of them.",
        )


def is_among_checkpoints(folder: StoreURI) -> bool:
    """Return True if a folder is in a checkpoint or beside one; Cairn must not write there."""
    entries = open_files(folder.parent).list()
    if {entry.name for entry in entries} & _OF_A_STEP or _is_old_step(folder.parent, entries):
        return True
    beside = _folders(entries)
    others = (folder.parent / name for name in beside if name != folder.name)
    return _NUMBERED.fullmatch(folder.name) is not None or any(map(_is_checkpoint, others))


def plain_items(step: StoreURI) -> PlainItems:
    """Return the items of the checkpoint in the folder `step`.

    Raises:
        NotACheckpointError: the folder has neither a readable tree nor JSON.
        UnsupportedFormatError: an early release wrote all leaves in one file; or Cairn saved it; or
            it has links to folders, or to files outside of it.
        CorruptionError: the metadata of a tree that Orbax saved is missing.
    """
    refuse_links(step)
    described = _described(step)
    files = open_files(step)
    entries = files.list()
    if any(entry.name == TREE_METADATA for entry in entries):
        return PlainItems(PlainStep(trees={_ONE_TREE: ""}), (), (), described.committed_ns)
    trees: list[str] = []
    json_files: dict[str, str] = {}
    old, others = [], []
    for name in (entry.name for entry in entries if entry.is_dir):
        inner = {entry.name for entry in files.list(name) if not entry.is_dir}
        present = [file for file in JSON_FILES if file in inner]
        if _TEMPORARY in name:
            others.append(name)
        elif TREE_METADATA in inner:
            trees.append(name)
        elif present:
            json_files[name] = f"{name}/{present[0]}"
        elif name == _METRICS[0] and "metrics" in inner:
            json_files[name] = _METRICS[1]
        elif _OLD_LEAVES in inner:
            old.append(name)
        else:
            others.append(name)
    if old or (not trees and _OLD_LEAVES in {entry.name for entry in entries}):
        raise UnsupportedFormatError(
            "a checkpoint of the first releases",
            path=step,
            expected=f"items with {TREE_METADATA}",
            found=f"all leaves in one file: {', '.join(f'{name}/{_OLD_LEAVES}' for name in old)}"
            if old
            else f"all leaves in one file: {_OLD_LEAVES}",
            next_step="Restore it with the Orbax or Flax that wrote it, and save it again.",
        )
    if not trees and not json_files:
        raise _no_checkpoints(step, {entry.name for entry in entries})
    _refuse_undescribed(step, others, described.handlers)
    unnamed = [name for name in trees if name in _UNNAMED]
    renamed = len(unnamed) == 1 and _ONE_TREE not in {*trees, *json_files}
    plain = PlainStep(
        trees={_ONE_TREE if renamed and name in _UNNAMED else name: name for name in trees},
        json_files=json_files,
    )
    missing = described.handlers.keys() - {*trees, *json_files, *others}
    return PlainItems(plain, tuple(others), tuple(sorted(missing)), described.committed_ns)


def _refuse_undescribed(step: StoreURI, others: Iterable[str], handlers: Mapping[str, str]) -> None:
    """Raise CorruptionError if Orbax saved some of `others` as trees, whose metadata is missing."""
    kinds = {name: handlers.get(name, "").rpartition(".")[2] for name in others}
    lost = [f"{name}/{TREE_METADATA}" for name, kind in kinds.items() if kind in _TREE_HANDLERS]
    if lost:
        raise CorruptionError(
            "trees that nothing describes",
            path=step,
            expected=", ".join(lost),
            found="none",
            next_step="Restore these files, or move the items away, which are left out then.",
        )


def _one(folder: StoreURI, step: int | None) -> FolderContents:
    """Return the content of a folder that is itself a checkpoint."""
    if not _is_checkpoint(folder):
        raise _no_checkpoints(folder, _names(folder))
    if not _is_committed(folder):
        raise _no_checkpoints(folder, _names(folder), [f"{folder.name}: not committed"])
    numbered = _NUMBERED.fullmatch(folder.name)
    if step is None:
        step = int(numbered[1]) if numbered else 0
    return FolderContents({step: folder})


def _is_old_step(folder: StoreURI, entries: Iterable[FileEntry]) -> bool:
    """Return True if a folder named by a number has items but no metadata of the whole step."""
    folders = _folders(entries)
    if not folder.name.isdecimal() or any(map(_NUMBERED.fullmatch, folders)):
        return False
    # A tree with STEP_METADATA is a checkpoint by itself.
    return any(
        TREE_METADATA in names and STEP_METADATA not in names
        for names in (_names(folder / name) for name in folders)
    )


def _is_checkpoint(folder: StoreURI) -> bool:
    """Return True if a folder has a step's metadata, a tree, or items with trees.

    Only the names of its entries, and of those of its subfolders, are read. Subfolders named like
    steps do not count as items.
    """
    entries = open_files(folder).list()
    if {entry.name for entry in entries} & {STEP_METADATA, TREE_METADATA, _OLD_LEAVES}:
        return True
    # Trees whose names are numbers are steps, and `folder` is their parent.
    items = (name for name in _folders(entries) if not _NUMBERED.fullmatch(name))
    return any(_names(folder / name) & {TREE_METADATA, _OLD_LEAVES} for name in items)


def _folders(entries: Iterable[FileEntry]) -> list[str]:
    """Return the names of folders; names that are not allowed in addresses are left out."""
    names = []
    for entry in entries:
        with contextlib.suppress(InvalidURIError):
            names += [check_segment(entry.name, within="")] * entry.is_dir
    return names


def _names(folder: StoreURI) -> set[str]:
    return {entry.name for entry in open_files(folder).list()}


def _is_committed(step: StoreURI) -> bool:
    """Return True if a step is committed: on a disk by its final name, in a bucket by a marker."""
    if step.scheme == "file":
        return _TEMPORARY not in step.name
    return COMMIT_FILE in _names(step)


def _described(step: StoreURI) -> _Described:
    """Return Orbax's metadata of a checkpoint; it is empty if there is none.

    Raises:
        UnsupportedFormatError: Cairn saved the checkpoint, so it must be read by its run.
    """
    content = ObjectStore.open(step).read(STEP_METADATA)
    if content is None:
        return _Described({}, None)
    path = step / STEP_METADATA
    if parse_step_metadata(content.value, path=path).cairn_items:
        raise UnsupportedFormatError(
            "a step that Cairn has saved",
            path=path,
            expected="one that plain Orbax has saved",
            found="a copy without its run",
            next_step="Copy the run as a whole, or fork the step there.",
        )
    parsed = parse_json_object(content.value, path=path)
    handlers, committed_at = parsed.get("item_handlers"), parsed.get(_COMMITTED_AT)
    return _Described(
        {name: str(handler) for name, handler in handlers.items()}
        if isinstance(handlers, dict)
        else {},
        committed_at if isinstance(committed_at, int) and 0 < committed_at <= _LATEST_NS else None,
    )


def _refuse_runs(folder: StoreURI) -> None:
    """Raise InvalidURIError if the folder is a run or inside one."""
    at = folder
    while at.path:
        run = None
        with contextlib.suppress(StorageError):  # a parent may be unreadable
            run = ObjectStore.open(at).read(RUN_FILE)
        if run is not None:
            raise InvalidURIError(
                "nothing to adopt",
                path=folder,
                expected="a folder that plain Orbax wrote",
                found="a run of Cairn's" if at == folder else f"a folder of the run {at}",
                next_step=f"Use the run {at} as it is; a fork copies one of its steps.",
            )
        at = at.parent


def _no_checkpoints(
    folder: StoreURI, names: Iterable[str], problems: Iterable[str] = ()
) -> NotACheckpointError:
    sorted_names = sorted(names)
    next_step = "Give the folder that Orbax was given, or one step of it."
    if _EASYDEL in sorted_names:
        next_step = "EasyDeLState.from_pretrained reads the weights; save that state to a run."
    more = ", …" if len(sorted_names) > _NAMED_IN_ERRORS else ""
    return NotACheckpointError(
        "nothing to adopt",
        path=folder,
        expected=f"a checkpoint of Orbax, or a folder of them: folders with {TREE_METADATA}",
        found=f"{', '.join(sorted_names[:_NAMED_IN_ERRORS])}{more}" or "nothing",
        next_step=next_step,
        problems=sorted(problems),
    )
