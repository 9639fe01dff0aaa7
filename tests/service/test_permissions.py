import pytest
from fastapi.routing import APIRoute

from cairn.service.access import Administrator, Caller, Operator, Reader, Scope
from cairn.service.app import ROUTERS
from cairn.service.dashboard import ROUTERS as PAGES
from cairn.service.errors import ForbiddenError

KINDS = {
    Scope.READ: Reader.__metadata__[0].dependency,
    Scope.OPERATE: Operator.__metadata__[0].dependency,
    Scope.ADMIN: Administrator.__metadata__[0].dependency,
}
ROUTES = [
    route for router in (*ROUTERS, *PAGES) for route in router.routes if isinstance(route, APIRoute)
]


def asked(route):
    """The scopes that a route asks of its caller, in order."""
    calls = [one.call for one in route.dependant.dependencies]
    return [scope for call in calls for scope, kind in KINDS.items() if kind is call]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_route_asks_one_permission_and_before_all_else(route):
    scopes = asked(route)
    assert len(scopes) == 1
    first = route.dependant.dependencies[0].call
    assert first is KINDS[scopes[0]]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_what_changes_something_takes_more_than_reading(route):
    # One asks for a look at the store, as `refresh` does; the other has a body to ask with.
    harmless = {"announce_checkpoint", "plan_checkpoint"}
    # They tell who there is.
    managing = {"list_keys", "list_audit_events", "list_webhooks", "list_deliveries"}
    managing |= {"keys_page", "audit_page", "webhooks_page", "webhook_page"}
    changes = not route.methods <= {"GET", "HEAD"} and route.name not in harmless
    changes = changes or route.name in managing
    assert (asked(route) != [Scope.READ]) is changes


@pytest.mark.parametrize("scope", Scope)
def test_scopes_include_those_before_them(scope):
    order = ["read", "operate", "admin"]
    for other in Scope:
        assert scope.includes(other) is (order.index(scope) >= order.index(other))


def test_caller_of_one_root_may_nothing_in_another():
    caller = Caller("ci", Scope.OPERATE, frozenset({"a"}))
    caller.require(Scope.READ, "a")
    caller.require(Scope.READ)
    assert caller.visible({"a": 1, "b": 2}) == {"a": 1}
    with pytest.raises(ForbiddenError, match="root 'b': expected a caller who may use it, found"):
        caller.require(Scope.READ, "b")
    with pytest.raises(ForbiddenError, match="expected a caller who may admin, found 'ci', who"):
        caller.require(Scope.ADMIN, "a")
