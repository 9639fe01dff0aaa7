"""Every kind of job that can be started, by its operation kind."""

from collections.abc import Mapping
from typing import Final

from service.jobs.context import JobKind
from service.jobs.convert import CONVERT
from service.jobs.gather import GATHER
from service.jobs.restore import RESTORE

KINDS: Final[Mapping[str, JobKind]] = {kind.name: kind for kind in (CONVERT, GATHER, RESTORE)}
