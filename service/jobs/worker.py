"""Worker of a process, which is recorded in the catalog and refreshes the runs that it changes."""

from contextlib import suppress

from cairn.installation import installed_version
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.refresh import Index
from cairn.service.catalog.roots import Roots
from cairn.service.catalog.workers import note_worker
from cairn.service.jobs.dbos_engine.worker import Worker
from cairn.service.jobs.kinds import KINDS
from cairn.service.jobs.worker_names import worker_name
from cairn.service.observability.metrics import JobMetrics
from cairn.service.settings import Settings
from cairn.storage.errors import RunNotFoundError
from cairn.storage.runs.run import Run


def start_worker(settings: Settings, catalog: Catalog, *, metrics: JobMetrics) -> Worker:
    """Start the worker that the settings name, and return it.

    Args:
        settings: Settings of the server.
        catalog: Catalog to record the worker in, and to refresh after a job has changed a run.
        metrics: Metrics of the jobs.

    Raises:
        JobsBusyError: This process has a worker already, or another process has its name.
        SettingsError: The worker's database or data folder cannot be opened.
    """
    index, roots = Index(catalog), Roots(catalog, settings.root_uris)

    def changed(root: str, run: str) -> None:
        with suppress(RunNotFoundError):  # a fork that failed has no run
            index.refresh_run(root, Run(roots[root] / run))

    worker = Worker(
        database_url=settings.jobs_database_url,
        name=worker_name(settings),
        roots=roots,
        kinds=KINDS,
        changed=changed,
        metrics=metrics,
    )
    worker.launch()
    note_worker(catalog, settings.executor_id, version=installed_version())
    return worker
