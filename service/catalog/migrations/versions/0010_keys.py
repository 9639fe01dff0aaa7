"""Keys of callers."""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import PlainText, UTCDateTime

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String(12), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("name", PlainText(128), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("roots", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created", UTCDateTime(), nullable=False),
        sa.Column("created_by", PlainText(256), nullable=False),
        sa.Column("expires", UTCDateTime(), nullable=True),
        sa.Column("revoked", UTCDateTime(), nullable=True),
        sa.Column("last_used", UTCDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
    )


def downgrade() -> None:
    op.drop_table("keys")
