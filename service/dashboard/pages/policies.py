"""Policies, to see, try, set and delete: `/policies`."""

import json
from typing import Annotated, Any, Final

from fastapi import Query, Request, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Administrator, Operator, Reader
from cairn.service.actions import policies, policy_trials
from cairn.service.dashboard.form_fields import Form, FormDependency, body_of, invalid, redirect
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName
from cairn.service.policies import KINDS, PolicyState, PutPolicyRequest
from cairn.service.routes.policies import KindName, PolicyName

EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "schedule": {"name": "nightly", "cron": "0 3 * * *", "action": "verify"},
    "retention": {"name": "weekly", "run": "scratch-*", "cron": "0 4 * * 0", "keep_last": 3},
    "automation": {"name": "export", "alias": "production", "action": "convert"},
    "gate": {
        "name": "checked",
        "alias": "production",
        "verified": True,
        "labels": {"eval": "passed"},
        "metrics": {"eval/loss": {"max": 2}},
    },
}
"""Contents of the form for a new policy, by kind."""

router: Final = page_router(StorePage)


@router.get("/policies")
def policies_page(
    request: Request,
    caller: Reader,
    plane: PlaneDependency,
    root: Annotated[str, Query(max_length=128)] = "",
    kind: Annotated[str, Query(max_length=32)] = "",
    name: Annotated[str, Query(max_length=128)] = "",
) -> HTMLResponse:
    """Show the policies, and a form for one of them or for a new one."""
    roots = list(caller.visible(plane.roots))
    listed = policies.list_policies(plane, caller)
    shown = [state for state in listed.policies if _is_shown(state, root, kind, name)]
    kind = kind if kind in KINDS else KINDS[0]
    document = shown[0].policy if shown else {"kind": kind, **EXAMPLES[kind]}
    return page(
        request,
        "administration/policies.html",
        policies=listed.policies,
        problems=listed.problems,
        roots=roots,
        root=root if root in roots else next(iter(roots), ""),
        kinds=KINDS,
        kind=kind,
        shown=shown[0] if shown else None,
        document=json.dumps(document, indent=2),
    )


@router.post("/policies/{root}/try")
def try_policy_form(
    request: Request,
    caller: Operator,
    root: RootName,
    plane: PlaneDependency,
    form: FormDependency,
) -> HTMLResponse:
    """Show what a policy would do now."""
    trial = policy_trials.try_policy(plane, root, _body(form).policy)
    return page(request, "administration/policy_trial.html", trial=trial, root=root)


@router.post("/policies/{root}/set")
def set_policy_form(
    caller: Administrator, root: RootName, plane: PlaneDependency, form: FormDependency
) -> Response:
    """Create a policy, or change it if it is as the page showed it."""
    policy = _body(form).policy
    is_shown = (policy.kind, policy.name) == (form.text("kind"), form.text("name"))
    expect = form.number("expect") if is_shown else None
    policies.put_policy(plane, caller, root, policy, expect=expect)
    return redirect("/policies")


@router.post("/policies/{root}/{kind}/{policy}/delete")
def delete_policy_form(
    caller: Administrator,
    root: RootName,
    kind: KindName,
    policy: PolicyName,
    plane: PlaneDependency,
    form: FormDependency,
) -> Response:
    """Delete a policy if it is as the page showed it."""
    policies.delete_policy(plane, caller, root, kind, policy, expect=form.number("expect") or 0)
    return redirect("/policies")


def _is_shown(state: PolicyState, root: str, kind: str, name: str) -> bool:
    place = (state.source, state.root, state.kind, state.name)
    return place == ("root", root, kind, name)


def _body(form: Form) -> PutPolicyRequest:
    """Return the policy whose JSON a form has.

    Raises:
        InvalidRequestError: It is no JSON, or no policy.
    """
    try:
        document = json.loads(form.text("policy"))
    except (ValueError, RecursionError) as exc:
        raise invalid("policy", f"no JSON: {exc}") from exc
    return body_of(PutPolicyRequest, policy=document)
