"""Worker process: executes jobs until a signal ends it."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cairn.installation import installed_version
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.roots import Roots
from cairn.service.command.variables import warn_of_misspelt
from cairn.service.errors import ServeError
from cairn.service.events.sender import Sender
from cairn.service.jobs.dbos_engine.jobs import open_jobs
from cairn.service.jobs.process_memory import keep_one_arena
from cairn.service.jobs.worker import start_worker
from cairn.service.observability.logs import start_logging
from cairn.service.observability.metrics import WorkerMetrics
from cairn.service.observability.tracing import traced
from cairn.service.observability.worker_port import WorkerPort
from cairn.service.settings import Settings

logger = logging.getLogger(__name__)


def work_until_signalled(settings: Settings, announce: Callable[[], None]) -> None:
    """Execute jobs until SIGTERM or SIGINT; interrupted jobs continue at the next start.

    Args:
        settings: Settings of the server whose jobs the worker executes.
        announce: Called once the worker waits for jobs.

    Raises:
        SettingsError: A setting cannot work.
        JobsBusyError: A live worker has this name.
        ServeError: The port is taken, or another process took the name while this one had no
            connection to its database.
    """
    keep_one_arena()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    start_logging(settings.log_format, settings.log_level)
    warn_of_misspelt(os.environ)
    version = installed_version()
    metrics = WorkerMetrics(version=version)
    with traced("cairn-worker", version=version), metrics.watching(), _port(settings, metrics):
        _work(settings, metrics, announce, stop)


@contextmanager
def _port(settings: Settings, metrics: WorkerMetrics) -> Iterator[None]:
    """Serve the worker's HTTP port (metrics) during the block, if the settings name one."""
    if settings.worker_port is None:
        yield
        return
    port = WorkerPort(settings.host, settings.worker_port, metrics, version=installed_version())
    try:
        logger.info("metrics are served", extra={"host": settings.host, "port": port.port})
        yield
    finally:
        port.close()


def _work(
    settings: Settings,
    metrics: WorkerMetrics,
    announce: Callable[[], None],
    stop: threading.Event,
) -> None:
    settings.prepare()
    catalog = Catalog.open(settings.database_url, auto_upgrade=settings.auto_upgrade)
    try:
        jobs = open_jobs(settings, Roots(catalog, settings.root_uris))
        sender: Sender | None = None
        try:
            worker = jobs.worker = start_worker(settings, catalog, metrics=metrics.jobs)
            sender = Sender(settings, catalog, jobs)
            sender.start()
            announce()
            while not stop.wait(1.0):
                if worker.stopping:
                    raise ServeError(
                        f"worker {settings.executor_id!r}: expected to keep its name, found that "
                        "another process has it. Give each worker a name of its own "
                        "(CAIRN_EXECUTOR_ID)."
                    )
        finally:
            if sender is not None:
                sender.close()
            jobs.close()
    finally:
        catalog.close()
