"""Folders outside a root that the records of its runs may name."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

works_with = "0012"
"""Code of that revision opens nothing that this column allows, and adds roots without it."""


def upgrade() -> None:
    with op.batch_alter_table("added_roots") as table:
        table.add_column(sa.Column("adopt_from", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    with op.batch_alter_table("added_roots") as table:
        table.drop_column("adopt_from")
