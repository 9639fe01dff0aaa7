"""Tables of the catalog. Audit trail, keys, events, webhooks and added roots are there alone."""

from datetime import UTC, datetime
from typing import Any, Final, Literal

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

LONGEST_ACTOR: Final = 256

RecordKind = Literal["manifest", "annotation", "deletion"]
"""The records of a step."""


class UTCDateTime(TypeDecorator[datetime]):
    """An instant: stored in UTC, read back with its time zone on every database."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To UTC; a time without zone is a programming error."""
        if value is not None and value.tzinfo is None:
            raise TypeError(f"expected a time with its zone, found {value!r}")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """SQLite forgets the zone; it is UTC."""
        return None if value is None else value.replace(tzinfo=value.tzinfo or UTC)


class PlainText(TypeDecorator[str]):
    """Text of the store, as every database can hold it: without NUL, and cut to what fits."""

    impl = String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._length = length

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """NUL becomes U+FFFD: what is shown of one alias must not keep a run from being listed."""
        return None if value is None else _plain(value, self._length)


def plain_actor(name: str) -> str:
    """The name of a caller as the audit trail has it."""
    return _plain(name, LONGEST_ACTOR)


def _plain(text: str, length: int) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:length]


class Base(DeclarativeBase):
    """Constraint names are fixed, so that migrations can name them on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class RootRow(Base):
    """A store root, and when it was looked at."""

    __tablename__ = "roots"

    name: Mapped[str] = mapped_column(PlainText(128), primary_key=True)
    uri: Mapped[str] = mapped_column(PlainText(4096))
    # When the last look at all of its runs began that came to an end.
    scanned: Mapped[datetime | None] = mapped_column(UTCDateTime)
    # Why the last look did not.
    problem: Mapped[str | None] = mapped_column(Text)


class AddedRootRow(Base):
    """A root that was added while servers ran; not rebuilt from the store."""

    __tablename__ = "added_roots"

    name: Mapped[str] = mapped_column(PlainText(128), primary_key=True)
    uri: Mapped[str] = mapped_column(PlainText(4096))
    adopt_from: Mapped[list[str]] = mapped_column(JSON, default=list)
    created: Mapped[datetime] = mapped_column(UTCDateTime)
    created_by: Mapped[str] = mapped_column(PlainText(LONGEST_ACTOR))


class RunRow(Base):
    """A run of a root."""

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("root", "name"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    root: Mapped[str] = mapped_column(PlainText(128))
    name: Mapped[str] = mapped_column(PlainText(128))
    uri: Mapped[str] = mapped_column(PlainText(4096))
    created: Mapped[datetime] = mapped_column(UTCDateTime)
    labels: Mapped[dict[str, str]] = mapped_column(JSON)
    lineage: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # Sums over the listed checkpoints, kept so that a page of runs adds nothing up.
    latest_step: Mapped[int | None] = mapped_column(BigInteger)
    checkpoint_count: Mapped[int] = mapped_column(Integer)
    damaged_count: Mapped[int] = mapped_column(Integer, default=0)
    nbytes: Mapped[int] = mapped_column(BigInteger)
    problems: Mapped[list[str]] = mapped_column(JSON)
    # Records that were seen, and that the store has no more as they were; not rebuilt from it.
    lost_records: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list)
    # Another number with every write of the run's rows.
    revision: Mapped[int] = mapped_column(BigInteger)
    # What the store looked like before its records were read; None: it had changed just then.
    stamp: Mapped[str | None] = mapped_column(String(64))
    # When a step that is being written counts as abandoned, unless its writer is heard of.
    due: Mapped[datetime | None] = mapped_column(UTCDateTime)


class CheckpointRow(Base):
    """One step as one attempt saved it, or is saving it: what its records say.

    Without a manifest, a step has no time, no size and no digest.
    """

    __tablename__ = "checkpoints"
    __table_args__ = (
        UniqueConstraint("run_id", "step", "attempt"),
        Index(None, "run_id", "state", "step"),
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    step: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16))
    created: Mapped[datetime | None] = mapped_column(UTCDateTime)
    nbytes: Mapped[int | None] = mapped_column(BigInteger)
    leaves: Mapped[int | None] = mapped_column(Integer)
    items: Mapped[list[str]] = mapped_column(JSON)
    iterators: Mapped[dict[str, int]] = mapped_column(JSON)
    manifest_digest: Mapped[str | None] = mapped_column(String(80))
    model_type: Mapped[str | None] = mapped_column(PlainText(128))
    # Of an adopted checkpoint: the folder of its files.
    source: Mapped[str | None] = mapped_column(PlainText(4096))
    labels: Mapped[dict[str, str]] = mapped_column(JSON)
    # A metric that is no finite number is kept as text: JSON has no other place for it.
    metrics: Mapped[dict[str, float | str]] = mapped_column(JSON)
    # Of metrics, whether small or large values are good, where somebody said so.
    better: Mapped[dict[str, str]] = mapped_column(JSON)
    # When all of it was last found to be what was saved.
    verified: Mapped[datetime | None] = mapped_column(UTCDateTime)
    # What the last verification found to be wrong with it. A listed step that has it is damaged:
    # its `state` stays "listed", as the store's protocol judges it.
    damaged: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # Of a step in the trash, what its tombstone says.
    deletion: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # Of each of its records, what tells whether it has changed since it was read.
    stamps: Mapped[dict[RecordKind, str | None]] = mapped_column(JSON)


class AliasRow(Base):
    """Where an alias of a run points."""

    __tablename__ = "aliases"
    __table_args__ = (UniqueConstraint("run_id", "alias"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    alias: Mapped[str] = mapped_column(PlainText(128))
    step: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int] = mapped_column(BigInteger)
    manifest_digest: Mapped[str | None] = mapped_column(String(80))
    by: Mapped[str] = mapped_column(PlainText(256))
    reason: Mapped[str] = mapped_column(PlainText(2000))
    at: Mapped[datetime] = mapped_column(UTCDateTime)
    sequence: Mapped[int] = mapped_column(BigInteger)
    # Whether this control plane was asked for the move; None: it was there when the run was first
    # looked at.
    audited: Mapped[bool | None] = mapped_column(Boolean)


class WorkerRow(Base):
    """A job worker that was started; whether it lives is known where its name is held."""

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(PlainText(128), primary_key=True)
    host: Mapped[str] = mapped_column(PlainText(256))
    process: Mapped[int] = mapped_column(Integer)
    version: Mapped[str] = mapped_column(PlainText(64))
    started: Mapped[datetime] = mapped_column(UTCDateTime)


class AuditRow(Base):
    """Something that was asked of this control plane; not rebuilt from the store.

    Written before it is done and completed after: without `outcome`, its process died in between,
    and the store alone knows.
    """

    __tablename__ = "audit_events"
    __table_args__ = (Index(None, "root", "run", "id"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[datetime] = mapped_column(UTCDateTime)
    actor: Mapped[str] = mapped_column(PlainText(LONGEST_ACTOR))
    action: Mapped[str] = mapped_column(String(64))
    root: Mapped[str] = mapped_column(PlainText(128))
    run: Mapped[str] = mapped_column(PlainText(128))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    # "done", "refused" (a 4xx) or "failed" (a 5xx); "outside": it went around this control plane.
    outcome: Mapped[str | None] = mapped_column(String(16))
    completed: Mapped[datetime | None] = mapped_column(UTCDateTime)
    request_id: Mapped[str | None] = mapped_column(PlainText(128))


class KeyRow(Base):
    """A caller's key; not rebuilt from the store. Of its secret there is a digest alone."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    # SHA-256 of the whole key, in hex.
    digest: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(PlainText(128))
    scope: Mapped[str] = mapped_column(String(16))
    # Names of the roots where it counts; None: in all.
    roots: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    created: Mapped[datetime] = mapped_column(UTCDateTime)
    created_by: Mapped[str] = mapped_column(PlainText(256))
    expires: Mapped[datetime | None] = mapped_column(UTCDateTime)
    revoked: Mapped[datetime | None] = mapped_column(UTCDateTime)
    # To the minute.
    last_used: Mapped[datetime | None] = mapped_column(UTCDateTime)


class SessionRow(Base):
    """A browser that is signed in with a key."""

    __tablename__ = "sessions"

    # SHA-256 of what its cookie holds, in hex.
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("keys.id", ondelete="CASCADE"))
    expires: Mapped[datetime] = mapped_column(UTCDateTime)


class EventRow(Base):
    """Something that happened in the store or to a job; written with the rows that tell of it.

    Ids grow in the order in which events can be seen: who has read one has missed none before it.
    """

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("root", "run", "kind", "identity"),
        UniqueConstraint("root", "run", "sequence"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    # By which receivers know it again; of no two catalogs the same.
    uid: Mapped[str] = mapped_column(String(40), unique=True)
    kind: Mapped[str] = mapped_column(String(32))
    root: Mapped[str] = mapped_column(PlainText(128))
    # "": it is of the root itself.
    run: Mapped[str] = mapped_column(PlainText(128))
    # Of the run's events, from 1 on.
    sequence: Mapped[int] = mapped_column(BigInteger)
    # SHA-256, in hex, of what tells it from others of its kind.
    identity: Mapped[str] = mapped_column(String(64))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    at: Mapped[datetime] = mapped_column(UTCDateTime)


class WebhookRow(Base):
    """Somebody who is told of events; not rebuilt from the store."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    url: Mapped[str] = mapped_column(PlainText(2000))
    # With it what is sent is signed: it has to be kept as it is.
    secret: Mapped[str] = mapped_column(String(128))
    # Which events; None: of all kinds, of all roots.
    kinds: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    roots: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    # Of names of runs, as shells have it.
    runs: Mapped[str] = mapped_column(PlainText(128))
    created: Mapped[datetime] = mapped_column(UTCDateTime)
    created_by: Mapped[str] = mapped_column(PlainText(LONGEST_ACTOR))
    # Id of the last event that was looked at for it.
    position: Mapped[int] = mapped_column(BigInteger)


class AutomationRow(Base):
    """How far an automation of the settings has followed the moves of aliases."""

    __tablename__ = "automations"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    # Id of the last event that it has acted on, or was of another alias.
    position: Mapped[int] = mapped_column(BigInteger)
    # Of the last move that it was for: what it started, or why it could not.
    operation: Mapped[str | None] = mapped_column(String(64))
    problem: Mapped[str | None] = mapped_column(PlainText(2000))
    at: Mapped[datetime] = mapped_column(UTCDateTime)


class PrunedRow(Base):
    """Up to where old rows of a table were removed."""

    __tablename__ = "pruned"

    # Of the table.
    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    # Id of the last row that was.
    position: Mapped[int] = mapped_column(BigInteger)


class DeliveryRow(Base):
    """An event that a webhook is told of, and what became of it."""

    __tablename__ = "deliveries"
    __table_args__ = (
        UniqueConstraint("webhook_id", "event_id"),
        Index(None, "webhook_id", "state", "root", "run", "event_id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    event_id: Mapped[int] = mapped_column(ForeignKey("events.id", ondelete="CASCADE"))
    # Those of its event: what is due is found without it.
    root: Mapped[str] = mapped_column(PlainText(128))
    run: Mapped[str] = mapped_column(PlainText(128))
    # "pending", "delivered" or "dead".
    state: Mapped[str] = mapped_column(String(16))
    # How often it was tried since it was last made pending.
    attempts: Mapped[int] = mapped_column(Integer)
    due: Mapped[datetime] = mapped_column(UTCDateTime)
    # The last tries, oldest first: when, how long, and what came of it.
    log: Mapped[list[dict[str, Any]]] = mapped_column(JSON)


class RevisionRow(Base):
    """A revision that the tables have had, and the oldest whose code can run on it."""

    __tablename__ = "catalog_revisions"

    revision: Mapped[str] = mapped_column(String(32), primary_key=True)
    works_with: Mapped[str] = mapped_column(String(32))
