"""Alembic scripts of the catalog; `cairn.service.catalog.migrate` runs them."""
