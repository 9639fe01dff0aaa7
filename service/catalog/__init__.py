"""Catalog: database with an index of the store, and the audit trail."""
