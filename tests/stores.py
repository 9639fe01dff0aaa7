"""Fixtures: the stores that tests run on."""

import itertools

import pytest

from cairn import ObjectStore, StoreURI, parse_uri
from tests.storage.copies import Copies

_NUMBERS = itertools.count(1)


@pytest.fixture(params=["file", "gcs"])
def root_uri(request, tmp_path) -> StoreURI:
    """An empty folder in each kind of store that holds checkpoints."""
    if request.param == "file":
        return parse_uri(tmp_path / "root")
    return parse_uri(request.getfixturevalue("gcs").bucket_uri) / "root"


@pytest.fixture(params=["file", "memory", "gcs"])
def objects(request, tmp_path) -> ObjectStore:
    """An empty object store of each kind."""
    if request.param == "file":
        return ObjectStore.open(tmp_path / "run")
    if request.param == "memory":
        return ObjectStore.open(f"memory://test-{next(_NUMBERS)}/run")
    return ObjectStore.open(f"{request.getfixturevalue('gcs').bucket_uri}/run")


@pytest.fixture(scope="session")
def copies(request, tmp_path_factory) -> Copies:
    """Runs that many tests begin with."""
    folder = tmp_path_factory.mktemp("made-once")
    return Copies(folder, lambda: request.getfixturevalue("gcs_server"))
