"""Save a training job's state: asynchronous, sharded, fenced, durable. Imports JAX and Orbax.

    caller's thread      check, claim an attempt, stage the arrays on the host      -> SaveHandle
    background thread    write -> Orbax commits -> sync -> fence -> manifest        -> durable

One save is in flight at a time; the next waits for it. No save is dropped in favor of a later one.
Every step is an ordinary Orbax checkpoint; its parent folder, `attempts/<n>/`, is an ordinary Orbax
root.
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

from cairn.interop.conversion.tree_map import TreeMap
from cairn.state.checkpointing import exit_guard
from cairn.state.checkpointing.dedup_policy import DedupPolicy
from cairn.state.checkpointing.gc_pause import pause_gc
from cairn.state.checkpointing.load import StepChoice, load
from cairn.state.checkpointing.modules import TreePlan
from cairn.state.checkpointing.processes import agreement, background
from cairn.state.checkpointing.save_handle import SaveHandle, SaveState, pop_call_time
from cairn.state.checkpointing.save_options import SaveOptions
from cairn.state.checkpointing.saves.dedup import Dedup, DedupSources
from cairn.state.checkpointing.saves.engine import begin_step, orbax_folder
from cairn.state.checkpointing.saves.host_buffers import HostBuffers
from cairn.state.checkpointing.saves.host_trees import HostTrees, Memory, copies_of
from cairn.state.checkpointing.saves.leaf_records import kinds_of_leaves
from cairn.state.checkpointing.saves.pinned_warmup import PinnedWarmup
from cairn.state.checkpointing.saves.preparation import PreparedTree, Save, prepare
from cairn.state.checkpointing.saves.save_job import SaveJob, failure, job_environment
from cairn.state.checkpointing.saves.save_metrics import (
    prepare_metrics,
    record_outcome,
    record_refusal,
    record_started,
)
from cairn.state.checkpointing.saves.staging import pinned_budget
from cairn.state.checkpointing.skipped_steps import pop_skipped
from cairn.storage.arrays.data_files import Compression
from cairn.storage.errors import InvalidURIError, PolicyError, SaveError
from cairn.storage.runs.damage import OnDamage, doubtful_steps
from cairn.storage.runs.history import RunListing
from cairn.storage.runs.lease import LEASE_TTL_SECONDS
from cairn.storage.runs.records.annotations import Better
from cairn.storage.runs.records.layout import check_step, step_dir
from cairn.storage.runs.records.manifest import ModelInfo
from cairn.storage.runs.run import Run
from cairn.storage.runs.writer import Writer, default_writer_id
from cairn.storage.store.clock import Clock, is_above_zero, utc_now
from cairn.storage.store.deadlines import deadline_after, deadline_seconds_left
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["Checkpointer", "SaveHandle", "default_writer_id"]

_ENDING_SECONDS: Final = 10.0
"""Maximum seconds to wait for a save's thread to end after its handle is finished."""

_LEAVING_SECONDS: Final = 1.0
"""Maximum seconds that a save's thread waits for `save` to return."""


_LONGEST_TTL_SECONDS: Final = 7 * 24 * 3600.0
"""Maximum lease in seconds: if this writer dies, others can't write before it expires."""


class Checkpointer:
    """Saves the steps of one run.

    Threads may share it. In a job of many processes, all must make the same calls.

    Args:
        run_uri: the run's folder; the first save creates the run.
        writer_id: id of this writer, constant over restarts; default `default_writer_id()`.
        clock: returns the current time in UTC.
        lease_ttl: seconds for which the run stays reserved for this writer if it dies.
        dedup: how long steps share the files of unchanged values.
        reuse_buffers: copy NumPy arrays and the arrays of CPU devices into buffers that are kept
            for the next save, see `buffer_bytes`. A training step that donates its arrays right
            after a save then need not wait for XLA to copy them into new memory. Until `close`,
            this costs as much host memory as this process's part of the state.
        host_memory: maximum bytes of host memory in this process for copies of arrays and for
            uploads; None for no limit. If the copies need more, they are made in waves: each wave
            starts when the one before is written, and `save` returns when the last is copied.
            Arrays in host memory that need no copy do not count. With `reuse_buffers`, a save
            that needs more is refused.

    Raises:
        InvalidURIError: `run_uri` is malformed, or neither on a disk nor in GCS.
        PolicyError: `lease_ttl` is not above 0 or too long, `dedup` is no DedupPolicy,
            `reuse_buffers` is no bool, or `host_memory` is no number of bytes.
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
            reuse_buffers: whether saves copy into kept buffers from now on; None changes nothing.
            host_memory: maximum bytes of host memory for saves from now on. None removes the limit
                if `reuse_buffers` is given, and changes nothing otherwise.

        Raises:
            InvalidURIError: `uri` is malformed, or neither on a disk nor in GCS.
            PolicyError: an option has a value that `Checkpointer` refuses.
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

        They are as many as the largest save so far needed. 0 before the first save, after `close`,
        and without `reuse_buffers`.
        """
        return 0 if self._buffers is None else self._buffers.nbytes

    def begin(self, like: Any = None) -> None:
        """Begin an attempt now instead of at the first save; do nothing if one has begun.

        The first save then blocks no longer than later ones: it saves about a second with a remote
        store. A job that may not write to the run fails here, at its start.

        Args:
            like: a tree of arrays like those that will be saved. For arrays on GPUs, host memory
                for their copies is pinned in the background, at some 2 GB/s; without this, the
                first save waits for it. Call it before the first training step, so that the
                pinning overlaps with compilation.

        Raises:
            LeaseHeldError: another writer holds the run.
            FencedError: another writer has taken the run over.
            StoreCheckError: the store does not do what runs require.
            InvalidURIError: the run's address is that of a checkpoint, or lies in another run.
            SaveError: the checkpointer is closed.
        """
        with self._lock:
            self._refuse_fork()
            self._refuse_closed()
            agreement.agree(lambda: self._writer.begin(self._create_run()))
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
        better: Mapping[str, Better] | None = None,
        labels: Mapping[str, str] | None = None,
        overwrite: bool = False,
        compression: Compression | None = None,
        check: Callable[[], object] | None = None,
        deadline: float | None = None,
    ) -> SaveHandle:
        """Start to save `step`; when this returns, the caller may donate or delete the arrays.

        Waits for the previous save, if that still runs.

        Args:
            step: the step's number, above the latest listed step unless `overwrite`.
            items: trees by name, such as `{"model": model, "optimizer": optimizer}`, or one tree,
                which is then called "state". A tree is any pytree, and may hold modules: all
                Variables of NNX modules are saved, all arrays and numbers of Equinox modules.
            meta: JSON, stored as the item "meta".
            iterators: iterators of training data, by name, such as `{"train": iterator}`. The step
                stores the current state of each process's iterators, so that `restore` can resume
                the data, too. An iterator must have `get_state` and `set_state`, as in Grain, or
                `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader has.
            model: description of the model.
            assets: small files that belong to the model, by name.
            metrics: numbers by name, for searches.
            better: "min" or "max" by the name of a metric: whether lower or higher is better.
            labels: text by name, for searches.
            overwrite: allow a step that is not above the latest. The existing `step` and all later
                ones stay listed until the new step is durable, which supersedes them.
            compression: "zstd" makes floating weights about a tenth smaller, and the save several
                times slower; restores then go through TensorStore's decoder.
            check: function that is called once on each process, in another thread while the step
                is written. If it raises on one process, the save fails on all, and the step is not
                listed.
            deadline: seconds that this call may wait for the previous save, for the store, and for
                waves of arrays (`host_memory`). After that it raises: nothing is saved, and the
                previous save goes on. None waits as long as the previous save makes progress; a
                store that does not respond for 90 s counts as no progress.

        Raises:
            StepExistsError: the run lists this step or a later one, and `overwrite` is False.
            UnsupportedLeafError: leaves, keys or states of iterators can't be stored; all are
                listed.
            UnsupportedFormatError: an argument has a wrong type, `meta` or the model's config is
                not JSON, a label is no text, a metric is no number, a name in `better` has no
                metric, or `compression` is unknown.
            InvalidURIError: the step, or an item's or iterator's name, can't be used.
            LeaseHeldError: another writer holds the run.
            FencedError: another writer has taken the run over.
            StoreCheckError: the store does not do what runs require.
            PolicyError: `deadline` is no number of seconds above 0.
            StoreUnavailableError: the store does not respond; this save did not start.
            SaveError: the previous save failed and no call has raised its error yet, or it still
                runs at the deadline. This save did not start.

        `SaveHandle.wait` raises SaveError if this save fails after its start, for example because
        another program saved the step in the same attempt; that program's files stay unchanged.
        """
        options = SaveOptions(
            meta=meta,
            iterators=iterators,
            model=model,
            assets=assets,
            metrics=metrics,
            better=better,
            labels=labels,
            overwrite=overwrite,
            compression=compression,
            check=check,
            deadline=deadline,
        )
        return self.save_with(step, items, options)

    def save_with(self, step: SupportsIndex, items: Any, options: SaveOptions) -> SaveHandle:
        """Start to save `step`; `save` documents the options, the result and the errors."""
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
            number = -1  # if `step` is none
            with contextlib.suppress(InvalidURIError):
                number = check_step(step)
            record_refusal(exc, step=number, uri=self.uri)
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
        """Start a save; return its handle, and its background work, which waits for `go`."""

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
                    handle.abandon(
                        f"arrays that were not on the host at the deadline, in {trees.waves} waves"
                    )
                    handle.wait()  # raises its error, so that the next save does not
                handle.staging, handle.waves = trees.staging, trees.waves
            except BaseException as exc:
                if trees is not None:
                    trees.end(exc)
                # The next save begins a new attempt: Orbax may still write into this one's folder.
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
            else:
                self._buffers = buffers

    def _dedup_of(self, item: str) -> Dedup:
        """Return an item's deduplication state, which is kept from save to save."""
        doubtful = functools.partial(doubtful_steps, self._run)
        dedup = self._dedup.setdefault(item, Dedup(self._dedup_policy, self._clock, doubtful))
        dedup.policy = self._dedup_policy
        return dedup

    def _drop_failed(self, handle: SaveHandle) -> None:
        """Drop the attempt of a save that failed or was abandoned: it must list no more steps."""
        if handle.state is SaveState.FAILED:
            self._writer.drop()

    def restore(
        self,
        target: Any,
        *,
        step: StepChoice = None,
        only: str | re.Pattern[str] | Callable[[str], bool] | None = None,
        map: TreeMap | None = None,
        cast: bool = False,
        iterators: Mapping[str, Any] | None = None,
        damaged: OnDamage = "refuse",
    ) -> Any:
        """Restore a step of this run into the target's structure; all processes must call this.

        Waits first for the save in flight, so that its step can be restored, too.

        Args:
            target: the items as given to `save`, or a tree of equal structure, see `load`.
            step: the step's number, "best:METRIC:min", "best:METRIC:max", or an alias; None for
                the latest step.
            only: the leaves to restore: a regular expression that matches somewhere in their paths,
                or a predicate on a path.
            map: the stored leaves that each leaf of the target is made of, if they have other names
                or shapes, see `load`.
            cast: allow floating leaves to change dtype, and integers whose values all fit the new
                dtype.
            iterators: iterators of training data, by name; each is set to its position at the time
                of the save.
            damaged: what to do if `step` names no certain step and the latest is damaged. "refuse"
                raises; "skip" loads the newest step that is not damaged, and the next save
                continues from it, see `load`.

        Raises:
            SaveError: the last save failed, and no call has raised its error yet.
            StepDamagedError: no step is named, the latest is damaged, and `damaged` is "refuse".
            StorageError: for the other reasons of `load`.
        """
        self.wait_until_finished()
        return load(
            self.uri,
            target,
            step=step,
            only=only,
            map=map,
            cast=cast,
            iterators=iterators,
            damaged=damaged,
        )

    def latest_step(self) -> int | None:
        """Return the latest durable step; None if there is none or the run does not exist yet.

        All processes must call this.

        Raises:
            CorruptionError, UnsupportedFormatError: the run's records are unreadable.
            StoreUnavailableError: the store does not respond.
        """
        steps = self.steps()
        return steps[-1] if steps else None

    def steps(self) -> list[int]:
        """Return the durable steps, lowest first; empty if the run does not exist yet.

        All processes must call this.

        Raises:
            CorruptionError, UnsupportedFormatError: the run's records are unreadable.
            StoreUnavailableError: the store does not respond.
        """
        return agreement.agree(self._listed_steps)

    def _listed_steps(self) -> list[int]:
        if not self._run.has_saved():
            return []
        return [info.step for info in self._run.steps()]

    def wait_until_finished(self) -> None:
        """Wait until no save is in flight.

        Raises:
            SaveError: the last save failed, and no call has raised its error yet.
        """
        with self._lock:
            self._settle()

    def close(self) -> None:
        """Wait for the save in flight, then release the run for other writers.

        Raises:
            SaveError: the last save failed, and no call has raised its error yet.
        """
        with self._lock:
            self._refuse_fork()
            if self._closed:
                self._settle()
                return
            self._closed = True
            try:
                self._settle()
            finally:
                if self._work is None:
                    self._release()
                else:  # an abandoned save's thread still needs the lease
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
        """Raise SaveError in a forked child process, which lacks the threads that save."""
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
        """Wait for the previous save, then prepare this one.

        Garbage collection pauses until `stack` is closed.

        Raises:
            SaveError: the checkpointer is closed or belongs to another process, or the previous
                save failed or still runs at the deadline.
        """
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

    def _claim(self, step: int, overwrite: bool) -> tuple[int, str]:
        """Return the attempt to write `step` in, and a random name for the save.

        Process 0 calls this.
        """
        listing = self._create_run()
        return self._writer.claim(step, overwrite=overwrite, listing=listing), secrets.token_hex(8)

    def _create_run(self) -> RunListing | None:
        """Create the run unless it exists; pass the damaged steps that were skipped to the writer.

        Returns:
            The listing of the run; None if this writer has an attempt.
        """
        self._writer.check()
        listing = None
        if self._writer.attempt is None:
            _, listing = Run.begin(self.uri, environment=job_environment(), clock=self._clock)
        skipped = pop_skipped(self.uri)
        if skipped is not None:
            self._writer.skip_damaged(skipped)
        return listing


def _forget_runs() -> None:
    """Clear the registry of `for_run` in a forked child, which needs checkpointers of its own."""
    Checkpointer._by_run, Checkpointer._by_run_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget_runs)


def _check_ttl(seconds: Any) -> None:
    """Raise PolicyError for a lease that is not above 0 seconds, or is too long."""
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
    """Non-daemon thread that does a save's work; the process does not end before it does.

    The work begins after `go`, so that `save` returns first: otherwise the two threads would
    contend for the GIL. Garbage collection is off until then, since it would visit the many objects
    that the save has just made.

    Attributes:
        over: event that is set once the work has ended or failed.
    """

    def __init__(self, work: Callable[[], object], *, name: str) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            work: function that does the work.
            name: name of the thread.
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
        """True once the thread was started."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the thread; its work begins after `go`, or after `_LEAVING_SECONDS`."""
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
        """Call `call` after the work: at once if that is over, else later in the work's thread."""
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
