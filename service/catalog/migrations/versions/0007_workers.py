"""Job workers that were started."""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import PlainText, UTCDateTime

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "workers",
        sa.Column("name", PlainText(128), nullable=False),
        sa.Column("host", PlainText(256), nullable=False),
        sa.Column("process", sa.Integer(), nullable=False),
        sa.Column("version", PlainText(64), nullable=False),
        sa.Column("started", UTCDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_workers"),
    )


def downgrade() -> None:
    op.drop_table("workers")
