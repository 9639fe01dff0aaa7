"""Every place where the server opens something has a reason why it opens nothing else.

What a record says is a stranger's word: it becomes an address in `source_folder` alone, and all
that lies below an address of `safe_join` is judged as it is opened. Whoever adds a call to what is
listed here says which of these it is, and a call of another kind is not to be had.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import cairn

FOLDER: Final = Path(cairn.__file__).resolve().parent.parent

CONFINED = "below an address of a root or a run, which `with_confinement` and `safe_join` made"
SOURCE = "judged by `source_folder`"
ADMINISTRATOR = "an address that only an administrator gives"
GIVEN = "an address of who calls: a server's is confined already, all others have their own rights"
JUDGES = "where it is judged"
ADDRESS = "makes an address, and opens nothing"
COMPARED = "compared with other addresses: nothing is opened"
OWN = "a file of the server's own, or of its machine, which no record names"
MEMORY = "in memory: no file"
SAVES = "by saves alone, which no server makes"
BUCKET = "of buckets alone, which have no links"
TIMES = "times of changes alone, which are told to nobody"
NAMES = "names of links alone, to refuse them"
PROBE = "a file with a name of chance that was made just before"
SYNCED = "folders that were written just before, to sync them"
LOCK = "not through links, and removed alone"

OPENINGS: Final = {
    "service/actions/artifacts.py": {
        "stored_file: open_files": CONFINED,
    },
    "service/actions/files.py": {
        "_checked: open_files": CONFINED,
    },
    "service/actions/adopt.py": {
        "adopt_folder: parse_uri": SOURCE,
    },
    "service/actions/roots.py": {
        "_parsed: parse_uri": ADMINISTRATOR,
        "_check_usable: open_files": ADMINISTRATOR,
    },
    "service/catalog/refresh.py": {
        "_is_empty: os.scandir": CONFINED,
        "_refuse_gone: open_files": CONFINED,
    },
    "service/catalog/roots.py": {
        "_places: parse_uri": ADMINISTRATOR,
    },
    "service/catalog/change_tokens.py": {
        "_stats: os.listdir": TIMES,
    },
    "service/jobs/artifacts.py": {
        "ArtifactRef.open: ObjectStore.open": CONFINED,
    },
    "service/jobs/kinds/export_job.py": {
        "lost_files: open_files": CONFINED,
        "_ExportJob.plan: ObjectStore.open": CONFINED,
        "_ExportJob.find: ObjectStore.open": CONFINED,
        "_ExportJob.leave: ObjectStore.open": CONFINED,
        "_ExportJob._left: ObjectStore.open": CONFINED,
        "_ExportJob.publish: ObjectStore.open": CONFINED,
        "_ExportJob._files: open_files": CONFINED,
    },
    "service/jobs/kinds/logits_check.py": {
        "LogitsCheck._local_folder: open_files": CONFINED,
        "LogitsCheck._local_folder: parse_uri": OWN,
    },
    "service/jobs/kinds/reference_logits.py": {
        "read_reference: open_files": OWN,
        "read_reference: parse_uri": OWN,
        "_place: open_files": SOURCE,
        "_place: parse_uri": SOURCE,
    },
    "service/jobs/kinds/trainer_settings.py": {
        "settings_beside: open_files": SOURCE,
        "settings_beside: parse_uri": SOURCE,
    },
    "service/private_files.py": {
        "make_private: open": OWN,
        "private_opener: os.open": OWN,
    },
    "service/routes/health.py": {
        "_ask_root: open_files": CONFINED,
    },
    "service/settings.py": {
        "Settings.root_uris: parse_uri": ADMINISTRATOR,
        "_require_uri: parse_uri": ADMINISTRATOR,
    },
    "service/state_folders.py": {
        "_database_folders: glob": OWN,
    },
    "storage/orbax_import/adopt.py": {
        "adopt: parse_uri": GIVEN,
        "check_adoption: parse_uri": GIVEN,
        "_sorted_out: parse_uri": COMPARED,
        "_adopts: parse_uri": COMPARED,
    },
    "storage/orbax_import/adopted_steps.py": {
        "look_again: open_files": CONFINED,
    },
    "storage/orbax_import/layouts.py": {
        "find_checkpoints: open_files": CONFINED,
        "_many: open_files": CONFINED,
        "is_among_checkpoints: open_files": CONFINED,
        "plain_items: open_files": CONFINED,
        "_is_checkpoint: open_files": CONFINED,
        "_names: open_files": CONFINED,
        "_described: ObjectStore.open": CONFINED,
        "_refuse_runs: ObjectStore.open": CONFINED,
    },
    "storage/orbax_import/links.py": {
        "links_in: os.scandir": NAMES,
        "_links_elsewhere: os.walk": NAMES,
    },
    "storage/orbax_import/step_reading.py": {
        "read_step: open_files": CONFINED,
        "_key_kinds: open_files": CONFINED,
        "_key_kinds: ObjectStore.open": CONFINED,
    },
    "storage/arrays/data_file_writers.py": {
        "_DiskWriter.write: os.open": SAVES,
        "_ObjectWriter.__init__: ObjectStore": SAVES,
        "_UploadWriter.__init__: open_files": SAVES,
    },
    "storage/arrays/plain_tree.py": {
        "_write: write_bytes": GIVEN,
        "write_plain_step: os.walk": GIVEN,
        "write_plain_step: parse_uri": GIVEN,
        "write_plain_step: rmtree": GIVEN,
    },
    "storage/arrays/zarr_arrays.py": {
        "zarr_description: ts.open": MEMORY,
    },
    "storage/reading/databases.py": {
        "database_entries: ts.KvStore.open": CONFINED,
        "database_entries: kvstore_spec": CONFINED,
    },
    "storage/reading/indexed_database.py": {
        "indexed_database: ts.KvStore.open": MEMORY,
    },
    "storage/reading/item_arrays.py": {
        "ItemArrays._values_spec: kvstore_spec": CONFINED,
        "ItemArrays._opening: ts.open": CONFINED,
    },
    "storage/reading/reader.py": {
        "CheckpointReader.__init__: ObjectStore": CONFINED,
        "CheckpointReader.open: open_files": CONFINED,
        "CheckpointReader.open: parse_uri": GIVEN,
        "CheckpointReader._open: ObjectStore": CONFINED,
        "CheckpointReader._open: open_files": CONFINED,
        "CheckpointReader._file: ObjectStore": CONFINED,
        "_no_checkpoint: open_files": CONFINED,
        "manifest_at: ObjectStore.open": CONFINED,
    },
    "storage/reading/remote_shards.py": {
        "RangeReads._files: ts.KvStore.open": BUCKET,
        "RangeReads._files: kvstore_spec": BUCKET,
    },
    "storage/reading/step_files.py": {
        "_problems: open_files": CONFINED,
    },
    "storage/reading/verify.py": {
        "_StepCheck._listed_in: open_files": CONFINED,
        "_StepCheck._read: ObjectStore": CONFINED,
        "_read_again: open_files": CONFINED,
    },
    "storage/runs/run_check.py": {
        "_RunCheck._adopted: open_files": CONFINED,
    },
    "storage/runs/fork.py": {
        "fork_run: open_files": CONFINED,
        "_copy_files: open_files": CONFINED,
        "abandon_fork: open_files": CONFINED,
        "_refuse_foreign: open_files": CONFINED,
    },
    "storage/runs/policies.py": {
        "Policies.__init__: ObjectStore.open": CONFINED,
    },
    "storage/runs/promotion.py": {
        "_refuse_changed: open_files": CONFINED,
    },
    "storage/runs/records/exports.py": {
        "exports_of_run: open_files": CONFINED,
        "delete_left: open_files": CONFINED,
        "delete_tries: ObjectStore.open": CONFINED,
        "delete_tries: open_files": CONFINED,
    },
    "storage/runs/records/layout.py": {
        "parse_ref: parse_uri": GIVEN,
        "_run_alone: parse_uri": GIVEN,
    },
    "storage/runs/records/step_index.py": {
        "open_contents: open_files": CONFINED,
    },
    "storage/runs/repair.py": {
        "_Mender._keep: open_files": CONFINED,
    },
    "storage/runs/run.py": {
        "no_such_run: open_files": CONFINED,
        "_nearest_name: open_files": CONFINED,
        "refuse_inside_checkpoint: ObjectStore.open": CONFINED,
        "refuse_inside_run: ObjectStore.open": CONFINED,
        "refuse_plain_steps: open_files": CONFINED,
        "_having: ObjectStore.open": CONFINED,
        "Run.__init__: ObjectStore.open": CONFINED,
        "Run.open: parse_uri": GIVEN,
        "Run.create: parse_uri": GIVEN,
        "Run._created: open_files": CONFINED,
        "Run.files: open_files": CONFINED,
        "create_run: parse_uri": GIVEN,
        "list_runs: parse_uri": GIVEN,
        "list_runs: open_files": CONFINED,
        "list_runs: ObjectStore.open": CONFINED,
    },
    "storage/runs/writer.py": {
        "sync_folder: os.walk": SYNCED,
    },
    "storage/store_checks/disk.py": {
        "_create: os.open": PROBE,
        "_locks: os.open": PROBE,
        "_write: open": PROBE,
        "_read: open": PROBE,
    },
    "storage/store_checks/mounts.py": {
        "mount_of: open": OWN,
    },
    "storage/store_checks/probe.py": {
        "read_cached_record: ObjectStore.open": CONFINED,
        "_probe: ObjectStore.open": CONFINED,
        "_run_checks: ObjectStore.open": CONFINED,
        "_check_disk: os.listdir": PROBE,
        "_check_disk: rmtree": PROBE,
        "_check_disk: ObjectStore": PROBE,
    },
    "storage/store/bounds.py": {
        "_number: read_text": OWN,
        "_numbers: read_text": OWN,
    },
    "storage/store/disk/confinement.py": {
        "source_folder: parse_uri": JUDGES,
        "PathHandle.__init__: os.open": JUDGES,
        "open_below: os.open": JUDGES,
        "check_tree: os.scandir": JUDGES,
    },
    "storage/store/disk/direct_writes.py": {
        "DirectWrites._read: os.open": OWN,
    },
    "storage/store/disk/directory_entries.py": {
        "fsync_path: os.open": SYNCED,
    },
    "storage/store/disk/locked_files.py": {
        "LockedFile.remove: unlink": LOCK,
        "locked_file: os.open": LOCK,
        "locked_file: unlink": LOCK,
    },
    "storage/store/disk/stale_locks.py": {
        "remove_stale_lock: os.open": LOCK,
        "remove_stale_lock: unlink": LOCK,
    },
    "storage/store/file_checksums.py": {
        "forget_cached: open_files": CONFINED,
        "read_files: open_files": CONFINED,
    },
    "storage/store/files_bucket.py": {
        "BucketFiles.delete_tree: ObjectStore.open": CONFINED,
    },
    "storage/store/files_local.py": {
        "LocalFiles.list: os.scandir": JUDGES,
        "LocalFiles.etags: os.scandir": JUDGES,
        "LocalFiles.usage: os.walk": JUDGES,
        "LocalFiles._files_below: os.scandir": JUDGES,
        "LocalFiles.open_read: open": JUDGES,
        "LocalFiles.read_range: open": JUDGES,
        "LocalFiles.read_into: open": JUDGES,
        "LocalFiles.delete_tree: rmtree": JUDGES,
        "LocalFiles.delete_tree: unlink": JUDGES,
        "LocalFiles.sweep: os.scandir": JUDGES,
        "LocalFiles._copy_within: open": JUDGES,
        "_sweep: os.open": JUDGES,
        "_sweep: unlink": JUDGES,
        "_locked_folder: os.open": JUDGES,
        "_LocalWriter.__init__: open": JUDGES,
        "_LocalWriter.abort: unlink": JUDGES,
    },
    "storage/store/objects.py": {
        "_absent_generation: ts.KvStore.open": JUDGES,
        "_disk: ts.KvStore.open": JUDGES,
        "ObjectStore.__init__: kvstore_spec": JUDGES,
        "ObjectStore.__init__: ts.KvStore.open": JUDGES,
        "ObjectStore.open: parse_uri": JUDGES,
        "ObjectStore.etags: LocalFiles": JUDGES,
        "ObjectStore.entries: LocalFiles": JUDGES,
    },
    "storage/store/open_files.py": {
        "open_files: parse_uri": JUDGES,
        "open_files: LocalFiles": JUDGES,
    },
    "storage/store/uri.py": {
        "StoreURI.__truediv__: StoreURI": ADDRESS,
        "StoreURI.parent: StoreURI": ADDRESS,
        "_parse_rest: StoreURI": ADDRESS,
    },
}

NOT_SERVED: Final = ("service/client", "service/command", "state/checkpointing", "state/drop_in")
"""What no server runs: clients, commands, and training jobs, who ask with their own rights."""

OPENERS: Final = {
    "LocalFiles",
    "ObjectStore",
    "ObjectStore.open",
    "StoreURI",
    "open",
    "open_files",
    "os.listdir",
    "os.open",
    "os.scandir",
    "os.walk",
    "parse_uri",
    "ts.KvStore.open",
    "ts.open",
}
METHODS: Final = {
    "glob",
    "iterdir",
    "kvstore_spec",
    "read_bytes",
    "read_text",
    "rglob",
    "rmtree",
    "unlink",
    "write_bytes",
    "write_text",
}


def dotted(node: ast.AST) -> str:
    """`a.b.c` of names and attributes; of what else is called, its last attribute alone."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(node: ast.AST, scope: str = "") -> Iterator[str]:
    """Each call of one of these, after the function that it is in."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{child.name}".removeprefix(".")
        if isinstance(child, ast.Call):
            name = dotted(child.func)
            method = name.rpartition(".")[2]
            if name in OPENERS or method in METHODS:
                yield f"{scope}: {name if name in OPENERS else method}"
        yield from calls(child, inner)


def test_every_call_that_opens_something_has_its_reason():
    made = {}
    for package in ("service", "storage"):
        for path in sorted((FOLDER / package).rglob("*.py")):
            name = str(path.relative_to(FOLDER))
            if not name.startswith(NOT_SERVED):
                made[name] = {*calls(ast.parse(path.read_text()))}
    listed = {name: {*known} for name, known in OPENINGS.items()}
    assert {name: known for name, known in made.items() if known} == listed


def test_addresses_are_made_of_records_in_one_place():
    """`source` and `adopts` are the fields of records that name a folder."""
    reasons = {reason for known in OPENINGS.values() for reason in known.values()}
    assert SOURCE in reasons
    for name, known in OPENINGS.items():
        for call, reason in known.items():
            if call.endswith(": parse_uri"):
                expected = (ADMINISTRATOR, GIVEN, COMPARED, SOURCE, JUDGES, OWN)
                assert reason in expected, (name, call)
