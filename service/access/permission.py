"""What a route asks of its caller: `caller: Reader`, `Operator`, `Administrator` or of all roots.

Every route of the API has one of them and is a `PermittedRoute`, and so 401 and 403 come before all
else that is amiss, the body included.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

from fastapi import Depends, Request

from cairn.service.access.callers import Caller, Scope
from cairn.service.errors import UnauthenticatedError
from cairn.service.http import Permission
from cairn.service.observing import request_id


@dataclass(frozen=True)
class Allowed(Permission):
    """A dependency: the caller, if they may do what needs `scope` in the path's root.

    Attributes:
        scope: What it takes.
        everywhere: It takes that in all roots.
    """

    scope: Scope
    everywhere: bool = False

    @property
    def described(self) -> dict[str, Any]:
        """See `Permission`."""
        return {"scope": self.scope.value, "all_roots": self.everywhere}

    async def __call__(self, request: Request) -> Caller:
        """Return who asks.

        Raises:
            ForbiddenError: They may not.
            UnauthenticatedError: Nobody is known to ask.
        """
        known = cast(Caller | None, request.state.caller)  # by the guard, before any route
        if known is None:
            raise UnauthenticatedError("expected somebody who is signed in, found nobody")
        caller = replace(known, request_id=request_id() or "")
        if self.everywhere:
            caller.require_everywhere(self.scope)
        else:
            caller.require(self.scope, request.path_params.get("root"))
        return caller


Reader = Annotated[Caller, Depends(Allowed(Scope.READ))]
"""May look at everything that is kept, and ask for a new look at the store."""

Operator = Annotated[Caller, Depends(Allowed(Scope.OPERATE))]
"""May also promote, delete, restore, export and verify."""

Administrator = Annotated[Caller, Depends(Allowed(Scope.ADMIN))]
"""May also do in the path's root what no undoing follows."""

ServerAdministrator = Annotated[Caller, Depends(Allowed(Scope.ADMIN, everywhere=True))]
"""May also do what concerns other callers, or all roots."""
