"""Modules of `cairn.storage` in which tests replace something.

A deadline or a size is made small; another process comes between two steps of the protocol; a
safeguard is taken away, so that a test sees what it is for.
"""

from cairn.storage.arrays import chunks, data_file_writers, digests, paged_table
from cairn.storage.runs import lease, repair, rollback, trash, writer
from cairn.storage.runs.records import annotations, exports, manifest, step_index
from cairn.storage.store import bounds, deadlines, file_checksums, gcs, objects, s3
from cairn.storage.store.disk import direct_io, directory_entries
from cairn.storage.store_checks import probe

__all__ = [
    "annotations",
    "bounds",
    "chunks",
    "data_file_writers",
    "deadlines",
    "digests",
    "direct_io",
    "directory_entries",
    "exports",
    "file_checksums",
    "gcs",
    "lease",
    "manifest",
    "objects",
    "paged_table",
    "probe",
    "repair",
    "rollback",
    "s3",
    "step_index",
    "trash",
    "writer",
]
