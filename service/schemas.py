"""Requests and responses of the HTTP API, shared by server and client."""

import json
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from enum import StrEnum
from math import isfinite
from typing import Annotated, Any, Final, Literal, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import (
    CoreSchema,
    InitErrorDetails,
    PydanticCustomError,
    PydanticKnownError,
    core_schema,
)

from cairn.storage.store.uri import RUN_NAME

# Digits alone would be the number of a step. The store also refuses "latest".
ALIAS_PATTERN = r"^(?:[A-Za-z]|[0-9]+[A-Za-z._-])[A-Za-z0-9._-]*$"
MAX_ALIAS_LENGTH = 64
CHECKPOINT_PATTERN = r"^(?:0|[1-9][0-9]{0,15}|(?:[A-Za-z]|[0-9]+[A-Za-z._-])[A-Za-z0-9._-]{0,63})$"
OPERATION_PATTERN = r"^op-[0-9a-f]{32}$"
ARTIFACT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._~=+-]{0,511}$"
ID_PATTERN = r"^[a-z2-7]{12}$"
RUN_GLOB_PATTERN = r"^[A-Za-z0-9._=+*?-]{1,128}$"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
RUN_PATTERN = rf"^{RUN_NAME}$"
ITEM_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
# The same sizes that `parse_size` accepts; its error messages are better.
SIZE_PATTERN = r"^(?:[1-9][0-9]{0,17}|[1-9][0-9]{0,5}(?:\.[0-9]{1,9})? *(?:[kKmMgGtT][iI]?)?[bB])$"
AXIS_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"
MAX_AXES = 16
GRACE_SECONDS = 7 * 24 * 3600.0
MAX_GRACE_SECONDS = 100 * 365 * 24 * 3600.0
MAX_MODEL_BYTES = 128 << 10
MAX_LAYERS = 10_000
MAX_NUMBER = 2**53 - 1  # the largest integer that every JSON reader keeps exactly

MAX_ERRORS = 20
"""Largest number of refused fields that an answer names."""

MORE_ERRORS = "more_errors"
"""Type of the validation error that stands for more errors; `ctx["count"]` is their number."""

DAMAGED_PROBLEM = "urn:cairn:problem:damaged"
"""Type of the problem of a verification that found damage."""

_ODD_TEXT = re.compile("[\0\ud800-\udfff]")


class Request(BaseModel):
    """Base of request bodies: an unknown field is an error, and so is text in place of a boolean.

    A body of 1 MiB has room for 100,000 errors, and pydantic would collect all of them, which
    blocks the server for a second. So the checks of every field must end early: unknown fields are
    checked here, entries by name in `_ByName`, lists by `max_length` or `fail_fast`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _bounded_and_plain(cls, value: Any) -> Any:
        if isinstance(value, dict):
            fields = cls.model_fields
            unknown = [name for name in value if name not in fields]
            if len(unknown) > MAX_ERRORS:
                errors = [
                    InitErrorDetails(type="extra_forbidden", loc=(name,), input=value[name])
                    for name in unknown[:MAX_ERRORS]
                ]
                rest = {"count": len(unknown) - MAX_ERRORS}
                more = PydanticCustomError(MORE_ERRORS, "{count} more unknown fields", rest)
                errors.append(InitErrorDetails(type=more, input=None))
                raise ValidationError.from_exception_data(cls.__name__, errors)
        if not is_plain(value):
            raise ValueError("expected text without NUL and without half of a surrogate pair")
        return value


def is_plain(value: Any) -> bool:
    """Return whether all text in a JSON value can be stored in every database and file."""
    texts: list[str] = []
    left: list[Collection[Any]] = [[value]]  # no recursion: the client chooses the depth
    while left:
        values = left.pop()
        kinds = set(map(type, values))  # by type first: a body may have 400,000 numbers
        if str in kinds:
            texts.extend(part for part in values if isinstance(part, str))
        if dict in kinds:
            objects = [part for part in values if isinstance(part, dict)]
            texts.extend(name for part in objects for name in part)
            left.extend(part.values() for part in objects)
        if list in kinds:
            left.extend(part for part in values if isinstance(part, list))
    return _ODD_TEXT.search("".join(texts)) is None


def _whole(value: object) -> object:
    """Convert 3.0 to 3: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def plain_number(value: float) -> float | str:
    """Convert NaN and infinities, which JSON lacks, to texts; `_number_of` converts them back."""
    return value if isfinite(value) else str(value)


def _number_of(number: object) -> object:
    """Convert the text of `plain_number` back to a number."""
    return float(number) if isinstance(number, str) and number in ("nan", "inf", "-inf") else number


# `Field` comes first: a limit after the validator would be missing in the schema.
Whole = Annotated[int, Field(ge=0, le=MAX_NUMBER), BeforeValidator(_whole)]
"""Integer of a request; text is refused."""

Count = Annotated[int, Field(ge=1, le=MAX_NUMBER), BeforeValidator(_whole)]
"""Integer of a request, at least 1."""

PLAIN_PATTERN = r"^[^\x00]*$"
REASON_PATTERN = r"^[^\x00]*[^\x00\s][^\x00]*$"
PlainText = Annotated[str, Field(pattern=PLAIN_PATTERN)]
"""Text of a request that every database can store."""

Name = Annotated[PlainText, Field(min_length=1, max_length=256)]
"""Name of a label or a metric."""

LabelText = Annotated[PlainText, Field(max_length=2000)]

DespiteDamage = Annotated[
    str,
    Field(
        pattern=REASON_PATTERN,
        max_length=2000,
        description="Why the step is to be used although it is damaged, which is refused "
        "otherwise; the audit trail keeps it.",
        examples=["The newest one that loads; the optimizer alone is damaged."],
    ),
]

DAMAGE_SHOWN = 20
"""Largest number of damaged leaves, and of problems, that an answer names."""


class _ByName:
    """Largest number of entries of a dict, checked before pydantic validates the entries.

    It also adds to the schema that all names must match the pattern. Without that, the schema would
    allow any value for other names.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._count, handler(source))

    def _count(self, value: object) -> object:
        if isinstance(value, dict) and len(value) > self._most:
            sizes = {"max_length": self._most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", {"field_type": "Dictionary", **sizes})
        return value

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        ((pattern, values),) = schema.pop("patternProperties").items()
        schema["additionalProperties"] = values
        schema["propertyNames"] = {**schema.get("propertyNames", {}), "pattern": pattern}
        schema["maxProperties"] = self._most
        return schema


Metric = Annotated[
    float,
    BeforeValidator(_number_of),
    PlainSerializer(plain_number, when_used="json"),
    WithJsonSchema(
        {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"], "type": "string"}]}
    ),
]
"""Number of a metric; NaN and infinities are text, in requests and answers."""

Better = Literal["min", "max"]
"""Direction of a metric: `min` means lower is better, `max` means higher is better."""

MAX_ENTRIES = 100
"""Largest number of labels, or metrics, in one request."""

Value = TypeVar("Value")

Named = Annotated[dict[Name, Value], _ByName(MAX_ENTRIES)]
"""Labels, metrics or directions by name."""

Dtype = Literal["float32", "float16", "bfloat16", "float64"]
ExportDtype = Literal["float32", "float16", "bfloat16", "float64", "q8_0"]


_DIGEST: Final = "sha256:20ff49e08b9d6af3fee805ec834efb452c80e0547ec965e276668f30103cbdd8"
_ARTIFACT: Final = "default~llama-sft~1000~1~convert-a82932109485877e"


def _example(**members: Any) -> ConfigDict:
    """Return a model's config with an example of its JSON, for the OpenAPI document."""
    return ConfigDict(json_schema_extra={"examples": [members]})


def example_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the example of a model's JSON."""
    (example,) = cast(dict[str, Any], model.model_config["json_schema_extra"])["examples"]
    return cast(dict[str, Any], example)


class Response(BaseModel):
    """Base of response bodies: a client ignores fields that a newer server adds."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class FieldProblem(Response):
    """Part of a request that was refused."""

    field: str = Field(description="Where: `path.step`, `query.page_size`, `body.alias` ...")
    detail: str


def _is_none(value: object) -> bool:
    return value is None


_Part = Annotated[str | None, Field(exclude_if=_is_none)]


class Problem(Response):
    """RFC 9457 problem details: `detail` is for people, the other members are for programs.

    Members after `instance` are left out where a problem has no such part. Some types have more:
    `holder` (lease-held), `current` (precondition-failed), `gates` (gate-refused), `aliases`
    (aliases-stranded), `operations` (root-in-use), `root` and `run` (already-adopted).
    """

    model_config = ConfigDict(extra="allow", frozen=True) | _example(
        type="urn:cairn:problem:step-not-found",
        title="No such step",
        status=404,
        detail='There is no step 7 in run "llama-sft" (steps 900, 1000). Choose a listed step.',
        instance="/v1/roots/default/runs/llama-sft/checkpoints/7",
        message='There is no step 7 in run "llama-sft" (steps 900, 1000).',
        path="gs://example-bucket/runs/llama-sft",
        expected="step 7",
        found="steps 900, 1000",
        next_step="Choose a listed step.",
    )

    type: str = Field(description="Stable name of the kind of problem: urn:cairn:problem:<kind>.")
    title: str
    status: int
    detail: str = Field(description="What is wrong and what to do. Its wording may change.")
    instance: str = Field(description="Path of the request, or of the operation, that failed.")
    errors: Annotated[
        list[FieldProblem] | None,
        Field(exclude_if=_is_none, json_schema_extra={"maxItems": MAX_ERRORS}),
    ] = Field(default=None, description="Parts of the request that were refused.")
    error_count: Annotated[int | None, Field(exclude_if=_is_none)] = Field(
        default=None, description="How many parts were refused, if `errors` has the first only."
    )
    message: _Part = Field(default=None, description="What is wrong, in one sentence.")
    path: _Part = Field(
        default=None,
        description="Where: an address in a store, or a name in a model's config or map.",
    )
    expected: _Part = Field(default=None, description="What should be there.")
    found: _Part = Field(default=None, description="What is there instead.")
    next_step: _Part = Field(default=None, description="What to do about it.")
    problems: Annotated[list[str] | None, Field(exclude_if=_is_none)] = Field(
        default=None, description="All that is wrong, one line each, where it can be several."
    )


class Page(Response):
    """Base of lists."""

    next_page_token: str | None = Field(
        default=None,
        description="Give it back as `page_token` for the next page; null on the last.",
    )


class Health(Response):
    """Answer of a live server. It says nothing about stores and the catalog; see `Readiness`."""

    model_config = _example(status="ok", version="0.1.0")

    status: Literal["ok"] = "ok"
    version: str


class Readiness(Response):
    """Readiness of the server: catalog, job engine and every root are usable."""

    model_config = _example(
        status="ready",
        checks={
            "catalog": "ok",
            "jobs": "ok",
            "root default": "ok",
            "index default": "looked at 0.8 s ago",
        },
    )

    status: Literal["ready"] = "ready"
    checks: dict[str, str] = Field(
        description="By part: `ok`; of the index of each root, how long ago it was looked at. "
        "With keys, for known callers only."
    )


class Root(Response):
    """Store root."""

    model_config = _example(
        name="default", uri="gs://example-bucket/runs", source="settings", adopt_from=[]
    )

    name: str
    uri: str
    source: Literal["settings", "catalog"] = Field(
        default="settings",
        description="What names it: the server's settings; or the catalog, to which it was added "
        "while servers ran.",
    )
    adopt_from: list[str] = Field(
        default_factory=list,
        description="Folders outside it whose checkpoints its runs may list where they lie.",
    )


class RootList(Response):
    """All roots of this server."""

    model_config = _example(roots=[example_of(Root)])

    roots: list[Root]


class Lineage(Response):
    """Checkpoint that a run was forked from."""

    run: str = Field(description="URI of the parent run.")
    step: int
    attempt: int | None = None
    manifest_digest: str | None = None


class LostRecord(Response):
    """Lost record: this server has seen it, and the store now has an older version of it, or none.

    A lost move of an alias is resolved by the next promotion or deletion of the alias. A lost
    tombstone is resolved by deleting the step again, or by undeleting it.
    """

    record: str = Field(description="Its name in the run's folder.")
    alias: str | None = Field(
        default=None, description="The alias; null: the record is a step's tombstone."
    )
    step: int
    attempt: int
    manifest_digest: str | None = None
    sequence: int | None = Field(default=None, description="Of the alias, as it was seen.")
    deleted: bool = Field(default=False, description="The alias, or the step, was deleted.")
    by: str
    reason: str
    at: datetime
    expires: datetime | None = Field(default=None, description="Of a tombstone.")
    stored_step: int | None = Field(
        default=None, description="Where the alias is now; null: nowhere."
    )
    stored_sequence: int | None = None


class RunColumn(Response):
    """Value of a run in a column that was asked for."""

    field: str = Field(examples=["best.loss"])
    value: float | str | None = Field(
        default=None,
        description="Null if the run has none: also of `best`, if no step says which values are "
        "better. Numbers that are not finite are `nan`, `inf` or `-inf`.",
    )
    step: int | None = Field(default=None, description="Of a metric, the step that has this value.")
    better: Better | None = Field(
        default=None, description="Of a metric, whether small or large values are good."
    )
    unknown: bool = Field(
        default=False,
        exclude_if=lambda is_unknown: not is_unknown,
        description="The run may have a value all the same: it has more config entries (200) or "
        "metrics (1,000) than lists keep, and none of the kept ones has this name.",
    )


class Run(Response):
    """Training run."""

    model_config = _example(
        root="default",
        name="llama-sft",
        uri="gs://example-bucket/runs/llama-sft",
        created="2026-03-02T09:30:00Z",
        labels={"team": "nlp"},
        lineage=None,
        latest_step=1000,
        checkpoint_count=2,
        damaged_count=0,
        bytes=895036,
        problems=[],
        lost_records=[],
    )

    root: str
    name: str
    uri: str
    created: datetime
    labels: dict[str, str]
    lineage: Lineage | None
    latest_step: int | None
    checkpoint_count: int = Field(description="Listed checkpoints, the damaged ones included.")
    damaged_count: int = Field(
        default=0, description="Those whose last verification has failed: their state is `damaged`."
    )
    bytes: int = Field(description="Bytes of the listed checkpoints.")
    problems: list[str] = Field(
        default_factory=list,
        description="Records of the run that are damaged, lost or in another's place. What they "
        "say is left out.",
    )
    lost_records: list[LostRecord] = Field(
        default_factory=list,
        description="Those of the lost ones that this server has seen: aliases and tombstones.",
    )
    columns: list[RunColumn] = Field(
        default_factory=list,
        exclude_if=lambda columns: not columns,
        description="In a list with `columns`: the values of these, in the same order.",
    )
    metrics_cut: bool = Field(
        default=False,
        exclude_if=lambda is_cut: not is_cut,
        description="The run has more than 1,000 metrics. Columns, filters and orders of lists "
        "know the first 1,000 that were saved.",
    )


class StepUsage(Response):
    """Space that a step uses in the store."""

    step: int
    attempt: int
    state: "CheckpointState"
    created: datetime | None
    bytes: int = Field(description="Of its files.")
    added: int = Field(description="Of those that no earlier step has: what its save has written.")
    own: int = Field(description="Of those that no other step has: what goes with it.")


class RunUsage(Response):
    """Space that a run uses in the store, measured there now.

    A file that steps share counts once, for the step that was saved first. On a disk the sum is
    what `du` finds of the files' sizes.
    """

    model_config = _example(
        root="default",
        run="llama-sft",
        bytes=912679,
        files=41,
        uses={"steps": 907960, "exports": 0, "records": 4719, "other": 0},
        garbage=0,
        steps=[
            {
                "step": 1000,
                "attempt": 1,
                "state": "listed",
                "created": "2026-03-02T10:15:00Z",
                "bytes": 907960,
                "added": 907960,
                "own": 907960,
            }
        ],
    )

    root: str
    run: str
    bytes: int = Field(description="Of all files.")
    files: int = Field(description="Names of files, or objects.")
    uses: dict[str, int] = Field(
        description="Bytes by what they are for: `steps`, whatever their state; `exports`; "
        "`records`; `other`."
    )
    garbage: int = Field(description="Bytes that collecting garbage would free now.")
    steps: list[StepUsage] = Field(description="By when they were saved: the run's growth.")


class RunList(Page):
    """Runs by root and name."""

    model_config = _example(runs=[example_of(Run)], next_page_token=None)

    runs: list[Run]


class CheckpointState(StrEnum):
    """State of a step; `listed` steps can be used.

    `damaged` steps are listed too, but their last verification failed, so they cannot be promoted.
    """

    LISTED = "listed"
    DAMAGED = "damaged"
    UNVERIFIED = "unverified"
    IN_FLIGHT = "in_flight"
    ABANDONED = "abandoned"
    SUPERSEDED = "superseded"
    TRASHED = "trashed"
    UNJUDGED = "unjudged"


AVAILABLE: Literal["available"] = "available"
"""Filter for `listed` and `damaged` steps."""

States = CheckpointState | Literal["available", "all"]
"""Filter of a list by the state of its entries."""


class Deletion(Response):
    """Deletion that can be undone for a while."""

    at: datetime
    expires: datetime = Field(description="From then on collecting garbage removes its bytes.")
    by: str
    reason: str
    removing: bool = Field(description="Its bytes are going; it can't be had back.")


class Damage(Response):
    """Damage that the last verification of a step found."""

    at: datetime
    by: str = Field(description="Who verified it.")
    job: str = Field(description="Id of the operation that did; empty if none did.")
    leaves: list[str] = Field(
        description=f"`item: path` of leaves that can't be read as they were saved, the first "
        f"{DAMAGE_SHOWN}."
    )
    leaf_count: int = Field(description="How many such leaves there are.")
    problems: list[str] = Field(
        description=f"What is not as it was saved, the first {DAMAGE_SHOWN}; the operation has "
        "more."
    )
    problem_count: int = Field(description="How many problems there are.")
    loads: bool = Field(description="Cairn loads every value as it was saved all the same.")


class Checkpoint(Response):
    """Saved step of a run."""

    model_config = _example(
        root="default",
        run="llama-sft",
        step=1000,
        attempt=1,
        state="listed",
        uri="gs://example-bucket/runs/llama-sft/attempts/1/1000",
        created="2026-03-02T10:15:00Z",
        bytes=447518,
        leaves=61,
        items=["meta", "model", "optimizer"],
        iterators={"train": 4},
        manifest_digest=_DIGEST,
        model_type="llama",
        aliases=["production"],
        labels={"eval": "passed"},
        metrics={"eval/loss": 1.84},
        better={"eval/loss": "min"},
        verified="2026-03-02T10:20:00Z",
        damaged=None,
        deletion=None,
    )

    root: str
    run: str
    step: int
    attempt: int
    state: CheckpointState
    uri: str = Field(
        description="Folder of the step: an ordinary Orbax checkpoint; if adopted, its owner's."
    )
    created: datetime | None
    bytes: int | None
    leaves: int | None = Field(description="Arrays in the checkpoint.")
    items: list[str]
    iterators: dict[str, int] = Field(
        description="Iterators of training data whose positions it has: how many processes saved."
    )
    manifest_digest: str | None
    model_type: str | None
    aliases: list[str]
    labels: dict[str, str]
    metrics: dict[str, float]
    better: dict[str, Better] = Field(
        description="Of metrics, whether small or large values are good, where somebody said so."
    )
    verified: datetime | None = Field(
        default=None,
        description="When every byte of it was last found to be what was saved; null if nobody has "
        "looked, or the last look found damage.",
    )
    damaged: Damage | None = Field(
        default=None,
        description="What the last verification found to be wrong; null if it found nothing, or "
        "there was none. A later one that succeeds lifts it.",
    )
    deletion: Deletion | None = Field(default=None, description="Of a step in the trash.")

    @property
    def is_available(self) -> bool:
        """True if the step is listed, damaged or not: it can be read and verified."""
        return self.state in (CheckpointState.LISTED, CheckpointState.DAMAGED)

    @field_serializer("metrics")
    def _as_json(self, metrics: dict[str, float]) -> dict[str, float | str]:
        return {name: plain_number(value) for name, value in metrics.items()}


class CheckpointList(Page):
    """Checkpoints, highest step first."""

    model_config = _example(checkpoints=[example_of(Checkpoint)], next_page_token=None)

    checkpoints: list[Checkpoint]


class Tensor(Response):
    """Leaf of a checkpoint."""

    model_config = _example(
        item="model",
        path="model/embed_tokens/embedding",
        shape=[128, 32],
        dtype="float32",
        bytes=16384,
        spec=[None, "fsdp"],
        digest="keyed-sum-64:debf8a65b5dc03f2",
    )

    item: str
    path: str = Field(
        description="Its keys joined by `/`; a `/` in a key is written `%2F`. In a URL, percent-"
        "encoded once more."
    )
    shape: list[int] = Field(
        description="Of typed PRNG keys that of the keys, without their words."
    )
    dtype: str = Field(description="Such as `bfloat16`; of typed PRNG keys `key<implementation>`.")
    bytes: int = Field(description="Of all elements, packed where they are smaller than a byte.")
    spec: list[str | list[str] | None] | None = Field(
        description="By axis: mesh axis, list of them, or null; null if not sharded by name."
    )
    digest: str | None = Field(
        description="Of its elements, whatever the sharding. Of a leaf of the same shape and dtype "
        "that has the same, they are equal."
    )


class TensorValues(Response):
    """Part of a leaf, as JSON."""

    model_config = _example(
        item="model",
        path="model/norm/scale",
        dtype="float32",
        shape=[2, 2],
        values=[[0.5, -1.25], ["nan", 3.0]],
    )

    item: str
    path: str
    dtype: str
    shape: list[int] = Field(description="Of the part.")
    values: Any = Field(
        description="Nested lists of its elements, each exact. What JSON's readers do not keep is "
        "text: `nan`, `inf`, `-inf`, and integers beyond 2**53 - 1."
    )


class Histogram(Response):
    """Histogram of a tensor's elements."""

    start: float | str = Field(description="Where the first bin begins.")
    width: float = Field(
        description="Of each bin, a power of two; 0 of the only one if all elements are `start`."
    )
    counts: list[int] = Field(description="Elements of each bin, of at most 64.")


class TensorStatistics(Response):
    """Statistics of the elements of a tensor, or of a part of it.

    `nan`, `positive_infinity` and `negative_infinity` count the elements that are not finite. The
    fields after them are about the finite ones, and null if there are none.
    """

    model_config = _example(
        item="model",
        path="model/norm/scale",
        dtype="float32",
        shape=[4],
        count=4,
        nan=1,
        positive_infinity=0,
        negative_infinity=0,
        zeros=0,
        min=-1.25,
        max=3.0,
        mean=0.75,
        std=1.744037,
        norm=3.288236,
        histogram={"start": -2.0, "width": 2.0, "counts": [1, 1, 1]},
    )

    item: str
    path: str
    dtype: str
    shape: list[int] = Field(description="Of the part.")
    count: int = Field(description="Elements of the part.")
    nan: int
    positive_infinity: int
    negative_infinity: int
    zeros: int
    min: int | float | str | None = Field(
        description="Exact. Integers beyond 2**53 - 1 are text, for JSON's readers' sake."
    )
    max: int | float | str | None = Field(description="As `min`.")
    mean: float | None
    std: float | None = Field(description="Of the population: divided by the number of elements.")
    norm: float | str | None = Field(
        description="Square root of the sum of squares; `inf` if it is beyond float64."
    )
    histogram: Histogram | None


class TensorList(Page):
    """Leaves of a checkpoint, by item and path."""

    model_config = _example(tensors=[example_of(Tensor)], next_page_token=None)

    tensors: list[Tensor]


class StepFile(Response):
    """File of a checkpoint."""

    name: str = Field(description="Its path in the step's folder.")
    bytes: int
    crc32c: str = Field(description="Eight hexadecimal digits.")


class StepFileList(Page):
    """Files of a checkpoint, by name."""

    model_config = _example(
        files=[{"name": "_CHECKPOINT_METADATA", "bytes": 606, "crc32c": "59b92d41"}],
        next_page_token=None,
    )

    files: list[StepFile]


class StepName(Response):
    """Name of a step."""

    root: str
    run: str
    step: int
    manifest_digest: str | None = None


class EntryDifference(Response):
    """Entry that differs between two steps."""

    path: str = Field(description="Its keys joined by `/`.")
    change: Literal["changed", "only_this", "only_other"]
    this: Any = Field(default=None, description="Null also if this step does not have it.")
    other: Any = Field(default=None, description="Null also if the other does not have it.")


class ValueDifference(Response):
    """Difference of a leaf's elements: those of the other step minus those of this step."""

    elements: int
    differing: int = Field(description="NaN equals NaN, and -0.0 equals 0.0.")
    not_finite: int = Field(description="Of those, whose difference is NaN or infinite.")
    max_absolute: float | None = Field(description="Of the finite differences.")
    mean: float | None
    norm: float | str | None = Field(description="Of the differences; `inf` beyond float64.")
    relative: float | None = Field(
        description="`norm` by that of this step's elements; null if these are all 0."
    )


class LeafDifference(Response):
    """Leaf that may differ between two steps."""

    item: str
    path: str
    change: Literal["values", "dtype", "shape", "only_this", "only_other", "undigested"] = Field(
        description="What differs; of an `undigested` leaf nobody knows until its values are read."
    )
    this: Tensor | None
    other: Tensor | None
    values: ValueDifference | None = Field(
        default=None, description="Null if they were not compared, or can't be."
    )
    not_compared: str | None = Field(default=None, description="Why its values were not, if so.")


class LeafCounts(Response):
    """Number of equal leaves of two steps, and of different ones by kind of difference."""

    equal: int
    values: int
    dtype: int
    shape: int
    only_this: int
    only_other: int
    undigested: int


class StepDiff(Page):
    """Differences between two steps."""

    this: StepName
    other: StepName
    equal: bool = Field(description="Whether all leaves are the same, by their digests.")
    leaves: LeafCounts
    config: list[EntryDifference] = Field(description="Of the model's configuration.")
    metrics: list[EntryDifference]
    labels: list[EntryDifference]
    differences: list[LeafDifference] = Field(description="By item and path.")


AxisName = Annotated[PlainText, Field(pattern=AXIS_PATTERN)]

SpecEntry = AxisName | Annotated[list[AxisName], Field(max_length=MAX_AXES)] | None
"""Placement of one dimension: a mesh axis, several that split it together, or null."""

PlacementRule = Annotated[
    tuple[
        Annotated[PlainText, Field(max_length=2000)],
        Annotated[list[SpecEntry], Field(max_length=64)],
    ],
    Field(strict=False),  # JSON has no tuples
]


class PlanMesh(Request):
    """Mesh of devices."""

    axes: Annotated[dict[AxisName, Count], Field(min_length=1), _ByName(MAX_AXES)] = Field(
        description="Devices along each axis, in the order of the mesh; together 1,048,576 at "
        "most. Of `dp`, `fsdp`, `tp` and `sp` those that are left out have size 1, unless there "
        "are rules.",
        examples=[{"fsdp": 64, "tp": 4}],
    )
    processes: Count = Field(
        default=1,
        description="How many processes share the devices, each as many, in the order of the "
        "mesh: each has a box of it.",
    )


class PlanRequest(Request):
    """Mesh that a checkpoint is to be loaded on, and options of the load."""

    model_config = _example(mesh={"axes": {"fsdp": 64, "tp": 4}}, dtype="bfloat16")

    mesh: PlanMesh
    rules: Annotated[list[PlacementRule], Field(fail_fast=True)] | None = Field(
        default=None,
        max_length=1000,
        description="Pairs of a regular expression, searched in a leaf's path, and its mesh axes "
        "by dimension; the first match counts. Null: by the axis names of the model's family.",
        examples=[[["embedding", ["tp", "fsdp"]], ["kernel", [["dp", "fsdp"], "tp"]], [".*", []]]],
    )
    dtype: Dtype | None = Field(
        default=None, description="Cast floating parameters to it, as `param_dtype` does."
    )
    items: list[Annotated[str, Field(pattern=ITEM_PATTERN)]] | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="Those to load; null: all that belong to the training state.",
    )


PlacedBy = Literal["rules", "axis_names", "nothing"]


class Misfit(Response):
    """Reason why a leaf cannot be placed as requested."""

    detail: str
    dimension: int | None = Field(description="Of the leaf, if it is one that does not fit.")
    length: int | None = Field(description="Of that dimension.")
    axes: list[str] = Field(description="The mesh axes that would split it.")
    parts: int | None = Field(description="Into how many parts; null if the mesh lacks an axis.")


class PlannedLeaf(Response):
    """Placement of a leaf."""

    item: str
    path: str
    shape: list[int]
    dtype: str = Field(description="In which it is made.")
    spec: list[str | list[str] | None] = Field(
        description="Mesh axes of each dimension, without those of size 1 and trailing nulls; and "
        "without those that do not fit."
    )
    part: list[int] = Field(description="Shape of what each device holds.")
    bytes: int
    bytes_per_device: int
    rule: str = Field(
        description="By what it goes there: the rule's expression, `axes (…)`, `mirrors its "
        "parameter`, `factored from its parameter`, `automatic`, `replicated` or `scalar`."
    )
    misfits: list[Misfit]
    unmatched: str | None = Field(
        description="Why a large leaf is whole on every device although nobody asked for that."
    )


class DeviceBytes(Response):
    """Bytes that each device holds."""

    model: int
    optimizer: int
    other: int
    total: int


class StepPlan(Page):
    """Placement of a checkpoint on a mesh. Everything but `leaves` is the same on each page."""

    step: StepName
    mesh: dict[str, int] = Field(description="Devices along each axis.")
    devices: int
    processes: int
    fits: bool = Field(description="Whether it can be loaded so.")
    misfits: int = Field(description="Leaves that do not fit; they are the first in the list.")
    problems: list[str] = Field(description="Why it can't be loaded so, besides leaves.")
    placed_by: PlacedBy = Field(
        description="`nothing`: neither are there rules, nor is the model's family known, and all "
        "leaves are whole on every device."
    )
    notes: list[str] = Field(description="What to know of these numbers, for people.")
    bytes: int = Field(description="Of all leaves, as they are made.")
    bytes_per_device: DeviceBytes
    host_bytes: int = Field(
        description="The most that waits in the memory of a process for its transfer to devices, "
        "with what its reads are held in. On devices of the CPU, which hold the leaves there, "
        "these come on top."
    )
    read_bytes: int = Field(
        description="Of stored chunks that a process reads, at most; before decompression, less."
    )
    read_bytes_in_all: int = Field(description="That all processes read together.")
    idle_rules: list[str] = Field(description="Rules that take no leaf.")
    load: str | None = Field(
        description="Python that loads it so; null if it does not fit, or `load_state` can't."
    )
    leaves: list[PlannedLeaf] = Field(
        description="Those that do not fit first, then by item and path."
    )


class Worker(Response):
    """Process that executes jobs."""

    name: str
    host: str
    process: int
    version: str
    started: datetime
    alive: bool = Field(description="A live process has its name.")
    running: list[str] = Field(description="Ids of the operations that it has taken.")


class WorkerList(Response):
    """All workers, by name."""

    model_config = _example(
        workers=[
            {
                "name": "local",
                "host": "node-7",
                "process": 24731,
                "version": "0.1.0",
                "started": "2026-03-02T09:00:00Z",
                "alive": True,
                "running": [],
            }
        ]
    )

    workers: list[Worker]


class RunWriter(Response):
    """Writer of a run, from its lease in the store."""

    model_config = _example(
        writer="trainer@node-7", attempt=1, expires="2026-03-02T10:16:00Z", holds=True
    )

    writer: str | None = Field(description="Its id; null: nobody ever has.")
    attempt: int | None = Field(description="The attempt that it holds, or held last.")
    expires: datetime | None = Field(description="When the lease ends, if it is not renewed.")
    holds: bool = Field(description="It does now: another one can't begin.")


class TakeOverRequest(Request):
    """Request to take a run over from its writer."""

    model_config = _example(attempt=1, reason="The job of this writer was killed.")

    attempt: Whole = Field(description="The attempt that holds it, as it was seen.")
    reason: Annotated[PlainText, Field(max_length=2000)] = Field(
        default="", description="For the audit trail."
    )


class RunTakenOver(Response):
    """Result of a takeover."""

    model_config = _example(writer="trainer@node-7", ended=1, attempt=2, latest_step=1000)

    writer: str = Field(description="Id of the one that held the run.")
    ended: int = Field(description="Its attempt. What it saves from now on does not count.")
    attempt: int = Field(description="The one that began, and ended, in its place.")
    latest_step: int | None = Field(description="The latest step, which stays.")


class TakenOver(Response):
    """Operations of a dead worker that other workers execute now."""

    model_config = _example(operations=["op-01a22123a59f5367d57426d2789b77d9"])

    operations: list[str] = Field(description="Their ids.")


class Scope(StrEnum):
    """Scope of a caller's permission; each scope includes those before it."""

    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"

    def includes(self, other: "Scope") -> bool:
        """Return whether this scope is `other` or a higher one."""
        order = list(Scope)
        return order.index(self) >= order.index(other)


class KeyRequest(Request):
    """Request to create a caller's key."""

    model_config = _example(
        name="trainers", scope="operate", roots=["default"], expires_seconds=7776000
    )

    name: str = Field(
        pattern=NAME_PATTERN,
        description="Of the caller, for the audit trail; no other key that counts has it.",
        examples=["trainers"],
    )
    scope: Scope = Field(default=Scope.READ, strict=False)  # JSON sends enums as text
    roots: list[Annotated[str, Field(pattern=NAME_PATTERN)]] | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="Names of the roots where it counts; null: in all.",
    )
    expires_seconds: float | None = Field(
        default=None,
        gt=0,
        le=MAX_GRACE_SECONDS,
        description="How long it counts; null: until it is revoked.",
    )


class Key(Response):
    """Key of a caller, without its secret."""

    model_config = _example(
        id="24xx7yyxodhf",
        name="trainers",
        scope="operate",
        roots=["default"],
        counts=True,
        created="2026-03-02T09:00:00Z",
        created_by="ana",
        expires="2026-05-31T09:00:00Z",
        revoked=None,
        last_used="2026-03-02T10:15:00Z",
    )

    id: str = Field(description="The part of the key after `ck_`; no secret.")
    name: str
    scope: Scope
    roots: list[str] | None
    counts: bool = Field(description="It is neither revoked nor expired.")
    created: datetime
    created_by: str
    expires: datetime | None
    revoked: datetime | None
    last_used: datetime | None = Field(description="To the minute.")


class KeyList(Response):
    """All keys, revoked ones too, by name and time of creation."""

    model_config = _example(keys=[example_of(Key)])

    keys: list[Key]


class NewKey(Response):
    """New key, with its secret."""

    model_config = _example(key="ck_…", details=example_of(Key))

    key: str = Field(description="The key itself, told this once.")
    details: Key


AuditOutcome = Literal["done", "refused", "failed", "outside"]
"""Outcome of an action."""


class AuditEvent(Response):
    """Action that was requested of this control plane, or change that somebody made around it."""

    id: int
    at: datetime
    caller: str | None = Field(description="Null: nobody knows.")
    action: str = Field(description="Such as `checkpoint.delete`.", examples=["alias.promote"])
    root: str | None = Field(description="Null: none in particular, as below.")
    run: str | None
    detail: dict[str, Any] = Field(
        description="What was asked for; once it is known, what was before and what came of it."
    )
    outcome: AuditOutcome | None = Field(
        description="`refused`: the request was at fault; `failed`: the service was; `outside`: it "
        "went around this control plane. Null: it is under way, or its process died."
    )
    completed: datetime | None
    request_id: str | None


class AuditEventList(Page):
    """Entries of the audit trail, newest first."""

    model_config = _example(
        audit_events=[
            {
                "id": 2,
                "at": "2026-03-02T10:30:00Z",
                "caller": "ana",
                "action": "alias.promote",
                "root": "default",
                "run": "llama-sft",
                "detail": {"alias": "production", "step": 1000, "attempt": 1},
                "outcome": "done",
                "completed": "2026-03-02T10:30:00Z",
                "request_id": "1e65b5980501c5fdb7e12b6b7b524ef8",
            }
        ],
        next_page_token=None,
    )

    audit_events: list[AuditEvent]


class EventKind(StrEnum):
    """Kind of an event."""

    STEP_DURABLE = "step.durable"
    STEP_DAMAGED = "step.damaged"
    STEP_RECOVERED = "step.recovered"
    ALIAS_MOVED = "alias.moved"
    ALIAS_DELETED = "alias.deleted"
    JOB_ENDED = "job.ended"
    VERIFY_FAILED = "verify.failed"
    INDEX_BEHIND = "index.behind"
    RUN_STALLED = "run.stalled"
    WEBHOOK_TEST = "webhook.test"


class Event(Response):
    """Event about a checkpoint, a run, a root or a job."""

    model_config = _example(
        id=1,
        uid="evt_90c6e466966ea405a5c9753c429ef58e",
        kind="step.durable",
        root="default",
        run="llama-sft",
        sequence=1,
        at="2026-03-02T10:15:02Z",
        detail={
            "step": 1000,
            "attempt": 1,
            "manifest_digest": _DIGEST,
            "bytes": 447518,
            "saved": "2026-03-02T10:15:00Z",
        },
    )

    id: int = Field(description="Grows: who has read one has missed none before it.")
    uid: str = Field(description="`webhook-id` of every message about it.")
    kind: str = Field(
        description=f"What happened: {', '.join(EventKind)}; more may be added.",
        examples=["alias.moved"],
    )
    root: str = Field(description="Name of the root; empty: it is of none.")
    run: str = Field(description="Name of the run; empty: it is of none.")
    sequence: int = Field(description="Of the events of this run, from 1 on.")
    at: datetime = Field(description="When this catalog came to know of it.")
    detail: dict[str, Any] = Field(description="What there is to say of it, by kind.")


class EventList(Page):
    """Events, in the order in which they were noticed."""

    model_config = _example(events=[example_of(Event)], position=1, next_page_token=None)

    events: list[Event]
    position: int = Field(
        description="Id to go on from: of the last event here, or, where there are no more, of the "
        "last one of all, whatever was asked for."
    )


class WebhookRequest(Request):
    """Request to create a webhook."""

    model_config = _example(
        url="https://ci.example.com/cairn", kinds=["step.durable", "alias.moved"], runs="llama-*"
    )

    url: PlainText = Field(
        min_length=1,
        max_length=2000,
        description="Where events are sent: https, without a user and a password.",
        examples=["https://ci.example.com/cairn"],
    )
    kinds: list[Annotated[EventKind, Field(strict=False)]] | None = Field(
        default=None, min_length=1, max_length=100, description="Of what; null: of everything."
    )
    roots: list[Annotated[str, Field(pattern=NAME_PATTERN)]] | None = Field(
        default=None, min_length=1, max_length=1000, description="Of which roots; null: of all."
    )
    runs: str = Field(
        default="*",
        pattern=RUN_GLOB_PATTERN,
        description="Of runs with such a name: `*` is any text, `?` one letter. What is of a root "
        "and of no run is told with `*` only.",
    )


class Webhook(Response):
    """Webhook, without its secret."""

    model_config = _example(
        id="ufn42tgtydbr",
        url="https://ci.example.com/cairn",
        kinds=["step.durable", "alias.moved"],
        roots=None,
        runs="llama-*",
        created="2026-03-02T09:00:00Z",
        created_by="ana",
        pending=0,
        dead=0,
    )

    id: str
    url: str
    kinds: list[str] | None
    roots: list[str] | None
    runs: str
    created: datetime
    created_by: str
    pending: int = Field(description="Events that are still to be delivered.")
    dead: int = Field(description="Events that were given up.")


class WebhookList(Response):
    """All webhooks, by time of creation."""

    model_config = _example(webhooks=[example_of(Webhook)])

    webhooks: list[Webhook]


class NewWebhook(Response):
    """New webhook, with its secret."""

    model_config = _example(secret="whsec_…", details=example_of(Webhook))

    secret: str = Field(description="With which messages are signed; told this once.")
    details: Webhook


class DeliveryState(StrEnum):
    """State of a delivery; a dead one is tried again only on request."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


class DeliveryTry(Response):
    """Try to send an event."""

    at: datetime
    seconds: float
    status: int | None = Field(description="Of the answer; null: there was none.")
    error: str | None = Field(description="Why it does not count as delivered.")


class Delivery(Response):
    """Delivery of an event to a webhook, and its tries."""

    model_config = _example(
        id=1,
        state="delivered",
        attempts=1,
        due=None,
        tries=[{"at": "2026-03-02T10:15:03Z", "seconds": 0.2, "status": 204, "error": None}],
        event=example_of(Event),
    )

    id: int
    state: DeliveryState
    attempts: int = Field(description="Tries since it was last asked for.")
    due: datetime | None = Field(description="When it is tried next, at the earliest.")
    tries: list[DeliveryTry] = Field(description="The last ones, oldest first.")
    event: Event


class DeliveryList(Page):
    """Deliveries of a webhook, newest first."""

    model_config = _example(deliveries=[example_of(Delivery)], next_page_token=None)

    deliveries: list[Delivery]


class AnnounceRequest(Request):
    """Announcement of a step that a job has saved."""

    model_config = _example(step=1000)

    step: Whole
    attempt: Whole | None = Field(default=None, description="The attempt that saved it.")


class Alias(Response):
    """Name that points at a step; its ETag is its sequence number in quotes."""

    model_config = _example(
        alias="production",
        step=1000,
        attempt=1,
        manifest_digest=_DIGEST,
        by="ana",
        reason="Best eval loss so far.",
        at="2026-03-02T10:30:00Z",
        sequence=3,
        audited=True,
    )

    alias: str
    step: int
    attempt: int
    manifest_digest: str | None
    by: str
    reason: str
    at: datetime
    sequence: int
    audited: bool | None = Field(
        default=None,
        description="Whether this control plane was asked for the move. False: somebody who may "
        "write the store made it, around keys and gates. Null: not known.",
    )


class AliasList(Response):
    """Aliases of a run, by name."""

    model_config = _example(aliases=[example_of(Alias)])

    aliases: list[Alias]


class AliasMove(Response):
    """Move of an alias, or its deletion."""

    step: int = Field(description="Where it pointed from then on; for a deletion, until then.")
    attempt: int
    manifest_digest: str | None
    by: str
    reason: str
    at: datetime
    sequence: int
    deleted: bool


class AliasHistory(Response):
    """Moves of an alias, newest first, even after its deletion; the last hundred at most."""

    model_config = _example(
        alias="production",
        events=[
            {
                "step": 1000,
                "attempt": 1,
                "manifest_digest": _DIGEST,
                "by": "ana",
                "reason": "Best eval loss so far.",
                "at": "2026-03-02T10:30:00Z",
                "sequence": 3,
                "deleted": False,
            }
        ],
    )

    alias: str
    events: list[AliasMove]


class PromoteRequest(Request):
    """Request to point an alias at a step."""

    model_config = _example(alias="production", reason="Best eval loss so far.")

    alias: str = Field(pattern=ALIAS_PATTERN, max_length=MAX_ALIAS_LENGTH, examples=["production"])
    reason: PlainText = Field(default="", max_length=2000)
    attempt: Whole | None = Field(
        default=None,
        description="The attempt that wrote the step which is meant; null: whichever holds it.",
    )


class AnnotateRequest(Request):
    """Request to set labels and metrics of a step; null removes an entry, and others stay."""

    model_config = _example(
        labels={"eval": "passed", "draft": None},
        metrics={"eval/loss": 1.84},
        better={"eval/loss": "min"},
    )

    labels: Named[LabelText | None] = Field(default_factory=dict)
    metrics: Named[Metric | None] = Field(default_factory=dict)
    better: Named[Better | None] = Field(
        default_factory=dict,
        description="Of metrics, whether small (`min`) or large (`max`) values are good.",
        examples=[{"eval/loss": "min"}],
    )


class AddRootRequest(Request):
    """Request to add a root at run time."""

    model_config = _example(name="vision", uri="/mnt/vision")

    name: str = Field(pattern=NAME_PATTERN)
    uri: PlainText = Field(
        min_length=1,
        max_length=2000,
        description="A folder or a bucket that exists: `/path`, `file://`, `gs://` or `s3://`, "
        "such as `gs://bucket/vision`.",
    )
    adopt_from: list[Annotated[PlainText, Field(min_length=1, max_length=2000)]] = Field(
        default_factory=list,
        max_length=100,
        description="Folders outside it whose checkpoints its runs may list where they lie. "
        "Whoever may read the root can then read all that lies there.",
    )


class CreateRunRequest(Request):
    """Request to create a run before its job starts, which then writes to it."""

    model_config = _example(name="llama-sft", labels={"team": "nlp"})

    name: str = Field(pattern=RUN_PATTERN, examples=["llama-sft"])
    labels: Named[LabelText] = Field(default_factory=dict, examples=[{"team": "nlp"}])


class AnnotateRunRequest(Request):
    """Request to set labels of a run; null removes a label, and other labels stay."""

    model_config = _example(labels={"team": "nlp", "draft": None})

    labels: Named[LabelText | None] = Field(default_factory=dict)


class RestoreMode(StrEnum):
    """Mode of a restore."""

    FORK = "fork"
    ROLLBACK = "rollback"


class RestoreRequest(Request):
    """Request to start a new run from a step (fork), or to supersede later steps (rollback)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"mode": "fork", "run": "llama-sft-2"}],
            "if": {"properties": {"mode": {"const": "rollback"}}, "required": ["mode"]},
            "then": {"properties": {"run": {"type": "null"}}},
            "else": {
                "properties": {"run": {"type": "string"}, "strand": {"maxItems": 0}},
                "required": ["run"],
            },
        }
    )

    mode: RestoreMode = Field(default=RestoreMode.FORK, strict=False)  # JSON sends enums as text
    run: str | None = Field(
        default=None,
        pattern=RUN_PATTERN,
        description="fork: name of the new run, in the same root. rollback: left out.",
    )
    strand: list[Annotated[str, Field(pattern=ALIAS_PATTERN, max_length=MAX_ALIAS_LENGTH)]] = Field(
        default_factory=list,
        max_length=100,
        description="rollback: aliases that may stay on a superseded step. fork: none.",
    )
    despite_damage: DespiteDamage | None = None


_RulePart = Annotated[PlainText, Field(min_length=1, max_length=1000)]


class AdoptedModel(Request):
    """Model in imported steps, and the leaves that belong to it."""

    config: dict[str, Any] = Field(
        min_length=1,
        description="Hugging Face's config.json of the model.",
        examples=[{"model_type": "llama", "hidden_size": 2048}],
    )
    map: Annotated[dict[_RulePart, _RulePart], Field(min_length=1), _ByName(1000)] = Field(
        description="Regular expressions of whole paths, `<item>/<path>`, and the path that the "
        "model has for such a leaf, with groups as `\\1`. The first that matches counts.",
        examples=[{"state/params/(.*)": "model/\\1"}],
    )

    @model_validator(mode="after")
    def _refuse_what_can_not_be_kept(self) -> Self:
        try:
            size = len(json.dumps(self.model_dump(), ensure_ascii=False, allow_nan=False).encode())
        except ValueError as exc:  # NaN, or half of a surrogate pair in a text
            raise ValueError(f"expected JSON, found something else: {exc}") from exc
        if size > MAX_MODEL_BYTES:
            raise ValueError(f"expected at most {MAX_MODEL_BYTES} bytes of JSON, found {size}")
        for name in ("num_hidden_layers", "n_layer"):
            count = self.config.get(name)
            if isinstance(count, int) and count > MAX_LAYERS:
                raise ValueError(f"config: {name}: expected at most {MAX_LAYERS}, found {count}")
        return self


class AdoptRequest(Request):
    """Request to import the checkpoints in a folder of plain Orbax as steps of a run, in place."""

    model_config = _example(folder="old_run", run="imported")

    folder: PlainText = Field(
        min_length=1,
        max_length=4000,
        description="That Orbax was given: its path within the run's root, or a URI or an absolute "
        "path in any root that the caller may use.",
        examples=["old_run"],
    )
    run: str = Field(
        pattern=RUN_PATTERN,
        description="Name of the run: a new one, or that which adopts the folder already.",
    )
    step: Whole | None = Field(
        default=None, description="The folder is one checkpoint, and this its step."
    )
    model: AdoptedModel | None = Field(
        default=None,
        description="Gives each step an item `model`, which can be exported. A run keeps to one.",
    )


class UndeleteRequest(Request):
    """Request to undelete a step."""

    model_config = _example(attempt=1)

    attempt: Whole | None = Field(
        default=None,
        description="Of several attempts at the step that were deleted, this one.",
    )


class KeepBest(Request):
    """Rule that keeps the best steps by one metric; steps without it are never among the best."""

    metric: PlainText = Field(min_length=1, max_length=256, examples=["eval/loss"])
    count: Count = 1
    mode: Better = Field(default="min", description="`min`: small ones are good.")


class RetentionPolicy(Request):
    """Policy of the steps to keep: a step stays if any rule keeps it; without rules, all stay.

    The latest step, and steps that an alias names, stay whatever the policy says.
    """

    keep_last: Count | None = Field(
        default=None,
        description="This many latest steps.",
    )
    keep_every: Count | None = Field(
        default=None,
        description="Every step whose number is a multiple of this.",
    )
    keep_within_seconds: float | None = Field(
        default=None,
        gt=0,
        le=MAX_GRACE_SECONDS,
        description="Every step saved within this many seconds before now.",
    )
    keep_best: list[KeepBest] = Field(default_factory=list, max_length=16)
    keep_labelled: list[PlainText] = Field(
        default_factory=list,
        max_length=64,
        description="Every step with one of these labels: `name`, or `name=value`.",
    )


class ApplyRetentionRequest(Request):
    """Request to delete the steps that a policy does not keep, or to list them."""

    model_config = _example(
        policy={
            "keep_last": 3,
            "keep_every": 1000,
            "keep_best": [{"metric": "eval/loss", "count": 2, "mode": "min"}],
        },
        dry_run=True,
    )

    policy: RetentionPolicy
    dry_run: bool = Field(default=True, description="Only say what would be deleted.")
    grace_seconds: float = Field(
        default=GRACE_SECONDS,
        ge=0,
        le=MAX_GRACE_SECONDS,
        description="How long a deleted step can be had back.",
    )


class RetentionDecision(Response):
    """Decision about a step, with its reasons."""

    step: int
    attempt: int
    keep: bool
    reasons: list[str] = Field(description="What keeps it; empty if nothing does.")
    bytes: int
    created: datetime


class RetentionPlan(Response):
    """Steps that a policy would keep and delete now."""

    model_config = _example(
        root="default",
        run="llama-sft",
        decisions=[
            {
                "step": 1000,
                "attempt": 1,
                "keep": True,
                "reasons": ["latest", "alias production"],
                "bytes": 447518,
                "created": "2026-03-02T10:15:00Z",
            },
            {
                "step": 900,
                "attempt": 1,
                "keep": False,
                "reasons": [],
                "bytes": 447518,
                "created": "2026-03-02T10:10:00Z",
            },
        ],
        delete_count=1,
        delete_bytes=447518,
    )

    root: str
    run: str
    decisions: list[RetentionDecision] = Field(description="Listed steps, highest first.")
    delete_count: int
    delete_bytes: int


class CollectGarbageRequest(Request):
    """Request to remove a run's garbage, or to list it."""

    model_config = _example(dry_run=True)

    dry_run: bool = Field(default=True, description="Only say what would be removed.")


class VerifyRunRequest(Request):
    """Request to compare the stored bytes of a run with what was written."""

    model_config = _example(steps="latest")

    steps: Literal["all", "latest", "none"] = Field(
        default="all",
        description="Whose bytes to read: every listed checkpoint's, the latest one's, or none. "
        "The run's records are compared in any case.",
    )


class RepairRequest(Request):
    """Request to rebuild records of a run from its other records, or to list the repairs."""

    model_config = _example(dry_run=True)

    dry_run: bool = Field(default=True, description="Only say what would be done.")
    forget: list[PlainText] = Field(
        default_factory=list,
        max_length=1000,
        description="Names of records that can't be rebuilt, and that the run shall go on without.",
    )


class Repair(Response):
    """Record that is damaged, lost or in the place of another one, and its repair."""

    name: str
    action: str | None = Field(description="What mends it; null: nothing but a backup can.")
    hint: str = Field(description="What to do by hand.")
    done: bool


class RepairReport(Response):
    """Repairs of a run's records, possible or done; empty if all records are intact."""

    model_config = _example(root="default", run="llama-sft", repairs=[])

    root: str
    run: str
    repairs: list[Repair]


class GatherRequest(Request):
    """Request to gather a checkpoint into one safetensors file."""

    model_config = _example(items=["model"], dtype="bfloat16")

    items: list[Annotated[str, Field(pattern=ITEM_PATTERN)]] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Those to write; null: `model`, or, of a step without it, all that hold "
        "arrays.",
    )
    dtype: Dtype | None = Field(
        default=None, description="Convert floating leaves; null: as stored."
    )
    despite_damage: DespiteDamage | None = None


class ConvertRequest(Request):
    """Request to export a checkpoint as Hugging Face files (safetensors) or as one GGUF."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"format": "huggingface", "dtype": "bfloat16"}],
            "if": {"properties": {"format": {"const": "gguf"}}, "required": ["format"]},
            "then": {
                "properties": {
                    "dtype": {"not": {"const": "float64"}},
                    "lora": {"const": "merge"},
                    "check_logits": {"const": False},
                }
            },
            "else": {
                "properties": {"dtype": {"not": {"const": "q8_0"}}},
                "not": {
                    "properties": {"lora": {"const": "keep"}, "check_logits": {"const": True}},
                    "required": ["lora", "check_logits"],
                },
            },
        }
    )

    format: Literal["huggingface", "pytorch", "gguf"] = Field(
        default="huggingface",
        description="`pytorch` is another name for `huggingface`; `gguf` is for llama.cpp.",
    )
    dtype: ExportDtype | None = Field(
        default=None,
        description="Convert floating leaves; null: as stored, for GGUF float16. `q8_0` (eight "
        "bits each, and a scale for 32 of them) is GGUF's alone, which has no float64.",
    )
    max_shard_size: str = Field(
        default="5GB",
        max_length=32,
        json_schema_extra={"pattern": SIZE_PATTERN},
        description="Bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB; at least one. A "
        "GGUF is one file whatever this says.",
    )
    lora: Literal["merge", "keep"] = Field(
        default="merge",
        description="What becomes of adapters: merged into the weights, or kept as a folder that "
        "PEFT loads, of them alone. Of a model without, `keep` fails.",
    )
    allow_nonfinite: bool = Field(
        default=False,
        description="Export weights that are NaN or infinite, or become so in `dtype`, instead of "
        "failing; the result counts them by tensor.",
    )
    check_logits: bool = Field(
        default=False,
        description="Before the export counts, compute logits of fixed tokens with the checkpoint "
        "(JAX) and with the export (transformers), each in a process of its own that holds the "
        "model in float32: they have to agree. `logits_check.json`, among the files, says how far. "
        "The worker needs JAX and PyTorch.",
    )
    config: dict[str, Any] | None = Field(
        default=None,
        description="Of a step that another trainer stored (MaxText, Tunix): its model's "
        "config.json, or the trainer's own settings. Keys for sizes may be left out: the stored "
        "tree tells them. null: the trainer's file is looked for beside the step.",
    )
    reference_logits: str | None = Field(
        default=None,
        max_length=4096,
        description="Address of a .npz or .safetensors file with `tokens` [batch, length] and "
        "`logits` [batch, length, vocabulary] that the trainer computed with its own model; it "
        "lies in the root, or in a folder that the server adopts from. The export has to compute "
        "the same logits. As `check_logits`, the worker then needs JAX and PyTorch.",
    )
    memory: str | None = Field(
        default=None,
        max_length=32,
        json_schema_extra={"pattern": SIZE_PATTERN},
        description="Most bytes that writing its files takes, over all workers, as a size: as many "
        "files are written at a time as fit. An export of which no file fits fails at once. null: "
        "each worker writes two at a time.",
    )
    despite_damage: DespiteDamage | None = None


class OperationKind(StrEnum):
    """Kind of a job."""

    ADOPT = "adopt"
    RESTORE = "restore"
    GATHER = "gather"
    CONVERT = "convert"
    RETENTION = "retention"
    GC = "gc"
    VERIFY = "verify"


class OperationState(StrEnum):
    """State of a job; the last three are final."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """True if the operation has ended, even if it can be resumed."""
        return self in (self.SUCCEEDED, self.FAILED, self.CANCELLED)


class Progress(Response):
    """Progress of a job, in bytes."""

    done_bytes: int = 0
    total_bytes: int | None = None
    message: str = ""
    seconds_left: float | None = Field(
        default=None, description="Of this piece of work, at its pace; null while there is none."
    )


class Operation(Response):
    """Durable job: it survives restarts of the server."""

    model_config = _example(
        id="op-01a22123a59f5367d57426d2789b77d9",
        kind="convert",
        state="succeeded",
        progress={
            "done_bytes": 115328,
            "total_bytes": 115328,
            "message": "done",
            "seconds_left": None,
        },
        request={
            "root": "default",
            "run": "llama-sft",
            "step": 1000,
            "attempt": 1,
            "options": {"format": "huggingface"},
        },
        caller="ana",
        result={"artifact_id": _ARTIFACT, "bytes": 117925, "existing": False},
        error=None,
        created="2026-03-02T10:30:00Z",
        updated="2026-03-02T10:30:12Z",
    )

    id: str
    kind: OperationKind | str = Field(
        union_mode="left_to_right",
        description="Another text: a newer server started it, and this one does not know how to go "
        "on with it. It is shown, and neither cancelled nor resumed.",
    )
    state: OperationState
    progress: Progress
    request: dict[str, Any] = Field(description="What was asked for, with its root, run and step.")
    caller: str | None = Field(
        default=None,
        description="Who started it: the name of a caller, as in the audit trail, or the policy "
        "that did; null: unknown.",
    )
    result: dict[str, Any] | None = None
    error: Problem | None = None
    created: datetime
    updated: datetime

    @property
    def seconds(self) -> float | None:
        """Time from its start to its end, with the time it waited; None: it has not ended."""
        return (self.updated - self.created).total_seconds() if self.state.final else None

    @property
    def export_options(self) -> Mapping[str, Any]:
        """Options of an export; empty for operations of another kind."""
        options = self.request.get("options")
        is_export = self.kind in (OperationKind.CONVERT, OperationKind.GATHER)
        return options if is_export and isinstance(options, Mapping) else {}

    @property
    def has_found_damage(self) -> bool:
        """True for a verification that failed because it found damage."""
        if self.kind is not OperationKind.VERIFY or self.error is None:
            return False
        return self.error.type == DAMAGED_PROBLEM


class OperationList(Page):
    """Operations, newest first."""

    model_config = _example(operations=[example_of(Operation)], next_page_token=None)

    operations: list[Operation]


class ArtifactFile(Response):
    """File of an artifact."""

    name: str
    bytes: int
    crc32c: str | None = None


class Artifact(Response):
    """Result of a gather or convert job: its files."""

    model_config = _example(
        id=_ARTIFACT,
        kind="convert",
        root="default",
        run="llama-sft",
        step=1000,
        attempt=1,
        manifest_digest=_DIGEST,
        options={"format": "huggingface"},
        uri="gs://example-bucket/runs/llama-sft/exports/1000.1/convert-a82932109485877e",
        bytes=117925,
        files=[
            {"name": "config.json", "bytes": 565, "crc32c": "8bd0ecb2"},
            {"name": "model.safetensors", "bytes": 117360, "crc32c": "c1724b4a"},
        ],
        created="2026-03-02T10:30:12Z",
    )

    id: str
    kind: OperationKind
    root: str
    run: str
    step: int
    attempt: int
    manifest_digest: str = Field(description="Of the step that it was made from.")
    options: dict[str, Any] = Field(description="What was asked for.")
    uri: str
    bytes: int
    files: list[ArtifactFile]
    created: datetime


class ArtifactList(Response):
    """Artifacts of a step, newest first."""

    model_config = _example(artifacts=[example_of(Artifact)])

    artifacts: list[Artifact]
