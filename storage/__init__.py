"""Cairn's storage layer: runs and checkpoints in an object store.

Names are loaded when first used, so `import storage` costs nothing and loads no JAX.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from storage.aliases import Alias, Aliases
    from storage.attempts import Attempt
    from storage.checkpointer import Checkpointer
    from storage.errors import (
        AliasNotFoundError,
        ArtifactNotFoundError,
        CorruptionError,
        FencedError,
        InvalidSliceError,
        InvalidURIError,
        LeafNotFoundError,
        LeaseHeldError,
        NotACheckpointError,
        NotFoundError,
        PolicyError,
        PreconditionFailedError,
        RunNotFoundError,
        SaveError,
        StepExistsError,
        StepInFlightError,
        StepInUseError,
        StepNotFoundError,
        StorageError,
        StoreFullError,
        StoreUnavailableError,
        TreeMismatchError,
        UnsupportedFormatError,
        UnsupportedLeafError,
    )
    from storage.files import Files
    from storage.fork import fork_run
    from storage.gc import Garbage, collect_garbage, find_garbage
    from storage.item_arrays import LeafInfo
    from storage.lease import Lease
    from storage.manifest import Manifest, ModelInfo
    from storage.objects import ObjectStore
    from storage.reader import CheckpointReader
    from storage.retention import BestSteps, RetentionPolicy
    from storage.run import (
        Lineage,
        Run,
        RunInfo,
        StepInfo,
        StepState,
        list_runs,
        resolve_checkpoint,
    )
    from storage.run_retention import apply_retention
    from storage.safetensors_stream import TensorSource, plan_shards, write_index, write_shard
    from storage.save_handle import SaveHandle, SaveState
    from storage.save_policy import DueReason, SavePolicy
    from storage.trash import Tombstone, delete_step, undelete_step
    from storage.uri import CheckpointRef, StoreURI, confine, parse_ref, parse_uri
    from storage.verify import VerifyReport, verify_step

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "aliases": ["Alias", "Aliases"],
        "attempts": ["Attempt"],
        "checkpointer": ["Checkpointer"],
        "errors": [
            "AliasNotFoundError",
            "ArtifactNotFoundError",
            "CorruptionError",
            "FencedError",
            "InvalidSliceError",
            "InvalidURIError",
            "LeafNotFoundError",
            "LeaseHeldError",
            "NotACheckpointError",
            "NotFoundError",
            "PolicyError",
            "PreconditionFailedError",
            "RunNotFoundError",
            "SaveError",
            "StepExistsError",
            "StepInFlightError",
            "StepInUseError",
            "StepNotFoundError",
            "StorageError",
            "StoreFullError",
            "StoreUnavailableError",
            "TreeMismatchError",
            "UnsupportedFormatError",
            "UnsupportedLeafError",
        ],
        "files": ["Files"],
        "fork": ["fork_run"],
        "gc": ["Garbage", "collect_garbage", "find_garbage"],
        "item_arrays": ["LeafInfo"],
        "lease": ["Lease"],
        "manifest": ["Manifest", "ModelInfo"],
        "objects": ["ObjectStore"],
        "reader": ["CheckpointReader"],
        "retention": ["BestSteps", "RetentionPolicy"],
        "run": [
            "Lineage",
            "Run",
            "RunInfo",
            "StepInfo",
            "StepState",
            "list_runs",
            "resolve_checkpoint",
        ],
        "safetensors_stream": ["TensorSource", "plan_shards", "write_index", "write_shard"],
        "run_retention": ["apply_retention"],
        "save_handle": ["SaveHandle", "SaveState"],
        "save_policy": ["DueReason", "SavePolicy"],
        "trash": ["Tombstone", "delete_step", "undelete_step"],
        "uri": ["CheckpointRef", "StoreURI", "confine", "parse_ref", "parse_uri"],
        "verify": ["VerifyReport", "verify_step"],
    },
)

__all__ = [
    "Alias",
    "AliasNotFoundError",
    "Aliases",
    "ArtifactNotFoundError",
    "Attempt",
    "BestSteps",
    "CheckpointReader",
    "CheckpointRef",
    "Checkpointer",
    "CorruptionError",
    "DueReason",
    "FencedError",
    "Files",
    "Garbage",
    "InvalidSliceError",
    "InvalidURIError",
    "LeafInfo",
    "LeafNotFoundError",
    "Lease",
    "LeaseHeldError",
    "Lineage",
    "Manifest",
    "ModelInfo",
    "NotACheckpointError",
    "NotFoundError",
    "ObjectStore",
    "PolicyError",
    "PreconditionFailedError",
    "RetentionPolicy",
    "Run",
    "RunInfo",
    "RunNotFoundError",
    "SaveError",
    "SaveHandle",
    "SavePolicy",
    "SaveState",
    "StepExistsError",
    "StepInFlightError",
    "StepInUseError",
    "StepInfo",
    "StepNotFoundError",
    "StepState",
    "StorageError",
    "StoreFullError",
    "StoreURI",
    "StoreUnavailableError",
    "TensorSource",
    "Tombstone",
    "TreeMismatchError",
    "UnsupportedFormatError",
    "UnsupportedLeafError",
    "VerifyReport",
    "apply_retention",
    "collect_garbage",
    "confine",
    "delete_step",
    "find_garbage",
    "fork_run",
    "list_runs",
    "parse_ref",
    "parse_uri",
    "plan_shards",
    "resolve_checkpoint",
    "undelete_step",
    "verify_step",
    "write_index",
    "write_shard",
]
