"""Dependencies that routes share: the control plane, and parameters of requests."""

from typing import Annotated, cast

from fastapi import Depends, Header, Path, Query, Request
from pydantic import BeforeValidator, WithJsonSchema

from cairn.service.actions.plane import ControlPlane
from cairn.service.filters.columns import LONGEST_COLUMNS
from cairn.service.filters.order import LONGEST_ORDER
from cairn.service.filters.parser import LONGEST_FILTER
from cairn.service.observability.metrics import RequestMetrics, ServerMetrics
from cairn.service.schemas import (
    ALIAS_PATTERN,
    MAX_ALIAS_LENGTH,
    MAX_NUMBER,
    NAME_PATTERN,
    RUN_PATTERN,
)

MAX_STEP = MAX_NUMBER


def _plain_decimal(value: object) -> object:
    text = str(value)
    if not (text.isascii() and text.isdigit()) or (text[0] == "0" and text != "0"):
        raise ValueError("expected a step: a plain decimal number without sign or leading zeros")
    return value


RootName = Annotated[
    str, Path(pattern=NAME_PATTERN, description="Name of a store root.", examples=["default"])
]
RunName = Annotated[
    str, Path(pattern=RUN_PATTERN, description="Name of a run.", examples=["llama-sft"])
]
AliasName = Annotated[
    str,
    Path(
        pattern=ALIAS_PATTERN,
        max_length=MAX_ALIAS_LENGTH,
        description="Name of an alias.",
        examples=["production"],
    ),
]
StepNumber = Annotated[
    int,
    BeforeValidator(_plain_decimal),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_STEP}),
    Path(ge=0, le=MAX_STEP, description="A training step."),
]
PageSize = Annotated[int, Query(ge=1, le=1000, description="Entries at most on this page.")]
Filter = Annotated[
    str,
    Query(
        max_length=LONGEST_FILTER,
        description="Only entries of which this holds, in a part of the language of AIP-160: "
        "conditions on fields joined by `AND` or `OR`, `NOT`, parentheses; `FIELD:*` asks whether "
        "there is a value.",
    ),
]
OrderBy = Annotated[
    str,
    Query(
        max_length=LONGEST_ORDER,
        description="Fields, with `desc` or without, and with commas between them. Entries that do "
        "not have one come last.",
    ),
]
Columns = Annotated[
    str,
    Query(
        max_length=LONGEST_COLUMNS,
        description="Metrics, config values and labels to add to each run, with commas between "
        "them: `metrics.NAME` is the value at the latest step that has the metric, `best.NAME` the "
        "best one of its listed steps.",
        examples=['best."eval/loss", config.hidden_size, labels.owner'],
    ),
]
PageToken = Annotated[
    str | None,
    Query(max_length=8192, description="`next_page_token` of the page before; opaque."),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="The same key again, of the same caller and for the same root, is the same "
        "operation, for good, also once what it is of is gone; another path, kind or body under it "
        "is refused with 422, which says what it was used for. Callers are told apart by the name "
        "of their key or token, and none shares keys with another. Without a key, an equal request "
        "is the same operation while it is under way, and of an export for as long as its artifact "
        "is there.",
    ),
]


async def get_plane(request: Request) -> ControlPlane:
    """Return the control plane of this application."""
    return cast(ControlPlane, request.app.state.plane)


PlaneDependency = Annotated[ControlPlane, Depends(get_plane)]


async def get_request_metrics(request: Request) -> RequestMetrics:
    """Return the request metrics of this application."""
    metrics: ServerMetrics = request.app.state.metrics
    return metrics.requests


RequestMetricsDependency = Annotated[RequestMetrics, Depends(get_request_metrics)]
Refresh = Annotated[
    bool,
    Query(
        description="Look at the store first. Otherwise the answer is what the catalog knows: what "
        "was done through this server, what jobs have announced, and what `scan_seconds` ago at "
        "most was in the store."
    ),
]
