"""Record of a run: name, time of creation, labels and origin."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from cairn.storage.runs.records.annotations import Labels
from cairn.storage.runs.records.layout import MAX_NUMBER
from cairn.storage.store.bounds import FreeJson
from cairn.storage.store.clock import Moment
from cairn.storage.store.records import Record

__all__ = ["Lineage", "RunInfo"]


class Lineage(BaseModel):
    """Origin of a forked run.

    Attributes:
        run: URI of the parent run.
        step: the step from which it was forked.
        attempt: the attempt that wrote that step.
        manifest_digest: digest of that step's manifest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    step: Annotated[int, Field(ge=0, le=MAX_NUMBER)]
    attempt: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = None
    manifest_digest: str | None = None


class RunInfo(Record):
    """Content of `run.json`.

    Attributes:
        name: the run's name.
        created: time of creation, RFC 3339 in UTC.
        labels: texts by name, for people and filters.
        config_digest: digest of the model's config; None if unknown.
        lineage: origin of a forked run; None for other runs.
        environment: versions and hosts, for people.
        adopts: the folder of plain Orbax checkpoints that the run imports; None for other runs.
    """

    FORMAT: ClassVar[str] = "cairn.run"

    name: str
    created: Moment
    labels: Labels = Field(default_factory=dict)
    config_digest: str | None = None
    lineage: Lineage | None = None
    environment: FreeJson = Field(default_factory=dict)
    adopts: str | None = Field(default=None, exclude_if=lambda field: field is None)

    @property
    def id(self) -> str:
        """Id of the run, which all its records have; "" before the run is stored."""
        return "" if self.location is None or self.location.run is None else self.location.run
