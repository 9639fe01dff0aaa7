"""Whether an alias was moved through this control plane, or around it."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("aliases", sa.Column("audited", sa.Boolean(), nullable=True))


def downgrade() -> None:
    op.drop_column("aliases", "audited")
