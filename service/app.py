"""ASGI application of the control plane: `create_app()`, or `cairn.service.app:app` for servers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Final

from anyio.to_thread import current_default_thread_limiter
from fastapi import APIRouter, Depends, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute
from starlette.types import Scope

from cairn.installation import installed_version
from cairn.service.access.authenticator import Authenticator
from cairn.service.access.guard import KeysGuard
from cairn.service.access.keys import has_valid_key
from cairn.service.access.loopback import LoopbackGuard
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.schedules import Scheduler
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.refresh import Index
from cairn.service.catalog.roots import Roots
from cairn.service.catalog.scanner import Scanner
from cairn.service.dashboard.error_pages import ErrorPages
from cairn.service.dashboard.rendering import static_files
from cairn.service.dashboard.routers import OPEN_ROUTERS
from cairn.service.dashboard.routers import ROUTERS as PAGES
from cairn.service.errors import SettingsError
from cairn.service.events.sender import Sender
from cairn.service.http.body_limit import BodyLimit
from cairn.service.http.limiters import (
    AT_ONCE,
    STREAMS_AT_ONCE,
    STREAMS_SHARE,
    CatalogLimiter,
    MemoryLimiter,
    StoreLimiter,
)
from cairn.service.http.openapi import describe_api
from cairn.service.http.problems import install_handlers, problem_responses
from cairn.service.http.query_parameters import refuse_unknown_parameters
from cairn.service.jobs.dbos_engine.jobs import Jobs, open_jobs
from cairn.service.jobs.watches import Watches
from cairn.service.jobs.worker import start_worker
from cairn.service.observability.metrics import ServerMetrics
from cairn.service.observability.requests import ObservedRequests
from cairn.service.observability.tracing import traced
from cairn.service.routes import (
    adopt,
    aliases,
    artifacts,
    audit,
    checkpoints,
    clean_up,
    convert,
    events,
    exports,
    files,
    gather,
    health,
    keys,
    metrics,
    operations,
    policies,
    restore,
    roots,
    runs,
    tensors,
    verify,
    webhooks,
    workers,
    writers,
)
from cairn.service.settings import Settings, load_settings

logger = logging.getLogger(__name__)

API_PREFIX: Final = "/v1"
ROUTERS: Final[tuple[APIRouter, ...]] = (
    roots.router,
    runs.router,
    checkpoints.router,
    tensors.router,
    files.router,
    artifacts.step_router,
    exports.router,
    aliases.router,
    writers.router,
    adopt.router,
    restore.router,
    gather.router,
    convert.router,
    clean_up.router,
    verify.router,
    operations.router,
    policies.router,
    workers.router,
    keys.router,
    events.router,
    webhooks.router,
    artifacts.router,
    audit.router,
)


def create_app(settings: Settings | None = None, *, jobs: bool = True) -> FastAPI:
    """Create the application. It opens its databases when it starts, not here.

    Args:
        settings: Settings of the server; default: from the environment.
        jobs: Launch the job engine, of which a process can have one. Without it, operations answer
            503.

    Raises:
        SettingsError: A setting is invalid.
    """
    settings = settings or load_settings()
    app = _framed(lifespan=_lifespan)
    # FastAPI documents this way to replace the OpenAPI document.
    app.openapi = partial(_document, settings.auth == "keys")  # type: ignore[method-assign]
    app.state.settings = settings
    app.state.launch_jobs = jobs
    install_handlers(app)
    app.add_middleware(BodyLimit)
    if settings.auth == "keys":
        app.add_middleware(KeysGuard, settings=settings)
    else:
        app.add_middleware(LoopbackGuard)
    app.add_middleware(ErrorPages)
    app.state.metrics = ServerMetrics(version=installed_version())
    app.add_middleware(
        ObservedRequests, metrics=app.state.metrics.requests, route_of=_route_template
    )
    app.mount("/static", static_files)
    return app


def _framed(**options: Any) -> FastAPI:
    """Create an application with all operations and pages, without middleware."""
    return FastAPI(
        routes=_routes(),
        title="Cairn",
        summary="Checkpoints of JAX training jobs: find, promote, restore, convert.",
        description="Every error is a problem (RFC 9457): `application/problem+json`, whose `type` "
        "names its kind. Unknown query parameters under `/v1` are rejected (422).",
        version=installed_version(),
        docs_url=None,  # FastAPI's page runs scripts of a CDN on our origin
        redoc_url=None,
        redirect_slashes=False,
        **options,
    )


@cache
def _document(needs_keys: bool) -> dict[str, Any]:
    """Build the OpenAPI document, once: the first request with a query waits for it."""
    return describe_api(_framed(), needs_keys=needs_keys)


@cache
def _routes() -> list[BaseRoute]:
    """Build all routes, once: the applications of a process share them."""
    all_routes = APIRouter(generate_unique_id_function=lambda route: route.name)
    for router in ROUTERS:
        all_routes.include_router(
            router,
            prefix=API_PREFIX,
            responses=problem_responses(),
            dependencies=[Depends(refuse_unknown_parameters)],
        )
    for router in (health.router, metrics.router):
        all_routes.include_router(router, responses=problem_responses())
    for router in (*PAGES, *OPEN_ROUTERS):
        all_routes.include_router(router)
    return all_routes.routes


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    watching = app.state.metrics.watching(metrics.parts(app))
    with traced("cairn-server", version=installed_version()), watching:
        async with _opened(app):
            yield


@asynccontextmanager
async def _opened(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    await run_in_threadpool(settings.prepare)
    open_catalog = partial(Catalog.open, settings.database_url, auto_upgrade=settings.auto_upgrade)
    catalog = await run_in_threadpool(open_catalog)
    jobs: Jobs | None = None
    watches: Watches | None = None
    scheduler: Scheduler | None = None
    sender: Sender | None = None
    index = Index(catalog)
    hold_threads = _enough_threads(len(settings.root_uris))

    def changed(count: int) -> None:
        hold_threads(count)
        scanner.wake()

    roots = Roots(catalog, settings.root_uris, changed=changed)
    scanner = Scanner(index, roots, settings.scan_seconds)
    try:
        await run_in_threadpool(_refuse_without_keys, settings, catalog)
        app.state.authenticator = _authenticator(settings, catalog)
        app.state.store_limiter = StoreLimiter()
        app.state.stream_limiter = StoreLimiter(STREAMS_AT_ONCE, STREAMS_SHARE)
        app.state.memory_limiter = MemoryLimiter()
        app.state.catalog_limiter = CatalogLimiter(catalog.reads_at_once)
        app.state.search_limiter = CatalogLimiter(catalog.reads_at_once)
        scanner.start()
        if app.state.launch_jobs:
            jobs = await run_in_threadpool(open_jobs, settings, roots)
            watches = Watches(jobs)
            if settings.worker:
                jobs.worker = await run_in_threadpool(
                    start_worker, settings, catalog, metrics=app.state.metrics.jobs
                )
                sender = Sender(settings, catalog, jobs)
                sender.start()
        app.state.plane = ControlPlane(settings, roots, index, jobs, watches)
        for rule in settings.policies_without_roots(await run_in_threadpool(list, roots)):
            logger.warning("%s: fits no root, and does nothing until one is added", rule)
        if jobs is not None:
            scheduler = Scheduler(app.state.plane)
            scheduler.start()
        yield
    finally:
        # In reverse order: what starts jobs stops before the jobs, and everything before the
        # catalog.
        if scheduler is not None:
            await run_in_threadpool(scheduler.close)
        if watches is not None:
            await watches.close()
        if sender is not None:
            await run_in_threadpool(sender.close)
        if jobs is not None:
            await run_in_threadpool(jobs.close)
        await run_in_threadpool(scanner.close)
        await run_in_threadpool(catalog.close)


def _enough_threads(count: int) -> Callable[[int], None]:
    """Size the thread pool for the threads that silent stores can block, plus those for other work.

    Args:
        count: Current number of roots.

    Returns:
        A function that sizes the pool for a new number of roots; any thread may call it.
    """
    limiter, loop = current_default_thread_limiter(), asyncio.get_running_loop()
    others = limiter.total_tokens

    def hold(count: int) -> None:
        limiter.total_tokens = others + (2 * AT_ONCE + STREAMS_AT_ONCE) * count

    def hold_from_any_thread(count: int) -> None:
        with suppress(RuntimeError):  # the loop has ended, and needs no threads
            loop.call_soon_threadsafe(hold, count)

    hold(count)
    return hold_from_any_thread


def _authenticator(settings: Settings, catalog: Catalog) -> Authenticator:
    """Create the authenticator, with the issuer of the settings, if they name one."""
    lifetime = settings.session_lifetime
    if not settings.oidc_issuer:
        return Authenticator(catalog, lifetime=lifetime)
    from cairn.service.access.oidc import Issuer  # imports httpx and cryptography: 0.5 s
    from cairn.service.access.provider import Provider

    issuer = Issuer(settings)
    return Authenticator(
        catalog,
        issuer.caller if settings.oidc_audience else None,
        provider=Provider(settings, issuer) if settings.oidc_client_id else None,
        lifetime=lifetime,
    )


def _refuse_without_keys(settings: Settings, catalog: Catalog) -> None:
    """Raise if other machines can reach the server, but nobody has a key or token."""
    if not settings.needs_key:
        return
    with catalog.read() as session:
        if has_valid_key(session, now=datetime.now(UTC)):
            return
    raise SettingsError(
        f"CAIRN_HOST: {settings.host!r} can be reached by others: expected a key that counts, "
        "found none. Make one with `cairn keys create --name NAME --scope admin`, with the "
        "settings of this server."
    )


def _route_template(scope: Scope) -> str | None:
    """Return the path template of a request's route, with the names of its parameters."""
    route = scope.get("route")
    if route is None:  # FastAPI's own document, or static files
        return (scope.get("root_path") or scope["path"]) if scope.get("endpoint") else None
    versioned = scope["path"].startswith(f"{API_PREFIX}/")
    return f"{API_PREFIX}{route.path_format}" if versioned else str(route.path_format)


def __getattr__(name: str) -> Any:
    """Create `cairn.service.app:app` when a server imports it."""
    if name == "app":
        globals()["app"] = application = create_app()
        return application
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
