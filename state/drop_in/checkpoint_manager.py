"""Orbax's `CheckpointManager` on a Cairn run, for loops that call it. Imports JAX and Orbax.

    -from orbax.checkpoint import CheckpointManager
    +from cairn import CheckpointManager

Methods, arguments, options and policies are Orbax's. docs/howto/checkpoint-manager.md lists the
differences of each method.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from types import TracebackType
from typing import Any, NamedTuple, Self, SupportsIndex

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from cairn.state.checkpointing.background_retention import RunRetention
from cairn.state.checkpointing.checkpointer import Checkpointer
from cairn.state.checkpointing.load import agreed_step, check_on_damage, load
from cairn.state.checkpointing.processes import agreement, exchange
from cairn.state.checkpointing.save_handle import SaveHandle, SaveState, call_of_save
from cairn.state.checkpointing.skipped_steps import record_skipped
from cairn.state.drop_in.item_args import (
    SINGLE_ITEM,
    Kinds,
    TreeTarget,
    in_layouts,
    kinds_of,
    legacy_args,
    restore_items,
    save_items,
    tree_target,
)
from cairn.state.drop_in.single_values import VALUE, as_tree_args, from_json
from cairn.state.drop_in.step_policies import (
    PolicyStep,
    check_options,
    metric_rank,
    preservation_policy,
    save_policy,
)
from cairn.state.drop_in.stored_items import StoredItems, as_meta
from cairn.storage.errors import (
    PolicyError,
    StepDamagedError,
    StepExistsError,
    StepInUseError,
    StepNotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from cairn.storage.runs.damage import OnDamage, doubtful_steps, known_damage
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.layout import CheckpointRef, check_step
from cairn.storage.runs.resolution import resolve_step
from cairn.storage.runs.retention import RetentionOutcome, step_facts
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.runs.trash import delete_step
from cairn.storage.store.clock import from_rfc3339, rfc3339
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["CheckpointManager"]

logger = logging.getLogger("cairn.save")


class _StepExists(StepExistsError, StepAlreadyExistsError):
    """Error of both Cairn's and Orbax's class, so that a loop can catch either."""


class _RestoreRequest(NamedTuple):
    """Items that a call of `restore` asks for.

    Attributes:
        names: names of the items, in the order in which `restore` returns them.
        trees: trees to restore into, by name.
        json: items that are JSON, by name.
        iterators: iterators whose position to set, by name.
        finish: functions that convert a restored item to the one that is returned, by name.
        single: True if `restore` returns the only item by itself, without a `Composite`.
    """

    names: list[str]
    trees: dict[str, TreeTarget]
    json: dict[str, Any]
    iterators: dict[str, Any]
    finish: dict[str, Callable[[Any], Any]]
    single: bool

    def same(self) -> dict[str, list[str]]:
        """Return the part that must be equal on all processes: the names of the items."""
        return {"args": sorted(self.names)}


class _Failure:
    """Failure of background work, which is raised once in each thread, as with Orbax."""

    def __init__(self, raises: Callable[[], object]) -> None:
        """Store the failure; `raises` is the function that raises it."""
        self._raises = raises
        self._here = threading.local()

    def meet(self) -> bool:
        """Mark the failure as raised in this thread; return False if it was marked before."""
        is_first, self._here.met = not hasattr(self._here, "met"), True
        return is_first

    def raise_first(self) -> None:
        """Raise the failure, unless it was raised in this thread before."""
        if self.meet():
            self._raises()


class CheckpointManager(policies.AbstractCheckpointManager):
    """Manager of the steps of a run, with the interface of Orbax's class of this name.

    Args:
        directory: the run's folder or address; the run is created by the first save.
        checkpointers: Orbax's older argument: one checkpointer, or one for each item by name. Only
            their types matter: they say which items are trees and which are JSON.
        options: Orbax's own options. Orbax's policies apply those about when to save and what to
            keep. Some others are refused; some have no effect, and a warning names these.
        metadata: JSON about the run, stored with every step. As with Orbax, the metadata of the
            run's first manager stays; later ones are ignored.
        item_names: names of the items; only needed for calls without `args`.
        item_handlers: one handler, or one for each item by name; used like `checkpointers`.
        logger: not used: saves are logged by the logger "cairn.save", and are Prometheus metrics.
        handler_registry: refused: pass `args` to `save` and `restore` instead.
        grace_seconds: seconds during which a step that the options delete can be restored from the
            trash. By default its bytes are deleted at once, as with Orbax.
        damaged: what `latest_step`, `best_step` and `restore` without a step do if that step has a
            record of damage: "refuse" raises, "skip" uses the next undamaged step. With "skip",
            damaged steps above the newest undamaged one do not count as steps of this manager, and
            its next save supersedes them.

    Raises:
        PolicyError: an option asks for something that a run can't do, or `damaged` is neither
            "refuse" nor "skip".
        InvalidURIError: `directory` is malformed, neither on a disk nor in GCS, or holds plain
            Orbax checkpoints.
        StorageError: the run's records can't be read, or the store does not respond.
    """

    def __init__(
        self,
        directory: StoreURI | str | os.PathLike[str],
        checkpointers: Any = None,
        options: ocp.CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
        *,
        grace_seconds: float = 0.0,
        damaged: OnDamage = "refuse",
    ) -> None:
        self._options = options or ocp.CheckpointManagerOptions()
        check_options(self._options)
        check_on_damage(damaged)
        self._damaged = damaged
        if handler_registry is not None:
            raise PolicyError(
                "a registry of handlers has no meaning for a Cairn run",
                path="handler_registry",
                expected="the arguments of items in save(args=...) and restore(args=...)",
                found=type(handler_registry).__name__,
                next_step="Leave it out; StandardSave and the like say what an item is.",
            )
        self._item_kinds = _kinds(checkpointers, item_names, item_handlers)
        self._kinds = self._item_kinds.by_name
        self._is_single: bool | None = None  # unknown until the first save, as with Orbax
        if self._kinds:
            self._is_single = False
        elif self._kinds is None and not (checkpointers is None and item_handlers is None):
            self._is_single = True
        self._metadata = dict(metadata or {})
        self._has_metadata = False
        self._checkpointer = Checkpointer(directory)
        self._uri = self._checkpointer.uri
        self._run = Run(self._uri)
        self._saves = save_policy(self._options)
        self._keeps = preservation_policy(self._options)
        self._retention = RunRetention(
            self._run, self._delete_doomed, by=self._checkpointer.writer_id
        )
        self._grace = grace_seconds
        self._begun: SaveHandle | None = None
        self._going: frozenset[int] = frozenset()  # steps to delete after the save begun last
        self._known: dict[int, PolicyStep] = {}
        self._leaving: set[int] = set()  # steps among `_known` that are not listed
        self._doomed: deque[PolicyStep] = deque()  # steps that process 0 is to delete
        # For each step: its number, whether it is deleted, and damage found since ("" if none).
        self._outcomes: deque[tuple[int, bool, str]] = deque()
        self._callback = getattr(self._options.async_options, "post_finalization_callback", None)
        self._callback_failure: _Failure | None = None
        self._failure: _Failure | None = None  # that of the save begun last
        self._ending = threading.Lock()
        self.reload()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- which steps there are -----------------------------------------------------------------

    @property
    def directory(self) -> epath.Path:
        """Folder of the run; docs/explanation/store-layout.md describes what is in it."""
        return epath.Path(self._uri.orbax_path())

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Return the numbers of all steps, lowest first; a step that is being saved is included.

        Steps that will be deleted once that save is durable are left out. If they are not deleted
        after all, for example because the save failed, they are listed again.

        Args:
            read: whether to read the steps from the store again, as `reload` does.
        """
        if read:
            self.reload()
        return [step.step for step in self._steps()]

    def latest_step(self) -> int | None:
        """Return the highest step number, perhaps of a step being saved; None if there is no step.

        Raises:
            StepDamagedError: that step has a record of damage, and the manager was not made with
                `damaged="skip"`, or no step is undamaged.
        """
        steps = self._steps()
        return self._usable(steps[-1], steps[::-1]).step if steps else None

    def best_step(self) -> int | None:
        """Return the best step by `best_fn`, without it the latest; None if there is no such step.

        Steps without metrics are never the best, and NaN is the worst value there is.

        Raises:
            StepDamagedError: that step has a record of damage, and the manager was not made with
                `damaged="skip"`, or no step is undamaged.
        """
        if self._options.best_fn is None:
            return self.latest_step()
        rank = metric_rank(self._options)
        with_metrics = [step for step in self._steps() if step.metrics is not None]
        if not with_metrics:
            return None
        worst_first = self._options.best_mode == "min"
        ranked = sorted(with_metrics, key=lambda step: rank(step.metrics), reverse=worst_first)
        return self._usable(ranked[-1], ranked[::-1]).step

    def _usable(self, choice: PolicyStep, others: Sequence[PolicyStep]) -> PolicyStep:
        """Return `choice`; if it is damaged and may be skipped, the first undamaged other.

        Raises:
            StepDamagedError: `choice` is damaged, and it may not be skipped or no other is left.
        """
        if not choice.damage:
            return choice
        sound = next((step for step in others if not step.damage), None)
        if sound is not None and self._damaged == "skip":
            return sound
        raise StepDamagedError(
            "the step is damaged",
            path=f"{self._uri}/steps/{choice.step}",
            expected="a step whose last verification found what was saved",
            found=choice.damage,
            next_step="Restore its files from a backup and verify it again."
            if sound is None
            else f"The next sound step is {sound.step}: restore that by its number, or make the "
            "manager with damaged='skip'.",
        )

    def reload(self) -> None:
        """Read the steps from the store again; all processes must call this.

        Raises:
            StorageError: the run's records can't be read, or the store does not respond.
        """
        self._agree_on_deleted()
        saving = self._begun if self.is_saving_in_progress() else None
        kept = None if saving is None else self._known.get(saving.step)
        steps = [
            PolicyStep(step, from_rfc3339(created), metrics or None, attempt, damage)
            for step, created, metrics, attempt, damage in agreement.agree(self._stored_steps)
        ]
        sound = [step for step in steps if not step.damage]
        if self._damaged == "skip" and sound and sound[-1] is not steps[-1]:
            cut = steps.index(sound[-1]) + 1
            if not self._known:  # later reloads must not change where the saves go on
                record_skipped(self._uri, [(step.step, step.attempt) for step in steps[cut:]])
            steps = steps[:cut]
        self._known = {step.step: step for step in steps}
        if kept is not None:
            self._known[kept.step] = kept

    def _stored_steps(self) -> list[tuple[int, str, dict[str, Any], int, str]]:
        if not self._run.has_saved():
            return []
        steps = []
        for fact in step_facts(self._run):
            damage = known_damage(self._run, fact.key) if fact.damaged else None
            text = "" if damage is None else damage.text()
            steps.append((fact.step, rfc3339(fact.created), dict(fact.metrics), fact.attempt, text))
        return steps

    def _steps(self) -> list[PolicyStep]:
        return [self._known[step] for step in sorted(self._known.keys() - self._leaving)]

    # -- saving --------------------------------------------------------------------------------

    def reached_preemption(self, step: int) -> bool:
        """Return True if JAX's preemption service asks for a save; all processes must call this."""
        return bool(ocp.utils.reached_preemption(step))

    def should_save(self, step: int) -> bool:
        """Return True if `save` would save this step, by Orbax's policies. All must call this."""
        if self._options.read_only:
            return False
        steps = self._steps()
        if steps and steps[-1].step >= step:
            return False
        checks = self._options.enable_should_save_is_saving_in_progress_check
        context = policies.DecisionContext(
            is_saving_in_progress=checks and self.is_saving_in_progress(),
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        now = PolicyStep(step, datetime.now(UTC), None)
        return bool(self._saves.should_save(now, steps, context=context))

    @call_of_save()
    def save(
        self,
        step: SupportsIndex,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save a step if it is due; when this returns, the arrays may be donated or deleted.

        All processes of a job must call this.

        Args:
            step: the step's number.
            items: if there is no `args`: one tree, or trees by name.
            save_kwargs: if there is no `args`: further arguments of each item, such as
                `save_args`.
            metrics: numbers by name.
            force: whether to save a step that is not due.
            args: `StandardSave`, `PyTreeSave`, `JsonSave`, `ArraySave`, `JaxRandomKeySave`,
                `NumpyRandomKeySave` or Grain's `CheckpointSave`, or a `Composite` of them by name.
            custom_metadata: JSON to keep with the step.

        Returns:
            True if the save of the step has begun; False if it is not due, or the manager is
            read-only.

        Raises:
            StepExistsError: `force` is given, and this step exists (then it is also Orbax's
                `StepAlreadyExistsError`), or a later one does.
            UnsupportedFormatError: an item has an unsupported kind or a name that the manager does
                not have, or a value that must be JSON is not.
            SaveError: the previous save failed, and no call of this thread has raised its error
                yet; this save did not start.
            StorageError: for the other reasons of `Checkpointer.save`.
        """
        number = check_step(step)
        if args is None:
            if items is None:
                raise PolicyError("nothing to save", path="args", expected="items", found="None")
            args = legacy_args(items, save_kwargs, self._item_kinds, saving=True)
        if self._options.read_only:
            logger.warning("%s: read_only, step %d is not saved", self._uri, number)
            return False
        if not force and not self.should_save(number):
            return False
        to_save = agreement.all_or_none(save_items, args, self._kinds, self._is_single)
        self._settle()
        if number in self._known:
            raise _StepExists(
                f"step {number} was saved already",
                path=self._uri,
                expected=f"a step above {self.all_steps()[-1]}",
                found=str(number),
                next_step="Save a later step, or give the run another name.",
            )
        if self._options.best_fn is not None and not metrics:
            logger.warning("%s: step %d has no metrics for best_fn", self._uri, number)
        created = datetime.now(UTC)
        # Policies may call the caller's functions: do it on one process, before anything begins.
        numbers, when, doomed = agreement.agree(self._decide, number, created, metrics)
        meta = as_meta(
            to_save,
            custom_metadata=dict(custom_metadata or {}),
            metadata=self._run_metadata(),
        )
        handle = self._checkpointer.save(
            number,
            to_save.trees,
            meta=meta,
            iterators=to_save.iterators,
            metrics=None if self._options.prevent_write_metrics else numbers,
        )
        self._has_metadata, self._is_single = True, to_save.single
        self._failure = self._callback_failure = None
        going = [self._known[gone] for gone in doomed]
        self._known[number] = PolicyStep(number, from_rfc3339(when), numbers, handle.attempt)
        self._begun, self._going = handle, frozenset(doomed)
        self._leaving |= self._going
        handle.when_done(lambda ended: self._after(ended, going))
        if not self._options.enable_async_checkpointing:
            self.wait_until_finished()
        return True

    def _decide(
        self, step: int, created: datetime, metrics: Mapping[str, Any] | None
    ) -> tuple[dict[str, float] | None, str, list[int]]:
        """Return the metrics to store, the time of the save, and the steps to delete after it."""
        annotation = Annotation.of(None, metrics)
        numbers = None if annotation is None else annotation.metrics
        doomed: list[int] = []
        if self._keeps is not None:
            # Damaged steps stay, and do not count as kept. The new step stays.
            new = PolicyStep(step, created, numbers)
            steps = [*(stored for stored in self._steps() if not stored.damage), new]
            kept = self._keeps.should_preserve(steps, context=policies.PreservationContext())
            pairs = zip(steps, kept, strict=True)
            doomed = [other.step for other, keep in pairs if not keep and other is not new]
        return numbers, rfc3339(created), doomed

    def is_saving_in_progress(self) -> bool:
        """Return True if a save is under way in this process."""
        begun = self._begun  # another thread may set it to None
        return begun is not None and not begun.done

    def check_for_errors(self) -> None:
        """Raise the error of a failed save, unless this thread has raised it already.

        Waits neither for a save under way nor for other processes.

        Raises:
            SaveError: the last save failed.
            Exception: what `post_finalization_callback` raised; the step is saved.
        """
        if not self.is_saving_in_progress():
            self._end(self._checkpointer.wait_until_finished)
            self._raise_callback_error()

    def wait_until_finished(self) -> None:
        """Wait until no save and no deletion is under way; all processes must call this.

        Raises:
            SaveError: the last save failed, and no call of this thread has raised that yet.
            Exception: what `post_finalization_callback` raised; the step is saved.
        """
        self._settle()
        self._retention.close()
        self._agree_on_deleted()

    def close(self) -> None:
        """Wait for saves and deletions under way, then release the run for other writers.

        Raises:
            SaveError: the last save failed, and no call of this thread has raised that yet.
            Exception: what `post_finalization_callback` raised; the step is saved.
        """
        try:
            self.wait_until_finished()
        finally:
            self._checkpointer.close()

    def _settle(self) -> None:
        """Wait for the save under way; raise its failure on all processes, or on none."""
        agreement.all_or_none(self._end, self._checkpointer.wait_until_finished)
        self._agree_on_deleted()
        if self._callback is not None:
            try:
                agreement.all_or_none(self._raise_callback_error)
            except Exception:
                self._leaving -= self._going  # on all processes, until deletions are reported
                raise

    def _end(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except Exception:
            self._note_end()
            if self._failure is not None:
                self._failure.meet()
            raise
        self._note_end()
        if self._failure is not None:
            self._failure.raise_first()

    def _note_end(self) -> None:
        """Record that the save begun last has ended; called by any thread that notices it."""
        with self._ending:
            if self._begun is None or not self._begun.done:
                return
            ended, self._begun = self._begun, None
            if ended.state is not SaveState.DURABLE:
                self._known.pop(ended.step, None)
                self._leaving -= self._going
                self._failure = _Failure(ended.wait)

    def _raise_callback_error(self) -> None:
        if self._callback_failure is not None:
            self._leaving -= self._going
            self._callback_failure.raise_first()

    def _after(self, handle: SaveHandle, doomed: list[PolicyStep]) -> None:
        """Call the callback and start the deletions, in the background, once a save has ended."""
        if handle.state is not SaveState.DURABLE:
            return
        if self._callback is not None:
            try:
                self._callback()
            except Exception as exc:  # as with Orbax, nothing is deleted then
                self._callback_failure = _Failure(partial(_raise, exc))
                return
        if doomed and exchange.is_primary():
            self._doomed += doomed
            self._retention.start()

    # -- what is kept --------------------------------------------------------------------------

    def delete(self, step: SupportsIndex) -> None:
        """Delete a step; all processes must call this. Its bytes are deleted in the background.

        Raises:
            StepNotFoundError: there is no such step.
            StepInUseError: an alias names the step, or a job needs it to continue.
        """
        number = check_step(step)
        if self._options.read_only:
            logger.warning("%s: read_only, step %d is not deleted", self._uri, number)
            return
        self._settle()
        if number not in self.all_steps():
            raise self._no_step(number)
        agreement.agree(self._delete, self._known[number])
        self._known.pop(number)
        if exchange.is_primary():
            self._retention.start()

    def _delete_doomed(self) -> RetentionOutcome:
        """Delete the steps that are to be deleted; runs in a background thread of process 0."""
        deleted, in_use, errors = [], {}, []
        is_outdated = self._note_damage()
        while self._doomed:
            step, gone = self._doomed.popleft(), False
            if is_outdated:  # chosen before the damage was known: the next save chooses again
                self._outcomes.append((step.step, gone, ""))
                continue
            try:
                self._delete(step)
                deleted.append((step.step, step.attempt))
                gone = True
            except StepNotFoundError:
                gone = True  # another program has deleted it
            except StepInUseError as exc:
                in_use[step.step, step.attempt] = str(exc)  # an alias names it by now: it stays
            except StorageError as exc:
                errors.append(exc)
            finally:
                self._outcomes.append((step.step, gone, ""))
        return RetentionOutcome((), tuple(deleted), in_use, tuple(errors))

    def _note_damage(self) -> bool:
        """Record new damage of steps for all processes; return True if there is any."""
        steps = {(step.step, step.attempt): step for step in list(self._known.values())}
        new = [key for key in sorted(doubtful_steps(self._run, steps)) if not steps[key].damage]
        for key in new:
            damage = known_damage(self._run, key)
            text = "what is noted of it can't be read" if damage is None else damage.text()
            self._outcomes.append((key[0], False, text))
        return bool(new)

    def _delete(self, step: PolicyStep) -> None:
        """Delete a step; process 0 calls this.

        Raises:
            StepNotFoundError: there is no such step, or it was saved again in another attempt.
        """
        info = self._run.step(step.step)
        if info.attempt != step.attempt:
            raise StepNotFoundError(
                "the step was saved anew since the run was looked at",
                path=self._run.step_uri(info),
                expected=f"step {step.step} of attempt {step.attempt}",
                found=f"that of attempt {info.attempt}",
                next_step="Call reload(), and delete it then if it is to go.",
            )
        by = self._checkpointer.writer_id
        delete_step(self._run, info, by=by, reason="CheckpointManagerOptions", grace=self._grace)

    def _agree_on_deleted(self) -> None:
        """Update all processes' lists of steps by the outcomes of process 0's deletions."""
        if self._keeps is None:
            return
        for step, gone, damage in agreement.agree(self._take_outcomes):
            self._leaving.discard(step)
            if gone:
                self._known.pop(step, None)
            elif damage and step in self._known:
                self._known[step] = replace(self._known[step], damage=damage)

    def _take_outcomes(self) -> list[tuple[int, bool, str]]:
        """Return and clear the outcomes of deletions; another thread may add some meanwhile."""
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    # -- restoring -----------------------------------------------------------------------------

    def restore(
        self,
        step: SupportsIndex | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: StoreURI | str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Any:
        """Wait for a save under way, then restore a step and check its digests.

        All processes must call this.

        Args:
            step: number of the step; None for the latest.
            items: if there is no `args`: a tree to restore into, or trees by name.
            restore_kwargs: if there is no `args`: further arguments of each item, such as
                `restore_args`.
            directory: folder of another run, to restore from that.
            args: `StandardRestore`, `PyTreeRestore`, `JsonRestore` and the other counterparts of
                the arguments of `save`, or a `Composite` of them by name. Without `args`, and for a
                name with None, trees are restored as saved, as plain dicts and lists. Iterators
                are restored only if `args` names them.

        Returns:
            The item; or a `Composite` of the items, if they have names.

        Raises:
            StepDamagedError: `step` is None, and the latest step has a record of damage; the
                manager was not made with `damaged="skip"`, or no step is undamaged.
            StepNotFoundError: the step does not exist, or the run has no steps (this is a
                `FileNotFoundError` too).
            TreeMismatchError: leaves are missing or unexpected, or their shape, dtype or sharding
                does not fit; all are listed.
            IteratorMismatchError: an iterator can't take the position that the step has.
            UnsupportedFormatError: a run does not support the arguments, or the processes call this
                with different steps or items.
            StorageError: for the other reasons of `cairn.load`.
        """
        if directory is not None and parse_uri(directory) != self._uri:
            read_only = ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0)
            with CheckpointManager(directory, options=read_only, damaged=self._damaged) as other:
                other._kinds, other._item_kinds = self._kinds, self._item_kinds
                return other.restore(step, items, restore_kwargs, None, args)
        self._settle()
        info = self._listed(step)
        # An error on one process is raised on all, so that none waits for it forever.
        request = agreement.all_or_none(
            *(self._restore_request, info, items, restore_kwargs, args),
            same=_RestoreRequest.same,
            error=UnsupportedFormatError,
        )
        trees: dict[str, Any] = {}
        if request.trees or request.iterators:
            gaps = {f"{name}/{path}" for name, tree in request.trees.items() for path in tree.gaps}
            trees = load(
                self._uri,
                {name: target.tree for name, target in request.trees.items()},
                step=info.step,
                only=(lambda path: path not in gaps) if gaps else None,
                cast=True,
                iterators=request.iterators,
            )
        restored = {**trees, **request.json, **request.iterators}
        for name, finish in request.finish.items():
            restored[name] = finish(restored[name])
        in_order = {name: restored[name] for name in request.names}
        if request.single and len(in_order) == 1:
            return next(iter(in_order.values()))
        return ocp.args.Composite(**in_order)

    def _restore_request(
        self, info: StepInfo, items: Any, restore_kwargs: Any, args: Any
    ) -> "_RestoreRequest":
        stored = StoredItems(self._run, info)
        if args is None and (items is not None or restore_kwargs is not None):
            args = legacy_args(items, restore_kwargs, self._item_kinds, saving=False)
        kinds = stored.kinds
        if args is None and stored.single and stored.unnamed is not None:
            kinds = {stored.unnamed: kinds[stored.unnamed]}  # not the metrics of adopted steps
        # A manager of named items asks for their names, as Orbax's does.
        by_item = restore_items(args, kinds, single=None if self._kinds else stored.unnamed)
        left = [name for name in stored.iterators if name not in by_item]
        is_unasked = args is None or not {*left}.isdisjoint(self._kinds or ())
        if left and is_unasked and exchange.is_primary():
            logger.warning(
                "%s: step %d has the position of %s, which is not restored: give args with Grain's "
                "CheckpointRestore of the iterator.",
                self._uri,
                info.step,
                ", ".join(map(repr, left)),
            )
        finish: dict[str, Callable[[Any], Any]] = {}
        for name, item_args in by_item.items():
            if kinds[name] == "numpy state":
                finish[name] = from_json
            elif kinds[name] in ("array", "jax key"):
                finish[name] = itemgetter(VALUE)
                by_item[name] = as_tree_args(item_args)
            elif kinds[name] == "tree":
                finish[name] = partial(in_layouts, item_args=item_args)
        return _RestoreRequest(
            names=list(by_item),
            trees={
                name: tree_target(
                    item_args,
                    stored.leaves(name),
                    stored.texts(name),
                    name=name,
                    array_names=stored.array_names(name),
                    variables=stored.variables(name),
                    containers=partial(stored.containers, name),
                    metadata=partial(stored.placements, name),
                )
                for name, item_args in by_item.items()
                if kinds[name] in ("tree", "array", "jax key")
            },
            json={name: stored.json[name] for name in by_item if name in stored.json},
            iterators={
                name: item_args.item
                for name, item_args in by_item.items()
                if kinds[name] == "iterator"
            },
            finish=finish,
            single=stored.single if args is None else not isinstance(args, ocp.args.Composite),
        )

    def metrics(self, step: SupportsIndex) -> dict[str, Any] | None:
        """Return the metrics of a step; None if it has none.

        Raises:
            StepNotFoundError: there is no such step.
        """
        number = check_step(step)
        if number not in self._known:
            raise self._no_step(number)
        return self._known[number].metrics

    def item_metadata(self, step: SupportsIndex) -> Any:
        """Return shapes, dtypes and shardings of a step's items, as Orbax does.

        Raises:
            StepNotFoundError: there is no such step.
        """
        return self.metadata(step).item_metadata

    def metadata(self, step: SupportsIndex | None = None) -> Any:
        """Return Orbax's `StepMetadata` of a step, or, without a step, the run's `RootMetadata`.

        Raises:
            StepNotFoundError: there is no such step.
        """
        if step is None:
            return ocp.metadata.RootMetadata(custom_metadata=dict(self._run_metadata()))
        info = self._listed(step)
        stored = StoredItems(self._run, info)
        items: Any = {
            name: stored.metadata(name) if kind in ("tree", "array", "jax key") else None
            for name, kind in stored.kinds.items()
        }
        saved = int(from_rfc3339(info.created or "").timestamp() * 1e9)
        own = self._known.get(info.step)  # not one that another job has saved since
        metrics = step_facts(self._run, [info])[0].metrics if own is None else own.metrics
        return ocp.metadata.StepMetadata(
            item_handlers=None,
            item_metadata=items[stored.unnamed] if stored.single else ocp.args.Composite(**items),
            metrics=dict(metrics or {}),
            custom_metadata=stored.custom_metadata(),
            commit_timestamp_nsecs=saved,
        )

    def _run_metadata(self) -> dict[str, Any]:
        """Return the run's metadata: as with Orbax, that of the run's first manager."""
        latest = max(self.all_steps(), default=None)
        if not self._has_metadata and latest is not None:
            self._metadata = agreement.agree(self._stored_metadata, latest)
            self._has_metadata = True
        return self._metadata

    def _stored_metadata(self, step: int) -> dict[str, Any]:
        """Return the run's metadata that this step stores; the manager's own if it stores none."""
        try:
            info = self._run.step(step)
            return StoredItems(self._run, info).run_metadata() or self._metadata
        except StorageError as exc:  # a damaged step must not keep the next from being saved
            logger.warning("%s: the metadata of the run can't be read: %s", self._uri, exc)
            return self._metadata

    def _listed(self, step: SupportsIndex | None) -> StepInfo:
        number = agreement.all_or_none(
            self._numbered,
            step,
            same=lambda number: {"step": number},
            error=UnsupportedFormatError,
        )

        def find() -> StepInfo:
            info = self._run.step(number)
            if step is not None or known_damage(self._run, (info.step, info.attempt)) is None:
                return info
            # The latest has been found damaged since.
            return resolve_step(self._run, CheckpointRef(run=self._uri), damaged=self._damaged)

        info = agreed_step(find)
        if step is None and info.step < number:
            above = [
                (other.step, other.attempt) for other in self._steps() if other.step > info.step
            ]
            record_skipped(self._uri, above)
        return info

    def _numbered(self, step: SupportsIndex | None) -> int:
        number = max(self.all_steps(), default=None) if step is None else check_step(step)
        if number is None:
            raise self._no_step(None)
        return number

    def _no_step(self, step: int | None) -> StepNotFoundError:
        latest = ", ".join(map(str, self.all_steps()[-5:]))
        return StepNotFoundError(
            "there is no such step",
            path=self._uri,
            expected="a step" if step is None else f"step {step}",
            found=f"steps up to {latest}" if latest else "no steps",
            next_step="Give one of these." if latest else "Save one first.",
        )


def _kinds(checkpointers: Any, item_names: Sequence[str] | None, item_handlers: Any) -> Kinds:
    """Return the kinds of items that the manager's arguments name.

    Raises:
        PolicyError: more than one of the arguments names items.
        UnsupportedFormatError: a handler is for an unsupported kind of item.
    """
    sources = {
        "checkpointers": checkpointers is not None,
        "item_names": bool(item_names) and not isinstance(item_handlers, Mapping),
        "item_handlers": item_handlers is not None,
    }
    twice = [name for name, is_given in sources.items() if is_given]
    if len(twice) > 1:
        raise PolicyError(
            "the items are told twice",
            path=", ".join(twice),
            expected="one of these",
            found=f"{len(twice)}",
            next_step="Leave the others out; with args= none is needed.",
        )
    handlers = checkpointers if checkpointers is not None else item_handlers
    if isinstance(handlers, Mapping):
        return Kinds(kinds_of({**dict.fromkeys(item_names or ()), **handlers}))
    if handlers is not None:
        return Kinds(None, kinds_of({SINGLE_ITEM: handlers})[SINGLE_ITEM])
    return Kinds(None if item_names is None else kinds_of(dict.fromkeys(item_names)))


def _raise(error: Exception) -> None:
    raise error
