"""Bytes that a run takes in its store, by purpose and by step.

Names that share their bytes, such as files that steps have in common, count once: for the step that
was saved first. On a disk the total equals what `du` counts for the sizes of files. In a bucket no
names share bytes.
"""

import re
from collections import Counter
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
        step, attempt: number and attempt of the step.
        state: the step's state.
        created: time of the save, RFC 3339 in UTC; None without a manifest.
        nbytes: bytes of its files.
        added: bytes of its files that no earlier step has, which its save wrote.
        own: bytes of its files that no other step has, which deleting it frees.
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
        steps: each step with files, sorted by the time of its save, then by number.
        garbage: bytes that collecting garbage would free now.
    """

    nbytes: int
    files: int
    uses: dict[Use, int]
    steps: tuple[StepUsage, ...]
    garbage: int


def run_usage(run: Run) -> RunUsage:
    """Return the bytes that a run takes now, from names, sizes and the records of its steps.

    Raises:
        UnsupportedFormatError, CorruptionError: a record that decides about steps can't be read or
            is lost.
        StoreUnavailableError: the store gives no answer.
    """
    infos = {(info.step, info.attempt): info for info in run.all_states()}
    all_files = run.files.usage()
    of_step: dict[StepKey, list[FileUsage]] = {}
    for file in all_files:
        key = _step_of(file.name)
        if key is not None:
            of_step.setdefault(key, []).append(file)
    steps = _steps(of_step, infos)
    uses: Counter[Use] = Counter()
    uses["steps"] = sum(step.added for step in steps)
    # Files of steps count as steps, even if an export links to them.
    seen = {file.identity for files in of_step.values() for file in files} - {None}
    for file in all_files:
        if _step_of(file.name) is None and file.identity not in seen:
            if file.name.startswith("exports/"):
                use: Use = "exports"
            elif _KNOWN.match(file.name) and not _LEFT_BEHIND.search(file.name):
                use = "records"
            else:
                use = "other"
            uses[use] += file.size
            seen |= {file.identity} - {None}
    return RunUsage(
        nbytes=uses.total(),
        files=len(all_files),
        uses={name: uses[name] for name in ("steps", "exports", "records", "other")},
        steps=tuple(steps),
        garbage=sum(entry.nbytes for entry in find_garbage(run)),
    )


def _step_of(name: str) -> StepKey | None:
    """Return the step of a file, even if its folder still has a temporary name; None: no step's."""
    match = _STEP.match(name)
    folder = None if match is None else parse_step_folder(match[2])
    return None if match is None or folder is None else (folder.step, int(match[1]))


def _steps(
    of_step: dict[StepKey, list[FileUsage]], infos: dict[StepKey, StepInfo]
) -> list[StepUsage]:
    """Return each step's bytes, by the time of its save; steps without a record come last."""

    def saved(key: StepKey) -> tuple[bool, str, int, int]:
        created = infos[key].created if key in infos else None
        return created is None, created or "", key[1], key[0]

    names: Counter[tuple[int, int] | None] = Counter()
    for files in of_step.values():
        names.update({file.identity for file in files} - {None})
    seen: set[tuple[int, int] | None] = set()
    usages = []
    for key in sorted(of_step, key=saved):
        by_identity = {file.identity or file.name: file for file in of_step[key]}
        files = list(by_identity.values())  # one name of each file
        info = infos.get(key)
        usages.append(
            StepUsage(
                step=key[0],
                attempt=key[1],
                state=StepState.ABANDONED if info is None else info.state,
                created=None if info is None else info.created,
                nbytes=sum(file.size for file in files),
                added=sum(file.size for file in files if file.identity not in seen),
                own=sum(file.size for file in files if names[file.identity] <= 1),
            )
        )
        seen |= {file.identity for file in files} - {None}
    return usages
