"""All kinds of jobs, by the name of their operation."""

from collections.abc import Mapping
from typing import Final

from cairn.service.jobs.context import JobKind
from cairn.service.jobs.kinds.adopt import ADOPT
from cairn.service.jobs.kinds.convert import CONVERT
from cairn.service.jobs.kinds.gather import GATHER
from cairn.service.jobs.kinds.gc import GC
from cairn.service.jobs.kinds.restore import RESTORE
from cairn.service.jobs.kinds.retention import RETENTION
from cairn.service.jobs.kinds.verify import VERIFY

KINDS: Final[Mapping[str, JobKind]] = {
    kind.name: kind for kind in (ADOPT, CONVERT, GATHER, GC, RESTORE, RETENTION, VERIFY)
}
