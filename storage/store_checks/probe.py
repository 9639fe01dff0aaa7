"""Probe of a store, once per root, for what the run protocol requires.

A store that ignores a condition loses steps silently: two writers both succeed in taking the run.
So the probe runs beside every attempt to take a lease, and the writer reports nothing as durable
before its answer. A good answer is stored in the root; a bad one is not, as a store can be
repaired.

    a root with a record     1 request of each process that writes a root without           12,
    once: the record, 9 to probe, a listing of leftovers, the record

The 9 requests to probe take three rounds, the last of them concurrent with the start of the
attempt. The attempt waits for what its own start requires, and its first promise for the rest. The
removal of the probe's objects shows whether the store made a change that it had refused: only the
publication of a step waits for that.
"""

import atexit
import contextlib
import os
import secrets
import shutil
import threading
from concurrent.futures import Future, wait
from typing import Final, NamedTuple

from cairn.installation import installed_version
from cairn.storage.errors import (
    PreconditionFailedError,
    StorageError,
    StoreCheckError,
    translate_error,
)
from cairn.storage.store.clock import rfc3339, utc_now
from cairn.storage.store.deadlines import deadline_seconds_left, no_answer_error
from cairn.storage.store.objects import ObjectStore, Versioned
from cairn.storage.store.uri import StoreURI
from cairn.storage.store_checks.conditions import Conditions
from cairn.storage.store_checks.disk import disk_problems
from cairn.storage.store_checks.mounts import Mount, mount_of, mount_problems
from cairn.storage.store_checks.record import (
    RECORD_FILE,
    StoreRecord,
    identity,
    probe_name,
    probed_at,
)

__all__ = ["CachedRecord", "Probe", "begin_probe", "probe_now", "read_cached_record"]

_CHECKS: Final = ("create if absent", "replace if unchanged")
_DISK_CHECKS: Final = (
    "delete if unchanged",
    "exclusive creation",
    "rename",
    "hard link",
    "lock",
    "mount",
)
_LEFTOVER_SECONDS: Final = 3600
"""Age in seconds after which a probe has ended or was killed; clocks may differ a little."""

_EXIT_SECONDS: Final = 5.0
"""Seconds that a process waits for probes at exit, so that no thread is stopped within a call."""


class _ProbeFuture(Future[None]):
    """Future of a probe, done once the answer is stored in the root.

    Attributes:
        creates: done once it is known that only one writer can create an object.
        conditions: done once it is also known that a changed object is neither replaced nor, on a
            disk, deleted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.creates: Future[None] = Future()
        self.conditions: Future[None] = Future()

    def resolve(self, *parts: Future[None]) -> None:
        """Mark these parts as answered, unless they are."""
        for part in parts:
            if not part.done():
                part.set_result(None)

    def end(self, error: BaseException | None = None) -> None:
        """Complete all open parts, with `error` if there is one."""
        for part in (self.creates, self.conditions, self):
            if part.done():
                continue
            if error is None:
                part.set_result(None)
            else:
                part.set_exception(error)


class Probe:
    """Probe of a store, running or answered."""

    def __init__(self, root: StoreURI, answer: _ProbeFuture) -> None:
        self._root = root
        self._answer = answer

    def ensure_exclusive_create(self) -> None:
        """Wait until it is known that only one of two writers can create an object.

        Raises:
            StorageError: as `ensure_passed`.
        """
        self._wait(self._answer.creates)

    def ensure_passed(self) -> None:
        """Wait for the answer. Call this before the first result is reported as durable.

        Raises:
            StoreCheckError: the store does not do what runs require.
            StorageError: the store gives no answer, or none within the caller's deadline.
        """
        self._wait(self._answer.conditions)

    def ensure_finished(self) -> None:
        """Wait for the end of the probe; call it before publishing anything.

        Raises:
            StoreCheckError: the store does not do what runs require.
            StorageError: there is no answer within the caller's deadline.
        """
        try:
            self._wait(self._answer)
        except StoreCheckError:
            raise
        except StorageError:
            self._wait(self._answer.conditions)  # perhaps only storing the answer failed

    def _wait(self, part: Future[None]) -> None:
        seconds = deadline_seconds_left()
        if seconds is not None and not wait([part], seconds).done:
            raise no_answer_error(self._root, seconds)  # the probe goes on, for the next caller
        part.result()


_answers: dict[str, _ProbeFuture] = {}
_lock = threading.Lock()


class CachedRecord(NamedTuple):
    """Stored record of an earlier probe in a run's root; None: there is none."""

    stored: Versioned | None


def read_cached_record(run: StoreURI) -> CachedRecord | None:
    """Return the record in a run's root; None if this process has probed it, or the read fails.

    Args:
        run: the run's folder.
    """
    root = _root(run)
    with _lock:
        if _key(root) in _answers:
            return None
    with contextlib.suppress(StorageError):  # the probe reports it
        return CachedRecord(ObjectStore.open(root).read(RECORD_FILE))
    return None


def begin_probe(run: StoreURI, recalled: CachedRecord | None = None) -> Probe:
    """Start to probe the store of a run, unless this process has; return at once.

    Args:
        run: the run's folder, which is about to be written.
        recalled: the root's record that the caller has just read; None: it is read here.
    """
    root = _root(run)
    key = _key(root)
    with _lock:
        answer = _answers.get(key)
        if answer is None or _failed(answer) or _failed(answer.conditions):
            answer = _answers[key] = _ProbeFuture()
            thread = threading.Thread(
                target=_answer, args=(answer, run, root, recalled), name="cairn-probe", daemon=True
            )
            thread.start()
    return Probe(root, answer)


def _key(root: StoreURI) -> str:
    return f"{identity(root, None)} {root}"


def _failed(part: Future[None]) -> bool:
    return part.done() and part.exception() is not None


def _forget_answers() -> None:
    """Forget all probes in a forked child, which has none of the threads."""
    global _lock
    _lock = threading.Lock()
    _answers.clear()


os.register_at_fork(after_in_child=_forget_answers)


@atexit.register
def _await_answers() -> None:
    wait(list(_answers.values()), timeout=_EXIT_SECONDS)


def _root(run: StoreURI) -> StoreURI:
    """Return the run's parent folder; the run itself if that is on another file system."""
    if not run.path:
        return run
    if run.scheme == "file":
        with contextlib.suppress(FileNotFoundError):
            own, above = os.stat(run.local_path), os.stat(run.parent.local_path)
            if own.st_dev != above.st_dev:
                return run
    return run.parent


def _answer(
    answer: _ProbeFuture, run: StoreURI, root: StoreURI, recalled: CachedRecord | None
) -> None:
    try:
        try:
            _probe(root, answer, recalled)
        except StoreCheckError:
            raise
        except StorageError:
            if root == run:
                raise
            _probe(run, answer)  # we may not be allowed to write the root
    except BaseException as exc:
        answer.end(exc)
    else:
        answer.end()


def _probe(folder: StoreURI, answer: _ProbeFuture, recalled: CachedRecord | None = None) -> None:
    """Probe `folder` unless its record has a good answer; store the answer there.

    Args:
        folder: a root, or a run.
        answer: future whose parts are resolved meanwhile.
        recalled: the record in `folder` that the caller has just read; None: it is read here.

    Raises:
        StoreCheckError: the store does not do what runs require.
        StorageError: there is no answer, or it can't be stored in `folder`.
    """
    mount = mount_of(folder.local_path) if folder.scheme == "file" else None
    if mount is not None and (problems := mount_problems(mount)):
        raise _check_error(folder, problems)
    objects = ObjectStore.open(folder)
    checked = _CHECKS + (_DISK_CHECKS if folder.scheme == "file" else ())
    store = identity(folder, mount)
    stored = objects.read(RECORD_FILE) if recalled is None else recalled.stored
    if stored is not None:
        with contextlib.suppress(StorageError):  # an unreadable record counts as none
            cached = StoreRecord.parse(stored.value, folder / RECORD_FILE)
            if cached.store == store and set(checked) <= set(cached.checked):
                return
    _run_checks(folder, mount, answer)
    record = StoreRecord(
        at=rfc3339(utc_now()), cairn=installed_version(), checked=checked, store=store
    )
    generation = None if stored is None else stored.generation
    with contextlib.suppress(PreconditionFailedError):  # another process probed, too
        objects.write_if(
            RECORD_FILE, record.to_bytes(), generation=generation, same_is_success=True
        )


def probe_now(folder: StoreURI) -> None:
    """Probe a store without reading or storing a record; for diagnosis.

    Args:
        folder: a folder of the store; on a disk it must exist.

    Raises:
        StoreCheckError: the store does not do what runs require.
        StorageError: the store gives no answer, or can't be written.
    """
    mount = mount_of(folder.local_path) if folder.scheme == "file" else None
    if mount is not None and (problems := mount_problems(mount)):
        raise _check_error(folder, problems)
    _run_checks(folder, mount, _ProbeFuture())


def _run_checks(folder: StoreURI, mount: Mount | None, answer: _ProbeFuture) -> None:
    started = int(utc_now().timestamp())
    if folder.scheme == "file":
        name = probe_name(started, secrets.token_hex(8))
        problems = _check_disk(folder, name, mount, started)
    else:
        objects = ObjectStore.open(folder)

        names = [probe_name(started, secrets.token_hex(8)) for _ in range(3)]
        problems = _check_conditions(Conditions(objects, *names), answer)
        if not problems:
            _remove_leftovers(objects, started)
    if problems:
        raise _check_error(folder, problems)


def _check_conditions(conditions: Conditions, answer: _ProbeFuture) -> list[str]:
    problems = ["no answer"]
    try:
        problems = conditions.creation_problems()
        if not problems:
            answer.resolve(answer.creates)
        problems = problems + conditions.replacement_problems(problems)
        if not problems:
            answer.resolve(answer.conditions)
    finally:
        after = conditions.end(problems)
    return problems + after


def _check_disk(folder: StoreURI, name: str, mount: Mount | None, now: int) -> list[str]:
    path = os.path.join(folder.local_path, name)
    try:
        os.makedirs(folder.local_path, exist_ok=True)
        for left in os.listdir(folder.local_path):
            if _is_leftover(left, now):
                shutil.rmtree(os.path.join(folder.local_path, left), ignore_errors=True)
        os.mkdir(path)
        try:
            problems = disk_problems(path, mount)
            if problems:
                return problems
            conditions = Conditions(ObjectStore(folder / name), "object", "other", "third")
            return _check_conditions(conditions, _ProbeFuture())
        finally:
            shutil.rmtree(path, ignore_errors=True)
    except OSError as exc:
        raise translate_error(exc, path=folder) from exc


def _remove_leftovers(objects: ObjectStore, now: int) -> None:
    with contextlib.suppress(StorageError):  # leftovers are harmless
        for name in objects.list(".cairn-probe-"):
            if _is_leftover(name, now):
                objects.delete(name)


def _is_leftover(name: str, now: int) -> bool:
    began = probed_at(name)
    return began is not None and began + _LEFTOVER_SECONDS < now


def _check_error(folder: StoreURI, problems: list[str]) -> StoreCheckError:
    return StoreCheckError(
        "the store does not keep what runs rest on",
        path=folder,
        expected="conditional writes, and on a disk deletions, renames, links and locks, that "
        "refuse all but one of two writers",
        found=f"{len(problems)} of these broken" if len(problems) > 1 else "one of these broken",
        next_step="Nothing was written that counts. Keep runs on another store, or mend this one: "
        "see the page on stores.",
        problems=problems,
    )
