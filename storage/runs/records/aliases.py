"""Aliases: names such as "production" that point to one step and move by compare-and-swap."""

import builtins
import secrets
from types import EllipsisType
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from cairn.storage.errors import (
    AliasNotFoundError,
    CorruptionError,
    PreconditionFailedError,
    StorageError,
)
from cairn.storage.runs.records.layout import ALIASES, MAX_NUMBER, alias_file, parse_alias_file
from cairn.storage.runs.records.placed import (
    judge_records,
    parse_record,
    read_record,
    write_record,
)
from cairn.storage.store.clock import Clock, Moment, rfc3339, utc_now
from cairn.storage.store.objects import ObjectStore, Versioned
from cairn.storage.store.records import Record, RecordLocation

__all__ = ["HISTORY_KEPT", "Alias", "AliasEvent", "AliasWriter", "Aliases"]

HISTORY_KEPT = 100
"""Number of moves that an alias remembers."""

Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]


class AliasEvent(BaseModel):
    """Move or deletion of an alias.

    Attributes:
        step: the step to which the alias pointed from then on; for a deletion, until then.
        attempt: the attempt that wrote the step.
        manifest_digest: digest of the step's manifest.
        by: name of who moved or deleted it.
        reason: reason that they gave.
        at: time of the event, RFC 3339 in UTC.
        sequence: number of the event: 1, 2, 3, … over the alias's whole life, deletions included.
        deleted: True for a deletion.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: Number
    attempt: Number
    manifest_digest: str | None = None
    by: str = ""
    reason: str = ""
    at: Moment
    sequence: Annotated[int, Field(ge=1)]
    deleted: bool = False


class Alias(Record):
    """Alias as stored: its last event and the events before it.

    Attributes:
        alias: name of the alias.
        step: the step to which it points.
        attempt: the attempt that wrote the step.
        manifest_digest: digest of the step's manifest.
        by: name of who moved it last.
        reason: reason that they gave.
        at: time of the last event, RFC 3339 in UTC.
        sequence: number of events so far; the ETag of the alias.
        deleted: True for a tombstone.
        history: the last events, oldest first, this one included.
        token: unique text of this write, by which a writer recognizes its own record after it
            repeated a request.
    """

    FORMAT: ClassVar[str] = "cairn.alias"

    alias: str
    step: Number
    attempt: Number
    manifest_digest: str | None = None
    by: str = ""
    reason: str = ""
    at: Moment
    sequence: Annotated[int, Field(ge=1)]
    deleted: bool = False
    history: Annotated[tuple[AliasEvent, ...], Field(max_length=HISTORY_KEPT)] = ()
    token: str = ""

    @classmethod
    def parse(cls, data: bytes, path: object, place: RecordLocation | None = None) -> Self:
        """Return an alias, parsed as by `Record.parse`; its name must fit its place."""
        alias = super().parse(data, path, place)
        if place is not None and place.key != alias_file(alias.alias):
            raise CorruptionError(
                "the alias of another place",
                path=path,
                expected=f"the record {place.key}",
                found=f"alias {alias.alias!r}",
                next_step="Put each back in its place, or promote the step anew.",
            )
        return alias


class Aliases:
    """Aliases of one run, with their history. Safe for use by many threads."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def get(self, name: str) -> Alias | None:
        """Return the alias, or None if it does not exist or was deleted.

        Raises:
            InvalidURIError: `name` is not a valid alias name.
            UnsupportedFormatError, CorruptionError: the record can't be read.
        """
        alias, _ = self._read(name)
        return None if alias is None or alias.deleted else alias

    def require(self, name: str) -> Alias:
        """Return the alias; raise an error if it does not exist.

        Raises:
            AliasNotFoundError: the alias does not exist or was deleted.
            InvalidURIError: `name` is not a valid alias name.
            UnsupportedFormatError, CorruptionError: the record can't be read.
        """
        alias = self.get(name)
        if alias is None:
            raise self._not_found(name)
        return alias

    def list(self) -> builtins.list[Alias]:
        """Return all aliases that exist, sorted by name.

        Raises:
            UnsupportedFormatError, CorruptionError: a record can't be read.
        """
        aliases, unreadable = self.judge()
        for error in unreadable.values():
            raise error
        return aliases

    def judge(
        self, *, deleted: bool = False
    ) -> tuple[builtins.list[Alias], dict[str, StorageError]]:
        """Return all aliases that exist, sorted by name, and the errors of records, by record name.

        Args:
            deleted: whether to include the tombstones of deleted aliases.
        """
        names = [name for name in self._objects.list(ALIASES) if parse_alias_file(name)]
        aliases, unreadable = judge_records(self._objects, names, Alias.parse)
        kept = [alias for _, alias in sorted(aliases.items()) if deleted or not alias.deleted]
        return kept, unreadable

    def history(self, name: str) -> builtins.list[AliasEvent]:
        """Return the last events of the alias, newest first, even after its deletion.

        Raises:
            AliasNotFoundError: the alias never existed.
        """
        alias, _ = self._read(name)
        if alias is None:
            raise self._not_found(name)
        return list(reversed(alias.history))

    def _read(self, name: str) -> tuple[Alias | None, bytes | None]:
        """Return the alias, deleted or not, and its generation; (None, None) if there is none."""
        return read_record(self._objects, alias_file(name), Alias) or (None, None)

    def _not_found(self, name: str) -> AliasNotFoundError:
        names = ", ".join(alias.alias for alias in self.judge()[0]) or "none"
        return AliasNotFoundError(
            "no such alias",
            path=self._objects.uri,
            expected=f"alias {name!r}",
            found=f"aliases: {names}",
            next_step="Promote a step to it first, or use one of these.",
        )


class AliasWriter(Aliases):
    """Writer that moves aliases by compare-and-swap, without checking the step.

    Only `runs.promotion` may use it. Safe for use by many threads, processes and machines.
    """

    def __init__(self, objects: ObjectStore, clock: Clock = utc_now) -> None:
        super().__init__(objects)
        self._clock = clock

    def move(
        self,
        name: str,
        *,
        step: int,
        attempt: int,
        manifest_digest: str | None = None,
        by: str = "",
        reason: str = "",
        expect: int | None,
        seen: Versioned | EllipsisType | None = ...,
        lost: AliasEvent | None = None,
    ) -> Alias:
        """Point the alias at a step, if the alias is unchanged since the caller read it.

        Args:
            name: the alias.
            step: the step to point at.
            attempt: the attempt that wrote the step.
            manifest_digest: digest of the step's manifest.
            by: the caller's name.
            reason: reason of the move, for the history.
            expect: the alias's sequence that the caller last read; None: the alias must not exist.
                A deleted alias does not exist.
            seen: the stored record that the caller just read, None if there was none; by default it
                is read here.
            lost: the alias's last event according to another record. If the store has lost it, it
                is restored to the history before the move.

        Raises:
            PreconditionFailedError: the alias changed; `current` is the `Alias` or None.
        """
        alias, generation = None, None
        if seen is ...:
            alias, generation = self._read(name)
        elif seen is not None:
            alias = parse_record(self._objects, alias_file(name), Alias, seen)
            generation = seen.generation
        sequence = None if alias is None or alias.deleted else alias.sequence
        if sequence != expect:
            raise self._lost(name, alias, expect)
        event = AliasEvent(
            step=step,
            attempt=attempt,
            manifest_digest=manifest_digest,
            by=by,
            reason=reason,
            at=rfc3339(self._clock()),
            sequence=_newest(alias, lost) + 1,
        )
        return self._write(name, alias, generation, event, expect, lost)

    def delete(
        self,
        name: str,
        *,
        expect: int,
        by: str = "",
        reason: str = "",
        lost: AliasEvent | None = None,
    ) -> Alias:
        """Replace the alias by a tombstone, if it is unchanged since the caller read it.

        Args:
            name: the alias.
            expect: the alias's sequence that the caller last read.
            by: the caller's name.
            reason: reason of the deletion, for the history.
            lost: as in `move`; an alias that the store has lost is restored and deleted.

        Raises:
            AliasNotFoundError: the alias does not exist.
            PreconditionFailedError: the alias changed; `current` is the `Alias`.
        """
        alias, generation = self._read(name)
        last = lost if alias is None or alias.deleted else alias
        if last is None or last.deleted:
            raise self._not_found(name)
        if last.sequence != expect:
            raise self._lost(name, alias, expect)
        event = AliasEvent(
            step=last.step,
            attempt=last.attempt,
            manifest_digest=last.manifest_digest,
            by=by,
            reason=reason,
            at=rfc3339(self._clock()),
            sequence=_newest(alias, lost) + 1,
            deleted=True,
        )
        return self._write(name, alias, generation, event, expect, lost)

    def _write(
        self,
        name: str,
        before: Alias | None,
        generation: bytes | None,
        event: AliasEvent,
        expect: int | None,
        lost: AliasEvent | None,
    ) -> Alias:
        earlier = before.history if before else ()
        # The store has an older state of the alias, or none: keep the event that is lost.
        if lost is not None and (before is None or lost.sequence >= before.sequence):
            earlier = (*earlier, lost)
        alias = Alias(
            alias=name,
            **event.model_dump(),
            history=(*earlier, event)[-HISTORY_KEPT:],
            token=secrets.token_hex(8),
        )
        try:
            return write_record(self._objects, alias_file(name), alias, generation=generation)[0]
        except PreconditionFailedError as exc:
            raise self._lost(name, self._read(name)[0], expect) from exc

    def _lost(self, name: str, alias: Alias | None, expect: int | None) -> PreconditionFailedError:
        current = None if alias is None or alias.deleted else alias
        return PreconditionFailedError(
            "the alias has changed",
            path=self._objects.uri / alias_file(name),
            expected="no alias" if expect is None else f"sequence {expect}",
            found="no alias"
            if current is None
            else f"sequence {current.sequence}, step {current.step}, moved there by "
            f"{current.by or 'somebody'} at {current.at}",
            next_step="Nothing was changed. "
            + (
                "To create the alias, expect none."
                if current is None
                else f"To change it all the same, expect sequence {current.sequence}."
            ),
            current=current,
        )


def _newest(alias: Alias | None, lost: AliasEvent | None) -> int:
    """Return the highest sequence that the alias has had."""
    return max((event.sequence for event in (alias, lost) if event is not None), default=0)
