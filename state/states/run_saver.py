"""Saves of a training loop's steps by a policy, and a last save when the process is preempted."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, Self, SupportsIndex

import jax

from cairn.interop.errors import ArgumentError
from cairn.state.checkpointing import exit_guard
from cairn.state.checkpointing.background_retention import RunRetention
from cairn.state.checkpointing.checkpointer import Checkpointer, default_writer_id
from cairn.state.checkpointing.dedup_policy import DedupPolicy
from cairn.state.checkpointing.iterators import capture_states
from cairn.state.checkpointing.preemption import Preemption
from cairn.state.checkpointing.processes import agreement, exchange
from cairn.state.checkpointing.save_handle import (
    SaveHandle,
    SaveState,
    call_of_save,
    superseded_save,
)
from cairn.state.checkpointing.save_policy import DueReason, SavePolicy
from cairn.state.checkpointing.saves.preparation import check_items
from cairn.state.checkpointing.saves.save_metrics import (
    prepare_metrics,
    record_outcome,
    record_refusal,
    record_started,
)
from cairn.state.states.due_steps import DueSteps, votes
from cairn.state.states.saved_trees import (
    SavedTrees,
    StateOrTrees,
    are_marked,
    is_equal,
    leaves_of,
    mark_of,
    reference_to,
)
from cairn.state.states.state_save import check_loadable, check_options
from cairn.storage.errors import PolicyError, StepExistsError, StorageError
from cairn.storage.runs.records.annotations import Better
from cairn.storage.runs.records.layout import check_step
from cairn.storage.runs.retention import RetentionPolicy, check_names
from cairn.storage.runs.run import Run
from cairn.storage.runs.trash import GRACE_SECONDS
from cairn.storage.store.clock import is_above_zero
from cairn.storage.store.deadlines import deadline_after
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["RunSaver"]

logger = logging.getLogger("cairn.save")

_KEPT: Final = (SaveState.SAVING, SaveState.DURABLE)
_LONGEST_GRACE_SECONDS: Final = 100 * 365 * 24 * 3600.0
_OWN_OPTIONS: Final = frozenset(
    {"step", "wait", "metrics", "better", "labels", "extras", "iterators", "enable"}
)


Options = dict[str, Mapping[str, Any] | None]
"""Arguments of `save_state` that belong to one step."""


class _LastStep(NamedTuple):
    """State of the last call of `step` or `save`, which `close` may have to save.

    Attributes:
        state: function that returns the state, or None if it is gone.
        step: the step's number; None if the caller passed none.
        options: arguments of `save_state` for this step.
    """

    state: Callable[[], StateOrTrees | None]
    step: int | None
    options: Options


class RunSaver:
    """Saves steps of one run from a training loop.

        with RunSaver("gs://bucket/run", SavePolicy(every_steps=1000)) as saver:
            last = saver.latest_step() or 0
            if last:  # the job was preempted before: resume
                state = TrainState.load_state("gs://bucket/run", state)
            for step in range(last + 1, 10_001):
                state, loss = train_step(state, next(batches))
                saver.step(state)
                if saver.should_stop:
                    break

    On SIGTERM, the next `step`, or `close` if none comes, saves the current step and waits until it
    is durable, for at most `policy.deadline_seconds` after the signal. After that it abandons the
    save: the handle's state is "failed", and the process does not wait for it at exit. In both
    cases `should_stop` is True then.

    All processes of a job must make the same calls. Rules on step numbers need no communication.
    Rules on time, metrics and signals do: the processes exchange these at the first step at or
    after each multiple of `agree_every`, and whenever a step is due by its number. So the save
    after a signal may come up to `agree_every` steps late, and metrics count only at those steps,
    with the values of process 0.

    The constructor acquires the run's lease: a second job is refused before it trains, not at its
    first save, and no save has to wait for the lease. Without CAIRN_WRITER_ID, jobs of one user on
    one host are one writer, which a restart needs: there a second job takes the run over, and the
    first is fenced.

    Args:
        run_uri: the run's folder, created if there is none.
        policy: when to save.
        keep: which steps to keep; after each durable save, the other steps are deleted in the
            background. None deletes no steps. Nothing is deleted either while no step has a metric
            or label that `keep` names: see `retention_error`.
        grace_seconds: seconds during which a deleted step can be restored.
        agree_every: number of steps between two exchanges of a job's processes.
        save_options: arguments for every `save_state`, such as `float_dtype`.
        dedup: how long steps share the files of unchanged values, such as those of a frozen base
            (deduplication); None changes nothing.
        reuse_buffers: whether saves copy arrays into buffers that are kept for the next save, as
            in `Checkpointer`; None changes nothing.
        host_memory: maximum bytes of host memory for saves in this process, as in `Checkpointer`.
        like: a state like those that will be saved. For arrays on GPUs, host memory is pinned
            before the first save; see `Checkpointer.begin`.
        clock: returns the time in seconds, for `SavePolicy.every_minutes`.

    Raises:
        PolicyError: the policy listens for signals, and this is not the main thread; `keep` is no
            RetentionPolicy, or has a misspelt name of a metric or label of the run; or `dedup`,
            `reuse_buffers` or `host_memory` has a value that `Checkpointer` refuses.
        ArgumentError: `save_options` has an argument that belongs to one step, `agree_every` is
            below 1, or `grace_seconds` is no number from 0 to the seconds of 100 years.
        InvalidURIError: `run_uri` is malformed, or no run can begin there.
        LeaseHeldError: another writer holds the run.
        StoreCheckError: the store does not do what runs require.
        StorageError: metrics or labels that `policy.best` or `keep` needs can't be read from the
            run's steps.
    """

    def __init__(
        self,
        run_uri: StoreURI | str | os.PathLike[str],
        policy: SavePolicy,
        *,
        keep: RetentionPolicy | None = None,
        grace_seconds: float = GRACE_SECONDS,
        agree_every: int = 10,
        save_options: Mapping[str, Any] | None = None,
        dedup: DedupPolicy | None = None,
        reuse_buffers: bool | None = None,
        host_memory: int | None = None,
        like: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.uri = parse_uri(run_uri)
        self.policy = policy
        self._options = {"verbose": False, **_checked(save_options or {})}
        _check_grace(grace_seconds)
        self._due = DueSteps(self.uri, policy, agree_every=agree_every, clock=clock)
        self._retention = self._retention_of(keep, grace_seconds)
        prepare_metrics()
        self._many = jax.process_count() > 1
        self._last: SaveHandle | None = None
        self._begun: SaveHandle | None = None
        self._at: _LastStep | None = None
        self._lost_count = False
        self._saved_leaves: list[Any] = []
        self._begun_at: _LastStep | None = None
        self._stops = False
        self._abandoned = False
        self._closed = False
        self._preemption = Preemption() if policy.on_preemption else None
        try:
            Checkpointer.for_run(
                self.uri, dedup=dedup, reuse_buffers=reuse_buffers, host_memory=host_memory
            ).begin(like)
        except BaseException:
            if self._preemption is not None:
                self._preemption.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        # An error may be on this process only: others would wait forever for its part in a save.
        self._close(saving=failure[0] is None or not self._many)

    def latest_step(self) -> int | None:
        """Return the run's latest durable step, from which to resume; None if there is none.

        All processes must call this.

        Raises:
            CorruptionError, UnsupportedFormatError: the run's records are unreadable.
            StoreUnavailableError: the store does not respond.
        """
        return Checkpointer.for_run(self.uri).latest_step()

    @property
    def last(self) -> SaveHandle | None:
        """Handle of the last save that was due or requested, also if refused; None before any."""
        return self._last

    @property
    def should_stop(self) -> bool:
        """True once the process was signalled to end; in larger jobs, once all processes know."""
        return self._stops or (not self._many and self._is_told_to_end())

    @property
    def retention_error(self) -> StorageError | None:
        """Error of the last retention pass; None if it succeeded or no pass has run.

        It is always None without `keep`, and on processes other than 0. It is a PolicyError while
        no step has a metric or label that `keep` names; then nothing is deleted.
        """
        return None if self._retention is None else self._retention.error

    def preempt(self) -> None:
        """Act as if SIGTERM had come; for preemption notices that are no signals.

        Raises:
            ArgumentError: the policy's `on_preemption` is False.
        """
        if self._preemption is None:
            raise ArgumentError(path="preempt", expected="a policy with on_preemption=True")
        self._preemption.announce()

    @call_of_save()
    def step(
        self,
        state: Any,
        *,
        step: SupportsIndex | None = None,
        metrics: Mapping[str, Any] | None = None,
        better: Mapping[str, Better] | None = None,
        labels: Mapping[str, str] | None = None,
        extras: Mapping[str, Any] | None = None,
        iterators: Mapping[str, Any] | None = None,
        deadline: float | None = None,
    ) -> SaveHandle | None:
        """Save the state if it is due. Call this after every training step.

        If the step is not due, the call does not wait, not even for devices.

        Args:
            state: the state after this step, or trees by name, such as `{"model": model,
                "optimizer": optimizer}`, as `Checkpointer.save` takes them.
            step: the step's number. If None, the first call reads it from the state, and each later
                one adds 1. Trees have no number: with them the first call must have one.
            metrics: numbers of this step, by name.
            better: "min" or "max" by the name of a metric: whether lower or higher is better. The
                metric of the policy's `best` has its mode, unless it is named here.
            labels: texts to store with the step, by name.
            extras: JSON to store with the step; with trees, it is the step's `meta`.
            iterators: iterators of training data, by name, whose positions to store with the step;
                see `Checkpointer.save`. With `on_preemption`, each call gets their states, since
                `close` may have to save this step after they have advanced.
            deadline: maximum seconds for this call if the state is saved. After that the save is
                refused; the previous save and training go on. None waits while the previous save
                makes progress; a store that does not respond for 90 s counts as no progress.

        Returns:
            The save's handle; None if the step is not due. The handle's state may be "superseded",
            or, after preemption without enough time, "failed" or "refused".

        Raises:
            SaveError: the previous save failed and no call has raised its error yet, or it is
                still under way at the deadline.
            StoreUnavailableError: the store does not respond in time.
            ConfigError: in the first call, due or not: `load_state` could never load this state.
            UnsupportedLeafError: in the first call, due or not: the trees can't be stored.
            ArgumentError: the saver is closed, or the deadline is not above 0; or in the first
                call, due or not: the state has no number and none was passed, or its save refuses
                the `save_options`.
            Exception: `save_state` of the state failed; the save is refused, as `last` shows.
        """
        self._check_open()
        _check_deadline(deadline)
        state = state if hasattr(state, "save_state") else SavedTrees(state)
        before = self._due.previous
        if before is None:  # check now: the first save may come hours later
            check_loadable(state)
            call = f"{type(state).__name__}.save_state"
            if isinstance(state, SavedTrees):
                check_items(state.items)
                call = "Checkpointer.save"
            check_options(state, self._options, call=call)
        if step is not None:
            number = check_step(step)
        else:
            number = int(state.step) if before is None or self._lost_count else before + 1
        options, refusal = self._options_of(metrics, better, labels, extras, iterators)
        self._lost_count = refusal is not None and not self._many
        if refusal is not None and self._lost_count:
            raise refusal
        # Saved without a number, a state gets its own.
        own_number = step is None and not isinstance(state, SavedTrees)
        last = _LastStep(self._reference(state), None if own_number else number, options)
        if refusal is None:
            self._at = last
        busy = self._begun is not None and not self._begun.done
        reason, busy = self._due.look(
            number,
            metrics or {},
            preempted=not self._stops and self._is_told_to_end(),
            busy=busy,
        )
        superseded = busy and self.policy.when_busy == "supersede"
        if reason is DueReason.PREEMPTION:
            return self._save_before_end(state, last)
        if reason is not None and not superseded:
            with deadline_after(deadline):  # a refusal on one process is raised on all
                return self._save(state, last, reason)
        if refusal is not None:
            raise refusal
        if reason is None:
            return None
        assert self._begun is not None
        self._last = superseded_save(step=number, uri=self.uri, by=self._begun.step)
        self._last.reason = reason
        record_outcome(self._last)
        return self._last

    @call_of_save()
    def save(
        self,
        state: Any,
        *,
        step: SupportsIndex | None = None,
        metrics: Mapping[str, Any] | None = None,
        better: Mapping[str, Better] | None = None,
        labels: Mapping[str, str] | None = None,
        extras: Mapping[str, Any] | None = None,
        iterators: Mapping[str, Any] | None = None,
        deadline: float | None = None,
    ) -> SaveHandle:
        """Save the state regardless of the policy, such as the last one of training.

        If the previous save, for example by `step`, was of this step, the state and all arguments
        must be the same: then nothing is saved, and the call returns the handle of that save. With
        `overwrite=True` in the `save_options`, a different state or new arguments are saved, too.

        Args:
            state: the state, or trees by name, as for `step`.
            step: the step's number; None for the state's. Trees have none.
            metrics: numbers to store with the step, by name.
            better: "min" or "max" by the name of a metric, as for `step`.
            labels: texts to store with the step, by name.
            extras: JSON to store with the step.
            iterators: iterators of training data, by name, whose positions to store with the step.
                For the comparison with the previous save, only their names count.
            deadline: maximum seconds for this call; see `step`.

        Returns:
            The handle of this save, or that of the previous save if nothing is saved.

        Raises:
            SaveError: the previous save failed and no call has raised its error yet, or it is
                still under way at the deadline.
            StepExistsError: this step was just saved, with another state or other arguments.
            StoreUnavailableError: the store does not respond in time.
            ArgumentError: the saver is closed, the deadline is not above 0, or trees came without
                the step's number.
            Exception: `save_state` of the state failed; the save is refused, as `last` shows.
        """
        self._check_open()
        _check_deadline(deadline)
        state = state if hasattr(state, "save_state") else SavedTrees(state)
        number = int(state.step) if step is None else check_step(step)
        options, refusal = self._options_of(metrics, better, labels, extras, iterators)
        if refusal is not None and not self._many:
            raise refusal
        if self._begun is not None and self._has_saved(number):
            new = self._unsaved_parts(state, options)
            if not new:
                return self._begun
            if not self._options.get("overwrite"):
                raise self._already_saved_error(number, new)
        last = _LastStep(self._reference(state), number, options)
        with deadline_after(deadline):
            return self._save(state, last, DueReason.ASKED)

    def close(self) -> None:
        """Wait for the save under way, and release the run's lease.

        If the process was signalled to end since the last `step`, this first saves the current
        step, if its state still exists.

        Raises:
            SaveError: the last save failed, and no call has raised its error yet.
        """
        self._close(saving=True)

    # -- saving --------------------------------------------------------------------------------

    def _reference(self, state: StateOrTrees) -> Callable[[], StateOrTrees | None]:
        """Return a function that returns the state for `close`, or None if it can't need it."""
        return (lambda: None) if self._preemption is None else reference_to(state)

    def _options_of(
        self,
        metrics: Mapping[str, Any] | None,
        better: Mapping[str, Better] | None,
        labels: Mapping[str, str] | None,
        extras: Mapping[str, Any] | None,
        iterators: Mapping[str, Any] | None,
    ) -> tuple[Options, StorageError | None]:
        """Return a step's arguments of `save_state`, and the error if iterators can't be saved.

        The dicts are copied, since the caller may change them before `close` has to save them.
        Iterators are left out if None.
        """
        options: Options = {
            "metrics": _copied(metrics),
            "labels": _copied(labels),
            "extras": _copied(extras),
        }
        directions = dict(better or {})
        best = self.policy.best
        if best is not None and best.metric in (metrics or {}):
            directions.setdefault(best.metric, best.mode)
        if directions:
            options["better"] = directions
        if iterators is None:
            return options, None
        if self._preemption is None:
            return {**options, "iterators": iterators}, None
        try:
            return {**options, "iterators": capture_states(iterators)}, None
        except StorageError as exc:
            return {**options, "iterators": iterators}, exc

    def _is_told_to_end(self) -> bool:
        return self._preemption is not None and self._preemption.announced

    def _has_saved(self, number: int) -> bool:
        begun = self._begun
        return begun is not None and begun.step == number and begun.state in _KEPT

    def _unsaved_parts(self, state: StateOrTrees, options: Options) -> list[str]:
        """Return the differences from the previous save, such as "metrics 'loss'"; may be empty."""
        new = [] if are_marked(leaves_of(state), self._saved_leaves) else ["another state"]
        for what, values in options.items():
            saved_before = self._begun_at.options.get(what) or {} if self._begun_at else {}
            new += [
                f"{what} {name!r}"
                for name, value in (values or {}).items()
                if name not in saved_before
                or not (what == "iterators" or is_equal(value, saved_before[name]))
            ]
        return new

    def _already_saved_error(self, number: int, new: list[str]) -> StepExistsError:
        error = StepExistsError(
            f"step {number} was saved already",
            path=self.uri,
            expected="the same state, and nothing that the save before was not given",
            found=", ".join(new),
            next_step="Give metrics, labels, extras and iterators to step(), save under another "
            "step=, or make the RunSaver with save_options={'overwrite': True} to save the step "
            "anew.",
        )
        self._last = self._refused(error, number)
        return error

    def _save(self, state: StateOrTrees, last: _LastStep, reason: DueReason) -> SaveHandle:
        """Start a save of the state, and return its handle."""
        self._due.begin()
        number, metrics = last.step, last.options.get("metrics") or {}
        options: dict[str, Any] = {**last.options, **self._options}
        try:
            handle = state.save_state(str(self.uri), step=number, **options)
        except Exception as exc:
            self._last = self._refused(exc, number)
            raise
        handle.reason = reason
        self._saved_leaves = [mark_of(leaf) for leaf in leaves_of(state)]
        self._at = self._begun_at = last  # `save` may have saved a later step than the last `step`
        record_started(handle)
        if number is None:
            self._due.previous = handle.step  # the caller may not have called `step` for each step
        self._last = self._begun = handle
        handle.when_done(record_outcome)

        def follow_up(ended: SaveHandle) -> None:
            """After a durable save, pass its metrics to the policy, and start retention."""
            if ended.state is not SaveState.DURABLE:
                return
            self._due.saved(metrics)
            if self._retention is not None and not self._stops:
                self._retention.start()

        handle.when_done(follow_up)
        return handle

    def _refused(self, error: Exception, number: int | None) -> SaveHandle:
        refused = vars(error).get("save")  # set by the checkpointer; may be an older save's
        if isinstance(refused, SaveHandle) and refused is not self._last:
            return refused
        step = self._due.previous if number is None else number
        return record_refusal(error, step=-1 if step is None else step, uri=self.uri)

    def _save_before_end(
        self, state: StateOrTrees | None, last: _LastStep | None
    ) -> SaveHandle | None:
        """Save the current step before the process ends, and wait for it until the deadline.

        Args:
            state: the current state; None if it no longer exists.
            last: the record of the last `step` or `save`.

        Returns:
            The handle of the step's save, which may have begun before; its state is "failed" if it
            was not durable in time. None if the step was not saved, as its state is gone.
        """
        self._stops = True
        announced_at = self._preemption.at if self._preemption is not None else None
        began = time.monotonic() if announced_at is None else announced_at
        deadline = began + self.policy.deadline_seconds
        current = self._due.previous
        assert current is not None
        before = self._begun
        is_begun = before is not None and self._begun_at is last and before.state in _KEPT
        if not votes(self._has_saved(current) or is_begun).all():
            in_time = before is None or before.ended(max(0.0, deadline - time.monotonic()))
            if before is not None and not votes(in_time).all():
                self._abandon(before)
                self._last = SaveHandle(step=current, attempt=0, uri=self.uri)
                self._abandon(self._last)
                return self._last
            if state is None or last is None:
                logger.warning("preempted after step %d, whose state is gone: not saved", current)
                return None
            if before is not None:
                with suppress(Exception):  # its failure is logged, and must not prevent this save
                    before.wait(0)
            # A timer logs it: this thread may be blocked past the deadline.
            text = "preempted: the save of step %d to %s could not begin in time"
            left = deadline - time.monotonic()
            late = threading.Timer(left, logger.error, (text, current, self.uri))
            late.daemon = True
            late.start()
            try:
                with deadline_after(max(0.0, deadline - time.monotonic())):
                    self._save(state, last, DueReason.PREEMPTION)
            except StorageError:
                if time.monotonic() < deadline:
                    raise
                self._leave()
                return self._last
            finally:
                late.cancel()
        assert self._begun is not None
        if not self._begun.ended(max(0.0, deadline - time.monotonic())):
            self._abandon(self._begun)
        return self._begun

    def _abandon(self, handle: SaveHandle) -> None:
        """Abandon a save that was not durable in time; the process will not wait for it at exit."""
        seconds = self.policy.deadline_seconds
        if handle.abandon(f"it was not durable {seconds:g} s after the process was told to end"):
            record_outcome(handle)
            self._leave()

    def _leave(self) -> None:
        self._abandoned = True
        exit_guard.leave()

    # -- closing -------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ArgumentError(
                path=f"RunSaver({self.uri})",
                expected="an open saver",
                found="one that was closed",
                next_step="make a new one",
            )

    def _close(self, *, saving: bool) -> None:
        if self._closed:
            return
        try:
            if saving:
                self._save_if_preempted()
            if self._begun is not None:
                self._begun.join()
            if not self._abandoned:
                Checkpointer.for_run(self.uri).close()
        finally:
            self._closed = True
            if self._retention is not None and not self._stops:
                self._retention.close()
            if self._preemption is not None:
                self._preemption.close()

    def _save_if_preempted(self) -> None:
        if self._stops or self._preemption is None:
            return
        state = None if self._at is None else self._at.state()
        # A training step may have taken over the state's memory (donation).
        is_gone = any(
            isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves_of(state)
        )
        there = state is not None and not is_gone
        said = votes(self._preemption.announced, there)
        if said[:, 0].any() and self._due.previous is not None:
            self._save_before_end(state if said[:, 1].all() else None, self._at)

    def _retention_of(self, keep: RetentionPolicy | None, grace: float) -> RunRetention | None:
        if keep is None:
            return None
        if not isinstance(keep, RetentionPolicy):
            raise PolicyError(
                "no policy for retention",
                path="keep",
                expected="a RetentionPolicy, or None to keep all",
                found=f"{type(keep).__name__} {keep!r}"[:200],
                next_step="Make one, such as RetentionPolicy(keep_last=3).",
            )
        if keep.has_names:
            agreement.agree(partial(check_names, Run(self.uri), keep, for_later=True))
        if not exchange.is_primary():
            return None
        return RunRetention(Run(self.uri), keep, by=default_writer_id(), grace=grace)


def _checked(options: Mapping[str, Any]) -> Mapping[str, Any]:
    taken = sorted(_OWN_OPTIONS & options.keys())
    if taken:
        raise ArgumentError(
            path="save_options",
            expected="arguments that are the same for every step",
            found=", ".join(taken),
            next_step="pass these to step()",
        )
    return options


def _check_grace(seconds: Any) -> None:
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 <= seconds <= _LONGEST_GRACE_SECONDS:
        raise ArgumentError(
            path="grace_seconds",
            expected=f"seconds from 0 to {_LONGEST_GRACE_SECONDS:g}",
            found=repr(seconds),
            next_step="give a number, such as timedelta(days=7).total_seconds()",
        )


def _check_deadline(seconds: Any) -> None:
    if seconds is not None and not is_above_zero(seconds):
        raise ArgumentError(
            path="deadline",
            expected="seconds above 0, or None to wait while there is progress",
            found=repr(seconds),
            next_step="give a number, such as 30",
        )


def _copied(value: Any) -> Any:
    """Return a copy of a value's dicts, lists and tuples; other values are not copied."""
    if isinstance(value, Mapping):
        return {key: _copied(member) for key, member in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
