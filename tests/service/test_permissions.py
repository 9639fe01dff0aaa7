import pytest
from fastapi.routing import APIRoute

from cairn.service.access.callers import Caller, Scope
from cairn.service.dashboard.routers import ROUTERS as PAGES
from cairn.service.errors import ForbiddenError
from cairn.service.http.permitted_routes import PermittedRoute
from tests.service.seams import ROUTERS, Allowed

ROUTES = [
    route for router in (*ROUTERS, *PAGES) for route in router.routes if isinstance(route, APIRoute)
]


def permissions(route):
    """What a route asks of its caller, in order."""
    calls = [one.call for one in route.dependant.dependencies]
    return [call for call in calls if isinstance(call, Allowed)]


def asked(route):
    """The scopes among them."""
    return [one.scope for one in permissions(route)]


def test_every_route_asks_one_permission_and_before_all_else():
    for route in ROUTES:
        assert isinstance(route, PermittedRoute), route.name
        assert [route.dependant.dependencies[0].call] == permissions(route), route.name


def test_what_an_administrator_is_needed_for_is_of_a_run_or_a_policy_or_takes_all_roots():
    for route in ROUTES:
        (permission,) = permissions(route)
        of_policy = "/policies" in route.path and "{root}" in route.path
        in_one_root = "{run}" in route.path or of_policy
        expected = permission.scope is Scope.ADMIN and not in_one_root
        assert permission.everywhere is expected, route.name


def test_what_changes_something_takes_more_than_reading():
    # One asks for a look at the store, as `refresh` does; the other has a body to ask with.
    harmless = {"announce_checkpoint", "plan_checkpoint"}
    # They tell who there is.
    managing = {"list_keys", "list_audit_events", "list_webhooks", "list_deliveries"}
    managing |= {"keys_page", "audit_page", "webhooks_page", "webhook_page"}
    for route in ROUTES:
        changes = not route.methods <= {"GET", "HEAD"} and route.name not in harmless
        changes = changes or route.name in managing
        assert (asked(route) != [Scope.READ]) is changes, route.name


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
    with pytest.raises(ForbiddenError, match='"ci" gives no access to root "b", only to a'):
        caller.require(Scope.READ, "b")
    with pytest.raises(ForbiddenError, match='"admin" scope; your key "ci" has operate only'):
        caller.require(Scope.ADMIN, "a")
