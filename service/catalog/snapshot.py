"""What the store says about one run, read with as few requests as can be."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from cairn.service.schemas import CheckpointState
from cairn.storage.errors import CorruptionError, UnsupportedFormatError
from cairn.storage.runs import (
    Alias,
    Annotation,
    Manifest,
    Run,
    RunInfo,
    annotation_file,
    manifest_file,
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
    manifest_digest: str
    model_type: str | None


@dataclass(frozen=True)
class Snapshot:
    """One run as its store has it.

    Attributes:
        info: The run's own record.
        states: Every manifest there is, and where its step stands.
        added: Those manifests that were asked for, read.
        annotations: Labels and metrics of the manifests in `added`.
        aliases: Every alias.
    """

    info: RunInfo
    states: Mapping[Key, CheckpointState]
    added: Mapping[Key, Checkpoint]
    annotations: Mapping[Key, Annotation]
    aliases: tuple[Alias, ...]


def take_snapshot(run: Run, info: RunInfo, known: Collection[Key]) -> Snapshot:
    """Read a run: names of all manifests, and those manifests that are not `known`.

    A manifest that cannot be read is left out and logged; the others do not suffer from it.
    """
    # Manifests before attempts: an attempt begun in between can then only set steps aside.
    keys = set(run.published())
    added = _read_manifests(run, keys.difference(known))
    return Snapshot(
        info=info,
        states=_states(run, keys, keys.intersection({*known, *added})),
        added=added,
        annotations=read_annotations(run, added),
        aliases=tuple(run.aliases.list()),
    )


def read_annotations(run: Run, keys: Iterable[Key]) -> dict[Key, Annotation]:
    """Labels and metrics of these steps, as they are in the store now."""
    names = {annotation_file(step, attempt): (step, attempt) for step, attempt in keys}
    found = run.objects.parse_many(names, _parse_annotation)
    return {key: found.get(name, NO_ANNOTATION) for name, key in names.items()}


def _parse_annotation(data: bytes, path: object) -> Annotation:
    try:
        return Annotation.parse(data, path)
    except (CorruptionError, UnsupportedFormatError) as exc:
        logger.warning("labels and metrics left out: %s", exc)
        return NO_ANNOTATION


def _read_manifests(run: Run, keys: Iterable[Key]) -> dict[Key, Checkpoint]:
    names = {manifest_file(step, attempt): (step, attempt) for step, attempt in keys}
    read: dict[Key, Checkpoint] = {}
    for name, found in run.objects.read_many(names).items():
        if found is None:  # deleted since it was listed
            continue
        try:
            manifest = Manifest.parse(found.value, run.uri / name)
        except (CorruptionError, UnsupportedFormatError) as exc:
            logger.warning("left out of the catalog: %s", exc)
            continue
        read[names[name]] = Checkpoint(
            step=manifest.step,
            attempt=manifest.attempt,
            created=from_rfc3339(manifest.created),
            nbytes=manifest.nbytes,
            leaves=len(manifest.leaves),
            items=manifest.items,
            manifest_digest=sha256_of(found.value),
            model_type=manifest.model.model_type if manifest.model else None,
        )
    return read


def _states(
    run: Run, published: Collection[Key], read: Collection[Key]
) -> dict[Key, CheckpointState]:
    # Judged among all: one that can't be read has overwritten others all the same.
    judged = run.states_of(published)
    return {key: CheckpointState(judged[key].value) for key in read}
