"""Records of a run that the catalog has seen, and of which the store has an older one, or none."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

works_with = "0012"
"""Code of that revision writes rows without the column, and notes no losses."""


def upgrade() -> None:
    with op.batch_alter_table("runs") as table:
        table.add_column(sa.Column("lost_records", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    with op.batch_alter_table("runs") as table:
        table.drop_column("lost_records")
