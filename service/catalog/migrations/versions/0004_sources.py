"""Where the files of an adopted checkpoint lie."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("source", sa.String(4096), nullable=True))


def downgrade() -> None:
    op.drop_column("checkpoints", "source")
