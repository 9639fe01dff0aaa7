"""Snapshot of a run's records, read with as few requests as possible."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from cairn.service.catalog.change_tokens import record_tokens
from cairn.service.catalog.configs import flat_config
from cairn.service.catalog.events.lost_records import is_lifted, seen_deletion
from cairn.service.catalog.models import RecordKind as Kind
from cairn.service.catalog.step_records import damage_body
from cairn.service.schemas import CheckpointState, Deletion, LostRecord
from cairn.storage.errors import StorageError
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.records.aliases import Alias
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.layout import (
    annotation_file,
    manifest_file,
    parse_alias_file,
    trash_file,
)
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.runs.records.placed import UNREADABLE, judge_records, parse_record
from cairn.storage.runs.records.run_info import RunInfo
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepState
from cairn.storage.runs.trash import Tombstone, read_lifted
from cairn.storage.store.clock import from_rfc3339
from cairn.storage.store.records import sha256_of

logger = logging.getLogger(__name__)

Key = tuple[int, int]
"""(step, attempt), which identifies a step of a run."""

Stamps = Mapping[Kind, str | None]
"""Change tokens of a step's records when they were read; "": the record does not exist."""

Columns = dict[str, Any]
"""Columns of a checkpoint's row, by name."""

_FILES: Final = {"manifest": manifest_file, "annotation": annotation_file, "deletion": trash_file}
_EMPTY: Final[Mapping[Kind, Columns]] = {
    "manifest": {
        "created": None,
        "nbytes": None,
        "leaves": None,
        "items": [],
        "iterators": {},
        "manifest_digest": None,
        "model_type": None,
        "source": None,
    },
    "annotation": {**Annotation().entries(), "verified": None, "damaged": None},
    "deletion": {"deletion": None},
}


@dataclass(frozen=True)
class Snapshot:
    """Snapshot of a run in its store.

    Attributes:
        info: Record of the run itself.
        states: State of every step.
        changed: Columns of steps with new or changed records: all columns of a new step, else
            `stamps` and the changed ones.
        aliases: All aliases, deleted ones too.
        unreadable_aliases: Names of aliases whose records are unreadable.
        problems: Problems of the run's records; unreadable records are left out.
        due: Time at which an unfinished step counts as abandoned.
        lost_deletions: Tombstones that were seen and are gone, though the steps are there and
            nobody has undeleted them.
        config: Config of the model of the newest step among those in `changed`, with the key of
            that step; None: none of them has one.
    """

    info: RunInfo
    states: Mapping[Key, CheckpointState]
    changed: Mapping[Key, Columns]
    aliases: tuple[Alias, ...]
    unreadable_aliases: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()
    due: datetime | None = None
    lost_deletions: tuple[LostRecord, ...] = ()
    config: tuple[Key, dict[str, float | str]] | None = None


def take_snapshot(
    run: Run,
    info: RunInfo,
    indexed: Mapping[Key, Stamps],
    deletions: Mapping[Key, Mapping[str, Any]] = MappingProxyType({}),
) -> Snapshot:
    """Read a run: the names of all records, and the content of those that have changed.

    An unreadable record is left out and reported; the others are read nonetheless.

    Args:
        run: Run to read.
        info: Record of the run itself.
        indexed: Steps in the catalog, and the change tokens of their records.
        deletions: Content of the tombstones that the catalog has seen.
    """
    # First, so that a record which changes meanwhile is read again next time.
    stamps = record_tokens(run)
    history = run.history()
    due = _lease_end(run)
    unpublished = {
        (record.step, record.attempt): record.state for record in run.unpublished(history)
    }
    seen = _Records(run, stamps, indexed, dict(history.problems))
    seen.read("manifest", history.published)
    readable = [key for key in history.published if manifest_file(*key) not in seen.problems]
    # Unreadable steps count when states are computed: they supersede others all the same.
    states = unpublished | dict(history.states(readable))
    states = {key: state for key, state in states.items() if key not in seen.gone}
    seen.read("annotation", [key for key in readable if key in states])
    seen.read("deletion", [key for key in states if states[key] is StepState.TRASHED])
    seen.forget_others()
    there = {*history.published}.difference(history.deleted)
    gone = {key: seen_deletion(key, record) for key, record in deletions.items() if key in there}
    # After the history: an undelete writes its note before it removes the tombstone.
    lifted = read_lifted(run, gone)
    aliases, unreadable = run.aliases.judge(deleted=True)
    problems = seen.problems | unreadable
    for error in problems.values():
        logger.warning("left out of the catalog: %s", error)
    configs = [
        (key, columns.pop("config")) for key, columns in seen.columns.items() if "config" in columns
    ]
    return Snapshot(
        info=info,
        states={key: CheckpointState(state.value) for key, state in states.items()},
        changed={
            key: {"stamps": {}, **_ALL_EMPTY} | seen.columns.get(key, {})
            if key not in indexed
            else seen.columns[key]
            for key in states
            if key not in indexed or key in seen.columns
        },
        aliases=tuple(aliases),
        unreadable_aliases=frozenset(filter(None, map(parse_alias_file, unreadable))),
        problems=tuple(str(problems[name]) for name in sorted(problems)),
        due=due if StepState.IN_FLIGHT in unpublished.values() else None,
        lost_deletions=tuple(
            record for key, record in gone.items() if not is_lifted(record, lifted.get(key))
        ),
        config=configs[0] if configs else None,
    )


class _Records:
    """Reader of the changed records of a run's steps.

    Attributes:
        columns: Columns that were read, with the change tokens of all records of the step.
        problems: Errors of records, by name.
        gone: Steps whose manifest was deleted after it was listed.
    """

    def __init__(
        self,
        run: Run,
        stamps: Mapping[str, str | None],
        indexed: Mapping[Key, Stamps],
        problems: dict[str, StorageError],
    ) -> None:
        self.columns: dict[Key, Columns] = {}
        self.problems = problems
        self.gone: set[Key] = set()
        self._run = run
        self._stamps = stamps
        self._known = indexed
        self._current: dict[Kind, set[Key]] = {}

    def read(self, kind: Kind, keys: Iterable[Key]) -> None:
        """Read the changed records of a kind, of the steps `keys`."""
        self._current[kind] = set(keys)
        names = {_FILES[kind](*key): key for key in self._current[kind]}
        # A manifest listed just now may be missing in the older list of change tokens.
        if kind == "manifest":
            stamps = {name: self._stamps.get(name) for name in names}
        else:
            stamps = {name: self._stamps.get(name, "") for name in names}
        changed = [
            name
            for name, key in names.items()
            if stamps[name] is None or stamps[name] != self._known.get(key, {}).get(kind)
        ]
        parsed, unreadable = _PARSERS[kind](
            self._run, [path for path in changed if stamps[path] != ""]
        )
        self.problems |= unreadable
        for name in changed:
            if name in parsed or kind != "manifest":
                stamp, columns = stamps[name], parsed.get(name, _EMPTY[kind])
                # No change token: report it at each refresh, and keep the known damage.
                if name in unreadable:
                    stamp, columns = None, {**columns}
                    columns.pop("damaged", None)
                self._note(names[name], kind, columns, stamp)
            elif name not in unreadable:
                self.gone.add(names[name])

    def forget_others(self) -> None:
        """Reset the columns of records that the catalog has and the store no longer has."""
        for key, stamps in self._known.items():
            for kind in stamps:
                if key not in self._current[kind]:
                    self._note(key, kind, _EMPTY[kind], None)

    def _note(self, key: Key, kind: Kind, columns: Columns, stamp: str | None) -> None:
        noted = self.columns.setdefault(key, {"stamps": dict(self._known.get(key, {}))})
        noted.update(columns)
        if key in self._current[kind]:
            noted["stamps"][kind] = stamp
        else:
            del noted["stamps"][kind]


Found = tuple[dict[str, Columns], dict[str, StorageError]]


def _manifests(run: Run, names: Iterable[str]) -> Found:
    """Read manifests; return their columns, and the errors of unreadable ones."""
    read: dict[str, Columns] = {}
    unreadable: dict[str, StorageError] = {}
    newest: tuple[int, int, str, Mapping[str, Any]] | None = None
    for name, stored in run.objects.read_each(names):
        if stored is None:  # deleted after it was listed
            continue
        try:
            manifest = parse_record(run.objects, name, Manifest, stored)
        except UNREADABLE as exc:
            unreadable[name] = exc.without_traceback()
            continue
        read[name] = {
            "created": from_rfc3339(manifest.created),
            "nbytes": manifest.nbytes,
            "leaves": manifest.leaf_count,
            "items": list(manifest.items),
            "iterators": dict(manifest.iterators),
            "manifest_digest": sha256_of(stored.value),
            "model_type": manifest.model.model_type if manifest.model else None,
            "source": manifest.source,
        }
        if manifest.model is not None and manifest.model.config:
            at = manifest.attempt, manifest.step
            if newest is None or at > newest[:2]:
                newest = (*at, name, manifest.model.config)
    if newest is not None:
        read[newest[2]]["config"] = flat_config(newest[3])
    return read, unreadable


def _annotations(run: Run, names: Iterable[str]) -> Found:
    annotations, unreadable = judge_records(run.objects, names, Annotation.parse)
    return {
        name: {
            **annotation.entries(),
            "verified": None if annotation.verified is None else from_rfc3339(annotation.verified),
            "damaged": None
            if annotation.damaged is None
            else damage_body(annotation.damaged).model_dump(mode="json"),
        }
        for name, annotation in annotations.items()
    }, unreadable


def _tombstones(run: Run, names: Iterable[str]) -> Found:
    tombstones, unreadable = judge_records(run.objects, names, Tombstone.parse)
    kept = set(Deletion.model_fields)
    return {
        name: {"deletion": tombstone.model_dump(mode="json", include=kept)}
        for name, tombstone in tombstones.items()
    }, unreadable


_PARSERS: Final[Mapping[Kind, Callable[[Run, Iterable[str]], Found]]] = {
    "manifest": _manifests,
    "annotation": _annotations,
    "deletion": _tombstones,
}
_ALL_EMPTY: Final = {name: value for one in _EMPTY.values() for name, value in one.items()}


def _lease_end(run: Run) -> datetime | None:
    with contextlib.suppress(*UNREADABLE):
        lease = read_lease(run.objects)
        return None if lease is None else from_rfc3339(lease.expires)
    return None
