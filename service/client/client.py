# Made of asynchronous/client.py by `python scripts/sync_client.py`: change that one.
"""Typed HTTP client of the control plane.

with Client("http://127.0.0.1:8321") as cairn:
    newest = next(cairn.checkpoints("llama-sft"))
    cairn.promote("llama-sft", newest.step, "production", expect=None, reason="first release")
    operation = cairn.convert("llama-sft", newest.step)
    for state in cairn.follow(operation.id):
        print(state.state, state.progress.done_bytes)
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cairn.service.client.download import blocks, download
from cairn.service.client.events import EventsConnection
from cairn.service.client.following import follow_operation
from cairn.service.client.protocol import (
    DEFAULT_ROOT,
    Patience,
    alias_path,
    given,
    idempotency,
    precondition,
    run_path,
    segment,
    step_path,
)
from cairn.service.client.step_files import StepFilesConnection
from cairn.service.errors import ProblemResponseError
from cairn.service.schemas import (
    Alias,
    AliasHistory,
    AliasList,
    Artifact,
    AuditEvent,
    AuditEventList,
    Checkpoint,
    CheckpointList,
    Health,
    Key,
    KeyList,
    NewKey,
    Operation,
    OperationList,
    OperationState,
    Readiness,
    RepairReport,
    Root,
    RootList,
    Run,
    RunList,
    RunTakenOver,
    RunUsage,
    RunWriter,
    TakenOver,
    Worker,
    WorkerList,
)


class Client(StepFilesConnection, EventsConnection):
    """Asks one control plane; safe to share between threads.

    Every method raises `ProblemResponseError` for a problem answer and `ServerUnreachableError`
    if there is none.

    Args:
        url: Address of the control plane; default: `CAIRN_URL`, else port 8321 here.
        key: With which it is asked; default: `CAIRN_KEY`, else the file `CAIRN_KEY_FILE`.
        timeout: Seconds to wait for an answer, not for a stream to end.
        retry_seconds: How long a request is sent again that can be: the server has no turn for
            it, or a connection broke.
        transport: For tests.
    """

    def health(self) -> Health:
        """The server answers."""
        return self._get(Health, "/healthz")

    def ready(self) -> Readiness:
        """The server can work; a problem answer (503) names what is missing."""
        return self._get(Readiness, "/readyz")

    def roots(self) -> list[Root]:
        """Every root of the server."""
        found = self._get(RootList, "/v1/roots")
        return found.roots

    def add_root(self, name: str, uri: str, *, adopt_from: Sequence[str] = ()) -> Root:
        """Have a root served that the server's settings do not name.

        Args:
            name: Of the root.
            uri: Its folder on the server, or its place in a bucket; it has to be there.
            adopt_from: Folders outside it whose checkpoints its runs may list where they lie.

        Raises:
            ProblemResponseError: 409 if there is one of that name or place, 422 if none can be.
        """
        body = {"name": name, "uri": uri, "adopt_from": [*adopt_from]}
        return self._send(Root, "POST", "/v1/roots", body)

    def remove_root(self, name: str) -> None:
        """Have a root served no more that was added; its store stays as it is."""
        self._answer("DELETE", f"/v1/roots/{segment(name)}")

    def runs(
        self,
        *,
        root: str | None = None,
        filter: str = "",
        order_by: str = "",
        page_size: int = 100,
        refresh: bool = False,
    ) -> Iterator[Run]:
        """Every run, by root and name; pages are fetched as needed.

        Args:
            root: Of this root only.
            filter: Those of which this holds, such as `labels.team = "nlp" AND latest_step > 1000`.
            order_by: Another order, such as `created desc`.
            page_size: Runs per request.
            refresh: Have the server look at the store first, here as below.
        """
        path = "/v1/runs" if root is None else f"/v1/roots/{segment(root)}/runs"
        for page in self._pages(
            RunList,
            path,
            filter=filter or None,
            order_by=order_by or None,
            page_size=page_size,
            refresh=refresh or None,
        ):
            yield from page.runs

    def run(self, run: str, *, root: str = DEFAULT_ROOT, refresh: bool = False) -> Run:
        """One run."""
        return self._get(Run, run_path(root, run), refresh=refresh or None)

    def create_run(
        self, run: str, *, labels: Mapping[str, str] | None = None, root: str = DEFAULT_ROOT
    ) -> Run:
        """Make a run before its job starts; the job that saves there goes on in it.

        Args:
            run: Name of the new run.
            labels: Texts by name.
            root: Name of its root.

        Raises:
            ProblemResponseError: 409 if there is one of that name.
        """
        body = {"name": run, "labels": dict(labels or {})}
        return self._send(Run, "POST", f"/v1/roots/{segment(root)}/runs", body)

    def adopt(
        self,
        folder: str,
        run: str,
        *,
        step: int | None = None,
        config: Mapping[str, Any] | None = None,
        map: Mapping[str, str] | None = None,
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
    ) -> Operation:
        r"""List what plain Orbax has saved in a folder as the steps of a run, where it lies.

        Args:
            folder: Its path within the run's root, or its URI in any root.
            run: Name of the run: a new one, or that which adopts the folder already.
            step: The folder is one checkpoint, and this its step.
            config: Hugging Face's config.json of the model that the steps hold; with `map`.
            map: Regular expressions of whole paths, `<item>/<path>`, and the model's own path, with
                groups as `\1`. The first that matches counts.
            root: Name of the run's root.
            idempotency_key: Of this one request.

        Raises:
            ProblemResponseError: 404 or 422 if there is nothing to adopt, or the config or the map
                is none; 409 if the root may not adopt from there, the name is taken, or another run
                adopts the folder.
        """
        body: dict[str, Any] = {"folder": folder, "run": run, "step": step}
        if config is not None or map is not None:  # one without the other is refused
            body["model"] = {"config": config, "map": map}
        headers = idempotency(idempotency_key)
        path = f"/v1/roots/{segment(root)}/runs:adopt"
        return self._send(Operation, "POST", path, body, headers=headers)

    def usage(self, run: str, *, root: str = DEFAULT_ROOT) -> RunUsage:
        """What a run takes in the store, to the byte, counted there now."""
        return self._get(RunUsage, f"{run_path(root, run)}/usage")

    def checkpoints(
        self,
        run: str,
        *,
        root: str = DEFAULT_ROOT,
        state: str | None = None,
        filter: str = "",
        order_by: str = "",
        page_size: int = 100,
        refresh: bool = False,
    ) -> Iterator[Checkpoint]:
        """Checkpoints of a run, highest step first; pages are fetched as needed.

        Args:
            run: Name of the run.
            root: Name of its root.
            state: One state, `available` (listed or damaged), or `all`; None: available, or all if
                the filter asks about `state`.
            filter: Those of which this holds, such as `metrics.loss < 0.5 AND step >= 1000`.
            order_by: Another order, such as `metrics.loss, step desc`.
            page_size: Checkpoints per request.
            refresh: Have the server look at the store first.
        """
        path = f"{run_path(root, run)}/checkpoints"
        for page in self._pages(
            CheckpointList,
            path,
            state=state,
            filter=filter or None,
            order_by=order_by or None,
            page_size=page_size,
            refresh=refresh or None,
        ):
            yield from page.checkpoints

    def checkpoint(
        self, run: str, step: int, *, root: str = DEFAULT_ROOT, refresh: bool = False
    ) -> Checkpoint:
        """One checkpoint."""
        return self._get(Checkpoint, step_path(root, run, step), refresh=refresh or None)

    def announce(
        self, run: str, step: int, *, attempt: int | None = None, root: str = DEFAULT_ROOT
    ) -> Checkpoint:
        """Tell the server of a step that was saved: it looks at the store, and lists have it.

        Args:
            run: Name of the run.
            step: The step.
            attempt: Of several attempts at it, this one.
            root: Name of the run's root.

        Raises:
            ProblemResponseError: 404 if the store has no such step.
        """
        body = {"step": step, "attempt": attempt}
        return self._send(Checkpoint, "POST", f"{run_path(root, run)}/checkpoints", body)

    def aliases(self, run: str, *, root: str = DEFAULT_ROOT, refresh: bool = False) -> list[Alias]:
        """Aliases of a run, by name."""
        path = f"{run_path(root, run)}/aliases"
        found = self._get(AliasList, path, refresh=refresh or None)
        return found.aliases

    def alias(
        self, run: str, alias: str, *, root: str = DEFAULT_ROOT, refresh: bool = False
    ) -> Alias:
        """Where an alias points; its `sequence` is what `promote` expects."""
        return self._get(Alias, alias_path(root, run, alias), refresh=refresh or None)

    def alias_history(self, run: str, alias: str, *, root: str = DEFAULT_ROOT) -> AliasHistory:
        """Where an alias pointed, newest first."""
        return self._get(AliasHistory, f"{alias_path(root, run, alias)}/history")

    def promote(
        self,
        run: str,
        step: int,
        alias: str,
        *,
        expect: int | None,
        reason: str = "",
        attempt: int | None = None,
        root: str = DEFAULT_ROOT,
    ) -> Alias:
        """Point an alias at a step.

        Args:
            run: Name of the run.
            step: A listed step.
            alias: Name of the alias.
            expect: Sequence number of the alias as last seen; None: it must not exist yet.
            reason: For its history.
            attempt: Which one wrote the step that is meant, such as its history names; None:
                whichever holds it now.
            root: Name of the run's root.

        Raises:
            ProblemResponseError: 412 if the alias has moved since; `.problem["current"]` is it.
                409 if the step is another attempt's, or damaged.
        """
        return self._send(
            Alias,
            "POST",
            f"{step_path(root, run, step)}:promote",
            {"alias": alias, "reason": reason, **({} if attempt is None else {"attempt": attempt})},
            headers=precondition(expect),
        )

    def delete_alias(self, run: str, alias: str, *, expect: int, root: str = DEFAULT_ROOT) -> None:
        """Delete an alias that is still at sequence number `expect`."""
        self._answer("DELETE", alias_path(root, run, alias), headers=precondition(expect))

    def writer(self, run: str, *, root: str = DEFAULT_ROOT) -> RunWriter:
        """Who writes a run, or did last; the store is asked now."""
        return self._get(RunWriter, f"{run_path(root, run)}/writer")

    def take_over_run(
        self, run: str, *, attempt: int, reason: str = "", root: str = DEFAULT_ROOT
    ) -> RunTakenOver:
        """End the attempt of the writer that holds a run, so that another begins at once.

        Listed steps stay; what that writer saves from then on fails.

        Args:
            run: Name of the run.
            attempt: Which holds it, as `writer` has it.
            reason: For the audit trail.
            root: Name of the run's root.

        Raises:
            ProblemResponseError: 412 if it is not held so, 409 if another took it just now.
        """
        body = {"attempt": attempt, "reason": reason}
        return self._send(RunTakenOver, "POST", f"{run_path(root, run)}:takeOver", body)

    def workers(self) -> list[Worker]:
        """Every job worker that was started, by name."""
        found = self._get(WorkerList, "/v1/workers")
        return found.workers

    def take_over(self, worker: str) -> list[str]:
        """Have other workers go on with what a dead one has left; ids of the operations."""
        path = f"/v1/workers/{segment(worker)}:takeOver"
        found = self._send(TakenOver, "POST", path)
        return found.operations

    def keys(self) -> list[Key]:
        """Every key of a caller that was made, by name and time, without secrets."""
        found = self._get(KeyList, "/v1/keys")
        return found.keys

    def create_key(
        self,
        name: str,
        *,
        scope: str = "read",
        roots: Iterable[str] | None = None,
        expires_seconds: float | None = None,
    ) -> NewKey:
        """Make a key for a caller; the answer alone has it.

        Args:
            name: Of the caller, for the audit trail.
            scope: `read`, `operate` or `admin`.
            roots: Names of the roots where it counts; None: in all.
            expires_seconds: How long it counts; None: until it is revoked.
        """
        body = {
            "name": name,
            "scope": scope,
            "roots": None if roots is None else list(roots),
            "expires_seconds": expires_seconds,
        }
        return self._send(NewKey, "POST", "/v1/keys", body)

    def revoke_key(self, key: str) -> None:
        """Have the key of an id count no more, for good."""
        self._answer("DELETE", f"/v1/keys/{segment(key)}")

    def audit_events(self, *, filter: str = "", page_size: int = 100) -> Iterator[AuditEvent]:
        """What was asked of the server, newest first; pages are fetched as needed.

        Args:
            filter: Entries of which this holds, such as `caller = "ci" AND action = alias.promote`.
            page_size: Entries per request.
        """
        for page in self._pages(
            AuditEventList, "/v1/audit-events", filter=filter or None, page_size=page_size
        ):
            yield from page.audit_events

    def restore(
        self,
        run: str,
        step: int,
        *,
        target: str,
        despite_damage: str | None = None,
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
    ) -> Operation:
        """Fork a new run from a step.

        Args:
            run: Name of the run.
            step: A listed step.
            target: Name of the new run.
            despite_damage: Why a damaged step is forked all the same, for the audit trail; None: it
                is refused with 409.
            root: Name of the run's root.
            idempotency_key: Of this one request.
        """
        body = {"mode": "fork", "run": target, **given({"despite_damage": despite_damage})}
        return self._start("restore", run, step, root, body, idempotency_key)

    def roll_back(
        self,
        run: str,
        step: int,
        *,
        strand: Iterable[str] = (),
        despite_damage: str | None = None,
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
    ) -> Operation:
        """Make a step the latest of its run; later ones are set aside, none is deleted.

        Args:
            run: Name of the run.
            step: A listed step.
            strand: Aliases that may go on naming a step that is set aside.
            despite_damage: As `restore` takes it.
            root: Name of the run's root.
            idempotency_key: Of this one request.

        Raises:
            ProblemResponseError: 409 if other aliases do; `.problem["aliases"]` names them. 412 if
                the run has changed between the look at it here and the rollback.
        """
        seen = self._answer("GET", run_path(root, run), params={"refresh": True})
        headers = {"If-Match": seen.headers["ETag"], **idempotency(idempotency_key)}
        body = {
            "mode": "rollback",
            "strand": list(strand),
            **given({"despite_damage": despite_damage}),
        }
        path = f"{step_path(root, run, step)}:restore"
        return self._send(Operation, "POST", path, body, headers=headers)

    def gather(
        self,
        run: str,
        step: int,
        *,
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
        **options: object,
    ) -> Operation:
        """Consolidate a step into one safetensors file; options as in `GatherRequest`."""
        return self._start("gather", run, step, root, options, idempotency_key)

    def convert(
        self,
        run: str,
        step: int,
        *,
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
        **options: object,
    ) -> Operation:
        """Export a step in Hugging Face format; options as in `ConvertRequest`."""
        return self._start("convert", run, step, root, options, idempotency_key)

    def verify(
        self,
        run: str,
        step: int,
        *,
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
    ) -> Operation:
        """Compare a step with what was saved, byte by byte; a damaged one's operation fails."""
        return self._start("verify", run, step, root, {}, idempotency_key)

    def verify_run(
        self,
        run: str,
        *,
        steps: Literal["all", "latest", "none"] = "all",
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
    ) -> Operation:
        """Compare the records of a run, and the bytes of its listed steps, with what was saved."""
        path = f"{run_path(root, run)}:verify"
        headers = idempotency(idempotency_key)
        return self._send(Operation, "POST", path, {"steps": steps}, headers=headers)

    def repair(
        self,
        run: str,
        *,
        dry_run: bool = True,
        forget: Iterable[str] = (),
        root: str = DEFAULT_ROOT,
    ) -> RepairReport:
        """What would mend the records of a run, or, without `dry_run`, what did."""
        body = {"dry_run": dry_run, "forget": list(forget)}
        return self._send(RepairReport, "POST", f"{run_path(root, run)}:repair", body)

    def operations(
        self, *, state: OperationState | None = None, page_size: int = 100
    ) -> Iterator[Operation]:
        """Operations, newest first; pages are fetched as needed."""
        for page in self._pages(OperationList, "/v1/operations", page_size=page_size, state=state):
            yield from page.operations

    def operation(self, operation: str) -> Operation:
        """One operation as it stands now."""
        return self._get(Operation, f"/v1/operations/{segment(operation)}")

    def cancel(self, operation: str) -> Operation:
        """Ask an operation to stop."""
        return self._send(Operation, "POST", f"/v1/operations/{segment(operation)}:cancel")

    def resume(self, operation: str) -> Operation:
        """Go on with a cancelled or failed operation."""
        return self._send(Operation, "POST", f"/v1/operations/{segment(operation)}:resume")

    def follow(self, operation: str, *, patience: float = 30.0) -> Iterator[Operation]:
        """Every change of an operation until it has ended; reconnects where a stream breaks off.

        Args:
            operation: Its id.
            patience: Seconds without any answer after which the server counts as gone.

        Raises:
            ServerUnreachableError: No answer for `patience` seconds.
        """
        path = f"/v1/operations/{segment(operation)}/events"
        return follow_operation(self._http, path, Patience(patience))

    def wait(self, operation: str) -> Operation:
        """Follow an operation to its end.

        Raises:
            ProblemResponseError: It failed; the problem is the operation's.
        """
        last: Operation | None = None
        for state in self.follow(operation):
            last = state
        if last is None:
            last = self.operation(operation)
        if last.error is not None:
            raise ProblemResponseError(last.error.model_dump(mode="json"), last.error.status)
        return last

    def artifact(self, artifact: str) -> Artifact:
        """What a gather or convert made."""
        return self._get(Artifact, f"/v1/artifacts/{segment(artifact)}")

    def artifact_blocks(self, artifact: str, name: str, *, start: int = 0) -> Iterator[bytes]:
        """One file of an artifact from an offset on, as it comes; a broken connection is taken up.

        Raises:
            ServerUnreachableError: The connection broke again and again.
        """
        path = f"/v1/artifacts/{segment(artifact)}/files/{segment(name)}"
        return blocks(self._http, path, start)

    def download(self, artifact: str, name: str, target: str | os.PathLike[str]) -> int:
        """Write one file of an artifact to `target`; returns its bytes.

        A broken connection is taken up where it broke; `target` appears only once it is whole.

        Raises:
            DownloadError: It is not what was exported.
            ServerUnreachableError: The connection broke again and again.
        """
        path = f"/v1/artifacts/{segment(artifact)}/files/{segment(name)}"
        return download(self._http, path, Path(target))
