"""Route classes of pages, with the same limiters for catalog and store as the API's routes."""

from typing import ClassVar

from cairn.service.http.limited_routes import StoreReadRoute, StoreRoute


class CatalogPage(StoreRoute):
    """Route of a page or form. Reads are answered from the catalog if it has the data.

    Other reads, and all changes, go to the store.
    """

    searches: ClassVar[frozenset[str]] = frozenset(
        {"filter", "order_by", "q", "owner", "label", "state"}
    )


class StorePage(StoreReadRoute):
    """Route of a page that always reads from the store."""
