"""Initial migration: all tables of the catalog."""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import UTCDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

works_with = "0001"
"""Oldest revision whose code can use the tables that this migration leaves."""


def upgrade() -> None:
    op.create_table(
        "added_roots",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("uri", sa.String(length=4096), nullable=False),
        sa.Column("adopt_from", sa.JSON(), nullable=False),
        sa.Column("created", UTCDateTime(), nullable=False),
        sa.Column("created_by", sa.String(length=256), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_added_roots")),
    )
    op.create_table(
        "audit_events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", UTCDateTime(), nullable=False),
        sa.Column("actor", sa.String(length=256), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("root", sa.String(length=128), nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("completed", UTCDateTime(), nullable=True),
        sa.Column("request_id", sa.String(length=128), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_events")),
    )
    op.create_index(op.f("ix_audit_events_actor_id"), "audit_events", ["actor", "id"], unique=False)
    op.create_index(
        op.f("ix_audit_events_root_run_id"), "audit_events", ["root", "run", "id"], unique=False
    )
    op.create_table(
        "automations",
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("operation", sa.String(length=64), nullable=True),
        sa.Column("problem", sa.String(length=2000), nullable=True),
        sa.Column("at", UTCDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_automations")),
    )
    op.create_table(
        "catalog_revisions",
        sa.Column("revision", sa.String(length=32), nullable=False),
        sa.Column("works_with", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_catalog_revisions")),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("root", sa.String(length=128), nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("identity", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("at", UTCDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sa.UniqueConstraint(
            "root", "run", "kind", "identity", name=op.f("uq_events_root_run_kind_identity")
        ),
        sa.UniqueConstraint("root", "run", "sequence", name=op.f("uq_events_root_run_sequence")),
        sa.UniqueConstraint("uid", name=op.f("uq_events_uid")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=12), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("roots", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created", UTCDateTime(), nullable=False),
        sa.Column("created_by", sa.String(length=256), nullable=False),
        sa.Column("expires", UTCDateTime(), nullable=True),
        sa.Column("revoked", UTCDateTime(), nullable=True),
        sa.Column("last_used", UTCDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
    )
    op.create_table(
        "pruned",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_pruned")),
    )
    op.create_table(
        "roots",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("uri", sa.String(length=4096), nullable=False),
        sa.Column("scanned", UTCDateTime(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_roots")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("root", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("uri", sa.String(length=4096), nullable=False),
        sa.Column("created", UTCDateTime(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("lineage", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("latest_step", sa.BigInteger(), nullable=True),
        sa.Column("checkpoint_count", sa.Integer(), nullable=False),
        sa.Column("damaged_count", sa.Integer(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("problems", sa.JSON(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("config_attempt", sa.BigInteger(), nullable=True),
        sa.Column("config_step", sa.BigInteger(), nullable=True),
        sa.Column("metrics_cut", sa.Boolean(), nullable=False),
        sa.Column("lost_records", sa.JSON(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("stamp", sa.String(length=64), nullable=True),
        sa.Column("due", UTCDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("root", "name", name=op.f("uq_runs_root_name")),
    )
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(length=12), nullable=False),
        sa.Column("url", sa.String(length=2000), nullable=False),
        sa.Column("secret", sa.String(length=128), nullable=False),
        sa.Column("kinds", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("roots", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("runs", sa.String(length=128), nullable=False),
        sa.Column("created", UTCDateTime(), nullable=False),
        sa.Column("created_by", sa.String(length=256), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_table(
        "workers",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("host", sa.String(length=256), nullable=False),
        sa.Column("process", sa.Integer(), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.Column("started", UTCDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_workers")),
    )
    op.create_table(
        "aliases",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("alias", sa.String(length=128), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("manifest_digest", sa.String(length=80), nullable=True),
        sa.Column("by", sa.String(length=256), nullable=False),
        sa.Column("reason", sa.String(length=2000), nullable=False),
        sa.Column("at", UTCDateTime(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("audited", sa.Boolean(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_aliases_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_aliases")),
        sa.UniqueConstraint("run_id", "alias", name=op.f("uq_aliases_run_id_alias")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created", UTCDateTime(), nullable=True),
        sa.Column("nbytes", sa.BigInteger(), nullable=True),
        sa.Column("leaves", sa.Integer(), nullable=True),
        sa.Column("items", sa.JSON(), nullable=False),
        sa.Column("iterators", sa.JSON(), nullable=False),
        sa.Column("manifest_digest", sa.String(length=80), nullable=True),
        sa.Column("model_type", sa.String(length=128), nullable=True),
        sa.Column("source", sa.String(length=4096), nullable=True),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("better", sa.JSON(), nullable=False),
        sa.Column("verified", UTCDateTime(), nullable=True),
        sa.Column("damaged", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("deletion", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("stamps", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint(
            "run_id", "step", "attempt", name=op.f("uq_checkpoints_run_id_step_attempt")
        ),
    )
    op.create_index(
        op.f("ix_checkpoints_run_id_state_step"),
        "checkpoints",
        ["run_id", "state", "step"],
        unique=False,
    )
    op.create_table(
        "deliveries",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("webhook_id", sa.String(length=12), nullable=False),
        sa.Column("event_id", sa.Integer(), nullable=False),
        sa.Column("root", sa.String(length=128), nullable=False),
        sa.Column("run", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due", UTCDateTime(), nullable=False),
        sa.Column("log", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["event_id"],
            ["events.id"],
            name=op.f("fk_deliveries_event_id_events"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["webhook_id"],
            ["webhooks.id"],
            name=op.f("fk_deliveries_webhook_id_webhooks"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
        sa.UniqueConstraint(
            "webhook_id", "event_id", name=op.f("uq_deliveries_webhook_id_event_id")
        ),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_deliveries_webhook_id_state_root_run_event_id"),
        "deliveries",
        ["webhook_id", "state", "root", "run", "event_id"],
        unique=False,
    )
    op.create_table(
        "run_metrics",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("last", sa.Double(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("better", sa.String(length=3), nullable=True),
        sa.Column("better_step", sa.BigInteger(), nullable=True),
        sa.Column("best", sa.Double(), nullable=True),
        sa.Column("best_step", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_run_metrics_run_id_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_run_metrics")),
        sqlite_with_rowid=False,
    )
    for column in ("last", "best"):
        op.create_index(
            op.f(f"ix_run_metrics_name_{column}"), "run_metrics", ["name", column], unique=False
        )
    op.create_table(
        "sessions",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=12), nullable=True),
        sa.Column("expires", UTCDateTime(), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=True),
        sa.Column("scope", sa.String(length=16), nullable=True),
        sa.Column("roots", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("confirmed", UTCDateTime(), nullable=True),
        sa.Column("confirming", UTCDateTime(), nullable=True),
        sa.Column("tokens", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["key_id"], ["keys.id"], name=op.f("fk_sessions_key_id_keys"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_sessions")),
    )


def downgrade() -> None:
    op.drop_table("sessions")
    for column in ("best", "last"):
        op.drop_index(op.f(f"ix_run_metrics_name_{column}"), table_name="run_metrics")
    op.drop_table("run_metrics")
    op.drop_index(op.f("ix_deliveries_webhook_id_state_root_run_event_id"), table_name="deliveries")
    op.drop_table("deliveries")
    op.drop_index(op.f("ix_checkpoints_run_id_state_step"), table_name="checkpoints")
    op.drop_table("checkpoints")
    op.drop_table("aliases")
    op.drop_table("workers")
    op.drop_table("webhooks")
    op.drop_table("runs")
    op.drop_table("roots")
    op.drop_table("pruned")
    op.drop_table("keys")
    op.drop_table("events")
    op.drop_table("catalog_revisions")
    op.drop_table("automations")
    op.drop_index(op.f("ix_audit_events_actor_id"), table_name="audit_events")
    op.drop_index(op.f("ix_audit_events_root_run_id"), table_name="audit_events")
    op.drop_table("audit_events")
    op.drop_table("added_roots")
