"""Route classes of pages, with the same limiters for catalog and store as the API's routes."""

from typing import ClassVar

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from cairn.service.http.limited_routes import StoreReadRoute, StoreRoute
from cairn.service.http.permitted_routes import PermittedRoute


class CatalogPage(StoreRoute):
    """Route of a page or form.

    A read is answered from the catalog if it has the data. Other reads, and all changes, go to the
    store.
    """

    searches: ClassVar[frozenset[str]] = frozenset(
        {"filter", "order_by", "q", "owner", "label", "state"}
    )


class StorePage(StoreReadRoute):
    """Route of a page that always reads from the store."""


def page_router(route_class: type[PermittedRoute] = CatalogPage) -> APIRouter:
    """Return a router of pages, which the API's document leaves out."""
    return APIRouter(
        include_in_schema=False, default_response_class=HTMLResponse, route_class=route_class
    )
