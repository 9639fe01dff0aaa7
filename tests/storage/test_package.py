import subprocess
import sys

import pytest

from cairn import storage
from cairn.storage import runs

PUBLIC = [
    "Alias", "AliasNotFoundError", "Aliases", "Annotation", "ArtifactNotFoundError", "Attempt",
    "BestSteps",
    "CheckpointManager", "CheckpointReader", "CheckpointRef", "Checkpointer", "CopyReport",
    "CorruptionError", "Damage", "Decision", "DueReason", "FencedError", "Files", "Garbage",
    "InvalidSliceError", "InvalidURIError", "IteratorMismatchError", "LateProcessError",
    "LeafInfo",
    "LeafNotFoundError", "Lease", "LeaseHeldError", "Lineage",
    "Manifest", "ModelInfo", "NotACheckpointError", "NotFoundError", "ObjectStore", "PolicyError",
    "PreconditionFailedError", "RecordNotLostError", "Repair", "RetentionOutcome",
    "RetentionPolicy", "Rollback", "Run",
    "RunInfo", "RunNotFoundError", "RunReport", "SaveError", "SaveHandle", "SavePolicy",
    "SaveState", "Shard", "SharingPolicy", "StepChangedError", "StepDamagedError",
    "StepExistsError", "StepFacts", "StepInFlightError", "StepInUseError", "StepInfo",
    "StepNotFoundError", "StepState",
    "StorageError", "StoreFullError", "StoreURI", "StoreUnavailableError", "TensorSource",
    "Tombstone", "TreeMismatchError", "UnsoundStoreError", "UnsupportedFormatError",
    "UnsupportedLeafError", "VerifyReport", "Writer", "annotate", "annotate_run", "annotate_step",
    "apply_retention", "best_step",
    "check_run",
    "collect_garbage", "confine", "create_run", "decide", "deletable_step", "delete_alias",
    "delete_step", "find_garbage", "fork_run", "judge_retention", "list_runs", "load", "open_files",
    "parse_ref",
    "parse_uri", "plan_shards", "promote_step", "repair_run", "resolve_checkpoint", "roll_back",
    "undelete_step", "verify_step", "write_index", "write_shard",
]  # fmt: skip


def test_the_public_names_are_these():
    assert storage.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(storage, name).__doc__


def test_what_lies_below_the_verbs_of_the_run_protocol_is_not_exported():
    below = {"begin_attempt", "counting", "create_attempt", "noted_step", "publish_manifest"}
    below |= {"AliasWriter", "declare", "lay_tombstone", "lift", "release", "renew", "withdraw"}
    assert below.isdisjoint(runs.__all__)
    assert not [name for name in below if hasattr(runs, name)]


def test_importing_the_package_loads_none_of_its_parts():
    script = (
        "import cairn, sys\n"
        "loaded = {name for name in sys.modules if name.startswith('cairn.')}\n"
        "assert not loaded, loaded\n"
        "cairn.parse_uri('/x')\n"
        "assert 'cairn.storage.runs.run' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
