"""What the last verification of a checkpoint found to be wrong, and how many of a run are so."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

works_with = "0012"
"""Code of that revision writes rows without the columns: one may be empty, one has a default."""


def upgrade() -> None:
    with op.batch_alter_table("checkpoints") as table:
        table.add_column(sa.Column("damaged", sa.JSON(), nullable=True))
    with op.batch_alter_table("runs") as table:
        table.add_column(
            sa.Column("damaged_count", sa.Integer(), nullable=False, server_default="0")
        )
    # Another control plane of the same store may have noted damage before this one could tell: what
    # is noted of steps is read once more.
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    without = (
        "json_remove(stamps, '$.annotation')"
        if is_sqlite
        else "(stamps::jsonb - 'annotation')::json"
    )
    op.execute(f"UPDATE checkpoints SET stamps = {without}")
    op.execute("UPDATE runs SET stamp = NULL")


def downgrade() -> None:
    with op.batch_alter_table("runs") as table:
        table.drop_column("damaged_count")
    with op.batch_alter_table("checkpoints") as table:
        table.drop_column("damaged")
