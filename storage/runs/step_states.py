"""States of a step, and the decision which state a step without a manifest has."""

import contextlib
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from cairn.storage.notebooks import html_table, never_raises, size_cell
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.records.attempts import Attempt, find_superseded
from cairn.storage.runs.records.layout import (
    ATTEMPTS,
    COMMIT_FILE,
    attempt_dir,
    parse_attempt_file,
    parse_step_folder,
    step_dir,
)
from cairn.storage.runs.records.placed import UNREADABLE
from cairn.storage.runs.step_copy import CopyReport
from cairn.storage.store.objects import ObjectStore

__all__ = ["StepInfo", "StepState", "unpublished_steps"]


class StepState(StrEnum):
    """State of a step.

    listed: committed, has a manifest, and counts.
    unverified: committed by Orbax, without a manifest, and no writer will write one.
    in_flight: being written now, or committed and about to be published.
    abandoned: incomplete, and its writer is gone.
    superseded: a later attempt went back before it, or overwrote it.
    trashed: deleted, and not yet removed.
    unjudged: listed or superseded; the record that decides is damaged.
    """

    LISTED = "listed"
    UNVERIFIED = "unverified"
    IN_FLIGHT = "in_flight"
    ABANDONED = "abandoned"
    SUPERSEDED = "superseded"
    TRASHED = "trashed"
    UNJUDGED = "unjudged"


@dataclass(frozen=True)
class StepInfo:
    """Step of a run, as listings show it.

    Attributes:
        step: step number.
        attempt: the attempt that wrote it.
        state: its state.
        created: time of the save, RFC 3339 in UTC; None without a manifest.
        nbytes: sum of its files' sizes in bytes; None without a manifest.
        manifest_digest: "sha256:…"; None without a manifest.
        problem: the error of its manifest; None if that can be read.
        source: the owner's folder with the files of an imported step; None for other steps.
        copied: how a fork checked the copied files; None unless the fork returned this step.
    """

    step: int
    attempt: int
    state: StepState
    created: str | None = None
    nbytes: int | None = None
    manifest_digest: str | None = None
    source: str | None = None
    problem: str | None = None
    copied: CopyReport | None = field(default=None, compare=False)

    @never_raises
    def _repr_html_(self) -> str:
        return html_table(
            f"Step {self.step} of attempt {self.attempt}, {self.state.value}",
            [
                ("created", self.created),
                ("size", size_cell(self.nbytes)),
                ("digest", self.manifest_digest),
                ("files of", self.source),
                ("problem", self.problem),
            ],
        )


def unpublished_steps(
    objects: ObjectStore,
    *,
    published: set[tuple[int, int]],
    attempts: list[Attempt],
    now: datetime,
) -> list[StepInfo]:
    """Return steps with a folder and no manifest: unverified, in flight, abandoned or superseded.

    Args:
        objects: the run's objects.
        published: (step, attempt) of every manifest.
        attempts: every attempt.
        now: the present time, which decides whether the lease has expired.
    """
    lease = None
    with contextlib.suppress(*UNREADABLE):
        lease = read_lease(objects)
    writing = lease.attempt if lease and lease.is_alive(now) else None
    is_superseded = find_superseded(attempts, published)
    newest = max((attempt.number for attempt in attempts), default=None)
    # Steps only go up within an attempt: a committed step at or below the last published one
    # will not be published any more.
    last = {number: step for step, number in sorted(published)}
    states: dict[tuple[int, int], StepState] = {}
    for attempt in objects.folders(ATTEMPTS):
        number = parse_attempt_file(f"{attempt}.json")
        if number is None:
            continue
        for folder in objects.folders(attempt_dir(number)):
            name = parse_step_folder(folder.rpartition("/")[2])
            key = (name.step, number) if name else None
            if name is None or key is None or key in published:
                continue
            commit_file = f"{step_dir(number, name.step)}/{COMMIT_FILE}"
            committed = not name.temporary and objects.read(commit_file) is not None
            # Only the newest attempt, and only while it holds the lease, may still publish.
            alive = number == writing and newest in (None, number)
            if committed and is_superseded(name.step, number):
                states[key] = StepState.SUPERSEDED
            elif alive and not (committed and name.step <= last.get(number, -1)):
                states[key] = StepState.IN_FLIGHT  # if committed, about to be published
            elif committed:
                states[key] = StepState.UNVERIFIED
            elif key not in states:
                states[key] = StepState.ABANDONED
    return [StepInfo(step, number, state) for (step, number), state in states.items()]
