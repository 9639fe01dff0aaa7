"""Sessions of browsers."""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import UTCDateTime

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("expires", UTCDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["key_id"], ["keys.id"], name="fk_sessions_key_id_keys", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("digest", name="pk_sessions"),
    )


def downgrade() -> None:
    op.drop_table("sessions")
