"""Runs, checkpoints, aliases and the audit trail."""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import UTCDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("root", sa.String(128), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("uri", sa.String(4096), nullable=False),
        sa.Column("created", UTCDateTime(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("lineage", sa.JSON(), nullable=True),
        sa.Column("latest_step", sa.BigInteger(), nullable=True),
        sa.Column("checkpoint_count", sa.Integer(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.UniqueConstraint("root", "name", name="uq_runs_root_name"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created", UTCDateTime(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("leaves", sa.Integer(), nullable=False),
        sa.Column("items", sa.JSON(), nullable=False),
        sa.Column("manifest_digest", sa.String(80), nullable=False),
        sa.Column("model_type", sa.String(128), nullable=True),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name="fk_checkpoints_run_id_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
        sa.UniqueConstraint("run_id", "step", "attempt", name="uq_checkpoints_run_id_step_attempt"),
    )
    op.create_index("ix_checkpoints_run_id_state_step", "checkpoints", ["run_id", "state", "step"])
    op.create_table(
        "aliases",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("manifest_digest", sa.String(80), nullable=True),
        sa.Column("by", sa.String(256), nullable=False),
        sa.Column("reason", sa.String(2000), nullable=False),
        sa.Column("at", UTCDateTime(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name="fk_aliases_run_id_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_aliases"),
        sa.UniqueConstraint("run_id", "alias", name="uq_aliases_run_id_alias"),
    )
    op.create_table(
        "audit_events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", UTCDateTime(), nullable=False),
        sa.Column("actor", sa.String(256), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("root", sa.String(128), nullable=False),
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_events"),
    )
    op.create_index("ix_audit_events_root_run_id", "audit_events", ["root", "run", "id"])


def downgrade() -> None:
    op.drop_table("audit_events")
    op.drop_table("aliases")
    op.drop_table("checkpoints")
    op.drop_table("runs")
