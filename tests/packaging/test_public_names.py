"""The public names: what `cairn` exports, and what importing it loads."""

import subprocess
import sys

import pytest

import cairn

PUBLIC = [
    "Adoption", "Alias", "AliasNotFoundError", "Aliases", "Annotation", "ArgumentError",
    "ArtifactNotFoundError", "AsyncClient", "Attempt", "AutoEasyDeLConfig", "BestSteps",
    "CausalLMOutput", "CheckpointManager", "CheckpointReader", "CheckpointRef", "Checkpointer",
    "Client", "ConfigError", "ConversionError", "CopyReport", "CorruptionError", "Damage",
    "Decision", "DecoderConfig", "DecoderForCausalLM", "DedupPolicy", "DueReason",
    "EDPretrainedConfig", "EDPretrainedModel", "EasyBridgeMixin", "EasyDeLBackends",
    "EasyDeLBaseModule", "EasyDeLPlatforms", "EasyDeLQuantizationMethods", "EasyDeLState",
    "EasyGenerationMixin", "ExpertsConfig", "FencedError", "Files", "Garbage", "GenerationOutput",
    "InstallationError", "InteropError", "InvalidSliceError", "InvalidURIError",
    "IteratorMismatchError", "LateProcessError", "LatentAttentionConfig", "LeafInfo",
    "LeafNotFoundError", "Lease", "LeaseHeldError", "Lineage", "LinenDecoderForCausalLM",
    "LoraSettings", "LossConfig", "Manifest", "ModelInfo", "ModelMap", "NotACheckpointError",
    "NotFoundError", "NotInitializedError", "ObjectStore", "OperationCacheMixin", "OptimizerError",
    "OptimizerNotFoundError", "PartitionAxis", "PolicyError", "PreconditionFailedError",
    "QuantizationSettings", "RecordNotLostError", "Repair", "RetentionOutcome", "RetentionPolicy",
    "Rollback", "RopeConfig", "Run", "RunInfo", "RunNotFoundError", "RunReport", "RunSaver",
    "SaveError", "SaveHandle", "SavePolicy", "SaveState", "ServiceError", "Settings",
    "SettingsError", "Shard", "ShardingError", "StateError", "StepChangedError", "StepDamagedError",
    "StepExistsError", "StepFacts", "StepInFlightError", "StepInUseError", "StepInfo",
    "StepNotFoundError", "StepState", "StorageError", "StoreCheckError", "StoreFullError",
    "StoreURI", "StoreUnavailableError", "Stored", "TaskType", "TensorSource", "Tombstone",
    "TrainState", "TrainStep", "TreeMap", "TreeMismatchError", "TreeStructureError",
    "UnknownModelError", "UnsupportedFormatError", "UnsupportedLeafError", "VerifyReport", "Writer",
    "adopt", "annotate", "annotate_run", "annotate_step", "apply_retention", "best_step",
    "check_run", "collect_garbage", "create_app", "create_run", "delete_alias", "delete_step",
    "evaluate_retention", "find_deletable_step", "find_garbage", "fork_run", "list_runs", "load",
    "load_balancing_loss", "make_mesh", "make_optimizer", "model_map", "open_files",
    "optimizer_from_description", "parse_ref", "parse_uri", "plan_retention", "plan_shards",
    "promote_step", "repair_run", "resolve_checkpoint", "roll_back", "safe_join", "undelete_step",
    "verify_step", "write_index", "write_shard",
]  # fmt: skip


def test_the_public_names_are_these():
    assert sorted(cairn.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(cairn, name).__doc__


def test_importing_the_package_loads_none_of_its_parts():
    script = (
        "import cairn, sys\n"
        "loaded = {name for name in sys.modules if name.startswith('cairn.')}\n"
        "assert not loaded, loaded\n"
        "cairn.parse_uri('/x')\n"
        "assert 'cairn.storage.runs.run' not in sys.modules\n"
        "assert cairn.DecoderConfig\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
