"""What routes share: settings, catalog, path parameters, the run in the store.

A route takes `run: RunDependency` and has an opened `Run` of a configured root; names are checked
before anything is touched, and an unknown root or run is a 404 problem.
"""

import contextlib
from typing import Annotated, cast

from fastapi import Depends, Header, Path, Query, Request
from pydantic import BeforeValidator

from cairn.service.catalog import Catalog, Index
from cairn.service.errors import UnknownRootError
from cairn.service.observing import RequestMetrics, ServerMetrics
from cairn.service.schemas import NAME_PATTERN
from cairn.service.settings import Settings
from cairn.storage.runs import UNREADABLE, Run, refuse_headless
from cairn.storage.store import StoreURI, confine

MAX_STEP = 2**53 - 1  # the largest integer that every JSON reader keeps exact


def _plain_decimal(value: object) -> object:
    text = str(value)
    if not (text.isascii() and text.isdigit()) or (text[0] == "0" and text != "0"):
        raise ValueError("expected a step: a plain decimal number without sign or leading zeros")
    return value


RootName = Annotated[
    str, Path(pattern=NAME_PATTERN, description="Name of a store root.", examples=["default"])
]
RunName = Annotated[
    str, Path(pattern=NAME_PATTERN, description="Name of a run.", examples=["llama-sft"])
]
AliasName = Annotated[
    str, Path(pattern=NAME_PATTERN, description="Name of an alias.", examples=["production"])
]
StepNumber = Annotated[
    int, BeforeValidator(_plain_decimal), Path(ge=0, le=MAX_STEP, description="A training step.")
]
PageSize = Annotated[int, Query(ge=1, le=1000, description="Entries at most on this page.")]
PageToken = Annotated[
    str | None,
    Query(max_length=1024, description="`next_page_token` of the page before; opaque."),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="The same key again is the same operation, for good; another request under "
        "it is refused. Without a key, an equal request is the same operation while it is under "
        "way.",
    ),
]


def get_settings(request: Request) -> Settings:
    """The settings that the application was created with."""
    return cast(Settings, request.app.state.settings)


def get_catalog(request: Request) -> Catalog:
    """The catalog of this application."""
    return cast(Catalog, request.app.state.catalog)


def get_index(request: Request) -> Index:
    """What brings the catalog up to date with the store."""
    return cast(Index, request.app.state.index)


def get_request_metrics(request: Request) -> RequestMetrics:
    """What counts the requests to this application."""
    metrics: ServerMetrics = request.app.state.metrics
    return metrics.requests


SettingsDependency = Annotated[Settings, Depends(get_settings)]
CatalogDependency = Annotated[Catalog, Depends(get_catalog)]
IndexDependency = Annotated[Index, Depends(get_index)]
RequestMetricsDependency = Annotated[RequestMetrics, Depends(get_request_metrics)]


def root_uri(settings: Settings, root: str) -> StoreURI:
    """The store URI of a root.

    Raises:
        UnknownRootError: No such root is configured.
    """
    roots = settings.root_uris
    if root not in roots:
        raise UnknownRootError(f"root {root!r}: expected one of {', '.join(roots)}")
    return roots[root]


def find_run(settings: Settings, root: str, run: str) -> Run:
    """Open a run of a configured root, from the store.

    Raises:
        UnknownRootError: No such root is configured.
        InvalidURIError: The name is not one, or leads out of the root.
        RunNotFoundError: The root has no such run.
    """
    return Run.open(confine(root_uri(settings, root), run))


def existing_run(settings: Settings, root: str, run: str) -> Run:
    """A run of a configured root, also one that has lost its `run.json`.

    Raises:
        UnknownRootError: No such root is configured.
        InvalidURIError: The name is not one, or leads out of the root.
        RunNotFoundError: There is nothing of a run.
    """
    found = Run(confine(root_uri(settings, root), run))
    with contextlib.suppress(*UNREADABLE):  # `run.json` is lost, or damaged
        refuse_headless(found)
        found.info()
    return found


def get_run(root: RootName, run: RunName, settings: SettingsDependency) -> Run:
    """The run that the path names."""
    return find_run(settings, root, run)


RunDependency = Annotated[Run, Depends(get_run)]


def get_run_uri(root: RootName, run: RunName, settings: SettingsDependency) -> StoreURI:
    """Where the run that the path names is, or would be; the store is not asked."""
    return confine(root_uri(settings, root), run)


RunURIDependency = Annotated[StoreURI, Depends(get_run_uri)]
Refresh = Annotated[
    bool,
    Query(
        description="Look at the store first. Otherwise the answer is what the catalog knows: what "
        "was done through this server, what jobs have announced, and what `scan_seconds` ago at "
        "most was in the store."
    ),
]
