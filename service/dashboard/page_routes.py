"""The routes of pages: they take turns at catalog and store as those of the API do."""

from typing import ClassVar

from cairn.service.http import StoreReadRoute, StoreRoute


class CatalogPage(StoreRoute):
    """A page that the catalog answers, unless it knows too little."""

    searches: ClassVar[frozenset[str]] = frozenset(
        {"filter", "order_by", "q", "owner", "label", "state"}
    )


class StorePage(StoreReadRoute):
    """A page that reads from the store what no catalog has."""
