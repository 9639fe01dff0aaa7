"""Up to which event some are gone."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

works_with = "0012"
"""Code of that revision knows nothing of this table."""


def upgrade() -> None:
    op.create_table(
        "pruned",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_pruned"),
    )


def downgrade() -> None:
    op.drop_table("pruned")
