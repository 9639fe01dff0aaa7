"""The part of the HTTP client that deletes: steps, what a policy does not keep, and garbage."""

from collections.abc import Mapping

from cairn.service.client.asynchronous.connection import AsyncConnection
from cairn.service.client.protocol import (
    DEFAULT_ROOT,
    given,
    idempotency,
    read_body,
    run_path,
    step_path,
)
from cairn.service.schemas import Checkpoint, Operation, RetentionPlan


class AsyncCleanUpConnection(AsyncConnection):
    """A connection with the requests that delete."""

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
        """Delete a step; until the grace time is over, `undelete` takes it back.

        Args:
            run: Name of the run.
            step: A listed step, or one that was set aside.
            attempt: Delete this attempt's; default: the one that is listed.
            reason: Kept with the deletion.
            grace_seconds: How long it can be had back; default: seven days.
            root: Name of the run's root.

        Raises:
            ProblemResponseError: 409 if an alias names it or its writer needs it.
        """
        query = given({"attempt": attempt, "reason": reason, "grace_seconds": grace_seconds})
        path = step_path(root, run, step)
        return read_body(Checkpoint, await self._answer("DELETE", path, params=query))

    async def undelete(
        self, run: str, step: int, *, attempt: int | None = None, root: str = DEFAULT_ROOT
    ) -> Checkpoint:
        """Take the deletion of a step back.

        Args:
            run: Name of the run.
            step: A deleted step.
            attempt: Of several attempts at the step that were deleted, this one.
            root: Name of the run's root.

        Raises:
            ProblemResponseError: 404 if it is not deleted, or its bytes are going already.
        """
        path = f"{step_path(root, run, step)}:undelete"
        return await self._send(Checkpoint, "POST", path, {"attempt": attempt})

    async def plan_retention(
        self, run: str, policy: Mapping[str, object], *, root: str = DEFAULT_ROOT
    ) -> RetentionPlan:
        """What a policy would keep and delete now; changes nothing.

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
        """Delete the steps that a policy does not keep; each can be undeleted for a while.

        Args:
            run: Name of the run.
            policy: Fields of `RetentionPolicy`, such as `{"keep_last": 3}`.
            grace_seconds: How long they can be had back; default: seven days.
            root: Name of the run's root.
            idempotency_key: The same key is the same operation.
        """
        body = {
            "policy": dict(policy),
            "dry_run": False,
            **given({"grace_seconds": grace_seconds}),
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
        """Find what nobody needs any more, and remove it unless `dry_run`."""
        path = f"{run_path(root, run)}:gc"
        headers = idempotency(idempotency_key)
        return await self._send(Operation, "POST", path, {"dry_run": dry_run}, headers=headers)
