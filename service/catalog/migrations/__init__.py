"""Alembic scripts of the catalog; `service.catalog.migrate` runs them."""
