"""Reasons for which a test of Orbax's manager that fails on ours tells of no difference to mend.

A row is (pattern of the test's name, part of its error, reason): a test that fails otherwise than
its row says differs.
"""

DOCUMENTED: list[tuple[str, str, str]] = [
    ("*", "found todelete_subdir", "`todelete_subdir`, `todelete_full_path`"),
    ("*", "multiprocessing_options.primary_host", "another `primary_host`"),
    ("*", "a registry of handlers has no meaning", "`handler_registry` is refused"),
    ("*async_error*", "ErrorCheckpointHandler", "`StandardSave`, `PyTreeSave`, `JsonSave`"),
    ("*legacy_handler*", "LegacyCheckpointHandler", "`StandardSave`, `PyTreeSave`, `JsonSave`"),
    ("*multiple_items*", "Array", "`StandardSave`, `PyTreeSave`, `JsonSave`"),
    ("*file_format*", "", "Names of step folders, atomicity and deletion threads"),
    ("*configure_atomicity", "", "Names of step folders, atomicity and deletion threads"),
    ("*directory_creation", "", "The folder is made by the first save"),
    ("*root_metadata_does_not_overwrite", "", "The folder is made by the first save"),
    ("*save_root_metadata_disabled", "", "`save_root_metadata`"),
    ("*legacy_metadata_file", "not a run's folder", "already holds plain Orbax checkpoints"),
    ("*::test_delete", "the step is in use", "and the latest, from which a job would go on"),
    ("*max_to_keep_zero?", "Unexpected, but present", "The latest step, steps that an alias names"),
    (
        "*save_best_*_delete",
        "Unexpected, but present",
        "The latest step, steps that an alias names",
    ),
    ("*args_mismatch_item_handlers", "", "only tell which items are trees and which are JSON"),
    ("*no_handlers_and_default_item*", "", "also by a manager that has not met the item"),
]
"""The reason is a part of docs/howto/checkpoint-manager.md."""

_FILES = "looks for files where Orbax lays them"
_COMMIT = "replaces Orbax's commit or its idea of a path in GCS by a mock"
_CLOCK = "stops the clock of Orbax's module"

INTERNAL: list[tuple[str, str, str]] = [
    ("*", "object has no attribute '_", "calls a private method or reads a private attribute"),
    ("*", "is not an instance of <class 'orbax", "reads the private checkpointer's class"),
    ("*", '" does not match "', "matches the words of Orbax's errors, where ours raises another"),
    ("*max_to_keep_zero_other*", "Expected, but missing", _CLOCK),
    ("*init_telemetry*", "record_scalar", "counts Orbax's own telemetry"),
    ("*_logger", "IndexError", "reads the entries of Orbax's step logger"),
    ("*slow_save_logs_warning", "no logs of level", "slows a private callback, reads Orbax's log"),
    ("*async_finalize", "", _FILES),
    ("*save_root_metadata", "", _FILES),
    ("*save_step_metadata", "", _FILES),
    ("*custom_metadata_with_metadata_store", "", _FILES),
    ("*save_gcs_with_unfinalized*", "", _COMMIT),
    ("*save_restore_gcs*", "", _COMMIT),
    ("*finalize_preemption*", "SaveError", _COMMIT),
    ("*save_preempted_mock*", "SaveError", _COMMIT),
    ("*removes_old_saves_time_interval*", "Expected, but missing", _CLOCK),
]
"""The reason is what the test looks at."""
