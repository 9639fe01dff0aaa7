"""Operations (the HTTP resource of jobs): list, get, watch, cancel, resume."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from datetime import datetime
from typing import Annotated, Final

from fastapi import APIRouter, Header, Path, Query, Response
from fastapi.sse import EventSourceResponse, format_sse_event

from cairn.service.access.callers import Caller
from cairn.service.access.permission import Operator, Reader
from cairn.service.actions import operations
from cairn.service.actions.plane import ControlPlane
from cairn.service.dependencies import Filter, OrderBy, PageSize, PageToken, PlaneDependency
from cairn.service.filters.fields import OPERATION_FIELDS
from cairn.service.filters.search import Search
from cairn.service.http.limited_routes import StoreRoute
from cairn.service.http.paging import decode_token, encode_token
from cairn.service.http.path_names import named
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import OPERATION_PATTERN, Operation, OperationList, OperationState

router: Final = APIRouter(prefix="/operations", tags=["operations"], route_class=PermittedRoute)

RETRY_MILLISECONDS: Final = 1000

_LAST: Final[Mapping[str, type]] = {"created": datetime, "id": str}
"""Keys that break ties of every order, with their types."""

_EVENT: Final = {
    "type": "object",
    "properties": {
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/Operation"},
        },
        "id": {"type": "string"},
        "retry": {"type": "integer"},
    },
    "required": ["data"],
}

OperationId = Annotated[str, Path(pattern=OPERATION_PATTERN, description="Id of an operation.")]
StateFilter = Annotated[
    OperationState | None, Query(description="Operations in this state only; default: all.")
]
LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", max_length=64, description="Id of the last event received."),
]


def list_operations(
    caller: Reader,
    plane: PlaneDependency,
    state: StateFilter = None,
    filter: Filter = "",
    order_by: OrderBy = "",
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> OperationList:
    """List operations, newest first unless `order_by` says otherwise.

    Fields: `kind`, `state`, `root`, `run`, `step`, `caller`, `format` and `dtype` of an export,
    `created`, `updated`.
    """
    search = Search.parse(filter, order_by, OPERATION_FIELDS)
    if state is not None:
        search = search.equal(state=state.value)
    return page_of_operations(plane, caller, search, page_size, page_token)


router.add_api_route("", list_operations, route_class_override=StoreRoute)


def page_of_operations(
    plane: ControlPlane, caller: Caller, search: Search, page_size: int, page_token: str | None
) -> OperationList:
    """Return a page of operations.

    Args:
        plane: Control plane that has the operations.
        caller: Caller of the request; operations of other roots are left out.
        search: Filter and order; newest first if it has no order.
        page_size: Largest number of operations on the page.
        page_token: `next_page_token` of the page before; None for the first page.
    """
    listing = f"operations{search.mark}"
    after = decode_token(listing, page_token, kinds=search.key_kinds(_LAST))
    page, last = operations.list_operations(plane, caller, search, after=after, limit=page_size)
    return OperationList(
        operations=page, next_page_token=encode_token(listing, last) if last else None
    )


@router.get("/" + named("operation"), responses=problem_responses(404))
def get_operation(caller: Reader, operation: OperationId, plane: PlaneDependency) -> Operation:
    """Get the current state of an operation."""
    return operations.get_operation(plane, caller, operation)


@router.post("/{operation}:cancel", responses=problem_responses(404, 409))
def cancel_operation(caller: Operator, operation: OperationId, plane: PlaneDependency) -> Operation:
    """Cancel an operation and remove what it wrote. A cancelled operation stays cancelled."""
    return operations.cancel_operation(plane, caller, operation)


@router.post("/{operation}:resume", responses=problem_responses(404, 409))
def resume_operation(caller: Operator, operation: OperationId, plane: PlaneDependency) -> Operation:
    """Run a failed or cancelled operation again."""
    return operations.resume_operation(plane, caller, operation)


@router.get(
    "/{operation}/events",
    response_class=Response,  # with the event class, FastAPI expects a generator: no 204
    responses={
        200: {
            "description": "Server-sent events; the data of each is an `Operation` as JSON.",
            "content": {"text/event-stream": {"itemSchema": _EVENT}},
        },
        204: {"description": "The operation has ended, and Last-Event-ID names its last event."},
        **problem_responses(404),
    },
)
async def watch_operation(
    caller: Reader,
    operation: OperationId,
    plane: PlaneDependency,
    last_event_id: LastEventId = None,
) -> Response:
    """Stream the state of an operation, now and at every change, until it ends.

    The id of an event names the state that the event carries. A client that reconnects with it as
    `Last-Event-ID` gets no state twice, and gets the newest of the states that it missed.
    """
    states = operations.watch_operation(plane, caller, operation)
    current = await anext(states)
    if current is not None and current.state.final and _event_id(current) == last_event_id:
        await states.aclose()
        return Response(status_code=204)  # the status that stops an EventSource from reconnecting
    return EventSourceResponse(
        _events(current, states, last_event_id), headers={"Cache-Control": "no-store"}
    )


async def _events(
    current: Operation | None, states: AsyncGenerator[Operation | None], last_id: str | None
) -> AsyncIterator[bytes]:
    async with aclosing(states):
        while True:
            if current is None:
                yield format_sse_event(comment="ping")
            elif _event_id(current) != last_id:
                last_id = _event_id(current)
                yield format_sse_event(
                    data_str=current.model_dump_json(), id=last_id, retry=RETRY_MILLISECONDS
                )
            try:
                current = await anext(states)
            except StopAsyncIteration:
                return


def _event_id(operation: Operation) -> str:
    """Derive an event id from a state: equal states get equal ids in every process."""
    return hashlib.sha256(operation.model_dump_json().encode()).hexdigest()[:16]
