"""Inner parts of the service that tests pause, break, hasten or forge, in one place.

All else is set up and looked at through what users call. A constant alone is patched by its dotted
name, without an import.
"""

from cairn.service import errors, policies, schemas
from cairn.service.access import oidc, rate_limiter
from cairn.service.access.permission import Allowed
from cairn.service.actions import caches, job_start
from cairn.service.app import API_PREFIX, ROUTERS
from cairn.service.catalog import engine, migrate, models, refresh, scanner
from cairn.service.catalog.events import retention as event_retention
from cairn.service.client import whole_file
from cairn.service.client.asynchronous import whole_file as awaited_file
from cairn.service.client.protocol import backoff, event_stream
from cairn.service.command import activity, backup, cli, completion, failures, options, variables
from cairn.service.command import addresses as command_addresses
from cairn.service.command.output import tables
from cairn.service.dashboard import addresses
from cairn.service.events import detector, http_post, sender, targets
from cairn.service.http import limiters
from cairn.service.jobs import context, progress, worker_names
from cairn.service.jobs.dbos_engine import counts, database, waker, worker
from cairn.service.jobs.dbos_engine import errors as engine_errors
from cairn.service.jobs.dbos_engine import search as job_search
from cairn.service.jobs.kinds import export_job, logits_check
from cairn.service.observability import logs
from cairn.storage.reading import checked_reads, local_shards
from cairn.storage.runs import fork, lease, promotion, trash, writer
from cairn.storage.runs.records import exports, placed, step_index
from cairn.storage.store.disk import direct_writes

__all__ = [
    "API_PREFIX",
    "ROUTERS",
    "Allowed",
    "activity",
    "addresses",
    "awaited_file",
    "backoff",
    "backup",
    "caches",
    "checked_reads",
    "cli",
    "command_addresses",
    "completion",
    "context",
    "counts",
    "database",
    "detector",
    "direct_writes",
    "engine",
    "engine_errors",
    "errors",
    "event_retention",
    "event_stream",
    "export_job",
    "exports",
    "failures",
    "fork",
    "http_post",
    "job_search",
    "job_start",
    "lease",
    "limiters",
    "local_shards",
    "logits_check",
    "logs",
    "migrate",
    "models",
    "oidc",
    "options",
    "placed",
    "policies",
    "progress",
    "promotion",
    "rate_limiter",
    "refresh",
    "scanner",
    "schemas",
    "sender",
    "step_index",
    "tables",
    "targets",
    "trash",
    "variables",
    "waker",
    "whole_file",
    "worker",
    "worker_names",
    "writer",
]
