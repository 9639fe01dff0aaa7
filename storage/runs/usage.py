"""Bytes that a run takes in its store, by purpose and by step.

Names that share their bytes, such as files that steps have in common, count once: for the step that
was saved first. On a disk the total equals what `du` counts for the sizes of files. In a bucket no
names share bytes.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from cairn.storage.runs.gc import find_garbage
from cairn.storage.runs.history import StepKey
from cairn.storage.runs.records.layout import parse_step_folder
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.store.files import FileUsage

__all__ = ["RunUsage", "StepUsage", "Use", "run_usage"]

Use = Literal["steps", "exports", "records", "other"]
"""Purpose of a file: folders of steps in any state; exports; records of Cairn; everything else."""

_STEP: Final = re.compile(r"attempts/(\d+)/([^/]+)/")
_KNOWN: Final = re.compile(r"(aliases|annotations|assets|attempts|damaged|manifests|trash)/|[^/]+$")
_LEFT_BEHIND: Final = re.compile(r"(^|/)\.|\.__lock$")


@dataclass(frozen=True)
class StepUsage:
    """Bytes that a step takes.

    Attributes:
        step, attempt: of the step.
        state: the step's state.
        created: when it was saved, RFC 3339 in UTC; None without a manifest.
        nbytes: bytes of its files.
        added: bytes of the files that no earlier step has: what its save has written.
        own: bytes of the files that no other step has: what deleting it frees.
    """

    step: int
    attempt: int
    state: StepState
    created: str | None
    nbytes: int
    added: int
    own: int


@dataclass(frozen=True)
class RunUsage:
    """Bytes that a run takes.

    Attributes:
        nbytes: bytes of all its files.
        files: number of names that its files have.
        uses: bytes by purpose.
        steps: each step that takes any, by the time it was saved, then by number.
        garbage: bytes that collecting garbage would free now.
    """

    nbytes: int
    files: int
    uses: dict[Use, int]
    steps: tuple[StepUsage, ...]
    garbage: int


def run_usage(run: Run) -> RunUsage:
    """Measure what a run takes now, from names, sizes and the records of its steps.

    Raises:
        UnsupportedFormatError, CorruptionError: a record that decides about steps can't be read or
            is lost.
        StoreUnavailableError: the store gives no answer.
    """
    known = {(info.step, info.attempt): info for info in run.all_states()}
    held = run.files.usage()
    of_step: dict[StepKey, list[FileUsage]] = {}
    for one in held:
        key = _step_of(one.name)
        if key is not None:
            of_step.setdefault(key, []).append(one)
    steps = _steps(of_step, known)
    uses: Counter[Use] = Counter()
    uses["steps"] = sum(one.added for one in steps)
    # Files of steps count as steps, even if an export links to them.
    seen = {one.identity for files in of_step.values() for one in files} - {None}
    for one in held:
        if _step_of(one.name) is None and one.identity not in seen:
            uses[_use(one.name)] += one.size
            seen |= {one.identity} - {None}
    return RunUsage(
        nbytes=uses.total(),
        files=len(held),
        uses={name: uses[name] for name in ("steps", "exports", "records", "other")},
        steps=tuple(steps),
        garbage=sum(one.nbytes for one in find_garbage(run)),
    )


def _step_of(name: str) -> StepKey | None:
    """Return the step that a file belongs to, even if the folder has a temporary name yet."""
    found = _STEP.match(name)
    folder = None if found is None else parse_step_folder(found[2])
    return None if found is None or folder is None else (folder.step, int(found[1]))


def _steps(
    of_step: dict[StepKey, list[FileUsage]], known: dict[StepKey, StepInfo]
) -> list[StepUsage]:
    """Measure each step, by the time it was saved; steps without a listed record come last."""

    def saved(key: StepKey) -> tuple[bool, str, int, int]:
        created = known[key].created if key in known else None
        return created is None, created or "", key[1], key[0]

    names: Counter[tuple[int, int] | None] = Counter()
    for files in of_step.values():
        names.update({one.identity for one in files} - {None})
    seen: set[tuple[int, int] | None] = set()
    made = []
    for key in sorted(of_step, key=saved):
        files = _once(of_step[key])
        info = known.get(key)
        made.append(
            StepUsage(
                step=key[0],
                attempt=key[1],
                state=StepState.ABANDONED if info is None else info.state,
                created=None if info is None else info.created,
                nbytes=sum(one.size for one in files),
                added=sum(one.size for one in files if one.identity not in seen),
                own=sum(one.size for one in files if names[one.identity] <= 1),
            )
        )
        seen |= {one.identity for one in files} - {None}
    return made


def _once(files: Iterable[FileUsage]) -> list[FileUsage]:
    """Return one of the names of each file."""
    found = {one.identity or one.name: one for one in files}
    return list(found.values())


def _use(name: str) -> Use:
    if name.startswith("exports/"):
        return "exports"
    return "records" if _KNOWN.match(name) and not _LEFT_BEHIND.search(name) else "other"
