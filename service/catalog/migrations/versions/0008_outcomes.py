"""What became of what was asked for: the audit trail is written before it is done."""

import sqlalchemy as sa
from alembic import op

from cairn.service.catalog.models import PlainText, UTCDateTime

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("audit_events", sa.Column("outcome", sa.String(16), nullable=True))
    op.add_column("audit_events", sa.Column("completed", UTCDateTime(), nullable=True))
    op.add_column("audit_events", sa.Column("request_id", PlainText(128), nullable=True))
    op.execute("UPDATE audit_events SET outcome = 'done', completed = at")  # were written after it


def downgrade() -> None:
    for name in ("request_id", "completed", "outcome"):
        op.drop_column("audit_events", name)
