"""Tables of the catalog.

The audit trail, keys, events, webhooks and added roots exist here only; the rest is rebuilt from
the store.
"""

from datetime import UTC, datetime
from typing import Any, Final, Literal

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    DateTime,
    Dialect,
    Double,
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
LONGEST_METRIC: Final = 256

RecordKind = Literal["manifest", "annotation", "deletion"]
"""Kinds of a step's records."""


class UTCDateTime(TypeDecorator[datetime]):
    """Column type of an instant: stored in UTC, and read with its time zone from every database."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC; a time without zone is a programming error."""
        if value is not None and value.tzinfo is None:
            raise TypeError(f"expected a time with its zone, found {value!r}")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Add the time zone to a stored time: SQLite drops it, and stored times are in UTC."""
        return None if value is None else value.replace(tzinfo=value.tzinfo or UTC)


class PlainText(TypeDecorator[str]):
    """Column type for text from the store: without NUL, and cut to the column's length."""

    impl = String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._length = length

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Replace NUL by U+FFFD: an alias with NUL must not keep a whole run from being listed."""
        return None if value is None else plain_text(value, self._length)


def plain_actor(name: str) -> str:
    """Return the name of a caller as the audit trail stores it."""
    return plain_text(name, LONGEST_ACTOR)


def plain_text(text: str, length: int) -> str:
    """Return a text as a `PlainText` column stores it."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:length]


class Base(DeclarativeBase):
    """Base of the tables, with fixed constraint names that migrations can use on every database."""

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
    """Store root and its last scan."""

    __tablename__ = "roots"

    name: Mapped[str] = mapped_column(PlainText(128), primary_key=True)
    uri: Mapped[str] = mapped_column(PlainText(4096))
    # Start of the last scan of all runs that succeeded.
    scanned: Mapped[datetime | None] = mapped_column(UTCDateTime)
    # Reason why the latest scan failed; null: it did not.
    problem: Mapped[str | None] = mapped_column(Text)


class AddedRootRow(Base):
    """Root that was added at run time; not rebuilt from the store."""

    __tablename__ = "added_roots"

    name: Mapped[str] = mapped_column(PlainText(128), primary_key=True)
    uri: Mapped[str] = mapped_column(PlainText(4096))
    adopt_from: Mapped[list[str]] = mapped_column(JSON, default=list)
    created: Mapped[datetime] = mapped_column(UTCDateTime)
    created_by: Mapped[str] = mapped_column(PlainText(LONGEST_ACTOR))


class RunRow(Base):
    """Run of a root."""

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("root", "name"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    root: Mapped[str] = mapped_column(PlainText(128))
    name: Mapped[str] = mapped_column(PlainText(128))
    uri: Mapped[str] = mapped_column(PlainText(4096))
    created: Mapped[datetime] = mapped_column(UTCDateTime)
    labels: Mapped[dict[str, str]] = mapped_column(JSON)
    lineage: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # Sums over the listed checkpoints, so that a page of runs needs no aggregation.
    latest_step: Mapped[int | None] = mapped_column(BigInteger)
    checkpoint_count: Mapped[int] = mapped_column(Integer)
    damaged_count: Mapped[int] = mapped_column(Integer, default=0)
    nbytes: Mapped[int] = mapped_column(BigInteger)
    problems: Mapped[list[str]] = mapped_column(JSON)
    # Config of the newest step that was saved with a model: numbers and texts, with "/" in the
    # names of nested ones; and the attempt and the number of that step.
    config: Mapped[dict[str, float | str]] = mapped_column(JSON, default=dict)
    config_attempt: Mapped[int | None] = mapped_column(BigInteger)
    config_step: Mapped[int | None] = mapped_column(BigInteger)
    # Whether the run has more metrics than `run_metrics` keeps.
    metrics_cut: Mapped[bool] = mapped_column(Boolean, default=False)
    # Lost records (see `events.lost_records`); not rebuilt from the store.
    lost_records: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list)
    # Changes at every write of the run's rows.
    revision: Mapped[int] = mapped_column(BigInteger)
    # Change token of the run before its records were read; null: a change was too recent for one.
    stamp: Mapped[str | None] = mapped_column(String(64))
    # Time at which an unfinished step counts as abandoned, unless its writer renews its lease.
    due: Mapped[datetime | None] = mapped_column(UTCDateTime)


class CheckpointRow(Base):
    """Step of one attempt, saved or being saved, as its records describe it.

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
    # Folder of the files of an imported checkpoint.
    source: Mapped[str | None] = mapped_column(PlainText(4096))
    labels: Mapped[dict[str, str]] = mapped_column(JSON)
    # Metrics that are not finite are stored as text, since JSON cannot express them.
    metrics: Mapped[dict[str, float | str]] = mapped_column(JSON)
    # Direction of metrics (lower or higher is better), where it was declared.
    better: Mapped[dict[str, str]] = mapped_column(JSON)
    # Last time at which a verification found the whole step intact.
    verified: Mapped[datetime | None] = mapped_column(UTCDateTime)
    # Damage that the last verification found. A listed step with damage is shown as damaged, but
    # its `state` stays "listed", as the store's protocol has it.
    damaged: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # Content of the tombstone of a deleted step.
    deletion: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # Change tokens of the step's records, by which changes are noticed.
    stamps: Mapped[dict[RecordKind, str | None]] = mapped_column(JSON)


class RunMetricRow(Base):
    """Metric of a run: its last value, and its best one among the listed steps."""

    __tablename__ = "run_metrics"
    __table_args__ = (
        Index(None, "name", "last"),
        Index(None, "name", "best"),
        {"sqlite_with_rowid": False},
    )

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(PlainText(LONGEST_METRIC), primary_key=True)
    # Null: it is NaN.
    last: Mapped[float | None] = mapped_column(Double)
    last_step: Mapped[int] = mapped_column(BigInteger)
    # "min" or "max"; null: no step says.
    better: Mapped[str | None] = mapped_column(String(3))
    better_step: Mapped[int | None] = mapped_column(BigInteger)
    # Null: the direction is unknown, or all values are NaN.
    best: Mapped[float | None] = mapped_column(Double)
    best_step: Mapped[int | None] = mapped_column(BigInteger)


class AliasRow(Base):
    """Position of an alias."""

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
    # Whether the audit trail has a request for the move; null: the alias was there at the first
    # refresh.
    audited: Mapped[bool | None] = mapped_column(Boolean)


class WorkerRow(Base):
    """Job worker that was started. The lock of its name, not this row, shows if it is alive."""

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(PlainText(128), primary_key=True)
    host: Mapped[str] = mapped_column(PlainText(256))
    process: Mapped[int] = mapped_column(Integer)
    version: Mapped[str] = mapped_column(PlainText(64))
    started: Mapped[datetime] = mapped_column(UTCDateTime)


class AuditRow(Base):
    """Action that was requested of this control plane; not rebuilt from the store.

    Written before the action and completed after it. An entry without `outcome` means that the
    process died in between, and only the store shows what happened.
    """

    __tablename__ = "audit_events"
    __table_args__ = (Index(None, "root", "run", "id"), Index(None, "actor", "id"))

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[datetime] = mapped_column(UTCDateTime)
    actor: Mapped[str] = mapped_column(PlainText(LONGEST_ACTOR))
    action: Mapped[str] = mapped_column(String(64))
    root: Mapped[str] = mapped_column(PlainText(128))
    run: Mapped[str] = mapped_column(PlainText(128))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    # "done", "refused" (a 4xx), "failed" (a 5xx), or "outside" (a change around this control
    # plane).
    outcome: Mapped[str | None] = mapped_column(String(16))
    completed: Mapped[datetime | None] = mapped_column(UTCDateTime)
    request_id: Mapped[str | None] = mapped_column(PlainText(128))


class KeyRow(Base):
    """Key of a caller; not rebuilt from the store. Only the secret's digest is stored."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    # SHA-256 of the whole key, in hex.
    digest: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(PlainText(128))
    scope: Mapped[str] = mapped_column(String(16))
    # Names of the roots that the key gives access to; null: all roots.
    roots: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    created: Mapped[datetime] = mapped_column(UTCDateTime)
    created_by: Mapped[str] = mapped_column(PlainText(256))
    expires: Mapped[datetime | None] = mapped_column(UTCDateTime)
    revoked: Mapped[datetime | None] = mapped_column(UTCDateTime)
    # Precise to the minute.
    last_used: Mapped[datetime | None] = mapped_column(UTCDateTime)


class SessionRow(Base):
    """Session of a browser that signed in with a key or at the identity provider.

    A session has either a key, or the caller whom the provider confirmed.
    """

    __tablename__ = "sessions"

    # SHA-256 of the cookie's secret, in hex.
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_id: Mapped[str | None] = mapped_column(ForeignKey("keys.id", ondelete="CASCADE"))
    expires: Mapped[datetime] = mapped_column(UTCDateTime)
    # Caller, as the provider confirmed it last; roots as in `KeyRow`.
    name: Mapped[str | None] = mapped_column(PlainText(LONGEST_ACTOR))
    scope: Mapped[str | None] = mapped_column(String(16))
    roots: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    confirmed: Mapped[datetime | None] = mapped_column(UTCDateTime)
    # Time at which a request last began to have the provider confirm it.
    confirming: Mapped[datetime | None] = mapped_column(UTCDateTime)
    # Tokens of the provider, encrypted with the cookie's secret.
    tokens: Mapped[str | None] = mapped_column(Text)


class EventRow(Base):
    """Event in the store or of a job, written with the rows of its change.

    Ids grow in the order in which events become visible: a reader of one event has missed none
    before it.
    """

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("root", "run", "kind", "identity"),
        UniqueConstraint("root", "run", "sequence"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    # Unique across catalogs, so that receivers can recognize a repeated delivery.
    uid: Mapped[str] = mapped_column(String(40), unique=True)
    kind: Mapped[str] = mapped_column(String(32))
    root: Mapped[str] = mapped_column(PlainText(128))
    # "": the event is about the root itself.
    run: Mapped[str] = mapped_column(PlainText(128))
    # Number among the run's events, from 1.
    sequence: Mapped[int] = mapped_column(BigInteger)
    # SHA-256, in hex, of the deduplication key within kind and run.
    identity: Mapped[str] = mapped_column(String(64))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    at: Mapped[datetime] = mapped_column(UTCDateTime)


class WebhookRow(Base):
    """Receiver of events; not rebuilt from the store."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    url: Mapped[str] = mapped_column(PlainText(2000))
    # Key of the message signatures, so it is stored in plain text.
    secret: Mapped[str] = mapped_column(String(128))
    # Kinds and roots of the events to send; null: all.
    kinds: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    roots: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    # Shell pattern of run names.
    runs: Mapped[str] = mapped_column(PlainText(128))
    created: Mapped[datetime] = mapped_column(UTCDateTime)
    created_by: Mapped[str] = mapped_column(PlainText(LONGEST_ACTOR))
    # Id of the last event for which deliveries were made.
    position: Mapped[int] = mapped_column(BigInteger)


class AutomationRow(Base):
    """Position of an automation in the events of moved aliases."""

    __tablename__ = "automations"

    # Of one of the environment: its name; of one of a root: the root, a slash, and the policy's id.
    name: Mapped[str] = mapped_column(String(256), primary_key=True)
    # Id of the last event that the automation has acted on or skipped.
    position: Mapped[int] = mapped_column(BigInteger)
    # Result of the last move that it acted on: the operation it started, or the reason why not.
    operation: Mapped[str | None] = mapped_column(String(64))
    problem: Mapped[str | None] = mapped_column(PlainText(2000))
    at: Mapped[datetime] = mapped_column(UTCDateTime)


class PrunedRow(Base):
    """Position up to which old rows of a table were removed."""

    __tablename__ = "pruned"

    # Name of the table.
    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    # Id of the last removed row.
    position: Mapped[int] = mapped_column(BigInteger)


class DeliveryRow(Base):
    """Delivery of an event to a webhook, and its tries."""

    __tablename__ = "deliveries"
    __table_args__ = (
        UniqueConstraint("webhook_id", "event_id"),
        Index(None, "webhook_id", "state", "root", "run", "event_id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    event_id: Mapped[int] = mapped_column(ForeignKey("events.id", ondelete="CASCADE"))
    # Copies of the event's columns, so that the query for due deliveries needs no join.
    root: Mapped[str] = mapped_column(PlainText(128))
    run: Mapped[str] = mapped_column(PlainText(128))
    # "pending", "delivered" or "dead".
    state: Mapped[str] = mapped_column(String(16))
    # Number of tries since it last became pending.
    attempts: Mapped[int] = mapped_column(Integer)
    due: Mapped[datetime] = mapped_column(UTCDateTime)
    # Last tries, oldest first: time, duration and outcome.
    log: Mapped[list[dict[str, Any]]] = mapped_column(JSON)


class RevisionRow(Base):
    """Revision that the tables have had, and the oldest revision whose code can use it."""

    __tablename__ = "catalog_revisions"

    revision: Mapped[str] = mapped_column(String(32), primary_key=True)
    works_with: Mapped[str] = mapped_column(String(32))
