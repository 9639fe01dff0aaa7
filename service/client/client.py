# Made of asynchronous/client.py by `python scripts/sync_client.py`: change that one.
"""Typed HTTP client of the control plane.

with Client("http://127.0.0.1:8321") as client:
    newest = next(client.checkpoints("llama-sft"))
    client.promote("llama-sft", newest.step, "production", expect=None, reason="release 1")
    operation = client.convert("llama-sft", newest.step)
    for state in client.follow(operation.id):
        print(state.state, state.progress.done_bytes)
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cairn.service.client.download import blocks, download
from cairn.service.client.events import EventsConnection
from cairn.service.client.operation_stream import follow_operation
from cairn.service.client.protocol.backoff import Backoff
from cairn.service.client.protocol.paths import (
    DEFAULT_ROOT,
    alias_path,
    policy_path,
    run_path,
    segment,
    step_path,
)
from cairn.service.client.protocol.requests import idempotency, precondition, without_none
from cairn.service.client.step_files import StepFilesConnection
from cairn.service.errors import ProblemResponseError
from cairn.service.policies import PolicyList, PolicyState
from cairn.service.schemas import (
    Alias,
    AliasHistory,
    AliasList,
    Artifact,
    ArtifactList,
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
    """Client of one control plane; safe to share between threads.

    Every method raises `ProblemResponseError` if the server answers with a problem, and
    `ServerUnreachableError` if it does not answer.

    Args:
        url: Address of the control plane; default: `CAIRN_URL`, else port 8321 here.
        key: API key to send; default: `CAIRN_KEY`, else the file `CAIRN_KEY_FILE`.
        timeout: Seconds to wait for an answer; it does not limit the length of a stream.
        retry_seconds: How long to retry a request that is safe to repeat, when the server is at
            its limit or a connection broke.
        transport: HTTP transport; for tests.
    """

    def health(self) -> Health:
        """Return the server's version; a server answers this even if its stores are unavailable."""
        return self._get(Health, "/healthz")

    def ready(self) -> Readiness:
        """Return the readiness of the server; a problem answer (503) names what is missing."""
        return self._get(Readiness, "/readyz")

    def roots(self) -> list[Root]:
        """Return all roots of the server."""
        listed = self._get(RootList, "/v1/roots")
        return listed.roots

    def add_root(self, name: str, uri: str, *, adopt_from: Sequence[str] = ()) -> Root:
        """Add a root that the server's settings do not name.

        Args:
            name: Name of the root.
            uri: Folder on the server, or location in a bucket; it must exist.
            adopt_from: Folders outside the root whose checkpoints its runs may import in place.

        Raises:
            ProblemResponseError: 409 if a root with that name or location exists, 422 if the name
                or the location can't be a root.
        """
        body = {"name": name, "uri": uri, "adopt_from": [*adopt_from]}
        return self._send(Root, "POST", "/v1/roots", body)

    def remove_root(self, name: str) -> None:
        """Stop serving a root that `add_root` added; its store is not changed."""
        self._answer("DELETE", f"/v1/roots/{segment(name)}")

    def runs(
        self,
        *,
        root: str | None = None,
        filter: str = "",
        order_by: str = "",
        columns: str = "",
        page_size: int = 100,
        refresh: bool = False,
    ) -> Iterator[Run]:
        """Yield all runs, sorted by root and name; pages are fetched as needed.

        Args:
            root: Only runs of this root; None for all.
            filter: Only runs that match, such as `labels.team = "nlp" AND latest_step > 1000`.
            order_by: Sort order, such as `created desc` or `best."eval/loss"`.
            columns: Metrics, config values and labels to add to each run as its `columns`, such as
                `best.loss, config.hidden_size, labels.owner`.
            page_size: Runs per request.
            refresh: Make the server read the store first. It means the same in the other methods.
        """
        path = "/v1/runs" if root is None else f"/v1/roots/{segment(root)}/runs"
        for page in self._pages(
            RunList,
            path,
            filter=filter or None,
            order_by=order_by or None,
            columns=columns or None,
            page_size=page_size,
            refresh=refresh or None,
        ):
            yield from page.runs

    def run(self, run: str, *, root: str = DEFAULT_ROOT, refresh: bool = False) -> Run:
        """Return a run."""
        return self._get(Run, run_path(root, run), refresh=refresh or None)

    def create_run(
        self, run: str, *, labels: Mapping[str, str] | None = None, root: str = DEFAULT_ROOT
    ) -> Run:
        """Create a run before its job starts; the job then saves into it.

        Args:
            run: Name of the new run.
            labels: Label values by name.
            root: Name of its root.

        Raises:
            ProblemResponseError: 409 if a run with that name exists.
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
        r"""Start to list the checkpoints in a folder of plain Orbax as a run; no file is copied.

        Args:
            folder: Path within the run's root, or URI in any root.
            run: Name of a new run, or of the run that already imports this folder.
            step: Step of the checkpoint, if the folder is a single checkpoint.
            config: Hugging Face's config.json of the model in the steps; needs `map`.
            map: Names of the model's leaves, by regular expression. Each expression must match a
                whole stored path, `<item>/<path>`; the name may use its groups as `\1`. The first
                match counts.
            root: Name of the run's root.
            idempotency_key: Idempotency key; a repeat with the same key starts nothing new.

        Raises:
            ProblemResponseError: 404 or 422 if there is nothing to import, or the config or the map
                is invalid; 409 if the root may not import from there, the name is taken, or another
                run imports the folder.
        """
        body: dict[str, Any] = {"folder": folder, "run": run, "step": step}
        if config is not None or map is not None:  # one without the other is refused
            body["model"] = {"config": config, "map": map}
        headers = idempotency(idempotency_key)
        path = f"/v1/roots/{segment(root)}/runs:adopt"
        return self._send(Operation, "POST", path, body, headers=headers)

    def usage(self, run: str, *, root: str = DEFAULT_ROOT) -> RunUsage:
        """Return the bytes that a run takes in the store; the server counts them now."""
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
        """Yield the checkpoints of a run, highest step first; pages are fetched as needed.

        Args:
            run: Name of the run.
            root: Name of its root.
            state: A state, `available` (listed or damaged), or `all`. None means available, or all
                if the filter names `state`.
            filter: Only checkpoints that match, such as `metrics.loss < 0.5 AND step >= 1000`.
            order_by: Sort order, such as `metrics.loss, step desc`.
            page_size: Checkpoints per request.
            refresh: Make the server read the store first.
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
        """Return a checkpoint."""
        return self._get(Checkpoint, step_path(root, run, step), refresh=refresh or None)

    def announce(
        self, run: str, step: int, *, attempt: int | None = None, root: str = DEFAULT_ROOT
    ) -> Checkpoint:
        """Announce a saved step; the server reads it from the store and lists it.

        Args:
            run: Name of the run.
            step: The step.
            attempt: Attempt that saved the step, if several attempts did.
            root: Name of the run's root.

        Raises:
            ProblemResponseError: 404 if the step is not in the store.
        """
        body = {"step": step, "attempt": attempt}
        return self._send(Checkpoint, "POST", f"{run_path(root, run)}/checkpoints", body)

    def aliases(self, run: str, *, root: str = DEFAULT_ROOT, refresh: bool = False) -> list[Alias]:
        """Return the aliases of a run, sorted by name."""
        path = f"{run_path(root, run)}/aliases"
        listed = self._get(AliasList, path, refresh=refresh or None)
        return listed.aliases

    def alias(
        self, run: str, alias: str, *, root: str = DEFAULT_ROOT, refresh: bool = False
    ) -> Alias:
        """Return an alias; `promote` takes its `sequence` as `expect`."""
        return self._get(Alias, alias_path(root, run, alias), refresh=refresh or None)

    def alias_history(self, run: str, alias: str, *, root: str = DEFAULT_ROOT) -> AliasHistory:
        """Return the history of an alias, newest first."""
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
            expect: Sequence number of the alias as last seen; None if the alias must not exist.
            reason: Text for the alias history.
            attempt: Attempt that wrote the step, as the alias history names it; None for the
                attempt whose step is listed now.
            root: Name of the run's root.

        Raises:
            ProblemResponseError: 412 if the alias has moved since; `.problem["current"]` is the
                alias now. 409 if another attempt wrote the step, or the step is damaged.
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

    def policies(self, *, kind: str | None = None) -> PolicyList:
        """Return the policies of the servers' environment and of the roots.

        Args:
            kind: Only policies of this kind; default: all.
        """
        return self._get(PolicyList, "/v1/policies", kind=kind)

    def policy(self, kind: str, name: str, *, root: str = DEFAULT_ROOT) -> PolicyState:
        """Return the policy of a kind and name that is in force for a root."""
        return self._get(PolicyState, policy_path(root, kind, name))

    def writer(self, run: str, *, root: str = DEFAULT_ROOT) -> RunWriter:
        """Return the current or last writer of a run; the server reads the store now."""
        return self._get(RunWriter, f"{run_path(root, run)}/writer")

    def take_over_run(
        self, run: str, *, attempt: int, reason: str = "", root: str = DEFAULT_ROOT
    ) -> RunTakenOver:
        """End the attempt of a run's writer, so that another writer can start at once.

        Listed steps stay; every later save of the ended writer fails.

        Args:
            run: Name of the run.
            attempt: Attempt of the writer, from `writer`.
            reason: Text for the audit trail.
            root: Name of the run's root.

        Raises:
            ProblemResponseError: 412 if another attempt holds the run, or none; 409 if another
                writer took it over just now.
        """
        body = {"attempt": attempt, "reason": reason}
        return self._send(RunTakenOver, "POST", f"{run_path(root, run)}:takeOver", body)

    def workers(self) -> list[Worker]:
        """Return all job workers that were ever started, sorted by name."""
        listed = self._get(WorkerList, "/v1/workers")
        return listed.workers

    def take_over(self, worker: str) -> list[str]:
        """Hand a dead worker's operations to the other workers; return their ids."""
        path = f"/v1/workers/{segment(worker)}:takeOver"
        taken = self._send(TakenOver, "POST", path)
        return taken.operations

    def keys(self) -> list[Key]:
        """Return all API keys, sorted by name and time, without their secrets."""
        listed = self._get(KeyList, "/v1/keys")
        return listed.keys

    def create_key(
        self,
        name: str,
        *,
        scope: str = "read",
        roots: Iterable[str] | None = None,
        expires_seconds: float | None = None,
    ) -> NewKey:
        """Create an API key; only this answer contains the secret.

        Args:
            name: Name of the caller, for the audit trail.
            scope: `read`, `operate` or `admin`.
            roots: Names of the roots that the key is valid for; None for all.
            expires_seconds: Lifetime of the key; None if it is valid until revoked.
        """
        body = {
            "name": name,
            "scope": scope,
            "roots": None if roots is None else list(roots),
            "expires_seconds": expires_seconds,
        }
        return self._send(NewKey, "POST", "/v1/keys", body)

    def revoke_key(self, key: str) -> None:
        """Revoke the key with an id, for good."""
        self._answer("DELETE", f"/v1/keys/{segment(key)}")

    def audit_events(self, *, filter: str = "", page_size: int = 100) -> Iterator[AuditEvent]:
        """Yield the audit trail, newest first; pages are fetched as needed.

        Args:
            filter: Only entries that match, such as `caller = "ci" AND action = alias.promote`.
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
        """Start to fork a new run from a step.

        Args:
            run: Name of the run.
            step: A listed step.
            target: Name of the new run.
            despite_damage: Reason to fork a damaged step, for the audit trail. With None, the
                server refuses a damaged step with 409.
            root: Name of the run's root.
            idempotency_key: Idempotency key; a repeat with the same key starts nothing new.
        """
        body = {"mode": "fork", "run": target, **without_none({"despite_damage": despite_damage})}
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
        """Start to make a step the latest of its run; later steps become superseded, not deleted.

        Args:
            run: Name of the run.
            step: A listed step.
            strand: Aliases that may keep pointing at a superseded step.
            despite_damage: Reason to use a damaged step, as in `restore`.
            root: Name of the run's root.
            idempotency_key: Idempotency key; a repeat with the same key starts nothing new.

        Raises:
            ProblemResponseError: 409 if other aliases point at a superseded step;
                `.problem["aliases"]` names them. 412 if the run changes between the read here and
                the rollback.
        """
        seen = self._answer("GET", run_path(root, run), params={"refresh": True})
        headers = {"If-Match": seen.headers["ETag"], **idempotency(idempotency_key)}
        body = {
            "mode": "rollback",
            "strand": list(strand),
            **without_none({"despite_damage": despite_damage}),
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
        """Start to write a step into one safetensors file; options: fields of `GatherRequest`."""
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
        """Start to export a step in Hugging Face format; options: fields of `ConvertRequest`."""
        return self._start("convert", run, step, root, options, idempotency_key)

    def verify(
        self,
        run: str,
        step: int,
        *,
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
    ) -> Operation:
        """Start to compare a step with its checksums; the operation fails if it finds damage."""
        return self._start("verify", run, step, root, {}, idempotency_key)

    def verify_run(
        self,
        run: str,
        *,
        steps: Literal["all", "latest", "none"] = "all",
        root: str = DEFAULT_ROOT,
        idempotency_key: str | None = None,
    ) -> Operation:
        """Start to verify a run's records, and the bytes of the listed steps that `steps` asks for.

        The operation fails if anything is damaged.
        """
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
        """Repair the records of a run; with `dry_run`, only return the possible repairs."""
        body = {"dry_run": dry_run, "forget": list(forget)}
        return self._send(RepairReport, "POST", f"{run_path(root, run)}:repair", body)

    def operations(
        self,
        *,
        state: OperationState | None = None,
        filter: str = "",
        order_by: str = "",
        page_size: int = 100,
    ) -> Iterator[Operation]:
        """Yield operations, newest first; pages are fetched as needed.

        Args:
            state: Only operations in this state; None: in any.
            filter: Only operations for which this holds, such as `run = "llama" AND step >= 100`.
            order_by: Order of the list, such as `step desc`.
            page_size: Number of operations per request.
        """
        for page in self._pages(
            OperationList,
            "/v1/operations",
            page_size=page_size,
            state=state,
            filter=filter or None,
            order_by=order_by or None,
        ):
            yield from page.operations

    def operation(self, operation: str) -> Operation:
        """Return an operation in its current state."""
        return self._get(Operation, f"/v1/operations/{segment(operation)}")

    def cancel(self, operation: str) -> Operation:
        """Ask an operation to stop, and return its current state."""
        return self._send(Operation, "POST", f"/v1/operations/{segment(operation)}:cancel")

    def resume(self, operation: str) -> Operation:
        """Run a cancelled or failed operation again."""
        return self._send(Operation, "POST", f"/v1/operations/{segment(operation)}:resume")

    def follow(self, operation: str, *, patience: float = 30.0) -> Iterator[Operation]:
        """Yield every change of an operation until it ends; reconnect when the stream breaks.

        Args:
            operation: Id of the operation.
            patience: Seconds without an answer until the server counts as unreachable.

        Raises:
            ServerUnreachableError: No answer for `patience` seconds.
        """
        path = f"/v1/operations/{segment(operation)}/events"
        return follow_operation(self._http, path, Backoff(patience))

    def wait(self, operation: str) -> Operation:
        """Follow an operation to its end, and return its last state.

        Raises:
            ProblemResponseError: The operation failed; the error has the operation's problem.
        """
        last: Operation | None = None
        for state in self.follow(operation):
            last = state
        if last is None:
            last = self.operation(operation)
        if last.error is not None:
            raise ProblemResponseError(last.error.model_dump(mode="json"), last.error.status)
        return last

    def artifacts(self, run: str, step: int, *, root: str = DEFAULT_ROOT) -> list[Artifact]:
        """Return the artifacts of a listed step, newest first."""
        path = f"{step_path(root, run, step)}/artifacts"
        return (self._get(ArtifactList, path)).artifacts

    def export(
        self, run: str, checkpoint: int | str, *, root: str = DEFAULT_ROOT, **options: Any
    ) -> Artifact:
        """Return the export of a checkpoint that was made with these options.

        Args:
            run: Name of the run.
            checkpoint: A step, an alias, or "latest".
            root: Name of the run's root.
            options: Options of the export, as for `convert`.

        Raises:
            ProblemResponseError: 404 if there is no such checkpoint or it was not exported so; 409
                if it is damaged.
        """
        path = f"{run_path(root, run)}/exports/{segment(str(checkpoint))}"
        return self._get(Artifact, path, **options)

    def artifact(self, artifact: str) -> Artifact:
        """Return an artifact, the output of a gather or a convert."""
        return self._get(Artifact, f"/v1/artifacts/{segment(artifact)}")

    def artifact_blocks(self, artifact: str, name: str, *, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of an artifact's file from an offset on; resume a broken download.

        Raises:
            ServerUnreachableError: The connection broke again and again.
        """
        path = f"/v1/artifacts/{segment(artifact)}/files/{segment(name)}"
        return blocks(self._http, path, start)

    def download(self, artifact: str, name: str, target: str | os.PathLike[str]) -> int:
        """Write a file of an artifact to `target`; return its size in bytes.

        A broken download is resumed. `target` appears only when it is complete.

        Raises:
            DownloadError: The bytes differ from the exported file.
            ServerUnreachableError: The connection broke again and again.
        """
        path = f"/v1/artifacts/{segment(artifact)}/files/{segment(name)}"
        return download(self._http, path, Path(target))
