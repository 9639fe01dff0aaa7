"""When all of a checkpoint was last found to be what was saved."""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import UTCDateTime

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

works_with = "0012"
"""Code of that revision writes rows without the column, which may be empty."""


def upgrade() -> None:
    with op.batch_alter_table("checkpoints") as table:
        table.add_column(sa.Column("verified", UTCDateTime(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("checkpoints") as table:
        table.drop_column("verified")
