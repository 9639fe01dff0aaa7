"""Events of checkpoints, for clients that poll."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from cairn.service.access.permission import Reader
from cairn.service.actions import events as listing_actions
from cairn.service.dependencies import PageSize, PageToken, PlaneDependency
from cairn.service.http.answers import json_answer
from cairn.service.http.limited_routes import StoreRoute
from cairn.service.http.paging import decode_token, encode_token
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import MAX_NUMBER, NAME_PATTERN, RUN_PATTERN, EventKind, EventList

router: Final = APIRouter(prefix="/events", tags=["events"], route_class=StoreRoute)

After = Annotated[
    int, Query(ge=0, le=MAX_NUMBER, description="Id of the last event that is known already.")
]
RootFilter = Annotated[str | None, Query(pattern=NAME_PATTERN, description="Of this root only.")]
RunFilter = Annotated[
    str | None, Query(pattern=RUN_PATTERN, description="Of runs of this name only.")
]
KindFilter = Annotated[EventKind | None, Query(description="Of this kind only.")]


@router.get("", response_model=EventList, responses=problem_responses(410))
def list_events(
    caller: Reader,
    plane: PlaneDependency,
    after: After = 0,
    root: RootFilter = None,
    run: RunFilter = None,
    kind: KindFilter = None,
    page_size: PageSize = 100,
    page_token: PageToken = None,
) -> Response:
    """List events in the order in which this catalog recorded them.

    A client that passes the id of the last event it received as `after` misses none. If events
    after that id have been pruned, the answer is 410, and `pruned` is the id to continue from. With
    `after=0` the list starts at the oldest event that is kept.
    """
    listing = f"events, {root}, {run}, {kind}"
    key = decode_token(listing, page_token, kinds=(int,))
    since = max(after, int(key[0]) if key else 0)
    page, more = listing_actions.list_events(
        plane, caller, after=since, limit=page_size, root=root, run=run, kind=kind
    )
    if more:
        token = encode_token(listing, (page.position,))
        page = page.model_copy(update={"next_page_token": token})
    return json_answer(page)
