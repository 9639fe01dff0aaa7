"""Every kind of job that can be started, by its operation kind."""

from collections.abc import Mapping
from typing import Final

from cairn.service.jobs.context import JobKind
from cairn.service.jobs.convert import CONVERT
from cairn.service.jobs.gather import GATHER
from cairn.service.jobs.gc import GC
from cairn.service.jobs.restore import RESTORE
from cairn.service.jobs.retention import RETENTION
from cairn.service.jobs.verify import VERIFY

KINDS: Final[Mapping[str, JobKind]] = {
    kind.name: kind for kind in (CONVERT, GATHER, GC, RESTORE, RETENTION, VERIFY)
}
