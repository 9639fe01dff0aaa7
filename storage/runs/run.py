"""Run in the store: its info, its steps and their states, its aliases.

Nothing here opens checkpoint data: states come from names and small objects.
"""

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, SupportsIndex, TypeVar

from cairn.storage.arrays.orbax_tree import STEP_METADATA, TREE_METADATA
from cairn.storage.errors import (
    CorruptionError,
    InvalidURIError,
    NotFoundError,
    PreconditionFailedError,
    RunNotFoundError,
    StepInFlightError,
    StepNotFoundError,
    StorageError,
    StoreUnavailableError,
)
from cairn.storage.notebooks import MAX_ROWS, html_table, never_raises, size_cell
from cairn.storage.runs.history import (
    History,
    RunListing,
    StepKey,
    certain_holder,
    judge_lease,
    list_records,
    overwriting,
    published_steps,
    read_history,
    saved_among,
    trashed_steps,
)
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.records.aliases import Aliases
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.attempts import Attempt, judge_attempts, list_attempts
from cairn.storage.runs.records.layout import (
    ALIASES,
    ANNOTATIONS,
    ATTEMPTS,
    LEASE_FILE,
    RUN_FILE,
    RUN_FOLDERS,
    TRASH,
    check_run_name,
    check_step,
    is_run_name,
    manifest_file,
    parse_attempt_file,
    step_dir,
    step_of,
    trash_file,
)
from cairn.storage.runs.records.manifest import Manifest, ManifestSummary
from cairn.storage.runs.records.placed import (
    UNREADABLE,
    expect_run,
    judge_records,
    misplaced,
    parse_record,
    place_of,
    read_records,
    read_run_info,
    write_run_info,
)
from cairn.storage.runs.records.run_info import Lineage, RunInfo
from cairn.storage.runs.records.step_contents import StepContents
from cairn.storage.runs.records.step_index import open_contents
from cairn.storage.runs.step_states import StepInfo, StepState, unpublished_steps
from cairn.storage.store.clock import Clock, rfc3339, utc_now
from cairn.storage.store.deadlines import deadline_after
from cairn.storage.store.disk.confinement import source_folder
from cairn.storage.store.files import FileEntry, Files
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.open_files import open_files
from cairn.storage.store.records import sha256_of
from cairn.storage.store.uri import StoreURI, parse_uri
from cairn.storage.store_checks.probe import begin_probe, read_cached_record

__all__ = [
    "Run",
    "create_run",
    "list_runs",
    "no_such_run",
    "refuse_inside_checkpoint",
    "refuse_inside_run",
    "refuse_lost_run_record",
]

T = TypeVar("T")

_NAMED_IN_ERRORS = 5
_OF_STEPS: Final = (ALIASES, ANNOTATIONS, TRASH)
"""Folders whose records name steps only by (step, attempt), so that no number may be reused."""
_CHECKPOINT_MARKERS = (STEP_METADATA, TREE_METADATA, f"default/{TREE_METADATA}")
# "checkpoint" is a file with all leaves of a step.
_ITEM_MARKERS = (TREE_METADATA, "checkpoint")
_PLAIN_STEP = re.compile(r"(.*_)?[0-9]+\Z")
_CHECKPOINT_NEXT = "Give the run that the checkpoint belongs to: RUN, RUN@ALIAS or RUN/steps/N."


def no_such_run(folder: StoreURI) -> RunNotFoundError:
    """Return the error for a missing run; the message names what exists in its place."""
    names: list[str] = []
    with contextlib.suppress(StorageError):  # no bucket, or no right to list it
        names = [entry.name for entry in open_files(folder).list()]
    next_step = "Check the name; `cairn runs` lists what exists."
    if STEP_METADATA in names:
        found, next_step = "one checkpoint's folder", _CHECKPOINT_NEXT
    elif names:
        more = ", …" if len(names) > _NAMED_IN_ERRORS else ""
        found = f"a folder without {RUN_FILE}, with {', '.join(names[:_NAMED_IN_ERRORS])}{more}"
    elif folder.scheme == "file" and os.path.isdir(folder.local_path):
        found = "an empty folder"
    else:
        is_file = folder.scheme == "file" and os.path.lexists(folder.local_path)
        found = "a file" if is_file else "nothing"
        nearest = _nearest_name(folder)
        if nearest is not None:
            next_step = f"The nearest name that exists is {nearest}. {next_step}"
    return RunNotFoundError(
        "no such run",
        path=folder,
        expected=f"a folder with {RUN_FILE}",
        found=found,
        next_step=next_step,
    )


def _nearest_name(folder: StoreURI) -> StoreURI | None:
    """Return an address whose name is similar to the first missing part of a path; else None."""
    with contextlib.suppress(StorageError):  # no right to list it
        while folder.path:
            names = [entry.name for entry in open_files(folder.parent).list()]
            if names:
                close = difflib.get_close_matches(folder.name, names, n=1)
                return folder.parent / close[0] if close else None
            folder = folder.parent
    return None


def refuse_inside_checkpoint(folder: StoreURI) -> None:
    """Raise InvalidURIError if `folder` is a checkpoint or an item of one: no run may begin there.

    Raises:
        InvalidURIError: the folder is one of these.
    """
    records = ObjectStore.open(folder).read_many([STEP_METADATA, TREE_METADATA])
    if any(value is not None for value in records.values()):
        raise _no_run_begins(folder, "the folder of a checkpoint", _CHECKPOINT_NEXT)


def refuse_inside_run(folder: StoreURI) -> None:
    """Raise InvalidURIError if `folder` is the address of a step, or inside a run.

    No run may begin there. A request is made only if the path contains the name of a run's folder.

    Raises:
        InvalidURIError: the folder is one of these.
    """
    step = step_of(folder)
    if step is not None:
        run = folder.parent.parent
        found = f"the address of step {step} of {run}"
        raise _no_run_begins(folder, found, f"Give the run, {run}, or another name.")
    inner = folder
    while inner.path and (outer := inner.parent).path:
        if f"{inner.name}/" in RUN_FOLDERS:
            run_file = None
            with contextlib.suppress(StoreUnavailableError):  # no right to read it
                run_file = ObjectStore.open(outer).read(RUN_FILE)
            if run_file is not None:
                found = f"a folder of the run {outer}"
                raise _no_run_begins(folder, found, f"Give the run, {outer}, or a name beside it.")
        inner = outer


def _no_run_begins(folder: StoreURI, found: str, next_step: str) -> InvalidURIError:
    return InvalidURIError(
        "not a run's folder",
        path=folder,
        expected="a run's folder, or one where a run can begin",
        found=found,
        next_step=next_step,
    )


def _named(names: list[str]) -> str:
    more = f", and {len(names) - _NAMED_IN_ERRORS} more" * (len(names) > _NAMED_IN_ERRORS)
    return ", ".join(names[:_NAMED_IN_ERRORS]) + more


def refuse_lost_run_record(run: "Run", listing: RunListing | None = None) -> None:
    """Raise CorruptionError if records of a run exist without `run.json`: no run may begin there.

    Args:
        run: the run.
        listing: a listing of the run made just now, if any.

    Raises:
        CorruptionError: records exist without `run.json`; the error names some of them.
    """
    objects = run.objects
    if listing is None:
        listing = list_records(objects)
    names = [name for name in listing.attempts or [] if parse_attempt_file(name) is not None]
    names += [manifest_file(*key) for key in listing.published]
    names += [LEASE_FILE] * (listing.lease is not None)
    # If `run.json` exists now, another process has created it meanwhile.
    if not names or objects.read(RUN_FILE) is not None:
        return
    raise CorruptionError(
        "the run has lost its record",
        path=run.uri / RUN_FILE,
        expected="the record that a run begins with",
        found=f"none, but {_named(names)}",
        next_step="Restore it from a backup, or see what `cairn repair` can do; to begin anew, "
        "choose another name.",
    )


def _refuse_remains(run: "Run", listing: RunListing, entries: Iterable[FileEntry]) -> None:
    """Raise CorruptionError if records of steps exist without any attempt.

    This is so if a run was removed or restored in part. A start would reuse the numbers, and the
    old records would then mark new steps as deleted, or give them labels.

    Args:
        run: the run, which may exist already.
        listing: a listing of the run.
        entries: the entries of its folder.

    Raises:
        CorruptionError: such records exist.
    """
    folders = {f"{entry.name}/" for entry in entries if entry.is_dir}.intersection(_OF_STEPS)
    if not listing.is_empty or not folders:
        return
    names = [name for folder in sorted(folders) for name in run.objects.list(folder)]
    # If the listing is not empty now, another process has begun here meanwhile.
    if not names or not list_records(run.objects).is_empty:
        return
    raise CorruptionError(
        "the run has lost its attempts",
        path=run.uri / ATTEMPTS.removesuffix("/"),
        expected="the records that those of its steps came after",
        found=f"none, but {_named(names)}",
        next_step="Restore them from a backup; to begin anew, remove what is left as well, or "
        "choose another name.",
    )


def refuse_plain_steps(folder: StoreURI, entries: Iterable[FileEntry] | None = None) -> None:
    """Raise InvalidURIError if the folder holds checkpoints that belong to no run.

    A job that starts there would treat them as its own.

    Args:
        folder: the folder, which need not exist.
        entries: its entries; by default they are listed.

    Raises:
        InvalidURIError: the folder holds such checkpoints.
    """
    files = open_files(folder)
    if entries is None:
        entries = files.list()
    folders = [entry.name for entry in entries if entry.is_dir]
    plain = _having(folder, dict.fromkeys(folders, _CHECKPOINT_MARKERS))
    # Older releases of Orbax put markers only into the items, whose names can be anything.
    if not plain:
        steps = [name for name in folders if _PLAIN_STEP.match(name)][-_NAMED_IN_ERRORS:]
        items = {name: [entry.name for entry in files.list(name) if entry.is_dir] for name in steps}
        plain = _having(
            folder,
            {
                name: [f"{item}/{marker}" for item in items[name] for marker in _ITEM_MARKERS]
                for name in steps
            },
        )
    if plain:
        more = f", and {len(plain) - _NAMED_IN_ERRORS} more" * (len(plain) > _NAMED_IN_ERRORS)
        raise _no_run_begins(
            folder,
            f"checkpoints that no run lists: {', '.join(plain[:_NAMED_IN_ERRORS])}{more}",
            f"`cairn adopt {folder}` lists them in a run beside it, where a job can go on.",
        )


def _having(folder: StoreURI, markers: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names of the folders in `markers` that have one of their markers."""
    names = {f"{name}/{marker}": name for name, own in markers.items() for marker in own}
    return sorted({names[name] for name in ObjectStore.open(folder).existing(names)})


def _unless_absent(ask: Callable[[], T]) -> T | None:
    """Call `ask` and return its result; None on a storage error, which a later write will raise."""
    try:
        return ask()
    except (CorruptionError, InvalidURIError):
        raise
    except StorageError:
        return None


_STEPS_NAMED = 20
_SHOWN_SECONDS: Final = 5.0
"""Most seconds that a notebook's display waits for a store."""


class Run:
    """Run in a store. It caches nothing: every call asks the store."""

    def __init__(
        self, uri: StoreURI, *, clock: Clock = utc_now, objects: ObjectStore | None = None
    ) -> None:
        """Create the object for the run in the folder `uri`, without a request.

        Args:
            uri: the run's folder.
            clock: returns the current time in UTC.
            objects: the run's small objects; None: they are opened here.
        """
        self.uri = uri
        self.objects = ObjectStore.open(uri) if objects is None else objects
        self.aliases = Aliases(self.objects)
        self.clock = clock
        self._look: RunListing | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.uri)!r})"

    @never_raises
    def _repr_html_(self) -> str:
        with deadline_after(_SHOWN_SECONDS):
            info = self.info()
            listed = [
                (key, state) for key, state in self.history().states() if state is StepState.LISTED
            ]
            newest = self.described(listed[-MAX_ROWS:])[::-1]
            aliases = self.aliases.judge()[0]
        named: dict[StepKey, list[str]] = {}
        for alias in aliases:
            named.setdefault((alias.step, alias.attempt), []).append(alias.alias)
        parent = None if info.lineage is None else f"{info.lineage.run}/steps/{info.lineage.step}"
        return html_table(
            f"Run {self.uri}",
            [
                ("created", info.created),
                ("forked from", parent),
                ("labels", ", ".join(f"{name}={text}" for name, text in info.labels.items())),
                ("steps", f"{len(listed):,} listed"),
            ],
            ("step", "attempt", "created", "size", "aliases"),
            [
                (*key, step.created, size_cell(step.nbytes), ", ".join(named.get(key, [])))
                for step in newest
                for key in [(step.step, step.attempt)]
            ],
            more=len(listed) - len(newest),
        )

    def expected(self, run_id: str | None) -> "Run":
        """Set the run's id, which another process has read, and return self; it saves a request."""
        if run_id is not None:
            expect_run(self.objects, run_id)
        return self

    @property
    def id(self) -> str | None:
        """Id of the run, from its records; None if none of them can be read."""
        return place_of(self.objects, RUN_FILE).run

    @classmethod
    def open(cls, uri: StoreURI | str | os.PathLike[str], *, clock: Clock = utc_now) -> "Run":
        """Return the run in the folder `uri`.

        Raises:
            RunNotFoundError: there is no run.
        """
        run = cls(parse_uri(uri), clock=clock)
        run.info()
        return run

    @classmethod
    def look_up(cls, uri: StoreURI, *, clock: Clock = utc_now) -> "Run":
        """Return the run in the folder `uri`; its records are listed in the same round of requests.

        Use it if the run's steps are needed next.

        Raises:
            RunNotFoundError: there is no run.
        """
        run = cls(uri, clock=clock)
        _, run._look = run.objects.gather(
            run.info, lambda: _unless_absent(lambda: list_records(run.objects))
        )
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
        adopts: str | None = None,
        exist_ok: bool = True,
        clock: Clock = utc_now,
    ) -> "Run":
        """Create and return the run `uri`; if it exists and `exist_ok`, return it.

        Raises:
            InvalidURIError: the folder's name is not valid for a run; or the folder is the address
                of a step, lies in a checkpoint or in a folder of another run, or holds checkpoints
                of no run.
            CorruptionError: records of a run exist, but not those that are written first.
            UnsupportedFormatError: some labels can't be stored; all of these are listed.
            PreconditionFailedError: the run exists, and `exist_ok` is False; `current` is its info.
        """
        Annotation.of(labels, None)
        info = RunInfo(
            name=check_run_name(parse_uri(uri).name),
            created=rfc3339(clock()),
            labels=dict(labels or {}),
            config_digest=config_digest,
            lineage=None if lineage is None else Lineage.model_validate(lineage),
            environment=dict(environment or {}),
            adopts=adopts,
        )
        return cls._created(parse_uri(uri), info, exist_ok=exist_ok, clock=clock)[0]

    @classmethod
    def begin(
        cls, uri: StoreURI, *, environment: Mapping[str, Any], clock: Clock = utc_now
    ) -> tuple["Run", RunListing | None]:
        """Return the run `uri`, created if needed, and the listing made of it or None.

        Raises:
            InvalidURIError: no run can begin there, see `create`.
        """
        name = check_run_name(uri.name)
        info = RunInfo(name=name, created=rfc3339(clock()), environment=dict(environment))
        return cls._created(uri, info, exist_ok=True, clock=clock, probed=True)

    @classmethod
    def _created(
        cls,
        uri: StoreURI,
        info: RunInfo,
        *,
        exist_ok: bool,
        clock: Clock,
        probed: bool = False,
    ) -> tuple["Run", RunListing | None]:
        """Return the run, created if needed, and its listing or None.

        With `probed`, the store's promises are checked once a run is allowed here.
        """
        run = cls(uri, clock=clock)
        refuse_inside_run(uri)
        # One round, before anything is written.
        _, existing, listing, entries, recalled = run.objects.gather(
            lambda: refuse_inside_checkpoint(uri),
            lambda: read_run_info(run.objects),
            lambda: _unless_absent(lambda: list_records(run.objects)),
            lambda: _unless_absent(open_files(uri).list),
            lambda: read_cached_record(uri) if probed else None,
        )
        if listing is not None and entries is not None:
            _refuse_remains(run, listing, entries)
        if exist_ok and existing is not None:
            if probed:
                begin_probe(uri, recalled)
            else:  # otherwise the publication of a step syncs it
                run.objects.sync(RUN_FILE)
            return run, listing
        try:
            if listing is not None:
                refuse_lost_run_record(run, listing)
            if entries is not None:
                refuse_plain_steps(uri, entries)
        except (CorruptionError, InvalidURIError):
            raise
        except StorageError:
            pass  # no folder or no bucket: the write will raise
        if probed:
            begin_probe(uri, recalled)
        try:
            write_run_info(run.objects, info)
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
        return run, listing

    def info(self) -> RunInfo:
        """Return the content of `run.json`.

        Raises:
            RunNotFoundError: there is no `run.json`, nor any other record of a run.
            UnsupportedFormatError, CorruptionError: `run.json` can't be read, or is lost.
        """
        info = read_run_info(self.objects)
        if info is None:
            with contextlib.suppress(NotFoundError, StoreUnavailableError):  # no right to look
                refuse_lost_run_record(self)
            raise no_such_run(self.uri)
        return info

    def has_saved(self) -> bool:
        """Return True if any save to this run became durable, so that a job resumes here.

        Return False for an empty folder, and for a run whose first save did not finish.

        Raises:
            UnsupportedFormatError, CorruptionError: a record that decides this is lost or damaged.
            InvalidURIError: the folder is not a run; it holds other checkpoints or is inside one.
        """
        if read_run_info(self.objects) is None:
            refuse_lost_run_record(self)
            refuse_inside_checkpoint(self.uri)
            refuse_plain_steps(self.uri)
            return False
        history = self.history()
        if history.published or history.latest() is not None:
            return True
        lease, problems = judge_lease(self.objects)
        if lease is not None and lease.begun is not None:
            return False  # the lease would name a step that was reported durable
        committed = [
            step_dir(info.attempt, info.step)
            for info in self._without_manifest(history)
            if info.state in (StepState.UNVERIFIED, StepState.SUPERSEDED)
        ]
        # The lease is lost or names no attempt: a committed step proves that records are missing.
        if committed or problems:
            raise CorruptionError(
                "the run has lost its records",
                path=self.uri,
                expected="a lease, and the manifests of what was saved",
                found=f"none, but {', '.join(committed[:_NAMED_IN_ERRORS])}"
                if committed
                else str(problems[LEASE_FILE]),
                next_step="Restore them from a backup, or see what `cairn repair` can do; to begin "
                "anew, choose another name.",
            )
        return False

    @property
    def files(self) -> Files:
        """Large files of the run."""
        return open_files(self.uri)

    def attempts(self) -> list[Attempt]:
        """Return every attempt, by number.

        Raises:
            UnsupportedFormatError, CorruptionError: the record of one can't be read or is lost, or
                the lease, which names the newest, can't be read.
        """
        lease = read_lease(self.objects)
        return list_attempts(self.objects, None if lease is None else lease.begun)

    def history(self) -> History:
        """Return the steps as the records show them, with the errors of damaged records."""
        listing, self._look = self._look, None  # a listing is used only once: it gets old
        return read_history(self.objects, listing)

    def published(self) -> list[StepKey]:
        """Return (step, attempt) of every manifest, by step; only names are read."""
        return published_steps(self.objects)

    def trashed(self) -> set[StepKey]:
        """Return (step, attempt) of every deleted step; only names are read."""
        return trashed_steps(self.objects)

    def step_attempts(self, *, undeleted: Collection[StepKey] = ()) -> dict[int, int]:
        """Return the steps that are certainly listed -> the attempt that holds each of them.

        Args:
            undeleted: (step, attempt) of deleted steps to treat as not deleted.
        """
        return self.history().listed(undeleted=undeleted)

    def state_of(self, step: int, attempt: int) -> StepState:
        """Return the state of a step that was published, even if it is removed by now."""
        state = dict(self.history().states([(step, attempt)]))[step, attempt]
        deleted = self.objects.read(trash_file(step, attempt)) is not None
        return StepState.TRASHED if deleted else state

    def steps(self) -> list[StepInfo]:
        """Return all listed steps, by number; one whose manifest can't be read has a `problem`."""
        judged = self.history().states()
        return self.described([(key, state) for key, state in judged if state is StepState.LISTED])

    def latest_step(self) -> int | None:
        """Return the number of the latest listed step, or None; only names are read.

        Raises:
            UnsupportedFormatError, CorruptionError: a record that would decide it is damaged or
                lost.
        """
        latest = self.history().latest()
        return None if latest is None else latest[0]

    def latest(self) -> StepInfo | None:
        """Return the latest listed step, or None if there is none.

        Raises:
            UnsupportedFormatError, CorruptionError: a record that would decide it is damaged or
                lost, or the step's manifest can't be read.
        """
        latest = self.history().latest()
        return None if latest is None else self.describe(latest)

    def step(self, number: SupportsIndex) -> StepInfo:
        """Return the listed step `number`.

        Raises:
            InvalidURIError: `number` is not a step number.
            StepInFlightError: the step is being written now.
            StepNotFoundError: the step is not listed; the message names the listed steps.
            UnsupportedFormatError, CorruptionError: a record that decides about the step is damaged
                or lost, or the step's manifest can't be read.
        """
        number = check_step(number)
        step = self._listed(number)
        if step is not None:
            return step
        history = self.history()
        history.require_judged(number)
        attempts = history.listed()
        if number in attempts:
            return self.describe((number, attempts[number]))
        judged = history.states(key for key in history.published if key[0] == number)
        others = {state: StepInfo(*key, state) for key, state in judged}
        others |= {
            info.state: info for info in self._without_manifest(history) if info.step == number
        }
        if StepState.TRASHED in others:
            attempt = others[StepState.TRASHED].attempt
            wrong = misplaced(self.objects, trash_file(number, attempt))
            if wrong is not None:
                raise wrong
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
            or _steps_text(list(attempts)),
            next_step="Choose a listed step, or leave the step out for the latest."
            + (f" Listed: {_steps_text(list(attempts))}." if others else ""),
        )

    def all_states(self) -> list[StepInfo]:
        """Return every step in any state, by step and attempt."""
        history = self.history()
        steps = self.described(history.states())
        steps += self._without_manifest(history)
        return sorted(steps, key=lambda info: (info.step, info.attempt))

    def unpublished(self, history: History | None = None) -> list[StepInfo]:
        """Return every step that has a folder and no manifest, by step and attempt.

        Args:
            history: the run's history, if it was read just now.
        """
        steps = self._without_manifest(self.history() if history is None else history)
        return sorted(steps, key=lambda info: (info.step, info.attempt))

    def manifest(self, info: StepInfo) -> Manifest:
        """Return the manifest of a step.

        Raises:
            StepNotFoundError: the step has no manifest.
            UnsupportedFormatError, CorruptionError: the manifest can't be read, or is not the one
                from which `info` was made.
        """
        key = manifest_file(info.step, info.attempt)
        stored = self.objects.read(key)
        if stored is None:
            raise StepNotFoundError(
                "the step has no manifest",
                path=self.uri / key,
                expected="the manifest of a verified step",
                found=f"none (the step is {info.state.value})",
                next_step="Choose a listed step.",
            )
        manifest = parse_record(self.objects, key, Manifest, stored)
        if (manifest.step, manifest.attempt) != (info.step, info.attempt):
            raise CorruptionError(
                "a manifest under another's name",
                path=self.uri / key,
                expected=f"step {info.step}, attempt {info.attempt}",
                found=f"step {manifest.step}, attempt {manifest.attempt}",
                next_step="Restore the object from a backup, or delete the step.",
            )
        if info.manifest_digest not in (None, sha256_of(stored.value)):
            raise CorruptionError(
                "the manifest changed",
                path=self.uri / key,
                expected=info.manifest_digest,
                found=sha256_of(stored.value),
                next_step="Manifests never change: restore the object from a backup.",
            )
        return manifest

    def contents(self, info: StepInfo) -> StepContents:
        """Return the leaves and files of a step.

        Raises:
            StepNotFoundError: the step has no manifest.
            UnsupportedFormatError, CorruptionError: the manifest or the step's index can't be read.
        """
        return open_contents(self.step_uri(info), self.manifest(info))

    def step_uri(self, info: StepInfo) -> StoreURI:
        """Return a step's folder in this run: an Orbax checkpoint, unless the step was imported.

        Of an imported step it holds only what Cairn keeps of it; `orbax_uri` is its owner's folder.
        """
        return self.uri / step_dir(info.attempt, info.step)

    def orbax_uri(self, info: StepInfo) -> StoreURI:
        """Return a step's folder that plain Orbax can read: of an imported step, the owner's."""
        return self.step_uri(info) if info.source is None else source_folder(self.uri, info.source)

    def _listed(self, number: int) -> StepInfo | None:
        """Return the step if it is certainly listed, else None; fast in a run of any size."""
        lease, problems = judge_lease(self.objects)
        begun = None if lease is None else lease.begun
        names = {
            manifest_file(number, attempt.number): attempt.number
            for attempt in judge_attempts(self.objects, begun).known
        }
        # Manifests that do not count are not read: only their existence matters.
        stored = self.objects.existing(names)
        published = [(number, names[name]) for name in names if name in stored]
        if lease is None or problems or not published:
            return None
        # After the manifests, so that the attempt of each is among them.
        attempts = judge_attempts(self.objects, begun)
        newest = max(published)
        later = [
            (number, attempt.number) for attempt in attempts.known if attempt.number >= newest[1]
        ]
        tombstones = self.objects.existing(trash_file(*key) for key in later)
        deleted = [key for key in later if trash_file(*key) in tombstones]
        published += saved_among(self.objects, overwriting(min(published), attempts.known))
        attempt = certain_holder(number, lease, attempts, published, deleted)
        return None if attempt is None else self.describe((number, attempt))

    def _without_manifest(self, history: History) -> list[StepInfo]:
        return unpublished_steps(
            self.objects,
            published=set(history.published),
            attempts=history.attempts.known,
            now=self.clock(),
        )

    def described(self, steps: Iterable[tuple[StepKey, StepState]]) -> list[StepInfo]:
        """Return the steps with what their manifests say; a step deleted meanwhile is left out.

        A step whose manifest can't be read has a `problem` instead.
        """
        steps = list(steps)
        names = [manifest_file(*key) for key, _ in steps]
        summaries, problems = judge_records(self.objects, names, ManifestSummary.parse)
        described = []
        for ((step, attempt), state), name in zip(steps, names, strict=True):
            if name in summaries:
                described.append(StepInfo(step, attempt, state, *summaries[name]))
            elif name in problems:
                described.append(StepInfo(step, attempt, state, problem=str(problems[name])))
        return described

    def describe(self, key: StepKey, state: StepState = StepState.LISTED) -> StepInfo:
        """Return the step `key`, (step, attempt), with what its manifest says.

        Raises:
            StepNotFoundError: the step is removed.
            UnsupportedFormatError, CorruptionError: the step's manifest can't be read.
        """
        step, attempt = key
        name = manifest_file(step, attempt)
        summaries = read_records(self.objects, [name], ManifestSummary.parse)
        if name not in summaries:
            raise StepNotFoundError(
                "the step is gone",
                path=self.uri / name,
                expected=f"step {step} of attempt {attempt}",
                found="no manifest",
                next_step="It was deleted; choose a listed step.",
            )
        return StepInfo(step, attempt, state, *summaries[name])


def _steps_text(steps: list[int]) -> str:
    if not steps:
        return "no steps"
    shown = ", ".join(map(str, sorted(steps)[-_STEPS_NAMED:]))
    return f"steps {'…, ' if len(steps) > _STEPS_NAMED else ''}{shown}"


def create_run(
    uri: StoreURI | str | os.PathLike[str],
    *,
    labels: Mapping[str, str] | None = None,
    clock: Clock = utc_now,
) -> Run:
    """Create and return the run `uri`, in which a job can save later.

    If several processes create it at the same time, exactly one does, and the other calls of this
    raise. A job that begins there at that time creates the run or continues it.

    Args:
        uri: the run's folder.
        labels: texts by name.
        clock: returns the current time in UTC.

    Raises:
        InvalidURIError: no run can begin there, see `Run.create`.
        PreconditionFailedError: there is a run, or remains of one.
        UnsupportedFormatError: some labels can't be stored; all of these are listed.
    """
    Annotation.of(labels, None)  # refuse what can't be kept before any request
    try:
        return Run.create(uri, labels=labels, exist_ok=False, clock=clock)
    except UNREADABLE as exc:
        raise PreconditionFailedError(
            "the run exists",
            path=parse_uri(uri),
            expected="no run of this name",
            found=f"one that can't be read: {exc}",
            next_step="Choose another name.",
        ) from exc


def list_runs(root: StoreURI | str | os.PathLike[str], *, known: Collection[str] = ()) -> list[str]:
    """Return the names of the runs directly below `root`, sorted.

    Folders whose names are not valid for a run are left out. A run that has lost its `run.json` is
    recognised by its lease.

    Args:
        root: the folder that contains the runs.
        known: names of which an existing folder counts as a run, without a look inside.
    """
    parsed = parse_uri(root)
    names = [
        entry.name
        for entry in open_files(parsed).list()
        if entry.is_dir and is_run_name(entry.name)
    ]
    objects = ObjectStore.open(parsed)
    unknown = [name for name in names if name not in known]
    begun = objects.existing(f"{name}/{RUN_FILE}" for name in unknown)
    others = [name for name in unknown if f"{name}/{RUN_FILE}" not in begun]
    leases = objects.existing(f"{name}/{LEASE_FILE}" for name in others)
    no_runs = {name for name in others if f"{name}/{LEASE_FILE}" not in leases}
    return sorted(set(names) - no_runs)
