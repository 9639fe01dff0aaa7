"""Dependencies that require a permission: `caller: Reader`, `Operator`, `Administrator` and more.

Every route of the API has one of them and is a `PermittedRoute`. So 401 and 403 come before every
other error, even before those of the body.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

from fastapi import Depends, Request

from cairn.service.access.callers import Caller, Scope
from cairn.service.errors import UnauthenticatedError
from cairn.service.http.permitted_routes import Permission
from cairn.service.observability.ids import request_id


@dataclass(frozen=True)
class Allowed(Permission):
    """Dependency that returns the caller if it has a scope in the path's root.

    Attributes:
        scope: Scope that the route needs.
        everywhere: The caller needs the scope in all roots.
    """

    scope: Scope
    everywhere: bool = False

    @property
    def described(self) -> dict[str, Any]:
        """Scope and reach of the permission, for the OpenAPI document; see `Permission`."""
        return {"scope": self.scope.value, "all_roots": self.everywhere}

    async def __call__(self, request: Request) -> Caller:
        """Return the caller, with the id of the request.

        Raises:
            ForbiddenError: The caller lacks the permission.
            UnauthenticatedError: The guard has not identified a caller.
        """
        identity = cast(Caller | None, request.state.caller)  # set by the guard, before any route
        if identity is None:
            raise UnauthenticatedError("Nobody is signed in.")
        caller = replace(identity, request_id=request_id() or "")
        if self.everywhere:
            caller.require_everywhere(self.scope)
        else:
            caller.require(self.scope, request.path_params.get("root"))
        return caller


Reader = Annotated[Caller, Depends(Allowed(Scope.READ))]
"""May read everything, and ask for a new scan of the store."""

Operator = Annotated[Caller, Depends(Allowed(Scope.OPERATE))]
"""May also promote, delete, restore, export and verify."""

Administrator = Annotated[Caller, Depends(Allowed(Scope.ADMIN))]
"""May also make changes in the path's root that cannot be undone."""

ServerAdministrator = Annotated[Caller, Depends(Allowed(Scope.ADMIN, everywhere=True))]
"""May also make changes that concern other callers, or all roots."""
