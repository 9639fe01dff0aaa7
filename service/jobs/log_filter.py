"""Keeps tracebacks of jobs that ended as they may out of the log: the operation tells of those."""

import logging

from cairn.service.jobs.context import JobInterrupt
from cairn.service.jobs.errors import JobFailedError


class ExpectedEndings(logging.Filter):
    """Drops records of the engine about failed, cancelled and stopped jobs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is news."""
        ending = record.exc_info[1] if record.exc_info else None
        return not isinstance(ending, JobFailedError | JobInterrupt)
