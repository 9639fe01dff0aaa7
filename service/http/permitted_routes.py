"""Routes that check their permission before they read the body.

FastAPI reads a body before it runs a route's dependencies. So a caller without permission could
make the server parse the body, and would get the errors in it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute

PERMISSION: Final = "x-cairn-permission"
"""Field of an OpenAPI operation that says which permission the operation needs."""


class Permission(ABC):
    """Dependency of a route that is checked before all others."""

    @property
    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Description of the callers that pass, for the OpenAPI document."""

    @abstractmethod
    async def __call__(self, request: Request) -> Any:
        """Return the value of the dependency; raise if the caller lacks the permission."""


class PermittedRoute(APIRoute):
    """Route that checks the `Permission`s among its dependencies first.

    The check comes before the body and parameters are read, and before the route waits for a slot.
    The OpenAPI document names the first permission.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        described = [permission.described for permission in self._permissions()]
        self.openapi_extra = {PERMISSION: described[0]} if described else None

    def _permissions(self) -> list[Permission]:
        calls = [dependency.call for dependency in self.dependant.dependencies]
        return [call for call in calls if isinstance(call, Permission)]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that checks the permissions, and then calls the permitted handler."""
        handler = self.permitted_handler()
        permissions = self._permissions()

        async def after_permissions(request: Request) -> Response:
            for permission in permissions:
                await permission(request)
            return await handler(request)

        return after_permissions

    def permitted_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, for callers that have the permission."""
        return super().get_route_handler()
