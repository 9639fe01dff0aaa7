"""Which older versions go on with the tables: of each revision, the oldest whose code does."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "catalog_revisions",
        sa.Column("revision", sa.String(32), nullable=False),
        sa.Column("works_with", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("revision", name="pk_catalog_revisions"),
    )


def downgrade() -> None:
    op.drop_table("catalog_revisions")
