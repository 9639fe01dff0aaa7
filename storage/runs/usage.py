"""What a run takes in its store, to the byte, and for what.

Names that share their bytes, as those of files that steps have in common, count once: for what was
saved first. On a disk that is what `du` counts of files' sizes; a bucket has no names in common.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from cairn.storage.runs.gc import find_garbage
from cairn.storage.runs.history import StepKey
from cairn.storage.runs.records import parse_step_folder
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.store import Held

__all__ = ["RunUsage", "StepUsage", "Use", "run_usage"]

Use = Literal["steps", "exports", "records", "other"]
"""Folders of steps, whatever their state; exports; records of Cairn; all else."""

_STEP: Final = re.compile(r"attempts/(\d+)/([^/]+)/")
_KNOWN: Final = re.compile(r"(aliases|annotations|assets|attempts|damaged|manifests|trash)/|[^/]+$")
_LEFT_BEHIND: Final = re.compile(r"(^|/)\.|\.__lock$")


@dataclass(frozen=True)
class StepUsage:
    """What a step takes.

    Attributes:
        step, attempt: its own.
        state: what it is.
        created: when it was saved, RFC 3339 in UTC; None without a manifest.
        nbytes: of its files.
        added: of those that no earlier step has: what its save has written.
        own: of those that no other step has: what goes with it.
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
    """What a run takes.

    Attributes:
        nbytes: of all its files.
        files: how many names they have.
        uses: bytes by what they are for.
        steps: each step that takes any, by when it was saved, then by number.
        garbage: bytes that collecting garbage would free now.
    """

    nbytes: int
    files: int
    uses: dict[Use, int]
    steps: tuple[StepUsage, ...]
    garbage: int


def run_usage(run: Run) -> RunUsage:
    """What a run takes now; nothing is read but names and sizes, and the records of its steps.

    Raises:
        UnsupportedFormatError, CorruptionError: a record that steps are judged by can't be read or
            is lost.
        StoreUnavailableError: the store gives no answer.
    """
    known = {(info.step, info.attempt): info for info in run.all_states()}
    held = run.files.held()
    of_step: dict[StepKey, list[Held]] = {}
    for one in held:
        key = _step_of(one.name)
        if key is not None:
            of_step.setdefault(key, []).append(one)
    steps = _steps(of_step, known)
    uses: Counter[Use] = Counter()
    uses["steps"] = sum(one.added for one in steps)
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
    """Whose file it is: a save under way may write to a folder that gets its name in the end."""
    found = _STEP.match(name)
    folder = None if found is None else parse_step_folder(found[2])
    return None if found is None or folder is None else (folder.step, int(found[1]))


def _steps(of_step: dict[StepKey, list[Held]], known: dict[StepKey, StepInfo]) -> list[StepUsage]:
    """What each takes, by when it was saved; those that nobody has listed come last."""

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


def _once(files: Iterable[Held]) -> list[Held]:
    """One of the names of each file."""
    found = {one.identity or one.name: one for one in files}
    return list(found.values())


def _use(name: str) -> Use:
    if name.startswith("exports/"):
        return "exports"
    return "records" if _KNOWN.match(name) and not _LEFT_BEHIND.search(name) else "other"
