"""Roots that were added while servers ran."""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import PlainText, UTCDateTime

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

works_with = "0012"
"""Code of that revision knows nothing of this table, and serves the roots of its settings."""


def upgrade() -> None:
    op.create_table(
        "added_roots",
        sa.Column("name", PlainText(128), nullable=False),
        sa.Column("uri", PlainText(4096), nullable=False),
        sa.Column("created", UTCDateTime(), nullable=False),
        sa.Column("created_by", PlainText(256), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_added_roots"),
    )


def downgrade() -> None:
    op.drop_table("added_roots")
