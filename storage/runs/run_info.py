"""What `run.json` says about a run, and what a folder without one is."""

import contextlib
import os
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from cairn.storage.arrays import STEP_METADATA, TREE_METADATA
from cairn.storage.errors import InvalidURIError, RunNotFoundError, StorageError
from cairn.storage.runs.layout import MAX_NUMBER, RUN_FILE
from cairn.storage.store import Moment, ObjectStore, Record, StoreURI, open_files

__all__ = ["Lineage", "RunInfo", "no_such_run", "refuse_inside_checkpoint"]

_NAMED_IN_ERRORS = 5
_CHECKPOINT_NEXT = "Give the run that the checkpoint belongs to: RUN, RUN@ALIAS or RUN/steps/N."


class Lineage(BaseModel):
    """Where a forked run comes from.

    Attributes:
        run: URI of the parent run.
        step: the step it was forked from.
        attempt: the attempt that wrote that step.
        manifest_digest: of that step's manifest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    step: Annotated[int, Field(ge=0, le=MAX_NUMBER)]
    attempt: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = None
    manifest_digest: str | None = None


class RunInfo(Record):
    """What `run.json` says.

    Attributes:
        name: the run's name.
        created: when, RFC 3339 in UTC.
        labels: for people and filters.
        config_digest: of the model's config, if known.
        lineage: the step it was forked from, if any.
        environment: versions and hosts, for people.
    """

    FORMAT: ClassVar[str] = "cairn.run"

    name: str
    created: Moment
    labels: dict[str, str] = Field(default_factory=dict)
    config_digest: str | None = None
    lineage: Lineage | None = None
    environment: dict[str, Any] = Field(default_factory=dict)


def no_such_run(folder: StoreURI) -> RunNotFoundError:
    """The error that says what there is in place of a run."""
    names: list[str] = []
    with contextlib.suppress(StorageError):  # no bucket, or none that we may list
        names = [entry.name for entry in open_files(folder).list()]
    next_step = "Check the name; `cairn runs` lists what exists."
    if STEP_METADATA in names:
        found, next_step = "one checkpoint's folder", _CHECKPOINT_NEXT
    elif names:
        more = ", …" if len(names) > _NAMED_IN_ERRORS else ""
        found = f"a folder without it, with {', '.join(names[:_NAMED_IN_ERRORS])}{more}"
    elif folder.scheme == "file" and os.path.isdir(folder.local_path):
        found = "an empty folder"
    else:
        is_file = folder.scheme == "file" and os.path.lexists(folder.local_path)
        found = "a file" if is_file else "nothing"
    return RunNotFoundError(
        "no such run",
        path=folder,
        expected=f"a folder with {RUN_FILE}",
        found=found,
        next_step=next_step,
    )


def refuse_inside_checkpoint(folder: StoreURI) -> None:
    """Raise if `folder` is that of a checkpoint or of an item of one: no run may begin there.

    Raises:
        InvalidURIError: it is.
    """
    found = ObjectStore.open(folder).read_many([STEP_METADATA, TREE_METADATA])
    if any(value is not None for value in found.values()):
        raise InvalidURIError(
            "not a run's folder",
            path=folder,
            expected="a run's folder, or one where a run can begin",
            found="the folder of a checkpoint",
            next_step=_CHECKPOINT_NEXT,
        )
