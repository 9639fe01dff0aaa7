"""Save a training job's state: asynchronous, sharded, fenced, durable. Imports JAX and Orbax.

    caller's thread      check, claim an attempt, hold the arrays (device to host)  -> SaveHandle
    background thread    write -> Orbax commits -> sync -> fence -> manifest        -> durable

One save is in flight at a time; the next waits for it. Every save is written, none is dropped.
Every step is an ordinary Orbax checkpoint below `attempts/<n>/`, an ordinary Orbax root.
"""

import contextlib
import functools
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Final, Self, SupportsIndex

import jax

from cairn.state.checkpointing import exit_guard
from cairn.state.checkpointing.gc_pause import pause_gc
from cairn.state.checkpointing.load import StepChoice, load
from cairn.state.checkpointing.modules import TreePlan
from cairn.state.checkpointing.processes import agreement, background
from cairn.state.checkpointing.saves.dedup import Dedup, DedupSources
from cairn.state.checkpointing.saves.dedup_policy import DedupPolicy
from cairn.state.checkpointing.saves.engine import begin_step, orbax_folder
from cairn.state.checkpointing.saves.host_buffers import HostBuffers
from cairn.state.checkpointing.saves.host_trees import HostTrees, Memory, copies_of
from cairn.state.checkpointing.saves.leaf_records import kinds_of_leaves
from cairn.state.checkpointing.saves.pinned_warmup import PinnedWarmup
from cairn.state.checkpointing.saves.preparation import PreparedTree, Save, prepare
from cairn.state.checkpointing.saves.save_handle import SaveHandle, SaveState, pop_call_time
from cairn.state.checkpointing.saves.save_job import SaveJob, failure, job_environment
from cairn.state.checkpointing.saves.save_metrics import (
    prepare_metrics,
    record_outcome,
    record_refusal,
    record_started,
)
from cairn.state.checkpointing.saves.save_options import SaveOptions
from cairn.state.checkpointing.saves.staging import pinned_budget
from cairn.state.checkpointing.skipped_steps import pop_skipped
from cairn.storage.arrays.data_files import Compression
from cairn.storage.errors import InvalidURIError, PolicyError, SaveError, StorageError
from cairn.storage.runs.damage import OnDamage, doubtful_steps
from cairn.storage.runs.history import RunListing
from cairn.storage.runs.lease import LEASE_TTL_SECONDS
from cairn.storage.runs.records.layout import check_step, step_dir
from cairn.storage.runs.records.manifest import ModelInfo
from cairn.storage.runs.run import Run
from cairn.storage.runs.writer import Writer, default_writer_id
from cairn.storage.store.clock import Clock, is_above_zero, utc_now
from cairn.storage.store.deadlines import deadline_after, deadline_seconds_left
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["Checkpointer", "SaveHandle", "default_writer_id"]

_ENDING_SECONDS: Final = 10.0
"""Seconds that a save's thread may run after the handle is finished."""

_LEAVING_SECONDS: Final = 1.0
"""Maximum seconds that a save's thread waits for `save` to return."""


_LONGEST_TTL_SECONDS: Final = 7 * 24 * 3600.0
"""Maximum lease: for so long nobody else could write if this writer dies."""


class Checkpointer:
    """Saves the steps of one run. Safe for use by many threads; all processes make the same calls.

    Args:
        run_uri: the run's folder; the first save creates the run.
        writer_id: id of this writer, constant over restarts; default `default_writer_id()`.
        clock: returns the current time in UTC.
        lease_ttl: seconds for which the run stays reserved for this writer if it dies.
        dedup: how long steps share the files of unchanged values.
        reuse_buffers: copy the arrays of CPU devices, and NumPy arrays, into memory that the next
            save uses again, see `buffer_bytes`. A training step that donates them right after a
            save then need not wait for XLA to copy them into new memory. Costs as much host memory
            as this process has of the state, until `close`.
        host_memory: maximum bytes of host memory in this process for copies of arrays and for
            uploads. Arrays that must be copied come in waves: `save` returns once the last wave is
            copied, after the waves before are written. Arrays in host memory are held without a
            copy and do not count. With kept buffers, a save that needs more is refused. None sets
            no limit.

    Raises:
        InvalidURIError: `run_uri` is malformed, or neither on a disk nor in GCS.
        PolicyError: `lease_ttl` is not above 0, `dedup` is no DedupPolicy, `reuse_buffers` is
            no bool, or `host_memory` is no number of bytes.
    """

    _by_run: ClassVar[dict[str, "Checkpointer"]] = {}
    _by_run_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        run_uri: StoreURI | str | os.PathLike[str],
        *,
        writer_id: str | None = None,
        clock: Clock = utc_now,
        lease_ttl: float = LEASE_TTL_SECONDS,
        dedup: DedupPolicy = DedupPolicy(),  # noqa: B008 (frozen)
        reuse_buffers: bool = False,
        host_memory: int | None = None,
    ) -> None:
        self.uri = parse_uri(run_uri)
        orbax_folder(self.uri)
        _check_ttl(lease_ttl)
        self.writer_id = writer_id or default_writer_id()
        self._clock = clock
        self._run = Run(self.uri, clock=clock)
        self._writer = Writer(self._run, writer=self.writer_id, clock=clock, ttl=lease_ttl)
        self._current: SaveHandle | None = None
        self._dedup_policy = _checked_dedup(dedup)
        self._buffers = HostBuffers.from_options(reuse_buffers, host_memory)
        self._host_memory = host_memory
        self._dedup: dict[str, Dedup] = {}
        self._plan = TreePlan()
        self._dedup_sources = DedupSources()
        self._lock = threading.RLock()
        self._closed = False
        self._work: _BackgroundWork | None = None
        self._pinning: PinnedWarmup | None = None
        self._process = os.getpid()
        prepare_metrics()

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.uri)!r}, writer_id={self.writer_id!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @classmethod
    def for_run(
        cls,
        uri: StoreURI | str | os.PathLike[str],
        *,
        dedup: DedupPolicy | None = None,
        reuse_buffers: bool | None = None,
        host_memory: int | None = None,
    ) -> "Checkpointer":
        """Return this process's open checkpointer of the run `uri`; create one if needed.

        Args:
            uri: the run's folder.
            dedup: how long steps share files from now on; None changes nothing.
            reuse_buffers: whether saves copy into kept memory from now on; None changes nothing.
            host_memory: maximum bytes of host memory for saves from now on; None changes nothing,
                or sets no limit if `reuse_buffers` is given.

        Raises:
            InvalidURIError: `uri` is malformed, or neither on a disk nor in GCS.
            PolicyError: `dedup` is no DedupPolicy, or `Checkpointer` would refuse the others.
        """
        key = str(parse_uri(uri))
        with cls._by_run_lock:
            checkpointer = cls._by_run.get(key)
            if checkpointer is None or checkpointer._closed:
                checkpointer = cls._by_run[key] = cls(uri)
            if dedup is not None:
                checkpointer._dedup_policy = _checked_dedup(dedup)
        if reuse_buffers is not None or host_memory is not None:
            checkpointer._set_memory(reuse_buffers, host_memory)
        return checkpointer

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory that this process keeps for copies of arrays, see `reuse_buffers`.

        As many as the largest save so far needed; 0 before the first, after `close`, and without
        `reuse_buffers`.
        """
        return 0 if self._buffers is None else self._buffers.nbytes

    def begin(self, like: Any = None) -> None:
        """Take the run now instead of at the first save; does nothing if it is taken already.

        The first save then blocks no longer than later ones, which saves a second or so with a
        remote store, and a job that may not write the run fails at its start.

        Args:
            like: a tree of arrays like those that will be saved. On a GPU this pins the host memory
                for their copies in the background, at some 2 GB/s; otherwise the first save waits
                for it. Call this before the first step, whose compilation takes as long.

        Raises:
            LeaseHeldError: another writer holds the run.
            FencedError: another writer has taken the run over.
            StoreCheckError: the store does not do what runs require.
            InvalidURIError: this is the folder or the address of a checkpoint, or in another run.
            SaveError: the checkpointer is closed.
        """
        with self._lock:
            self._refuse_fork()
            self._refuse_closed()
            agreement.agree(self._take_run)
            exit_guard.guard(self)
            if like is not None and self._pinning is None:
                arrays = [leaf for leaf in jax.tree.leaves(like) if isinstance(leaf, jax.Array)]
                self._pinning = PinnedWarmup(arrays, pinned_budget(self._host_memory))

    def save(
        self,
        step: SupportsIndex,
        items: Any,
        *,
        meta: Mapping[str, Any] = MappingProxyType({}),
        iterators: Mapping[str, Any] | None = None,
        model: ModelInfo | None = None,
        assets: Mapping[str, bytes] | None = None,
        metrics: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        overwrite: bool = False,
        compression: Compression | None = None,
        check: Callable[[], object] | None = None,
        deadline: float | None = None,
    ) -> SaveHandle:
        """Start to save `step`; when this returns, the caller may donate or delete the arrays.

        Waits for the previous save, if that still runs.

        Args:
            step: above the latest listed step, unless `overwrite`.
            items: trees by name, such as `{"model": model, "optimizer": optimizer}`, or one tree,
                which is then called "state". A tree is any pytree, and may hold modules: all
                Variables of NNX modules are saved, all arrays and numbers of Equinox modules.
            meta: JSON, stored as the item "meta".
            iterators: of training data, by name, such as `{"train": iterator}`. The step stores
                the current state of each process's iterators, so that `restore` can resume the
                data, too. An iterator has `get_state` and `set_state`, as in Grain, or
                `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader.
            model: description of the model, for readers without JAX.
            assets: small files that belong to the model, by name.
            metrics: numbers by name, for searches.
            labels: text by name, for searches.
            overwrite: supersede `step` and later ones, if they exist, once the new one is durable;
                until then they stay listed.
            compression: "zstd" makes floating weights about a tenth smaller, and the save several
                times slower; restores then go through TensorStore's decoder.
            check: called once on each process, in another thread while the step is written. If it
                raises on one, the save fails on all, and the step is not listed.
            deadline: seconds that this call may wait for the previous save, for the store, and for
                waves of arrays (`host_memory`). After that nothing is saved, and the previous save
                goes on. By default it waits as long as that save makes progress: the deadline of a
                silent store is 90 s.

        Raises:
            StepExistsError: the run lists this step or a later one, and not `overwrite`.
            UnsupportedLeafError: leaves, keys or states of iterators that can't be stored; all are
                listed.
            UnsupportedFormatError: an argument of another type, `meta` or the model's config that
                is not JSON, labels that are no text, metrics that are no numbers, or a
                `compression` that is not one we know.
            InvalidURIError: a step, or an item's or iterator's name, that can't be used.
            LeaseHeldError: another writer holds the run.
            FencedError: another writer has taken the run over.
            StoreCheckError: the store does not do what runs require.
            PolicyError: a `deadline` that is no number of seconds above 0.
            StoreUnavailableError: the store gives no answer; this save did not start.
            SaveError: the previous save failed, and no call has raised that yet, or it still runs
                at the deadline; this one did not start.
                From `SaveHandle.wait`: this one failed, for example because somebody else saved
                the step in the same attempt; their files stay untouched.
        """
        options = SaveOptions(
            meta=meta,
            iterators=iterators,
            model=model,
            assets=assets,
            metrics=metrics,
            labels=labels,
            overwrite=overwrite,
            compression=compression,
            check=check,
            deadline=deadline,
        )
        return self.save_with(step, items, options)

    def save_with(self, step: SupportsIndex, items: Any, options: SaveOptions) -> SaveHandle:
        """Start to save `step`, as `save` does with these options."""
        called = pop_call_time()
        try:
            if options.deadline is not None and not is_above_zero(options.deadline):
                raise PolicyError(
                    "not a time to wait",
                    path="deadline",
                    expected="seconds above 0, or None to wait while there is progress",
                    found=repr(options.deadline),
                    next_step="Give a number of seconds, such as 30.",
                )
            with deadline_after(options.deadline):
                handle, work = self._save(step, items, options)
        except Exception as exc:
            record_refusal(exc, step=_number_of(step), uri=self.uri)
            raise
        handle.blocked_seconds = time.monotonic() - called
        try:
            record_started(handle)
        finally:
            work.go()
        return handle

    def _save(
        self,
        step: SupportsIndex,
        items: Mapping[str, Any],
        options: SaveOptions,
    ) -> "tuple[SaveHandle, _BackgroundWork]":
        """Return the save's handle, and its background work, which waits for `go`."""

        def same(prepared: tuple[Save, dict[str, PreparedTree]]) -> dict[str, Any]:
            save, trees = prepared
            return {
                "run": str(self.uri),
                "step": save.step,
                "overwrite": bool(options.overwrite),
                "labels": dict(options.labels or {}),
                "meta": save.meta,
                "iterators": sorted(save.iterators),
                "assets": sorted(save.assets),
                "compression": save.compression,
                "items": kinds_of_leaves(trees),
            }

        with self._locked(), ExitStack() as stack:
            save, arrays = agreement.all_or_none(
                self._prepared, step, items, options, stack, same=same
            )
            number, name = agreement.agree(self._claim, save.step, bool(options.overwrite))
            folder = self.uri / step_dir(number, save.step)
            key = background.save_key(folder, name)
            handle = SaveHandle(step=save.step, attempt=number, uri=folder)
            handle.nbytes = save.nbytes
            handle.when_done(record_outcome)
            handle.when_done(self._drop_failed)
            trees: HostTrees | None = None
            work: _BackgroundWork | None = None
            try:
                trees = HostTrees(arrays, self._dedup_of, save.compression, self._memory)
                work = self._start(
                    SaveJob(
                        handle=handle,
                        save=save,
                        items=trees,
                        write=begin_step(
                            folder, trees, save.meta, save.iterators, key, options.check
                        ),
                        objects=self._run.objects,
                        writer=self._writer,
                        clock=self._clock,
                        by=self.writer_id,
                        dedup_sources=self._dedup_sources,
                    )
                )
                del arrays
                stack.close()  # waves may take long: garbage collection is on again meanwhile
                if trees.waves > 1:
                    work.go()
                if not trees.copy_rest(deadline_seconds_left()):
                    raise _not_copied(handle, trees.waves)
                handle.staging, handle.waves = trees.staging, trees.waves
            except BaseException as exc:
                if trees is not None:
                    trees.end(exc)
                # A new attempt follows: Orbax may still write into this one's folder.
                self._writer.drop()
                if work is not None:
                    work.go()
                background.report_failure(key, exc)
                if not isinstance(exc, Exception):  # an interrupt is raised unchanged
                    raise
                raise failure(exc, folder) from exc
        return handle, work

    @property
    def _memory(self) -> Memory:
        return Memory(self._buffers, self._host_memory, uploads=self.uri.scheme != "file")

    def _set_memory(self, reuse_buffers: bool | None, host_memory: int | None) -> None:
        """Change the memory options from the next save on."""
        with self._lock:
            keep = self._buffers is not None if reuse_buffers is None else reuse_buffers
            buffers = HostBuffers.from_options(keep, host_memory)
            self._host_memory = host_memory
            if buffers is not None and self._buffers is not None:
                self._buffers.limit = buffers.limit
            elif self._buffers is None or buffers is None:
                self._buffers = buffers

    def _dedup_of(self, item: str) -> Dedup:
        """Return the state of an item's deduplication over the saves of this run."""
        doubtful = functools.partial(doubtful_steps, self._run)
        dedup = self._dedup.setdefault(item, Dedup(self._dedup_policy, self._clock, doubtful))
        dedup.policy = self._dedup_policy
        return dedup

    def _drop_failed(self, handle: SaveHandle) -> None:
        """Drop the attempt of a save that failed or was abandoned: it publishes no more."""
        if handle.state is SaveState.FAILED:
            self._writer.drop()

    def restore(
        self,
        target: Any,
        *,
        step: StepChoice = None,
        only: str | re.Pattern[str] | Callable[[str], bool] | None = None,
        cast: bool = False,
        iterators: Mapping[str, Any] | None = None,
        damaged: OnDamage = "refuse",
    ) -> Any:
        """Restore a step of this run into the target's structure; all processes must call this.

        Waits for the save in flight, so that its step can be restored, too.

        Args:
            target: the argument of `save`, or something of equal structure, see `load`.
            step: its number, "best:METRIC:min", "best:METRIC:max", or an alias; by default the
                latest.
            only: the leaves to restore: a regular expression that matches somewhere in their paths,
                or a predicate on a path.
            cast: floating leaves may change dtype, and integers whose values all fit.
            iterators: of training data, by name: set to their position when the step was saved.
            damaged: "skip" loads the newest sound step if the latest is damaged, and the next save
                continues from there, see `load`.

        Raises:
            SaveError: the last save failed, and no call has raised that yet.
            StepDamagedError: no step is named, the latest is damaged, and `damaged` is "refuse".
            StorageError: as `load`.
        """
        self.wait_until_finished()
        return load(
            self.uri,
            target,
            step=step,
            only=only,
            cast=cast,
            iterators=iterators,
            damaged=damaged,
        )

    def latest_step(self) -> int | None:
        """Return the latest durable step; None if there is none or the run does not exist yet.

        All processes must call this.

        Raises:
            CorruptionError, UnsupportedFormatError: the run's records are unreadable.
            StoreUnavailableError: the store gives no answer.
        """
        steps = self.steps()
        return steps[-1] if steps else None

    def steps(self) -> list[int]:
        """Return the durable steps, lowest first; empty if the run does not exist yet.

        All processes must call this.

        Raises:
            CorruptionError, UnsupportedFormatError: the run's records are unreadable.
            StoreUnavailableError: the store gives no answer.
        """
        return agreement.agree(self._listed_steps)

    def _listed_steps(self) -> list[int]:
        if not self._run.has_saved():
            return []
        return [info.step for info in self._run.steps()]

    def wait_until_finished(self) -> None:
        """Wait until no save is in flight.

        Raises:
            SaveError: the last save failed, and no call has raised that yet.
        """
        with self._lock:
            self._settle()

    def close(self) -> None:
        """Wait for the save in flight, then release the run for other writers.

        Raises:
            SaveError: the last save failed, and no call has raised that yet.
        """
        with self._lock:
            self._refuse_fork()
            again, self._closed = self._closed, True
            try:
                self._settle()
            finally:
                if not again:
                    self._release_when_over()

    def _release_when_over(self) -> None:
        """Release the run once no work runs: an abandoned save still needs the lease."""
        if self._work is None:
            self._release()
            return
        self._work.over.wait(_ENDING_SECONDS if self._current is None else 0)
        self._work.when_over(self._release)

    def _release(self) -> None:
        if self._pinning is not None:
            self._pinning.end()
        if self._buffers is not None:
            self._buffers.forget()
        exit_guard.release(self)
        self._writer.close()

    def _start(self, job: SaveJob) -> "_BackgroundWork":
        """Start the background work of a save."""
        work = _BackgroundWork(job.run, name=f"cairn-save-{job.handle.step}")
        self._current, self._work = job.handle, work
        exit_guard.guard(self)
        try:
            work.start()
        except BaseException:
            if not work.started:
                self._current = self._work = None
            raise
        return work

    def _refuse_fork(self) -> None:
        """Refuse calls in a forked child, which lacks the threads that do the work."""
        if os.getpid() != self._process:
            raise SaveError(
                "the checkpointer is another process's",
                path=self.uri,
                expected=f"process {self._process}, which made it",
                found=f"process {os.getpid()}, forked from it",
                next_step="Make a new one in this process.",
            )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise SaveError(
                "the checkpointer is closed",
                path=self.uri,
                next_step="Make a new one, or use Checkpointer.for_run.",
            )

    def _settle(self) -> None:
        if self._current is None:
            return
        try:
            self._current.join()
        finally:
            if self._current.done:
                self._current = None

    def _prepared(
        self,
        step: SupportsIndex,
        items: Mapping[str, Any],
        options: SaveOptions,
        stack: ExitStack,
    ) -> tuple[Save, dict[str, PreparedTree]]:
        """Prepare the save once the previous one has ended; `stack` lasts for the call."""
        self._refuse_fork()
        self._refuse_closed()
        left = deadline_seconds_left()
        if self._current is not None and not self._current.ended(left):
            raise self._still_busy(f"the save of step {self._current.step} still under way")
        self._settle()
        if self._work is not None and not self._work.over.wait(
            _ENDING_SECONDS if left is None else min(left, _ENDING_SECONDS)
        ):
            raise SaveError(
                "a save that was given up is still being written",
                path=self.uri,
                expected="it to have ended",
                found="it going on",
                next_step="End this process: its next start goes on from the latest step.",
            )
        if self._pinning is not None:
            self._pinning.end()
        stack.enter_context(pause_gc())
        save, trees = prepare(step, items, options, plan=self._plan, dedup=self._dedup_of)
        if self._buffers is not None and self._buffers.limit is not None:
            self._buffers.check(copies_of(trees, self._dedup_of).nbytes)
        return save, trees

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        left = deadline_seconds_left()
        if not self._lock.acquire(timeout=-1 if left is None else left):
            raise self._still_busy("another thread's call under way")
        try:
            yield
        finally:
            self._lock.release()

    def _still_busy(self, obstacle: str) -> SaveError:
        return SaveError(
            "the save can't begin in time",
            path=self.uri,
            expected="to begin within the deadline that the call set",
            found=obstacle,
            next_step="Save a later step; what is under way goes on, and its handle tells how it "
            "ends.",
        )

    def _take_run(self) -> int:
        """Begin an attempt after the latest step, unless one is held; on process 0 only."""
        listing = self._create_run()
        self._skip_damaged()
        return self._writer.begin(listing)

    def _claim(self, step: int, overwrite: bool) -> tuple[int, str]:
        """Return the attempt to write `step` in, and a unique name; on process 0 only."""
        listing = self._create_run()
        self._skip_damaged()
        return self._writer.claim(step, overwrite=overwrite, listing=listing), secrets.token_hex(8)

    def _skip_damaged(self) -> None:
        skipped = pop_skipped(self.uri)
        if skipped is not None:
            self._writer.skip_damaged(skipped)

    def _create_run(self) -> RunListing | None:
        self._writer.check()
        if self._writer.attempt is not None:
            return None
        return Run.begin(self.uri, environment=job_environment(), clock=self._clock)[1]


def _forget_runs() -> None:
    """Clear the registry in a forked child, which needs attempts of its own."""
    Checkpointer._by_run, Checkpointer._by_run_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget_runs)


def _number_of(step: SupportsIndex) -> int:
    """Return the step's number, or -1 if it has none."""
    try:
        return check_step(step)
    except InvalidURIError:
        return -1


def _not_copied(handle: SaveHandle, waves: int) -> BaseException:
    """Abandon a save whose arrays missed the deadline; return its error."""
    handle.abandon(f"arrays that were not on the host at the deadline, in {waves} waves")
    try:
        handle.wait()  # marks the error as raised, so that the next save does not raise it
    except StorageError as exc:
        return exc
    return SaveError("the save was abandoned", path=handle.uri)  # never: `wait` raises


def _check_ttl(seconds: Any) -> None:
    """Refuse a lease that expires at once, or that blocks other writers for too long."""
    if not is_above_zero(seconds) or seconds > _LONGEST_TTL_SECONDS:
        raise PolicyError(
            "the lease can't protect the run",
            path="lease_ttl",
            expected=f"seconds above 0, at most {_LONGEST_TTL_SECONDS:g}",
            found=repr(seconds),
            next_step=f"Leave it out for {LEASE_TTL_SECONDS:g} s, or give seconds as a number.",
        )


def _checked_dedup(policy: Any) -> DedupPolicy:
    if not isinstance(policy, DedupPolicy):
        raise PolicyError(
            "no policy for shared files",
            path="dedup",
            expected="a DedupPolicy",
            found=f"{type(policy).__name__} {policy!r}"[:200],
            next_step="Leave it out, or make one, such as DedupPolicy(max_steps=1).",
        )
    return policy


class _BackgroundWork:
    """Thread that keeps the process alive until it ends.

    It lets its starter return first: otherwise the two would contend for the GIL, and the caller of
    `save` would wait. Garbage collection is off until the work begins, as it would visit all that
    the caller has just made.

    Attributes:
        over: set once the work has ended, also by an error.
    """

    def __init__(self, work: Callable[[], object], *, name: str) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            work: what to do.
            name: of the thread.
        """
        self._work: Callable[[], object] | None = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []
        self._gone = threading.Event()
        self._first = ExitStack()
        self.over = threading.Event()

    @property
    def started(self) -> bool:
        """True once the thread exists."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the thread; its work begins after `go`, or after a moment."""
        self._first.enter_context(pause_gc())
        try:
            self._thread.start()
        except BaseException:
            if not self.started:
                self._first.close()
            raise

    def go(self) -> None:
        """Let the work begin. May be called repeatedly."""
        self._gone.set()

    def when_over(self, call: Callable[[], object]) -> None:
        """Call `call` after the work: at once if it is over, else in its thread."""
        with self._lock:
            if not self.over.is_set():
                self._calls.append(call)
                return
        call()

    def _run(self) -> None:
        try:
            self._gone.wait(_LEAVING_SECONDS)
            self._first.close()
            if self._work is not None:
                self._work()
        finally:
            self._work = None  # frees its memory here, not at the next save
            with self._lock:
                self.over.set()
                calls, self._calls = self._calls, []
            for call in calls:
                call()
