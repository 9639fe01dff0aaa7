"""Server process: binds its address, announces its URL, ends on a signal."""

import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from cairn.service.actions.plane import ControlPlane
from cairn.service.app import create_app
from cairn.service.command.variables import warn_of_misspelt
from cairn.service.errors import ServeError, ServiceError
from cairn.service.http.connections import MAX_HEAD_BYTES, BoundedConnection
from cairn.service.jobs.process_memory import keep_one_arena
from cairn.service.observability.logs import start_logging
from cairn.service.settings import DEFAULT_ROOT, Settings
from cairn.service.state_folders import folders_beside
from cairn.storage.errors import StorageError

logger = logging.getLogger(__name__)

# Time for downloads under way to finish; event streams end at once.
GRACE_SECONDS: Final = 5
# New objects before a collection of the youngest generation. A page of a hundred makes a few
# thousand, so that a usual request sees no collection.
GARBAGE_AFTER: Final = 20_000


def serve_until_signalled(settings: Settings, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; a second SIGINT does not wait for open connections.

    Args:
        settings: Settings of the application.
        announce: Called with the server's URL once the server answers.

    Raises:
        SettingsError: A setting cannot work.
        ServeError: The address is taken, or the server cannot start.
    """
    keep_one_arena()
    start_logging(settings.log_format, settings.log_level)
    warn_of_misspelt(os.environ)
    _warn_of_new_databases(settings)
    application = create_app(settings)
    listener = _listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    startup = _Startup(application)
    config = uvicorn.Config(
        startup,
        http=BoundedConnection,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,  # uvicorn's loggers then use the handlers of `start_logging`
        access_log=False,  # the application's own access log has a line for each request
        lifespan="on",
        timeout_graceful_shutdown=GRACE_SECONDS,
        proxy_headers=False,  # headers of a proxy are not trusted: the peer's address counts
    )
    server = _Server(config, application, lambda: announce(url))
    # The failure is told once, as the command's error.
    logging.getLogger("uvicorn.error").addFilter(lambda record: startup.failure is None)
    _allow_open_files(4 * BoundedConnection.most)
    with listener:
        try:
            server.run(sockets=[listener])
        except SystemExit as exc:  # uvicorn exits after a failed startup; it logged other errors
            if startup.failure is None:
                raise
            raise startup.failure from exc


def _warn_of_new_databases(settings: Settings) -> None:
    """Warn if a store gets new databases although another folder has databases.

    The store may have been moved, and its databases are in the folder of its old address.
    """
    if {"data_dir", "database_url"} & settings.model_fields_set:
        return
    if others := folders_beside(settings.data_dir):
        logger.warning(
            "%s: begins with new databases, without keys, webhooks, schedules and history, in %s; "
            "there are %s. If the store was moved from there, start with --data-dir of that folder",
            settings.root_uris[DEFAULT_ROOT],
            settings.data_dir,
            "; ".join(others),
        )


def _allow_open_files(count: int) -> None:
    """Raise the limit of open files for connections and the files they read: 1,024 is common."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listen(host: str, port: int) -> socket.socket:
    """Open the listening socket.

    The caller does so before anything else: if the port is taken, nothing has changed.

    Raises:
        ServeError: The address is taken, unknown, or not allowed.
    """
    bare = host.removeprefix("[").removesuffix("]")
    try:
        addresses = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)
        # `localhost` may be both; clients try 127.0.0.1 first.
        family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family)
    except OSError as exc:
        # create_server() repeats the address in its error's text; getaddrinfo() has its own error
        # numbers.
        found_text = (
            exc.strerror if isinstance(exc, socket.gaierror) else os.strerror(exc.errno or 0)
        )
        raise ServeError(
            f"{host}:{port}: expected a free address to listen on, found: {found_text}. "
            "Choose another with --port (0: any free one), or end the server that has it."
        ) from exc


class _Server(uvicorn.Server):
    """Uvicorn server that announces its URL, and exits with status 0 after a signal."""

    def __init__(
        self, config: uvicorn.Config, application: FastAPI, announce: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._application = application
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # A full garbage collection would pause requests, so it excludes all objects loaded so far.
        # Most later objects are freed with their request, so that few collections are needed.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE_AFTER, *gc.get_threshold()[1:])
        if self.started:
            self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Uvicorn's own handler raises the signal again at the end, which makes the exit status
        # that of a killed process.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        plane: ControlPlane | None = getattr(self._application.state, "plane", None)
        if plane is not None and plane.engine is not None:
            plane.engine.stopping = True  # ends event streams now
        await super().shutdown(sockets)


class _Startup:
    """ASGI wrapper that keeps an expected error of the startup, so that no traceback is logged."""

    def __init__(self, application: FastAPI) -> None:
        self._application = application
        self.failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._application(scope, receive, send)
            return
        failure: dict[str, Any] = {}

        async def hold(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                failure.update(message)
            else:
                await send(message)

        try:
            await self._application(scope, receive, hold)
        except (ServiceError, StorageError) as exc:
            self.failure = exc
            await send({"type": "lifespan.startup.failed", "message": ""})
        except BaseException:
            if failure:
                await send(failure)
            raise
