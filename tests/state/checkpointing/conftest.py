"""One kind of store, and of device, for each test in `make test`; all kinds in `make faults`.

What a store does is held by `tests/storage/store/`; here one test after another meets each kind.
"""

from zlib import crc32

import pytest

from cairn import StoreURI, parse_uri
from tests.faults.report import is_long

STORES = ("file", "gcs")
KINDS = {"root_uri": STORES, "accelerator": ("transfers", "pinned")}
"""Fixture -> what it may be."""


def pytest_generate_tests(metafunc):
    marks = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    for name, kinds in KINDS.items():
        if name in metafunc.fixturenames and not any(name in mark for mark in marks):
            one = kinds[crc32(metafunc.function.__name__.encode()) % len(kinds)]
            metafunc.parametrize(name, kinds if is_long() else [one], indirect=True)


@pytest.fixture
def root_uri(request, tmp_path) -> StoreURI:
    """An empty folder in a store that holds checkpoints."""
    if request.param == "file":
        return parse_uri(tmp_path / "root")
    return parse_uri(request.getfixturevalue("gcs").bucket_uri) / "root"
