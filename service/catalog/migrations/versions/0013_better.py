"""Of metrics, whether small or large values are good."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

works_with = "0012"
"""Code of that revision writes rows without the column, which has a default."""


def upgrade() -> None:
    with op.batch_alter_table("checkpoints") as table:
        table.add_column(sa.Column("better", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    with op.batch_alter_table("checkpoints") as table:
        table.drop_column("better")
