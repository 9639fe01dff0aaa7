"""A run in the store: its info, its steps and their states, its aliases.

Nothing here opens checkpoint data: states are read off names and small objects.
"""

import contextlib
import os
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, SupportsIndex

from pydantic import BaseModel, ConfigDict, Field

from cairn.storage.arrays import STEP_METADATA, TREE_METADATA
from cairn.storage.errors import (
    CorruptionError,
    InvalidURIError,
    PreconditionFailedError,
    RunNotFoundError,
    StepInFlightError,
    StepNotFoundError,
    StorageError,
    StoreUnavailableError,
)
from cairn.storage.runs.aliases import Aliases
from cairn.storage.runs.attempts import Attempt, counting, list_attempts
from cairn.storage.runs.layout import (
    MANIFESTS,
    MAX_NUMBER,
    RUN_FILE,
    RUN_FOLDERS,
    TRASH,
    CheckpointRef,
    check_run_name,
    check_step,
    is_run_name,
    manifest_file,
    parse_manifest_file,
    parse_ref,
    parse_trash_file,
    step_dir,
    step_of,
    trash_file,
)
from cairn.storage.runs.manifest import Manifest, ManifestSummary
from cairn.storage.runs.step_states import StepInfo, StepState, unpublished_steps
from cairn.storage.store import (
    Clock,
    Files,
    Moment,
    ObjectStore,
    Record,
    StoreURI,
    open_files,
    parse_uri,
    rfc3339,
    sha256_of,
    utc_now,
)

__all__ = [
    "Lineage",
    "Run",
    "RunInfo",
    "StepInfo",
    "StepState",
    "list_runs",
    "no_such_run",
    "refuse_inside_checkpoint",
    "refuse_inside_run",
    "resolve_checkpoint",
]

_NAMED_IN_ERRORS = 5
_CHECKPOINT_NEXT = "Give the run that the checkpoint belongs to: RUN, RUN@ALIAS or RUN/steps/N."


class Lineage(BaseModel):
    """Where a forked run comes from.

    Attributes:
        run: URI of the parent run.
        step: the step it was forked from.
        attempt: the attempt that wrote that step.
        manifest_digest: of that step's manifest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    step: Annotated[int, Field(ge=0, le=MAX_NUMBER)]
    attempt: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = None
    manifest_digest: str | None = None


class RunInfo(Record):
    """What `run.json` says.

    Attributes:
        name: the run's name.
        created: when, RFC 3339 in UTC.
        labels: for people and filters.
        config_digest: of the model's config, if known.
        lineage: the step it was forked from, if any.
        environment: versions and hosts, for people.
    """

    FORMAT: ClassVar[str] = "cairn.run"

    name: str
    created: Moment
    labels: dict[str, str] = Field(default_factory=dict)
    config_digest: str | None = None
    lineage: Lineage | None = None
    environment: dict[str, Any] = Field(default_factory=dict)


def no_such_run(folder: StoreURI) -> RunNotFoundError:
    """The error that says what there is in place of a run."""
    names: list[str] = []
    with contextlib.suppress(StorageError):  # no bucket, or none that we may list
        names = [entry.name for entry in open_files(folder).list()]
    next_step = "Check the name; `cairn runs` lists what exists."
    if STEP_METADATA in names:
        found, next_step = "one checkpoint's folder", _CHECKPOINT_NEXT
    elif names:
        more = ", …" if len(names) > _NAMED_IN_ERRORS else ""
        found = f"a folder without it, with {', '.join(names[:_NAMED_IN_ERRORS])}{more}"
    elif folder.scheme == "file" and os.path.isdir(folder.local_path):
        found = "an empty folder"
    else:
        is_file = folder.scheme == "file" and os.path.lexists(folder.local_path)
        found = "a file" if is_file else "nothing"
    return RunNotFoundError(
        "no such run",
        path=folder,
        expected=f"a folder with {RUN_FILE}",
        found=found,
        next_step=next_step,
    )


def refuse_inside_checkpoint(folder: StoreURI) -> None:
    """Raise if `folder` is that of a checkpoint or of an item of one: no run may begin there.

    Raises:
        InvalidURIError: it is.
    """
    found = ObjectStore.open(folder).read_many([STEP_METADATA, TREE_METADATA])
    if any(value is not None for value in found.values()):
        raise _no_run_begins(folder, "the folder of a checkpoint", _CHECKPOINT_NEXT)


def refuse_inside_run(folder: StoreURI) -> None:
    """Raise if `folder` is the address of a step or one of a run's own: no run may begin there.

    The store is asked only about a path that has the name of such a folder in it.

    Raises:
        InvalidURIError: it is.
    """
    step = step_of(folder)
    if step is not None:
        run = folder.parent.parent
        found = f"the address of step {step} of {run}"
        raise _no_run_begins(folder, found, f"Give the run, {run}, or another name.")
    inner = folder
    while inner.path and (outer := inner.parent).path:
        if f"{inner.name}/" in RUN_FOLDERS:
            with contextlib.suppress(StoreUnavailableError):  # not ours to look into
                _refuse_own_folder(folder, outer)
        inner = outer


def _refuse_own_folder(folder: StoreURI, run: StoreURI) -> None:
    if ObjectStore.open(run).read(RUN_FILE) is not None:
        found = f"a folder of the run {run}"
        raise _no_run_begins(folder, found, f"Give the run, {run}, or a name beside it.")


def _no_run_begins(folder: StoreURI, found: str, next_step: str) -> InvalidURIError:
    return InvalidURIError(
        "not a run's folder",
        path=folder,
        expected="a run's folder, or one where a run can begin",
        found=found,
        next_step=next_step,
    )


_STEPS_NAMED = 20


class Run:
    """One run. It keeps no state of its own: every call asks the store."""

    def __init__(
        self, uri: StoreURI, *, clock: Clock = utc_now, objects: ObjectStore | None = None
    ) -> None:
        """In the folder `uri`, which is not looked at.

        Args:
            uri: the run's folder.
            clock: tells the time.
            objects: its small objects, if they are not to be had by its folder.
        """
        self.uri = uri
        self.objects = ObjectStore.open(uri) if objects is None else objects
        self.aliases = Aliases(self.objects)
        self.clock = clock

    def __repr__(self) -> str:
        return f"Run({str(self.uri)!r})"

    @classmethod
    def open(cls, uri: StoreURI | str | os.PathLike[str], *, clock: Clock = utc_now) -> "Run":
        """The run in the folder `uri`.

        Raises:
            RunNotFoundError: there is none.
        """
        run = cls(parse_uri(uri), clock=clock)
        run.info()
        return run

    @classmethod
    def create(
        cls,
        uri: StoreURI | str | os.PathLike[str],
        *,
        labels: Mapping[str, str] | None = None,
        lineage: Lineage | Mapping[str, Any] | None = None,
        config_digest: str | None = None,
        environment: Mapping[str, Any] | None = None,
        exist_ok: bool = True,
        clock: Clock = utc_now,
    ) -> "Run":
        """Create the run `uri`, or open it if it exists and `exist_ok`.

        Raises:
            InvalidURIError: the folder's name can't be a run's, or is the address of a step, or
                it is in a checkpoint or in a folder of another run.
            PreconditionFailedError: it exists, and `exist_ok` is False; `current` is its info.
        """
        run = cls(parse_uri(uri), clock=clock)
        info = RunInfo(
            name=check_run_name(run.uri.name),
            created=rfc3339(clock()),
            labels=dict(labels or {}),
            config_digest=config_digest,
            lineage=None if lineage is None else Lineage.model_validate(lineage),
            environment=dict(environment or {}),
        )
        refuse_inside_run(run.uri)
        refuse_inside_checkpoint(run.uri)
        if exist_ok and run._found_info() is not None:
            return run
        try:
            run.objects.write_if(RUN_FILE, info.to_bytes(), generation=None, same_is_success=True)
        except PreconditionFailedError as exc:
            current = run.info()
            if not exist_ok:
                raise PreconditionFailedError(
                    "the run exists",
                    path=run.uri,
                    expected="no run of this name",
                    found=f"one created {current.created}",
                    next_step="Choose another name.",
                    current=current,
                ) from exc
        return run

    def info(self) -> RunInfo:
        """What `run.json` says.

        Raises:
            RunNotFoundError: there is no `run.json`.
            UnsupportedFormatError, CorruptionError: it can't be read.
        """
        found = self._found_info()
        if found is None:
            raise no_such_run(self.uri)
        return found

    def _found_info(self) -> RunInfo | None:
        found = self.objects.read(RUN_FILE)
        return None if found is None else RunInfo.parse(found.value, self.uri / RUN_FILE)

    @property
    def files(self) -> Files:
        """The large files of the run."""
        return open_files(self.uri)

    def attempts(self) -> list[Attempt]:
        """Every attempt, by number."""
        return list_attempts(self.objects)

    def published(self) -> list[tuple[int, int]]:
        """(step, attempt) of every manifest, by step; from names alone."""
        names = (parse_manifest_file(name) for name in self.objects.list(MANIFESTS))
        return sorted(key for key in names if key is not None)

    def trashed(self) -> set[tuple[int, int]]:
        """(step, attempt) of every deleted step; from names alone."""
        names = (parse_trash_file(name) for name in self.objects.list(TRASH))
        return {key for key in names if key is not None}

    def step_attempts(self, *, undeleted: Collection[tuple[int, int]] = ()) -> dict[int, int]:
        """The attempt that holds each listed step, by step; from names alone.

        Args:
            undeleted: (step, attempt) of deleted steps that are regarded as not deleted.
        """
        judged = self._judged(*self._names(), undeleted)
        return {step: number for (step, number), state in judged if state is StepState.LISTED}

    def states_of(self, published: Collection[tuple[int, int]]) -> dict[tuple[int, int], StepState]:
        """The states of all steps that `published` gave just before; from names alone."""
        return dict(self._judged(published, self.attempts()))

    def state_of(self, step: int, attempt: int) -> StepState:
        """The state of a step that was published once, be it removed by now; from names alone."""
        if self.step_attempts().get(step) == attempt:
            state = StepState.LISTED
        else:
            state = StepState.SET_ASIDE
        deleted = self.objects.read(trash_file(step, attempt)) is not None
        return StepState.TRASHED if deleted else state

    def steps(self) -> list[StepInfo]:
        """All listed steps, by number."""
        keys = list(self.step_attempts().items())
        return self.described([(key, StepState.LISTED) for key in keys])

    def latest_step(self) -> int | None:
        """The highest listed step, or None; from names alone."""
        return max(self.step_attempts(), default=None)

    def latest(self) -> StepInfo | None:
        """The highest listed step, or None if there is none."""
        held = self.step_attempts()
        if not held:
            return None
        step = max(held)
        return self._describe(step, held[step], StepState.LISTED)

    def step(self, number: SupportsIndex) -> StepInfo:
        """The listed step `number`.

        Raises:
            InvalidURIError: it is no step's number.
            StepInFlightError: it is being written now.
            StepNotFoundError: it is not listed; the error names the steps that are.
        """
        number = check_step(number)
        found = self._listed(number)
        if found is not None:
            return found
        held = self.step_attempts()
        if number in held:
            return self._describe(number, held[number], StepState.LISTED)
        others = {info.state: info for info in self._other_states(number)}
        if StepState.IN_FLIGHT in others:
            raise StepInFlightError(
                "the step is being saved",
                path=self.uri / step_dir(others[StepState.IN_FLIGHT].attempt, number),
                expected="a complete step",
                found="a save in flight",
                next_step="Try again once it is done.",
            )
        raise StepNotFoundError(
            "no such step",
            path=self.uri,
            expected=f"step {number}",
            found=", ".join(f"step {number} {state.value}" for state in others)
            or _steps_text(list(held)),
            next_step="Choose a listed step, or leave the step out for the latest."
            + (f" Listed: {_steps_text(list(held))}." if others else ""),
        )

    def all_states(self) -> list[StepInfo]:
        """Every step in whatever state, by step and attempt."""
        published, attempts = self._names()
        found = self.described(self._judged(published, attempts))
        found += self._without_manifest(published, attempts)
        return sorted(found, key=lambda info: (info.step, info.attempt))

    def unpublished(self) -> list[StepInfo]:
        """Every step that has a folder and no manifest, by step and attempt."""
        found = self._without_manifest(*self._names())
        return sorted(found, key=lambda info: (info.step, info.attempt))

    def manifest(self, info: StepInfo) -> Manifest:
        """The manifest of a step.

        Raises:
            StepNotFoundError: it has none.
            UnsupportedFormatError, CorruptionError: it can't be read.
            CorruptionError: it is not the one that `info` was made from.
        """
        key = manifest_file(info.step, info.attempt)
        found = self.objects.read(key)
        if found is None:
            raise StepNotFoundError(
                "the step has no manifest",
                path=self.uri / key,
                expected="the manifest of a verified step",
                found=f"none (the step is {info.state.value})",
                next_step="Choose a listed step.",
            )
        manifest = Manifest.parse(found.value, self.uri / key)
        if (manifest.step, manifest.attempt) != (info.step, info.attempt):
            raise CorruptionError(
                "a manifest under another's name",
                path=self.uri / key,
                expected=f"step {info.step}, attempt {info.attempt}",
                found=f"step {manifest.step}, attempt {manifest.attempt}",
                next_step="Restore the object from a backup, or delete the step.",
            )
        if info.manifest_digest not in (None, sha256_of(found.value)):
            raise CorruptionError(
                "the manifest changed",
                path=self.uri / key,
                expected=info.manifest_digest,
                found=sha256_of(found.value),
                next_step="Manifests never change: restore the object from a backup.",
            )
        return manifest

    def step_uri(self, info: StepInfo) -> StoreURI:
        """The folder of a step: an ordinary Orbax checkpoint."""
        return self.uri / step_dir(info.attempt, info.step)

    def resolve(self, ref: CheckpointRef) -> StepInfo:
        """The step that `ref` names; an alias keeps its step even when that was set aside.

        Raises:
            AliasNotFoundError: there is no such alias.
            StepNotFoundError: there is no such step, or none at all.
            StepInFlightError: it is being written now.
        """
        if ref.step is not None:
            return self.step(ref.step)
        if ref.alias is not None:
            return self._aliased(ref.alias)
        latest = self.latest()
        if latest is None:
            raise StepNotFoundError(
                "the run has no complete step",
                path=self.uri,
                expected="at least one saved step",
                found="none",
                next_step="Wait for the first save, or check the run's name.",
            )
        return latest

    def _aliased(self, name: str) -> StepInfo:
        alias = self.aliases.require(name)
        info = self._describe(alias.step, alias.attempt, self.state_of(alias.step, alias.attempt))
        if alias.manifest_digest not in (None, info.manifest_digest):
            raise CorruptionError(
                "the alias points to another manifest",
                path=self.uri / manifest_file(alias.step, alias.attempt),
                expected=alias.manifest_digest,
                found=info.manifest_digest,
                next_step="Manifests never change: restore the object from a backup.",
            )
        return info

    def _listed(self, number: int) -> StepInfo | None:
        """The step, if it is listed, by its own names alone: however many steps the run has."""
        names = {manifest_file(number, one.number): one.number for one in self.attempts()}
        stored = self.objects.read_many(names)  # of those that do not count, only that they exist
        published = [(number, names[name]) for name, value in stored.items() if value]
        attempts = self.attempts()  # after manifests
        attempt = counting(published, attempts).get(number)
        if attempt is None:
            return None
        later = [(number, one.number) for one in attempts if one.number >= attempt]
        tombstones = self.objects.read_many(trash_file(*key) for key in later)
        deleted = [key for key in later if tombstones[trash_file(*key)] is not None]
        # One that was deleted does not give its place back to what it had overwritten.
        holder = counting([*published, *deleted], attempts).get(number)
        if holder != attempt or (number, attempt) in deleted:
            return None
        name = manifest_file(number, attempt)
        summary = self.objects.parse_many([name], ManifestSummary.parse).get(name)
        return summary and StepInfo(number, attempt, StepState.LISTED, *summary)

    def _names(self) -> tuple[list[tuple[int, int]], list[Attempt]]:
        """(step, attempt) of every manifest, by step, then every attempt.

        In this order: the attempt that wrote a manifest must be among those that judge it.
        """
        published = self.published()
        return published, self.attempts()

    def _judged(
        self,
        published: Collection[tuple[int, int]],
        attempts: list[Attempt],
        undeleted: Collection[tuple[int, int]] = (),
    ) -> list[tuple[tuple[int, int], StepState]]:
        """The state of every step that has a manifest."""
        deleted = self.trashed()
        held = counting(deleted.union(published), attempts)
        trashed = deleted.difference(undeleted)
        judged = []
        for step, number in published:
            if (step, number) in trashed:
                state = StepState.TRASHED
            elif held.get(step) == number:
                state = StepState.LISTED
            else:
                state = StepState.SET_ASIDE
            judged.append(((step, number), state))
        return judged

    def _without_manifest(
        self, published: list[tuple[int, int]], attempts: list[Attempt]
    ) -> list[StepInfo]:
        return unpublished_steps(
            self.objects, published=set(published), attempts=attempts, now=self.clock()
        )

    def _other_states(self, number: int) -> list[StepInfo]:
        """What there is of a step that is not listed."""
        published, attempts = self._names()
        judged = self._judged([key for key in published if key[0] == number], attempts)
        found = [StepInfo(*key, state) for key, state in judged]
        others = self._without_manifest(published, attempts)
        return found + [info for info in others if info.step == number]

    def described(self, steps: list[tuple[tuple[int, int], StepState]]) -> list[StepInfo]:
        """Steps with what their manifests say; one deleted meanwhile is left out."""
        names = [manifest_file(*key) for key, _ in steps]
        summaries = self.objects.parse_many(names, ManifestSummary.parse)
        return [
            StepInfo(step, attempt, state, *summaries[name])
            for ((step, attempt), state), name in zip(steps, names, strict=True)
            if name in summaries
        ]

    def _describe(self, step: int, attempt: int, state: StepState) -> StepInfo:
        described = self.described([((step, attempt), state)])
        if not described:
            raise StepNotFoundError(
                "the step is gone",
                path=self.uri / manifest_file(step, attempt),
                expected=f"step {step} of attempt {attempt}",
                found="no manifest",
                next_step="It was deleted; choose a listed step.",
            )
        return described[0]


def _steps_text(steps: list[int]) -> str:
    if not steps:
        return "no steps"
    shown = ", ".join(map(str, sorted(steps)[-_STEPS_NAMED:]))
    return f"steps {'…, ' if len(steps) > _STEPS_NAMED else ''}{shown}"


def resolve_checkpoint(text: StoreURI | str | os.PathLike[str]) -> tuple[Run, StepInfo]:
    """The run and the step that "run", "run@alias" or "run/steps/N" names.

    Raises:
        InvalidURIError: the text is malformed.
        RunNotFoundError: there is no such run.
        AliasNotFoundError: there is no such alias.
        StepNotFoundError: there is no such step.
        StepInFlightError: the step is being written now.
    """
    ref = parse_ref(text)
    run = Run.open(ref.run)
    return run, run.resolve(ref)


def list_runs(root: StoreURI | str | os.PathLike[str]) -> list[str]:
    """Names of the runs directly below `root`, sorted; folders of other names are left out."""
    parsed = parse_uri(root)
    names = [
        entry.name
        for entry in open_files(parsed).list()
        if entry.is_dir and is_run_name(entry.name)
    ]
    found = ObjectStore.open(parsed).read_many(f"{name}/{RUN_FILE}" for name in names)
    return [name for name in sorted(names) if found[f"{name}/{RUN_FILE}"] is not None]
