"""An index: what tells whether records have changed, steps without a manifest, roots.

Rows of runs are read anew: what they lack is in the store.
"""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import UTCDateTime

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_OPTIONAL = (
    ("created", UTCDateTime()),
    ("nbytes", sa.BigInteger()),
    ("leaves", sa.Integer()),
    ("manifest_digest", sa.String(80)),
)


def upgrade() -> None:
    with op.batch_alter_table("runs") as table:
        table.add_column(sa.Column("stamp", sa.String(64), nullable=True))
        table.add_column(sa.Column("due", UTCDateTime(), nullable=True))
    with op.batch_alter_table("checkpoints") as table:
        table.add_column(sa.Column("deletion", sa.JSON(none_as_null=True), nullable=True))
        table.add_column(sa.Column("stamps", sa.JSON(), nullable=False, server_default="{}"))
        for name, kind in _OPTIONAL:
            table.alter_column(name, existing_type=kind, nullable=True)
    op.create_table(
        "roots",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("uri", sa.String(4096), nullable=False),
        sa.Column("scanned", UTCDateTime(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_roots"),
    )


def downgrade() -> None:
    op.drop_table("roots")
    op.execute("DELETE FROM checkpoints WHERE created IS NULL")
    with op.batch_alter_table("checkpoints") as table:
        for name, kind in _OPTIONAL:
            table.alter_column(name, existing_type=kind, nullable=False)
        table.drop_column("stamps")
        table.drop_column("deletion")
    with op.batch_alter_table("runs") as table:
        table.drop_column("due")
        table.drop_column("stamp")
