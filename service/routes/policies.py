"""Policies: schedules, retention, automations and gates, of the environment and of roots."""

from typing import Annotated, Final

from fastapi import APIRouter, Path, Query, Response

from cairn.service.access.permission import Administrator, Operator, Reader
from cairn.service.actions import policies, policy_trials
from cairn.service.dependencies import PlaneDependency, RootName
from cairn.service.errors import InvalidRequestError
from cairn.service.http.answers import NOT_CHANGED, json_answer
from cairn.service.http.entity_tags import etag, names_etag
from cairn.service.http.limited_routes import StoreReadRoute
from cairn.service.http.path_names import named
from cairn.service.http.preconditions import (
    Condition,
    ExpectationDependency,
    LastSeenDependency,
)
from cairn.service.http.problems import problem_responses
from cairn.service.policies import (
    KIND_PATTERN,
    PolicyKind,
    PolicyList,
    PolicyState,
    PolicyTrial,
    PutPolicyRequest,
)
from cairn.service.schemas import NAME_PATTERN

router: Final = APIRouter(tags=["policies"], route_class=StoreReadRoute)

PolicyName = Annotated[
    str, Path(pattern=NAME_PATTERN, description="Name of a policy.", examples=["nightly"])
]
KindName = Annotated[
    str, Path(pattern=KIND_PATTERN, description="Kind of a policy.", examples=["schedule"])
]
KindFilter = Annotated[
    PolicyKind | None, Query(description="Policies of this kind only; default: all.")
]

_POLICY: Final = f"/roots/{{root}}/policies/{{kind}}/{named('policy')}"


@router.get("/policies")
def list_policies(caller: Reader, plane: PlaneDependency, kind: KindFilter = None) -> PolicyList:
    """List the policies for the caller's roots, by kind and name.

    Each has its source. Those of the environment are read only, and override those of a root with
    the same kind and name.
    """
    return policies.list_policies(plane, caller, kind=kind)


@router.get(
    _POLICY, response_model=PolicyState, responses={304: NOT_CHANGED, **problem_responses(404)}
)
def get_policy(
    caller: Reader,
    root: RootName,
    kind: KindName,
    policy: PolicyName,
    plane: PlaneDependency,
    if_none_match: Condition = None,
) -> Response:
    """Get the policy that is in force. Send its ETag as the `If-Match` of a change."""
    state = policies.get_policy(plane, caller, root, kind, policy)
    if state.sequence is None:
        return json_answer(state)
    tag = etag(state.sequence)
    if names_etag(if_none_match, tag):
        return Response(status_code=304, headers={"ETag": tag})
    return json_answer(state, {"ETag": tag})


@router.put(
    _POLICY,
    response_model=PolicyState,
    responses={
        201: {"description": "The policy is created.", "model": PolicyState},
        **problem_responses(404, 409, 412, 428),
    },
)
def put_policy(
    caller: Administrator,
    root: RootName,
    kind: KindName,
    policy: PolicyName,
    body: PutPolicyRequest,
    expect: ExpectationDependency,
    plane: PlaneDependency,
) -> Response:
    """Create or change a policy of a root, if nobody has changed it since the caller read it.

    Every server of the root follows it within 15 seconds. A policy that the environment has too is
    refused (409).
    """
    expect.require_possible()
    if (body.policy.kind, body.policy.name) != (kind, policy):
        text = f"expected {kind} {policy!r}, as the path has it"
        raise InvalidRequestError(
            f"body.policy: {text}", errors=[{"field": "body.policy", "detail": text}]
        )
    state = policies.put_policy(plane, caller, root, body.policy, expect=expect.sequence)
    assert state.sequence is not None
    answer = json_answer(state, {"ETag": etag(state.sequence)})
    answer.status_code = 201 if expect.sequence is None else 200
    return answer


@router.delete(_POLICY, status_code=204, responses=problem_responses(404, 409, 412, 428))
def delete_policy(
    caller: Administrator,
    root: RootName,
    kind: KindName,
    policy: PolicyName,
    expect: LastSeenDependency,
    plane: PlaneDependency,
) -> None:
    """Delete a policy of a root; with `If-Match: "0"`, a record that is no valid policy."""
    policies.delete_policy(plane, caller, root, kind, policy, expect=expect)


@router.post("/roots/{root}/policies:try", responses=problem_responses(404))
def try_policy(
    caller: Operator, root: RootName, body: PutPolicyRequest, plane: PlaneDependency
) -> PolicyTrial:
    """Return what a policy would do in a root now; nothing is changed.

    The policy need not be set. Webhooks of gates are not called.
    """
    return policy_trials.try_policy(plane, root, body.policy)
