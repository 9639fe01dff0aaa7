"""Health routes: liveness (`/healthz`) and readiness (`/readyz`)."""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final, cast

from fastapi import APIRouter, Request
from sqlalchemy import text

from cairn.service.access.callers import Caller
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import queries
from cairn.service.dependencies import PlaneDependency
from cairn.service.errors import NotReadyError
from cairn.service.http.problems import problem_from, problem_responses
from cairn.service.schemas import Health, Readiness
from cairn.storage.errors import StoreUnavailableError
from cairn.storage.store.deadlines import deadline_after
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 5.0
"""Longest time that a store may take to list a root and still count as ready."""

router: Final = APIRouter(tags=["health"])


@router.get("/healthz")
async def health(request: Request) -> Health:
    """Answer that the server is alive."""
    return Health(version=request.app.version)


@router.get("/readyz", responses=problem_responses(503))
def ready(request: Request, plane: PlaneDependency) -> Readiness:
    """Check that the catalog, the job engine and every root are usable; 503 names those that fail.

    On a server with keys, a caller without a key learns only whether the server is ready. The
    answer names no root that the caller may not use.
    """
    caller = cast(Caller | None, request.state.caller)
    seen = plane.roots if caller is None else caller.visible(plane.roots)

    def ask_catalog() -> None:
        with plane.catalog.read() as session:
            session.execute(text("SELECT 1"))

    def ask_jobs() -> None:
        plane.jobs.check()

    questions: dict[str, Callable[[], object]] = {"catalog": ask_catalog, "jobs": ask_jobs}
    for name, uri in plane.roots.items():
        questions[f"root {name}"] = partial(_ask_root, uri)
    hidden = {f"root {name}" for name in plane.roots if name not in seen}
    usable = True
    errors = []
    for name, ask in questions.items():
        try:
            ask()
        except Exception as exc:  # whatever error a driver raises, the part is unusable
            problem = problem_from(exc, instance="/readyz")
            unexpected = problem.status == HTTPStatus.INTERNAL_SERVER_ERROR
            logger.warning("%s is not ready: %s", name, exc, exc_info=exc if unexpected else None)
            usable = False
            if name not in hidden:
                errors.append({"field": name, "detail": problem.detail})
    if not usable and (caller is None or not errors):
        raise NotReadyError("not usable now; a caller who may use all roots is told what is not")
    if not usable:
        unusable = ", ".join(error["field"] for error in errors)
        raise NotReadyError(f"not usable: {unusable}", errors=errors)
    if caller is None:
        return Readiness(checks={})
    parts = [name for name in questions if name not in hidden]
    return Readiness(checks=dict.fromkeys(parts, "ok") | _index_lag(plane, seen))


def _index_lag(plane: ControlPlane, roots: Mapping[str, StoreURI]) -> dict[str, str]:
    """Describe how long ago each root was indexed. A late index does not make a server unready."""
    with plane.catalog.read() as session:
        sums_by_root = queries.root_sums(session)
    lags = {}
    for name, uri in roots.items():
        sums = sums_by_root.get(name)
        lag = None if sums is None else sums.lag(uri)
        if sums is None or lag is None:
            lags[f"index {name}"] = "not looked at yet"
            continue
        failed = "; the last look failed" if sums.problem is not None else ""
        lags[f"index {name}"] = f"looked at {lag:.1f} s ago{failed}"
    return lags


def _ask_root(uri: StoreURI) -> None:
    """List a root. A folder that does not exist yet passes, since the first save creates it."""
    if (
        uri.scheme == "file"
        and os.path.exists(uri.local_path)
        and not os.path.isdir(uri.local_path)
    ):
        raise StoreUnavailableError(
            "no folder", path=uri, expected="a folder, or nothing yet", found="a file"
        )
    with deadline_after(ANSWER_SECONDS):
        open_files(uri).list()
