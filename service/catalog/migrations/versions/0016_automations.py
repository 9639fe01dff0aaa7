"""How far automations have followed the moves of aliases."""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import PlainText, UTCDateTime

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

works_with = "0012"
"""Code of that revision knows nothing of this table."""


def upgrade() -> None:
    op.create_table(
        "automations",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("operation", sa.String(64), nullable=True),
        sa.Column("problem", PlainText(2000), nullable=True),
        sa.Column("at", UTCDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_automations"),
    )


def downgrade() -> None:
    op.drop_table("automations")
