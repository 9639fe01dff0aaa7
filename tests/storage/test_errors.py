import copy
import errno

import aiohttp
import pytest
import tensorstore as ts
from gcsfs.retry import HttpError

from cairn import (
    CorruptionError,
    NotFoundError,
    PreconditionFailedError,
    StepNotFoundError,
    StorageError,
    StoreFullError,
    StoreUnavailableError,
    TreeMismatchError,
)
from cairn.storage import errors
from cairn.storage.errors import translate_error


def test_message_says_where_what_was_expected_what_was_found_and_what_to_do():
    error = StepNotFoundError(
        "no such step",
        path="gs://bucket/run",
        expected="step 7",
        found="steps 1, 2",
        next_step="Choose a listed step.",
    )
    assert str(error) == (
        "no such step: gs://bucket/run: expected step 7, found steps 1, 2. Choose a listed step."
    )
    assert (error.path, error.expected, error.found) == ("gs://bucket/run", "step 7", "steps 1, 2")
    assert error.next_step == "Choose a listed step."


FUNCTIONS = {"as_no_answer", "translate_error", "unconfirmed_change"}


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - FUNCTIONS))
def test_every_error_is_a_storage_error_with_parts_and_survives_copying(name):
    kind = getattr(errors, name)
    error = kind("what", path="p", expected="e", found="f", next_step="Do it.")
    assert isinstance(error, StorageError)
    assert str(error) == "what: p: expected e, found f. Do it."
    twin = copy.copy(error)
    assert (type(twin), str(twin), twin.__dict__) == (kind, str(error), error.__dict__)


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - FUNCTIONS))
def test_the_drawn_tree_names_every_error(name):
    assert name in errors.__doc__


def test_tree_mismatch_lists_every_problem():
    error = TreeMismatchError("trees differ", path="p", problems=["a: missing", "b: (1,) != (2,)"])
    assert error.problems == ("a: missing", "b: (1,) != (2,)")
    assert "a: missing" in str(error)
    assert "b: (1,) != (2,)" in str(error)


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StoreFullError),
        (OSError(errno.EDQUOT, "Quota"), StoreFullError),
        (OSError(errno.EFBIG, "File too large"), StoreFullError),
        (OSError(errno.EACCES, "Permission denied"), StoreUnavailableError),
        (OSError(errno.EROFS, "Read-only"), StoreUnavailableError),
        (OSError(errno.EIO, "Input/output error"), StoreUnavailableError),
        (OSError(errno.EMFILE, "Too many open files"), StoreUnavailableError),
        (ValueError("UNKNOWN: a/b: Input/output error [OS error 5: EIO]"), StoreUnavailableError),
        (FileNotFoundError("gone"), NotFoundError),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), NotFoundError),
        (FileExistsError("https://store/o"), PreconditionFailedError),
        (TimeoutError("slow"), StoreUnavailableError),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), StoreUnavailableError),
        (aiohttp.ClientConnectionError("cut"), StoreUnavailableError),
        (aiohttp.ServerDisconnectedError(), StoreUnavailableError),
        (HttpError({"code": 404, "message": "gone"}), NotFoundError),
        (HttpError({"code": 401, "message": "who"}), StoreUnavailableError),
        (HttpError({"code": 412, "message": "changed"}), PreconditionFailedError),
        (HttpError({"code": 429, "message": "slow down"}), StoreUnavailableError),
        (HttpError({"code": 503, "message": "later"}), StoreUnavailableError),
        (HttpError({"code": 507, "message": "full"}), StoreFullError),
        (OSError("Forbidden: https://store/o\nno"), StoreUnavailableError),
        (OSError("Forbidden: https://store/o\nThe quota is exceeded"), StoreFullError),
        (ValueError("ABORTED: all tries failed [http_response_code='503']"), StoreUnavailableError),
        (ValueError("INTERNAL: no room [http_response_code='507']"), StoreFullError),
        (ValueError("RESOURCE_EXHAUSTED: out of it"), StoreFullError),
        (ValueError("NOT_FOUND: not there"), NotFoundError),
        (ValueError("PERMISSION_DENIED: no"), StoreUnavailableError),
        (ValueError("DEADLINE_EXCEEDED: late"), StoreUnavailableError),
        (ValueError("DATA_LOSS: bits"), CorruptionError),
        (ValueError("INTERNAL: No space left on device [os_error_code='28']"), StoreFullError),
        (ValueError("INTERNAL: File too large [os_error_code='27']"), StoreFullError),
        (RuntimeError("what is this"), StorageError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:40],
)
def test_foreign_errors_become_ours_and_name_the_path(foreign, ours):
    error = translate_error(foreign, path="gs://bucket/run/x")
    assert type(error) is ours
    assert error.path == "gs://bucket/run/x"
    assert error.found


def test_a_full_store_tells_which_limit_was_hit():
    assert translate_error(OSError(errno.EFBIG, "too large"), path="p").errno == errno.EFBIG
    assert translate_error(ValueError("RESOURCE_EXHAUSTED: x"), path="p").errno == errno.ENOSPC


def test_the_cause_inside_a_wrapping_error_is_found():
    outer = RuntimeError("the save failed")
    outer.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert type(translate_error(outer, path="p")) is StoreFullError


def test_our_own_errors_pass_unchanged():
    error = StepNotFoundError("no", path="here")
    assert translate_error(error, path="there") is error


def test_tensorstore_statuses_look_as_the_map_expects(tmp_path):
    (tmp_path / "blocked").write_text("a file where a folder should be")
    store = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    with pytest.raises(ValueError, match=r"^[A-Z_]+: .*\[os_error_code='20'\]") as caught:
        store.write("blocked/x", b"1").result()
    assert type(translate_error(caught.value, path="p")) is NotFoundError
