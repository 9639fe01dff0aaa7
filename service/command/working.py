"""Runs a job worker as a process of its own, until it is told to end."""

import signal
import threading
from collections.abc import Callable

from cairn.service.app import package_version
from cairn.service.catalog import Catalog
from cairn.service.errors import ServeError
from cairn.service.jobs import open_jobs, start_worker
from cairn.service.settings import Settings


def work_until_signalled(settings: Settings, announce: Callable[[], None]) -> None:
    """Execute jobs until SIGTERM or SIGINT; those under way go on at the next start.

    Args:
        settings: Of the server whose jobs they are.
        announce: Told once it waits for jobs.

    Raises:
        SettingsError: A setting cannot work.
        JobsBusyError: A live worker has this name.
        ServeError: Another process took the name while this one was cut off from its database.
    """
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    settings.prepare()
    catalog = Catalog.open(settings.database_url, auto_upgrade=settings.auto_upgrade)
    try:
        jobs = open_jobs(settings)
        try:
            worker = jobs.worker = start_worker(settings, catalog, version=package_version())
            announce()
            while not told.wait(1.0):
                if worker.stopping:
                    raise ServeError(
                        f"worker {settings.executor_id!r}: expected to keep its name, found that "
                        "another process has it. Give each worker a name of its own "
                        "(CAIRN_EXECUTOR_ID)."
                    )
        finally:
            jobs.close()
    finally:
        catalog.close()
