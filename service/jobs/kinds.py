"""Every kind of job that can be started, by its operation kind."""

from collections.abc import Mapping
from typing import Final

from service.jobs.context import JobKind
from service.jobs.convert import CONVERT
from service.jobs.gather import GATHER
from service.jobs.gc import GC
from service.jobs.restore import RESTORE
from service.jobs.retention import RETENTION
from service.jobs.verify import VERIFY

KINDS: Final[Mapping[str, JobKind]] = {
    kind.name: kind for kind in (CONVERT, GATHER, GC, RESTORE, RETENTION, VERIFY)
}
