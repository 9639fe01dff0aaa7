"""Cairn's control plane: HTTP, catalog, jobs, dashboard and the `cairn` command."""
