"""Import of the checkpoints in a plain Orbax folder: a run lists them where they are.

Nothing is written, renamed or locked in the folder. Each step is read once; the run stores its
leaves' names, and the checksums and digests of its files. The run is beside the folder or at the
address that the caller chooses. A second import adds new steps, and reports steps that the folder's
owner has removed or changed.
"""

import contextlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, SupportsIndex

import google_crc32c

from cairn.storage.errors import (
    CorruptionError,
    InvalidURIError,
    NotACheckpointError,
    NotFoundError,
    PreconditionFailedError,
    RunNotFoundError,
    StoreUnavailableError,
    TreeMismatchError,
    UnsupportedFormatError,
)
from cairn.storage.orbax_import.adopted_steps import look_again
from cairn.storage.orbax_import.layouts import (
    FolderContents,
    find_checkpoints,
    is_among_checkpoints,
    link_problem,
    plain_items,
)
from cairn.storage.orbax_import.model_map import ModelMap
from cairn.storage.orbax_import.step_reading import read_step, with_model
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.attempts import find_superseded
from cairn.storage.runs.records.layout import MANIFESTS, check_run_name, check_step, step_dir
from cairn.storage.runs.records.manifest import Manifest, ObjectRecord
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.runs.writer import Writer, default_writer_id
from cairn.storage.store.checksums import ContentSum
from cairn.storage.store.clock import Clock, rfc3339, utc_now
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["Adoption", "adopt", "check_adoption"]

_SUFFIX: Final = ".cairn"
_WRITER: Final = "adopt:"
_STORES: Final = ("file", "gs")
_METRICS: Final = "metrics"
_OTHER: Final = "neither arrays nor JSON; its files belong to the step"
_MISSING: Final = "is not there, though Orbax names it"
_ABSENT: Final = "not stored, and are zeros unless they were lost"
_NAMED: Final = 5
_REFUSED: Final = (
    CorruptionError,
    InvalidURIError,
    NotACheckpointError,
    NotFoundError,
    TreeMismatchError,
    UnsupportedFormatError,
)
"""Errors that exclude only one step from an import; the other steps are still imported."""


@dataclass(frozen=True)
class Adoption:
    """Outcome of an import.

    Attributes:
        run: the run that lists the steps.
        adopted: new steps, which the run lists from now on.
        kept: steps that the run listed before, and that have not changed since.
        gone: steps that the run lists, but that the folder's owner has removed.
        problems: a line for each step that the owner has changed, or that could not be imported; it
            begins with the name of the step's folder.
        left: a line for each entry that is no step or an unfinished one, for each step that was
            deleted from the run, and for parts of steps that are missing, not imported, or were
            added later.
    """

    run: StoreURI
    adopted: tuple[int, ...]
    kept: tuple[int, ...]
    gone: tuple[int, ...]
    problems: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems


def adopt(
    folder: StoreURI | str | os.PathLike[str],
    run: StoreURI | str | os.PathLike[str] | None = None,
    *,
    step: SupportsIndex | None = None,
    model: ModelMap | None = None,
    by: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock: Clock = utc_now,
) -> Adoption:
    """List the checkpoints of a plain Orbax folder as steps of a run. The folder is not changed.

    Every file and every array is read once. The steps can then be listed, promoted, verified,
    loaded, exported and forked like any other; deleting one removes it from the run alone. A job
    that saves to the run writes into the run's own folder, after the imported steps. Only one
    process of a job may call this.

    Args:
        folder: a folder of checkpoints, such as a CheckpointManager's, or a single checkpoint.
        run: address of the run, which is created if it does not exist and a step can be listed;
            by default beside the folder, with the folder's name and ".cairn".
        step: number of the step, if the folder is a single checkpoint; by default the number in the
            folder's name, or 0.
        model: which leaves belong to a model of a known family. Each step then has an item "model"
            that can be exported; no leaf of the model may be missing. See `cairn.model_map`.
        by: id of the importer; by default this user on this machine. An import with the same id as
            an interrupted one continues it at once, without waiting for its lease to expire.
        progress: called after each new step with (number of new steps read so far, number of all
            new steps).
        clock: returns the current time in UTC.

    Raises:
        NotFoundError: there is no such folder.
        NotACheckpointError: there is no checkpoint in the folder; the message names what is there.
        InvalidURIError: the folder is a run or inside one; the folder and the new run would be
            inside one another; the default name is no name of a run; `step` is passed for a folder
            of several checkpoints; or an address is neither on a disk nor in Google Cloud Storage.
        PreconditionFailedError: `run` exists, and is not an import of this folder, or one with
            another model.
        LeaseHeldError: a job or another import is writing to the run.
        FencedError: another import with the same `by` has begun meanwhile.
        StoreCheckError: the store of the run does not keep the promises that runs depend on.
        StoreUnavailableError: a store does not answer, or the run's folder can't be written.
    """
    source = parse_uri(folder)
    target = _beside(source) if run is None else parse_uri(run)
    contents, there = _looked(source, target, step, clock)
    refusals = [] if there else _refusals(contents, model)
    if refusals and len(refusals) == len(contents.steps):  # a run without steps would help nobody
        problems = sorted([*refusals, *contents.problems])
        return Adoption(target, (), (), (), tuple(problems), tuple(sorted(contents.left)))
    imported = there or _made(source, target, is_default=run is None, clock=clock)
    adopted = []
    with ExitStack() as stack:
        writer = Writer(imported, writer=f"{_WRITER}{by or default_writer_id()}", clock=clock)
        stack.callback(writer.close)
        if _sorted_out(imported, imported.steps(), contents)[0]:
            writer.begin()  # before new steps are listed: another import may run too
        listed = imported.steps()
        before = look_again(imported, listed, model)
        new, refused, left = _sorted_out(imported, listed, contents)
        if step is not None:
            number = check_step(step)
            refused += [
                f"{source.name}: adopted as step {info.step}, not {number}; "
                "adopt it into another run"
                for info in listed
                if info.source == str(source) and info.step != number
            ]
        problems = [*before.changed, *refused]
        left += before.added
        for count, (number, uri) in enumerate(new.items(), 1):
            try:
                left += _adopt_step(imported, writer, number, uri, model, clock)
                adopted.append(number)
            except _REFUSED as exc:
                problems.append(f"{uri.name}: {exc}")
            if progress is not None:
                progress(count, len(new))
    imported.objects.sync(MANIFESTS)  # also those of kept steps
    return Adoption(
        imported.uri,
        tuple(adopted),
        tuple(before.kept),
        tuple(before.gone),
        tuple(sorted(problems)),
        tuple(sorted(left)),
    )


def check_adoption(
    folder: StoreURI | str, run: StoreURI | str, *, step: SupportsIndex | None = None
) -> None:
    """Raise if an import would be refused before it reads a step; nothing is written.

    Args:
        folder: as in `adopt`.
        run: address of the run, which need not exist.
        step: as in `adopt`.

    Raises:
        NotFoundError, NotACheckpointError, InvalidURIError, PreconditionFailedError,
        StoreUnavailableError: as in `adopt`, except errors of the import itself.
    """
    _looked(parse_uri(folder), parse_uri(run), step, utc_now)


def _looked(
    source: StoreURI, target: StoreURI, step: SupportsIndex | None, clock: Clock
) -> tuple[FolderContents, Run | None]:
    """Return the content of the folder, and the run that imports it or None; raise as `adopt`."""
    _refuse_stores(source, target)
    _refuse_overlap(source, target)
    contents = _checkpoints(source, target, None if step is None else check_step(step))
    return contents, _there(source, target, contents, clock)


def _checkpoints(source: StoreURI, run: StoreURI, step: int | None) -> FolderContents:
    """Return the content of the folder; it is empty if the owner removed all imported steps."""
    try:
        return find_checkpoints(source, step)
    except (NotFoundError, NotACheckpointError):
        with contextlib.suppress(RunNotFoundError, StoreUnavailableError):
            if _adopts(Run.open(run), source):
                return FolderContents({})
        raise


def _sorted_out(
    run: Run, listed: list[StepInfo], contents: FolderContents
) -> tuple[dict[int, StoreURI], list[str], list[str]]:
    """Return new steps, a line per step that can't be imported, and a line per other entry."""
    sources = {info.source for info in listed}
    numbers = {info.step for info in listed}
    deleted = {number for number, _ in run.trashed()}
    # Attempts of imports don't supersede: with two imports at once, the later attempt may begin
    # before steps of the earlier one.
    went_back = (start for start in run.attempts() if not start.writer.startswith(_WRITER))
    is_superseded = find_superseded(went_back, run.published())
    superseded = {step for step, attempt in run.published() if is_superseded(step, attempt)}
    superseded -= numbers
    latest = max(numbers, default=-1)
    new, refused, left = {}, list(contents.problems), list(contents.left)
    names = {parse_uri(source).name for source in sources if source is not None}
    refused += [link_problem(*link) for link in contents.elsewhere.items() if link[0] not in names]
    for number, uri in contents.steps.items():
        if str(uri) in sources:
            continue
        if number in deleted:
            left.append(f"{uri.name}: deleted from the run")
        elif number in superseded:
            left.append(f"{uri.name}: superseded in the run, which went back before it")
        elif number <= latest:
            refused.append(
                f"{uri.name}: the run goes on to step {latest}; adopt it into another run"
            )
        else:
            new[number] = uri
    return new, refused, left


def _beside(folder: StoreURI) -> StoreURI:
    if not folder.path:
        raise InvalidURIError(
            "no place beside this folder",
            path=folder,
            expected="a folder in a bucket or on a disk",
            found="a bucket",
            next_step="Say where the run is to be.",
        )
    try:
        return folder.parent / check_run_name(f"{folder.name}{_SUFFIX}")
    except InvalidURIError as exc:
        raise InvalidURIError(
            "no run can have this folder's name",
            path=folder,
            expected=exc.expected,
            found=repr(folder.name),
            next_step="Say where the run is to be.",
        ) from exc


def _refuse_stores(*folders: StoreURI) -> None:
    for folder in folders:
        if folder.scheme not in _STORES:
            raise InvalidURIError(
                "no store for an adoption",
                path=folder,
                expected="a folder on a disk, or in a bucket of Google Cloud Storage",
                found=f"{folder.scheme}://",
                next_step="Copy the folder to one of these.",
            )


def _refuse_overlap(source: StoreURI, target: StoreURI) -> None:
    names = [f"{uri}/" for uri in (source, target)]
    if source.scheme == target.scheme == "file":  # with symbolic links resolved
        names = [f"{os.path.realpath(uri.local_path)}/" for uri in (source, target)]
    if names[0].startswith(names[1]) or names[1].startswith(names[0]):
        raise InvalidURIError(
            "not a place for this run",
            path=target,
            expected=f"a folder outside of {source}, and not around it",
            found="one in it, or around it",
            next_step="Choose a name beside the folder.",
        )


def _there(
    source: StoreURI, target: StoreURI, contents: FolderContents, clock: Clock
) -> Run | None:
    """Return the run that imports the folder; None if it does not exist yet."""
    try:
        run = Run.open(target, clock=clock)
    except RunNotFoundError:
        beside = target.parent == source.parent
        if beside and source in contents.steps.values() and is_among_checkpoints(source):
            raise InvalidURIError(
                "no place beside this checkpoint",
                path=source,
                expected="a folder in which Orbax would not look for checkpoints",
                found="a step, or other checkpoints beside it",
                next_step="Say where the run is to be, or adopt the folder that it lies in.",
            ) from None
        return None
    return _refuse_another(run, source)


def _made(source: StoreURI, target: StoreURI, *, is_default: bool, clock: Clock) -> Run:
    """Create and return the run, or return the one that another import created meanwhile."""
    try:
        created = Run.create(target, adopts=str(source), clock=clock)
    except StoreUnavailableError as exc:
        if not is_default:
            raise
        raise StoreUnavailableError(
            "no run can be made beside this folder",
            path=target,
            expected="a place that can be written",
            found=str(exc),
            next_step="Say where the run is to be.",
        ) from exc
    return _refuse_another(created, source)


def _refusals(contents: FolderContents, model: ModelMap | None) -> list[str]:
    """Return a line for each step until one whose metadata shows no reason to refuse it."""
    refusals = []
    for uri in contents.steps.values():
        try:
            plain = plain_items(uri).plain
            if model is not None:
                with_model(uri, plain, model)
        except _REFUSED as exc:
            refusals.append(f"{uri.name}: {exc}")
        else:
            break
    return refusals


def _refuse_another(run: Run, source: StoreURI) -> Run:
    """Return the run if it is an import of the folder; raise PreconditionFailedError if not."""
    if not _adopts(run, source):
        info = run.info()
        what = "nothing" if info.adopts is None else info.adopts
        raise PreconditionFailedError(
            "another run is there",
            path=run.uri,
            expected=f"no run, or one that adopts {source}",
            found=f"one that adopts {what}",
            next_step="Say where the run is to be.",
            current=info,
        )
    return run


def _adopts(run: Run, folder: StoreURI) -> bool:
    """Return True if a run is an import of the folder; if its record is lost, its steps decide."""
    imported_from = run.info().adopts
    if imported_from is not None:
        return imported_from == str(folder)
    sources = [parse_uri(info.source) for info in run.steps() if info.source is not None]
    return bool(sources) and all(folder in (source, source.parent) for source in sources)


def _adopt_step(
    run: Run, writer: Writer, step: int, uri: StoreURI, model: ModelMap | None, clock: Clock
) -> list[str]:
    """Read a step and publish it; return a line for each part of it that was not imported."""
    items = plain_items(uri)
    plain = items.plain.model_copy(update={"source": str(uri)})
    if model is not None:
        plain = with_model(uri, plain, model)
    attempt = writer.claim(step)
    contents = read_step(uri, plain)
    folder = step_dir(attempt, step)
    objects = list(contents.objects)
    for name, data in contents.digests.items():
        run.objects.write(f"{folder}/{name}", data)
        content = ContentSum()
        content.update(data)
        crc32c, digest = f"{google_crc32c.value(data):08x}", content.text()
        objects.append(ObjectRecord(name=name, size=len(data), crc32c=crc32c, content=digest))
    saved = items.committed_ns or contents.modified_ns
    manifest = Manifest(
        step=step,
        attempt=attempt,
        created=rfc3339(clock() if saved is None else datetime.fromtimestamp(saved / 1e9, UTC)),
        writer=default_writer_id(),
        items=tuple(sorted({**plain.trees, **plain.json_files})),
        leaves=contents.leaves,
        objects=tuple(sorted(objects, key=lambda record: record.name)),
        plain=plain.model_copy(update={"keys": contents.keys}),
        model=None if model is None else model.info,
    )
    metrics = contents.meta.get(_METRICS) if _METRICS in plain.json_files else None
    writer.publish(manifest, _annotation(metrics))
    notes = [f"item {name} is {_OTHER}" for name in items.others]
    notes += [f"item {name} {_MISSING}" for name in items.missing]
    if contents.absent:
        more = ", …" if len(contents.absent) > _NAMED else ""
        names = f"{', '.join(contents.absent[:_NAMED])}{more}"
        notes.append(f"chunks are {_ABSENT}: of {names}")
    return [f"{uri.name}: {text}" for text in notes]


def _annotation(metrics: object) -> Annotation | None:
    """Return an annotation with the numbers among Orbax's metrics; None if there are none."""
    if not isinstance(metrics, dict):
        return None
    numbers = {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return Annotation.of(None, numbers or None)
