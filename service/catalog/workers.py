"""Workers that were ever started on a catalog."""

import os
import socket
from datetime import UTC, datetime

from sqlalchemy import delete, select

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import WorkerRow


def note_worker(catalog: Catalog, name: str, *, version: str) -> None:
    """Record that this process is the worker of this name."""
    with catalog.write() as session:
        session.merge(
            WorkerRow(
                name=name,
                host=socket.gethostname(),
                process=os.getpid(),
                version=version,
                started=datetime.now(UTC),
            )
        )


def known_workers(catalog: Catalog) -> list[WorkerRow]:
    """Return all workers, by name."""
    with catalog.read() as session:
        return list(session.scalars(select(WorkerRow).order_by(WorkerRow.name)))


def forget_worker(catalog: Catalog, name: str) -> None:
    """Delete the record of a worker that is gone."""
    with catalog.write() as session:
        session.execute(delete(WorkerRow).where(WorkerRow.name == name))
