"""Reasons for which a test of Orbax that fails on ours tells of no difference to mend.

A row is (pattern of the test's name, regular expression for its error, reason): a test that fails
with another error than its row names differs.
"""

_FALSE = "^AssertionError: False is not true$"
_OTHER_METADATA = r"^AssertionError: \{'new_state': 456\} != \{'state': 123\}"
_METADATA = r"^AssertionError: \{'state': 123\} != \{\}"
_NOT_A_RUN = "InvalidURIError: not a run's folder: .* checkpoints that no run lists: metadata"
_NOT_RAISED = "^AssertionError: ValueError not raised$"
_HAS_METADATA = r"^AssertionError: TreeMetadata\("
_DAMAGED = "SaveError: files of the step are not what was written"
_OTHER_RECORD = "SaveError: what Orbax has recorded is not what it was given"
_UNKNOWN_ITEM = "UnsupportedFormatError: items that a Cairn run can't hold .* found "
_UNEXPECTED = "^AssertionError: Unexpected, but present:"
_TRUE = "^AssertionError: True is not false$"
_NOT_STORED = "TreeMismatchError: [^*]*: expected by the target, not stored"
_NO_TEXT = "UnsupportedLeafError: .*: str is neither an array nor a number"
_EMPTY = "Empty trees and arrays without elements are saved"
_NO_STEPS = "^AttributeError: 'RootMetadata' object has no attribute"

DOCUMENTED: list[tuple[str, str, str]] = [
    ("*", "PolicyError: .* found todelete_subdir", "`todelete_subdir`, `todelete_full_path`"),
    ("*", "multiprocessing_options.primary_host", "another `primary_host`"),
    ("*", "a registry of handlers has no meaning", "`handler_registry` is refused"),
    (
        "*async_error*",
        _UNKNOWN_ITEM + "state: ErrorCheckpointHandler",
        "`StandardSave`, `PyTreeSave`, `JsonSave`",
    ),
    (
        "*legacy_handler*",
        _UNKNOWN_ITEM + "state: .*LegacyCheckpoint",
        "`StandardSave`, `PyTreeSave`, `JsonSave`",
    ),
    ("*multiple_items*", _UNKNOWN_ITEM + "arr: Array", "`StandardSave`, `PyTreeSave`, `JsonSave`"),
    ("*file_format*", _FALSE, "Names of step folders, atomicity and deletion threads"),
    ("*configure_atomicity", _FALSE, "Names of step folders, atomicity and deletion threads"),
    ("*directory_creation", _FALSE, "The first save creates the folder"),
    (
        "*root_metadata_does_not_overwrite",
        _OTHER_METADATA,
        "The first save creates the folder",
    ),
    (
        "*save_root_metadata_disabled",
        _METADATA,
        "`save_root_metadata`",
    ),
    (
        "*legacy_metadata_file",
        _NOT_A_RUN,
        "already contains plain Orbax checkpoints",
    ),
    (
        "*::test_delete",
        "StepInUseError: the step is in use",
        "and the latest, from which a job would resume",
    ),
    ("*max_to_keep_zero?", _UNEXPECTED, "The latest step, steps that an alias names"),
    (
        "*save_best_*_delete",
        "Unexpected, but present",
        "The latest step, steps that an alias names",
    ),
    (
        "*args_mismatch_item_handlers",
        _NOT_RAISED,
        "only define the kind of each item",
    ),
    (
        "*no_handlers_and_default_item*",
        _HAS_METADATA,
        "even if the manager has not seen the item",
    ),
    *(
        (name, _NOT_RAISED, "even if the manager has not seen the item")
        for name in ("*args_handler_unspecified", "*args_with_step_metadata")
    ),
    ("Composite*::test_metadata", "has no attribute 'typestr'$", "`item_handlers` is None"),
    ("Json*", _FALSE, "It is stored in the step's own item `meta`"),
    *(
        (name, "found state: transforms;", "`transforms` are refused")
        for name in ("*transform*", "*partial_restore?")
    ),
    *(
        (name, _NO_TEXT, "tree's leaves are arrays and numbers, no text")
        for name in ("*mixed*", "*strings?", "*unsupported_type", "*other_than_jax_array?")
    ),
    ("*masked_shape*", _NOT_STORED, "Leaves that are missing, unexpected or of another shape"),
    ("*unexpected_keys*", _NOT_STORED, "a leaf in the target that is not stored is an error"),
    (
        "*change_shape*",
        r"expected shape \(4,\), stored \(8,\)",
        "`strict=False` with different shapes",
    ),
    ("*reshape_*", "to be cut or padded to shape", "`strict=False` with different shapes"),
    (
        "*cast_scalar",
        "expected a Python float, stored dtype int64",
        "cast from floating to floating dtypes, and from integers",
    ),
    *((name, _NOT_RAISED, _EMPTY) for name in ("*empty_error", "*empty_data*", "*zero_size*")),
]
"""The reason is a part of docs/howto/checkpoint-manager.md."""

_FILES = "looks for files where Orbax lays them"
_COMMIT = "replaces Orbax's commit or its idea of a path in GCS by a mock"
_CHUNKS = "compares chunks with those that Orbax makes"
_CHUNK_TESTS = ("*::test_restore?", "*flax_model?")
_CLOCK = "stops the clock of Orbax's module"

INTERNAL: list[tuple[str, str, str]] = [
    ("*", "object has no attribute '_", "calls a private method or reads a private attribute"),
    ("*", "is not an instance of <class 'orbax", "reads the private checkpointer's class"),
    ("*", '" does not match "', "matches the words of Orbax's errors, where ours raises another"),
    ("*max_to_keep_zero_other*", "Expected, but missing", _CLOCK),
    ("*init_telemetry*", "record_scalar", "counts Orbax's own telemetry"),
    (
        "*_logger",
        "^IndexError: list index out of range$",
        "reads the entries of Orbax's step logger",
    ),
    ("*slow_save_logs_warning", "no logs of level", "slows a private callback, reads Orbax's log"),
    ("*async_finalize", _FALSE, _FILES),
    ("*save_root_metadata", _FALSE, _FILES),
    ("*save_step_metadata", "^AssertionError: unexpectedly None$", _FILES),
    ("*custom_metadata_with_metadata_store", "^AssertionError$", _FILES),
    ("*save_gcs_with_unfinalized*", _FALSE, _COMMIT),
    ("*save_restore_gcs*", _FALSE, _COMMIT),
    ("*finalize_preemption*", _OTHER_RECORD, _COMMIT),
    ("*save_preempted_mock*", f"{_DAMAGED}|{_OTHER_RECORD}", _COMMIT),
    ("*removes_old_saves_time_interval*", "Expected, but missing", _CLOCK),
    *((name, _TRUE, _FILES) for name in ("*disable*", "*non_ocdbt", "*temp*", "*temporary*")),
    *((name, _FALSE, _FILES) for name in ("*save_format", "PyTree*finalize")),
    ("*save_main?", "^AssertionError: True != False$", _FILES),
    ("*data_file_size*", "not less than or equal to", _FILES),
    ("*metadata_name*", "custom_zarray should exist", _FILES),
    ("*separate_folder?", r"^AssertionError: \[\] has length of 0", _FILES),
    ("*check_zarray", "^AssertionError: FileNotFoundError not raised$", _FILES),
    ("*no_metadata_file", "pytree structure error", "deletes a file, which here is a link to one"),
    ("*only_aggregation", "StepNotFoundError", "writes the file of an older Flax by itself"),
    *((name, "ArrayMetadata : .* != ArrayMetadata : ", _CHUNKS) for name in _CHUNK_TESTS),
    ("*write_shape_in*", "Arrays are not equal|\\['write_shape'\\]", _CHUNKS),
    ("*pinned_host_transfer?", "^AssertionError: 0 not greater than 0$", "counts calls of Orbax"),
    ("*local_registry", _NOT_RAISED, "gives the handler a registry of types of leaves"),
    ("*missing_array_metadata*", _NOT_RAISED, "replaces a part of Orbax by a mock"),
    ("*finalize_metric", "background_item_finalize_secs", "counts Orbax's own telemetry"),
    ("*incorrect_args?", _NOT_RAISED, "expects one handler to know of all folders"),
    ("*not_dict_raises*", _NOT_RAISED, "makes a handler that saves nothing"),
    ("*no_save?", _NO_STEPS, "asks a folder without steps for a step's metadata"),
    ("*after_step_metadata_write", _NO_STEPS, "writes the file of a step's metadata by itself"),
    ("*missing_metadata_file", "'datasets' not found in", "puts files of its own beside the items"),
]
"""The reason is what the test looks at."""

REFUSED: list[tuple[str, str, str]] = [
    ("*", "refused: a tree that is one leaf:", "A tree that is one leaf, as v1 can save it"),
    ("*", "refused: trees that nothing describes:", "or lack the description of an item"),
]
"""Of folders that are not imported: the reason is a part of docs/howto/adopt.md."""
