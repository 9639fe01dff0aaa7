"""Routes that ask for their permission before they read anything of the body.

FastAPI reads a body before it runs the dependencies of a route: who may not ask would be told what
is wrong with theirs, and have the server parse it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute

PERMISSION: Final = "x-cairn-permission"
"""Field of an operation in the OpenAPI document that says who may have it done."""


class Permission(ABC):
    """A dependency of a route that has to be passed before all else."""

    @property
    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Who passes, for the OpenAPI document."""

    @abstractmethod
    async def __call__(self, request: Request) -> Any:
        """Refuse who may not ask, by raising."""


class PermittedRoute(APIRoute):
    """A route that asks for the `Permission`s among its dependencies first.

    Before its body and parameters are read, and before it waits for a turn. The OpenAPI document
    names them.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        described = [permission.described for permission in self._permissions()]
        self.openapi_extra = {PERMISSION: described[0]} if described else None

    def _permissions(self) -> list[Permission]:
        calls = [dependency.call for dependency in self.dependant.dependencies]
        return [call for call in calls if isinstance(call, Permission)]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the permissions."""
        handler = self.permitted_handler()
        permissions = self._permissions()

        async def after_permissions(request: Request) -> Response:
            for permission in permissions:
                await permission(request)
            return await handler(request)

        return after_permissions

    def permitted_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of FastAPI, for those who may ask."""
        return super().get_route_handler()
