"""The part of the HTTP client that changes runs and steps: labels, metrics, deletions, policies."""

from collections.abc import Mapping

from cairn.service.client.asynchronous.connection import AsyncConnection
from cairn.service.client.protocol.paths import (
    DEFAULT_ROOT,
    policy_path,
    run_path,
    segment,
    step_path,
)
from cairn.service.client.protocol.requests import ANY, idempotency, precondition, without_none
from cairn.service.client.protocol.responses import read_body
from cairn.service.policies import PolicyState, PolicyTrial
from cairn.service.schemas import (
    AnnotateRequest,
    AnnotateRunRequest,
    Better,
    Checkpoint,
    Operation,
    RetentionPlan,
    Run,
)


class AsyncChangesConnection(AsyncConnection):
    """Connection with the requests that set labels and metrics, those that delete, and policies."""

    async def annotate(
        self,
        run: str,
        step: int,
        *,
        labels: Mapping[str, str | None] | None = None,
        metrics: Mapping[str, float | None] | None = None,
        better: Mapping[str, Better | None] | None = None,
        root: str = DEFAULT_ROOT,
    ) -> Checkpoint:
        """Set labels and metrics of a listed step; its other labels and metrics do not change.

        Args:
            run: Name of the run.
            step: A listed step.
            labels: Values by name; None removes a label.
            metrics: Numbers by name, NaN and infinities too; None removes a metric.
            better: Direction of each metric: "min" if lower is better, "max" if higher is better;
                None removes the direction.
            root: Name of the run's root.
        """
        body = AnnotateRequest(
            labels=dict(labels or {}), metrics=dict(metrics or {}), better=dict(better or {})
        )
        path = step_path(root, run, step)
        return await self._send(
            Checkpoint, "PATCH", path, body.model_dump(mode="json"), headers=ANY
        )

    async def annotate_run(
        self,
        run: str,
        labels: Mapping[str, str | None],
        *,
        root: str = DEFAULT_ROOT,
    ) -> Run:
        """Set labels of a run; its other labels do not change.

        Args:
            run: Name of the run.
            labels: Values by name; None removes a label.
            root: Name of the run's root.
        """
        body = AnnotateRunRequest(labels=dict(labels))
        return await self._send(Run, "PATCH", run_path(root, run), body.model_dump(), headers=ANY)

    async def delete(
        self,
        run: str,
        step: int,
        *,
        attempt: int | None = None,
        reason: str = "",
        grace_seconds: float | None = None,
        root: str = DEFAULT_ROOT,
    ) -> Checkpoint:
        """Delete a step; `undelete` can restore it until the grace time is over.

        Args:
            run: Name of the run.
            step: A listed or a superseded step.
            attempt: Attempt whose step to delete; default: the listed one.
            reason: Text that is stored with the deletion.
            grace_seconds: Time in which the step can be undeleted; default: seven days.
            root: Name of the run's root.

        Raises:
            ProblemResponseError: 409 if an alias points at the step or its writer needs it.
        """
        query = without_none({"attempt": attempt, "reason": reason, "grace_seconds": grace_seconds})
        path = step_path(root, run, step)
        return read_body(Checkpoint, await self._answer("DELETE", path, params=query))

    async def undelete(
        self, run: str, step: int, *, attempt: int | None = None, root: str = DEFAULT_ROOT
    ) -> Checkpoint:
        """Undo the deletion of a step.

        Args:
            run: Name of the run.
            step: A deleted step.
            attempt: Attempt whose step to restore, if several attempts' were deleted.
            root: Name of the run's root.

        Raises:
            ProblemResponseError: 404 if the step is not deleted, or its bytes are being removed.
        """
        path = f"{step_path(root, run, step)}:undelete"
        return await self._send(Checkpoint, "POST", path, {"attempt": attempt})

    async def plan_retention(
        self, run: str, policy: Mapping[str, object], *, root: str = DEFAULT_ROOT
    ) -> RetentionPlan:
        """Return the steps that a policy would keep and delete now, without deleting any.

        Args:
            run: Name of the run.
            policy: Fields of `RetentionPolicy`, such as `{"keep_last": 3}`.
            root: Name of the run's root.
        """
        body = {"policy": dict(policy), "dry_run": True}
        return await self._send(
            RetentionPlan, "POST", f"{run_path(root, run)}:applyRetention", body
        )

    async def apply_retention(
        self,
        run: str,
        policy: Mapping[str, object],
        *,
        grace_seconds: float | None = None,
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
    ) -> Operation:
        """Start to delete the steps that a policy does not keep; each can be undeleted for a while.

        Args:
            run: Name of the run.
            policy: Fields of `RetentionPolicy`, such as `{"keep_last": 3}`.
            grace_seconds: Time in which the steps can be undeleted; default: seven days.
            root: Name of the run's root.
            idempotency_key: Idempotency key; a repeat with the same key starts nothing new.
        """
        body = {
            "policy": dict(policy),
            "dry_run": False,
            **without_none({"grace_seconds": grace_seconds}),
        }
        path = f"{run_path(root, run)}:applyRetention"
        return await self._send(Operation, "POST", path, body, headers=idempotency(idempotency_key))

    async def collect_garbage(
        self,
        run: str,
        *,
        dry_run: bool = True,
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
    ) -> Operation:
        """Start to find the garbage of a run and, without `dry_run`, to remove it for good."""
        path = f"{run_path(root, run)}:gc"
        headers = idempotency(idempotency_key)
        return await self._send(Operation, "POST", path, {"dry_run": dry_run}, headers=headers)

    async def put_policy(
        self,
        policy: Mapping[str, object],
        *,
        expect: int | None,
        root: str = DEFAULT_ROOT,
    ) -> PolicyState:
        """Create or change a policy of a root.

        Args:
            policy: JSON of the policy, such as `{"kind": "schedule", "name": "nightly", "cron":
                "0 3 * * *", "action": "verify"}`.
            expect: Sequence number of the policy as last seen; None: create it.
            root: Name of the root.

        Raises:
            ProblemResponseError: 412 if the policy is not as expected, `.problem["current"]` is its
                value now; 409 if the servers' environment has it.
        """
        body = {"policy": dict(policy)}
        path = policy_path(root, str(policy.get("kind")), str(policy.get("name")))
        return await self._send(PolicyState, "PUT", path, body, headers=precondition(expect))

    async def delete_policy(
        self, kind: str, name: str, *, expect: int, root: str = DEFAULT_ROOT
    ) -> None:
        """Delete a policy of a root.

        Args:
            kind: Kind of the policy.
            name: Name of the policy.
            expect: Sequence number of the policy as last seen; 0: its record can't be read.
            root: Name of the root.

        Raises:
            ProblemResponseError: 412 if the policy is not as expected.
        """
        await self._answer("DELETE", policy_path(root, kind, name), headers=precondition(expect))

    async def try_policy(
        self, policy: Mapping[str, object], *, root: str = DEFAULT_ROOT
    ) -> PolicyTrial:
        """Return what a policy would do in a root now; nothing is changed.

        Args:
            policy: JSON of the policy, which need not be set.
            root: Name of the root.
        """
        path = f"/v1/roots/{segment(root)}/policies:try"
        return await self._send(PolicyTrial, "POST", path, {"policy": dict(policy)})
