"""What the store says about one run, read with as few requests as can be."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from cairn.service.schemas import CheckpointState
from cairn.storage.errors import StorageError
from cairn.storage.runs import (
    UNREADABLE,
    Alias,
    Annotation,
    History,
    Manifest,
    Run,
    RunInfo,
    annotation_file,
    judge_records,
    manifest_file,
    parse_record,
)
from cairn.storage.store import from_rfc3339, sha256_of

logger = logging.getLogger(__name__)

Key = tuple[int, int]
"""(step, attempt): names one manifest of a run."""

NO_ANNOTATION = Annotation()


@dataclass(frozen=True)
class Checkpoint:
    """What the catalog keeps of a manifest."""

    step: int
    attempt: int
    created: datetime
    nbytes: int
    leaves: int
    items: tuple[str, ...]
    iterators: Mapping[str, int]
    manifest_digest: str
    model_type: str | None
    source: str | None


@dataclass(frozen=True)
class Snapshot:
    """One run as its store has it.

    Attributes:
        info: The run's own record.
        states: Every manifest there is, and where its step stands.
        added: Those manifests that were asked for, read.
        annotations: Labels and metrics of the manifests in `added`.
        aliases: Every alias.
        problems: What is wrong with records of the run; what they say is left out.
    """

    info: RunInfo
    states: Mapping[Key, CheckpointState]
    added: Mapping[Key, Checkpoint]
    annotations: Mapping[Key, Annotation]
    aliases: tuple[Alias, ...]
    problems: tuple[str, ...] = ()


def take_snapshot(run: Run, info: RunInfo, known: Collection[Key]) -> Snapshot:
    """Read a run: names of all manifests, and those manifests that are not `known`.

    A record that cannot be read is left out and named; the others do not suffer from it.
    """
    history = run.history()
    keys = set(history.published)
    added, problems = _read_manifests(run, keys.difference(known))
    problems |= history.problems
    aliases, unreadable = run.aliases.judge()
    annotations, unreadable_too = _judge_annotations(run, added)
    problems |= unreadable | unreadable_too
    for error in problems.values():
        logger.warning("left out of the catalog: %s", error)
    return Snapshot(
        info=info,
        states=_states(history, keys.intersection({*known, *added})),
        added=added,
        annotations=annotations,
        aliases=tuple(aliases),
        problems=tuple(str(problems[name]) for name in sorted(problems)),
    )


def read_annotations(run: Run, keys: Iterable[Key]) -> dict[Key, Annotation]:
    """Labels and metrics of these steps, as they are in the store now."""
    found, unreadable = _judge_annotations(run, keys)
    for error in unreadable.values():
        logger.warning("labels and metrics left out: %s", error)
    return found


def _judge_annotations(
    run: Run, keys: Iterable[Key]
) -> tuple[dict[Key, Annotation], dict[str, StorageError]]:
    names = {annotation_file(step, attempt): (step, attempt) for step, attempt in keys}
    found, unreadable = judge_records(run.objects, names, Annotation.parse)
    return {key: found.get(name, NO_ANNOTATION) for name, key in names.items()}, unreadable


def _read_manifests(
    run: Run, keys: Iterable[Key]
) -> tuple[dict[Key, Checkpoint], dict[str, StorageError]]:
    """What the catalog keeps of each, and what is wrong with those that can't be read."""
    names = {manifest_file(step, attempt): (step, attempt) for step, attempt in keys}
    read: dict[Key, Checkpoint] = {}
    unreadable: dict[str, StorageError] = {}
    for name, found in run.objects.read_many(names).items():
        if found is None:  # deleted since it was listed
            continue
        try:
            manifest = parse_record(run.objects, name, Manifest, found)
        except UNREADABLE as exc:
            unreadable[name] = exc
            continue
        read[names[name]] = Checkpoint(
            step=manifest.step,
            attempt=manifest.attempt,
            created=from_rfc3339(manifest.created),
            nbytes=manifest.nbytes,
            leaves=manifest.leaf_count,
            items=manifest.items,
            iterators=manifest.iterators,
            manifest_digest=sha256_of(found.value),
            model_type=manifest.model.model_type if manifest.model else None,
            source=manifest.source,
        )
    return read, unreadable


def _states(history: History, read: Collection[Key]) -> dict[Key, CheckpointState]:
    # Judged among all: one that can't be read has overwritten others all the same.
    return {key: CheckpointState(state.value) for key, state in history.states(read)}
