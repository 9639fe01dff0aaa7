"""What a route asks of its caller: `caller: Reader`, `Operator` or `Administrator`.

Every route of the API has one of them, and so 401 and 403 come before all else that is amiss.
"""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Annotated, Any, cast

from fastapi import Depends, Request

from cairn.service.access.callers import Caller, Scope
from cairn.service.errors import UnauthenticatedError
from cairn.service.observing import request_id


def allowed(scope: Scope) -> Callable[[Request], Coroutine[Any, Any, Caller]]:
    """A dependency: the caller, if they may do what needs `scope` in the path's root."""

    async def caller(request: Request) -> Caller:
        known = cast(Caller | None, request.state.caller)  # by the guard, before any route
        if known is None:
            raise UnauthenticatedError("expected somebody who is signed in, found nobody")
        found = replace(known, request_id=request_id() or "")
        found.require(scope, request.path_params.get("root"))
        return found

    return caller


Reader = Annotated[Caller, Depends(allowed(Scope.READ))]
"""May look at everything that is kept, and ask for a new look at the store."""

Operator = Annotated[Caller, Depends(allowed(Scope.OPERATE))]
"""May also promote, delete, restore, export and verify."""

Administrator = Annotated[Caller, Depends(allowed(Scope.ADMIN))]
"""May also do what no undoing follows, or what concerns other callers."""
