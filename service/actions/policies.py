"""Policies: those of the environment, and those that roots have. The environment wins.

A policy of a root is set and deleted in its store, by compare-and-swap. Every server of the root
reads it there, within `CACHE_SECONDS`.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Final, Generic, TypeVar

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.root_policies import CACHE_SECONDS, StoredPolicy, parse_policy
from cairn.service.catalog.audit import last_entry
from cairn.service.catalog.events.automations import positions, states
from cairn.service.catalog.models import AutomationRow
from cairn.service.errors import (
    FixedPolicyError,
    InvalidRequestError,
    NotReadyError,
    PolicyChangedError,
    UnknownPolicyError,
)
from cairn.service.jobs.errors import OperationNotFoundError
from cairn.service.policies import (
    Automation,
    Gate,
    Policy,
    PolicyList,
    PolicyProblem,
    PolicyRun,
    PolicyState,
    Retention,
    Schedule,
    document_of,
    fields_of,
    root_problems,
    sentence,
)
from cairn.storage.errors import (
    PreconditionFailedError,
    StorageError,
    UnsupportedFormatError,
)
from cairn.storage.runs.policies import Policies, PolicyRecord, policy_file
from cairn.storage.runs.records.placed import UNREADABLE
from cairn.storage.store.clock import from_rfc3339, utc_now
from cairn.storage.store.deadlines import deadline_after

READ_SECONDS: Final = 5.0
"""Longest time that the policies of all roots wait for those of a silent one."""

logger = logging.getLogger(__name__)

P = TypeVar("P", Schedule, Retention, Automation, Gate)


@dataclass(frozen=True)
class ActivePolicy(Generic[P]):
    """Policy that is in force.

    Attributes:
        policy: The policy.
        stored: Its record and its root; None: it is of the environment.
    """

    policy: P
    stored: StoredPolicy | None = None

    @property
    def key(self) -> str:
        """Name that no other policy of its kind has; one of the environment has no slash."""
        return self.policy.name if self.stored is None else self.stored.key

    @property
    def caller(self) -> str:
        """Name of the caller of its operations; no key may have such a name."""
        return f"{self.policy.kind}:{self.policy.name}"

    def is_for_root(self, root: str) -> bool:
        """Return whether the policy applies to a root."""
        own = self.stored is None or self.stored.root == root
        return own and fnmatchcase(root, self.policy.root)

    def is_for(self, root: str, run: str) -> bool:
        """Return whether the policy applies to a run."""
        return self.is_for_root(root) and fnmatchcase(run, self.policy.run)


def in_force(
    plane: ControlPlane,
    kind: type[P],
    *,
    root: str | None = None,
    max_age: float | None = CACHE_SECONDS,
) -> list[ActivePolicy[P]]:
    """Return the policies of a kind that are in force; those of the environment first.

    Args:
        plane: The control plane.
        kind: Kind of the policies.
        root: Only policies for this root, whose store has to answer; None: of all roots. A root
            that can't be read is logged and left out.
        max_age: See `PolicyCache.get`.

    Raises:
        UnknownRootError: There is no such root.
        StoreUnavailableError: The store of `root` does not answer.
    """
    active = [
        ActivePolicy(policy)
        for policy in plane.settings.policies
        if isinstance(policy, kind) and (root is None or fnmatchcase(root, policy.root))
    ]
    roots = dict(plane.roots.items()) if root is None else {root: plane.root(root)}
    for name, uri in roots.items():
        try:
            with deadline_after(None if root is not None else READ_SECONDS):
                found = plane.policies.get(name, uri, max_age=max_age)
        except StorageError as exc:
            if root is not None:
                raise
            logger.warning("policies of root %s were not read: %s", name, exc)
            continue
        active += [
            ActivePolicy(stored.policy, stored)
            for stored in found.policies
            if isinstance(stored.policy, kind) and not is_fixed(plane, name, stored.policy)
        ]
    return active


def is_fixed(plane: ControlPlane, root: str, policy: Policy | PolicyProblem) -> bool:
    """Return whether the environment has a policy of this kind and name for a root."""
    return _fixed(plane, root, policy.kind, policy.name) is not None


def list_policies(
    plane: ControlPlane, caller: Caller, *, kind: str | None = None, max_age: float | None = 0.0
) -> PolicyList:
    """Return the policies for the caller's roots, by kind and name, and the unreadable ones.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        kind: Only policies of this kind; None: of all.
        max_age: See `PolicyCache.get`.
    """
    visible = caller.visible(plane.roots)
    rows = states(plane.catalog)
    listed = [
        _state(plane, caller, policy, None, rows)
        for policy in plane.settings.policies
        if caller.roots is None or any(fnmatchcase(root, policy.root) for root in visible)
    ]
    problems: list[PolicyProblem] = []
    for root, uri in visible.items():
        try:
            with deadline_after(READ_SECONDS):
                stored = plane.policies.get(root, uri, max_age=max_age)
        except StorageError as exc:
            problems.append(PolicyProblem(root=root, kind="", name="", detail=str(exc)))
            continue
        problems += stored.problems
        listed += [_state(plane, caller, entry.policy, entry, rows) for entry in stored.policies]
    return PolicyList(
        policies=sorted(
            (state for state in listed if kind in (None, state.kind)),
            key=lambda state: (state.kind, state.name, state.root),
        ),
        problems=[problem for problem in problems if kind in (None, problem.kind)],
    )


def get_policy(plane: ControlPlane, caller: Caller, root: str, kind: str, name: str) -> PolicyState:
    """Return the policy of a kind and name that is in force for a root.

    Raises:
        UnknownRootError, UnknownPolicyError: There is no such root or policy.
        UnsupportedFormatError, CorruptionError: The record can't be read.
        StoreUnavailableError: The store does not answer.
    """
    uri = plane.root(root)
    rows = states(plane.catalog)
    fixed = _fixed(plane, root, kind, name)
    if fixed is not None:
        return _state(plane, caller, fixed, None, rows)
    record = Policies(uri).get(kind, name)
    if record is None:
        raise _unknown(root, kind, name)
    return _stored_state(plane, caller, root, record, rows)


def put_policy(
    plane: ControlPlane, caller: Caller, root: str, policy: Policy, *, expect: int | None
) -> PolicyState:
    """Create or change a policy of a root.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the root.
        policy: The policy.
        expect: Sequence number of the policy as last seen; None: it must not exist.

    Raises:
        UnknownRootError: There is no such root.
        InvalidRequestError: The policy says what only one of the environment may.
        FixedPolicyError: The environment has a policy of this kind and name for the root.
        PolicyChangedError: The policy is not as expected.
        UnsupportedFormatError, CorruptionError: The record that is there can't be read.
    """
    uri = plane.root(root)
    check_policy(policy)
    fields = fields_of(policy)
    detail: dict[str, Any] = {"kind": policy.kind, "name": policy.name, "expect": expect}
    with audited(plane, caller, "policy.put", root=root, **detail, fields=fields) as entry:
        _refuse_fixed(plane, root, policy.kind, policy.name)
        with _policy_changed_error():
            record = Policies(uri).put(
                policy.kind, policy.name, fields, by=caller.name, expect=expect
            )
        plane.policies.expire(root, uri)
        entry.complete(sequence=record.sequence)
    if isinstance(policy, Automation):  # it follows the moves from now on
        positions(plane.catalog, [StoredPolicy(root, policy, record).key])
    return _stored_state(plane, caller, root, record, states(plane.catalog))


def check_policy(policy: Policy) -> None:
    """Raise unless a root may have such a policy.

    Raises:
        InvalidRequestError: The policy says what only one of the environment may.
    """
    errors = [
        {"field": f"body.policy.{name}", "detail": text} for name, text in root_problems(policy)
    ]
    if errors:
        detail = "; ".join(f"{error['field']}: {error['detail']}" for error in errors)
        raise InvalidRequestError(detail, errors=errors)


def delete_policy(
    plane: ControlPlane, caller: Caller, root: str, kind: str, name: str, *, expect: int
) -> None:
    """Delete a policy of a root, even one that the environment overrides.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the root.
        kind: Kind of the policy.
        name: Name of the policy.
        expect: Sequence number of the policy as last seen; 0: its record can't be read.

    Raises:
        UnknownRootError, UnknownPolicyError: There is no such root or policy.
        FixedPolicyError: Only the environment has such a policy.
        PolicyChangedError: The policy is not as expected.
        UnsupportedFormatError, CorruptionError: The record can't be read, and `expect` is not 0.
    """
    uri = plane.root(root)
    with audited(plane, caller, "policy.delete", root=root, kind=kind, name=name, expect=expect):
        policies = Policies(uri)
        with suppress(*UNREADABLE):
            record = policies.get(kind, name)
            if record is None:
                _refuse_fixed(plane, root, kind, name)
                raise _unknown(root, kind, name)
            if not expect and isinstance(parse_policy(record), str):
                expect = record.sequence
        with _policy_changed_error():
            policies.delete(kind, name, by=caller.name, expect=expect)
        plane.policies.expire(root, uri)


def _fixed(plane: ControlPlane, root: str, kind: str, name: str) -> Policy | None:
    for policy in plane.settings.policies:
        if (policy.kind, policy.name) == (kind, name) and fnmatchcase(root, policy.root):
            return policy
    return None


def _refuse_fixed(plane: ControlPlane, root: str, kind: str, name: str) -> None:
    if _fixed(plane, root, kind, name) is not None:
        raise FixedPolicyError(
            f"The environment of the servers (CAIRN_POLICIES) has the {kind} {name!r}. Change it "
            "there and restart them, or choose another name."
        )


def _unknown(root: str, kind: str, name: str) -> UnknownPolicyError:
    return UnknownPolicyError(
        f"Root {root!r} has no {kind} {name!r}. `cairn policies list` names those that there are."
    )


@contextmanager
def _policy_changed_error() -> Iterator[None]:
    """Convert a lost compare-and-swap to a `PolicyChangedError`, which says who was faster."""
    try:
        yield
    except PreconditionFailedError as exc:
        current = exc.current if isinstance(exc.current, PolicyRecord) else None
        header = "`If-None-Match: *`" if current is None else f'`If-Match: "{current.sequence}"`'
        body = None
        if current is not None:
            body = {
                "policy": {**current.fields, "kind": current.kind, "name": current.name},
                "sequence": current.sequence,
                "set_by": current.by,
                "set_at": current.at,
            }
        raise PolicyChangedError(
            f"{str(exc).removesuffix(exc.next_step)}Nothing was changed. To change it all the "
            f"same, send {header}.",
            extra={"current": body},
        ) from exc


def _stored_state(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    record: PolicyRecord,
    rows: Mapping[str, AutomationRow],
) -> PolicyState:
    policy = parse_policy(record)
    if isinstance(policy, str):
        raise UnsupportedFormatError(
            "no policy that a root may have",
            path=plane.root(root) / policy_file(record.kind, record.name),
            expected="fields of a policy",
            found=policy,
            next_step="Delete it (`cairn policies delete`), and set it anew.",
        )
    return _state(plane, caller, policy, StoredPolicy(root, policy, record), rows)


def _state(
    plane: ControlPlane,
    caller: Caller,
    policy: Policy,
    stored: StoredPolicy | None,
    rows: Mapping[str, AutomationRow],
) -> PolicyState:
    record = None if stored is None else stored.record
    overridden = stored is not None and is_fixed(plane, stored.root, policy)
    next_due = None
    if isinstance(policy, Schedule | Retention) and not overridden:
        next_due = policy.due(utc_now(), ahead=True)
    shown = _without_secrets(policy)
    return PolicyState(
        kind=policy.kind,
        name=policy.name,
        policy=document_of(shown),
        root=policy.root if stored is None else stored.root,
        source="environment" if stored is None else "root",
        overridden=overridden,
        sentence=sentence(shown),
        sequence=None if record is None else record.sequence,
        set_by=None if record is None else record.by,
        set_at=None if record is None else from_rfc3339(record.at),
        next_due=next_due,
        last=None if overridden else _last(plane, caller, ActivePolicy(policy, stored), rows),
    )


def _without_secrets(policy: Policy) -> Policy:
    """Return a policy whose webhook is only its host: the rest of a URL may be a secret."""
    if not isinstance(policy, Gate) or policy.webhook is None:
        return policy
    scheme, _, rest = policy.webhook.partition("://")
    host = re.split("[/?#]", rest)[0]
    return policy.model_copy(update={"webhook": f"{scheme}://{host}/…"})


def _last(
    plane: ControlPlane,
    caller: Caller,
    active: ActivePolicy[Any],
    rows: Mapping[str, AutomationRow],
) -> PolicyRun | None:
    """Return when a policy acted last, as far as the caller may know."""
    roots = [root for root in plane.roots if active.is_for_root(root)]
    visible = [root for root in roots if caller.sees(root)]
    if isinstance(active.policy, Automation):
        row = rows.get(active.key)
        if row is None:
            return None
        if visible != roots:  # it may be about another root
            return PolicyRun(at=row.at, operation=None, state=None, problem=None)
        return _run(plane, row.at, row.operation, row.problem)
    if isinstance(active.policy, Gate):
        return None
    entry = last_entry(plane.catalog, active.caller, visible)
    if entry is None:
        return None
    return _run(plane, entry.at, entry.detail.get("operation"), entry.detail.get("problem"))


def _run(
    plane: ControlPlane, at: datetime, operation: str | None, problem: str | None
) -> PolicyRun:
    state = None
    if operation is not None:
        with suppress(OperationNotFoundError, NotReadyError):
            state = plane.jobs.get(operation).state
    return PolicyRun(at=at, operation=operation, state=state, problem=problem)
