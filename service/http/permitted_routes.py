"""Routes that ask for their permission before they read anything of the body.

FastAPI reads a body before it runs the dependencies of a route: who may not ask would be told what
is wrong with theirs, and have the server parse it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class Permission(ABC):
    """A dependency of a route that has to be passed before all else."""

    @abstractmethod
    async def __call__(self, request: Request) -> Any:
        """Refuse who may not ask, by raising."""


class PermittedRoute(APIRoute):
    """A route that asks for the `Permission`s among its dependencies first.

    Before its body and parameters are read, and before it waits for a turn.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the permissions."""
        handler = self.permitted_handler()
        calls = [dependency.call for dependency in self.dependant.dependencies]
        permissions = [call for call in calls if isinstance(call, Permission)]

        async def after_permissions(request: Request) -> Response:
            for permission in permissions:
                await permission(request)
            return await handler(request)

        return after_permissions

    def permitted_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of FastAPI, for those who may ask."""
        return super().get_route_handler()
