"""Names and records of a run, and what writes them without the rules of the public verbs.

Tests forge records, damage them, lose them, and stop between two of them. No public call does.
"""

from cairn.storage.runs.lease import (
    DEAD_AFTER_SECONDS,
    begin_attempt,
    holds_lease,
    release,
    renew,
)
from cairn.storage.runs.records.aliases import HISTORY_KEPT, AliasWriter
from cairn.storage.runs.records.attempts import (
    AttemptRecord,
    counting,
    create_attempt,
    ensure_newest,
    free_number,
    list_attempts,
    saved_steps,
)
from cairn.storage.runs.records.layout import (
    ASSETS,
    LEASE_FILE,
    attempt_file,
    hold_file,
    intent_file,
    parse_attempt_file,
    parse_manifest_file,
)
from cairn.storage.runs.records.placed import put_record, write_record, write_run_info
from cairn.storage.runs.records.step_index import (
    END,
    MAGIC,
    IndexDirectory,
    parse_index,
    shard_grid,
)
from cairn.storage.runs.trash import (
    ANNOUNCED_SECONDS,
    Hold,
    Intent,
    begin_removal,
    declare,
    held,
    withdraw,
)
from cairn.storage.store.records import load_json
from cairn.storage.store_checks.record import RECORD_FILE, StoreRecord, probe_name

__all__ = [
    "ANNOUNCED_SECONDS",
    "ASSETS",
    "DEAD_AFTER_SECONDS",
    "END",
    "HISTORY_KEPT",
    "LEASE_FILE",
    "MAGIC",
    "RECORD_FILE",
    "AliasWriter",
    "AttemptRecord",
    "Hold",
    "IndexDirectory",
    "Intent",
    "StoreRecord",
    "attempt_file",
    "begin_attempt",
    "begin_removal",
    "counting",
    "create_attempt",
    "declare",
    "ensure_newest",
    "free_number",
    "held",
    "hold_file",
    "holds_lease",
    "intent_file",
    "list_attempts",
    "load_json",
    "parse_attempt_file",
    "parse_index",
    "parse_manifest_file",
    "probe_name",
    "put_record",
    "release",
    "renew",
    "saved_steps",
    "shard_grid",
    "withdraw",
    "write_record",
    "write_run_info",
]
