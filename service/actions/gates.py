"""Gates of aliases: policies with conditions on the steps that an alias may move to.

A gate that cannot be judged refuses: an outage must not let a promotion pass.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from http import HTTPStatus
from typing import Any, Final

from cairn.service.actions.exports import export_command
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.policies import in_force, is_fixed
from cairn.service.actions.root_policies import CACHE_SECONDS
from cairn.service.errors import GateRefusedError
from cairn.service.jobs.kinds import convert
from cairn.service.policies import Gate, PolicyProblem
from cairn.service.schemas import ConvertRequest
from cairn.storage.runs.annotate import annotation_of
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.exports import published_exports
from cairn.storage.runs.records.placed import UNREADABLE
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo

WEBHOOK_SECONDS: Final = 10.0
"""Time limit for the whole answer of a gate's webhook."""

WEBHOOK_BYTES: Final = 64 << 10
"""Largest size of a webhook's answer, in bytes."""


@dataclass(frozen=True)
class Candidate:
    """Step that an alias is about to move to.

    Attributes:
        root: Name of its root.
        run: Run of the step.
        info: The step, marked as in use.
        alias: Name of the alias.
        by: Name of the caller.
        reason: Reason of the promotion.
    """

    root: str
    run: Run
    info: StepInfo
    alias: str
    by: str
    reason: str

    @cached_property
    def noted(self) -> Annotation:
        """Labels and metrics of the step, from the store."""
        return annotation_of(self.run, self.info)

    def body(self) -> dict[str, Any]:
        """Return the candidate as the request body for a webhook."""
        return {
            "root": self.root,
            "run": self.run.uri.name,
            "step": self.info.step,
            "attempt": self.info.attempt,
            "manifest_digest": self.info.manifest_digest,
            "alias": self.alias,
            "by": self.by,
            "reason": self.reason,
            **self.noted.entries(),
            "verified": self.noted.verified,
        }


@dataclass(frozen=True)
class GateSet:
    """Gates of an alias.

    Attributes:
        gates: All that apply.
        unreadable: Problems of records that may be gates too. None of them can be judged, so each
            refuses.
    """

    gates: Sequence[Gate]
    unreadable: Sequence[PolicyProblem] = ()

    def __bool__(self) -> bool:
        """Return whether there is anything to judge."""
        return bool(self.gates or self.unreadable)


def gates_of(
    plane: ControlPlane,
    root: str,
    run: str,
    alias: str | None,
    *,
    max_age: float | None = CACHE_SECONDS,
) -> GateSet:
    """Return the gates of an alias of a run.

    Args:
        plane: The control plane.
        root: Name of the run's root.
        run: Name of the run.
        alias: Name of the alias; None: the gates of all aliases of the run.
        max_age: See `PolicyCache.get`.

    Raises:
        UnknownRootError: There is no such root.
        StoreUnavailableError: The root's store does not answer.
    """
    gates = [
        active.policy
        for active in in_force(plane, Gate, root=root, max_age=max_age)
        if active.is_for(root, run) and (alias is None or fnmatchcase(alias, active.policy.alias))
    ]
    unreadable = [
        problem
        for problem in plane.policies.get(root, plane.root(root), max_age=None).problems
        if problem.kind in ("gate", "") and not is_fixed(plane, root, problem)
    ]
    return GateSet(gates, unreadable)


def require_gates(gates: GateSet, candidate: Candidate) -> None:
    """Raise unless a step passes all gates.

    Webhooks are called last, after every other condition passed.

    Raises:
        GateRefusedError: The step does not pass; the error has every reason.
    """
    refused = refusals_of(gates, candidate)
    if not refused:
        webhooks = dict.fromkeys(gate.webhook for gate in gates.gates if gate.webhook is not None)
        refused = [
            reason for url in webhooks if (reason := _webhook_refusal(url, candidate)) is not None
        ]
    if refused:
        step = f"{candidate.run.uri.name}/steps/{candidate.info.step}"
        raise GateRefusedError(
            f"{step} can't become {candidate.alias}: "
            f"{'; '.join(refusal['detail'] for refusal in refused)}. The alias was not moved.",
            extra={"gates": refused},
        )


def blocked_aliases(plane: ControlPlane, root: str, run: str, step: int) -> dict[str, list[str]]:
    """Return why gates would refuse a step now, by the pattern of their aliases.

    Webhooks are not called.

    Raises:
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        UnsupportedFormatError, CorruptionError: The step's labels are unreadable.
        StoreUnavailableError: The store does not answer.
    """
    gates = gates_of(plane, root, run, None)
    stored_run = plane.run(root, run)
    info = stored_run.step(step)
    blocked: dict[str, list[str]] = {}
    apart = [GateSet([gate]) for gate in gates.gates]
    for gate_set in [*apart, GateSet([], gates.unreadable)]:
        alias = gate_set.gates[0].alias if gate_set.gates else "*"
        candidate = Candidate(root, stored_run, info, alias, by="", reason="")
        details = [refusal["detail"] for refusal in refusals_of(gate_set, candidate)]
        if details:
            blocked.setdefault(alias, []).extend(details)
    return blocked


def refusals_of(gates: GateSet, candidate: Candidate) -> list[dict[str, str]]:
    """Return why a step does not pass the gates; webhooks are not called."""
    unreadable = [
        _refusal(
            "policy",
            f"the record of gate {problem.name!r} can't be read: {problem.detail.rstrip('.')}",
        )
        for problem in gates.unreadable
    ]
    return [*unreadable, *(reason for gate in gates.gates for reason in _refusals(gate, candidate))]


def _refusals(gate: Gate, candidate: Candidate) -> Iterator[dict[str, str]]:
    noted = candidate.noted
    if gate.verified and noted.verified is None:
        yield _refusal("verified", "not verified (run `cairn verify`)")
    for name, text in gate.labels.items():
        label = noted.labels.get(name)
        if label is None or text not in ("*", label):
            expected = "set" if text == "*" else f'"{text}"'
            actual = "not set" if label is None else f'"{label}"'
            yield _refusal(f"labels.{name}", f"label {name} must be {expected}, it is {actual}")
    for name, bound in gate.metrics.items():
        value = noted.metrics.get(name)
        if value is None or not bound.holds(value):
            actual = "not set" if value is None else f"{value:g}"
            yield _refusal(f"metrics.{name}", f"metric {name} must be {bound}, it is {actual}")
    if gate.exported:
        body = ConvertRequest() if gate.exported is True else gate.exported
        if not _is_exported(candidate, convert.requested_options(body)):
            command = export_command(body, f"{candidate.run.uri.name}/steps/{candidate.info.step}")
            yield _refusal("exported", f"not exported (run `{command}`)")


def _refusal(gate: str, detail: str) -> dict[str, str]:
    return {"gate": gate, "detail": detail}


def _is_exported(candidate: Candidate, options: Mapping[str, Any]) -> bool:
    """Return whether an export of this step was published, with its files checked."""
    info = candidate.info
    try:
        exports = published_exports(candidate.run.objects, info.step, info.attempt, convert.KIND)
    except UNREADABLE:
        return False
    # As at the address of an export: those by earlier rules are to be made again.
    return any(
        export.source == info.manifest_digest
        and export.options == options
        and export.rule_version >= convert.RULE_VERSION
        for export in exports
    )


def _webhook_refusal(url: str, candidate: Candidate) -> dict[str, str] | None:
    """Call a webhook, and return its refusal; None: it allows the promotion."""
    import httpx  # loaded only for gates with webhooks

    try:
        answer = json.loads(asyncio.run(_answer(url, candidate.body())))
        if not isinstance(answer, dict):
            raise ValueError("no JSON object")
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, RecursionError) as exc:
        why = str(exc) or type(exc).__name__
        return _refusal("webhook", f"its webhook gave no answer that counts ({why})")
    if answer.get("allow") is True:
        return None
    reason = answer.get("reason")
    return _refusal("webhook", f"its webhook: {str(reason or 'no reason given')[:500]}")


async def _answer(url: str, body: dict[str, Any]) -> bytes:
    """Post to a webhook, and return its answer, within limits of time and size.

    Raises:
        HTTPError, InvalidURL, TimeoutError, ValueError: There is no valid answer within the limits.
    """
    import httpx

    content = bytearray()
    try:
        async with (
            asyncio.timeout(WEBHOOK_SECONDS),
            httpx.AsyncClient(timeout=None, trust_env=False) as http,
            http.stream("POST", url, json=body) as response,
        ):
            if response.status_code != HTTPStatus.OK:
                raise ValueError(f"status {response.status_code}")
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > WEBHOOK_BYTES:
                    raise ValueError(f"more than {WEBHOOK_BYTES} bytes")
    except TimeoutError as exc:
        raise TimeoutError(f"no whole answer in {WEBHOOK_SECONDS:g} s") from exc
    return bytes(content)
