"""Alembic environment for the connection that `cairn.service.catalog.migrate` passes."""

from alembic import context

from cairn.service.catalog.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    compare_type=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
