"""Policies of a root: records of what control planes do to its runs, and of what they refuse.

A policy is one record in the folder `.cairn/policies` of the root, which no run can be called. A
control plane gives its kind and its fields their meaning. A deletion leaves a tombstone, so that
sequence numbers go on: who has seen an earlier policy of the same name changes no later one.
"""

import re
import secrets
from typing import Annotated, ClassVar, Final, Self

from pydantic import Field

from cairn.storage.errors import (
    CorruptionError,
    InvalidURIError,
    PreconditionFailedError,
    StorageError,
    UnsupportedFormatError,
)
from cairn.storage.runs.records.placed import UNREADABLE
from cairn.storage.store.bounds import FreeJson
from cairn.storage.store.clock import Clock, Moment, rfc3339, utc_now
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.records import Record, RecordLocation
from cairn.storage.store.uri import StoreURI

__all__ = ["MAX_POLICIES", "POLICIES", "Policies", "PolicyRecord", "policy_file"]

POLICIES: Final = ".cairn/policies/"
"""Folder of the records in the root."""

MAX_POLICIES: Final = 200
"""Most records of a root that are read, tombstones included."""

_FILE: Final = re.compile(r"([a-z]{1,32})\.([A-Za-z0-9][A-Za-z0-9._-]{0,127})\.json")


class PolicyRecord(Record):
    """Policy as stored.

    Attributes:
        kind: kind of the policy, such as "schedule".
        name: name of the policy, unique among those of its kind.
        fields: its other fields; a tombstone has none.
        by: name of who set or deleted it last.
        at: time of that, RFC 3339 in UTC.
        sequence: number of changes so far, deletions included; the ETag of the policy.
        id: unique text that a policy has from its creation to its deletion.
        deleted: True for a tombstone.
        token: unique text of this write, by which a writer recognizes its own record.
    """

    FORMAT: ClassVar[str] = "cairn.policy"

    kind: str
    name: str
    fields: FreeJson = Field(default_factory=dict)
    by: Annotated[str, Field(max_length=2000)] = ""
    at: Moment
    sequence: Annotated[int, Field(ge=1)]
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    deleted: bool = False
    token: str = ""

    @classmethod
    def parse(cls, data: bytes, path: object, location: RecordLocation | None = None) -> Self:
        """Return a policy, parsed as by `Record.parse`; its kind and name must fit its place."""
        policy = super().parse(data, path, location)
        own = f"{POLICIES}{policy.kind}.{policy.name}.json"
        if location is not None and own != location.key:
            raise CorruptionError(
                "the policy of another place",
                path=path,
                expected=f"the record {location.key}",
                found=f"{policy.kind[:100]} {policy.name[:100]!r}",
                next_step="Remove the record, and set the policy anew.",
            )
        return policy


def policy_file(kind: str, name: str) -> str:
    """Return the name, in the root, of a policy's record.

    Raises:
        InvalidURIError: `kind` or `name` is invalid.
    """
    if _FILE.fullmatch(f"{kind}.{name}.json") is None or "." in kind:
        raise InvalidURIError(
            "invalid policy",
            expected="a kind of lower-case letters, and a name of a letter or digit, then up to "
            "127 letters, digits, '.', '_' or '-'",
            found=f"{kind[:100]!r} and {name[:200]!r}",
            next_step="Choose another name.",
        )
    return f"{POLICIES}{kind}.{name}.json"


class Policies:
    """Policies of one root, changed by compare-and-swap. Safe for use by many threads."""

    def __init__(self, root: StoreURI, clock: Clock = utc_now) -> None:
        self._objects = ObjectStore.open(root)
        self._clock = clock

    def judge(self) -> tuple[list[PolicyRecord], dict[str, StorageError]]:
        """Return all policies, sorted, and the errors of unreadable records, by record name.

        Raises:
            StoreUnavailableError: the store gives no answer.
        """
        try:
            names = self._names()
        except CorruptionError as exc:  # a link that leads out of the root
            return [], {POLICIES: exc.without_traceback()}
        parsed = self._objects.parse_many(names[:MAX_POLICIES], _parsed)
        errors = {
            name: record for name, record in parsed.items() if isinstance(record, StorageError)
        }
        if len(names) > MAX_POLICIES:
            errors[POLICIES] = self._too_many(
                f"{len(names)}, of which the first {MAX_POLICIES} by name are read"
            )
        records = [record for record in parsed.values() if isinstance(record, PolicyRecord)]
        return [record for record in records if not record.deleted], errors

    def get(self, kind: str, name: str) -> PolicyRecord | None:
        """Return a policy; None if there is none, or it was deleted.

        Raises:
            InvalidURIError: `kind` or `name` is invalid.
            UnsupportedFormatError, CorruptionError: the record can't be read.
        """
        record, _ = self._read(kind, name)
        return None if record is None or record.deleted else record

    def put(
        self, kind: str, name: str, fields: dict[str, object], *, by: str, expect: int | None
    ) -> PolicyRecord:
        """Create or change a policy, if it is unchanged since the caller read it.

        Args:
            kind: kind of the policy.
            name: name of the policy.
            fields: its new fields.
            by: the caller's name.
            expect: the policy's sequence that the caller last read; None: it must not exist.

        Raises:
            PreconditionFailedError: the policy changed; `current` is the `PolicyRecord` or None.
            InvalidURIError: `kind` or `name` is invalid.
            UnsupportedFormatError: the fields can't be stored, the record can't be read, or there
                are `MAX_POLICIES` records.
            CorruptionError: the record can't be read: delete it first.
        """
        before, generation = self._read(kind, name)
        is_there = before is not None and not before.deleted
        if (before.sequence if before is not None and is_there else None) != expect:
            raise self._lost(kind, name, before, expect)
        if before is None:
            self._require_room()
        record = PolicyRecord(
            kind=kind,
            name=name,
            fields=fields,
            by=by,
            at=rfc3339(self._clock()),
            sequence=1 if before is None else before.sequence + 1,
            id=before.id if before is not None and is_there else secrets.token_hex(8),
            token=secrets.token_hex(8),
        )
        return self._write(record, generation, expect)

    def delete(self, kind: str, name: str, *, by: str, expect: int) -> None:
        """Replace a policy by a tombstone, if it is unchanged since the caller read it.

        Args:
            kind: kind of the policy.
            name: name of the policy.
            by: the caller's name.
            expect: the policy's sequence that the caller last read; 0: its record can't be read.

        Raises:
            PreconditionFailedError: the policy changed; `current` is the `PolicyRecord` or None.
            InvalidURIError: `kind` or `name` is invalid.
            UnsupportedFormatError, CorruptionError: the record can't be read.
        """
        try:
            before, generation = self._read(kind, name)
        except UNREADABLE:
            stored = self._objects.read(policy_file(kind, name))
            if expect or stored is None:
                raise
            sequence, policy_id, generation = 0, secrets.token_hex(8), stored.generation
        else:
            if before is None or before.deleted or before.sequence != expect:
                raise self._lost(kind, name, before, expect)
            sequence, policy_id = before.sequence, before.id
        tombstone = PolicyRecord(
            kind=kind,
            name=name,
            by=by,
            at=rfc3339(self._clock()),
            sequence=sequence + 1,
            id=policy_id,
            deleted=True,
            token=secrets.token_hex(8),
        )
        self._write(tombstone, generation, expect)

    def _names(self) -> list[str]:
        names = self._objects.children(POLICIES)
        return [name for name in names if _FILE.fullmatch(name.removeprefix(POLICIES))]

    def _require_room(self) -> None:
        """Raise unless one more record would be read."""
        if (count := len(self._names())) >= MAX_POLICIES:
            raise self._too_many(str(count))

    def _too_many(self, found: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(
            "too many policies",
            path=self._objects.uri / POLICIES.removesuffix("/"),
            expected=f"at most {MAX_POLICIES} records, those of deleted policies included",
            found=found,
            next_step="Remove records of policies that were deleted long ago.",
        )

    def _read(self, kind: str, name: str) -> tuple[PolicyRecord | None, bytes | None]:
        """Return the record, deleted or not, and its generation; (None, None) if there is none."""
        file = policy_file(kind, name)
        stored = self._objects.read(file)
        if stored is None:
            return None, None
        location = RecordLocation(None, file)
        return PolicyRecord.parse(stored.value, self._objects.uri / file, location), (
            stored.generation
        )

    def _write(
        self, record: PolicyRecord, generation: bytes | None, expect: int | None
    ) -> PolicyRecord:
        file = policy_file(record.kind, record.name)
        placed = record.with_location(RecordLocation("", file))
        try:
            self._objects.write_if(
                file, placed.to_bytes(), generation=generation, same_is_success=True
            )
        except PreconditionFailedError as exc:
            current, _ = self._read(record.kind, record.name)
            raise self._lost(record.kind, record.name, current, expect) from exc
        return placed

    def _lost(
        self, kind: str, name: str, record: PolicyRecord | None, expect: int | None
    ) -> PreconditionFailedError:
        last = "" if record is None else f"by {record.by or 'somebody'} at {record.at}"
        if record is None or record.deleted:
            found = f"none: deleted {last}" if last else "none"
        else:
            found = f"sequence {record.sequence}, set {last}"
        return PreconditionFailedError(
            "the policy has changed",
            path=self._objects.uri / policy_file(kind, name),
            expected="no such policy" if expect is None else f"sequence {expect}",
            found=found,
            next_step="Nothing was changed. Read it again and decide anew.",
            current=None if record is None or record.deleted else record,
        )


def _parsed(data: bytes, path: StoreURI) -> PolicyRecord | StorageError:
    """Parse a record; return the error of an unreadable one."""
    try:
        return PolicyRecord.parse(data, path, RecordLocation(None, f"{POLICIES}{path.name}"))
    except UNREADABLE as exc:
        return exc.without_traceback()
