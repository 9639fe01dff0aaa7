"""Leases of the runs that tests leave open: a job renews its run's lease until its process ends."""

import threading

from cairn.storage.runs.writer import Writer


def stop_renewing() -> None:
    """End the renewals of this process: a later test may watch the calls that they make."""
    for thread in threading.enumerate():
        writer = getattr(getattr(thread, "_target", None), "__self__", None)
        if isinstance(writer, Writer):
            writer._stop.set()
