"""What is wrong with the records of a run."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("problems", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("runs", "problems")
