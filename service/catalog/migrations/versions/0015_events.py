"""Events, and who is told of them."""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import PlainText, UTCDateTime

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

works_with = "0012"
"""Code of that revision knows nothing of these tables: what it changes becomes no event."""


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("root", PlainText(128), nullable=False),
        sa.Column("run", PlainText(128), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("identity", sa.String(64), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("at", UTCDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.UniqueConstraint("uid", name="uq_events_uid"),
        sa.UniqueConstraint(
            "root", "run", "kind", "identity", name="uq_events_root_run_kind_identity"
        ),
        sa.UniqueConstraint("root", "run", "sequence", name="uq_events_root_run_sequence"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("url", PlainText(2000), nullable=False),
        sa.Column("secret", sa.String(128), nullable=False),
        sa.Column("kinds", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("roots", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("runs", PlainText(128), nullable=False),
        sa.Column("created", UTCDateTime(), nullable=False),
        sa.Column("created_by", PlainText(256), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_table(
        "deliveries",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("webhook_id", sa.String(12), nullable=False),
        sa.Column("event_id", sa.Integer(), nullable=False),
        sa.Column("root", PlainText(128), nullable=False),
        sa.Column("run", PlainText(128), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due", UTCDateTime(), nullable=False),
        sa.Column("log", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
        sa.ForeignKeyConstraint(
            ["webhook_id"],
            ["webhooks.id"],
            name="fk_deliveries_webhook_id_webhooks",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["event_id"], ["events.id"], name="fk_deliveries_event_id_events", ondelete="CASCADE"
        ),
        sa.UniqueConstraint("webhook_id", "event_id", name="uq_deliveries_webhook_id_event_id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_deliveries_webhook_id_state_root_run_event_id",
        "deliveries",
        ["webhook_id", "state", "root", "run", "event_id"],
    )


def downgrade() -> None:
    op.drop_table("deliveries")
    op.drop_table("webhooks")
    op.drop_table("events")
